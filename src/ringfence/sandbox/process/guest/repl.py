"""A session's interpreter: runs one cell after another, in one namespace, `__main__`, as a notebook does.

Orders come over a SEQPACKET socket as `marshal` of a dict, with the descriptors of stdout and stderr, and a sealed
memory file with the source if that is too long for a message:

    {"kind": "cell", "id": 7, "name": "<cell 7>", "source": b"x + 1"}

and, as wanted, `env` (variables for this cell alone; what the cell itself sets stays), `answer` (False: the value of
the last expression is not shown) and `figures` (["png"] by default; "svg"). The replies are described in
`claims`: results and at most one error while the cell runs, `done` when it has ended and all that it printed is
written. Its stdout and stderr may still be held then: by us for a moment, and by processes that it left behind.

What a cell can count on: variables, imports, the working folder and the event loop stay. `_` is the last value shown.
`display(…)` shows a value at once. A last line that ends with `;` shows nothing. Magic commands and `!cmd` do what they
do in notebooks (`magics`, `notebook`). `await` works at the top; tasks that are left go on between cells, and while a
later cell awaits. `sys.exit()` ends the cell, not the interpreter. SIGINT is KeyboardInterrupt in the running cell, and
between cells nothing. A handler of SIGINT, a trace and a profile function last for their cell. A child that comes back
from a cell ends there. Whatever of ours a cell breaks, it breaks for its own session alone.
"""

from __future__ import annotations

import _ast
import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import _thread
import atexit
import builtins
import errno
import gc
import io
import marshal
import os
import sys
from os import _exit, access, close, dup2, fstat, getpid, pread
from time import tzset

from ringfence.sandbox.process.guest import c_output, claims, display, later, mainfile, runner
from ringfence.sandbox.process.guest.source import codes_of, python_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any, NoReturn

__builtins__ = display.BUILTINS  # type: ignore[assignment]

CLAIM_BYTES = 8 * 1024 * 1024
"""Bytes for all results of a cell together."""
_FRAMES = 3 if sys.version_info >= (3, 12) else 4
"""Our frames below a cell's own, from `serve` on; it may recurse so much deeper. 3.11 counts calls of `exec`."""
_COROUTINE = 0x80
_PEEKED = bytearray(1)
_NO_VALUE = object()
_IN_A_ROW = 1000
_HELD = 4096
_MAX_KEPT = 4 * 1024 * 1024
"""Bytes of source that are kept for tracebacks; the oldest cells are forgotten first."""
_STREAM_NAMES = ("stdout", "stderr")


def serve(channel: socket.socket, names: dict[str, object] | None = None, ready: bytes = b"") -> NoReturn:
    """Run cells until the supervisor closes the channel. `names` are defined from the start; `ready` is sent first."""
    below = sys._getframe().f_back
    depth = 0
    while below is not None:
        below, depth = below.f_back, depth + 1
    interpreter = Repl(channel, depth)
    interpreter.begin_with(names or {})
    if ready:
        channel.send(ready)
    failures = 0
    while failures < _IN_A_ROW:
        try:
            interpreter.step()
            failures = 0
        except BaseException:  # by a signal handler of a cell, called between cells: no error of a cell
            failures += 1
    _exit(1)


