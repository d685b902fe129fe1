"""The memory of machines, and files that are handed to their programs, as files without a name."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_PIECE = 1 << 20
_PAGE = 65536
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
_ADD_SEALS = 1033


class Memory:
    """The memory of one machine, or what many go on from: then nobody can write to it any more, whatever they are."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def new(cls, size: int) -> Memory:
        made = cls(os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made.descriptor, size)
        return made

    @classmethod
    def loaded(cls, path: Path) -> Memory:
        """Sealed. Raises OSError."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            made = cls.new(size)
            try:
                _copy(file, made.descriptor, size)
                made.seal()
            except BaseException:
                made.close()
                raise
        finally:
            os.close(file)
        return made

    def seal(self) -> None:
        """No process may have it mapped by then. Raises OSError."""
        seals = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE
        fcntl.fcntl(self.descriptor, _ADD_SEALS, seals)

    def save(self, path: Path) -> None:
        """Without what is zero, which files need no room for. Raises OSError."""
        size = os.fstat(self.descriptor).st_size
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            _copy(self.descriptor, file, size)
            os.fsync(file)
        finally:
            os.close(file)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def copied(path: Path) -> int:
    """A descriptor of a copy, which a program can open again whoever may read the file."""
    descriptor = os.memfd_create("copy", os.MFD_CLOEXEC)
    with path.open("rb") as file, os.fdopen(os.dup(descriptor), "wb") as copy:
        while data := file.read(_PIECE):
            copy.write(data)
    return descriptor


def _copy(source: int, target: int, size: int) -> None:
    at = 0
    nothing = bytes(_PAGE)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return  # nothing but zeros is left
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            data = os.pread(source, min(_PIECE, end - at), at)
            for start in range(0, len(data), _PAGE):
                piece = data[start : start + _PAGE]
                if piece != nothing[: len(piece)]:
                    os.pwrite(target, piece, at + start)
            at += len(data)
