"""Modules, of the standard library and our own, that are imported with others and that a short run never uses.

`asyncio` imports `ssl` for connections that a run of one program does not make, and `inspect`, with a parser of Python,
for errors. Together they take as long as starting an interpreter. The package of the MCP SDK imports twice of what a
gateway uses. While `loading` is open, such a module is imported without being executed; that happens when a name is
first looked up in it. `importlib.util.LazyLoader` does not help: it executes a module as soon as a second one imports
it. Modules are deferred only in the process of our own command: a program that uses the SDK finds its modules as it
knows them.
"""

from __future__ import annotations

import sys
from _thread import RLock
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# Not from typing, which is larger than all that this module needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

_OTHERS = (
    "asyncio.sslproto",
    "asyncio.staggered",
    "bz2",
    "inspect",
    "ipaddress",
    "locale",
    "lzma",
    "re2",
    "secrets",
    "shlex",
    "shutil",
    "ssl",
    "tempfile",
    "textwrap",
)
_AGGREGATES = ("mcp", "mcp.client", "mcp.server")
"""Packages that import whatever programs may want of them: for a gateway on a pipe, a client, a second kind of server
and what serves HTTP. Their modules are imported one by one."""
_OURS = (
    "audit.approvals",
    "audit.standing",
    "audit.tokens",
    "core.excerpt",
    "core.sizes",
    "governance.approval_binding",
    "governance.call_meta",
    "governance.uris",
    "identity.answers",
    "sandbox.files.collect",
    "sandbox.files.guarded",
    "sandbox.files.inputs",
    "sandbox.files.paths",
    "sandbox.files.walk",
    "sandbox.process.guest_code",
    "sandbox.process.shown",
    "sandbox.process.untrusted_reply",
    "sandbox.tools.files",
    "sandbox.tools.processes",
    "sandbox.tools.resources",
    "sandbox.tools.session_broker",
    "sandbox.tools.sessions",
)
DEFERRED = frozenset((*_OTHERS, *_AGGREGATES, *(f"ringfence.{name}" for name in _OURS)))
"""None of them, except the aggregates, in which a gateway looks up no name, is imported by a module that it imports
itself: so two threads cannot wait for each other."""

_OF_IMPORTS = frozenset(
    ("__class__", "__dict__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__")
)
"""What the system of imports looks at, also where a module is only named."""


_enabled = False


def enable() -> None:
    """To be called where this process is that of our command, and runs nothing else."""
    global _enabled
    _enabled = True


@contextmanager
def loading() -> Iterator[None]:
    """What is imported in here is loaded, but for DEFERRED. What was loaded before is left as it is."""
    if not _enabled:
        yield
        return
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def names(module: ModuleType) -> dict[str, Any]:
    """All that is in a module. `vars` alone does not execute it: the system of imports looks there, too."""
    module.__doc__  # noqa: B018 - whatever name is looked for, the module is executed
    return vars(module)


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in DEFERRED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loads a module when a name is looked for in it."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.lock = RLock()
        self.begun = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred


class _Deferred(ModuleType):
    """A module that was not executed yet."""

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name in _OF_IMPORTS:
            return get(name)
        spec = get("__spec__")
        loader: _Loader = spec.loader
        if not isinstance(loader, _Loader):
            return get(name)  # executed, while we were on the way here
        with loader.lock:
            if spec.loader is loader and not loader.begun:
                loader.begun = True
                try:
                    self.__loader__ = loader.real
                    loader.real.exec_module(self)
                except BaseException:
                    loader.begun = False
                    raise
                spec.loader = loader.real
                self.__class__ = ModuleType  # type: ignore[assignment]
        return get(name)
