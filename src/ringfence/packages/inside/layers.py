"""Runs in an install box without a network: merges the layers of an image into a list of entries.

Nothing is unpacked onto a file system here: names and links are text in a list, and contents are numbered files. So no
link can be followed, and no name leads anywhere. Imports nothing of ours.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

_INPUT = "/workspace/input"
_OUTPUT = "/workspace/output"
_HIDES = ".wh."
_HIDES_ALL = ".wh..wh..opq"
_DEEPEST = 100
_LONGEST_NAME = 255
_LONGEST_PATH = 3000
_MAX_LINKS = 40
_CHUNK = 1 << 20


class LayerError(Exception):
    """The image cannot be unpacked."""


def _quoted(text: str) -> str:
    """As `core.quoting.quoted`."""
    return repr(text) if len(text) <= 80 else f"… ({len(text)} characters)"


class LayerNode:
    """A folder, file or link, and the layer that it belongs to."""

    __slots__ = ("below", "cleared", "executable", "kind", "layer", "number", "target")

    def __init__(self, kind: str, layer: int, number: int = 0, executable: bool = False, target: str = "") -> None:
        self.kind = kind
        self.layer = layer
        self.number = number
        self.executable = executable
        self.target = target
        self.below: dict[str, LayerNode] = {}
        self.cleared = 0
        """The last layer that hid what lower ones have in it."""


class Layers:
    """The layers merged so far."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries = 0
        self._number = 0
        self.root = LayerNode("folder", 0)
        self.left_out: Counter[str] = Counter()
        self.layer = 0

    def apply(self, archive: tarfile.TarFile, keep: str) -> None:
        """Apply one more layer; contents go to the folder `keep`. Raises LayerError."""
        self.layer += 1
        for member in archive:
            self._entries += 1
            if self._entries > self._most:
                raise LayerError(f"it has more than {self._most} entries")
            archive.members = []  # type: ignore[attr-defined]  # otherwise it remembers every one of them
            self._member(archive, member, keep)

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, keep: str) -> None:
        parts = self._parts(member.name)
        if parts is None:
            return
        if not parts:
            if not member.isdir():
                raise LayerError(f"a layer has something else than a folder as its root: {_quoted(member.name)}")
            return
        *above, name = parts
        if name.startswith(_HIDES):
            self._hide(above, name)
            return
        node = self._node(archive, member, keep)
        if node is None:
            return
        folder = self._folder(above)
        before = folder.below.get(name)
        if before is not None and before.kind == node.kind == "folder":
            before.layer = self.layer
            return
        folder.below[name] = node

    def _parts(self, text: str) -> list[str] | None:
        """The parts of a name, from the root of the image; None if it cannot be kept."""
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise LayerError(f"a layer has a name that leads out of it: {_quoted(text)}")
        try:
            sizes = [len(part.encode()) for part in parts]
        except UnicodeEncodeError:
            self.left_out["names that are no UTF-8"] += 1
            return None
        if len(parts) > _DEEPEST or sum(sizes) + len(sizes) > _LONGEST_PATH or max(sizes, default=0) > _LONGEST_NAME:
            raise LayerError(f"a layer has a name that is too long: {_quoted(text)}")
        return parts

    def _node(self, archive: tarfile.TarFile, member: tarfile.TarInfo, keep: str) -> LayerNode | None:
        if member.isdir():
            return LayerNode("folder", self.layer)
        if member.issym():
            if not member.linkname or "\0" in member.linkname or len(os.fsencode(member.linkname)) > _LONGEST_PATH:
                raise LayerError(f"{_quoted(member.name)} is a link to nothing that could be")
            try:
                member.linkname.encode()
            except UnicodeEncodeError:
                self.left_out["links to names that are no UTF-8"] += 1
                return None
            return LayerNode("link", self.layer, target=member.linkname)
        if member.islnk():
            return self._same(member)
        if not member.isreg():
            self.left_out["devices, pipes and the like"] += 1
            return None
        self._number += 1
        with open(f"{keep}/{self._number}", "xb") as stream:
            content = archive.extractfile(member)
            if content is not None:
                shutil.copyfileobj(content, stream, _CHUNK)
                if stream.tell() != member.size:
                    raise LayerError(f"{_quoted(member.name)} ends before its end")
        return LayerNode("file", self.layer, self._number, bool(member.mode & 0o111))

    def _same(self, member: tarfile.TarInfo) -> LayerNode | None:
        """A hard link to an existing entry."""
        parts = self._parts(member.linkname)
        found = self._there(parts) if parts else None
        if found is None or found.kind == "folder":
            raise LayerError(
                f"{_quoted(member.name)} is a second name of {_quoted(member.linkname)}, which is not there"
            )
        return LayerNode(found.kind, self.layer, found.number, found.executable, found.target)

    # ── Lookups ──

    def _there(self, parts: list[str]) -> LayerNode | None:
        folder = self._folder(parts[:-1], made=False)
        return None if folder is None else folder.below.get(parts[-1])

    def _folder(self, parts: list[str], made: bool = True) -> Any:
        """The folder of these parts; links are followed, within the image and never out of it."""
        trail = [self.root]
        rest = list(reversed(parts))
        links = 0
        while rest:
            part = rest.pop()
            if part in ("", "."):
                continue
            if part == "..":
                trail = trail[:-1] or trail
                continue
            node = trail[-1].below.get(part)
            if node is not None and node.kind == "link":
                links += 1
                if links > _MAX_LINKS:
                    raise LayerError(f"links of {_quoted('/'.join(parts))} lead round in a circle")
                trail = trail[:1] if node.target.startswith("/") else trail
                rest += reversed(node.target.split("/"))
                continue
            if node is None or node.kind != "folder":
                if not made:
                    return None
                node = trail[-1].below[part] = LayerNode("folder", self.layer)
            trail.append(node)
            if len(trail) > _DEEPEST:
                raise LayerError(f"{_quoted('/'.join(parts))} is too deep")
        return trail[-1]

    # ── Whiteouts ──

    def _hide(self, above: list[str], name: str) -> None:
        """Hide entries of lower layers, never those of this one."""
        folder = self._folder(above, made=False)
        if folder is None:
            return
        if name == _HIDES_ALL:
            self._without_lower(folder)
            return
        hidden = folder.below.get(name.removeprefix(_HIDES))
        if hidden is not None and not self._is_kept(hidden):
            del folder.below[name.removeprefix(_HIDES)]

    def _is_kept(self, node: LayerNode) -> bool:
        """Whether this layer has the node, or something in it; removes what lower layers have in it."""
        if node.kind == "folder":
            self._without_lower(node)
        return node.layer == self.layer or bool(node.below)

    def _without_lower(self, folder: LayerNode) -> None:
        """Once for each layer: what comes into it afterwards is of this one."""
        if folder.cleared == self.layer:
            return
        folder.cleared = self.layer
        folder.below = {name: node for name, node in folder.below.items() if self._is_kept(node)}

    # ── The result ──

    def listing(self) -> Iterator[list[Any]]:
        """Path, kind, whether it is executable, and the number of a file's contents or the target of a link."""
        waiting = [("", self.root)]
        while waiting:
            path, folder = waiting.pop()
            for name, node in sorted(folder.below.items()):
                inside = f"{path}/{name}" if path else name
                yield [inside, node.kind, node.executable, node.target if node.kind == "link" else node.number]
                if node.kind == "folder":
                    waiting.append((inside, node))


