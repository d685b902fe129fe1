"""Pages of the zygote that every box writes, and the zygote between two boxes. Used inside the zygote.

A fork shares all memory, and whoever writes a page first stops and has it copied: a box did so some hundred times
before its program began. Pages that are pinned, as a device would have them that writes to memory by itself, the kernel
copies while it forks, all at once, and the zygote's own stay writable. An io_uring that is never used pins them.

Which pages those are is found out once: a witness, forked like a box, does what a box does before and after its
program, and stays. What it has to itself by then, it has written; and what the zygote has to itself just before the
next fork but one, the zygote writes between two.

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
_ROUNDS = 2
"""The first one itself changes what is free, and so where things are put from then on."""
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
        self._rounds = 0
        self._held: set[int] = set()
        """Addresses of what is pinned."""

    def call_witness(self, act: Callable[[int, int], object]) -> None:
        """Fork one, and wait until it has done what a box does.

        `act` gets a descriptor to write to when it has, and one to read from that tells it to end.
        """
        self.wanted = False
        self._seen = 0
        self._rounds += 1
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
        """Just before each box is forked. Whether pages were pinned now."""
        if not self._witness:
            return False
        self._seen += 1
        if self._seen <= 1:
            return False  # not everything has been done since the witness was called that is done between two forks
        try:
            said = _pages(self._witness, _PRESENT | _OURS_ALONE)
            written, there = _pages(os.getpid(), _PRESENT | _OURS_ALONE), _pages(os.getpid(), _PRESENT)
            pages = sorted({*written, *said.intersection(there)} - self._held)
            self._dismiss()
            if len(pages) + len(self._held) > _MOST:
                return False
            self._held.update(pages)
            self.wanted = self._rounds < _ROUNDS
            return _pin(pages)
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
    for first, _, rights, _ in _mapped("self"):
        if rights == "r-xp":
            try:
                with open("/proc/self/mem", "r+b", buffering=0) as memory:
                    memory.seek(first)
                    same = memory.read(1)
                    memory.seek(first)
                    memory.write(same)
            except (OSError, OverflowError):
                continue  # a kernel that lets nobody write to code; or what is there is the kernel's own


def _mapped(process: int | str) -> list[tuple[int, int, str, str]]:
    """From where to where, how, and what."""
    found = []
    with open(f"/proc/{process}/maps", encoding="ascii", errors="replace") as file:
        for line in file:
            words = line.split()
            first, _, last = words[0].partition("-")
            found.append((int(first, 16), int(last, 16), words[1], words[5] if len(words) > 5 else ""))
    return found


def _pages(process: int, which: int) -> set[int]:
    """Addresses of pages that are no file's and can be written."""
    found: set[int] = set()
    with open(f"/proc/{process}/pagemap", "rb", buffering=0) as file:
        for first, last, rights, what in _mapped(process):
            if rights != "rw-p" or what.startswith("[v"):
                continue
            file.seek(first // _PAGE * 8)
            told = file.read((last - first) // _PAGE * 8)
            for number, (word,) in enumerate(struct.iter_unpack("=Q", told)):
                if word & (which | _OF_FILE) == which:
                    found.add(first + number * _PAGE)
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
