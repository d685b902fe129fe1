"""Sandboxes without await, for programs that have no event loop of their own.

    with Sandbox.create() as sandbox:
        sandbox.run_code("x = 6")
        print(sandbox.run_code("x * 7").text)

Callbacks are called in the thread that waits. Generated from the asynchronous classes by scripts/blocking.py: change
those, and run it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, overload

from ringfence.core.box import FileFact
from ringfence.core.errors import RingfenceError
from ringfence.sdk import engine
from ringfence.sdk.commands import AsyncCommandHandle, AsyncCommands, CommandOptions, Processes
from ringfence.sdk.execution import CommandBytes, CommandResult, Execution
from ringfence.sdk.files import AsyncFiles, AsyncWatch, Changes, Data, Facts, FileInfos, OnProgress
from ringfence.sdk.infos import (
    CodeContext,
    FileChange,
    FileInfo,
    Moved,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    VolumeInfo,
)
from ringfence.sdk.once import OnOutput
from ringfence.sdk.sandbox import (
    AsyncSandbox,
    CodeOptions,
    ConnectOptions,
    Contexts,
    Sandboxes,
    SandboxOptions,
    Snapshots,
    Volumes,
)

A = TypeVar("A")


class _Blocking(Generic[A]):
    """The blocking counterpart of an asynchronous object."""

    _inner: A

    @classmethod
    def _of(cls, inner: A) -> Self:
        made = cls.__new__(cls)
        made._inner = inner
        return made


class Sandbox(_Blocking[AsyncSandbox]):
    """A box that stays: variables, files and processes live on from step to step. Its first use opens it."""

    @property
    def commands(self) -> Commands:
        """Runs commands in it."""
        return Commands._of(self._inner.commands)

    @property
    def files(self) -> Files:
        """Reads and writes its files."""
        return Files._of(self._inner.files)

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._inner = AsyncSandbox(**options)

    @classmethod
    def create(cls, **options: Unpack[SandboxOptions]) -> Self:
        """Open a sandbox.

        Raises QuotaExceeded if there is no room for it, NotFound for an unknown snapshot or volume, SetUpFailed.
        """
        return cls._of(engine.waited(AsyncSandbox.create, **options))

    @classmethod
    def connect(cls, id: str, **options: Unpack[ConnectOptions]) -> Self:
        """Connect to a sandbox that was opened elsewhere, by its id. Raises SandboxNotFound, SandboxStopped."""
        return cls._of(engine.waited(AsyncSandbox.connect, id, **options))

    @classmethod
    def list(cls, *, ended: bool = False) -> Sandboxes:
        """List your sandboxes; with `ended`, also those that ended within the last day."""
        return engine.waited(AsyncSandbox.list, ended=ended)

    def open(self) -> str:
        """Open the sandbox, if it is not open yet, and return its id."""
        return engine.waited(self._inner.open)

    @property
    def id(self) -> str:
        """Its id. The sandbox is opened for it, if it was not used yet."""
        return self.open()

    @property
    def metadata(self) -> Mapping[str, str]:
        """The labels that it was made with."""
        return self._inner.metadata

    def info(self) -> SandboxInfo:
        """Its state now, also when it has ended."""
        return engine.waited(self._inner.info)

    def pause(self) -> SandboxInfo:
        """Freeze everything in it. Its clocks stop too, and nothing is lost."""
        return engine.waited(self._inner.pause)

    def resume(self) -> SandboxInfo:
        """Let it go on after a pause. Policy decides anew what it may do."""
        return engine.waited(self._inner.resume)

    def set_lifetime(self, seconds: float) -> SandboxInfo:
        """End it after so many seconds from now."""
        return engine.waited(self._inner.set_lifetime, seconds)

    def set_timeout(self, timeout: float) -> None:
        """Set the run timeout of everything that this object runs from now on."""
        engine.waited(self._inner.set_timeout, timeout)

    def kill(self) -> bool:
        """End it, with everything that runs in it. False if it was never opened, or this object killed it before.

        A RuntimeWarning says what of its volumes and outputs could not be kept.
        """
        return engine.waited(self._inner.kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine.waited(self._inner.__aexit__, kind, exc, trace)

    def run_code(self, code: str, **options: Unpack[CodeOptions]) -> Execution:
        """Run Python in the sandbox's interpreter, which keeps its state. An exception in the code is in the Execution.
        With `language`, run a bash or JavaScript program instead.

        Raises Unavailable if it never ran, Refused if it may not run, OutcomeUnknown if it may have run.
        """
        return engine.waited(self._inner.run_code, code, **options)

    def interrupt(self, context: str | CodeContext | None = None) -> bool:
        """Raise KeyboardInterrupt in the code that runs now; variables stay. False if nothing runs."""
        return engine.waited(self._inner.interrupt, context)

    def create_code_context(self, name: str | None = None, cwd: str | None = None) -> CodeContext:
        """Name an interpreter for `run_code(context=…)`; it starts with its first cell, or here in the folder `cwd`."""
        return engine.waited(self._inner.create_code_context, name, cwd)

    def list_code_contexts(self) -> Contexts:
        """List the contexts that were named so far; `default` is always there."""
        return engine.waited(self._inner.list_code_contexts)

    def restart_code_context(self, context: str | CodeContext = "default") -> bool:
        """End its interpreter, with all variables and the code that runs; the next run has a fresh one. False if it has
        none now.
        """
        return engine.waited(self._inner.restart_code_context, context)

    def remove_code_context(self, context: str | CodeContext) -> bool:
        """End its interpreter, and forget the context. False if there is no such context."""
        return engine.waited(self._inner.remove_code_context, context)

    def get_host(self, port: int | str) -> str:
        """Show a port of the sandbox on this machine's loopback, to your user alone; returns `127.0.0.1:PORT`.

        Name it by number, or as `listen` named it. Raises Refused if the sandbox was made without `listen`.
        """
        return engine.waited(self._inner.get_host, port)

    def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keep its files, environment and working folder, for `create(snapshot=…)`. Memory is not kept."""
        return engine.waited(self._inner.snapshot, name)

    def fork(self, count: int = 1) -> Sequence[Sandbox | RingfenceError]:
        """Make `count` sandboxes that start with the files of this one, which goes on.

        Each is made or fails by itself: an error stands in the place of one that failed.
        """
        found: Sequence[Sandbox | RingfenceError] = _blocking(engine.waited(self._inner.fork, count))
        return found

    @classmethod
    def snapshots(cls) -> Snapshots:
        """List your snapshots, the newest first."""
        return engine.waited(AsyncSandbox.snapshots)

    @classmethod
    def remove_snapshot(cls, snapshot: str | SnapshotInfo) -> None:
        """Remove a snapshot. Raises NotFound."""
        engine.waited(AsyncSandbox.remove_snapshot, snapshot)

    @classmethod
    def create_volume(
        cls, name: str, max_bytes: int | None = None, mode: Literal["ro", "rw"] | None = None
    ) -> VolumeInfo:
        """Make a durable folder for your sandboxes: `create(volumes={"/workspace/data": name})`."""
        return engine.waited(AsyncSandbox.create_volume, name, max_bytes, mode)

    @classmethod
    def volumes(cls) -> Volumes:
        """List your volumes."""
        return engine.waited(AsyncSandbox.volumes)

    @classmethod
    def remove_volume(cls, name: str) -> None:
        """Remove a volume, with everything in it. Raises NotFound."""
        engine.waited(AsyncSandbox.remove_volume, name)