def unpack(order: dict[str, Any]) -> None:
    keep = f"{_OUTPUT}/files"
    os.makedirs(keep)
    layers = Layers(order["most_entries"])
    for number, layer in enumerate(order["layers"]):
        try:
            with (
                _opened(f"{_INPUT}/files/{layer['file']}", layer["packed"]) as stream,
                tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as archive,
            ):
                layers.apply(archive, keep)
        except (LayerError, tarfile.TarError, EOFError, zlib.error, OSError, ValueError, OverflowError) as problem:
            sys.exit(f"layer {number + 1} cannot be laid out: {problem}")
    listing = list(layers.listing())
    used = {entry[3] for entry in listing if entry[1] == "file"}
    for name in os.listdir(keep):
        if int(name) not in used:
            os.unlink(f"{keep}/{name}")
    with open(f"{_OUTPUT}/listing.json", "w", encoding="utf-8") as written:
        json.dump({"entries": listing, "left_out": dict(layers.left_out)}, written)


def _opened(path: str, packed: str) -> IO[bytes]:
    if packed == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if packed == "zstd":
        program = shutil.which("zstd")
        if program is None:
            sys.exit("it is packed with zstd, which is not installed on this host")
        done = subprocess.Popen([program, "-dcq", "--", path], stdout=subprocess.PIPE)
        assert done.stdout is not None
        return done.stdout
    return open(path, "rb")


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given_order:
        {"unpack": unpack}[sys.argv[1]](json.load(given_order))
