"""Installs packages into the cache, through two install boxes for each request.

The first reaches the operator's registries and nothing else; no code of a package runs in it. What it brings is hostile
input, and is checked here against what the registry says of each archive. The second has no network, gets those
archives and nothing else, and unpacks them. Neither has mounts or secrets.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ringfence.core.box import MIB, Input, InstallIndex, Installs, Serve
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.packages import registries
from ringfence.packages.cache import AT, Kind, Package, PackageCache, Tree
from ringfence.packages.index import BoxIndex, PackageIndex
from ringfence.packages.index_address import INDEX_ENV
from ringfence.packages.install_boxes import (
    BoxJob,
    InstallBoxes,
    altered,
    check_names,
    file_digest,
    project_name,
    read_json,
)
from ringfence.packages.registries import Registry

_MAX_LOCK_BYTES = 32 * MIB
_PLAIN = re.compile(r"[A-Za-z0-9@/._+!~-]{1,250}")
_STRONG = ("sha512", "sha384", "sha256")
_MAX_JSON = 4_000_000
_SCRIPTS = {"npm": "ringfence.packages.inside.npm", "pypi": "ringfence.packages.inside.pip"}


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """Packages as npm or pip names them, and how to install them."""

    kind: Kind
    packages: tuple[str, ...]
    scripts: bool = False
    """npm: whether install scripts may run, in a box without a network."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Archives whose digests are those that the registry gives."""

    packages: tuple[Package, ...]
    files: tuple[Path, ...]
    beside: Mapping[str, bytes]
    """Further inputs of the second box."""


@dataclass(frozen=True, slots=True)
class BuildFromSource:
    """How packages that have only sources are installed: from our own index, which builds them."""

    index: PackageIndex
    serve: Callable[[InstallIndex], Serve]


class Installer:
    """Fetches what is not in the cache yet."""

    def __init__(self, cache: PackageCache, boxes: InstallBoxes, building: BuildFromSource | None = None) -> None:
        self._cache = cache
        self._boxes = boxes
        self._building = building

    async def fetch(self, request: InstallRequest) -> Tree:
        """The packages and all their dependencies. Raises Unavailable, ValueError for malformed names."""
        check_names(request.kind, request.packages)
        asked = self._asked(request)
        known = await asyncio.to_thread(self._cache.known, asked)
        if known is not None:
            return known
        registry = await (registries.npm() if request.kind == "npm" else registries.pip(self._boxes.interpreter))
        staging = await asyncio.to_thread(self._cache.staging)
        try:
            fetched = await self._fetched(request, registry, staging / "fetched")
            tree = await self._laid_out(request, registry, fetched, staging / "laid_out")
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, True)
        await asyncio.to_thread(self._cache.remember, asked, tree)
        return tree

    def _asked(self, request: InstallRequest) -> Mapping[str, Any]:
        """The key of a tree: names, and the platform and interpreter whose code is in it."""
        asked = {"kind": request.kind, "packages": sorted(request.packages), "scripts": request.scripts}
        asked |= {"builds": True} if self._building is not None and request.kind == "pypi" else {}
        interpreter = str(self._boxes.interpreter)
        return {**asked, "platform": sys.platform, "interpreter": interpreter, "version": sys.version}

    async def _fetched(self, request: InstallRequest, registry: Registry, into: Path) -> Fetched:
        order = {"wanted": list(request.packages), "npm": list(registry.client)}
        if self._building is not None and request.kind == "pypi":
            return await self._built(request, self._building, into)
        job = BoxJob(_SCRIPTS[request.kind], "fetch", order, into, registry)
        await self._boxes.run(_named(request), job)
        read = checked_npm if request.kind == "npm" else checked_pypi
        return await asyncio.to_thread(read, into, _MAX_LOCK_BYTES)

    async def _built(self, request: InstallRequest, building: BuildFromSource, into: Path) -> Fetched:
        """The same, but pip asks our own index, whose files were checked when they got there."""
        roots = tuple(project_name(package) for package in request.packages)
        index = BoxIndex(building.index, Installs(roots))
        order = {"wanted": list(request.packages)}
        job = BoxJob(_SCRIPTS["pypi"], "fetch", order, into, env=INDEX_ENV, network=building.serve(index))
        try:
            await self._boxes.run(_named(request), job)
        except Unavailable as exc:
            raise index.trouble or exc from None
        fetched = await asyncio.to_thread(checked_pypi, into, _MAX_LOCK_BYTES)
        known = {had["integrity"]: had.get("built_from", "") for had in index.handed_out()}
        if any(package.integrity not in known for package in fetched.packages):
            raise Unavailable(
                "package_altered", f"{_named(request)}: an install box delivered a file that our index never had"
            )
        packages = tuple(
            Package(each.name, each.version, each.integrity, known[each.integrity]) for each in fetched.packages
        )
        return Fetched(packages, fetched.files, fetched.beside)

    async def _laid_out(self, request: InstallRequest, registry: Registry, fetched: Fetched, into: Path) -> Tree:
        order = {
            "files": [path.name for path in fetched.files],
            "npm": list(registry.client),
            "scripts": request.scripts,
            "at": [AT],
        }
        inputs = [Input(f"files/{path.name}", path, links=True) for path in fetched.files]
        inputs += [Input(name, data) for name, data in fetched.beside.items()]
        job = BoxJob(_SCRIPTS[request.kind], "unpack", order, into, inputs=tuple(inputs))
        await self._boxes.run(_named(request), job, registry.trees)
        programs = npm_programs if request.kind == "npm" else pypi_programs
        tree = into / "tree"
        found = await asyncio.to_thread(programs, tree, request.packages)
        return await asyncio.to_thread(self._cache.put, request.kind, tree, fetched.packages, found)


