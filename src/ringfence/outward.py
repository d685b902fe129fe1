"""From names to a way out: networks of the configuration, places that a caller named, and secrets, put together for one
box and served at its listener."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from socket import socket
from typing import TYPE_CHECKING, Any, Protocol

from ringfence.box import Desk, Installs, NetworkRule, Serve, Way
from ringfence.egress import names
from ringfence.egress.dial import Dial, Resolve, system_dial, system_resolve
from ringfence.egress.ledger import Fact
from ringfence.egress.proxy import Attached, Egress
from ringfence.egress.rules import Rules
from ringfence.egress.scope import Broker
from ringfence.errors import Refused, Unavailable
from ringfence.loans import Lent, Wish
from ringfence.model import NetworkSpec, Status
from ringfence.packages.place import ENV, HOST
from ringfence.ports import Access, Packing, Passage

if TYPE_CHECKING:  # handed in: whoever has no secrets does not load what reads them
    from ringfence.brokering import Secrets

_WITHIN = ("localhost", "127.0.0.1", "::1")
"""Every box has these of its own; where a rule names one, it is the host's."""
ALLOWED = "caller:allow"
"""The name of the rule that the places of a caller make."""
INSTALLS = "sandbox:allow_packages"
"""The name of the rule for the index that is ours."""


class Handed(Protocol):
    """The secrets of one box, as its way out has them."""

    @property
    def broker(self) -> Broker | None: ...

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        ...

    def revoke(self) -> None: ...


class WayOut:
    """The ports `Outward` and `Lender`, for one configuration in force."""

    def __init__(
        self, networks: Mapping[str, NetworkSpec], serving: Serving | None = None, secrets: Secrets | None = None
    ) -> None:
        self._networks = networks
        self._serving = serving or Serving()
        self._secrets = secrets

    def check(self, access: Access) -> None:
        self.rules(access)
        if access.secrets:
            self._lender().check(access)

    async def passage(self, access: Access) -> Passage:
        self.check(access)
        rules = self.rules(access)
        if not access.secrets:
            return Passage(self._serving.by(rules), rules) if rules else Passage()
        issued = await self._lender().issue(access)
        served = issued.rules(rules)
        return Passage(self._serving.by(served, issued) if served else None, served, issued.env, issued.loans)

    async def ready(self, access: Access) -> None:
        await self._lender().issue(access)

    async def lend(self, wish: Wish) -> Lent:
        return await self._lender().lend(wish)

    async def headers(self, access: Access) -> Mapping[str, str]:
        return await self._lender().headers(access) if access.secrets else {}

    def _lender(self) -> Secrets:
        if self._secrets is None:
            raise Unavailable("no_secret", "a secret is needed, and there are none here")
        return self._secrets

    def rules(self, access: Access) -> tuple[NetworkRule, ...]:
        """What these names allow, together. Raises Refused, Unavailable."""
        rules: list[NetworkRule] = []
        if access.installs is not None:  # before all others: no wildcard has that place
            rules.append(NetworkRule(INSTALLS, (f"{HOST}:80",), installs=access.installs))
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
            raise Refused(Status.VALIDATION_FAILURE, "bad_network", f"such a network cannot be: {error}") from None


class Serving:
    """Serves listeners by rules. What all boxes share is made when the first of them has a way out."""

    def __init__(
        self,
        resolve: Resolve = system_resolve,
        trust: ssl.SSLContext | None = None,
        dial: Dial = system_dial,
        packing: Callable[[], Packing] | None = None,
    ) -> None:
        """`packing` has an index for boxes that may install something; None: there is none."""
        self._packing = packing
        self._resolve = resolve
        self._dial = dial
        self._trust = trust
        self._egress: Egress | None = None

    @property
    def egress(self) -> Egress:
        if self._egress is None:
            self._egress = Egress(self._resolve, self._trust, dial=self._dial)
        return self._egress

    def by(self, rules: Iterable[NetworkRule], handed: Handed | None = None) -> Serve:
        """Raises ValueError for rules that cannot be meant."""
        rules = tuple(rules)
        return self._served(Rules(rules, self._desk(rules)), handed)

    def at(self, desk: Desk) -> Serve:
        """A way to this desk, and to nothing else."""
        return self._served(Rules([NetworkRule(INSTALLS, (f"{HOST}:80",), installs=Installs(()))], desk))

    def _served(self, compiled: Rules, handed: Handed | None = None) -> Serve:
        broker = None if handed is None else handed.broker

        async def serve(listener: socket) -> Way:
            attached = await self.egress.attach(listener, compiled, _unheard, broker=broker)
            within = tuple(host for host in _WITHIN if not compiled.name(names.host(host)))
            return Open(attached, within, handed, compiled.desk)

        return serve

    def _desk(self, rules: tuple[NetworkRule, ...]) -> Desk | None:
        installs = next((rule.installs for rule in rules if rule.installs is not None), None)
        return None if installs is None or self._packing is None else self._packing().desk(installs)


class Open:
    """A way out, while it is served."""

    def __init__(
        self,
        attached: Attached,
        within: tuple[str, ...],
        handed: Handed | None = None,
        desk: Desk | None = None,
    ) -> None:
        self.within = within
        self.env: Mapping[str, str] = {} if desk is None else ENV
        self._desk = desk
        self._attached = attached
        self._handed = handed

    @property
    def authority(self) -> bytes | None:
        found = self._attached.authority
        return None if found is None else found.pem

    def facts(self) -> dict[str, Any]:
        return self._with_more(network_fact(self._attached.facts()))

    async def close(self) -> dict[str, Any]:
        if self._handed is not None:
            self._handed.revoke()
        return self._with_more(network_fact(await self._attached.close()))

    def _with_more(self, told: dict[str, Any]) -> dict[str, Any]:
        removed = 0 if self._handed is None else self._handed.removed
        packages = () if self._desk is None else self._desk.handed_out()
        told |= {"packages": [dict(package) for package in packages]} if packages else {}
        return {**told, "redacted": removed} if removed else told


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


_SHOWN = {
    "allowed": ("host", "port", "count", "rule", "inspected", "bytes_in", "bytes_out"),
    "denied": ("host", "port", "count", "rule", "reason"),
    "failed": ("host", "port", "count", "rule", "reason"),
}
_SUMS = ("count", "bytes_in", "bytes_out")


def network_fact(facts: Iterable[Fact]) -> dict[str, Any]:
    """The `network` fact: what was let through, what was denied and by which rule, and what failed outside."""
    told: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {verdict: {} for verdict in _SHOWN}
    sums = {"bytes_in": 0, "bytes_out": 0}
    for fact in facts:
        entry: Mapping[str, Any] = fact
        shown = {name: entry[name] for name in _SHOWN[fact["verdict"]]}
        # What differs in nothing that is shown is one: else nobody could tell which of them grew since.
        place = tuple(value for name, value in shown.items() if name not in _SUMS)
        known = told[fact["verdict"]].setdefault(place, shown)
        if known is not shown:
            known |= {name: known[name] + shown[name] for name in _SUMS if name in shown}
        for name in sums:
            sums[name] += entry[name]
    return {**{verdict: list(places.values()) for verdict, places in told.items()}, **sums}


def _unheard(_: Fact) -> None:
    return None
