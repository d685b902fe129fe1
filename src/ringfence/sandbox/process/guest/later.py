"""Modules of the guest that few programs need. A box does not see our source, so it is kept in memory from the start,
and compiled when a program first needs it. Until then it costs a box nothing.
"""

from __future__ import annotations

import sys

from ringfence.sandbox.process.guest import mainfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__builtins__ = mainfile.BUILTINS  # type: ignore[assignment]

MODULES = ("display", "claims", "charts", "magics", "notebook", "once")
SOURCES: dict[str, bytes] = {}
"""By name. Where an interpreter is started by exec, the supervisor fills it."""
_PACKAGE = "ringfence.sandbox.process.guest"
_loaded: dict[str, Any] = {}


def file_of(name: str) -> str:
    """What tracebacks would call it; frames of ours are not shown."""
    return f"<{name}>"


def keep(folder: str) -> None:
    for name in MODULES:
        with open(f"{folder}/{name}.py", "rb") as file:
            SOURCES[name] = file.read()


def adopt(*modules: Any) -> None:
    """Use modules that are loaded already."""
    for module in modules:
        _loaded[module.__name__.rpartition(".")[2]] = module


def load(name: str) -> Any:
    """The module of this name. What it imports of ours is loaded like it, and is in no list that a program sees."""
    if name not in _loaded:
        module = type(sys)(f"{_PACKAGE}.{name}")
        module.__dict__["__builtins__"] = {**mainfile.BUILTINS, "__import__": _import}
        exec(compile(SOURCES[name], file_of(name), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - ours
        _loaded[name] = module
    return _loaded[name]


def _import(name: str, names: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
    if name != _PACKAGE:
        return mainfile.BUILTINS["__import__"](name, names, locals_, wanted, level)
    package = type(sys)(name)
    for each in wanted:
        setattr(package, each, _ours(each))
    return package


def _ours(name: str) -> Any:
    if name == "later":
        return _self
    return mainfile if name == "mainfile" else load(name)


class LastFinder:
    """The last of the finders of modules: it offers our `IPython` where there is no other."""

    def __init__(self, stand_in: Callable[[], Any]) -> None:
        self._stand_in = stand_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "IPython":
            return None
        there = sys.modules.get("IPython")
        if there is not None and there.__spec__ is not None and there.__spec__.origin != "Ringfence":
            return None
        return self._stand_in().spec(name)


_self: Any = sys.modules[__name__]
if "__file__" in globals():
    keep(__file__.rpartition("/")[0])
