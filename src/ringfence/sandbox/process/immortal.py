"""Objects that are never freed, so that nobody has to count who uses them. Used inside the zygote.

A box shares the zygote's memory until it writes to it. Even a look at an object is a write, since the interpreter
counts whoever looks; unless it is one of those, like `None`, that were made to last (CPython 3.12 and later). So
everything there is becomes such an object: a box then copies a third less.
"""

from __future__ import annotations

import ctypes
import gc
from ctypes import c_size_t, c_uint32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
else:
    CodeType = type((lambda: None).__code__)  # `types` would have to be loaded

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Gives memory back that nothing is in; glibc has it."""
_LASTS = 1 << 31
"""The lower half of a count is at least this where the object is never freed."""


def make_everything_last() -> int:
    """All that can be reached. How many there are; 0 where this interpreter has no such objects."""
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
            # The collector is not told of what these refer to.
            waiting += (item.co_consts, item.co_names, item.co_linetable)
            waiting += (item.co_filename, item.co_name, item.co_qualname)
    if _trim is not None:
        _trim(c_size_t(0))
    return count
