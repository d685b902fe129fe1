"""A folder with all that is in it, as plain data: what it holds, and the one digest of it all.

Contents are read in pieces of 4 MiB that are digested side by side. A file of one piece has the SHA-256 of its bytes;
a longer one that of its pieces' digests. Times, owners and permissions other than the right to execute are no part of
the digest. Named pipes, sockets and devices are in the digest by their names alone.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ringfence.box import MIB
from ringfence.sandbox.beneath import changing, full_path, open_regular_here, refusal
from ringfence.sandbox.process.files import shown
from ringfence.sandbox.walking import Found, Room, Walk

PIECE = 4 * MIB
ALONGSIDE = 256 * 1024
"""Smaller files are read at once: to hand them to another thread would take longer."""
WORKERS = min(4, os.cpu_count() or 1)
_MOST_OPEN = 16

Kind = Literal["file", "dir", "link", "other"]
Keep = Callable[[bytes], str]
"""Gets a piece of a file, maybe in a thread of its own, and says its digest."""


@dataclass(frozen=True, slots=True)
class Node:
    """A file, folder or link."""

    path: str
    """Relative to the tree's root; bytes that are no UTF-8 as the file system gives them (`surrogateescape`)."""
    kind: Kind
    mode: int = 0
    modified_ns: int = 0
    size: int = 0
    pieces: tuple[str, ...] = ()
    """SHA-256 of each; a file."""
    target: str = ""
    """Of a link, as it is written."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))

    def digested(self) -> bytes:
        """One line of the tree's digest. No field can hold the NUL that parts them."""
        content = self.target
        if self.kind == "file":
            content = self.pieces[0] if len(self.pieces) == 1 else digest("".join(self.pieces).encode())
        executable = "x" if self.kind == "file" and self.mode & stat.S_IXUSR else ""
        return b"\0".join(os.fsencode(text) for text in (self.kind, executable, str(self.size), self.path, content, ""))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_digest(nodes: Iterable[Node]) -> str:
    whole = hashlib.sha256(b"ringfence tree 1\0")
    for node in nodes:
        whole.update(node.digested())
    return whole.hexdigest()


def kind_of(info: os.stat_result) -> Kind:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(info.st_mode), "other")


def read_tree(root: int, keep: Keep = digest, walk: Walk | None = None, room: Room | None = None) -> list[Node]:
    """Everything below an open folder; each piece of each file goes to `keep`.

    A file is read as far as it went when it was opened. Raises Refused for what cannot be read.
    """
    with _Reading(keep, room or Room()) as reading:
        for found in (walk or Walk()).through(root):
            reading.add(found)
        reading.drain(0)
        return reading.nodes


def _path(node: Node) -> str:
    return full_path(tuple(map(shown, node.parts)))


@dataclass(slots=True)
class _Under:
    """A file whose pieces are being read."""

    index: int
    descriptor: int
    pieces: list[Future[tuple[str, int]]]


@dataclass(slots=True)
class _Reading:
    keep: Keep
    room: Room
    nodes: list[Node] = field(default_factory=list)
    _pool: ThreadPoolExecutor | None = None
    _under: deque[_Under] = field(default_factory=deque)

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for under in self._under:
            os.close(under.descriptor)

    def add(self, found: Found) -> None:
        node = Node(
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
        except OSError as problem:  # another kind of thing than it was a moment ago
            raise changing(_path(node)) from problem

    def _add_file(self, node: Node, found: Found) -> None:
        descriptor = open_regular_here(found.folder, found.name)
        handed_on = False
        try:
            info = os.fstat(descriptor)
            self.room.take(descriptor, info)
            if info.st_size >= ALONGSIDE:
                self.drain(_MOST_OPEN)
                self._pool = self._pool or ThreadPoolExecutor(WORKERS, "tree")
                starts = range(0, info.st_size, PIECE)
                pieces = [self._pool.submit(self._piece, descriptor, at, info.st_size) for at in starts]
                self._under.append(_Under(len(self.nodes), descriptor, pieces))
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
