"""The root file system of an image, made from the list that an install box left. That list is hostile input.

Folders are made here, one after the other, in a folder that no other process uses; links are made last and never
followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringfence.core.errors import Unavailable
from ringfence.core.quoting import quoted

_MAX_ENTRIES = 300_000
_LONGEST_NAME = 255
_LONGEST_PATH = 3500
_MAX_LINKS = 40


def laid_out(listing: Mapping[str, Any], files: Path, into: Path) -> None:
    """Make the tree of a list in a new folder; contents are moved there from numbered files. Raises Unavailable."""
    entries = listing.get("entries")
    if not isinstance(entries, list) or len(entries) > _MAX_ENTRIES:
        raise _bad("it has more entries than can be kept")
    _make(into)
    folders = {""}
    links = []
    kept = dict[int, Path]()
    for path, kind, executable, what in sorted(map(_entry, entries), key=lambda entry: entry[0]):
        above = path.rpartition("/")[0]
        if above not in folders:
            raise _bad(f"{quoted(path)} lies in what is no folder")
        if kind == "folder":
            folders.add(path)
            _make(into / path)
        elif kind == "link":
            links.append((path, what))
        else:
            _file(files, into / path, int(what), executable, kept)
    for path, target in links:
        try:
            os.symlink(target, into / path)
        except OSError as problem:
            raise _bad(f"{quoted(path)} cannot be made: {problem.strerror}") from None


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o755)
        path.chmod(0o755)  # whatever our umask says
    except OSError as problem:
        raise _bad(f"a folder cannot be made: {problem.strerror}") from None


def _entry(entry: Any) -> tuple[str, str, bool, Any]:
    """Path, kind, whether it is executable, and the number of its contents or the target of the link."""
    if not isinstance(entry, list) or len(entry) != 4 or not isinstance(entry[0], str):
        raise _bad("an entry is none")
    path, kind, executable, what = entry
    parts = path.split("/")
    if not _is_path(path) or any(part in ("", ".", "..") or len(part.encode()) > _LONGEST_NAME for part in parts):
        raise _bad(f"{quoted(path)} is no name")
    fits = {"folder": True, "file": type(what) is int, "link": isinstance(what, str) and bool(what) and _is_path(what)}
    if not isinstance(kind, str) or not fits.get(kind):
        raise _bad(f"{quoted(path)} is nothing that can be kept")
    return path, kind, executable is True, what


def _is_path(text: str) -> bool:
    try:
        return "\0" not in text and len(text.encode()) <= _LONGEST_PATH
    except UnicodeEncodeError:
        return False


def _file(files: Path, place: Path, number: int, executable: bool, kept: dict[int, Path]) -> None:
    """The first entry with some contents gets the file; later ones are hard links to it."""
    source = files / str(number)
    try:
        if number in kept:
            os.link(kept[number], place, follow_symlinks=False)
            return
        if not stat.S_ISREG(os.stat(source, follow_symlinks=False).st_mode):
            raise _bad(f"{quoted(place.name)} has no contents")
        os.rename(source, place)
        os.chmod(place, 0o755 if executable else 0o644)
    except OSError as problem:
        raise _bad(f"{quoted(place.name)} cannot be kept: {problem.strerror}") from None
    kept[number] = place


def _bad(why: str) -> Unavailable:
    return Unavailable("install_failed", f"an install box left an image that cannot be kept: {why}")


# ── Lookups, as the box will see the tree ─────────────────────────────────────────────────────────


def program(tree: Path, word: str, path: str, cwd: str) -> str | None:
    """The absolute path within the image of the program that its command names; None if there is none."""
    places = [word] if word.startswith("/") else [f"{cwd}/{word}"] if "/" in word else _on(path, word)
    for place in places:
        found = inside(tree, place)
        if found is not None and stat.S_ISREG(found.st_mode) and found.st_mode & 0o100:
            return os.path.normpath(place)
    return None


def _on(path: str, word: str) -> list[str]:
    return [f"{folder}/{word}" for folder in path.split(":") if folder.startswith("/")]


def inside(tree: Path, path: str) -> os.stat_result | None:
    """What a path leads to, with the tree as its root."""
    found = resolved(tree, path)
    try:
        return None if found is None else os.lstat(f"{tree}{found}")
    except OSError:
        return None


def resolved(tree: Path, path: str) -> str | None:
    """Resolve a path, link by link, with the tree as its root: never out of it. None where it leads nowhere."""
    found = ""
    links = 0
    rest = list(_parts(path))
    while rest:
        part = rest.pop()
        if part == "..":
            found = found.rpartition("/")[0]
            continue
        step = f"{found}/{part}"
        try:
            seen = os.lstat(f"{tree}{step}")
            if not stat.S_ISLNK(seen.st_mode):
                if rest and not stat.S_ISDIR(seen.st_mode):
                    return None
                found = step
                continue
            target = os.readlink(f"{tree}{step}")
        except OSError:
            return None
        links += 1
        if links > _MAX_LINKS:
            return None
        found = "" if target.startswith("/") else found
        rest += _parts(target)
    return found


def _parts(path: str) -> Iterator[str]:
    return reversed([part for part in path.split("/") if part not in ("", ".")])
