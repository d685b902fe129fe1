"""The packages of a configuration: over which boxes they are fetched, and which registries those reach. A part of the
composition root."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import asdict
from pathlib import Path

from ringfence.backends import make_backend
from ringfence.box import Mount, NetworkRule, Serve
from ringfence.config.settings import SandboxSettings
from ringfence.egress import addresses
from ringfence.egress.dial import system_resolve
from ringfence.errors import Refused
from ringfence.model import Status
from ringfence.outward import Serving
from ringfence.packages import archives
from ringfence.packages.installing import Installer, Wanted
from ringfence.packages.shelf import AT, FOLDER, Shelf, Tree
from ringfence.ports import Backend, Packed
from ringfence.sandbox.process.zygotes import interpreter

RULE = "registries"


def shelf(state: Path) -> Shelf:
    """The cache below a state folder."""
    return Shelf(state / FOLDER)


def mount(tree: Tree) -> Mount:
    """How a box sees packages."""
    return Mount(str(tree.folder), AT, "ro")


async def fetch(state: Path, settings: SandboxSettings, wanted: Wanted) -> Tree:
    """Packages from the cache, or through install boxes into it. Raises Unavailable, ValueError."""
    backend = make_backend(settings)
    try:
        return await Installer(shelf(state), backend, _reach, interpreter()).fetch(wanted)
    finally:
        await backend.close()


async def _reach(hosts: tuple[str, ...]) -> Serve:
    """A way to registries that the operator's own npm or pip names. A mirror of theirs may well have an address that is
    not public: it is named by them, so what it resolves to now is what may be reached."""
    names = {host.rpartition(":")[0].strip("[]") for host in hosts}
    found = await asyncio.gather(*(_resolved(name) for name in names))
    own = sorted({address for each in found for address in each if addresses.kind(ipaddress.ip_address(address))})
    return Serving().by([NetworkRule(RULE, hosts, addresses=tuple(own))])


async def _resolved(name: str) -> list[str]:
    try:
        return list(await system_resolve(name))
    except OSError:
        return []  # the box is told so, by its own client


class Packer:
    """Implements `ports.Packing` with Python packages, over boxes of the same backend."""

    def __init__(self, state: Path, backend: Backend, required: str = "any") -> None:
        self._installer = Installer(shelf(state), backend, _reach, interpreter())
        self._required = required

    def check(self, names: tuple[str, ...]) -> None:
        try:
            archives.check("pypi", names)
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_package", str(exc)) from None
        for name in names:
            lacking = archives.lacking(name, self._required)
            if lacking is not None:
                text = f"{name!r} may not be installed: it names no {lacking}, and sandbox.require_packages asks for it"
                raise Refused(Status.DENIED, "package_not_pinned", text)

    async def packed(self, names: tuple[str, ...]) -> Packed:
        self.check(names)
        tree = await self._installer.fetch(Wanted("pypi", names))
        return Packed(tree.folder, tuple(asdict(package) for package in tree.packages))
