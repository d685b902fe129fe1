"""Files that go into a box, from the host or from memory, and their checks before anything runs."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ringfence.core.box import FileFact, Input
from ringfence.core.quoting import quoted
from ringfence.core.system import write_all
from ringfence.sandbox.files.collect import DEEPEST, LONGEST_PATH, Copy, LeftOut
from ringfence.sandbox.files.paths import (
    CREATE,
    FOLDER,
    READ,
    acting_as,
    kind,
    open_without_links,
    opened,
    shown,
    unfit,
)

INPUT = "/workspace/input"


def check_inputs(inputs: tuple[Input, ...], output: Path | None) -> None:
    """Raise ValueError for inputs that cannot be read, and for an output folder that cannot be written."""
    names: set[tuple[str, ...]] = set()
    for item in inputs:
        names.add(_parts(item.name))
        if isinstance(item.source, Path):
            with _source(item.source, links=item.links):
                pass
    if len(names) < len(inputs) or any(parts[:depth] in names for parts in names for depth in range(1, len(parts))):
        raise ValueError("two inputs have the same name, or one has the name of a folder of another")
    if output is not None:
        _check_output(output)


def put_inputs(root_fd: int, inputs: tuple[Input, ...], owner: int | None = None) -> tuple[FileFact, ...]:
    """Write the inputs below an open, empty folder that nothing else writes to; as `owner`, where that is another user.

    Host folders are copied with their contents. Raises ValueError for anything that cannot be copied as it is.
    """
    facts: list[FileFact] = []
    with opened(".", FOLDER, root_fd) as root:
        for item in inputs:
            parts = _parts(item.name)
            try:
                with _made(root, parts[:-1], owner) as folder:
                    if isinstance(item.source, bytes):
                        facts.append(_put_bytes(item.source, folder, parts, owner))
                    else:
                        with _source(item.source, links=item.links) as source:
                            _put(source, folder, parts, facts, owner)
            except LeftOut as why:
                raise ValueError(f"input {item.name!r}: {why}") from why
            except FileExistsError as problem:
                raise ValueError(f"input {item.name!r}: there are two of this name") from problem
            except OSError as problem:
                raise ValueError(f"input {item.name!r} cannot be put into the box: {problem.strerror}") from problem
    return tuple(sorted(facts, key=lambda fact: fact.path))


def make_folder(root_fd: int, path: str, owner: int | None) -> None:
    """Make an empty folder, with those above it, below an open folder that nothing else writes to."""
    with opened(".", FOLDER, root_fd) as root, _made(root, _parts(path), owner):
        pass


def _parts(name: str) -> tuple[str, ...]:
    """The folders and the file of an input's name."""
    parts = tuple(name.split("/"))
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"input name {name!r} must be a relative path without empty parts, '.' and '..'")
    if problem := next(filter(None, map(unfit, parts)), None):
        raise ValueError(f"input name {name!r} cannot be used: {problem}")
    if len(parts) > DEEPEST or len(name.encode()) > LONGEST_PATH or any(len(part.encode()) > 255 for part in parts):
        raise ValueError(f"input name {quoted(name)} is too long or has too many folders")
    return parts


def open_input(path: Path, *, links: bool) -> int:
    """A descriptor of a host file or folder, for reading. Raises OSError."""
    return os.open(path, READ & ~os.O_NOFOLLOW) if links else open_without_links(str(path), READ)


@contextmanager
def _source(path: Path, *, links: bool) -> Iterator[int]:
    """A host file or folder, opened."""
    if "\0" in str(path):
        raise ValueError(f"input {str(path)!r} has a NUL in its path")
    try:
        found = os.stat(path, follow_symlinks=links)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ValueError(f"input {str(path)!r} is {kind(found)}, neither a file nor a folder")
        source = open_input(path, links=links)
    except FileNotFoundError as problem:
        raise ValueError(f"input {str(path)!r} does not exist") from problem
    except OSError as problem:
        if problem.errno == errno.ELOOP and not links:
            raise ValueError(f"input {str(path)!r} leads through a link by now, which is not followed") from problem
        raise ValueError(f"input {str(path)!r} cannot be read: {problem.strerror}") from problem
    try:
        yield source
    finally:
        os.close(source)


def _put(source: int, folder: int, parts: tuple[str, ...], facts: list[FileFact], owner: int | None) -> None:
    """Copy an open file or folder of the host, with its contents, to the last of these parts in `folder`."""
    found = os.fstat(source)
    if stat.S_ISREG(found.st_mode):
        copy = Copy(source, None)
        with _created(parts[-1], folder, owner) as target:
            copy.run(target)
            # The box's user is not ours; the mode must not depend on our umask.
            os.fchmod(target, 0o755 if found.st_mode & stat.S_IXUSR else 0o644)
        facts.append(FileFact("/".join((INPUT, *parts)), copy.size, copy.digest.hexdigest()))
    elif stat.S_ISDIR(found.st_mode):
        with _made(folder, parts[-1:], owner) as target:
            for name in sorted(os.listdir(source), key=os.fsencode):
                below = (*parts, name)
                if problem := unfit(name) or (len(below) > DEEPEST and f"it is deeper than {DEEPEST} folders"):
                    raise LeftOut(f"{'/'.join(map(shown, below))}: {problem}")
                entry = os.stat(name, dir_fd=source, follow_symlinks=False)
                if not (stat.S_ISREG(entry.st_mode) or stat.S_ISDIR(entry.st_mode)):
                    raise LeftOut(f"{'/'.join(below)}: it is {kind(entry)}, which cannot be an input")
                with opened(name, READ, source) as inner:
                    _put(inner, target, below, facts, owner)
    else:
        raise LeftOut(f"{'/'.join(parts)}: it is {kind(found)}, which cannot be an input")


def _put_bytes(data: bytes, folder: int, parts: tuple[str, ...], owner: int | None) -> FileFact:
    with _created(parts[-1], folder, owner) as target:
        write_all(target, data)
        os.fchmod(target, 0o644)
    return FileFact("/".join((INPUT, *parts)), len(data), hashlib.sha256(data).hexdigest())


@contextmanager
def _created(name: str, folder: int, owner: int | None) -> Iterator[int]:
    with acting_as(owner):
        target = os.open(name, CREATE, 0o600, dir_fd=folder)
    try:
        yield target
    finally:
        os.close(target)


@contextmanager
def _made(root: int, parts: tuple[str, ...], owner: int | None) -> Iterator[int]:
    """The folder below `root` with this path, made where it is missing."""
    folder = os.open(".", FOLDER, dir_fd=root)
    try:
        for part in parts:
            with suppress(FileExistsError), acting_as(owner):
                os.mkdir(part, dir_fd=folder)
            below = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
            os.fchmod(folder, 0o755)
        yield folder
    finally:
        os.close(folder)


def _check_output(output: Path) -> None:
    if "\0" in str(output):
        raise ValueError(f"output folder {str(output)!r} has a NUL in its path")
    there = output
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"output folder {str(output)!r} cannot be used: {str(there)!r} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output folder {str(output)!r} cannot be written")
