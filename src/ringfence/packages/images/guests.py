"""Images as roots of guests: containers and machines whose first process is ours.

That process needs an interpreter that an image may not have, or that is hostile, while it has rights that no program
gets. So such a root is the image with this host's own interpreter beside it, in a folder of its own, and with the few
folders and files that every box has. It is made of hard links to the trees of the cache, which were checked: once for
an image, in the time that its names take, and with no room for any contents. An entry of the image with one of our
names (a file, a link that leads elsewhere) is left out, and no link of it is followed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ringfence.core.errors import Unavailable
from ringfence.packages.cache import PackageCache, Tree
from ringfence.packages.images.host import contents, elf

TOOLS = ".ringfence"
"""Where this host's interpreter lies in such a root."""
_FOLDERS = ("etc", "dev", "proc", "sys", "run", "var", "home", *contents.WORLD_WRITABLE, TOOLS)
_FILES = {**contents.WRITTEN, "etc/hostname": "box\n", "etc/ld.so.preload": ""}
"""The last: what an image names there would be loaded into our own interpreter."""


class _Entry(NamedTuple):
    source: str = ""
    """The file or link that it is one with; empty: it is a folder, or one of our files."""
    number: int = 0
    """Of its inode."""


def joined(cache: PackageCache, image: Path, tools: Tree) -> Path:
    """The root of guests with this image, which is a tree of the cache. Raises Unavailable."""
    if cache.digest_of(image) is None:
        raise Unavailable("no_image", f"{image} cannot be the root of such a box: it is no tree of the cache")
    place = image.parent / f"guest-{tools.digest.removeprefix('sha256:')[:24]}"
    planned = _planned(image, tools.folder)
    try:
        if not place.is_dir():
            _make(planned, place)
        elif _found(place) != {path: entry.number for path, entry in planned.items()}:
            text = f"the root of an image is not as it was made; remove {place}"
            raise Unavailable("package_altered", text)
    except OSError as problem:
        raise Unavailable(
            "no_image", f"an image cannot be made a root: {problem.filename}: {problem.strerror}"
        ) from None
    return place


def starts(tools: Path, python: str) -> tuple[str, ...]:
    """The words that start the interpreter of this host in such a root, by its own loader and libraries. Raises
    OSError."""
    program = f"/{TOOLS}{python}"
    needs = elf.needs(f"{tools}{python}")
    if needs is None or not needs.loader:
        return (program,)
    usual = [*sorted(tools.glob("usr/lib/*")), *(tools / "usr" / name for name in ("lib", "lib64"))]
    found = [each for each in usual if any((each / name).is_file() for name in needs.libraries)]
    folders = ":".join(f"/{TOOLS}/{each.relative_to(tools)}" for each in found)
    loader = f"/{TOOLS}{needs.loader}"
    cached = () if os.path.basename(loader).startswith("ld-musl") else ("--inhibit-cache",)
    return (loader, *cached, "--library-path", folders, program)


def _planned(image: Path, tools: Path) -> dict[str, _Entry]:
    """What the root is to have, by paths in it; a folder comes before what is in it."""
    ours = dict.fromkeys((*_FOLDERS, *_FILES), _Entry())
    planned = {each: ours[each] for each in _FOLDERS}
    for path, entry, folder in _entries(image):
        hidden = path in _FILES or path == TOOLS or (path in ours and not folder)
        if hidden or _within_hidden(path, planned):
            continue
        planned[path] = ours.get(path, entry)
    planned |= {path: ours[path] for path in _FILES}
    planned |= {f"{TOOLS}/{path}": entry for path, entry, _ in _entries(tools)}
    return planned


def _within_hidden(path: str, planned: dict[str, _Entry]) -> bool:
    above = path.rpartition("/")[0]
    return above.partition("/")[0] == TOOLS or (above != "" and above not in planned)


def _entries(root: Path) -> Iterator[tuple[str, _Entry, bool]]:
    """Everything below, and whether it is a folder."""
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(f"{root}/{inside}") as entries:
            for entry in entries:
                path = f"{inside}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    yield path, _Entry(), True
                    waiting.append(f"{path}/")
                else:
                    yield path, _Entry(entry.path, entry.inode()), False


def _make(planned: dict[str, _Entry], place: Path) -> None:
    part = place.with_name(f".{secrets.token_hex(8)}")
    part.mkdir(mode=0o755)
    try:
        part.chmod(0o755)
        for path, entry in planned.items():
            to = part / path
            if entry.source:
                os.link(entry.source, to, follow_symlinks=False)
            elif path in _FILES:
                to.write_text(_FILES[path])
                to.chmod(0o644)
            else:
                to.mkdir(mode=0o755)
                to.chmod(0o755)
        try:
            os.rename(part, place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _found(place: Path) -> dict[str, int]:
    return {path: 0 if path in _FILES else entry.number for path, entry, _ in _entries(place)}
