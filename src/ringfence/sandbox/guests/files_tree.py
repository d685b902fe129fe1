"""Whole folders of a guest: taken with all contents, and put back; as trees, or as archives."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ringfence.core.box import MIB
from ringfence.core.box_files import PIECE, Get, Keep, TakenTree, TreeNode
from ringfence.core.record import dataclass
from ringfence.sandbox.files.archive import BLOCK, leads_out, member_header
from ringfence.sandbox.files.paths import DEEPEST, KINDS, LONGEST_NAME, LONGEST_PATH, WORKSPACE, shown, unfit
from ringfence.sandbox.files.tree import write_tree
from ringfence.sandbox.files.walk import MAX_ENTRIES, empty, too_large
from ringfence.sandbox.guests import files_call
from ringfence.sandbox.guests.files_call import GuestCall, WayToFiles, decoded, leaving, malformed_unless

_KINDS = ("file", "dir", "link", "other")
_DIGEST = 64
_LATEST_NS = 2**63 - 1
_WHY = {
    "no_permission": "it is closed by its permissions",
    "changing": "it changes while it is read",
    "too_large": "there is more than may be collected",
}
Left = Callable[[str, str], None]
"""Called with the path of what is left out, and why."""


def walked(call: GuestCall, most: int, left: Left | None = None) -> Iterator[tuple[TreeNode, Iterator[bytes]]]:
    """What a guest says of a tree: each entry, and the contents of a file, which are read before the next one. Raises
    Unavailable for what is no tree."""
    with leaving(call) as records:
        yield from _walked(records, most, left)


def _walked(
    records: Iterator[tuple[bytes, bytes]], most: int, left: Left | None
) -> Iterator[tuple[TreeNode, Iterator[bytes]]]:
    seen: set[str] = set()
    missing = 0

    def contents() -> Iterator[bytes]:
        nonlocal missing
        while missing:
            kind, data = next(records, (b"", b""))
            malformed_unless(kind == b"D" and 0 < len(data) <= missing)
            missing -= len(data)
            yield data

    for kind, data in records:
        malformed_unless(kind == b"J")
        told = decoded(data)
        malformed_unless(isinstance(told, dict))
        if left is not None and isinstance(told.get("left"), str):
            left(shown(told["left"][:LONGEST_PATH]), _WHY.get(str(told.get("why")), "it cannot be read"))
            continue
        node = _node(told)
        malformed_unless(node.path not in seen and len(seen) < most)
        seen.add(node.path)
        missing = node.size if node.kind == "file" and "pieces" not in told else 0
        yield node, contents()
        for _ in contents():
            pass


def _node(told: dict[str, Any]) -> TreeNode:
    kind: Any = told.get("kind")
    path: Any = told.get("path")
    mode: Any = told.get("other" if kind == "other" else "mode")
    modified: Any = told.get("modified")
    size: Any = told.get("size", 0)
    target: Any = told.get("target", "")
    pieces: Any = told.get("pieces", [])
    malformed_unless(isinstance(path, str) and len(path) <= LONGEST_PATH)
    parts = path.split("/")
    malformed_unless(len(parts) <= DEEPEST + 8 and all(map(is_name, parts)))
    malformed_unless(kind in _KINDS and isinstance(mode, int) and isinstance(modified, int))
    malformed_unless(isinstance(size, int) and 0 <= size <= _LATEST_NS and abs(modified) <= _LATEST_NS)
    malformed_unless(isinstance(target, str) and len(target) <= LONGEST_PATH and "\0" not in target)
    malformed_unless(isinstance(pieces, list) and all(map(_is_digest, pieces)))
    malformed_unless(not pieces or len(pieces) == max(1, -(-size // PIECE)))
    mode = mode if kind == "other" else mode & 0o777
    return TreeNode(path, kind, mode, modified, size if kind == "file" else 0, tuple(pieces), target)


def is_name(name: object) -> bool:
    """Whether it can be the name of an entry of a folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == _DIGEST and not text.strip("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class GuestTree:
    """A folder of a guest with everything in it: one, or all that the guest may write."""

    way: WayToFiles
    places: tuple[tuple[str, ...], ...]
    """More than one, or one that has to be named: a whole box."""
    max_bytes: int
    """The most that the guest may have."""
    whole: bool = False
    named: bool = False
    """Whether paths begin at the root; else in the one folder."""
    stays: tuple[tuple[str, ...], ...] = ()
    """Folders that are emptied, and stay."""
    input_parts: tuple[str, ...] | None = None
    """Its folder for inputs, if it has one."""
    input_descriptor: int | None = None
    """Of that folder on this host, where it is one of this host's."""

    def _call(self, what: str, **more: Any) -> GuestCall:
        return GuestCall(self.way, what, WORKSPACE, places=[list(place) for place in self.places], **more)

    def nodes(self, call: GuestCall, most: int) -> Iterator[tuple[TreeNode, Iterator[bytes]]]:
        """With the folders that lead to each place first."""
        made: set[str] = set()
        for place in self.places if self.named else ():
            for depth in range(1, len(place) + 1):
                path = "/".join(place[:depth])
                if path not in made:
                    made.add(path)
                    yield TreeNode(path, "dir", 0o755), iter(())
        yield from walked(call, most)

    def tree(self, *, contents: bool, most: int, max_bytes: int | None = None, one_disk: bool = False) -> GuestCall:
        return self._call(
            "tree", contents=contents, most=most, bytes=max_bytes, links=False, one_disk=one_disk, named=self.named,
            input=None if self.input_parts is None else list(self.input_parts), piece=PIECE, lenient=False,
        )  # fmt: skip

    def take(self, keep: Keep, *, max_files: int | None = None, max_bytes: int | None = None) -> TakenTree:
        most = max_files or MAX_ENTRIES
        left = self.max_bytes if max_bytes is None else max_bytes
        nodes: list[TreeNode] = []
        has_input = False
        call = self.tree(contents=True, most=most, max_bytes=max_bytes, one_disk=self.whole)
        for node, contents in self.nodes(call, most):
            left -= node.size
            if left < 0:
                call.leave()
                raise too_large()
            if self.input_parts is not None and node.parts[: len(self.input_parts)] == self.input_parts:
                has_input = True
            if node.kind == "file":
                node = replace(node, pieces=tuple(_kept(contents, keep)))
            if node.kind != "other":
                nodes.append(node)
        return TakenTree(nodes, has_input)

    def clear(self) -> None:
        skipped = [] if self.input_descriptor is None else [list(self.input_parts or ())]
        self._call("clear", stays=[list(each) for each in self.stays], skips=skipped).done()
        if self.input_descriptor is not None:
            empty(self.input_descriptor, None)

    def put(self, nodes: Iterable[TreeNode], get: Get) -> None:
        at = [] if self.named else list(self.places[0])
        call = GuestCall(self.way, "put", WORKSPACE, path=at)
        given: list[TreeNode] = []
        try:
            for node in nodes:
                if any(not is_name(part) for part in node.parts):
                    raise ValueError(f"{node.path!r} is no path of a tree")
                if self._is_input(node):
                    if len(node.parts) > len(self.input_parts or ()):
                        given.append(replace(node, path="/".join(node.parts[len(self.input_parts or ()) :])))
                elif not send_node(call, node, _whole(node, get)):
                    break
        except BaseException:
            call.finish(whole=False)
            call.leave()
            raise
        call.finish()
        call.done()
        if given and self.input_descriptor is not None:
            write_tree(self.input_descriptor, given, get, None)

    def _is_input(self, node: TreeNode) -> bool:
        given = self.input_parts
        return self.input_descriptor is not None and given is not None and node.parts[: len(given)] == given


def send_node(call: GuestCall, node: TreeNode, contents: Iterable[bytes]) -> bool:
    """One entry for the guest to make. False where it takes no more."""
    told = {
        "path": node.path,
        "kind": node.kind,
        "mode": node.mode,
        "modified": node.modified_ns,
        "target": node.target,
    }
    if not call.send(b"J", json.dumps(told).encode()):
        return False
    return all(call.send(b"D", part) for piece in contents for part in sliced(piece))


def sliced(piece: bytes) -> Iterator[bytes]:
    for at in range(0, len(piece), files_call.PIECE):
        yield piece[at : at + files_call.PIECE]


def _whole(node: TreeNode, get: Get) -> Iterator[bytes]:
    for number, digest in enumerate(node.pieces):
        data = get(digest)
        if len(data) != min(PIECE, node.size - number * PIECE):
            raise ValueError(f"{node.path!r} has a piece of another length than it should")
        yield data


def _kept(contents: Iterator[bytes], keep: Keep) -> Iterator[str]:
    held = bytearray()
    any_kept = False
    for data in contents:
        held += data
        while len(held) >= PIECE:
            yield keep(bytes(held[:PIECE]))
            any_kept = True
            del held[:PIECE]
    if held or not any_kept:
        yield keep(bytes(held))


# ── Archives ──────────────────────────────────────────────────────────────────────────────────────


def packed(nodes: Iterable[tuple[TreeNode, Iterator[bytes]]], left: Left) -> Iterator[bytes]:
    """The tar stream of a tree, with what it cannot have left out."""
    for node, contents in nodes:
        path = "/".join(map(shown, node.parts))
        if problem := next(filter(None, map(unfit, node.parts)), None):
            left(path, problem)
            continue
        entry = tarfile.TarInfo(node.path)
        entry.mtime = max(0, node.modified_ns // 10**9)
        entry.mode = node.mode
        if node.kind == "dir":
            entry.type = tarfile.DIRTYPE
        elif node.kind == "link":
            entry.type = tarfile.SYMTYPE
            entry.linkname = node.target
            if unfit(node.target) or leads_out(node.target, len(node.parts) - 1):
                left(path, "it is a link that leads out of the folder")
                continue
        elif node.kind == "file":
            entry.size = node.size
        else:
            left(path, f"it is {KINDS.get(node.mode, 'not a regular file')}")
            continue
        yield member_header(entry)
        for data in contents:
            yield data if len(data) <= MIB else bytes(data)
        yield bytes(-entry.size % BLOCK)
    yield bytes(2 * BLOCK)


def of_folder(descriptor: int, inside: tuple[str, ...] = ()) -> Iterator[tuple[TreeNode, int]]:
    """A folder of this host that nobody else changes; of a file, an open descriptor, which is closed afterwards."""
    for name in sorted(os.listdir(descriptor), key=os.fsencode):
        info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        mode = stat.S_IMODE(info.st_mode)
        path = "/".join((*inside, name))
        if stat.S_ISLNK(info.st_mode):
            yield TreeNode(path, "link", mode, info.st_mtime_ns, target=os.readlink(name, dir_fd=descriptor)), -1
            continue
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        try:
            if stat.S_ISDIR(info.st_mode):
                yield TreeNode(path, "dir", mode, info.st_mtime_ns), -1
                yield from of_folder(opened, (*inside, name))
            else:
                yield TreeNode(path, "file", mode, info.st_mtime_ns, info.st_size), opened
        finally:
            os.close(opened)


def contents_of(descriptor: int) -> Iterator[bytes]:
    while data := os.read(descriptor, files_call.PIECE):
        yield data
