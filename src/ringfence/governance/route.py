"""How a box reaches the outside: networks of the configuration, places that a caller named, and secrets, put together
for one box and served by the proxy at its listener."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.core.box import InstallIndex, Installs, NetworkRule, Serve, ServedRoute
from ringfence.core.brokering import SubstitutionReply, SubstitutionRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import NetworkSpec, Status
from ringfence.core.ports import Access, PackageInstaller, Route
from ringfence.core.quoting import quoted
from ringfence.egress import names
from ringfence.egress.dial import Dial, Resolve, system_dial, system_resolve
from ringfence.egress.ledger import EgressFact
from ringfence.egress.proxy import BoxProxy, Egress
from ringfence.egress.rules import Rules
from ringfence.egress.substitution import Substitute
from ringfence.packages.index_address import INDEX_ENV, INDEX_HOST

if TYPE_CHECKING:  # handed in: a configuration without secrets does not load what reads them
    from ringfence.governance.broker import VaultBroker

_UNPROXIED = ("localhost", "127.0.0.1", "::1")
"""Every box has these of its own; where a rule names one, it is the host's."""
ALLOWED = "caller:allow"
"""The name of the rule that the places of a caller make."""
INSTALLS = "sandbox:allow_packages"
"""The name of the rule for the index that is ours."""


class RouteSecrets(Protocol):
    """The secrets of one box, as its route has them."""

    @property
    def substitute(self) -> Substitute | None: ...

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        ...

    def revoke(self) -> None: ...


class ConfiguredRouter:
    """Implements `ports.Router` and `ports.SecretBroker`, for one configuration in force."""

    def __init__(
        self,
        networks: Mapping[str, NetworkSpec],
        serving: ProxyServer | None = None,
        secrets: VaultBroker | None = None,
    ) -> None:
        self._networks = networks
        self._serving = serving or ProxyServer()
        self._secrets = secrets

    def check(self, access: Access) -> None:
        self.rules(access)
        if access.secrets:
            self._broker().check(access)

    def check_open(self, rules: Sequence[NetworkRule], network: str | None) -> None:
        for rule in rules:
            if rule.name in (ALLOWED, INSTALLS):
                continue
            spec = self._networks.get(rule.name)
            if spec is None or network not in (None, rule.name) or not _covers(rule_of(spec), rule):
                text = (
                    f"what network {quoted(rule.name)} allows was tightened since the session was opened: open another"
                )
                raise Refused(Status.DENIED, "session_network", text)

    async def route(self, access: Access) -> Route:
        self.check(access)
        rules = self.rules(access)
        if not access.secrets:
            return Route(self._serving.by(rules), rules) if rules else Route()
        issued = await self._broker().issue(access)
        served = issued.rules(rules)
        return Route(self._serving.by(served, issued) if served else None, served, issued.env, issued.brokered)

    async def ready(self, access: Access) -> None:
        await self._broker().issue(access)

    async def substitute(self, request: SubstitutionRequest) -> SubstitutionReply:
        return await self._broker().substitute(request)

    async def headers(self, access: Access) -> Mapping[str, str]:
        return await self._broker().headers(access) if access.secrets else {}

    def _broker(self) -> VaultBroker:
        if self._secrets is None:
            raise Unavailable("no_secret", "a secret is needed, and there are none here")
        return self._secrets

    def rules(self, access: Access) -> tuple[NetworkRule, ...]:
        """What these names allow, together. Raises Refused, Unavailable."""
        rules: list[NetworkRule] = []
        if access.installs is not None:  # before all others: no wildcard has that place
            rules.append(NetworkRule(INSTALLS, (f"{INDEX_HOST}:80",), installs=access.installs))
        if access.network != "denied":
            spec = self._networks.get(access.network)
            if spec is None:
                raise Unavailable("no_network", f"there is no network {access.network!r}")
            rules.append(rule_of(spec))
        if access.places:
            rules.append(NetworkRule(ALLOWED, access.places))
        try:
            return Rules(rules).all
        except ValueError as error:
            raise Refused(Status.VALIDATION_FAILURE, "bad_network", f"invalid network: {error}") from None