class GuestCell:
    """A cell, from its order to its end."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id: int = order["id"]
        self.name: str = order["name"]
        self.source: bytes = order.get("source", b"")
        self.env: dict[str, str] = order.get("env") or {}
        self.before: dict[str, str | None] = {}
        self.answer: bool = order.get("answer", True)
        self.figures = tuple(order.get("figures") or ("png",))
        self.refused = False
        self.begun = False
        self.ok = False
        self.left = CLAIM_BYTES
        self.left_out = 0


class Repl(display.Notebook):
    def __init__(self, channel: socket.socket, depth: int) -> None:
        os.set_inheritable(channel.fileno(), False)
        self._channel: socket.socket | None = channel
        self._pid = getpid()
        self._main = _thread.get_ident()
        self._lock = _thread.allocate_lock()
        """Threads display, too, and claims must not interleave."""
        self._held = b""
        self._spare: list[int] = []
        """Spare descriptors, closed when a cell has used up all others."""
        self._cell: GuestCell | None = None
        self._busy = False
        """The user's code runs, and may be interrupted."""
        self._interrupted = False
        """A signal came while our own code ran, where nothing may be raised; callers of user code check this."""
        every: tuple[Any, ...] = (Repl.step, Repl._fail, Repl._claim, Repl._say)
        self._undisturbed = frozenset(method.__code__ for method in every)
        self._handler = self._on_interrupt
        self._loop: Any = None
        self._between = TasksBetweenCells()
        self._last: object = _NO_VALUE
        self._sources = Sources()
        every = (serve, display.forms, claims.messages)
        files = [function.__code__.co_filename for function in every]
        self._files = frozenset((*files, later.load.__code__.co_filename, *map(later.file_of, later.MODULES)))
        self._streams = Streams()
        later.adopt(display, claims)
        self._file = mainfile.MainFile(self._sources.all, alone=False)
        super().__init__(runner.fresh_main("-c").__dict__)
        self._prepare(depth)

    def begin_with(self, names: dict[str, object]) -> None:
        self._names.update(names)

    def _prepare(self, depth: int) -> None:
        """Prepare this process for cells."""
        display.remember_paths()
        sys.argv = [""]
        sys.path.insert(0, "")
        sys.setrecursionlimit(sys.getrecursionlimit() + depth + _FRAMES)
        builtins.display = self.display  # type: ignore[attr-defined]
        os.environ.setdefault("MPLBACKEND", "Agg")
        if "TZ" in os.environ:
            tzset()
        if "matplotlib" in sys.modules:
            sys.modules["matplotlib"].use("Agg")
        loaded = {"matplotlib.pyplot": self._figures.adopt, "linecache": self._sources.quote}
        loaded["IPython.core.display_functions"] = self._adopt_display
        mainfile.Loading({**loaded, mainfile.SPAWN: self._file.adopt})
        sys.meta_path.append(later.LastFinder(self.ipython))
        runner.name_a_parent()
        os.register_at_fork(after_in_child=self._fall_silent)
        # Libraries check whether the handler is the default one, and restore it; so the default one is ours.
        signals: list[Any] = [signal, sys.modules.get("signal", signal)]
        for module in signals:
            module.default_int_handler = self._handler
        signal.signal(signal.SIGINT, self._handler)
        self._streams.lead_nowhere()
        self._spare = self._streams.spare()
        gc.enable()

    # ── A cell ──

    def step(self) -> None:
        """Run the next cell from its order to its end, or the rest of one that was interrupted."""
        if (cell := self._cell) is None:
            self._between.go_on(self._loop)
            if self._between.running or _thread._count():
                self._streams.flush()  # what they write now is read as late
            else:
                self._streams.lead_nowhere()  # the supervisor does not wait for it
            cell = self._cell = self._next()
        if not cell.begun:
            cell.begun = True
            self._interrupted = False
            self._busy = True
            try:
                self._run(cell)
                self.show_figures()
                cell.ok = True
            except BaseException as exc:  # an error of the cell, whatever it is
                self._fail(cell, exc)
        self._busy = False
        if getpid() != self._pid:
            _exit(1)  # a child that returned from a cell
        self._end(cell)

    def _next(self) -> GuestCell:
        order, descriptors = self._receive()
        cell = GuestCell(order)
        if len(descriptors) < (2 if "source" in order else 3):
            cell.refused = True  # there was no room for them
            close_all(descriptors + self._spare)
            self._spare = []
            return cell
        self._streams.lead_to(descriptors[0], descriptors[1])
        if len(descriptors) > 2:
            cell.source = pread(descriptors[2], fstat(descriptors[2]).st_size, 0)
            close(descriptors[2])
        return cell

    def _run(self, cell: GuestCell) -> None:
        if cell.refused:
            raise OSError(errno.EMFILE, "too many open files: the cell was not run; the next one can close some")
        self._figures.kinds = cell.figures
        self._between.stop()
        self._set_env(cell)
        self._sources.keep(cell.name, cell.source)
        if b"__file__" in cell.source and "__file__" not in self._names:
            self._file.give_file()
        look_again()
        self._names.pop("__warningregistry__", None)  # the warning was about a line of another cell
        value = None
        try:
            codes = self._sources.compile(cell.name, cell.source, shown=cell.answer)
            if self._sources.has_magics or b"get_ipython" in cell.source:
                self._names.setdefault("get_ipython", self.shell().get_ipython)
            self._look_for_interrupt()
            if any(code.co_flags & _COROUTINE for code in codes):
                value = self._wait_for(self._run_in_loop(codes))
            else:
                for code in codes:
                    value = eval(code, self._names)  # noqa: S307 - this is what the box is for
        finally:
            if sys.gettrace() is not None or sys.getprofile() is not None:
                sys.setprofile(None)
                sys.settrace(None)
            if getpid() != self._pid:
                self._leave(sys.exc_info()[1], cell)
            if self._shell is not None:
                self._shell.finish()
            display.flush()
        if value is not None:
            self._answer(value)

    async def _run_in_loop(self, codes: list[CodeType]) -> Any:
        """Run a cell that awaits; the event loop runs for the rest of it, too."""
        value = None
        for code in codes:
            value = eval(code, self._names)  # noqa: S307 - running code is what a box is for
            if code.co_flags & _COROUTINE:
                value = await value
        return value

    def _wait_for(self, coroutine: Any) -> Any:
        asyncio = display.standard("asyncio")
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            self._look_for_interrupt()
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted while it waited
                task.cancel()
                self._loop.run_until_complete(asyncio.wait((task,)))
            if not task.cancelled():
                task.exception()  # now the loop knows that it was retrieved
            raise

    def _end(self, cell: GuestCell) -> None:
        """Clean up after the cell, and report that it has ended."""
        if signal.getsignal(signal.SIGINT) is not self._handler:
            signal.signal(signal.SIGINT, self._handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        self._streams.flush()
        if not (self._spare or cell.refused):
            self._spare = self._streams.spare()
        self._restore_env(cell)
        how = f'"ok":{"true" if cell.ok else "false"},"left_out":{cell.left_out}'
        with self._lock:
            self._say([f'{{"t":"done","id":{cell.id},{how}}}'.encode()])
            self._cell = None

    # ── Claims ──

    def _was_shown(self) -> None:
        if _thread.get_ident() == self._main:
            self._look_for_interrupt()

    def _adopt_display(self, functions: Any) -> None:
        """An IPython that is installed shows values as we do."""
        functions.display = self.display

    def _answer(self, value: object) -> None:
        if self._names.get("_", self._last) is self._last:  # otherwise the user has a `_` of their own
            self._names["_"] = self._last = value
        self._look_for_interrupt()
        self._claim(display.forms(value, self._figures), main=True)

    def _claim(self, forms: dict[str, str], *, main: bool) -> None:
        if getpid() != self._pid:
            sys.stdout.write(f"{forms.get('text/plain', '')}\n")  # the supervisor ignores messages of a child
            return
        with self._lock:
            cell = self._cell
            if cell is None:
                sys.stdout.write(f"{forms.get('text/plain', '')}\n")  # of a thread, between cells: it is late
            if cell is None or not forms:
                return
            fit, cut = claims.fitting(forms, cell.left)
            if not fit:
                cell.left_out += 1
                return
            head = f'{{"t":"result","id":{cell.id},"main":{"true" if main else "false"}'
            messages = list(claims.messages(head, fit, cut))
            cell.left -= claims.cost(messages, len(fit) + len(cut))
            self._say(messages, hold=main)

    def _fail(self, cell: GuestCell, exc: BaseException) -> None:
        try:
            error = claims.described(exc, cell.name, self._files)
        except BaseException:  # its own text fails, or a cell broke what makes tracebacks
            self._busy = False
            error = claims.barely_described(exc)
        self._busy = False
        sys.last_type = type(exc)
        sys.last_value = exc
        sys.last_traceback = exc.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = exc
        with self._lock:
            self._say(list(claims.messages(f'{{"t":"error","id":{cell.id}', error)), hold=True)
        self._busy = True
        try:
            self.show_figures()
        except BaseException:  # one error is enough
            return

    # ── Interrupts, children ──

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._busy:
            return
        if frame is not None and frame.f_code in self._undisturbed:
            self._interrupted = True
        else:
            raise KeyboardInterrupt

    def _look_for_interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt

    def _fall_silent(self) -> None:
        """A child sends nothing to the supervisor."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _leave(self, exc: BaseException | None, cell: GuestCell) -> NoReturn:
        """Do what the interpreter does at the end of a child."""
        status = 1
        try:
            if exc is None or isinstance(exc, SystemExit):
                status = runner.exit_status(exc and exc.code)
            else:
                exc.__traceback__ = claims.within(exc.__traceback__, cell.name, self._files)
                sys.excepthook(type(exc), exc, exc.__traceback__)
            atexit._run_exitfuncs()
            display.flush()
            c_output.flush()
        finally:
            _exit(status)

    # ── Around a cell ──

    def _set_env(self, cell: GuestCell) -> None:
        for name, value in cell.env.items():
            cell.before[name] = os.environ.get(name)
            os.environ[name] = value
        if "TZ" in cell.env:
            tzset()

    def _restore_env(self, cell: GuestCell) -> None:
        before, cell.before = cell.before, {}
        for name, value in before.items():
            if os.environ.get(name) != cell.env[name]:
                continue  # the cell set it anew
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if "TZ" in before:
            tzset()

    # ── The channel ──

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        channel = self._channel
        if channel is None:
            _exit(1)
        try:
            # A buffer for the longest order would take memory all the time.
            size = channel.recv_into(_PEEKED, 1, socket.MSG_PEEK | socket.MSG_TRUNC)
            if not size:
                _exit(0)  # the supervisor no longer needs us
            data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(12), socket.MSG_CMSG_CLOEXEC)
        except OSError as exc:
            _give_up(exc)
        descriptors: list[int] = []
        for _, _, packed in ancillary:
            descriptors += memoryview(packed).cast("i")
        return marshal.loads(data), descriptors  # noqa: S302 - it comes from the supervisor

    def _say(self, messages: list[bytes], *, hold: bool = False) -> None:
        """`hold`: the next message is sent together with this one; waking the supervisor once is enough."""
        if self._held:
            messages[0] = self._held + b"\n" + messages[0]
            self._held = b""
        if hold and len(messages) == 1 and len(messages[0]) < _HELD:
            self._held = messages[0]
            return
        channel = self._channel
        if channel is None:
            return
        try:
            for message in messages:
                channel.send(message)
        except OSError as exc:
            _give_up(exc)


def _give_up(exc: OSError) -> NoReturn:
    """A cell closed the channel, or the supervisor did."""
    if exc.errno is None:
        raise exc  # raised by a handler of the user's
    _exit(1)


# ── The source of cells: how it becomes code, and how tracebacks quote it ─────────────────────────


class Sources:
    """The sources of all cells of an interpreter."""

    def __init__(self) -> None:
        self._flags = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._kept: dict[str, bytes] = {}
        self._size = 0
        self._linecache: Any = None
        """The `linecache` module, once it is loaded; most sessions never load it."""
        self._python: dict[str, bytes] = {}
        """Cells with magic commands, as Python."""
        self.has_magics = False
        """Whether the last cell had any."""

    def compile(self, name: str, source: bytes, *, shown: bool) -> list[CodeType]:
        """The statements; the last of them by itself if it is an expression whose value is to be shown."""
        python: bytes | None = None
        try:
            tree = compile(source, name, "exec", self._flags | _ast.PyCF_ONLY_AST, dont_inherit=True)
        except SyntaxError:
            if (python := python_of(source)) is None:
                raise
        self.has_magics = python is not None
        if python is not None:
            tree = compile(python, name, "exec", self._flags | _ast.PyCF_ONLY_AST, dont_inherit=True)
            self._python[name] = source = python
        codes = codes_of(tree, name, source, self._flags, shown=shown)
        if codes[0] is not None:
            self._flags |= codes[0].co_flags & mainfile.FUTURE  # they hold for later cells, too
        return [code for code in codes if code is not None]

    def keep(self, name: str, source: bytes) -> None:
        """Keep the source, so that tracebacks can quote it."""
        self._size += len(source) - len(self._kept.pop(name, b""))
        self._kept[name] = source
        self._put(name, source)
        while self._size > _MAX_KEPT and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._size -= len(self._kept.pop(oldest))
            self._python.pop(oldest, None)
            self._put(oldest, b"")

    def all(self) -> list[tuple[str, bytes]]:
        return [(name, self._python.get(name, source)) for name, source in self._kept.items()]

    def quote(self, linecache: Any) -> None:
        """From now on lines can be asked for."""
        self._linecache = linecache
        for name, source in self._kept.items():
            self._put(name, source)

    def _put(self, name: str, source: bytes) -> None:
        if self._linecache is None:
            return
        text = source.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        try:
            self._linecache.cache[name] = (len(source), None, [f"{line}\n" for line in text.split("\n")], name)
        except Exception:  # whatever a cell has made of it
            self._linecache = None


class TasksBetweenCells:
    """Runs the event loop of cells while none of them runs: tasks go on.

    It does so in a thread, which the supervisor sees as any other that a cell leaves. The main thread waits for the
    next order meanwhile, by which the supervisor knows that a cell is over.
    """

    def __init__(self) -> None:
        self._stopped = _thread.allocate_lock()
        """Held while the thread runs."""
        self._loop: Any = None
        self._waiting: Any = None
        """The task that ends when there is nothing left to do."""

    @property
    def running(self) -> bool:
        return self._stopped.locked()

    def go_on(self, loop: Any) -> None:
        """Run the loop, if it has anything to do."""
        try:
            if loop is None or self.running or loop.is_closed() or not _has_work(loop):
                return
        except Exception:  # a cell has made something else of it
            return
        self._loop = loop
        self._stopped.acquire()
        try:
            self._waiting = loop.create_task(self._until_idle(loop))
            _thread.start_new_thread(self._run, ())
        except BaseException:  # no more threads: the tasks go on with the next cell that awaits
            self._waiting.cancel()
            self._stopped.release()

    def stop(self) -> None:
        """Have the loop for the main thread again. A task that does not let go is waited for."""
        if self.running:
            try:
                self._loop.call_soon_threadsafe(self._waiting.cancel)
            except RuntimeError:  # closed by a task
                return
            self._stopped.acquire()
            self._stopped.release()

    def _run(self) -> None:
        asyncio = sys.modules["asyncio"]
        try:
            self._loop.run_until_complete(self._waiting)
        except asyncio.CancelledError:
            return
        except BaseException as exc:  # of a task: SystemExit, say
            sys.excepthook(type(exc), exc, exc.__traceback__)
        finally:
            self._stopped.release()

    async def _until_idle(self, loop: Any) -> None:
        asyncio: Any = sys.modules["asyncio"]
        while True:
            tasks = asyncio.all_tasks(loop) - {self._waiting}
            if tasks:
                await asyncio.wait(tasks)
            elif loop._scheduled:
                await asyncio.sleep(max(0.0, max(handle.when() for handle in loop._scheduled) - loop.time()))
            elif _watches(loop):
                await loop.create_future()
            else:
                return


def _has_work(loop: Any) -> bool:
    return bool(sys.modules["asyncio"].all_tasks(loop) or loop._scheduled or loop._ready or _watches(loop))


def _watches(loop: Any) -> bool:
    """Whether it waits for files, a server's socket for one, besides the one that wakes it up."""
    return len(loop._selector.get_map() or ()) > 1


# ── Streams: the running cell's pipes, and after it those of the last as long as threads are left; there is no input ──
# What threads and child processes write while no cell runs is read from the pipes of an earlier one, as late.


class NoInput(io.TextIOBase):
    """Standard input of a cell: there is none. Descriptor 0 is empty, for programs that look there."""

    encoding = "utf-8"

    def read(self, size: int | None = -1, /) -> NoReturn:
        raise RuntimeError("a session has no standard input; pass data as a file or a variable")

    readline = read

    @property
    def buffer(self) -> NoInput:
        return self

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        """`exit()` closes what it finds here; the next cell must find the same as this one."""


class Streams:
    """The descriptors 1 and 2, and the two streams of the interpreter that write into them."""

    def __init__(self) -> None:
        self._nowhere = -1
        self._lead_somewhere = False
        self._own: list[io.TextIOBase] = []
        sys.stdin = sys.__stdin__ = NoInput()  # type: ignore[assignment, misc]
        for number, name in enumerate(_STREAM_NAMES, 1):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
            else:
                stream = _stream(number)
                setattr(sys, name, stream)
            self._own.append(stream)

    def lead_to(self, stdout: int, stderr: int) -> None:
        """Write to these descriptors, which are taken over."""
        if self._lead_somewhere:
            self.lead_nowhere()
        else:
            self.flush()
        self._lead_somewhere = True
        for number, descriptor in enumerate((stdout, stderr), 1):
            dup2(descriptor, number)
        close(stdout)
        close(stderr)
        self._mend()

    def lead_nowhere(self) -> None:
        """Discard output from now on. Everything written so far has reached its cell."""
        self._lead_somewhere = False
        self.flush()
        try:
            for number in (1, 2):
                dup2(self._nowhere, number)
        except OSError:  # the first time, or a cell closed it
            self._nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
            for number in (1, 2):
                dup2(self._nowhere, number)
        self.flush()  # what could not be written does not belong to the next cell

    def spare(self) -> list[int]:
        """Three descriptors of /dev/null; none if there are no more."""
        found: list[int] = []
        try:
            while len(found) < 3:
                found.append(os.dup(self._nowhere))
        except OSError:
            close_all(found)
            return []
        return found

    def flush(self) -> None:
        """Flush everything."""
        for stream in self._own:
            try:
                stream.flush()
            except (OSError, ValueError, RuntimeError):
                continue  # it is not read, or was closed
        c_output.flush()

    def _mend(self) -> None:
        """Restore a stream that a cell closed, unless it put another in its place."""
        for number, name in enumerate(_STREAM_NAMES, 1):
            old = self._own[number - 1]
            if not _is_usable(old):
                new = self._own[number - 1] = _stream(number)
                for place in (name, f"__{name}__"):
                    if getattr(sys, place, None) is old:
                        setattr(sys, place, new)


def look_again() -> None:
    """Find modules in folders of the path that did not exist when the interpreter looked there first, as those of a
    PYTHONPATH in a workspace that began empty: it would not look there again."""
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None and access(path, os.R_OK | os.X_OK):
            sys.path_importer_cache.pop(path, None)


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            close(descriptor)
        except OSError:
            continue  # a cell closed it


def _stream(number: int) -> io.TextIOBase:
    # By lines, since a person may be watching. What UTF-8 cannot encode is escaped, not an error.
    return open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _is_usable(stream: io.TextIOBase) -> bool:
    try:
        return not stream.closed
    except ValueError:  # its buffer was taken away
        return False
