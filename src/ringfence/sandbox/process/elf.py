"""Just enough of ELF: which loader a program asks for, and what is a program at all."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

_PROGRAM, _EITHER = 2, 3  # ET_EXEC; ET_DYN, which libraries are, and programs that can be anywhere in memory
_DYNAMIC, _INTERPRETER = 2, 3  # PT_DYNAMIC, PT_INTERP
_NAME_OF_LIBRARY, _FLAGS = 14, 0x6FFFFFFB  # DT_SONAME, DT_FLAGS_1
_IS_PROGRAM = 0x08000000  # DF_1_PIE
_HEADER = 64
_MOST_ENTRIES = 128
_LONGEST = 4096
_LARGEST_TABLE = 16384
_BROKEN = (OSError, LookupError, struct.error, ValueError, OverflowError)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def loader_of(path: str | Path) -> str | None:
    """None: it is no program of this kind, or needs no loader."""
    try:
        descriptor = os.open(path, _OPEN)
        try:
            header = os.read(descriptor, _HEADER)
            if not _is_elf(header):
                return None
            start, length = _parts(descriptor, header)[_INTERPRETER]
            return os.fsdecode(os.pread(descriptor, min(length, _LONGEST), start).rstrip(b"\0"))
        finally:
            os.close(descriptor)
    except _BROKEN:
        return None


def is_program(path: str | Path) -> bool:
    """Whether the loader or the kernel could run it, whatever it is called and whatever its mode.

    Some libraries name a loader, too, as that of C does: they have a name as libraries, and are not marked as programs.
    """
    try:
        descriptor = os.open(path, _OPEN)
        try:
            header = os.read(descriptor, _HEADER)
            if not _is_elf(header):
                return False
            (kind,) = struct.unpack_from("<H", header, 16)
            if kind != _EITHER:
                return bool(kind == _PROGRAM)
            parts = _parts(descriptor, header)
            told = dict(_dynamic(descriptor, *parts.get(_DYNAMIC, (0, 0))))
            marked = told.get(_FLAGS, 0) & _IS_PROGRAM
            return bool(marked) or (_INTERPRETER in parts and _NAME_OF_LIBRARY not in told)
        finally:
            os.close(descriptor)
    except _BROKEN:
        return False


def _is_elf(header: bytes) -> bool:
    return header[:6] == b"\x7fELF\x02\x01" and len(header) == _HEADER  # 64 bits, little-endian


def _parts(descriptor: int, header: bytes) -> dict[int, tuple[int, int]]:
    """By kind: where the first of it is, and how long."""
    (offset,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    if size != 56 or count > _MOST_ENTRIES:
        return {}
    found: dict[int, tuple[int, int]] = {}
    table = os.pread(descriptor, size * count, offset)
    for number in range(len(table) // size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, number * size)
        found.setdefault(kind, (start, length))
    return found


def _dynamic(descriptor: int, start: int, length: int) -> Iterator[tuple[int, int]]:
    table = os.pread(descriptor, min(length, _LARGEST_TABLE), start)
    return struct.iter_unpack("<QQ", table[: len(table) // 16 * 16])
