"""Runs one Python program as `python FILE` would, in an interpreter that was forked ready.

A program is run like this, at the bottom of the stack, since a program can see all frames below its own:

    program = runner.GuestProgram().take(source, name, arguments)
    try:
        exec(program.code(), program.namespace)
        if program.last is not None:
            program.answer(eval(program.last, program.namespace))
    except BaseException as exc:
        program.failed(exc)
    os._exit(program.finish())
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _thread
import atexit
import gc
import os
import sys
from _weakref import ref

from ringfence.sandbox.process.guest import c_output, later, mainfile
from ringfence.sandbox.process.guest.source import codes_of, may_answer, may_have_magics, python_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType, TracebackType
    from typing import Any
else:
    ModuleType = type(sys)  # `types` would have to be loaded

FRAMES = 1 if sys.version_info >= (3, 12) else 2
"""Our frames below the program's own; its recursion limit is raised by as many. 3.11 also counts calls of `exec`."""
_MAX_SPLIT = 262_144
"""Bytes; the last expression of a longer program is a statement like any other."""


_OURS = frozenset((__file__ if "__file__" in globals() else "<runner>", *map(later.file_of, later.MODULES)))


class GuestProgram:
    """A program, from its source to its exit status."""

    def __init__(self) -> None:
        """Everything that can be done before the program is known."""
        self._source = b""
        self._shown = "<string>"
        self._status = 0
        self._interrupted = False
        self._module: ModuleType | None = fresh_main("-c")
        self.namespace = self._module.__dict__
        sys.setrecursionlimit(sys.getrecursionlimit() + FRAMES)
        sys.path.insert(0, "")
        self._known = frozenset(sys.modules)
        self._file = mainfile.MainFile(lambda: [(self._shown, self._source)], alone=True)
        self._cell: _AsCell | None = None
        self.last: CodeType | None = None
        """An expression at the end of the program, whose value is its answer."""

    def take(self, source: bytes, name: str, arguments: list[str], *, cell: bool = False) -> GuestProgram:
        """Take the program, as if it had been started by this name, with these arguments. `cell`: it may do what people
        are used to from notebooks, and its caller is told the values that it shows."""
        self._source = source
        sys.argv = [name, *arguments]
        if name == "-c":
            sys.orig_argv = [sys.executable, name, source.decode("utf-8", "replace"), *arguments]
            loading: dict[str, Any] = {mainfile.SPAWN: self._file.adopt}
            if cell:
                self._cell = _AsCell(self.namespace, source)
                loading["matplotlib.pyplot"] = self._cell.adopt_figures
                loading["IPython.core.display_functions"] = self._cell.adopt_display
            mainfile.Loading(loading)
            if b"__file__" in source:
                self._file.give_file()
        else:
            sys.orig_argv = [sys.executable, name, *arguments]
            sys.path[0] = os.path.dirname(name)
            self._shown = name
            put(source, name)
            self._module = fresh_main(name)
            self.namespace = self._module.__dict__
        if "TZ" in os.environ:
            sys.modules["time"].tzset()
        return self

    def code(self) -> CodeType | bytes:
        """What `exec` takes: the source itself where that is enough, see `mainfile.ONLY_TREE`."""
        if self._cell is None or len(self._source) > _MAX_SPLIT:
            return self._whole(self._source)
        try:
            return self._split(self._source)
        except SyntaxError:
            python = python_of(self._source)
            if python is None:
                raise
        self._cell.offer_shell()
        return self._split(python)

    def _whole(self, source: bytes) -> CodeType | bytes:
        # Nothing is saved where `_ast` is loaded; there, our caller's own `from __future__` would hold for the source.
        if "_ast" in sys.modules or self._shown != "<string>" or (self._cell is not None and may_have_magics(source)):
            return compile(source, self._shown, "exec", dont_inherit=True)
        return source

    def _split(self, source: bytes) -> CodeType | bytes:
        """The program without its last expression, which is kept for its value."""
        if not may_answer(source):
            return self._whole(source)
        tree = compile(source, self._shown, "exec", mainfile.ONLY_TREE, dont_inherit=True)
        statements, self.last = codes_of(tree, self._shown, source, 0, shown=True)
        return statements or b""

    def answer(self, value: object) -> None:
        """Show the value of the last expression."""
        if value is not None and self._cell is not None:
            self._cell.once.answer(value)

    # ── An exception that was not caught ──

    def failed(self, exc: BaseException) -> None:
        """Do what the interpreter does with it, without our own frames."""
        if isinstance(exc, SystemExit):
            self._status = exit_status(exc.code)
            return
        trace = exc.__traceback__ and exc.__traceback__.tb_next
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        self._leave_out_ours(trace)
        exc.__traceback__ = trace
        self.show_lines()
        self._status = 1
        self._interrupted = isinstance(exc, KeyboardInterrupt)
        sys.last_type = type(exc)
        sys.last_value = exc
        sys.last_traceback = trace
        if sys.version_info >= (3, 12):
            sys.last_exc = exc
        self._complain(exc)

    def _leave_out_ours(self, trace: TracebackType | None) -> None:
        """Let a traceback end where the program called something of ours."""
        end: TracebackType | None = None
        before = trace
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if file not in _OURS:
                end = None if file == self._shown else end
            elif end is None:
                end = before
            before, trace = trace, trace.tb_next
        if end is not None:
            end.tb_next = None

    def _complain(self, exc: BaseException) -> None:
        hook = getattr(sys, "excepthook", None)
        if hook is None:
            _say("sys.excepthook is missing\n")
            hook = sys.__excepthook__
        try:
            hook(type(exc), exc, exc.__traceback__)
        except SystemExit as again:
            self._status = exit_status(again.code)
        except BaseException as worse:  # the program's own hook: whatever it raised is shown, as outside
            worse.__traceback__ = worse.__traceback__ and worse.__traceback__.tb_next
            worse.__context__ = None
            _say("Error in sys.excepthook:\n")
            sys.__excepthook__(type(worse), worse, worse.__traceback__)
            _say("\nOriginal exception was:\n")
            sys.__excepthook__(type(exc), exc, exc.__traceback__)

    def show_lines(self) -> None:
        """Let tracebacks quote a program that is in no file, as the interpreter does from 3.13 on."""
        if self._shown == "<string>" and sys.version_info >= (3, 13):
            import linecache  # noqa: PLC0415 - only for a program that failed

            lines = self._source.decode("utf-8", "replace").splitlines(keepends=True)
            linecache.cache[self._shown] = (len(self._source), None, lines, self._shown)

    # ── End ──

    def finish(self) -> int:
        """Do what the interpreter does at its end, without tearing it down. Returns the exit status."""
        if self._cell is not None:
            self._cell.finish()
        threading = sys.modules.get("threading")
        if threading is not None:
            try:
                threading._shutdown()
            except BaseException as exc:  # the program's own threads: likewise
                sys.excepthook(type(exc), exc, exc.__traceback__)
        atexit._run_exitfuncs()
        written = _flush("stdout")
        _flush("stderr")
        c_output.find_libraries()  # before what the program loaded is taken apart
        if _thread._count():
            _write_out_files()  # daemon threads go on, and would complain about anything taken from them now
        else:
            self._take_apart()
        written = _flush("stdout", silently=not written) and written
        _flush("stderr")
        c_output.flush()
        if self._interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return self._status if written else 120

    def _take_apart(self) -> None:
        """Clear all that the program made, in the interpreter's order: finalizers run, files are written out."""
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            sys.__dict__.pop(name, None)
        gc.collect()
        sys.stdout = sys.__stdout__
        sys.stderr = sys.__stderr__
        self._module = None
        self.namespace = {}
        gone: list[ref[ModuleType]] = []
        for name in [name for name in sys.modules if name not in self._known or name == "__main__"]:
            module = sys.modules.pop(name)
            if isinstance(module, ModuleType):
                gone.append(ref(module))
            del module
        gc.collect()
        for held in reversed(gone):
            still = held()
            if still is not None:
                _clear(still.__dict__)


