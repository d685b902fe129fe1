"""Folders as tar streams: out of a workspace, and into one from an archive that may be hostile.

An archive is unpacked into a staging folder beside its destination, through open folders and single names, and moved
into place only when all of it was read and found good. Refused as a whole: absolute names and `..`, links that lead
out, names that go through a link, devices, pipes and unknown types, and anything beyond the limits.

The stream is read block by block in bounded memory: ustar, pax and GNU long names. `tarfile` parses each header;
what follows from it is decided here, because the library's own reader trusts sizes too much: this one never seeks
backwards, and every record has an upper limit.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from ringfence.core.box import MIB, FileFact
from ringfence.core.errors import Refused
from ringfence.core.record import dataclass
from ringfence.core.system import umask, write_all
from ringfence.sandbox.files.acted_upon import WHY, is_acted_upon
from ringfence.sandbox.files.paths import (
    CREATE,
    FOLDER,
    PART,
    acting_as,
    changing,
    check_names,
    kind,
    looking_as,
    open_regular_here,
    opened,
    refusal,
    shown,
    unfit,
)
from ringfence.sandbox.files.walk import ReadBudget, Walk, WalkEntry, is_mount, remove_entry

BLOCK = tarfile.BLOCKSIZE
_LONGEST_RECORD = 64 * 1024
"""Of the names and attributes before a member."""
_LATEST = 2**33
"""Seconds; some hundred years from now."""


def leads_out(target: str, depth: int) -> bool:
    """Whether a link at this depth could lead out of the tree.

    `..` may only come first: after a name it would be resolved from wherever that name leads.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not target or target.startswith("/") or "\0" in target or up > depth or ".." in parts[up:]


# ── Out ───────────────────────────────────────────────────────────────────────────────────────────


def pack_folder(folder: int, left_out: dict[str, str], owner: int | None = None) -> Iterator[bytes]:
    """The tar stream of an open folder, sorted by name; the same tree gives the same bytes. `owner`: the user who must
    be able to read it, where that is not ours."""
    budget = ReadBudget()
    for found in Walk(owner=owner).through(folder):
        if problem := next(filter(None, map(unfit, found.parts)), None):
            left_out[_path(found)] = problem
            continue
        with suppress(FileNotFoundError):  # gone since it was listed
            yield from _packed(found, budget, left_out, owner)
    yield bytes(2 * BLOCK)


