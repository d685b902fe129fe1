"""The files of a sandbox. Paths are those that its programs see, or relative to /workspace; what a program in it could
not read or write is refused, too."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import tarfile
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, Literal, Self, TypeVar, overload

from ringfence.core.box import MIB, Attached, FileFact
from ringfence.core.errors import NotFound, Refused, Unavailable
from ringfence.core.model import Json, Outcome, Status
from ringfence.sdk import engine
from ringfence.sdk.client import SessionClient, given
from ringfence.sdk.execution import value
from ringfence.sdk.infos import FileChange, FileInfo, Moved, Progress

T = TypeVar("T")

Data = str | bytes | Path | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""Text, bytes, a file of the host by its Path, an open file, or pieces."""
Body = bytes | AsyncIterator[bytes]
OnProgress = Callable[[Progress], object]
FileInfos = list[FileInfo]
Facts = list[FileFact]
Changes = list[FileChange]
OnChange = Callable[[FileChange], object]

_MAX_BYTES = 2**44
_MAX_FILES = 10_000_000
_DEEPEST = 64
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
_AHEAD = 4
"""How many pieces of a stream are read ahead."""


class AsyncFiles:
    """The files of a sandbox. They can be used while it is paused."""

    def __init__(self, client: SessionClient) -> None:
        self._client = client

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
        """Read a file as `text` (UTF-8), as `bytes`, or as a `stream` of pieces. Raises NotFound."""
        wanted = given(path=path, offset=offset or None, length=length)
        if format == "stream":
            return self._stream(wanted)
        if format not in ("text", "bytes"):
            raise ValueError(f"format must be 'text', 'bytes' or 'stream', this is {format!r}")
        pieces: list[bytes] = []

        async def sink(piece: bytes) -> None:
            pieces.append(piece)

        await self._client.work("read_file", wanted, Attached(sink=sink))
        data = b"".join(pieces)
        if format == "bytes":
            return data
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text in UTF-8; read it with format='bytes'") from None

    async def _stream(self, wanted: Json) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(_AHEAD)
        pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def put(piece: bytes) -> None:
            await room.acquire()
            pieces.put_nowait(piece)

        async def sink(piece: bytes) -> None:
            await across(loop, put(piece))

        reading = loop.create_task(self._client.work("read_file", wanted, Attached(sink=sink)))
        reading.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                room.release()
                yield piece
            reading.result()
        finally:
            reading.cancel()

    async def write(self, path: str, data: Data, *, append: bool = False, mode: int | None = None) -> FileFact:
        """Write a file, and make the folders above it. It is written as a whole or not at all.

        A `Path` is a file of the host. An open file and pieces are never held in memory as a whole.
        """
        async with measured(data, _no_progress) as (named, body):
            wanted = given(path=path, data=named, append=append or None, mode=mode)
            return _fact(await self._client.work("write_file", wanted, Attached(data=body)))

    async def write_files(self, files: Mapping[str, Data] | Iterable[Mapping[str, Any]]) -> Facts:
        """Write several files, one after the other: data by path, or mappings with `path` and `data`."""
        pairs = files.items() if isinstance(files, Mapping) else ((each["path"], each["data"]) for each in files)
        return [await self.write(path, data) for path, data in pairs]

    async def copy(self, path: str, to: str, *, to_sandbox: str | None = None) -> FileFact:
        """Copy a file, here or into another sandbox of yours, by its id. The data does not pass through us."""
        wanted = given(path=path, to_path=to, to_session=to_sandbox)
        return _fact(await self._client.work("copy_file", wanted))

    # ── Folders ──

    async def list(self, path: str = "/workspace", depth: int = 1) -> FileInfos:
        """List a folder, sorted, and the folders in it down to `depth`. No link is followed."""
        if depth < 1:
            raise ValueError(f"depth must be 1 or more, this is {depth}")
        return [FileInfo.of(each) for each in (await self._client.ask("list_files", path=path, depth=depth))["entries"]]

    async def get_info(self, path: str) -> FileInfo:
        """What is at a path. Raises NotFound."""
        return FileInfo.of((await self._client.ask("list_files", path=path, depth=0))["entries"][0])

    async def exists(self, path: str) -> bool:
        """Whether there is anything at a path. A link counts, wherever it leads."""
        try:
            await self.get_info(path)
        except NotFound:
            return False
        return True

    async def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. Raises NotFound."""
        await self._client.ask("remove_file", path=path)

    async def rename(self, path: str, to: str) -> None:
        """Move a file, link or folder to another path; a file there is replaced. Raises NotFound."""
        await self._client.ask("rename_file", path=path, to=to)

    async def make_dir(self, path: str) -> bool:
        """Make a folder, and those above it. False if it exists already."""
        return bool((await self._client.ask("make_folder", path=path))["made"])

    # ── From the host and to it ──

    async def upload(self, host: str | Path, path: str, *, on_progress: OnProgress | None = None) -> Moved:
        """Copy a file of the host to a path here, or the content of a folder of the host into a folder here."""
        source = engine.named(host, "no_input")
        is_folder = await asyncio.to_thread(source.is_dir)

        async def sending(tell: Callable[[str, Any], None]) -> Moved:
            def progress(far: Progress) -> None:
                tell("progress", far)

            if not is_folder:
                async with measured(source, progress) as (named, body):
                    reply = await self._client.work("write_file", {"path": path, "data": named}, Attached(data=body))
                return Moved(1, int(reply["bytes"]))
            left_out: dict[str, str] = {}
            async with packed(source, left_out, progress) as (named, body):
                reply = await self._client.work("write_folder", {"path": path, "data": named}, Attached(data=body))
            return Moved(int(reply["count"]), int(named["bytes"]), left_out)

        return await engine.with_callbacks(sending, {"progress": on_progress})

    async def download(self, path: str, host: str | Path, *, on_progress: OnProgress | None = None) -> Moved:
        """Copy a file to the host, or a folder into a folder there, or as an archive if the name ends in `.tar`.

        Nothing in the box can make it write outside of that folder, not even where that lies in one that the box may
        write to: a link on the way that another may have made is not followed. Files that programs of the host act upon
        by themselves (`.git`, `.envrc`, …) are not copied into a folder: `left_out` names them.
        """
        target = engine.named(host, "no_output")
        info = await self.get_info(path)

        async def fetching(tell: Callable[[str, Any], None]) -> Moved:
            landing = Landing(target, lambda far: tell("progress", far))
            try:
                if info.kind == "dir":
                    await self._client.work("read_folder", {"path": path}, Attached(sink=landing.sink))
                    return await self._landed(info.path, landing, is_archive(target))
                await self._client.work("read_file", {"path": path}, Attached(sink=landing.sink))
                landing.land()
                return Moved(1, landing.bytes)
            finally:
                landing.close()

        return await engine.with_callbacks(fetching, {"progress": on_progress})

    async def _landed(self, path: str, landing: Landing, as_archive: bool) -> Moved:
        names = await asyncio.to_thread(landing.names)
        left_out = _missing(path, names, await self.list(path, _DEEPEST))
        if as_archive:
            landing.land()
            return Moved(sum(names.values()), landing.bytes, left_out)
        moved = await asyncio.to_thread(landing.unpack)
        left_out |= {f"{path}/{inner}": why for inner, why in moved.left_out.items()}
        return Moved(moved.files, moved.bytes, left_out)

    # ── Changes ──

    async def watch(
        self, path: str = "/workspace", on_change: OnChange | None = None, *, recursive: bool = False
    ) -> AsyncWatch:
        """Watch a folder: iterate over its changes from now on, or ask for those that are `new()`. Stop it at last.

        `on_change` gets each change instead, as it comes.
        """
        watch = AsyncWatch(self._client, {"path": path, **given(recursive=recursive or None)}, on_change)
        await watch._begin()
        return watch


class AsyncWatch:
    """The changes of a folder: an iterator of FileChange, and a context manager that stops it."""

    def __init__(self, client: SessionClient, wanted: Json, on_change: OnChange | None) -> None:
        self._client = client
        self._wanted = wanted
        self._on_change = on_change
        self._changes: asyncio.Queue[FileChange | None] = asyncio.Queue()
        self._task: asyncio.Task[Outcome] | None = None

    async def _begin(self) -> None:
        """Return when the watch is in place. Raises the error if it cannot be."""
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
            return await self._client.outcome("watch_files", self._wanted, Attached(changed=changed))

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            def heard(change: Any) -> None:
                changed(change) if change is None else tell("change", FileChange(change.kind, change.path, change.to))

            return await self._client.outcome("watch_files", self._wanted, Attached(changed=heard))

        return await engine.with_callbacks(telling, {"change": self._on_change})

    async def new(self) -> Changes:
        """The changes since this was last called, without waiting."""
        found: Changes = []
        while not self._changes.empty() and (change := self._changes.get_nowait()) is not None:
            found.append(change)
        return found

    async def stop(self) -> None:
        """Stop watching."""
        if self._task is not None and self._task.cancel():
            await asyncio.wait({self._task})

    def __aiter__(self) -> AsyncIterator[FileChange]:
        return self

    async def __anext__(self) -> FileChange:
        change = await self._changes.get()
        if change is not None:
            return change
        self._changes.put_nowait(None)  # the next call ends too
        if self._task is not None and not self._task.cancelled():
            value(self._task.result())
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def _no_progress(far: Progress) -> None:
    """Hears the progress of a write, of which no caller wants to know."""


def _fact(reply: Json) -> FileFact:
    return FileFact(str(reply["path"]), int(reply["bytes"]), str(reply["sha256"]))


async def across(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on `loop`, and wait for it on this one."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


# ── Into a sandbox ────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def measured(data: Data, tell: Callable[[Progress], None]) -> AsyncIterator[tuple[Json, Body]]:
    """How the arguments of a call refer to the data, and the data. What is neither bytes nor a file is spooled."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        whole = bytes(data)
        body = whole if len(whole) <= MIB else _sliced(whole, tell)
        yield {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}, body
        return
    if isinstance(data, Path):
        with _reading(engine.named(data, "no_input")) as file:
            digest = await asyncio.to_thread(_digest, file)
            yield digest, _read(file, digest["bytes"], tell)
        return
    with tempfile.TemporaryFile(prefix="ringfence-") as file:
        async for piece in _pieces(data):
            await asyncio.to_thread(file.write, piece)
        digest = await asyncio.to_thread(_digest, file)
        yield digest, _read(file, digest["bytes"], tell)


