"""The packages of a configuration: over which boxes they are fetched, and which registries those reach. A part of the
composition root."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ringfence.backends import make_backend
from ringfence.borrowing import Counting
from ringfence.box import Desk, Installs, Mount, NetworkRule, Serve
from ringfence.config.paths import engine_files
from ringfence.config.settings import SandboxSettings
from ringfence.egress import addresses
from ringfence.egress.dial import system_resolve
from ringfence.egress.scope import Broker, Brokered
from ringfence.egress.tls import outside
from ringfence.errors import Refused, Unavailable
from ringfence.loans import Asked
from ringfence.model import ServerSpec, Status
from ringfence.outward import Serving
from ringfence.packages import archives
from ringfence.packages.desk import IndexDesk
from ringfence.packages.engines import EngineFiles, Engines
from ringfence.packages.entries import Entries, Entry
from ringfence.packages.errands import InstallBoxes
from ringfence.packages.images import Images
from ringfence.packages.index import Index
from ringfence.packages.installing import Building, Installer, Wanted
from ringfence.packages.registries import Credential, Registry
from ringfence.packages.shelf import AT, FOLDER, Shelf, Tree
from ringfence.ports import Backend, Packed
from ringfence.redaction import Stream, Values
from ringfence.secret import Secret
from ringfence.system import interpreter

RULE = "registries"
BESIDE = "registries:beside"
_SHORTEST_SECRET = 12
"""What is shorter is found by accident, too."""


def shelf(state: Path) -> Shelf:
    """The cache below a state folder."""
    return Shelf(state / FOLDER)


def mount(tree: Tree) -> Mount:
    """How a box sees packages."""
    return Mount(str(tree.folder), AT, "ro")


def verify(spec: ServerSpec) -> None:
    """Every byte of the packages that a server is about to run from, whenever it does. Raises Unavailable."""
    if spec.packages is not None:
        Shelf(Path(spec.packages.folder).parents[1]).tree(spec.packages.tree)


async def fetch(state: Path, settings: SandboxSettings, wanted: Wanted) -> Tree:
    """Packages from the cache, or through install boxes into it. Raises Unavailable, ValueError."""
    backend = make_backend(settings)
    try:
        return await Packer(state, backend, settings).fetch(wanted)
    finally:
        await backend.close()


def _engines() -> Engines:
    return Engines.read(EngineFiles(**engine_files()))


async def _reach(registry: Registry) -> Serve | None:
    """A way to registries that the operator's own npm or pip names. A mirror of theirs may well have an address that is
    not public: it is named by them, so what it resolves to now is what may be reached."""
    if not registry.hosts:
        return None
    names = {host.rpartition(":")[0].strip("[]") for host in registry.hosts}
    found = await asyncio.gather(*(_resolved(name) for name in names))
    kinds = {each: addresses.kind(ipaddress.ip_address(each)) for some in found for each in some}
    if addresses.METADATA in kinds.values():  # whoever names an image may not be the operator
        raise Unavailable("no_registry", f"{registry.hosts[0]} hands out credentials of this machine: no registry does")
    own = tuple(sorted(each for each, kind in kinds.items() if kind))
    if not registry.credentials:
        beside = [NetworkRule(BESIDE, registry.beside)] if registry.beside else []
        return Serving().by([NetworkRule(RULE, registry.hosts, addresses=own), *beside])
    # TLS ends at us then, so that it is we who say who the client is; and we trust whom the client would.
    trust = outside()
    if registry.certificates:
        trust.load_verify_locations(cadata=registry.certificates.decode("ascii", "ignore"))
    rule = NetworkRule(RULE, registry.hosts, methods=("GET", "HEAD"), addresses=own, terminate=True)
    rules = [rule, *([replace(rule, name=BESIDE, hosts=registry.beside, addresses=())] if registry.beside else [])]
    return Serving(trust=trust).by(rules, _Presented(registry.credentials))


async def _resolved(name: str) -> list[str]:
    try:
        return list(await system_resolve(name))
    except OSError:
        return []  # the box is told so, by its own client


class _Presented:
    """Implements `outward.Handed`: what registries want to see of the operator, put into requests that leave."""

    def __init__(self, credentials: tuple[Credential, ...]) -> None:
        self._credentials = credentials
        texts = {text for each in credentials for text in each.parts if len(text) >= _SHORTEST_SECRET}
        self._values = Values([Secret(f"registry {n}", text) for n, text in enumerate(sorted(texts))], shaped=False)
        self._removed: Counter[str] = Counter()

    @property
    def broker(self) -> Broker:
        return self._put

    @property
    def removed(self) -> int:
        return self._removed.total()

    def revoke(self) -> None:
        self._credentials = ()

    async def _put(self, asked: Asked) -> Brokered:
        path = asked.path.partition("?")[0]
        for each in self._credentials:
            if (asked.host, asked.port) == (each.host, each.port) and path.startswith(each.path):
                put = {"Authorization": each.header}
                return Brokered(put=put, clean=lambda: Counting(Stream(self._values), self._removed))
        return Brokered()


class Packer:
    """Implements `ports.Packing` with Python packages, over boxes of the same backend."""

    def __init__(self, state: Path, backend: Backend, settings: SandboxSettings) -> None:
        self._required = settings.packages
        boxes = InstallBoxes(backend, _reach, interpreter())
        kept = shelf(state)
        self._plain = Installer(kept, boxes)
        """Of wheels alone; what is built is built with these."""
        self._index = Index(kept, boxes, self._tools if settings.build_packages else None)
        building = Building(self._index, Serving().at) if settings.build_packages else None
        self._installer = Installer(kept, boxes, building)
        self._images = Images(kept, boxes, _engines)

    async def fetch(self, wanted: Wanted) -> Tree:
        """Raises Unavailable, ValueError."""
        if wanted.kind == "image":
            (name,) = wanted.packages
            return await self._images.fetch(name)
        return await self._installer.fetch(wanted)

    def check(self, names: tuple[str, ...], within: tuple[str, ...] | None = None) -> None:
        try:
            archives.check("pypi", names)
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_package", str(exc)) from None
        for name in names:
            lacking = archives.lacking(name, self._required)
            if lacking is not None:
                text = f"{name!r} may not be installed: it names no {lacking}, and sandbox.require_packages asks for it"
                raise Refused(Status.DENIED, "package_not_pinned", text)
            if within is not None and not Entries(within).let(name):
                known = ", ".join(within) or "none"
                text = f"{name[:80]!r} may not be installed; what may be is: {known} (sandbox.allow_packages)"
                raise Refused(Status.DENIED, "package_denied", text)

    async def packed(self, names: tuple[str, ...]) -> Packed:
        self.check(names)
        tree = await self._installer.fetch(Wanted("pypi", names))
        return Packed(tree.folder, tuple(package.plain() for package in tree.packages))

    def desk(self, installs: Installs) -> Desk:
        try:
            lacking = [text for text in installs.names if not Entry.of(text).says(installs.required)]
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_package", str(exc)) from None
        if lacking:
            what = "its version" if installs.required == "pinned" else "its version and hash"
            text = f"{lacking[0]!r} does not name {what}, and sandbox.require_packages asks for it"
            raise Refused(Status.DENIED, "package_not_pinned", text)
        return IndexDesk(self._index, installs)

    async def _tools(self, names: tuple[str, ...]) -> Path:
        return (await self._plain.fetch(Wanted("pypi", names))).folder
