"""Packages into the cache, through install boxes.

Two boxes for each. The first reaches the operator's registries and nothing else; no code of a package runs in it. What
it brings is checked here against what the registry says of each archive. The second has no network, gets those archives
and nothing else, and lays them out. Neither has mounts or secrets.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringfence.box import MIB, Desk, Input, Installs, Serve
from ringfence.errors import Unavailable
from ringfence.packages import archives, registries
from ringfence.packages.desk import IndexDesk
from ringfence.packages.errands import Errand, InstallBoxes
from ringfence.packages.index import Index
from ringfence.packages.place import ENV
from ringfence.packages.registries import Registry
from ringfence.packages.shelf import AT, Kind, Package, Shelf, Tree

MOST_WANTED = 100
_MOST_LOCK_BYTES = 32 * MIB
_SCRIPTS = {"npm": "ringfence.packages.inside_npm", "pypi": "ringfence.packages.inside_pip"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Packages as their client names them, and how."""

    kind: Kind
    packages: tuple[str, ...]
    scripts: bool = False
    """npm: whether scripts of packages may run, in a box without network."""


@dataclass(frozen=True, slots=True)
class Building:
    """How packages that have only sources are had: over an index of ours, which has them built."""

    index: Index
    serve: Callable[[Desk], Serve]


class Installer:
    """Fetches what is not on the shelf yet."""

    def __init__(self, shelf: Shelf, boxes: InstallBoxes, building: Building | None = None) -> None:
        self._shelf = shelf
        self._boxes = boxes
        self._building = building

    async def fetch(self, wanted: Wanted) -> Tree:
        """The packages asked for and all that they need. Raises Unavailable, ValueError for names that are none."""
        archives.check(wanted.kind, wanted.packages)
        asked = self._asked(wanted)
        known = await asyncio.to_thread(self._shelf.known, asked)
        if known is not None:
            return known
        registry = await (registries.npm() if wanted.kind == "npm" else registries.pip(self._boxes.interpreter))
        staging = await asyncio.to_thread(self._shelf.staging)
        try:
            fetched = await self._fetched(wanted, registry, staging / "fetched")
            tree = await self._laid_out(wanted, registry, fetched, staging / "laid_out")
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, True)
        await asyncio.to_thread(self._shelf.remember, asked, tree)
        return tree

    def _asked(self, wanted: Wanted) -> Mapping[str, Any]:
        """What a tree depends on beside names: whose machine code, and whose compiled sources, are in it."""
        asked = {"kind": wanted.kind, "packages": sorted(wanted.packages), "scripts": wanted.scripts}
        asked |= {"builds": True} if self._building is not None and wanted.kind == "pypi" else {}
        interpreter = str(self._boxes.interpreter)
        return {**asked, "platform": sys.platform, "interpreter": interpreter, "version": sys.version}

    async def _fetched(self, wanted: Wanted, registry: Registry, into: Path) -> archives.Fetched:
        order = {"wanted": list(wanted.packages), "npm": list(registry.client)}
        if self._building is not None and wanted.kind == "pypi":
            return await self._built(wanted, self._building, into)
        errand = Errand(_SCRIPTS[wanted.kind], "fetch", order, into, registry)
        await self._boxes.run(_named(wanted), errand)
        read = archives.npm if wanted.kind == "npm" else archives.pypi
        return await asyncio.to_thread(read, into, _MOST_LOCK_BYTES)

    async def _built(self, wanted: Wanted, building: Building, into: Path) -> archives.Fetched:
        """As above, but whom pip asks is an index of ours. What it has was checked when it got there."""
        roots = tuple(archives.name_of(package) for package in wanted.packages)
        desk = IndexDesk(building.index, Installs(roots))
        order = {"wanted": list(wanted.packages)}
        errand = Errand(_SCRIPTS["pypi"], "fetch", order, into, env=ENV, network=building.serve(desk))
        try:
            await self._boxes.run(_named(wanted), errand)
        except Unavailable as exc:
            raise desk.trouble or exc from None
        fetched = await asyncio.to_thread(archives.pypi, into, _MOST_LOCK_BYTES)
        known = {had["integrity"]: had.get("built_from", "") for had in desk.handed_out()}
        if any(package.integrity not in known for package in fetched.packages):
            raise Unavailable("package_altered", f"{_named(wanted)}: an install box brought what our index never had")
        packages = tuple(
            Package(each.name, each.version, each.integrity, known[each.integrity]) for each in fetched.packages
        )
        return archives.Fetched(packages, fetched.files, fetched.beside)

    async def _laid_out(self, wanted: Wanted, registry: Registry, fetched: archives.Fetched, into: Path) -> Tree:
        order = {
            "files": [path.name for path in fetched.files],
            "npm": list(registry.client),
            "scripts": wanted.scripts,
            "at": [AT],
        }
        inputs = [Input(f"files/{path.name}", path) for path in fetched.files]
        inputs += [Input(name, data) for name, data in fetched.beside.items()]
        errand = Errand(_SCRIPTS[wanted.kind], "unpack", order, into, inputs=tuple(inputs))
        await self._boxes.run(_named(wanted), errand, registry.trees)
        programs = archives.npm_programs if wanted.kind == "npm" else archives.pypi_programs
        tree = into / "tree"
        found = await asyncio.to_thread(programs, tree, wanted.packages)
        return await asyncio.to_thread(self._shelf.put, wanted.kind, tree, fetched.packages, found)


def _named(wanted: Wanted) -> str:
    return ", ".join(wanted.packages)