@asynccontextmanager
async def packed(
    folder: Path, left_out: dict[str, str], tell: Callable[[Progress], None]
) -> AsyncIterator[tuple[Json, Body]]:
    """A folder of the host as a tar stream. Links that lead out of it and special files are named in `left_out`."""
    with tempfile.TemporaryFile(prefix="ringfence-") as file:
        found: dict[str, str] = {}
        digest = await asyncio.to_thread(_pack, folder, file, found)
        left_out.update(found)
        yield digest, _read(file, digest["bytes"], tell)


def _pack(folder: Path, file: IO[bytes], left_out: dict[str, str]) -> Json:
    from ringfence.sandbox.files import archive, paths  # noqa: PLC0415 - descriptors of folders: only Linux has them

    try:
        descriptor = paths.open_without_links(str(folder), paths.FOLDER)
    except OSError as exc:
        raise Unavailable("no_input", f"{folder}: {exc.strerror}") from None
    try:
        for piece in archive.pack_folder(descriptor, left_out):
            file.write(piece)
    except OSError as exc:
        raise Unavailable("no_input", f"{folder}: {exc.strerror}") from None
    finally:
        os.close(descriptor)
    return _digest(file)


def _reading(path: Path) -> IO[bytes]:
    from ringfence.sandbox.files import paths  # noqa: PLC0415 - as above

    try:
        return os.fdopen(paths.open_without_links(str(path), os.O_RDONLY), "rb")
    except OSError as exc:
        raise Unavailable("no_input", f"{path}: {exc.strerror}") from None