def _named(request: InstallRequest) -> str:
    return ", ".join(request.packages)


# ── PyPI ──────────────────────────────────────────────────────────────────────────────────────────


def checked_pypi(folder: Path, most: int) -> Fetched:
    """The wheels that an install box brought, checked by the report of pip's resolution. Raises Unavailable."""
    report = read_json(folder / "report.json", most)
    packages: list[Package] = []
    for item in _list(report.get("install")):
        metadata = _dict(item.get("metadata"))
        download = _dict(item.get("download_info"))
        digest = _dict(_dict(download.get("archive_info")).get("hashes")).get("sha256")
        name = _plain(metadata.get("name"))
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise Unavailable("no_integrity", f"the index gives no sha256 for {name}")
        packages.append(Package(name, _plain(metadata.get("version")), f"sha256:{digest}"))
    expected = {package.integrity: package.name for package in packages}
    files = sorted(path for path in (folder / "files").iterdir() if path.is_file())
    for path in files:
        integrity = f"sha256:{file_digest(path, 'sha256').hex()}"
        if path.suffix != ".whl" or integrity not in expected:
            raise altered(path.name)
        del expected[integrity]
    if expected:
        raise _missing(expected.values())
    return Fetched(tuple(packages), tuple(files), {})


def pypi_programs(tree: Path, packages: tuple[str, ...]) -> dict[str, str]:
    del packages
    folder = tree / "bin"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {name: f"bin/{name}" for name in names if _PLAIN.fullmatch(name)}


# ── npm ───────────────────────────────────────────────────────────────────────────────────────────


def checked_npm(folder: Path, most: int) -> Fetched:
    """The archives that an install box brought, checked by the lock file that npm wrote. Raises Unavailable."""
    lock = read_json(folder / "package-lock.json", most)
    packages: list[Package] = []
    used: dict[str, Path] = {}
    for place, entry in _dict(lock.get("packages")).items():
        if not place or not isinstance(entry, dict) or entry.get("inBundle") is True:
            continue
        name = _plain(place.rpartition("node_modules/")[2])
        kind, digest = _strongest(name, entry)
        path = folder / "files" / f"{kind}-{digest.hex()}.tgz"
        if not path.is_file():
            if entry.get("optional") is True:
                continue  # for another kind of machine
            raise _missing([name])
        if path.name not in used and file_digest(path, kind) != digest:
            raise altered(name)
        used[path.name] = path
        entry["resolved"] = f"file:///workspace/input/files/{path.name}"
        integrity = f"{kind}-{base64.b64encode(digest).decode()}"
        packages.append(Package(name, _plain(entry.get("version")), integrity))
    written = {
        "package.json": (folder / "package.json").read_bytes()[:_MAX_JSON],
        "package-lock.json": json.dumps(lock).encode(),
    }
    return Fetched(tuple(packages), tuple(used[name] for name in sorted(used)), written)


def npm_programs(tree: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The programs of the requested packages, by the name of the package and of each program."""
    found: dict[str, str] = {}
    for package in packages:
        name = package if "@" not in package[1:] else package[: package.rindex("@")]
        home = PurePosixPath("node_modules") / name
        manifest = read_json(tree / home / "package.json", _MAX_JSON)
        programs = manifest.get("bin")
        short = name.rpartition("/")[2]
        named = {short: programs} if isinstance(programs, str) else _dict(programs)
        usable = dict(_inside(tree, home, named))
        found |= usable
        if short in usable or len(usable) == 1:
            found[name] = usable.get(short) or next(iter(usable.values()))
    return found


def _inside(tree: Path, home: PurePosixPath, named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, path in named.items():
        if not isinstance(path, str) or not _PLAIN.fullmatch(name) or not _PLAIN.fullmatch(path):
            continue
        inside = os.path.normpath(str(home / path))
        if inside.startswith(f"{home}/") and (tree / inside).is_file() and not (tree / inside).is_symlink():
            yield name, inside


def _strongest(name: str, entry: Mapping[str, Any]) -> tuple[str, bytes]:
    given = str(entry.get("integrity", "")).split()
    for kind in _STRONG:
        for integrity in given:
            if integrity.startswith(f"{kind}-"):
                try:
                    return kind, base64.b64decode(integrity.partition("-")[2], validate=True)
                except ValueError:
                    break
    raise Unavailable("no_integrity", f"the registry gives no strong integrity for {name}: it cannot be pinned")


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────


def _plain(value: Any) -> str:
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        raise Unavailable("install_failed", "an install box left an invalid name or version")
    return value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _missing(names: Iterable[str]) -> Unavailable:
    return Unavailable("install_failed", f"an install box did not deliver {', '.join(sorted(names)[:5])}")
