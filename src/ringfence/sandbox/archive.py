"""Folders as tar streams: out of a workspace, and into one from an archive that nobody vouches for.

An archive goes into a folder of its own beside its place, through open folders and single names, and only when all of
it was read and found good is it moved there. Refused, with all that came before: absolute names and `..`, links that
lead out, names that go through a link, devices, pipes and what we do not know, and more than was allowed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from ringfence.box import MIB, FileFact
from ringfence.sandbox.beneath import PART, changing, full_path, open_regular_here, refusal
from ringfence.sandbox.process.acted_upon import WHY, is_acted_upon
from ringfence.sandbox.process.files import CREATE, FOLDER, acting_as, kind, opened, shown, unfit
from ringfence.sandbox.tarstream import BLOCK, Member, TarReader
from ringfence.sandbox.walking import Found, Room, Walk, is_mount, remove_entry


def leads_out(target: str, depth: int) -> bool:
    """Whether a link in a folder so deep could lead out of the tree.

    `..` may only stand first: after a name it would be followed from wherever that name leads.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not target or target.startswith("/") or "\0" in target or up > depth or ".." in parts[up:]


# ── Out ───────────────────────────────────────────────────────────────────────────────────────────


def pack_folder(folder: int, left_out: dict[str, str]) -> Iterator[bytes]:
    """The tar stream of an open folder, in the order of names; the same tree gives the same bytes."""
    room = Room()
    for found in Walk().through(folder):
        if problem := next(filter(None, map(unfit, found.parts)), None):
            left_out[_path(found)] = problem
            continue
        with suppress(FileNotFoundError):  # gone since it was listed
            yield from _packed(found, room, left_out)
    yield bytes(2 * BLOCK)


