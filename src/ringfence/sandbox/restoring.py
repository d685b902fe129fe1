"""A tree written back into a folder that no program looks at yet, each piece checked before a byte of it is written."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from ringfence.sandbox.process.files import CREATE, FOLDER, acting_as
from ringfence.sandbox.trees import ALONGSIDE, PIECE, WORKERS, Node

INPUT = ("input",)
_MOST_OPEN = 16

Get = Callable[[str], bytes]
"""The piece with this digest, checked; called in threads of their own."""


def write_tree(root: int, nodes: Iterable[Node], get: Get, owner: int | None, input_folder: int | None = None) -> None:
    """Make these files, folders and links below an open folder; what belongs into input, through that one.

    Folders may be there already; files and links may not. Raises OSError, and what `get` raises.
    """
    writing = _Writing(root, get, owner, input_folder)
    try:
        for node in nodes:
            writing.add(node)
        writing.drain(0)
        writing.leave(0)
    finally:
        writing.close()


@dataclass(slots=True)
class _Folder:
    parts: tuple[str, ...]
    descriptor: int
    mode: int | None
    """Given when all is in it: it may forbid to write."""


@dataclass(slots=True)
class _Under:
    """A file whose pieces are being written."""

    node: Node
    descriptor: int
    pieces: list[Future[None]]


@dataclass(slots=True)
class _Writing:
    root: int
    get: Get
    owner: int | None
    input_folder: int | None
    _way: list[_Folder] = field(default_factory=list)
    """From the root to where we are, all open."""
    _under: deque[_Under] = field(default_factory=deque)
    _pool: ThreadPoolExecutor | None = None

    def add(self, node: Node) -> None:
        parts = node.parts
        if any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{node.path!r} is no path of a tree")
        folder = self._enter(parts[:-1])
        if node.kind == "dir":
            self._make(node, parts, folder)
        elif node.kind == "link":
            with acting_as(self.owner):
                os.symlink(node.target, parts[-1], dir_fd=folder)
        else:
            self._write(node, parts[-1], folder)

    def _enter(self, parts: tuple[str, ...]) -> int:
        """The open folder of this path, whose own node came before."""
        common = len(self._way)
        while common and self._way[common - 1].parts != parts[:common]:
            common -= 1
        self.leave(common)
        if common < len(parts):
            raise ValueError(f"the folder of {'/'.join(parts)!r} is missing")
        return self._way[-1].descriptor if self._way else self.root

    def _make(self, node: Node, parts: tuple[str, ...], folder: int) -> None:
        if parts == INPUT and self.input_folder is not None:
            self._way.append(_Folder(parts, os.open(".", FOLDER, dir_fd=self.input_folder), None))
            return
        with suppress(FileExistsError), acting_as(self.owner):
            os.mkdir(parts[-1], 0o700, dir_fd=folder)
        descriptor = os.open(parts[-1], FOLDER, dir_fd=folder)
        mounted = os.fstat(descriptor).st_dev != os.fstat(folder).st_dev
        self._way.append(_Folder(parts, descriptor, None if mounted else node.mode))

    def _write(self, node: Node, name: str, folder: int) -> None:
        self.drain(_MOST_OPEN)
        with acting_as(self.owner):
            descriptor = os.open(name, CREATE, 0o600, dir_fd=folder)
        under = _Under(node, descriptor, [])
        self._under.append(under)
        if node.size < ALONGSIDE:
            self._piece(node, descriptor, 0)
            self.drain(0)
            return
        self._pool = self._pool or ThreadPoolExecutor(WORKERS, "tree")
        for number in range(len(node.pieces)):
            under.pieces.append(self._pool.submit(self._piece, node, descriptor, number))

    def _piece(self, node: Node, descriptor: int, number: int) -> None:
        at = number * PIECE
        data = self.get(node.pieces[number])
        if len(data) != min(PIECE, node.size - at):
            raise ValueError(f"{node.path!r} has a piece of another length than it should")
        rest = memoryview(data)
        while rest:
            done = os.pwrite(descriptor, rest, at)
            at, rest = at + done, rest[done:]

    def drain(self, most: int) -> None:
        """Wait until no more than so many files are open."""
        while len(self._under) > most:
            under = self._under[0]
            for piece in under.pieces:
                piece.result()
            os.fchmod(under.descriptor, under.node.mode & 0o777)
            os.utime(under.descriptor, ns=(under.node.modified_ns, under.node.modified_ns))
            self._under.popleft()
            os.close(under.descriptor)

    def leave(self, depth: int) -> None:
        while len(self._way) > depth:
            folder = self._way.pop()
            if folder.mode is not None:
                os.fchmod(folder.descriptor, folder.mode & 0o777)
            os.close(folder.descriptor)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for under in self._under:
            os.close(under.descriptor)
        for folder in self._way:
            os.close(folder.descriptor)
