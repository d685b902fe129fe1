"""Sandboxes without await: a thin runner over `AsyncSandbox`, which says what each method does.

    with Sandbox.create() as sandbox:
        sandbox.run_code("x = 6")
        print(sandbox.run_code("x * 7").text)

Callbacks are called in the thread that waits.
"""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, cast, overload

from ringfence.box import FileFact
from ringfence.errors import RingfenceError
from ringfence.sdk import engine
from ringfence.sdk.commands import AsyncCommandHandle, AsyncCommands, CommandOptions, Processes
from ringfence.sdk.execution import CommandResult, Execution
from ringfence.sdk.files import AsyncFiles, AsyncWatch, Changes, Facts, Infos
from ringfence.sdk.infos import FileChange, FileInfo, Moved, ProcessInfo, SandboxInfo, SnapshotInfo, VolumeInfo
from ringfence.sdk.once import OnOutput
from ringfence.sdk.sandbox import (
    AsyncSandbox,
    CodeOptions,
    ConnectOptions,
    SandboxOptions,
    Snapshots,
    Volumes,
)
from ringfence.sdk.transfer import Data, OnProgress

T = TypeVar("T")

Sandboxes = list[SandboxInfo]

_END: Any = object()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    return engine.engine().wait(work, queue.SimpleQueue())


def _steps(pieces: AsyncIterator[T]) -> Iterator[T]:
    async def step() -> T:
        return await anext(pieces, _END)

    try:
        while (piece := _wait(step())) is not _END:
            yield piece
    finally:
        close = getattr(pieces, "aclose", None)
        if close is not None:
            _wait(close())


class Sandbox:
    """A box that stays: variables, files and processes live on from step to step. Opened when it is first used."""

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._take(AsyncSandbox(**options))

    def _take(self, inner: AsyncSandbox) -> None:
        self._inner = inner
        self.commands = Commands(inner.commands)
        self.files = Files(inner.files)

    @classmethod
    def _of(cls, inner: AsyncSandbox) -> Self:
        made = cls.__new__(cls)
        made._take(inner)
        return made

    @classmethod
    def create(cls, **options: Unpack[SandboxOptions]) -> Self:
        return cls._of(_wait(AsyncSandbox.create(**options)))

    @classmethod
    def connect(cls, id: str, **options: Unpack[ConnectOptions]) -> Self:
        return cls._of(_wait(AsyncSandbox.connect(id, **options)))

    @classmethod
    def list(cls, *, ended: bool = False) -> Sandboxes:
        return _wait(AsyncSandbox.list(ended=ended))

    @property
    def id(self) -> str:
        """It is opened for this, where it was not used yet."""
        return _wait(self._inner.open())

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._inner.metadata

    def info(self) -> SandboxInfo:
        return _wait(self._inner.info())

    def pause(self) -> SandboxInfo:
        return _wait(self._inner.pause())

    def resume(self) -> SandboxInfo:
        return _wait(self._inner.resume())

    def set_lifetime(self, seconds: float) -> SandboxInfo:
        return _wait(self._inner.set_lifetime(seconds))

    def set_timeout(self, timeout: float) -> None:
        _wait(self._inner.set_timeout(timeout))

    def kill(self) -> bool:
        return _wait(self._inner.kill())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def run_code(self, code: str, **options: Unpack[CodeOptions]) -> Execution:
        return engine.waited(lambda here: self._inner.run_code(code, **cast(CodeOptions, here)), options)

    def get_host(self, port: int | str) -> str:
        return _wait(self._inner.get_host(port))

    def interrupt(self, context: str | None = None) -> bool:
        return _wait(self._inner.interrupt(context))

    def snapshot(self, name: str | None = None) -> SnapshotInfo:
        return _wait(self._inner.snapshot(name))

    def fork(self, count: int = 1) -> Sequence[Sandbox | RingfenceError]:
        made = _wait(self._inner.fork(count))
        return [Sandbox._of(each) if isinstance(each, AsyncSandbox) else each for each in made]

    @classmethod
    def snapshots(cls) -> Snapshots:
        return _wait(AsyncSandbox.snapshots())

    @classmethod
    def remove_snapshot(cls, snapshot: str | SnapshotInfo) -> None:
        _wait(AsyncSandbox.remove_snapshot(snapshot))

    @classmethod
    def create_volume(
        cls, name: str, max_bytes: int | None = None, mode: Literal["ro", "rw"] | None = None
    ) -> VolumeInfo:
        return _wait(AsyncSandbox.create_volume(name, max_bytes, mode))

    @classmethod
    def volumes(cls) -> Volumes:
        return _wait(AsyncSandbox.volumes())

    @classmethod
    def remove_volume(cls, name: str) -> None:
        _wait(AsyncSandbox.remove_volume(name))


