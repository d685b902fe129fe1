"""Pages of the zygote that every box writes, and the zygote between two boxes. Used inside the zygote.

A fork shares all memory, and whoever writes a page first stops and has it copied: a box did so some hundred times
before its program began. Pages that are pinned, as a device would have them that writes to memory by itself, the kernel
copies while it forks, all at once, and the zygote's own stay writable. An io_uring that is never used pins them.

Which pages those are is found out once: a witness, forked like a box, does what a box does before and after its
program, and stays. Whatever the zygote has to itself a box later, it or the witness has written.

Where the kernel does not let us, boxes are a little slower, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from ringfence.sandbox.process import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PAGE = resource.getpagesize()
_MOST = 2048
"""Pages. They are copied for every box, so many would cost more than they save."""
_PRESENT, _OF_FILE, _OURS_ALONE = 1 << 63, 1 << 61, 1 << 56
_REGISTER_BUFFERS = 0
_PARAMETERS = 120
"""Bytes that the kernel takes and gives when a ring is made."""
_KILL = 9


class Pins:
    """What a zygote knows of its own pages."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether nobody has found out about them yet, and it is worth it."""
        self._witness = 0
        self._stays = -1
        self._seen = 0
        """Boxes since the witness was called."""

    def call_witness(self, act: Callable[[int, int], object]) -> None:
        """Fork one, and wait until it has done what a box does.

        `act` gets a descriptor to write to when it has, and one to read from that tells it to end.
        """
        self.wanted = False
        done, tells = os.pipe2(os.O_CLOEXEC)
        waits, self._stays = os.pipe2(os.O_CLOEXEC)
        self._witness = kernel.fork()
        if self._witness == 0:
            try:
                os.close(self._stays)  # or it would wait for itself
                act(tells, waits)
            finally:
                os._exit(0)
        os.close(tells)
        os.close(waits)
        said = os.read(done, 1)
        os.close(done)
        if not said:
            self._dismiss()

    def look(self) -> bool:
        """Before each box. Whether pages were pinned now: once the zygote has done all that it does between two."""
        if not self._witness:
            return False
        self._seen += 1
        if self._seen <= 1:
            return False
        try:
            pages = _written()
            self._dismiss()
            return len(pages) <= _MOST and _pin(pages)
        except OSError:
            self._dismiss()
            return False

    def _dismiss(self) -> None:
        if self._witness:
            os.close(self._stays)
            os.kill(self._witness, _KILL)
            os.waitpid(self._witness, 0)
            self._witness = 0


def share_code() -> None:
    """Let forks copy which pages of code are in memory, as they do for memory that was written.

    Else every box would ask for each of them. A byte that is written over itself is enough for the whole of a library.
    """
    for first, _, rights, _ in _mapped():
        if rights == "r-xp":
            try:
                with open("/proc/self/mem", "r+b", buffering=0) as memory:
                    memory.seek(first)
                    same = memory.read(1)
                    memory.seek(first)
                    memory.write(same)
            except (OSError, OverflowError):
                continue  # a kernel that lets nobody write to code; or what is there is the kernel's own


def _mapped() -> list[tuple[int, int, str, str]]:
    """From where to where, how, and what."""
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            words = line.split()
            first, _, last = words[0].partition("-")
            found.append((int(first, 16), int(last, 16), words[1], words[5] if len(words) > 5 else ""))
    return found


def _written() -> list[int]:
    """Addresses of the pages that no other process shares, in order."""
    found: list[int] = []
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        for first, last, rights, what in _mapped():
            if rights != "rw-p" or what.startswith("[v"):
                continue
            file.seek(first // _PAGE * 8)
            told = file.read((last - first) // _PAGE * 8)
            for number, (word,) in enumerate(struct.iter_unpack("=Q", told)):
                if word & (_PRESENT | _OF_FILE | _OURS_ALONE) == _PRESENT | _OURS_ALONE:
                    found.append(first + number * _PAGE)
    return found


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Where each begins, and how long it is."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and sum(found[-1]) == page:
            found[-1] = (found[-1][0], found[-1][1] + _PAGE)
        else:
            found.append((page, _PAGE))
    return found


def _pin(pages: list[int]) -> bool:
    """For as long as this process lives. Raises OSError."""
    parts = _ranges(pages)
    vectors = b"".join(struct.pack("=QQ", *part) for part in parts)
    parameters = ctypes.create_string_buffer(_PARAMETERS)
    ring = kernel.call("io_uring_setup", 1, ctypes.addressof(parameters))
    try:
        kernel.call("io_uring_register", ring, _REGISTER_BUFFERS, vectors, len(parts))
    except OSError:
        os.close(ring)
        raise
    return True
