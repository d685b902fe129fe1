"""What belongs to the host and is to be seen in a machine: copies, sent as an archive.

Another box may write to the same folder meanwhile: each is opened once, as the mount that was checked, and nothing in
it is reached by a name that could lead elsewhere by now.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

from ringfence.core.box import Mount
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process.mounting import Placed
from ringfence.sandbox.process.zygote import kernel

MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 20_000
_DEEPEST = 256
"""Each folder on the way is held open."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def packed(
    input_: Path | None, mounts: Sequence[Mount], placed: Sequence[Placed] = ()
) -> tuple[list[list[str]], bytes]:
    """Names in the archive with where each is seen, and the archive. Raises Unavailable where it is too much, or no
    longer what was `placed`."""
    lent = [(os.path.realpath(input_), "/workspace/input")] if input_ is not None else []
    lent += [(each.host, each.at) for each in mounts]
    if not lent:
        return [], b""
    identities = {each.at: each.identity for each in placed}
    whole = io.BytesIO()
    left = [MOST_BYTES, MOST_FILES]
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number, (host, at) in enumerate(lent):
            try:
                _add_all(archive, host, str(number), at, identities.get(at), left)
            except OSError as problem:
                raise Unavailable("no_box", f"{at} cannot be copied into a machine: {problem}") from None
    return [[str(number), at] for number, (_, at) in enumerate(lent)], whole.getvalue()


def _add_all(
    archive: tarfile.TarFile, host: str, name: str, at: str, identity: tuple[int, ...] | None, left: list[int]
) -> None:
    top = kernel.open_path(host)
    try:
        seen = os.fstat(top)
        if identity is not None and (seen.st_dev, seen.st_ino, seen.st_uid, seen.st_gid) != identity:
            raise Unavailable("no_box", f"{host} is no longer what it was a moment ago")
        if stat.S_ISREG(seen.st_mode):
            # By its descriptor: another may have its name by now.
            _add_file(archive, os.open(f"/proc/self/fd/{top}", os.O_RDONLY | os.O_CLOEXEC), name, at, left)
        if not stat.S_ISDIR(seen.st_mode):
            return
        archive.addfile(_entry(seen, name, at, left))
        for place, folders, files, descriptor in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            if place.count("/") > _DEEPEST:
                raise Unavailable("not_supported", f"{at} is too deep to be copied into a machine; use oci")
            for each in sorted((*folders, *files)):
                _add(archive, descriptor, each, os.path.normpath(f"{name}/{place}/{each}"), at, left)
    finally:
        os.close(top)


def _add(archive: tarfile.TarFile, folder: int, each: str, name: str, at: str, left: list[int]) -> None:
    found = os.stat(each, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISREG(found.st_mode):
        _add_file(archive, os.open(each, _READ, dir_fd=folder), name, at, left)
    elif stat.S_ISDIR(found.st_mode):
        archive.addfile(_entry(found, name, at, left))
    elif stat.S_ISLNK(found.st_mode):
        entry = _entry(found, name, at, left)
        entry.linkname = os.readlink(each, dir_fd=folder)
        archive.addfile(entry)


def _add_file(archive: tarfile.TarFile, descriptor: int, name: str, at: str, left: list[int]) -> None:
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            archive.addfile(_entry(found, name, at, left), file)


def _entry(found: os.stat_result, name: str, at: str, left: list[int]) -> tarfile.TarInfo:
    """Raises Unavailable where it is too much."""
    entry = tarfile.TarInfo(name)
    if stat.S_ISREG(found.st_mode):
        entry.size = found.st_size
    else:
        entry.type = tarfile.DIRTYPE if stat.S_ISDIR(found.st_mode) else tarfile.SYMTYPE
    left[0] -= entry.size
    left[1] -= 1
    if min(left) < 0:
        most = f"{MOST_BYTES // 1024 // 1024} MB in {MOST_FILES} files"
        text = f"a machine sees copies of the host's folders, of {most} at most: {at} is too much"
        text += "; name less, or use oci"
        raise Unavailable("not_supported", text)
    entry.mode = stat.S_IMODE(found.st_mode) & 0o777
    entry.mtime = int(found.st_mtime)
    return entry
