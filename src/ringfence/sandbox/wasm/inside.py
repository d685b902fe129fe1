"""Runs one program, in the interpreter that was compiled to WebAssembly. It is sent there as source, after the modules
of the guest (`process.guest`) that run a program anywhere.

There is no network, no process and no thread there; what lacks for other reasons is made up here: standard streams at
their descriptors, the usual folders and variables, and an event loop that only ever waits for time.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUNNER = "ringfence.sandbox.process.guest.runner"
WORKSPACE = "/workspace"
INPUT = "/workspace/tmp/.input"
"""What comes on standard input, as the worker writes it: parts, each after its length; one of no length is the last."""
STATUS = "/workspace/tmp/.status"
"""The exit status of a program that left by `os._exit`: the runtime only tells whether it was 0."""
_LENGTH = 4
_PAUSE = 0.002
_INTERRUPTED = 130
_OF_THE_RUNTIME = ("PYTHONHOME", "PYTHONPATH", "PYTHONUNBUFFERED")

runner: Any = sys.modules[RUNNER]
runner.forget_ourselves()


def run(order: dict[str, Any]) -> int:
    """Run the program of an order. Returns its exit status."""
    _begin(order)
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)  # the runtime's own, which waits for what it calls outside
    try:
        return _run(order)
    finally:
        asyncio._set_running_loop(loop)


def _run(order: dict[str, Any]) -> int:
    program = runner.GuestProgram().take(order["source"], order["name"], order["argv"], cell=order["cell"])
    program.show_lines()
    try:
        exec(program.code(), program.namespace)  # noqa: S102 - this is what the box is for
        if program.last is not None:
            program.answer(eval(program.last, program.namespace))  # noqa: S307 - likewise
    except BaseException as exc:  # the program's, whatever it is: it ends as it would outside
        sys.setprofile(None)
        sys.settrace(None)
        program.failed(exc)
    interrupted = program._interrupted
    program._interrupted = False  # there are no signals
    status: int = program.finish()
    return _INTERRUPTED if interrupted else status


def _begin(order: dict[str, Any]) -> None:
    for name in _OF_THE_RUNTIME:
        os.environ.pop(name, None)
    os.environ.update(order["env"])
    _folders.extend(order["folders"])
    os.chdir(WORKSPACE)
    sys.path[:0] = order["packages"]
    out, err = (io.FileIO(number, "w", closefd=False) for number in (1, 2))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(_Input(order["input"])), "utf-8")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(out), "utf-8")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(err), "utf-8", "backslashreplace", line_buffering=True
    )
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        stream.buffer.raw.name = f"<{name}>"
        stream.mode = mode


class _Input(io.RawIOBase):
    """Standard input: the runtime has none, so it is read from a file that grows."""

    name: Any

    def __init__(self, given: bool) -> None:
        self._file = io.FileIO(INPUT) if given else None
        self._at = 0
        self._left = 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def readinto(self, buffer: Any) -> int:
        if self._file is None:
            return 0
        if not self._left:
            self._left = int.from_bytes(self._exactly(_LENGTH), "big")
        if not self._left:
            self._file = None
            return 0
        data = self._exactly(min(self._left, len(buffer)))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def _exactly(self, size: int) -> bytes:
        """The next bytes, once they are there."""
        assert self._file is not None
        data = b""
        while len(data) < size:
            self._file.seek(self._at)
            part = self._file.read(size - len(data))
            self._at += len(part or b"")
            data += part or b""
            if not part:
                time.sleep(_PAUSE)
                self._file.close()
                self._file = io.FileIO(INPUT)  # one that is open does not grow
        return data


class _Sleeper:
    """In place of a selector: nothing but time can be waited for."""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the event loop waits for something that can never happen here")
        time.sleep(max(0.0, timeout))
        return []

    def close(self) -> None:
        return


class _Loop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._selector = _Sleeper()

    def _process_events(self, events: list[Any]) -> None:
        return

    def _write_to_self(self) -> None:
        return


sys.modules["asyncio.unix_events"]._UnixDefaultEventLoopPolicy._loop_factory = _Loop


# ── What the runtime would do otherwise than a program expects ────────────────────────────────────

_folders: list[tuple[str, bool]] = []
"""Those of its box, and whether a program can only read each."""
_EXPLAINED = (
    "chdir",
    "listdir",
    "lstat",
    "mkdir",
    "readlink",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
)
_exit = os._exit
_write = os.write


def _write_all(descriptor: int, data: Any) -> int:
    view = memoryview(data).cast("B")
    at = _write(descriptor, view)
    while at < len(view):  # it takes little at a time, and programs rely on a file to take all
        try:
            at += _write(descriptor, view[at:])
        except OSError:
            break
    return at


def _change_mode(path: Any, mode: int, *, dir_fd: Any = None, follow_symlinks: bool = True) -> None:
    os.stat(path)
    if not isinstance(path, int) and not _is_writable(os.path.abspath(os.fsdecode(path))):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)


def _is_writable(path: str) -> bool:
    """Whether the folder that it lies in may be written to. Permissions of their own, files do not have."""
    inside = [each for each in _folders if f"{path}/".startswith(f"{each[0]}/")]
    return bool(inside) and not max(inside)[1]


def _explained(act: Any) -> Any:
    """A function of files that says what is wrong: the runtime itself often says no more than that something is."""

    def explained(*given: Any, **more: Any) -> Any:
        try:
            return act(*given, **more)
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            number = _reason(act.__name__, *given[:1])
            if number is None:
                raise
            raise OSError(number, os.strerror(number), exc.filename, None, exc.filename2) from None

    return explained


def _reason(name: str, path: Any = ".") -> int | None:
    if not os.access(path, os.F_OK):
        return None if name == "mkdir" else errno.ENOENT
    folder = os.path.isdir(path)
    if name == "mkdir":
        return errno.EEXIST
    if name in ("unlink", "remove") and folder:
        return errno.EISDIR
    if name in ("rmdir", "listdir", "scandir", "chdir") and not folder:
        return errno.ENOTDIR
    return errno.ENOTEMPTY if name == "rmdir" else None


class _NoSocket:
    """There is no network, and so nothing that a socket could do."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "there is no network in WebAssembly")


def _leave(status: int) -> None:
    with open(STATUS, "w", encoding="ascii") as file:
        file.write(str(int(status) & 0xFF))
    _exit(status)


_made: dict[str, Any] = {name: _explained(getattr(os, name)) for name in (*_EXPLAINED, "unlink")}
for name, made in {**_made, "_exit": _leave, "chmod": _change_mode, "write": _write_all}.items():
    made.__doc__ = getattr(os, name).__doc__
    made.__name__ = made.__qualname__ = name
    made.__module__ = "posix"
    setattr(os, name, made)
    setattr(sys.modules["posix"], name, made)
sys.modules["socket"].socket = _NoSocket  # type: ignore[attr-defined]
gc.collect()
gc.freeze()  # what is there already need not be looked at again at the end of each program