class _AsCell:
    """What a program finds that runs as a cell of a notebook would. All of it is loaded when it is used."""

    def __init__(self, names: dict[str, Any], source: bytes) -> None:
        self._names = names
        self._process = os.getpid()
        self._once: Any = None
        if b"display" in source:
            names["display"] = self._display
        if b"get_ipython" in source:
            self.offer_shell()
        if b"matplotlib" in source:
            os.environ.setdefault("MPLBACKEND", "Agg")
        sys.meta_path.append(later.LastFinder(lambda: self.once.ipython()))

    @property
    def once(self) -> Any:
        if self._once is None:
            self._once = later.load("once").Once(self._names, sys.path[1:], self._process)
        return self._once

    def _display(self, *values: object, **how: Any) -> Any:
        return self.once.display(*values, **how)

    def offer_shell(self) -> None:
        self._names["get_ipython"] = lambda: self.once.shell()

    def adopt_figures(self, pyplot: Any) -> None:
        """There is no screen: a figure to be shown becomes a result."""

        def show(*_: object, **__: object) -> None:
            """Show all open figures as results, and close them."""
            self.once.show_figures()

        pyplot.show = show

    def adopt_display(self, functions: Any) -> None:
        functions.display = self._display

    def finish(self) -> None:
        """The program is over: show what is open, as at the end of a cell."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if self._once is None and (pyplot is None or not pyplot.get_fignums()):
            return
        try:
            self.once.finish()
        except BaseException as exc:  # a figure that cannot be drawn: whatever it raises is shown
            sys.excepthook(type(exc), exc, exc.__traceback__)
        self._names, self._once = {}, None  # what the program made is to go with it


def put(source: bytes, name: str) -> None:
    """Write the program where it expects to find itself, and tracebacks its lines."""
    with open(name, "wb") as file:
        file.write(source)


def forget_ourselves() -> None:
    """Remove our own modules from those that a program can find."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "ringfence":
            del sys.modules[name]