def _packed(found: WalkEntry, budget: ReadBudget, left_out: dict[str, str], owner: int | None) -> Iterator[bytes]:
    entry = tarfile.TarInfo("/".join(found.parts))
    entry.mtime = max(0, found.info.st_mtime_ns // 10**9)
    entry.mode = stat.S_IMODE(found.info.st_mode) & 0o777
    if found.is_folder:
        entry.type = tarfile.DIRTYPE
        yield member_header(entry)
    elif stat.S_ISLNK(found.info.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.readlink(found.name, dir_fd=found.folder)
        if unfit(entry.linkname) or leads_out(entry.linkname, len(found.parts) - 1):
            left_out[_path(found)] = "it is a link that leads out of the folder"
        else:
            yield member_header(entry)
    elif stat.S_ISREG(found.info.st_mode):
        yield from _packed_file(found, entry, budget, owner)
    else:
        left_out[_path(found)] = f"it is {kind(found.info)}"


def _packed_file(found: WalkEntry, entry: tarfile.TarInfo, budget: ReadBudget, owner: int | None) -> Iterator[bytes]:
    try:
        with looking_as(owner):
            descriptor = open_regular_here(found.folder, found.name)
    except PermissionError:
        raise refusal("no_permission", f"{_path(found)!r} is closed by its permissions; open it (chmod)") from None
    except FileNotFoundError:
        raise
    except OSError as problem:  # it is of another type than a moment ago
        raise changing(_path(found)) from problem
    try:
        info = os.fstat(descriptor)
        budget.take(descriptor, info)
        entry.size = left = info.st_size
        yield member_header(entry)
        while left:
            data = os.read(descriptor, min(left, MIB))
            if not data:
                raise changing(_path(found))
            left -= len(data)
            yield data
        yield bytes(-entry.size % BLOCK)
    finally:
        os.close(descriptor)


def member_header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _path(found: WalkEntry) -> str:
    """Relative to the folder that is packed."""
    return "/".join(map(shown, found.parts))


# ── In ────────────────────────────────────────────────────────────────────────────────────────────


def unpack_into(
    folder: int,
    owner: int | None,
    stream: Iterable[bytes],
    *,
    max_bytes: int,
    max_files: int,
    on_host: bool = False,
) -> list[FileFact]:
    """Unpack an archive into an open folder of a box. Returns its files, by relative paths. Where it is a folder of the
    host (`on_host`), an archive with what programs there act upon by themselves is refused. Raises OSError and
    Refused."""
    left_out: dict[str, str] | None = {} if on_host else None
    return _unpack(folder, owner, TarReader(stream, max_bytes=max_bytes, max_files=max_files), left_out, whole=True)


def unpack_on_host(
    folder: int, stream: Iterable[bytes], *, max_bytes: int, max_files: int
) -> tuple[list[FileFact], dict[str, str]]:
    """The same into a folder of the host, under our umask, except what programs there act upon by themselves. Also
    returns what was left out, and why."""
    left_out: dict[str, str] = {}
    reader = TarReader(stream, max_bytes=max_bytes, max_files=max_files, umask=umask())
    return _unpack(folder, None, reader, left_out), left_out


def _unpack(
    folder: int, owner: int | None, reader: TarReader, left_out: dict[str, str] | None, *, whole: bool = False
) -> list[FileFact]:
    stage = f"{PART}{secrets.token_hex(8)}.part"
    with acting_as(owner):
        os.mkdir(stage, 0o700, dir_fd=folder)
    try:
        with opened(stage, FOLDER, folder) as staged:
            facts: dict[str, FileFact] = {}
            for member in reader.members():
                if left_out is None or not _withheld(member, left_out):
                    _put(staged, owner, member, reader, facts)
            if whole and left_out:
                path, why = next(iter(left_out.items()))
                raise refusal("read_only", f"the archive has {path!r}, which a box may not write: {why}; leave it out")
            _check_merge(staged, folder)
            _merge(staged, folder, owner)
    finally:
        with suppress(FileNotFoundError):
            remove_entry(folder, stage, owner)
    return list(facts.values())


def _withheld(member: TarMember, left_out: dict[str, str]) -> bool:
    """Of nested ones, the outer one is named."""
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


def _put(staged: int, owner: int | None, member: TarMember, reader: TarReader, facts: dict[str, FileFact]) -> None:
    path = "/".join(member.parts)
    if member.kind == "dir":
        with _folder(staged, member.parts, owner) as made:
            os.fchmod(made, member.mode)
        return
    with _folder(staged, member.parts[:-1], owner) as folder:
        name = member.parts[-1]
        facts.pop(path, None)
        try:
            os.unlink(name, dir_fd=folder)  # the last member of a name wins
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


def _put_file(folder: int, owner: int | None, member: TarMember, reader: TarReader) -> FileFact:
    with acting_as(owner):
        target = os.open(member.parts[-1], CREATE, 0o600, dir_fd=folder)
    try:
        digest = hashlib.sha256()
        for piece in reader.content():
            digest.update(piece)
            write_all(target, piece)
        os.fchmod(target, member.mode)
        os.utime(target, (member.modified, member.modified))
    finally:
        os.close(target)
    return FileFact("/".join(member.parts), member.size, digest.hexdigest())


def _put_again(staged: int, owner: int | None, member: TarMember, folder: int, facts: dict[str, FileFact]) -> FileFact:
    """Another name for an earlier file of the archive."""
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
    """A folder of the archive, created where the archive did not list it first. None of these is a link."""
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
    """Before anything is moved: refuse where a file and a folder would replace each other."""
    for name in os.listdir(staged):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=staged, follow_symlinks=False).st_mode)
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = "/".join((*inside, name))
        if is_folder != stat.S_ISDIR(there.st_mode):
            raise in_the_way(path, folder=not is_folder)
        if not is_folder:
            if is_mount(folder, name):
                raise mounted(path)
            continue
        with opened(name, FOLDER, staged) as below, opened(name, FOLDER, folder) as target:
            if is_mount(folder, name) and os.listdir(below):
                raise mounted(path)
            _check_merge(below, target, (*inside, name))


def in_the_way(path: str, *, folder: bool) -> Refused:
    other = "a folder" if folder else "no folder"
    return refusal("exists", f"{path!r} is there already, and is {other}; remove it first")


def mounted(path: str) -> Refused:
    return refusal("mounted", f"{path!r} is a mount of the box, which an archive cannot go into; leave it out")


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


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────

_KINDS: dict[bytes, Literal["file", "dir", "link", "again"]] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "again",
}


@dataclass(frozen=True, slots=True)
class TarMember:
    """One entry, with a name that cannot lead out of its folder."""

    kind: Literal["file", "dir", "link", "again"]
    """`again`: another name for an earlier file."""
    parts: tuple[str, ...]
    size: int
    mode: int
    modified: float
    target: str


