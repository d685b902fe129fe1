"""The files of a sandbox. Paths are absolute beneath /workspace, or relative to it; nothing outside can be named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from ringfence.box import Attached, FileFact
from ringfence.errors import NotFound
from ringfence.model import Json, Outcome
from ringfence.sdk import engine
from ringfence.sdk.execution import value
from ringfence.sdk.infos import FileChange, FileInfo, Moved, Progress
from ringfence.sdk.link import Link, given
from ringfence.sdk.transfer import Data, Landing, OnProgress, across, is_archive, measured, packed

Infos = list[FileInfo]
Facts = list[FileFact]
Changes = list[FileChange]
OnChange = Callable[[FileChange], object]

_DEEPEST = 64
_AHEAD = 4
"""Pieces that are read before somebody asks for them."""


class AsyncFiles:
    """The files of a sandbox. A paused one need not go on for them."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # ── One file ──

    @overload
    async def read(
        self, path: str, format: Literal["text"] = "text", *, offset: int = 0, length: int | None = None
    ) -> str: ...

    @overload
    async def read(
        self, path: str, format: Literal["bytes"], *, offset: int = 0, length: int | None = None
    ) -> bytes: ...

    @overload
    async def read(
        self, path: str, format: Literal["stream"], *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]: ...

    async def read(
        self, path: str, format: str = "text", *, offset: int = 0, length: int | None = None
    ) -> str | bytes | AsyncIterator[bytes]:
        """A file as `text` (UTF-8), as `bytes`, or as a `stream` of pieces. Raises NotFound."""
        wanted = given(path=path, offset=offset or None, length=length)
        if format == "stream":
            return self._stream(wanted)
        if format not in ("text", "bytes"):
            raise ValueError(f"format must be 'text', 'bytes' or 'stream', this is {format!r}")
        pieces: list[bytes] = []

        async def sink(piece: bytes) -> None:
            pieces.append(piece)

        await self._link.work("read_file", wanted, Attached(sink=sink))
        data = b"".join(pieces)
        if format == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text in UTF-8; read it with format='bytes'") from None

    async def _stream(self, wanted: Json) -> AsyncIterator[bytes]:
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(_AHEAD)
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def put(piece: bytes) -> None:
            await room.acquire()
            pieces.put_nowait(piece)

        async def sink(piece: bytes) -> None:
            await across(loop, put(piece))

        reading = loop.create_task(self._link.work("read_file", wanted, Attached(sink=sink)))
        reading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                room.release()
                yield piece
            reading.result()
        finally:
            reading.cancel()

    async def write(self, path: str, data: Data, *, append: bool = False, mode: int | None = None) -> FileFact:
        """Write a file, with the folders above it. It is there as a whole or not at all.

        A `Path` is a file of the host; of an open file or of pieces nothing is held in memory.
        """
        async with measured(data, _nobody) as (named, body):
            wanted = given(path=path, data=named, append=append or None, mode=mode)
            return _fact(await self._link.work("write_file", wanted, Attached(data=body)))

    async def write_files(self, files: Mapping[str, Data] | Iterable[Mapping[str, Any]]) -> Facts:
        """Several, one after the other: data by path, or mappings with `path` and `data`."""
        pairs = files.items() if isinstance(files, Mapping) else ((each["path"], each["data"]) for each in files)
        return [await self.write(path, data) for path, data in pairs]

    async def copy(self, path: str, to: str, *, to_sandbox: str | None = None) -> FileFact:
        """Copy a file, here or into another sandbox of yours, by its id; it passes through nobody else."""
        wanted = given(path=path, to_path=to, to_session=to_sandbox)
        return _fact(await self._link.work("copy_file", wanted))

    # ── Folders ──

    async def list(self, path: str = "/workspace", depth: int = 1) -> Infos:
        """What is in a folder, in order, and in the folders in it down to `depth`. No link is followed."""
        if depth < 1:
            raise ValueError(f"depth must be 1 or more, this is {depth}")
        return [FileInfo.of(each) for each in (await self._link.ask("list_files", path=path, depth=depth))["entries"]]

    async def get_info(self, path: str) -> FileInfo:
        """What lies at a path. Raises NotFound."""
        return FileInfo.of((await self._link.ask("list_files", path=path, depth=0))["entries"][0])

    async def exists(self, path: str) -> bool:
        """Whether anything is there; a link is, wherever it leads."""
        try:
            await self.get_info(path)
        except NotFound:
            return False
        return True

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Raises NotFound."""
        await self._link.ask("remove_file", path=path)

    async def rename(self, path: str, to: str) -> None:
        """Give a file, link or folder another path; a file in its place is replaced. Raises NotFound."""
        await self._link.ask("rename_file", path=path, to=to)

    async def make_dir(self, path: str) -> bool:
        """Make a folder, with those above it. False where it is there already."""
        return bool((await self._link.ask("make_folder", path=path))["made"])

    # ── From the host and to it ──

    async def upload(self, host: str | Path, path: str, *, on_progress: OnProgress | None = None) -> Moved:
        """Put all that is in a folder of the host into a folder here, or a file of the host in the place of a file."""
        source = Path(host)
        is_folder = await asyncio.to_thread(source.is_dir)

        async def sending(tell: Callable[[str, Any], None]) -> Moved:
            def progress(far: Progress) -> None:
                tell("progress", far)

            if not is_folder:
                async with measured(source, progress) as (named, body):
                    told = await self._link.work("write_file", {"path": path, "data": named}, Attached(data=body))
                return Moved(1, int(told["bytes"]))
            left_out: dict[str, str] = {}
            async with packed(source, left_out, progress) as (named, body):
                told = await self._link.work("write_folder", {"path": path, "data": named}, Attached(data=body))
            return Moved(int(told["count"]), int(named["bytes"]), left_out)

        return await engine.told(sending, {"progress": on_progress})

    async def download(self, path: str, host: str | Path, *, on_progress: OnProgress | None = None) -> Moved:
        """Take a file to the host; or a folder: into a folder there, or as an archive where the name ends in `.tar`.

        An archive that the box made up cannot reach outside of that folder. Into a folder, what programs of the host
        act upon by themselves (`.git`, `.envrc`, …) does not come along: `left_out` names it.
        """
        target = Path(host)
        info = await self.get_info(path)

        async def fetching(tell: Callable[[str, Any], None]) -> Moved:
            landing = Landing(target, lambda far: tell("progress", far))
            try:
                if info.kind == "dir":
                    await self._link.work("read_folder", {"path": path}, Attached(sink=landing.sink))
                    return await self._landed(info.path, landing, is_archive(target))
                await self._link.work("read_file", {"path": path}, Attached(sink=landing.sink))
                landing.land()
                return Moved(1, landing.bytes)
            finally:
                landing.close()

        return await engine.told(fetching, {"progress": on_progress})

    async def _landed(self, path: str, landing: Landing, as_archive: bool) -> Moved:
        names = await asyncio.to_thread(landing.names)
        left_out = {
            each.path: "it leads out of the folder" if each.kind == "link" else "it is no file, folder or link"
            for each in await self.list(path, _DEEPEST)
            if each.kind in ("link", "other") and each.path.removeprefix(f"{path}/") not in names
        }
        if as_archive:
            landing.land()
            return Moved(sum(names.values()), landing.bytes, left_out)
        moved = await asyncio.to_thread(landing.unpack)
        left_out |= {f"{path}/{inner}": why for inner, why in moved.left_out.items()}
        return Moved(moved.files, moved.bytes, left_out)

    # ── As it happens ──

    async def watch(
        self, path: str = "/workspace", on_change: OnChange | None = None, *, recursive: bool = False
    ) -> AsyncWatch:
        """Tells what changes in a folder from now on: to `on_change`, or to whoever iterates. Stop it."""
        watch = AsyncWatch(self._link, {"path": path, **given(recursive=recursive or None)}, on_change)
        await watch.begin()
        return watch


class AsyncWatch:
    """An asynchronous iterator of FileChange, and a context manager that stops it."""

    def __init__(self, link: Link, wanted: Json, on_change: OnChange | None) -> None:
        self._link = link
        self._wanted = wanted
        self._on_change = on_change
        self._changes: asyncio.Queue[FileChange | None] = asyncio.Queue()
        self._task: asyncio.Task[Outcome] | None = None

    async def begin(self) -> None:
        """Returns when the watch is in place. Raises what says why it cannot be."""
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()

        def changed(change: Any) -> None:
            if change is None:
                engine.quietly(loop, begun.set_result, None)
            else:
                engine.quietly(loop, self._changes.put_nowait, FileChange(change.kind, change.path, change.to))

        self._task = loop.create_task(self._run(changed))
        self._task.add_done_callback(lambda _: self._changes.put_nowait(None))
        await asyncio.wait((self._task, begun), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            value(self._task.result())

    async def _run(self, changed: Callable[[Any], None]) -> Outcome:
        if self._on_change is None:
            return await self._link.outcome("watch_files", self._wanted, Attached(changed=changed))

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            def heard(change: Any) -> None:
                changed(change) if change is None else tell("change", FileChange(change.kind, change.path, change.to))

            return await self._link.outcome("watch_files", self._wanted, Attached(changed=heard))

        return await engine.told(telling, {"change": self._on_change})

    async def new(self) -> Changes:
        """What has changed since this was last asked, without waiting."""
        found: Changes = []
        while not self._changes.empty() and (change := self._changes.get_nowait()) is not None:
            found.append(change)
        return found

    async def stop(self) -> None:
        """No more is told."""
        if self._task is not None and self._task.cancel():
            await asyncio.wait({self._task})

    def __aiter__(self) -> AsyncWatch:
        return self

    async def __anext__(self) -> FileChange:
        change = await self._changes.get()
        if change is not None:
            return change
        self._changes.put_nowait(None)  # for whoever asks again
        if self._task is not None and not self._task.cancelled():
            value(self._task.result())
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _nobody(far: Progress) -> None:
    """Is told how far a file is that somebody writes."""


def _fact(told: Json) -> FileFact:
    return FileFact(str(told["path"]), int(told["bytes"]), str(told["sha256"]))
