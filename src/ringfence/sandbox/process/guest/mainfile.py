"""A main module that came as text: the file that it has when it asks, and what new processes find of it.

`multiprocessing` with `spawn` or `forkserver` starts an interpreter that loads the main module from its file. A program
that was passed as text has none, nor have a session's cells: the new interpreter finds no function of theirs, ends, and
is started again, until the time is up. So we tell it another file. Where a program says what only its first process is
to do (`if __name__ == "__main__":`), that file is the program. Otherwise it has the definitions alone: imports,
functions, classes, and values that nothing outside depends on. What else the program does is not done twice.

`__file__` exists once the source names it: the file lies in the folder that the program was started in, so that what
lies beside it is found. Imports nothing of ours.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, ModuleType
    from typing import Any

BUILTINS = dict(vars(builtins))
"""A cell may change the builtins: functions of modules that have this as theirs keep the original ones."""
__builtins__ = BUILTINS  # type: ignore[assignment]

FUTURE = 0x1FE0000
"""The code flags that `from __future__ import` sets."""
ONLY_TREE = 0x400
TOP_LEVEL_AWAIT = 0x2000
"""Flags of `compile`, by the numbers of `_ast.PyCF_ONLY_AST` and `PyCF_ALLOW_TOP_LEVEL_AWAIT`. `_ast` makes a hundred
types when it is loaded, as `compile` does when it is first called, which takes a third as long as the start of an
interpreter; `exec` of text does without."""
SPAWN = "multiprocessing.spawn"
_MAX_DEEP = 100
_DEFINITIONS = ("Import", "ImportFrom", "FunctionDef", "AsyncFunctionDef", "ClassDef", "TypeAlias")
_HARMLESS = frozenset(
    {
        *("array", "bool", "bytes", "dict", "float", "frozenset", "int", "list", "range", "set", "str", "tuple"),
        *("Counter", "Decimal", "defaultdict", "deque", "Fraction", "Path", "PurePath", "timedelta"),
        *("NamedTuple", "namedtuple", "NewType", "ParamSpec", "TypedDict", "TypeVar", "TypeVarTuple"),
        *("compile", "getLogger", "itemgetter", "Lock", "lru_cache", "partial", "RLock"),
    }
)
"""Functions, by their last name, that only make a value. A call of another may do anything, and is not repeated."""
_LOADER = '''\
"""Made for processes that multiprocessing starts: the definitions of a main module that came as text."""


def load(sources, codes):
    import linecache
    import marshal

    for name, text in sources:
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    for code in marshal.loads(codes):
        try:
            exec(code, globals())
        except Exception:
            pass  # it needs something that only the first process made


load({sources!r}, {codes!r})
del load
'''


class MainFile:
    """The files of a main module that came as text."""

    def __init__(self, sources: Callable[[], list[tuple[str, bytes]]], *, alone: bool) -> None:
        """`sources` are its parts by their names in tracebacks; `alone`: they are a program, and no cells."""
        self._sources = sources
        self._alone = alone
        self._folder = os.getcwd()
        self._loaded: tuple[str, str] | None = None
        """The loader that was written last, and where."""
        self._written = 0

    def give_file(self) -> None:
        """Define `__file__`, and write that file."""
        path = os.path.join(self._folder, ".main.py")
        try:
            _write(path, self._sources()[0][1] if self._alone else self._loader().encode("utf-8", "surrogatepass"))
        except OSError:
            return  # there is no room for it, or no such folder any more
        sys.modules["__main__"].__dict__["__file__"] = path

    def adopt(self, spawn: Any) -> None:
        """Have new processes load our file. `spawn` is `multiprocessing.spawn`, which was just loaded."""
        prepare = spawn.get_preparation_data
        main = sys.modules["__main__"]
        if "__mp_main__" in sys.modules:  # what comes back from them names it
            sys.modules["__mp_main__"] = main

        def get_preparation_data(name: str) -> dict[str, Any]:
            """Return info about parent needed by child to unpickle process object."""
            if sys.modules.get("__main__") is not main:
                return prepare(name)  # type: ignore[no-any-return]
            if self._alone and _is_guarded(self._sources()[0][1]):
                self.give_file()
                return prepare(name)  # type: ignore[no-any-return]
            return {**prepare(name), "init_main_from_path": self._definitions()}

        spawn.get_preparation_data = get_preparation_data

    def _definitions(self) -> str:
        """The file of definitions. Raises OSError."""
        text = self._loader()
        if self._loaded is None or self._loaded[0] != text or not os.path.exists(self._loaded[1]):
            # Another name each time: a server that has loaded one file would not load it again.
            self._written += 1
            folder = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - a folder of the box
            path = os.path.join(folder, f".main-{os.getpid()}-{self._written}.py")
            _write(path, text.encode("utf-8", "surrogatepass"))
            self._loaded = (text, path)
        return self._loaded[1]

    def _loader(self) -> str:
        sources = [(name, source.decode("utf-8", "replace")) for name, source in self._sources()]
        codes: list[CodeType] = []
        flags = TOP_LEVEL_AWAIT
        for name, text in sources:
            for code in _definitions(name, text, flags):
                flags |= code.co_flags & FUTURE
                codes.append(code)
        return _LOADER.format(sources=sources, codes=marshal.dumps(codes))


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


# ── What is a definition ──────────────────────────────────────────────────────────────────────────


def _definitions(name: str, text: str, flags: int) -> Iterator[CodeType]:
    try:
        tree = compile(text, name, "exec", flags | ONLY_TREE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return  # a cell that never ran
    from _ast import Module  # noqa: PLC0415 - see `ONLY_TREE`

    for statement in tree.body:
        if _is_definition(statement):
            code = compile(Module([statement], []), name, "exec", flags, dont_inherit=True)
            flags |= code.co_flags & FUTURE
            yield code


def _is_definition(statement: Any) -> bool:
    kind = type(statement).__name__
    if kind in ("Assign", "AnnAssign"):
        targets = statement.targets if kind == "Assign" else [statement.target]
        return all(_is_value(target) for target in targets) and _is_value(statement.value)
    if kind == "Try":  # an import with something to fall back on
        return all(
            _is_definition(each)
            for part in (statement.body, *(handler.body for handler in statement.handlers), statement.orelse)
            for each in part
        )
    return kind in _DEFINITIONS


def _is_value(node: Any, depth: int = 0) -> bool:
    """Whether to work it out does nothing else."""
    kind = type(node).__name__
    if kind == "Lambda" or node is None:
        return True
    if depth > _MAX_DEEP or kind in ("Await", "Yield", "YieldFrom", "NamedExpr"):
        return False
    if kind == "Call" and getattr(node.func, "id", getattr(node.func, "attr", "")) not in _HARMLESS:
        return False
    # Of a target: a name is made; an attribute or an item belongs to something else.
    if kind in ("Attribute", "Subscript") and type(node.ctx).__name__ == "Store":
        return False
    return all(_is_value(each, depth + 1) for each in _parts(node))


def _parts(node: Any) -> Iterator[Any]:
    for field in node._fields:
        value = getattr(node, field, None)
        for each in value if isinstance(value, list) else (value,):
            if hasattr(each, "_fields"):
                yield each


def _is_guarded(source: bytes) -> bool:
    """Whether a program says itself what is only for its first process."""
    try:
        tree: Any = compile(source, "<string>", "exec", ONLY_TREE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return any(type(each).__name__ == "If" and _names_itself(each.test) for each in tree.body)


def _names_itself(test: Any) -> bool:
    return getattr(test, "id", "") == "__name__" or any(_names_itself(each) for each in _parts(test))


# ── Modules that are loaded later ─────────────────────────────────────────────────────────────────


class Loading:
    """Calls back when a module is loaded: the first of the finders of modules, which finds none itself."""

    def __init__(self, wanted: dict[str, Callable[[Any], None]]) -> None:
        self._wanted = wanted
        for name in list(wanted):
            if name in sys.modules:
                wanted.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._wanted:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if not isinstance(spec.loader, type):  # then it is this module's own
                    self._listen(spec.loader, name)
                return spec
        return None

    def _listen(self, loader: Any, name: str) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            load(module)
            tell = self._wanted.pop(name, None)
            if tell is not None:
                tell(module)

        loader.exec_module = exec_module