def name_a_parent() -> None:
    """Let `os.getppid()` be the first process of the box where the parent is outside, which the kernel calls 0: a
    signal to 0 would go to the program and its children, one to the first process harms nobody."""
    ask = os.getppid

    def getppid() -> int:
        return ask() or 1

    getppid.__doc__ = ask.__doc__
    getppid.__module__ = "posix"
    os.getppid = sys.modules["posix"].getppid = getppid  # type: ignore[attr-defined]


def fresh_main(name: str) -> ModuleType:
    module = ModuleType("__main__")
    names = module.__dict__
    names["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
        names["__annotations__"] = {}
    if name == "-c":
        names["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
    else:
        names["__file__"] = name
        names["__cached__"] = None
        names["__loader__"] = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", name)
    sys.modules["__main__"] = module
    return module


def exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    _flush("stdout")
    _say(f"{code}\n")
    return 1


def _say(text: str) -> None:
    """Write to stderr, whatever the program has made of it."""
    stream = getattr(sys, "stderr", None)
    if stream is None:
        os.write(2, text.encode("utf-8", "backslashreplace"))
        return
    try:
        stream.write(text)
        stream.flush()
    except Exception:  # there is nowhere left to report it
        return


def _write_out_files() -> None:
    from _io import BufferedWriter, TextIOWrapper  # noqa: PLC0415 - only where daemons are left

    for kind in (TextIOWrapper, BufferedWriter):
        for found in gc.get_objects():
            try:
                if type(found) is kind and not found.closed and found.writable():
                    found.flush()
            except (OSError, ValueError):
                continue  # there is nowhere left to report it


def _clear(names: dict[str, object]) -> None:
    """Clear a module as the interpreter does: private names first."""
    for name in [name for name in names if name[:1] == "_" and name[1:2] != "_"]:
        names[name] = None
    for name in [name for name in names if name != "__builtins__"]:
        names[name] = None


def _flush(name: str, *, silently: bool = False) -> bool:
    """Flush a standard stream, or what the program has put in its place."""
    stream = getattr(sys, name, None)
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except Exception as exc:  # the program may have replaced the stream
        if name == "stdout" and not silently:
            where = f"in: {stream!r}"  # as the interpreter itself says it, which changes its words
            if sys.version_info >= (3, 13):
                where = f"{'while' if sys.version_info >= (3, 14) else 'on'} flushing sys.stdout:"
            _say(f"Exception ignored {where}\n{type(exc).__name__}: {exc}\n")
        return False
    return True
