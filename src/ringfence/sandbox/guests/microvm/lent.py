"""What belongs to the host and is to be seen in a machine: copies, sent as an archive."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringfence.core.box import Mount
from ringfence.core.errors import Unavailable

MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 20_000


def packed(input_: Path | None, mounts: Sequence[Mount]) -> tuple[list[list[str]], bytes]:
    """Names in the archive with where each is seen, and the archive. Raises Unavailable where it is too much."""
    lent = [(str(input_), "/workspace/input")] if input_ is not None else []
    lent += [(each.host, each.at) for each in mounts]
    if not lent:
        return [], b""
    whole = io.BytesIO()
    left = [MOST_BYTES, MOST_FILES]
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, (host, at) in enumerate(lent):
            for path, name in _listed(host, str(number)):
                _add(archive, path, name, at, left)
    return [[str(number), at] for number, (_, at) in enumerate(lent)], whole.getvalue()


def _listed(host: str, name: str) -> Iterator[tuple[str, str]]:
    yield host, name
    if os.path.isdir(host):
        for place, folders, files in os.walk(host):
            for each in sorted((*folders, *files)):
                path = os.path.join(place, each)
                yield path, f"{name}/{os.path.relpath(path, host)}"


def _add(archive: tarfile.TarFile, path: str, name: str, at: str, left: list[int]) -> None:
    try:
        state = os.stat(path) if "/" not in name else os.lstat(path)
        if stat.S_ISLNK(state.st_mode):
            kind, size = tarfile.SYMTYPE, 0
        elif stat.S_ISDIR(state.st_mode):
            kind, size = tarfile.DIRTYPE, 0
        elif stat.S_ISREG(state.st_mode):
            kind, size = tarfile.REGTYPE, state.st_size
        else:
            return
        left[0] -= size
        left[1] -= 1
        if min(left) < 0:
            most = f"{MOST_BYTES // 1024 // 1024} MB in {MOST_FILES} files"
            text = f"a machine sees copies of the host's folders, of {most} at most: {at} is too much"
            text += "; name less, or use oci"
            raise Unavailable("not_supported", text)
        entry = tarfile.TarInfo(name)
        entry.type, entry.size, entry.mode = kind, size, stat.S_IMODE(state.st_mode) & 0o777
        entry.mtime = int(state.st_mtime)
        if kind == tarfile.SYMTYPE:
            entry.linkname = os.readlink(path)
        if kind != tarfile.REGTYPE:
            archive.addfile(entry)
            return
        with open(path, "rb") as file:
            archive.addfile(entry, file)
    except OSError as problem:
        raise Unavailable("no_box", f"{at} cannot be copied into a machine: {problem}") from None
