"""Packages into the cache, through install boxes.

Two boxes for each. The first reaches the operator's registries and nothing else; no code of a package runs in it. What
it brings is checked here against what the registry says of each archive. The second has no network, gets those archives
and nothing else, and lays them out. Neither has mounts or secrets.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ringfence import canonical
from ringfence.box import MIB, BoxReport, BoxSpec, Input, Limits, Program, Serve
from ringfence.errors import Unavailable
from ringfence.packages import archives, inside_npm, inside_pip, registries
from ringfence.packages.registries import Registry
from ringfence.packages.shelf import AT, Kind, Shelf, Tree
from ringfence.ports import Backend

MOST_WANTED = 100
_LIMITS = Limits(
    wall_seconds=600.0,
    cpu_cores=4.0,
    memory_bytes=4096 * MIB,
    disk_bytes=3072 * MIB,
    inodes=400_000,
    processes=256,
    capture_bytes=20_000,
)
_MOST_FILES = 150_000
_MOST_LOCK_BYTES = 32 * MIB
_LAST_LINES = 6
_PROXIED = {
    **{"no_proxy": "", "NO_PROXY": "", "npm_config_noproxy": ""},
    **{"PIP_RETRIES": "2", "npm_config_fetch_retry_mintimeout": "200", "npm_config_fetch_retry_maxtimeout": "2000"},
}
"""A registry on this host's loopback is not on the box's own; and what is refused is refused again."""
_TRUST = ("PIP_CERT", "npm_config_cafile", "NODE_EXTRA_CA_CERTS")
_SCRIPTS = {"npm": inside_npm, "pypi": inside_pip}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Packages as their client names them, and how."""

    kind: Kind
    packages: tuple[str, ...]
    scripts: bool = False
    """npm: whether scripts of packages may run, in a box without network."""


@dataclass(frozen=True, slots=True)
class _Errand:
    """What one box is to do."""

    verb: Literal["fetch", "unpack"]
    order: Mapping[str, Any]
    into: Path
    env: Mapping[str, str]
    inputs: tuple[Input, ...] = ()
    network: Serve | None = None


class Installer:
    """Fetches what is not on the shelf yet."""

    def __init__(
        self, shelf: Shelf, backend: Backend, reach: Callable[[tuple[str, ...]], Awaitable[Serve]], interpreter: Path
    ) -> None:
        """`reach` gives a way out to these hosts and no others."""
        self._shelf = shelf
        self._backend = backend
        self._reach = reach
        self._interpreter = interpreter

    async def fetch(self, wanted: Wanted) -> Tree:
        """The packages asked for and all that they need. Raises Unavailable, ValueError for names that are none."""
        archives.check(wanted.kind, wanted.packages)
        asked = self._asked(wanted)
        known = await asyncio.to_thread(self._shelf.known, asked)
        if known is not None:
            return known
        registry = await (registries.npm() if wanted.kind == "npm" else registries.pip(self._interpreter))
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
        return {**asked, "platform": sys.platform, "interpreter": str(self._interpreter), "version": sys.version}

    async def _fetched(self, wanted: Wanted, registry: Registry, into: Path) -> archives.Fetched:
        order = {"wanted": list(wanted.packages), "npm": list(registry.client)}
        network = await self._reach(registry.hosts) if registry.hosts else None
        env = {"HOME": "/workspace/tmp", **registry.env, **_PROXIED}
        trusted: tuple[Input, ...] = ()
        if registry.certificates:
            trusted = (Input("trusted.pem", registry.certificates),)
            env |= dict.fromkeys(_TRUST, "/workspace/input/trusted.pem")
        await self._run(wanted, registry, _Errand("fetch", order, into, env, trusted, network))
        read = archives.npm if wanted.kind == "npm" else archives.pypi
        return await asyncio.to_thread(read, into, _MOST_LOCK_BYTES)

    async def _laid_out(self, wanted: Wanted, registry: Registry, fetched: archives.Fetched, into: Path) -> Tree:
        order = {
            "files": [path.name for path in fetched.files],
            "npm": list(registry.client),
            "scripts": wanted.scripts,
            "at": [AT],
        }
        inputs = [Input(f"files/{path.name}", path) for path in fetched.files]
        inputs += [Input(name, data) for name, data in fetched.beside.items()]
        await self._run(wanted, registry, _Errand("unpack", order, into, {"HOME": "/workspace/tmp"}, tuple(inputs)))
        programs = archives.npm_programs if wanted.kind == "npm" else archives.pypi_programs
        tree = into / "tree"
        found = await asyncio.to_thread(programs, tree, wanted.packages)
        return await asyncio.to_thread(self._shelf.put, wanted.kind, tree, fetched.packages, found)

    async def _run(self, wanted: Wanted, registry: Registry, errand: _Errand) -> None:
        script = Path(str(_SCRIPTS[wanted.kind].__file__))
        given = (Input("install.py", script), Input("order.json", canonical.dumps(dict(errand.order))))
        spec = BoxSpec(
            program=Program("command", argv=(str(self._interpreter), "-I", "/workspace/input/install.py", errand.verb)),
            limits=_LIMITS,
            env=errand.env,
            inputs=(*given, *errand.inputs),
            output=errand.into,
            output_files=_MOST_FILES,
            trees=registry.trees,
            network=errand.network,
        )
        report = await self._backend.run(spec)
        if report.ended != "exited" or report.exit_status:
            raise Unavailable("install_failed", _told(wanted, errand.verb, report))
        lost = {path: why for path, why in report.skipped.items() if "more than" in why or "bytes" in why}
        if lost:
            path, why = next(iter(lost.items()))
            raise Unavailable("install_failed", f"{', '.join(wanted.packages)} cannot be kept: {path}: {why}")


def _told(wanted: Wanted, verb: str, report: BoxReport) -> str:
    what = "fetched" if verb == "fetch" else "laid out"
    said = [line for line in report.stderr.text.splitlines() if line.strip()][-_LAST_LINES:]
    why = f"the box ended: {report.ended}" if report.ended != "exited" else "; ".join(said)
    denied = [f"{each['host']}:{each['port']}" for each in (report.network or {}).get("denied", [])]
    refused = f" (it was not let to {', '.join(denied)}, which is none of your registries)" if denied else ""
    return f"{', '.join(wanted.packages)} could not be {what}{refused}: {why or f'exit status {report.exit_status}'}"
