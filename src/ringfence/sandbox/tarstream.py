"""Reads a tar stream that may be hostile, block by block, in bounded memory: ustar, pax and GNU's long names.

Each header is taken apart by `tarfile`; what follows from it is decided here, since the library's own reader trusts
sizes more than is good: nothing is skipped backwards, and every record has an upper limit.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ringfence.box import MIB
from ringfence.errors import Refused
from ringfence.sandbox.beneath import check_names, refusal

BLOCK = tarfile.BLOCKSIZE
_LONGEST_RECORD = 64 * 1024
"""Of names and attributes that stand before a member."""
_LATEST = 2**33
"""Seconds; some hundred years from now."""

_KINDS: dict[bytes, Literal["file", "dir", "link", "again"]] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.DIRTYPE: "dir",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "again",
}


@dataclass(frozen=True, slots=True)
class Member:
    """One entry, with a name that stays where it is put."""

    kind: Literal["file", "dir", "link", "again"]
    """`again`: another name for an earlier file."""
    parts: tuple[str, ...]
    size: int
    mode: int
    modified: float
    target: str


class TarReader:
    """Members one by one; the content of a file is read before the next one is asked for, or passed over."""

    def __init__(self, stream: Iterable[bytes], *, max_bytes: int, max_files: int) -> None:
        self._stream = iter(stream)
        self._held = memoryview(b"")
        self._max_bytes, self._max_files = max_bytes, max_files
        self._bytes_left, self._files_left = max_bytes, max_files
        self._headers_left = 4 * max_files + 16  # a member may have a record of each sort before it
        self._content_left = 0
        self._padding = 0

    def members(self) -> Iterator[Member]:
        """Raises Refused for whatever is not a good archive, or more of one than is allowed."""
        said: dict[str, str] = {}
        while True:
            self._pass_over()
            block = self._exactly(BLOCK)
            if not block.strip(b"\0"):
                return
            header = self._parsed(block)
            if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                said |= self._record(header)
                continue
            member = self._member(header, said)
            said = {}
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
        """What is said about the next member; of what is said about all, nothing is taken."""
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

    def _member(self, header: tarfile.TarInfo, said: dict[str, str]) -> Member | None:
        name, size = said.get("path", header.name), header.size
        kind = _KINDS.get(header.type)
        if kind is None or any(key.startswith("GNU.sparse") for key in said):
            raise _bad(f"{name!r} is neither file, folder nor link, or is stored with holes")
        if "size" in said:
            if not said["size"].isascii() or not said["size"].isdecimal() or len(said["size"]) > 18:
                raise _bad(f"the size of {name!r} is no number")
            size = int(said["size"])
        if kind != "file" and size:
            raise _bad(f"{name!r} has content and is no file")
        parts = _parts(name)
        self._count(size)
        self._content_left, self._padding = size, -size % BLOCK
        if not parts:
            if kind != "dir":
                raise _bad(f"{name!r} is no name for a file")
            return None  # the folder that it all goes into
        mode = header.mode & 0o755 | (0o700 if kind == "dir" else 0o600)
        modified = float(min(max(header.mtime, 0), _LATEST))
        target = said.get("linkpath", header.linkname) if kind in ("link", "again") else ""
        _check_text(target)
        return Member(kind, parts, size, mode, modified, target)

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