class TarReader:
    """Yields members one by one; a file's content is read before the next member is asked for, or skipped."""

    def __init__(self, stream: Iterable[bytes], *, max_bytes: int, max_files: int, umask: int = 0o022) -> None:
        self._modes = 0o777 & ~umask
        self._stream = iter(stream)
        self._held = memoryview(b"")
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._bytes_left = max_bytes
        self._files_left = max_files
        self._headers_left = 4 * max_files + 16  # a member may have a record of each type before it
        self._content_left = 0
        self._padding = 0

    def members(self) -> Iterator[TarMember]:
        """Raises Refused for a malformed archive, and for one beyond the limits."""
        pax: dict[str, str] = {}
        while True:
            self._pass_over()
            block = self._exactly(BLOCK)
            if not block.strip(b"\0"):
                return
            header = self._parsed(block)
            if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                pax |= self._record(header)
                continue
            member = self._member(header, pax)
            pax = {}
            if member is not None:
                yield member

    def content(self) -> Iterator[bytes]:
        while self._content_left:
            piece = self._some(min(self._content_left, MIB))
            self._content_left -= len(piece)
            yield piece

    # ── Headers ──

    def _parsed(self, block: bytes) -> tarfile.TarInfo:
        self._headers_left -= 1
        if self._headers_left < 0:
            raise self._too_many()
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as problem:
            raise _bad(f"it has a header that cannot be read ({problem})") from None
        if header.size < 0:
            raise _bad("it has a member of negative size")
        return header

    def _record(self, header: tarfile.TarInfo) -> dict[str, str]:
        """Attributes of the next member; global attributes are ignored."""
        if header.size > _LONGEST_RECORD:
            raise _bad("it has a name or attribute that is too long")
        data = self._exactly(header.size)
        self._exactly(-header.size % BLOCK)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": _decoded(data.rstrip(b"\0"))}
        if header.type == tarfile.GNUTYPE_LONGLINK:
            return {"linkpath": _decoded(data.rstrip(b"\0"))}
        records = dict(_records(data))
        return records if header.type == tarfile.XHDTYPE else {}

    def _member(self, header: tarfile.TarInfo, pax: dict[str, str]) -> TarMember | None:
        name = pax.get("path", header.name)
        size = header.size
        kind = _KINDS.get(header.type)
        if kind is None or any(key.startswith("GNU.sparse") for key in pax):
            raise _bad(f"{name!r} is neither file, folder nor link, or is stored with holes")
        if "size" in pax:
            if not pax["size"].isascii() or not pax["size"].isdecimal() or len(pax["size"]) > 18:
                raise _bad(f"the size of {name!r} is no number")
            size = int(pax["size"])
        if kind != "file" and size:
            raise _bad(f"{name!r} has content and is no file")
        parts = _parts(name)
        self._count(size)
        self._content_left = size
        self._padding = -size % BLOCK
        if not parts:
            if kind != "dir":
                raise _bad(f"{name!r} is no name for a file")
            return None  # the folder that everything goes into
        mode = header.mode & 0o755 & self._modes | (0o700 if kind == "dir" else 0o600)
        modified = float(min(max(header.mtime, 0), _LATEST))
        target = pax.get("linkpath", header.linkname) if kind in ("link", "again") else ""
        _check_text(target)
        return TarMember(kind, parts, size, mode, modified, target)

    def _count(self, size: int) -> None:
        self._files_left -= 1
        self._bytes_left -= size
        if self._files_left < 0:
            raise self._too_many()
        if self._bytes_left < 0:
            raise refusal("too_large", f"the archive holds more than {self._max_bytes} bytes; send less at a time")

    def _too_many(self) -> Refused:
        return refusal(
            "too_many", f"the archive holds more than {self._max_files} files and folders; send fewer at a time"
        )

    # ── Bytes ──

    def _pass_over(self) -> None:
        for _ in self.content():
            pass
        self._exactly(self._padding)
        self._padding = 0

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self._some(size - len(data))
        return bytes(data)

    def _some(self, most: int) -> bytes:
        while not self._held:
            try:
                self._held = memoryview(next(self._stream))
            except StopIteration:
                raise _bad("it ends before its end") from None
        piece = bytes(self._held[:most])
        self._held = self._held[most:]
        return piece


def _records(data: bytes) -> Iterator[tuple[str, str]]:
    """Attributes of a pax header: a length that counts itself, a blank, `name=value`, a line end."""
    while data:
        length, blank, _ = data[:20].partition(b" ")
        if not blank or not length.isdigit() or not len(length) + 3 < int(length) <= len(data):
            raise _bad("it has an attribute that cannot be read")
        record, data = data[: int(length)], data[int(length) :]
        name, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n"):
            raise _bad("it has an attribute that cannot be read")
        key = _decoded(name)
        if key in ("path", "linkpath", "size") or key.startswith("GNU.sparse"):
            yield key, _decoded(value)


def _parts(name: str) -> tuple[str, ...]:
    _check_text(name)
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if not name or name.startswith("/") or ".." in parts:
        raise _bad(f"{name!r} is absolute, or leads upwards")
    check_names(parts, name)
    return parts


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _bad("it has a name that is not valid UTF-8") from None
    if "\0" in text:
        raise _bad("it has a name with a NUL in it")


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _bad("it has a name that is not valid UTF-8") from None


def _bad(problem: str) -> Refused:
    return refusal("bad_archive", f"the archive cannot be used: {problem}; make it anew, as a plain tar file")
