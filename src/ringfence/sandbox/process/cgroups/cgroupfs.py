"""The files of a control group: reading, writing, and setting the limits of v1 and v2."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

CPU_PERIOD_US = 100_000
_ALL_OF_IT = 2048
"""The kernel gives a page at a time, so after less than half of one there is no more."""


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(descriptor, 65536)]
        while len(parts[-1]) > _ALL_OF_IT:
            parts.append(os.read(descriptor, 65536))
        return b"".join(parts).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


class CgroupFiles:
    """Files of one group that stay open, for so many groups at a time: opening one takes longer than reading it."""

    _groups = 0
    MAX_OPEN = 48

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], int] | None = None

    def keep(self) -> None:
        """Keep files open from now on, unless too many groups do."""
        if self._open is None and CgroupFiles._groups < CgroupFiles.MAX_OPEN:
            self._open = {}
            CgroupFiles._groups += 1

    def opened(self, path: str, flags: int) -> int:
        """A descriptor; `forget` closes it if it is kept, else the caller by `done`."""
        if self._open is None:
            return os.open(path, flags | os.O_CLOEXEC)
        found = self._open.get((path, flags))
        if found is None:
            found = self._open[path, flags] = os.open(path, flags | os.O_CLOEXEC)
        return found

    def done(self, descriptor: int) -> None:
        if self._open is None:
            os.close(descriptor)

    def read(self, path: str) -> bytes:
        """A short file, whole. Raises FileNotFoundError."""
        descriptor = self.opened(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, 4096, 0)
        finally:
            self.done(descriptor)

    def number(self, path: str) -> int | None:
        try:
            return int(self.read(path))
        except FileNotFoundError:
            return None

    def field(self, path: str, name: bytes) -> int | None:
        """One number of a file of names and numbers; None where there is no such file, or it has no such name."""
        try:
            _, found, rest = (b"\n" + self.read(path)).partition(b"\n" + name + b" ")
        except FileNotFoundError:
            return None
        return int(rest.partition(b"\n")[0]) if found else None

    def forget(self, folder: str = "/") -> None:
        """Forget the files of a folder that is going to be removed."""
        if self._open is None:
            return
        for key in [key for key in self._open if key[0].startswith(folder)]:
            os.close(self._open.pop(key))
        if folder == "/":
            self._open = None
            CgroupFiles._groups -= 1


def number(path: str) -> int | None:
    """The number in a file; None if there is no such file."""
    try:
        return int(read(path))
    except FileNotFoundError:
        return None


def fields(path: str) -> dict[str, int]:
    """The lines `name number` of a file; empty if there is no such file."""
    try:
        words = read(path).split()
    except FileNotFoundError:
        return {}
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False)}


def rmdir(path: str, patience: float) -> None:
    """Remove a group, waiting this many seconds for what is just ending in it. Gone already is as good."""
    deadline = time.monotonic() + patience
    pause = 0.0002
    while True:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            return
        except OSError as problem:
            if problem.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        else:
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


def limit_memory(path: str, v2: bool, most: int) -> None:
    """Limit memory, and swap as well, so that it is no way around the limit."""
    if v2:
        write(path + "/memory.max", str(most))
        with suppress(FileNotFoundError):
            write(path + "/memory.swap.max", "0")
        return
    with_swap = path + "/memory.memsw.limit_in_bytes"
    try:
        write(path + "/memory.limit_in_bytes", str(most))
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        # The two bounds must never cross: going up, the one with swap goes first.
        write(with_swap, str(most))
        write(path + "/memory.limit_in_bytes", str(most))
    try:
        write(with_swap, str(most))
    except FileNotFoundError:
        write(path + "/memory.swappiness", "0")


def limit_cpu(path: str, v2: bool, cores: float) -> None:
    """Limit the share of the processors."""
    # A quota of all cores would only cost its bookkeeping.
    bounded = cores < (os.cpu_count() or 1)
    quota = max(1000, int(cores * CPU_PERIOD_US))
    if v2:
        write(path + "/cpu.max", f"{quota if bounded else 'max'} {CPU_PERIOD_US}")
        return
    try:
        write(path + "/cpu.cfs_quota_us", str(quota if bounded else -1))
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        # v1 refuses more than a group above allows; that limit then is the tighter one.
        write(path + "/cpu.cfs_quota_us", "-1")