def _packed(found: Found, room: Room, left_out: dict[str, str]) -> Iterator[bytes]:
    entry = tarfile.TarInfo("/".join(found.parts))
    entry.mtime = max(0, found.info.st_mtime_ns // 10**9)
    entry.mode = stat.S_IMODE(found.info.st_mode) & 0o777
    if found.is_folder:
        entry.type = tarfile.DIRTYPE
        yield _header(entry)
    elif stat.S_ISLNK(found.info.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(found.name, dir_fd=found.folder)
        if unfit(entry.linkname) or leads_out(entry.linkname, len(found.parts) - 1):
            left_out[_path(found)] = "it is a link that leads out of the folder"
        else:
            yield _header(entry)
    elif stat.S_ISREG(found.info.st_mode):
        yield from _packed_file(found, entry, room)
    else:
        left_out[_path(found)] = f"it is {kind(found.info)}"


def _packed_file(found: Found, entry: tarfile.TarInfo, room: Room) -> Iterator[bytes]:
    try:
        descriptor = open_regular_here(found.folder, found.name)
    except PermissionError:
        raise refusal("no_permission", f"{_path(found)!r} is closed by its permissions; open it (chmod)") from None
    except FileNotFoundError:
        raise
    except OSError as problem:  # another kind of thing than it was a moment ago
        raise changing(_path(found)) from problem
    try:
        info = os.fstat(descriptor)
        room.take(descriptor, info)
        entry.size = left = info.st_size
        yield _header(entry)
        while left:
            data = os.read(descriptor, min(left, MIB))
            if not data:
                raise changing(_path(found))
            left -= len(data)
            yield data
        yield bytes(-entry.size % BLOCK)
    finally:
        os.close(descriptor)


def _header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _path(found: Found) -> str:
    return full_path(tuple(map(shown, found.parts)))


# ── In ────────────────────────────────────────────────────────────────────────────────────────────


def unpack_into(
    folder: int, owner: int | None, stream: Iterable[bytes], *, max_bytes: int, max_files: int
) -> list[FileFact]:
    """Put an archive into an open folder; its files, with paths relative to it. Raises OSError and Refused."""
    return _unpack(folder, owner, TarReader(stream, max_bytes=max_bytes, max_files=max_files), None)


def unpack_on_host(
    folder: int, stream: Iterable[bytes], *, max_bytes: int, max_files: int
) -> tuple[list[FileFact], dict[str, str]]:
    """The same into a folder of the host's, without what programs there act upon by themselves: that, and why."""
    left_out: dict[str, str] = {}
    reader = TarReader(stream, max_bytes=max_bytes, max_files=max_files)
    return _unpack(folder, None, reader, left_out), left_out


def _unpack(folder: int, owner: int | None, reader: TarReader, left_out: dict[str, str] | None) -> list[FileFact]:
    stage = f"{PART}{secrets.token_hex(8)}.part"
    with acting_as(owner):
        os.mkdir(stage, 0o700, dir_fd=folder)
    try:
        with opened(stage, FOLDER, folder) as staged:
            facts: dict[str, FileFact] = {}
            for member in reader.members():
                if left_out is None or not _withheld(member, left_out):
                    _put(staged, owner, member, reader, facts)
            _check_merge(staged, folder)
            _merge(staged, folder, owner)
    finally:
        with suppress(FileNotFoundError):
            remove_entry(folder, stage, owner)
    return list(facts.values())


def _withheld(member: Member, left_out: dict[str, str]) -> bool:
    """Of what lies in another, the outer is named."""
    last = len(member.parts) - 1
    for at, name in enumerate(member.parts):
        if is_acted_upon(name, folder=at < last or member.kind == "dir"):
            left_out["/".join(member.parts[: at + 1])] = WHY
            return True
    source = [part for part in member.target.split("/") if part not in ("", ".")] if member.kind == "again" else []
    if any("/".join(source[: at + 1]) in left_out for at in range(len(source))):
        left_out["/".join(member.parts)] = "it is another name for a file that was left out"
        return True
    return False


def _put(staged: int, owner: int | None, member: Member, reader: TarReader, facts: dict[str, FileFact]) -> None:
    path = "/".join(member.parts)
    if member.kind == "dir":
        with _folder(staged, member.parts, owner) as made:
            os.fchmod(made, member.mode)
        return
    with _folder(staged, member.parts[:-1], owner) as folder:
        name = member.parts[-1]
        facts.pop(path, None)
        try:
            os.unlink(name, dir_fd=folder)  # a later member of the same name counts
        except FileNotFoundError:
            pass
        except OSError:
            raise refusal("bad_archive", f"the archive has {path!r} both as a folder and as a file") from None
        if member.kind == "file":
            facts[path] = _put_file(folder, owner, member, reader)
        elif member.kind == "link":
            if leads_out(member.target, len(member.parts) - 1):
                text = f"the archive's link {path!r} leads out of it, to {member.target!r}; leave it out"
                raise refusal("bad_archive", text)
            with acting_as(owner):
                os.symlink(member.target, name, dir_fd=folder)
        else:
            facts[path] = _put_again(staged, owner, member, folder, facts)


def _put_file(folder: int, owner: int | None, member: Member, reader: TarReader) -> FileFact:
    with acting_as(owner):
        target = os.open(member.parts[-1], CREATE, 0o600, dir_fd=folder)
    try:
        digest = hashlib.sha256()
        for piece in reader.content():
            digest.update(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(target, rest) :]
        os.fchmod(target, member.mode)
        os.utime(target, (member.modified, member.modified))
    finally:
        os.close(target)
    return FileFact("/".join(member.parts), member.size, digest.hexdigest())


def _put_again(staged: int, owner: int | None, member: Member, folder: int, facts: dict[str, FileFact]) -> FileFact:
    """Another name for a file that the archive had before."""
    path = "/".join(member.parts)
    source = tuple(part for part in member.target.split("/") if part not in ("", "."))
    fact = facts.get("/".join(source))
    if fact is None:
        text = f"the archive's {path!r} is another name for {member.target!r}, which is no earlier file of it"
        raise refusal("bad_archive", text)
    with _folder(staged, source[:-1], owner) as there, acting_as(owner):
        os.link(source[-1], member.parts[-1], src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
    return FileFact(path, fact.bytes, fact.sha256)


@contextmanager
def _folder(staged: int, parts: tuple[str, ...], owner: int | None) -> Iterator[int]:
    """A folder of the archive, made where it did not come first. None of these is a link."""
    folder = os.open(".", FOLDER, dir_fd=staged)
    try:
        for part in parts:
            with suppress(FileExistsError), acting_as(owner):
                os.mkdir(part, 0o755, dir_fd=folder)
            try:
                below = os.open(part, FOLDER, dir_fd=folder)
            except OSError:
                text = f"the archive's {'/'.join(parts)!r} goes through a link or a file; leave it out"
                raise refusal("bad_archive", text) from None
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _check_merge(staged: int, folder: int, inside: tuple[str, ...] = ()) -> None:
    """Find out before anything is moved whether files and folders would be in each other's place."""
    for name in os.listdir(staged):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=staged, follow_symlinks=False).st_mode)
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = "/".join((*inside, name))
        if is_folder != stat.S_ISDIR(there.st_mode):
            raise refusal("exists", f"{path!r} is there already, and is {_other(is_folder)}; remove it first")
        if is_folder:
            with opened(name, FOLDER, staged) as below, opened(name, FOLDER, folder) as target:
                if is_mount(folder, there) and os.listdir(below):
                    text = f"{path!r} is a mount of the box, which an archive cannot go into; leave it out"
                    raise refusal("mounted", text)
                _check_merge(below, target, (*inside, name))


def _other(is_folder: bool) -> str:
    return "no folder" if is_folder else "a folder"


def _merge(staged: int, folder: int, owner: int | None) -> None:
    for name in os.listdir(staged):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=staged, follow_symlinks=False).st_mode)
        if is_folder:
            with suppress(FileNotFoundError), opened(name, FOLDER, folder) as target:
                with opened(name, FOLDER, staged) as below:
                    _merge(below, target, owner)
                continue
        with acting_as(owner):
            os.rename(name, name, src_dir_fd=staged, dst_dir_fd=folder)
