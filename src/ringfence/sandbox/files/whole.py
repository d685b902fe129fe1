"""A box's folder as a whole, by an open folder: all that it may write, or one volume."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ringfence.core.box_files import Get, Keep, TakenTree, TreeNode
from ringfence.core.record import dataclass
from ringfence.sandbox.files.paths import FOLDER, WORKSPACE, beneath, explaining, full_path, made_folder
from ringfence.sandbox.files.tree import read_tree, write_tree
from ringfence.sandbox.files.walk import MAX_ENTRIES, ReadBudget, Walk, WalkEntry, empty


@dataclass(frozen=True, slots=True)
class WholeDisk:
    """All that a box may write, and its input."""

    descriptor: int
    owner: int | None
    kept: tuple[str, ...]
    """The folders beneath the descriptor that the box always has."""
    input_parts: tuple[str, ...]
    input_descriptor: int | None
    """A writable one of its folder for inputs."""

    def take(self, keep: Keep, *, max_files: int | None = None, max_bytes: int | None = None) -> TakenTree:
        with explaining(self.descriptor, WORKSPACE), beneath(self.descriptor, ()) as root:
            kept = _Kept(os.fstat(root).st_dev, self.input_parts)
            walk = Walk(most=max_files or MAX_ENTRIES, enters=kept)
            nodes = read_tree(root, keep, walk, ReadBudget(max_bytes))
        return TakenTree([node for node in nodes if node.kind != "other"], kept.has_input)

    def clear(self) -> None:
        with explaining(self.descriptor, WORKSPACE), beneath(self.descriptor, ()) as root:
            for name in self.kept:  # these stay: the box sees them elsewhere
                with beneath(root, tuple(name.split("/")) if name else ()) as folder:
                    empty(folder, self.owner)
            if self.input_descriptor is not None:
                with beneath(self.input_descriptor, ()) as folder:
                    empty(folder, self.owner)

    def put(self, nodes: Iterable[TreeNode], get: Get) -> None:
        given = self.input_descriptor
        into = None if given is None else (self.input_parts, given)
        with explaining(self.descriptor, WORKSPACE), beneath(self.descriptor, ()) as root:
            write_tree(root, nodes, get, self.owner, into)


@dataclass(frozen=True, slots=True)
class OneFolder:
    """A file system of its own, or else a folder of the workspace, as the box has it now."""

    descriptor: int
    """Of what the path begins at."""
    parts: tuple[str, ...]
    owner: int | None

    def take(self, keep: Keep, *, max_files: int | None = None, max_bytes: int | None = None) -> TakenTree:
        with self._opened() as root:
            found = read_tree(root, keep, Walk(most=max_files or MAX_ENTRIES), ReadBudget(max_bytes))
        return TakenTree([node for node in found if node.kind != "other"])

    def clear(self) -> None:
        with self._explaining(), made_folder(self.descriptor, self.parts, self.owner) as (root, _):
            empty(root, self.owner)

    def put(self, nodes: Iterable[TreeNode], get: Get) -> None:
        with self._opened() as root:
            write_tree(root, nodes, get, self.owner)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with self._explaining(), beneath(self.descriptor, self.parts, FOLDER) as root:
            yield root

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        with explaining(self.descriptor, full_path(self.parts) if self.parts else WORKSPACE):
            yield


class _Kept:
    """Which folders belong to a whole box: input is a mount of its own and belongs to it, volumes do not."""

    def __init__(self, device: int, input_parts: tuple[str, ...]) -> None:
        self._device = device
        self._input_parts = input_parts
        self.has_input = False
        """Whether there was one."""

    def __call__(self, found: WalkEntry) -> bool:
        if found.info.st_dev == self._device:
            return True
        inside = found.parts[: len(self._input_parts)] == self._input_parts
        self.has_input = self.has_input or inside
        return inside