def _digest(file: IO[bytes]) -> Json:
    file.flush()
    file.seek(0)
    found = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    size = file.tell()
    file.seek(0)
    return {"bytes": size, "sha256": found.hexdigest()}


async def _sliced(data: bytes, tell: Callable[[Progress], None]) -> AsyncIterator[bytes]:
    for at in range(0, len(data), MIB):
        yield data[at : at + MIB]
        tell(Progress(min(at + MIB, len(data)), len(data)))


async def _read(file: IO[bytes], size: int, tell: Callable[[Progress], None]) -> AsyncIterator[bytes]:
    done = 0
    while done < size and (piece := await asyncio.to_thread(file.read, min(MIB, size - done))):
        yield piece
        done += len(piece)
        tell(Progress(done, size))


async def _pieces(data: IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, AsyncIterable):
        async for piece in data:
            yield piece
        return
    read = getattr(data, "read", None)
    source: Iterator[bytes] = iter(lambda: read(MIB), b"") if read is not None else iter(data)
    step: Callable[[], bytes | None] = lambda: next(source, None)  # noqa: E731
    while (found := await asyncio.to_thread(step)) is not None:
        if not isinstance(found, bytes | bytearray | memoryview):
            raise TypeError(f"pieces of a file are bytes, this is {type(found).__name__}")
        yield found


