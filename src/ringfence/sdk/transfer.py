"""Bytes on their way into a sandbox and out of it: measured before they are sent, piece by piece, never all at once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import tarfile
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

from ringfence.box import MIB
from ringfence.errors import Refused, Unavailable
from ringfence.model import Json, Status
from ringfence.sdk.infos import Moved, Progress

T = TypeVar("T")

Data = str | bytes | Path | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""Text, bytes, a file of the host by its Path, an open file, or pieces."""
Body = bytes | AsyncIterator[bytes]
OnProgress = Callable[[Progress], object]

_MOST_BYTES, _MOST_FILES = 2**44, 10_000_000


def _archive() -> Any:
    """How folders are packed: by descriptors of folders, which not every system has. Nor has it boxes, then."""
    return import_module("ringfence.sandbox.archive")


async def across(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The work on that loop, from this one."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


# ── In ────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def measured(data: Data, tell: Callable[[Progress], None]) -> AsyncIterator[tuple[Json, Body]]:
    """How arguments name the data, and the data. Whatever is no bytes or file yet is put into a file first."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        whole = bytes(data)
        body = whole if len(whole) <= MIB else _sliced(whole, tell)
        yield {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}, body
        return
    if isinstance(data, Path):
        with _reading(data) as file:
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
    """A folder of the host as a tar stream. Links that lead out of it and special files go into `left_out`."""
    with tempfile.TemporaryFile(prefix="ringfence-") as file:
        found: dict[str, str] = {}
        digest = await asyncio.to_thread(_pack, folder, file, found)
        left_out.update((path.removeprefix("/workspace/"), why) for path, why in found.items())
        yield digest, _read(file, digest["bytes"], tell)


def _pack(folder: Path, file: IO[bytes], left_out: dict[str, str]) -> Json:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise Unavailable("no_input", f"{folder}: {exc.strerror}") from None
    try:
        for piece in _archive().pack_folder(descriptor, left_out):
            file.write(piece)
    except OSError as exc:
        raise Unavailable("no_input", f"{folder}: {exc.strerror}") from None
    finally:
        os.close(descriptor)
    return _digest(file)


def _reading(path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
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


# ── Out ───────────────────────────────────────────────────────────────────────────────────────────


class Landing:
    """A file of the host that is in its place when all of it is there, and else not at all."""

    def __init__(self, target: Path, tell: Callable[[Progress], None]) -> None:
        self._target = target
        self._tell = tell
        self.bytes = 0
        self._part = target.with_name(f".ringfence-{secrets.token_hex(6)}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._part, "x+b")  # noqa: SIM115 (`close` does)
        except OSError as exc:
            raise Unavailable("no_output", f"{exc.filename}: {exc.strerror}") from None

    async def sink(self, piece: bytes) -> None:
        await asyncio.to_thread(self._file.write, piece)
        self.bytes += len(piece)
        self._tell(Progress(self.bytes, None))

    def land(self) -> None:
        self._file.close()
        try:
            self._part.rename(self._target)
        except OSError as exc:
            raise Unavailable("no_output", f"{self._target}: {exc.strerror}") from None

    def unpack(self) -> Moved:
        """Put the archive that it is into the target, a folder, instead."""
        self._file.seek(0)
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            folder = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as exc:
            raise Unavailable("no_output", f"{self._target}: {exc.strerror}") from None
        try:
            pieces = iter(lambda: self._file.read(MIB), b"")
            limits = {"max_bytes": _MOST_BYTES, "max_files": _MOST_FILES}
            facts, left_out = _archive().unpack_on_host(folder, pieces, **limits)
        except OSError as exc:
            raise Refused(Status.FAILED, "no_output", f"{self._target}: {exc.strerror}") from None
        finally:
            os.close(folder)
        return Moved(len(facts), sum(fact.bytes for fact in facts), left_out)

    def names(self) -> dict[str, bool]:
        """What is in the archive that it is, and of each whether it is a file."""
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r:") as archive:
            return {member.name: member.isreg() or member.islnk() for member in archive}

    def close(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def is_archive(path: Path) -> bool:
    """Whether a name is that of an archive, rather than of a folder."""
    return path.suffix == ".tar"
