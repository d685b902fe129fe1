"""The files of a box that stays, as everything above the backends has them: plain data, and the port to them.

A backend on this host has them by open folders; one whose boxes are guests asks its agent. What comes from a box is
data that nothing here relies on.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Literal, Protocol

from ringfence.core.box import MIB, FileFact, Input
from ringfence.core.record import dataclass, plain

_WORKSPACE = "/workspace"
PIECE = 4 * MIB
"""Contents of files are kept, and digested, in pieces of this size."""

Kind = Literal["file", "dir", "link", "other"]
Change = Literal["created", "modified", "removed", "renamed", "lost", "begun"]
Keep = Callable[[bytes], str]
"""Takes a piece of a file, maybe in a thread of its own, and returns its digest."""
Get = Callable[[str], bytes]
"""Returns the piece with this digest, checked; called in threads of their own."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What is at a path; of a link, the link itself."""

    name: str
    """A name that cannot be shown as it is is escaped, and the entry cannot be addressed here."""
    path: str
    kind: Kind
    bytes: int
    modified: datetime
    mode: int
    target: str | None = None
    """The target of a link, as the box wrote it."""


Entries = list[EntryInfo]


@dataclass(frozen=True, slots=True)
class Changed:
    """`lost`: some changes below `path` are not reported; list it again. A new folder's files may be reported twice.

    `begun`: of a session, first and once: from here on changes are reported.
    """

    kind: Change
    path: str
    to: str | None = None
    """Where it was renamed to."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A file, folder or link."""

    path: str
    """Relative to the tree's root; bytes that are not UTF-8 by `surrogateescape`."""
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
        """One line of the tree's digest. No field can contain the NUL that separates them."""
        content = self.target
        if self.kind == "file":
            content = self.pieces[0] if len(self.pieces) == 1 else digest("".join(self.pieces).encode())
        executable = "x" if self.kind == "file" and self.mode & stat.S_IXUSR else ""
        return b"\0".join(os.fsencode(text) for text in (self.kind, executable, str(self.size), self.path, content, ""))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tree_digest(nodes: Iterable[TreeNode]) -> str:
    whole = hashlib.sha256(b"ringfence tree 1\0")
    for node in nodes:
        whole.update(node.digested())
    return whole.hexdigest()


@plain
class TakenTree:
    """What was taken of a box."""

    nodes: list[TreeNode]
    """Without named pipes, sockets and devices."""
    has_input: bool = False
    """Whether a folder for inputs is among it, which is read-only in the box."""


# ── The port ──────────────────────────────────────────────────────────────────────────────────────


class BoxTree(Protocol):
    """A folder of a box with everything in it, which is taken and put as a whole. Methods raise Refused and
    Unavailable; they block."""

    def take(self, keep: Keep, *, max_files: int | None = None, max_bytes: int | None = None) -> TakenTree:
        """Everything in it; each piece of each file goes to `keep`. Of a whole box, the volumes are not in it. Raises
        Refused for more than so much, which is otherwise as much as the box may have."""
        ...

    def clear(self) -> None:
        """Remove what is in it; it is made where it is missing. The folders that a box always has stay."""
        ...

    def put(self, nodes: Iterable[TreeNode], get: Get) -> None:
        """Create these in a folder that was cleared, in a box in which nothing runs yet. Raises ValueError for what is
        no tree, and what `get` raises."""
        ...


class SpoolFile(Protocol):
    """A new file of a box that is written as its contents come, from the event loop; no method blocks."""

    def write(self, data: bytes) -> Awaitable[None] | None:
        """What this returns is awaited before there is more. Raises OSError, Refused and Unavailable."""
        ...

    def drop(self) -> None:
        """Leave it empty, and close it."""
        ...

    async def close(self) -> bool:
        """It is complete. False where something was not written; then it is left empty."""
        ...


