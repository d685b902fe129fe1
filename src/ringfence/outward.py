"""From names to a way out: networks of the configuration, places that a caller named, and secrets, put together for one
box and served at its listener."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from socket import socket
from typing import TYPE_CHECKING, Any

from ringfence.box import NetworkRule, Serve, Way
from ringfence.egress import names
from ringfence.egress.dial import Dial, Resolve, system_dial, system_resolve
from ringfence.egress.ledger import Fact
from ringfence.egress.proxy import Attached, Egress
from ringfence.egress.rules import Rules
from ringfence.errors import Refused, Unavailable
from ringfence.model import NetworkSpec, Status
from ringfence.ports import Access, Passage

if TYPE_CHECKING:  # handed in: whoever has no secrets does not load what reads them
    from ringfence.brokering import Issued, Secrets

_WITHIN = ("localhost", "127.0.0.1", "::1")
"""Every box has these of its own; where a rule names one, it is the host's."""
ALLOWED = "caller:allow"
"""The name of the rule that the places of a caller make."""


class WayOut:
    """The port `Outward`, for one configuration in force."""

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
        return Passage(self._serving.by(served, issued) if served else None, served, issued.env)

    async def headers(self, access: Access) -> Mapping[str, str]:
        return await self._lender().headers(access) if access.secrets else {}

    def _lender(self) -> Secrets:
        if self._secrets is None:
            raise Unavailable("no_secret", "a secret is needed, and there are none here")
        return self._secrets

    def rules(self, access: Access) -> tuple[NetworkRule, ...]:
        """What these names allow, together. Raises Refused, Unavailable."""
        rules: list[NetworkRule] = []
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
        self, resolve: Resolve = system_resolve, trust: ssl.SSLContext | None = None, dial: Dial = system_dial
    ) -> None:
        self._resolve = resolve
        self._dial = dial
        self._trust = trust
        self._egress: Egress | None = None

    @property
    def egress(self) -> Egress:
        if self._egress is None:
            self._egress = Egress(self._resolve, self._trust, dial=self._dial)
        return self._egress

    def by(self, rules: Iterable[NetworkRule], issued: Issued | None = None) -> Serve:
        """Raises ValueError for rules that cannot be meant."""
        compiled = Rules(rules)
        broker = None if issued is None else issued.broker

        async def serve(listener: socket) -> Way:
            attached = await self.egress.attach(listener, compiled, _unheard, broker=broker)
            return Open(attached, tuple(host for host in _WITHIN if not compiled.name(names.host(host))), issued)

        return serve


class Open:
    """A way out, while it is served."""

    def __init__(self, attached: Attached, within: tuple[str, ...], issued: Issued | None = None) -> None:
        self.within = within
        self._attached = attached
        self._issued = issued

    @property
    def authority(self) -> bytes | None:
        found = self._attached.authority
        return None if found is None else found.pem

    def facts(self) -> dict[str, Any]:
        return self._with_removed(network_fact(self._attached.facts()))

    async def close(self) -> dict[str, Any]:
        if self._issued is not None:
            self._issued.revoke()
        return self._with_removed(network_fact(await self._attached.close()))

    def _with_removed(self, told: dict[str, Any]) -> dict[str, Any]:
        removed = 0 if self._issued is None else self._issued.removed
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


def network_fact(facts: Iterable[Fact]) -> dict[str, Any]:
    """The `network` fact: what was let through, what was denied and by which rule, and what failed outside."""
    told: dict[str, Any] = {verdict: [] for verdict in _SHOWN}
    told |= {"bytes_in": 0, "bytes_out": 0}
    for fact in facts:
        entry: Mapping[str, Any] = fact
        told[fact["verdict"]].append({name: entry[name] for name in _SHOWN[fact["verdict"]]})
        told["bytes_in"] += fact["bytes_in"]
        told["bytes_out"] += fact["bytes_out"]
    return told


def _unheard(_: Fact) -> None:
    return None