class Commands(_Blocking[AsyncCommands]):
    """Commands in a sandbox."""

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        output: Literal["text"] = "text",
        **options: Unpack[CommandOptions],
    ) -> CommandResult: ...

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        *,
        output: Literal["bytes"],
        **options: Unpack[CommandOptions],
    ) -> CommandBytes: ...

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[True],
        output: Literal["text"] = "text",
        **options: Unpack[CommandOptions],
    ) -> CommandHandle: ...

    def run(
        self,
        cmd: str | Sequence[str],
        background: bool = False,
        output: Literal["text", "bytes"] = "text",
        **options: Unpack[CommandOptions],
    ) -> CommandResult | CommandBytes | CommandHandle:
        """Run a line of /bin/sh, or a command given as words. A command that fails is a result, not an exception.

        With `output="bytes"` stdout and stderr are bytes as they were written, also those that callbacks get.
        """
        waited: Any = engine.waited  # which no type checker can match with overloads
        found: CommandResult | CommandBytes | CommandHandle = _blocking(
            waited(self._inner.run, cmd, background, output, **options)
        )
        return found

    def list(self) -> Processes:
        """List the commands that were started in the background, including those that are over."""
        return engine.waited(self._inner.list)

    def kill(self, pid: int, signal: int = 9) -> bool:
        """Signal a background command and everything that it started. False if there is no such command."""
        return engine.waited(self._inner.kill, pid, signal)

    def connect(self, pid: int) -> CommandHandle:
        """A handle of a background command, started here or elsewhere. Raises NotFound."""
        found: CommandHandle = _blocking(engine.waited(self._inner.connect, pid))
        return found


