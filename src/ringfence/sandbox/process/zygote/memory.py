"""What makes the zygote's memory cheap to fork. Used inside the zygote.

A fork shares all memory until a process writes to it, and then the kernel stops that process and copies the page. Two
means against that:

- Objects that are never freed. Even a look at an object is a write, since the interpreter counts its users; unless it
  is one of those, like `None`, that were made immortal (CPython 3.12 and later). So everything there is becomes such an
  object: a box then copies a third less.
- Pages that every box writes, and the zygote between two boxes: a box did so some hundred times before its program
  began. Pages that are pinned, as a device would have them that writes to memory by itself, the kernel copies while it
  forks, all at once, and the zygote's own stay writable. An io_uring that is never used pins them. Which pages those
  are is found out once: a witness, forked like a box, does what a box does before and after its program, and stays.
  What it has to itself by then, it has written; and what the zygote has to itself just before the next fork but one,
  the zygote writes between two.

Where the kernel does not let us, boxes are a little slower, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import struct
from ctypes import c_size_t, c_uint32

from ringfence.sandbox.process.zygote import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType
else:
    CodeType = type((lambda: None).__code__)  # `types` would have to be loaded

_PAGE = resource.getpagesize()
_MAX_PAGES = 2048
"""Pages. They are copied for every box, so too many would cost more than they save."""
_PRESENT = 1 << 63
_OF_FILE = 1 << 61
_OURS_ALONE = 1 << 56
_ROUNDS = 2
"""The first one itself changes what is free, and so where objects are placed from then on."""
_REGISTER_BUFFERS = 0
_PARAMETERS = 120
"""Bytes that the kernel takes and gives when a ring is made."""
_PATIENCE = 64
"""Boxes. A witness that is not ready by then never will be."""
_LONGEST = 256 * 1024 * 1024
"""A longer mapping is skipped: no box can be made meanwhile."""
_KILL = 9
_STOP = 19
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Gives memory back that nothing is in; glibc has it."""
_LASTS = 1 << 31
"""The lower half of a count is at least this where the object is never freed."""


# ── Objects that are never freed ──────────────────────────────────────────────────────────────────


def make_everything_immortal() -> int:
    """Make everything that can be reached immortal. Returns how many; 0 where the interpreter has no such objects."""
    lasting = c_uint32.from_address(id(None)).value
    if lasting < _LASTS:
        return 0
    count = 0
    waiting = gc.get_objects()
    while waiting:
        item = waiting.pop()
        there = c_uint32.from_address(id(item))
        if there.value >= _LASTS or item is waiting:
            continue  # it lasted before, or has been here; no table of them, whose pages every box would share
        there.value = lasting
        count += 1
        waiting += gc.get_referents(item)
        if isinstance(item, CodeType):
            # The collector does not see what these refer to.
            waiting += (item.co_consts, item.co_names, item.co_linetable)
            waiting += (item.co_filename, item.co_name, item.co_qualname)
    if _trim is not None:
        _trim(c_size_t(0))
    return count


# ── Pages that are copied at the fork ─────────────────────────────────────────────────────────────


