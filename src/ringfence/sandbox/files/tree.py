"""A folder and everything in it as plain data: read from disk, reduced to one digest, written back.

Contents are read in pieces of 4 MiB that are digested in parallel. A file of one piece has the SHA-256 of its bytes;
a longer one has that of its pieces' digests. Times, owners and permissions other than the right to execute are not
part of the digest. Named pipes, sockets and devices are in the digest by name only.

A tree is written into a folder that no program looks at yet; each piece is checked before a byte of it is written.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import field, replace
from typing import Any

from ringfence.core.box_files import PIECE, Get, Keep, Kind, TreeNode, digest
from ringfence.core.record import dataclass
from ringfence.sandbox.files.paths import (
    CREATE,
    FOLDER,
    acting_as,
    changing,
    full_path,
    open_regular_here,
    refusal,
    shown,
)
from ringfence.sandbox.files.walk import ReadBudget, Walk, WalkEntry

ALONGSIDE = 256 * 1024
"""Smaller files are read directly: handing them to another thread would take longer."""
WORKERS = min(4, os.cpu_count() or 1)
_MAX_OPEN = 16


def kind_of(info: os.stat_result) -> Kind:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(info.st_mode), "other")


def read_tree(
    root: int, keep: Keep = digest, walk: Walk | None = None, budget: ReadBudget | None = None
) -> list[TreeNode]:
    """Everything below an open folder; each piece of each file goes to `keep`.

    A file is read up to the size it had when it was opened. Raises Refused for what cannot be read.
    """
    with _Reading(keep, budget or ReadBudget()) as reading:
        for found in (walk or Walk()).through(root):
            reading.add(found)
        reading.drain(0)
        return reading.nodes


def _path(node: TreeNode) -> str:
    return full_path(tuple(map(shown, node.parts)))


@dataclass(slots=True)
class _FileBeingRead:
    """A file whose pieces are being read."""

    index: int
    descriptor: int
    pieces: list[Future[tuple[str, int]]]


@dataclass(slots=True)
class _Reading:
    keep: Keep
    budget: ReadBudget
    nodes: list[TreeNode] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None
    _under: deque[_FileBeingRead] = field(default_factory=deque)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for under in self._under:
            os.close(under.descriptor)

    def add(self, found: WalkEntry) -> None:
        node = TreeNode(
            path="/".join(found.parts),
            kind=kind_of(found.info),
            mode=stat.S_IMODE(found.info.st_mode) & 0o777,
            modified_ns=found.info.st_mtime_ns,
        )
        try:
            if node.kind == "file":
                self._add_file(node, found)
            elif node.kind == "link":
                self.nodes.append(replace(node, target=os.readlink(found.name, dir_fd=found.folder)))
            else:
                self.nodes.append(node)
        except FileNotFoundError:
            return
        except PermissionError:
            text = f"{_path(node)!r} is closed by its permissions; open it in the box first (chmod)"
            raise refusal("no_permission", text) from None
        except OSError as problem:  # it is of another type than a moment ago
            raise changing(_path(node)) from problem

    def _add_file(self, node: TreeNode, found: WalkEntry) -> None:
        descriptor = open_regular_here(found.folder, found.name)
        handed_on = False
        try:
            info = os.fstat(descriptor)
            self.budget.take(descriptor, info)
            if info.st_size >= ALONGSIDE:
                self.drain(_MAX_OPEN)
                self._pool = self._pool or ThreadPoolExecutor(WORKERS, "tree")
                starts = range(0, info.st_size, PIECE)
                pieces = [self._pool.submit(self._piece, descriptor, at, info.st_size) for at in starts]
                self._under.append(_FileBeingRead(len(self.nodes), descriptor, pieces))
                self.nodes.append(node)
                handed_on = True
            else:
                piece, size = self._piece(descriptor, 0, info.st_size)
                self.nodes.append(replace(node, size=size, pieces=(piece,)))
        finally:
            if not handed_on:
                os.close(descriptor)

    def _piece(self, descriptor: int, at: int, end: int) -> tuple[str, int]:
        data = os.pread(descriptor, min(PIECE, end - at), at)
        return self.keep(data), len(data)

    def drain(self, most: int) -> None:
        """Wait until no more than so many files are open."""
        while len(self._under) > most:
            under = self._under[0]
            read = [piece.result() for piece in under.pieces]
            node = self.nodes[under.index]
            if any(size < PIECE for _, size in read[:-1]) or not read[-1][1]:
                raise changing(_path(node))  # it was cut short
            self.nodes[under.index] = replace(
                node, size=sum(size for _, size in read), pieces=tuple(piece for piece, _ in read)
            )
            self._under.popleft()
            os.close(under.descriptor)


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


def write_tree(
    root: int,
    nodes: Iterable[TreeNode],
    get: Get,
    owner: int | None,
    input_folder: tuple[tuple[str, ...], int] | None = None,
) -> None:
    """Create these files, folders and links below an open folder; those of `input_folder`, which is a path in it, by
    the descriptor that comes with it.

    Folders may exist already; files and links may not. Raises OSError, and what `get` raises.
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
    """Set when its contents are complete: it may forbid writing."""


@dataclass(slots=True)
class _FileBeingWritten:
    """A file whose pieces are being written."""

    node: TreeNode
    descriptor: int
    pieces: list[Future[None]]


@dataclass(slots=True)
class _Writing:
    root: int
    get: Get
    owner: int | None
    input_folder: tuple[tuple[str, ...], int] | None
    _way: list[_Folder] = field(default_factory=list)
    """The open folders from the root to the current one."""
    _under: deque[_FileBeingWritten] = field(default_factory=deque)
    _pool: ThreadPoolExecutor | None = None

    def add(self, node: TreeNode) -> None:
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
        """The open folder of this path, whose own node came earlier."""
        common = len(self._way)
        while common and self._way[common - 1].parts != parts[:common]:
            common -= 1
        self.leave(common)
        if common < len(parts):
            raise ValueError(f"the folder of {'/'.join(parts)!r} is missing")
        return self._way[-1].descriptor if self._way else self.root

    def _make(self, node: TreeNode, parts: tuple[str, ...], folder: int) -> None:
        if self.input_folder is not None and parts == self.input_folder[0]:
            self._way.append(_Folder(parts, os.open(".", FOLDER, dir_fd=self.input_folder[1]), None))
            return
        with suppress(FileExistsError), acting_as(self.owner):
            os.mkdir(parts[-1], 0o700, dir_fd=folder)
        descriptor = os.open(parts[-1], FOLDER, dir_fd=folder)
        mounted = os.fstat(descriptor).st_dev != os.fstat(folder).st_dev
        self._way.append(_Folder(parts, descriptor, None if mounted else node.mode))

    def _write(self, node: TreeNode, name: str, folder: int) -> None:
        self.drain(_MAX_OPEN)
        with acting_as(self.owner):
            descriptor = os.open(name, CREATE, 0o600, dir_fd=folder)
        under = _FileBeingWritten(node, descriptor, [])
        self._under.append(under)
        if node.size < ALONGSIDE:
            self._piece(node, descriptor, 0)
            self.drain(0)
            return
        self._pool = self._pool or ThreadPoolExecutor(WORKERS, "tree")
        for number in range(len(node.pieces)):
            under.pieces.append(self._pool.submit(self._piece, node, descriptor, number))

    def _piece(self, node: TreeNode, descriptor: int, number: int) -> None:
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
