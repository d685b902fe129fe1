"""Just enough of ELF: which loader a program asks for."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_INTERPRETER = 3  # PT_INTERP
_HEADER = 64
_MOST_ENTRIES = 128
_LONGEST = 4096


def loader_of(path: str | Path) -> str | None:
    """None: it is no program of this kind, or needs no loader."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER or header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
                return None
            (offset,) = struct.unpack_from("<Q", header, 32)
            size, count = struct.unpack_from("<HH", header, 54)
            if size != 56 or count > _MOST_ENTRIES:
                return None
            file.seek(offset)
            table = file.read(size * count)
            for number in range(len(table) // size):
                kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, number * size)
                if kind == _INTERPRETER:
                    file.seek(start)
                    return os.fsdecode(file.read(min(length, _LONGEST)).rstrip(b"\0"))
    except (OSError, struct.error, ValueError, OverflowError):
        return None
    return None