class ProxyServer:
    """Serves the listeners of boxes by rules. What all boxes share is made when the first of them has a route."""

    def __init__(
        self,
        resolve: Resolve = system_resolve,
        trust: ssl.SSLContext | None = None,
        dial: Dial = system_dial,
        installer: Callable[[], PackageInstaller] | None = None,
    ) -> None:
        """`installer` has an index for boxes that may install something; None: there is none."""
        self._installer = installer
        self._resolve = resolve
        self._dial = dial
        self._trust = trust
        self._egress: Egress | None = None

    @property
    def egress(self) -> Egress:
        if self._egress is None:
            self._egress = Egress(self._resolve, self._trust, dial=self._dial)
        return self._egress

    def by(self, rules: Iterable[NetworkRule], handed: RouteSecrets | None = None) -> Serve:
        """Raises ValueError for rules that cannot be meant."""
        rules = tuple(rules)
        return self._served(Rules(rules, self._index(rules)), handed)

    def at(self, index: InstallIndex) -> Serve:
        """A route to this index, and to nothing else."""
        return self._served(Rules([NetworkRule(INSTALLS, (f"{INDEX_HOST}:80",), installs=Installs(()))], index))

    def _served(self, compiled: Rules, handed: RouteSecrets | None = None) -> Serve:
        substitute = None if handed is None else handed.substitute

        async def serve(listener: socket) -> ServedRoute:
            attached = await self.egress.attach(listener, compiled, _unheard, substitute=substitute)
            unproxied = tuple(host for host in _UNPROXIED if not compiled.name(names.host(host)))
            return ProxyRoute(attached, unproxied, handed, compiled.index)

        return serve

    def _index(self, rules: tuple[NetworkRule, ...]) -> InstallIndex | None:
        installs = next((rule.installs for rule in rules if rule.installs is not None), None)
        return None if installs is None or self._installer is None else self._installer().index(installs)


class ProxyRoute:
    """Implements `box.ServedRoute`: the proxy of one box, while it serves."""

    def __init__(
        self,
        attached: BoxProxy,
        unproxied: tuple[str, ...],
        handed: RouteSecrets | None = None,
        index: InstallIndex | None = None,
    ) -> None:
        self.unproxied = unproxied
        self.env: Mapping[str, str] = {} if index is None else INDEX_ENV
        self._index = index
        self._attached = attached
        self._handed = handed

    @property
    def authority(self) -> bytes | None:
        found = self._attached.authority
        return None if found is None else found.pem

    def facts(self) -> dict[str, Any]:
        return self._with_more(network_fact(self._attached.facts()))

    def hold(self) -> None:
        self._attached.hold()

    def go_on(self) -> None:
        self._attached.go_on()

    @property
    def waiting(self) -> int:
        """How many requests and pieces of them are held."""
        return self._attached.waiting

    async def close(self) -> dict[str, Any]:
        if self._handed is not None:
            self._handed.revoke()
        return self._with_more(network_fact(await self._attached.close()))

    def _with_more(self, fact: dict[str, Any]) -> dict[str, Any]:
        removed = 0 if self._handed is None else self._handed.removed
        packages = () if self._index is None else self._index.handed_out()
        fact |= {"packages": [dict(package) for package in packages]} if packages else {}
        return {**fact, "redacted": removed} if removed else fact


def rule_of(spec: NetworkSpec) -> NetworkRule:
    return NetworkRule(
        name=spec.name,
        hosts=spec.allow,
        methods=spec.methods,
        paths=spec.paths,
        addresses=spec.addresses,
        max_bytes_out=spec.max_bytes_out,
        max_bytes_in=spec.max_bytes_in,
        per_minute=spec.per_minute,
        terminate=spec.inspect,
    )


def _covers(now: NetworkRule, before: NetworkRule) -> bool:
    """Whether a rule allows everything that it did before; where it takes more than a look to tell, it does not."""
    if not set(before.hosts) <= set(now.hosts) or not set(before.addresses) <= set(now.addresses):
        return False
    if now.terminate and not before.terminate:
        return False
    limits = ("methods", "paths", "max_bytes_out", "max_bytes_in", "per_minute")
    return all(getattr(now, name) in (None, getattr(before, name)) for name in limits)


_SHOWN = {
    "allowed": ("host", "port", "count", "rule", "inspected", "bytes_in", "bytes_out"),
    "denied": ("host", "port", "count", "rule", "reason"),
    "failed": ("host", "port", "count", "rule", "reason"),
}
_SUMS = ("count", "bytes_in", "bytes_out")


def network_fact(facts: Iterable[EgressFact]) -> dict[str, Any]:
    """The `network` fact: what was let through, what was denied and by which rule, and what failed outside."""
    by_verdict: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {verdict: {} for verdict in _SHOWN}
    sums = {"bytes_in": 0, "bytes_out": 0}
    for fact in facts:
        entry: Mapping[str, Any] = fact
        shown = {name: entry[name] for name in _SHOWN[fact["verdict"]]}
        # Requests that differ in nothing that is shown are one entry: else a reader could not tell which of them grew.
        place = tuple(value for name, value in shown.items() if name not in _SUMS)
        known = by_verdict[fact["verdict"]].setdefault(place, shown)
        if known is not shown:
            known |= {name: known[name] + shown[name] for name in _SUMS if name in shown}
        for name in sums:
            sums[name] += entry[name]
    return {**{verdict: list(places.values()) for verdict, places in by_verdict.items()}, **sums}


def _unheard(_: EgressFact) -> None:
    return None
