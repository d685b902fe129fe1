"""The packages of a configuration: over which boxes they are fetched, and which registries those reach."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ringfence.compose.backends import make_backend
from ringfence.config.paths import engine_files
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import InstallIndex, Installs, Mount, NetworkRule, Serve
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import ServerSpec, Status
from ringfence.core.ports import Backend, InstalledPackages
from ringfence.core.quoting import quoted
from ringfence.core.secret import Secret
from ringfence.core.system import interpreter
from ringfence.egress.dial import system_resolve
from ringfence.egress.names import METADATA, address_kind
from ringfence.egress.substitution import Substitute, Substitution
from ringfence.egress.tls import outside
from ringfence.governance.route import ProxyServer
from ringfence.packages import install_boxes
from ringfence.packages.allowlist import AllowedPackage, Allowlist
from ringfence.packages.cache import AT, FOLDER, PackageCache, Tree
from ringfence.packages.images.engines import EngineFiles, Engines
from ringfence.packages.images.fetch import ImageFetcher
from ringfence.packages.images.library import ImageLibrary
from ringfence.packages.index import BoxIndex, PackageIndex
from ringfence.packages.install import BuildFromSource, Installer, InstallRequest
from ringfence.packages.install_boxes import InstallBoxes
from ringfence.packages.registries import Credential, Registry
from ringfence.secrets.redaction import CountingCleaner, RedactingStream, SecretMatcher

RULE = "registries"
BESIDE = "registries:beside"
_SHORTEST_SECRET = 12
"""What is shorter is found by accident, too."""


def package_cache(state: Path) -> PackageCache:
    """The cache below a state folder."""
    return PackageCache(state / FOLDER)


def mount(tree: Tree) -> Mount:
    """How a box sees packages."""
    return Mount(str(tree.folder), AT, "ro")


def verify(spec: ServerSpec, configuration: Path | None) -> None:
    """Every byte of the packages that a server is about to run from, whenever it does. Raises Unavailable."""
    if spec.packages is not None:
        cache = PackageCache(Path(spec.packages.folder).parents[1])
        cache.tree(spec.packages.tree)
        if configuration is not None:
            cache.used_by(configuration)


async def fetch(state: Path, settings: SandboxSettings, wanted: InstallRequest) -> Tree:
    """Packages from the cache, or through install boxes into it. Raises Unavailable, ValueError."""
    backend = make_backend(settings)
    try:
        return await PackageService(state, backend, settings).fetch(wanted)
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
    kinds = {each: address_kind(ipaddress.ip_address(each)) for some in found for each in some}
    if METADATA in kinds.values():  # an image may be named by another than the operator
        raise Unavailable(
            "no_registry", f"{registry.hosts[0]} hands out credentials of this machine, which no registry does"
        )
    own = tuple(sorted(each for each, kind in kinds.items() if kind))
    if not registry.credentials:
        beside = [NetworkRule(BESIDE, registry.beside)] if registry.beside else []
        return ProxyServer().by([NetworkRule(RULE, registry.hosts, addresses=own), *beside])
    # TLS ends at us then, so that it is we who say who the client is; and we trust whom the client would.
    trust = outside()
    if registry.certificates:
        trust.load_verify_locations(cadata=registry.certificates.decode("ascii", "ignore"))
    rule = NetworkRule(RULE, registry.hosts, methods=("GET", "HEAD"), addresses=own, terminate=True)
    rules = [rule, *([replace(rule, name=BESIDE, hosts=registry.beside, addresses=())] if registry.beside else [])]
    return ProxyServer(trust=trust).by(rules, _Presented(registry.credentials))


async def _resolved(name: str) -> list[str]:
    try:
        return list(await system_resolve(name))
    except OSError:
        return []  # the client in the box reports it


class _Presented:
    """Implements `route.RouteSecrets`: the operator's credentials for registries, put into requests that leave."""

    def __init__(self, credentials: tuple[Credential, ...]) -> None:
        self._credentials = credentials
        texts = {text for each in credentials for text in each.parts if len(text) >= _SHORTEST_SECRET}
        self._values = SecretMatcher(
            [Secret(f"registry {n}", text) for n, text in enumerate(sorted(texts))], shaped=False
        )
        self._removed: Counter[str] = Counter()

    @property
    def substitute(self) -> Substitute:
        return self._put

    @property
    def removed(self) -> int:
        return self._removed.total()

    def revoke(self) -> None:
        self._credentials = ()

    async def _put(self, asked: OutboundRequest) -> Substitution:
        path = asked.path.partition("?")[0]
        for each in self._credentials:
            if (asked.host, asked.port) == (each.host, each.port) and path.startswith(each.path):
                put = {"Authorization": each.header}
                return Substitution(
                    put=put, clean=lambda: CountingCleaner(RedactingStream(self._values), self._removed)
                )
        return Substitution()


class PackageService:
    """Implements `ports.PackageInstaller` with Python packages, over boxes of the same backend."""

    def __init__(self, state: Path, backend: Backend, settings: SandboxSettings) -> None:
        self._required = settings.packages
        boxes = InstallBoxes(backend, _reach, interpreter())
        kept = package_cache(state)
        self._plain = Installer(kept, boxes)
        """Of wheels alone; what is built is built with these."""
        self._index = PackageIndex(kept, boxes, self._tools if settings.build_packages else None)
        building = BuildFromSource(self._index, ProxyServer().at) if settings.build_packages else None
        self._installer = Installer(kept, boxes, building)
        self._images = ImageFetcher(kept, boxes, _engines)
        self.images = ImageLibrary(kept, boxes, _engines)

    async def fetch(self, wanted: InstallRequest) -> Tree:
        """Raises Unavailable, ValueError."""
        if wanted.kind == "image":
            (name,) = wanted.packages
            return await self._images.fetch(name)
        return await self._installer.fetch(wanted)

    def check(self, names: tuple[str, ...], within: tuple[str, ...] | None = None) -> None:
        try:
            install_boxes.check_names("pypi", names)
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_package", str(exc)) from None
        for name in names:
            lacking = install_boxes.missing_pin(name, self._required)
            if lacking is not None:
                text = f"{name!r} may not be installed: it names no {lacking}, and sandbox.require_packages asks for it"
                raise Refused(Status.DENIED, "package_not_pinned", text)
            if within is not None and not Allowlist(within).let(name):
                known = ", ".join(within) or "none"
                text = f"{quoted(name)} may not be installed; what may be is: {known} (sandbox.allow_packages)"
                raise Refused(Status.DENIED, "package_denied", text)

    async def install(self, names: tuple[str, ...]) -> InstalledPackages:
        self.check(names)
        tree = await self._installer.fetch(InstallRequest("pypi", names))
        return InstalledPackages(tree.folder, tuple(package.plain() for package in tree.packages))

    def index(self, installs: Installs) -> InstallIndex:
        try:
            lacking = [text for text in installs.names if not AllowedPackage.of(text).says(installs.required)]
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_package", str(exc)) from None
        if lacking:
            what = "its version" if installs.required == "pinned" else "its version and hash"
            text = f"{lacking[0]!r} does not name {what}, and sandbox.require_packages asks for it"
            raise Refused(Status.DENIED, "package_not_pinned", text)
        return BoxIndex(self._index, installs)

    async def _tools(self, names: tuple[str, ...]) -> Path:
        return (await self._plain.fetch(InstallRequest("pypi", names))).folder