class Pins:
    """What a zygote knows of its own pages."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether they are still to be found, and that is worth it."""
        self._witness = 0
        self._looks = 0
        """Since the witness was called."""
        self._rounds = 0
        self._held: set[int] = set()
        """Addresses of pinned pages."""

    def call_witness(self, act: Callable[[], object]) -> None:
        """Fork a witness, which does what a box does and then waits. Raises OSError."""
        self.wanted = False
        self._looks = 0
        self._rounds += 1
        pid = kernel.fork()
        if pid == 0:
            try:
                act()
                os.kill(os.getpid(), _STOP)
            finally:
                os._exit(0)
        self._witness = pid

    def lost(self, pid: int) -> None:
        """A process that is no box was reaped: perhaps the witness."""
        if pid == self._witness:
            self._witness = 0

    def look(self) -> bool:
        """Called just before each box is forked. Returns whether pages were pinned now."""
        if not self._witness:
            return False
        self._looks += 1
        if self._looks <= 1:
            return False  # not everything has been done since the witness was called that is done between two forks
        try:
            if os.waitid(os.P_PID, self._witness, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
                if self._looks > _PATIENCE:
                    self._dismiss()
                return False
            pages = self._found()
            self._dismiss()
            if len(self._held) + len(pages) > _MAX_PAGES:
                return False
            _pin(pages)
        except Exception:  # any failure only means that boxes get no cheaper
            self._dismiss()
            return False
        self._held.update(pages)
        self.wanted = self._rounds < _ROUNDS
        return True

    def _found(self) -> list[int]:
        there, written = _pages(os.getpid())
        _, by_witness = _pages(self._witness)
        return sorted((written | (by_witness & there)) - self._held)

    def _dismiss(self) -> None:
        witness, self._witness = self._witness, 0
        try:
            if witness:
                os.kill(witness, _KILL)
                os.waitpid(witness, 0)
        except OSError:
            return  # it is gone already


def share_code() -> None:
    """Let forks copy which pages of code are in memory, as they do for memory that was written.

    Else every box would ask for each of them. A byte that is written over itself is enough for the whole of a library.
    """
    for first, _, rights in _mapped("self"):
        if rights == "r-xp":
            try:
                with open("/proc/self/mem", "r+b", buffering=0) as memory:
                    memory.seek(first)
                    same = memory.read(1)
                    memory.seek(first)
                    memory.write(same)
            except (OSError, OverflowError):
                continue  # a kernel that does not let code be written


def _mapped(process: int | str) -> list[tuple[int, int, str]]:
    """Mappings: start, end, and rights; only what is in memory, page by page.

    Of a huge page all would be copied for the sake of a small part.
    """
    found: list[tuple[int, int, str]] = []
    with open(f"/proc/{process}/smaps", encoding="ascii", errors="replace", newline="\n") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                first, _, last = words[0].partition("-")
                here = (int(first, 16), int(last, 16), words[1])
                named = words[5] if len(words) > 5 else ""
            elif words[0] == "Rss:" and words[1] != "0" and not named.startswith("[v"):  # not the kernel's own
                found.append(here)
            elif words[0] == "AnonHugePages:" and words[1] != "0" and found and found[-1] == here:
                found.pop()
    return found


def _pages(process: int) -> tuple[set[int], set[int]]:
    """Addresses of pages that are no file's and can be written; and of those that no other process shares."""
    there: set[int] = set()
    alone: set[int] = set()
    with open(f"/proc/{process}/pagemap", "rb", buffering=0) as file:
        for first, last, rights in _mapped(process):
            if rights != "rw-p" or last - first > _LONGEST:
                continue
            file.seek(first // _PAGE * 8)
            entries = file.read((last - first) // _PAGE * 8)
            for number, (word,) in enumerate(struct.iter_unpack("=Q", entries)):
                if word & (_PRESENT | _OF_FILE) == _PRESENT:
                    there.add(first + number * _PAGE)
                    if word & _OURS_ALONE:
                        alone.add(first + number * _PAGE)
    return there, alone


def _ranges(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Contiguous ranges: start and length."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and sum(found[-1]) == page:
            found[-1] = (found[-1][0], found[-1][1] + _PAGE)
        else:
            found.append((page, _PAGE))
    return found


def _pin(pages: list[int]) -> None:
    """Pin pages for as long as this process lives. Raises OSError."""
    parts = _ranges(pages)
    vectors = b"".join(struct.pack("=QQ", *part) for part in parts)
    parameters = ctypes.create_string_buffer(_PARAMETERS)
    ring = kernel.call("io_uring_setup", 1, ctypes.addressof(parameters))
    try:
        kernel.call("io_uring_register", ring, _REGISTER_BUFFERS, vectors, len(parts))
    except OSError:
        os.close(ring)
        raise