# ── Out of it ─────────────────────────────────────────────────────────────────────────────────────


class Landing:
    """A file of the host that appears in its place once it is complete, or not at all."""

    def __init__(self, target: Path, tell: Callable[[Progress], None]) -> None:
        self._target = target
        self._tell = tell
        self.bytes = 0
        self._part = f".ringfence-{secrets.token_hex(6)}.part"
        from ringfence.sandbox.files import paths  # noqa: PLC0415 - as above

        try:
            # Kept open: a box that may write to it can put a link in the place of any folder above.
            self._folder = paths.make_folder_without_links(str(target.parent))
        except OSError as exc:
            raise Unavailable("no_output", f"{target.parent}: {exc.strerror}") from None
        try:
            self._file = os.fdopen(os.open(self._part, _NEW, 0o666, dir_fd=self._folder), "w+b")
        except OSError as exc:
            os.close(self._folder)
            raise Unavailable("no_output", f"{target.parent}: {exc.strerror}") from None

    async def sink(self, piece: bytes) -> None:
        await asyncio.to_thread(self._file.write, piece)
        self.bytes += len(piece)
        self._tell(Progress(self.bytes, None))

    def land(self) -> None:
        self._file.close()
        try:
            os.rename(self._part, self._target.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as exc:
            raise Unavailable("no_output", f"{self._target}: {exc.strerror}") from None

    def unpack(self) -> Moved:
        """Unpack the archive into the target, a folder."""
        from ringfence.sandbox.files import archive, paths  # noqa: PLC0415 - as above

        self._file.seek(0)
        try:
            with suppress(FileExistsError):
                os.mkdir(self._target.name, dir_fd=self._folder)
            folder = os.open(self._target.name, paths.FOLDER, dir_fd=self._folder)
        except OSError as exc:
            raise Unavailable("no_output", f"{self._target}: {exc.strerror}") from None
        try:
            pieces = iter(lambda: self._file.read(MIB), b"")
            limits = {"max_bytes": _MAX_BYTES, "max_files": _MAX_FILES}
            facts, left_out = archive.unpack_on_host(folder, pieces, **limits)
        except OSError as exc:
            raise Refused(Status.FAILED, "no_output", f"{self._target}: {exc.strerror}") from None
        finally:
            os.close(folder)
        return Moved(len(facts), sum(fact.bytes for fact in facts), left_out)

    def names(self) -> dict[str, bool]:
        """The names in the archive, and whether each is a file."""
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r:") as archive:
            return {member.name: member.isreg() or member.islnk() for member in archive}

    def close(self) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._part, dir_fd=self._folder)
        os.close(self._folder)


_WHY = {"link": "it leads out of the folder", "other": "it is no file, folder or link"}


def _missing(folder: str, names: Collection[str], listed: FileInfos) -> dict[str, str]:
    """What a folder has and its archive has not, and why; of nested ones, the outer one.

    Names that cannot be used are listed in a form that can be shown, which another file may have as its name.
    """
    left_out: dict[str, str] = {}
    came: set[str] = set()
    for each in listed:
        inner = PurePosixPath(each.path.removeprefix(f"{folder}/"))
        if str(inner) in names and str(inner) not in came:
            came.add(str(inner))
        elif not any(f"{folder}/{above}" in left_out for above in inner.parents):
            why = "its name cannot be shown, or it was not there when the folder was read"
            left_out[each.path] = _WHY.get(each.kind, why)
    return left_out


def is_archive(path: Path) -> bool:
    """Whether a name is that of an archive rather than of a folder."""
    return path.suffix == ".tar"