class FileChanges(Protocol):
    """FileChanges, as they happen."""

    def __aiter__(self) -> AsyncIterator[Changed]: ...

    def close(self) -> None:
        """Ends the iteration for a waiting caller."""
        ...


class BoxFiles(Protocol):
    """The files of a box. Paths are those that programs in the box see, absolute or relative to /workspace. All methods
    raise Refused and Unavailable and block, so that they are called in threads; they work while the box is paused."""

    @property
    def temporary(self) -> str:
        """Its folder for files that nobody keeps."""
        ...

    @property
    def from_root(self) -> bool:
        """Whether the paths of its `whole` begin at the root of the box; else at /workspace."""
        ...

    def again(self) -> BoxFiles:
        """The same, which the caller closes, for work that may last longer than this one; not to fill the box."""
        ...

    def close(self) -> None: ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of a file from `offset` on, up to `length` of them."""
        ...

    def stream(self, path: str, chunk: int = MIB) -> Generator[bytes, None, None]:
        """A file of any size, up to the size it had when it was opened, which is when the first bytes are asked for."""
        ...

    def list(self, path: str = _WORKSPACE, depth: int = 1) -> Entries:
        """The entries of a folder, sorted, and of the folders in it down to `depth`. No link is followed."""
        ...

    def stat(self, path: str) -> EntryInfo: ...

    def exists(self, path: str) -> bool:
        """Whether anything is there; a link counts, wherever it leads."""
        ...

    def tree_hash(self, mounted: Iterable[str] = ()) -> str:
        """The digest of everything that it may write, its input and volumes included, and of what it sees `mounted`
        elsewhere."""
        ...

    def write(
        self, path: str, data: bytes | Iterable[bytes], *, append: bool = False, mode: int | None = None
    ) -> FileFact:
        """Write a file, with the folders above it. Returns what was written, which for `append` is the addition.

        The file is replaced atomically, and keeps its permissions. A link is replaced, never written through. `append`
        adds to the existing file, bytes as they come.
        """
        ...

    def spool(self, folder: str, name: str) -> SpoolFile:
        """A new file. Does not block. Raises OSError, too."""
        ...

    def make_dir(self, path: str) -> bool:
        """Make a folder, with those above it. False where it is there already."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, a link, or a folder with everything in it. No link is followed."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Move a file, link or folder to a path whose folder exists; a file or link there is replaced."""
        ...

    def pack(self, path: str = _WORKSPACE, left_out: dict[str, str] | None = None) -> Iterator[bytes]:
        """A folder as an uncompressed tar stream, with names relative to it.

        Links that lead out of the folder, what is neither file, folder nor link, and names that cannot be shown go into
        `left_out` instead, with the reason. A file that is truncated while it is read ends the stream with Refused.
        """
        ...

    def unpack(self, path: str, stream: Iterable[bytes], *, max_bytes: int, max_files: int) -> tuple[FileFact, ...]:
        """Put the files of an uncompressed tar stream into a folder, which is made where it is missing.

        Nothing of it is visible in its place before all of it was read and checked. Existing files are replaced.
        """
        ...

    def watch(self, path: str = _WORKSPACE, *, recursive: bool = False) -> FileChanges:
        """Reports what changes in a folder from now on. The caller closes it."""
        ...

    def whole(self) -> BoxTree:
        """All that it may write, and its input."""
        ...

    def folder(self, at: str) -> BoxTree:
        """One folder, such as a volume's, which may be a file system of its own."""
        ...

    def output(self, max_bytes: int, left_out: dict[str, str]) -> AbstractContextManager[int]:
        """Its output folder, or a copy of it for so long, as an open folder of this host. Raises OSError, too. A copy
        has up to so much; what it lacks goes into `left_out`, with the reason."""
        ...

    def add_inputs(self, inputs: tuple[Input, ...]) -> None:
        """Put these into /workspace/input, which programs cannot. Raises ValueError, too."""
        ...