class CommandHandle(_Blocking[AsyncCommandHandle]):
    """A command in the background. It runs on whether or not a handle of it exists."""

    @property
    def info(self) -> ProcessInfo:
        """Its state when this handle was made."""
        return self._inner.info

    @property
    def pid(self) -> int:
        """Its number in the sandbox."""
        return self._inner.pid

    @property
    def stdout(self) -> str:
        """All of its stdout so far, what came before this handle was made included."""
        return self._inner.stdout

    @property
    def stderr(self) -> str:
        """Its stderr, likewise."""
        return self._inner.stderr

    def read(self) -> tuple[str, str]:
        """Its new stdout and stderr since the last read or wait, without waiting."""
        return engine.waited(self._inner.read)

    def wait(
        self, timeout: float | None = None, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None
    ) -> CommandResult:
        """Wait until it is over. Raises TimedOut if that takes longer; the command then goes on."""
        return engine.waited(self._inner.wait, timeout, on_stdout=on_stdout, on_stderr=on_stderr)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of `stdout` or `stderr` and text, as it is written, until the command is over."""
        return engine.steps(aiter(self._inner))

    def kill(self) -> bool:
        """End it with everything that it started. False if the sandbox does not know it any more."""
        return engine.waited(self._inner.kill)

    def send_stdin(self, data: str | bytes, *, eof: bool = False) -> None:
        """Write to its stdin; `eof` closes it afterwards."""
        engine.waited(self._inner.send_stdin, data, eof=eof)

    def resize(self, columns: int, rows: int) -> None:
        """Give its terminal another size; what runs in front is told. Raises Refused if it has none (`pty`)."""
        engine.waited(self._inner.resize, columns, rows)


class Files(_Blocking[AsyncFiles]):
    """The files of a sandbox. They can be used while it is paused."""

    @overload
    def read(
        self, path: str, format: Literal["text"] = "text", *, offset: int = 0, length: int | None = None
    ) -> str: ...

    @overload
    def read(self, path: str, format: Literal["bytes"], *, offset: int = 0, length: int | None = None) -> bytes: ...

    @overload
    def read(
        self, path: str, format: Literal["stream"], *, offset: int = 0, length: int | None = None
    ) -> Iterator[bytes]: ...

    def read(
        self, path: str, format: str = "text", *, offset: int = 0, length: int | None = None
    ) -> str | bytes | Iterator[bytes]:
        """Read a file as `text` (UTF-8), as `bytes`, or as a `stream` of pieces. Raises NotFound."""
        waited: Any = engine.waited  # which no type checker can match with overloads
        found: str | bytes | Iterator[bytes] = _blocking(
            waited(self._inner.read, path, format, offset=offset, length=length)
        )
        return found

    def write(self, path: str, data: Data, *, append: bool = False, mode: int | None = None) -> FileFact:
        """Write a file, and make the folders above it. It is written as a whole or not at all.

        A `Path` is a file of the host. An open file and pieces are never held in memory as a whole.
        """
        return engine.waited(self._inner.write, path, data, append=append, mode=mode)

    def write_files(self, files: Mapping[str, Data] | Iterable[Mapping[str, Any]]) -> Facts:
        """Write several files, one after the other: data by path, or mappings with `path` and `data`."""
        return engine.waited(self._inner.write_files, files)

    def copy(self, path: str, to: str, *, to_sandbox: str | None = None) -> FileFact:
        """Copy a file, here or into another sandbox of yours, by its id. The data does not pass through us."""
        return engine.waited(self._inner.copy, path, to, to_sandbox=to_sandbox)

    def list(self, path: str = "/workspace", depth: int = 1) -> FileInfos:
        """List a folder, sorted, and the folders in it down to `depth`. No link is followed."""
        return engine.waited(self._inner.list, path, depth)

    def get_info(self, path: str) -> FileInfo:
        """What is at a path. Raises NotFound."""
        return engine.waited(self._inner.get_info, path)

    def exists(self, path: str) -> bool:
        """Whether there is anything at a path. A link counts, wherever it leads."""
        return engine.waited(self._inner.exists, path)

    def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Raises NotFound."""
        engine.waited(self._inner.remove, path)

    def rename(self, path: str, to: str) -> None:
        """Move a file, link or folder to another path; a file there is replaced. Raises NotFound."""
        engine.waited(self._inner.rename, path, to)

    def make_dir(self, path: str) -> bool:
        """Make a folder, and those above it. False if it exists already."""
        return engine.waited(self._inner.make_dir, path)

    def upload(self, host: str | Path, path: str, *, on_progress: OnProgress | None = None) -> Moved:
        """Copy a file of the host to a path here, or the content of a folder of the host into a folder here."""
        return engine.waited(self._inner.upload, host, path, on_progress=on_progress)

    def download(self, path: str, host: str | Path, *, on_progress: OnProgress | None = None) -> Moved:
        """Copy a file to the host, or a folder into a folder there, or as an archive if the name ends in `.tar`.

        Nothing in the box can make it write outside of that folder, not even where that lies in one that the box may
        write to: a link on the way that another may have made is not followed. Files that programs of the host act upon
        by themselves (`.git`, `.envrc`, …) are not copied into a folder: `left_out` names them.
        """
        return engine.waited(self._inner.download, path, host, on_progress=on_progress)

    def watch(self, path: str = "/workspace", *, recursive: bool = False) -> Watch:
        """Watch a folder: iterate over its changes from now on, or ask for those that are `new()`. Stop it at last."""
        found: Watch = _blocking(engine.waited(self._inner.watch, path, recursive=recursive))
        return found


class Watch(_Blocking[AsyncWatch]):
    """The changes of a folder: an iterator of FileChange, and a context manager that stops it."""

    def new(self) -> Changes:
        """The changes since this was last called, without waiting."""
        return engine.waited(self._inner.new)

    def stop(self) -> None:
        """Stop watching."""
        engine.waited(self._inner.stop)

    def __iter__(self) -> Iterator[FileChange]:
        return engine.steps(aiter(self._inner))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        engine.waited(self._inner.__aexit__, kind, exc, trace)


_COUNTERPARTS: dict[type[Any], type[_Blocking[Any]]] = {
    AsyncSandbox: Sandbox,
    AsyncCommands: Commands,
    AsyncCommandHandle: CommandHandle,
    AsyncFiles: Files,
    AsyncWatch: Watch,
}


def _blocking(found: object) -> Any:
    """The blocking counterpart of whatever is asynchronous in `found`."""
    if type(found) in _COUNTERPARTS:
        return _COUNTERPARTS[type(found)]._of(found)
    if isinstance(found, AsyncIterator):
        return engine.steps(found)
    return [_blocking(each) for each in found] if isinstance(found, list) else found
