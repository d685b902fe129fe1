"""What libraries in C have written and still hold in their buffers. Cells may replace the builtins: these are kept."""

from __future__ import annotations

import sys

from ringfence.sandbox.process.guest import mainfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__builtins__ = mainfile.BUILTINS  # type: ignore[assignment]

_PLACE_OF_PYTHON = "/lib-dynload/"
"""Where extension modules of the standard library lie."""
_fflush: Callable[[None], int] | None = None
_seen = 0
"""How many modules there were when libraries were looked for."""


def flush() -> None:
    """Write what they hold, if any was loaded that could hold something."""
    find_libraries()
    if _fflush is not None:
        _fflush(None)


def find_libraries() -> None:
    """`ctypes` takes more than half as long to load as the interpreter itself: only where it is there, or is needed."""
    global _fflush, _seen
    if _fflush is not None or _seen == len(sys.modules):
        return
    try:
        _seen = len(sys.modules)
        if "ctypes" in sys.modules or any(map(_is_library, [*sys.modules.values()])):
            import ctypes  # noqa: PLC0415

            _fflush = ctypes.pythonapi.fflush
    except Exception:  # the program has changed what we would need for it
        return


def _is_library(module: object) -> bool:
    """Whether a module is an extension that is none of Python's own."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith(".so") and _PLACE_OF_PYTHON not in file