class Commands:
    """Commands in a sandbox."""

    def __init__(self, inner: AsyncCommands) -> None:
        self._inner = inner

    @overload
    def run(
        self, cmd: str | Sequence[str], background: Literal[False] = False, **options: Unpack[CommandOptions]
    ) -> CommandResult: ...

    @overload
    def run(
        self, cmd: str | Sequence[str], background: Literal[True], **options: Unpack[CommandOptions]
    ) -> CommandHandle: ...

    def run(
        self, cmd: str | Sequence[str], background: bool = False, **options: Unpack[CommandOptions]
    ) -> CommandResult | CommandHandle:
        if not background:
            return engine.waited(lambda here: self._inner.run(cmd, False, **cast(CommandOptions, here)), options)
        callbacks = options.pop("on_stdout", None), options.pop("on_stderr", None)
        return CommandHandle(_wait(self._inner.run(cmd, True, **options)), *callbacks)

    def list(self) -> Processes:
        return _wait(self._inner.list())

    def kill(self, pid: int) -> bool:
        return _wait(self._inner.kill(pid))

    def connect(self, pid: int) -> CommandHandle:
        return CommandHandle(_wait(self._inner.connect(pid)))


class CommandHandle:
    """A command in the background. It runs on whether or not anybody holds this."""

    def __init__(
        self, inner: AsyncCommandHandle, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None
    ) -> None:
        self._inner = inner
        self._callbacks = {"on_stdout": on_stdout, "on_stderr": on_stderr}

    @property
    def info(self) -> ProcessInfo:
        return self._inner.info

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def stdout(self) -> str:
        return self._inner.stdout

    @property
    def stderr(self) -> str:
        return self._inner.stderr

    def read(self) -> tuple[str, str]:
        return _wait(self._inner.read())

    def wait(
        self, timeout: float | None = None, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None
    ) -> CommandResult:
        given = {"on_stdout": on_stdout, "on_stderr": on_stderr}
        callbacks = given if any(given.values()) else self._callbacks
        return engine.waited(lambda here: self._inner.wait(timeout, **here), callbacks)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return _steps(aiter(self._inner))

    def kill(self) -> bool:
        return _wait(self._inner.kill())

    def send_stdin(self, data: str | bytes, *, eof: bool = False) -> None:
        _wait(self._inner.send_stdin(data, eof=eof))


class Files:
    """The files of a sandbox."""

    def __init__(self, inner: AsyncFiles) -> None:
        self._inner = inner

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
        self, path: str, format: Any = "text", *, offset: int = 0, length: int | None = None
    ) -> str | bytes | Iterator[bytes]:
        found: Any = _wait(self._inner.read(path, format, offset=offset, length=length))
        return _steps(found) if format == "stream" else found

    def write(self, path: str, data: Data, *, append: bool = False, mode: int | None = None) -> FileFact:
        return _wait(self._inner.write(path, data, append=append, mode=mode))

    def write_files(self, files: Mapping[str, Data] | Iterable[Mapping[str, Any]]) -> Facts:
        return _wait(self._inner.write_files(files))

    def copy(self, path: str, to: str, *, to_sandbox: str | None = None) -> FileFact:
        return _wait(self._inner.copy(path, to, to_sandbox=to_sandbox))

    def list(self, path: str = "/workspace", depth: int = 1) -> Infos:
        return _wait(self._inner.list(path, depth))

    def get_info(self, path: str) -> FileInfo:
        return _wait(self._inner.get_info(path))

    def exists(self, path: str) -> bool:
        return _wait(self._inner.exists(path))

    def remove(self, path: str) -> None:
        _wait(self._inner.remove(path))

    def rename(self, path: str, to: str) -> None:
        _wait(self._inner.rename(path, to))

    def make_dir(self, path: str) -> bool:
        return _wait(self._inner.make_dir(path))

    def upload(self, host: str | Path, path: str, *, on_progress: OnProgress | None = None) -> Moved:
        return engine.waited(lambda here: self._inner.upload(host, path, **here), {"on_progress": on_progress})

    def download(self, path: str, host: str | Path, *, on_progress: OnProgress | None = None) -> Moved:
        return engine.waited(lambda here: self._inner.download(path, host, **here), {"on_progress": on_progress})

    def watch(self, path: str = "/workspace", *, recursive: bool = False) -> Watch:
        """An iterator of FileChange, which waits for each; `new()` does not wait. Stop it."""
        return Watch(_wait(self._inner.watch(path, recursive=recursive)))


class Watch:
    """What changes in a folder."""

    def __init__(self, inner: AsyncWatch) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[FileChange]:
        return _steps(self._inner)

    def new(self) -> Changes:
        return _wait(self._inner.new())

    def stop(self) -> None:
        _wait(self._inner.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
