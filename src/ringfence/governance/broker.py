"""Secrets that work without entering a box.

The box gets a placeholder. Its requests pass a broker outside of it, which puts the value into the declared header of
the declared hosts: by the declared methods, over TLS, each time by a decision of policy that is on record before the
value leaves. A placeholder anywhere else is refused, and what the host answers is searched before the box sees it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import NoReturn, Protocol
from urllib.parse import unquote

from ringfence.core import canonical
from ringfence.core.box import NetworkRule
from ringfence.core.brokering import (
    BrokeredSecret,
    OutboundRequest,
    SubstitutionReply,
    SubstitutionRequest,
    new_placeholder,
)
from ringfence.core.errors import Refused, StoreError, Unavailable
from ringfence.core.model import Call, Contract, Decision, Json, Mode, Principal, Receipt, SecretSpec, Status
from ringfence.core.ports import Access
from ringfence.core.record import dataclass
from ringfence.core.secret import reveal
from ringfence.egress import names
from ringfence.egress.rules import Pattern, only_path, overrides_method, overrides_path, pattern
from ringfence.egress.substitution import Cleaner, Substitution
from ringfence.governance.permission import EVERYTHING, Permissions
from ringfence.governance.policy import Policy
from ringfence.secrets.redaction import CountingCleaner, RedactingStream, TenantRedactor
from ringfence.secrets.vault import SecretUse, Vault
from ringfence.store import Store, Transaction

RECORD = "brokered"
_READING = ("GET", "HEAD", "OPTIONS")
_BASIC = re.compile(r"(?i)basic +([A-Za-z0-9+/=_-]+)")
_UNWANTED = frozenset({"accept-encoding", "range", "if-range", "request-range", "a-im"})
"""An answer that is searched comes whole and as it is."""


def header_text(spec: SecretSpec, value: str) -> str:
    """What stands in the header. A value that names its own scheme is left as it is."""
    if spec.format is not None:
        return spec.format.replace("{value}", value)
    if (spec.header or "").lower() == "authorization" and " " not in value:
        return f"Bearer {value}"
    return value


class SecretJudge(Protocol):
    """Decides whether a request may have a secret. Raises Refused, Unavailable.

    With `refused` given that is settled, and only to be recorded; it is not raised here.
    """

    async def __call__(
        self, spec: SecretSpec, asked: OutboundRequest, access: Access, refused: Refused | None = None, /
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyJudge:
    """Decides each use by the policy in force, and writes it down."""

    policy: Callable[[], Policy]
    store: Store
    permissions: Callable[[], Permissions] = lambda: EVERYTHING

    async def __call__(
        self, spec: SecretSpec, asked: OutboundRequest, access: Access, refused: Refused | None = None
    ) -> None:
        """Raises Refused where this request may not have it, Unavailable where that could not be recorded."""
        settled = refused is not None
        user = _user(self.permissions(), access)
        if user is None:
            refused = refused or _not_declared(access)
        call = _call(spec, asked, access, user or Principal(access.agent or "system", access.tenant))
        mode = Mode.READ if asked.method in _READING else Mode.WRITE
        contract = Contract(call.tool, server=access.server, tool=call.tool, mode=mode, secrets=(spec.name,))
        decision = None if refused is not None else self.policy().decide(call, contract)
        if decision is not None:
            refused = _objection(spec, decision)
        salt = os.urandom(16)
        body = _record(call, access, decision, refused, salt)
        work: Callable[[Transaction], Receipt] = lambda tx: tx.append(RECORD, access.call_id, body, salt=salt)  # noqa: E731
        try:
            durable = refused is None and mode is not Mode.READ
            await self.store.write(work, durable=durable, alone=not durable)
        except StoreError:
            raise Unavailable("store", "the use of a secret could not be recorded, so it was not made") from None
        if refused is not None and not settled:
            raise refused


def _user(permissions: Permissions, access: Access) -> Principal | None:
    """Whose use of a secret it is: rules see the agent as it is declared now, with its roles and its person."""
    if not access.agent:
        return Principal("system", access.tenant, kind="system")
    return permissions.standing(access.tenant, access.agent)


def _not_declared(access: Access) -> Refused:
    text = f"the agent {access.agent}, whose box asks for a secret, is not declared any more"
    return Refused(Status.DENIED, "unknown_agent", text)


def _call(spec: SecretSpec, asked: OutboundRequest, access: Access, principal: Principal) -> Call:
    arguments: Json = {"secret": spec.name, "host": asked.host, "port": asked.port, "method": asked.method}
    # One that has no normal form has been refused already: then the call is only recorded.
    path = only_path(asked.path) or asked.path.partition("?")[0]
    arguments |= {"path": path, "capability": access.capability or ""}
    call = Call(canonical.new_id("call"), principal, f"secret:{spec.name}", arguments, origin="system")
    return replace(call, server=access.server, parent=access.call_id, method="secret/use")


def _objection(spec: SecretSpec, decision: Decision) -> Refused | None:
    if not decision.allowed:
        return Refused(Status.DENIED, "policy", f"policy refuses secret {spec.name!r} here: {decision.reason}")
    if decision.asks:
        # What a program in a box is about to send cannot be shown to a person, so no one can approve it.
        return Refused(Status.DENIED, "approval", f"policy asks for approval of each use of secret {spec.name!r}")
    return None


def _record(call: Call, access: Access, decision: Decision | None, refused: Refused | None, salt: bytes) -> Json:
    """Whose box, which secret, for which host, and why or why not. What the program put into the path stays out."""
    given = call.arguments
    return {
        "call": {"id": call.id, "parent": call.parent, "tool": call.tool, "server": access.server},
        "session": access.session,
        "capability": access.capability,
        "principal": {"tenant": access.tenant, "agent": access.agent},
        "secret": given["secret"],
        "host": given["host"],
        "port": given["port"],
        "method": given["method"],
        "path": canonical.salted_bytes(str(given["path"]).encode("utf-8", "replace"), salt),
        "allowed": refused is None,
        "reason_code": "ok" if refused is None else refused.reason_code,
        "decision": None
        if decision is None
        else {
            "id": decision.id,
            "allowed": decision.allowed,
            "reason": decision.reason,
            "rules": list(decision.rules),
            "marks": list(decision.marks),
            "policy_digest": decision.policy_digest,
        },
    }


# ── One box ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Brokered:
    """One secret, as one box has it."""

    spec: SecretSpec
    placeholder: str
    hosts: tuple[Pattern, ...]

    @property
    def header(self) -> str:
        return (self.spec.header or "").lower()

    def covers(self, host: names.Host, port: int) -> bool:
        return any(entry.covers(host, port) for entry in self.hosts)


def _brokered(spec: SecretSpec, held: str) -> _Brokered:
    return _Brokered(spec, held, tuple(pattern(host) for host in spec.hosts))


@dataclass(slots=True)
class BoxSecrets:
    """The secrets of one box, until it is gone."""

    env: Mapping[str, str]
    """Placeholders; for a server also the values that it needs in its environment."""
    broker: BoxBroker | None = None
    brokered: tuple[BrokeredSecret, ...] = ()

    def rules(self, rules: Iterable[NetworkRule]) -> tuple[NetworkRule, ...]:
        """Where a box has a placeholder, every request of it is looked at: it may not be sent anywhere else."""
        return tuple(rules) if self.broker is None else tuple(replace(rule, terminate=True) for rule in rules)

    @property
    def substitute(self) -> BoxBroker | None:
        return self.broker

    @property
    def removed(self) -> int:
        """How often a value was taken out of an answer before the box saw it."""
        return 0 if self.broker is None else self.broker.removed.total()

    def revoke(self) -> None:
        if self.broker is not None:
            self.broker.revoke()


class BoxBroker:
    """Puts the secrets of one box into its requests."""

    def __init__(self, brokered: tuple[_Brokered, ...], access: Access, secrets: VaultBroker) -> None:
        self._brokered = brokered
        self._access = access
        self._secrets = secrets
        self._revoked = False
        self.removed: Counter[str] = Counter()
        """From answers, by rule."""

    def revoke(self) -> None:
        self._revoked = True

    async def __call__(self, asked: OutboundRequest) -> Substitution:
        """Raises Refused, Unavailable."""
        if self._revoked:
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")
        host = names.host(asked.host)
        here = [secret for secret in self._brokered if secret.covers(host, asked.port)]
        wanted = await self._presented(asked, here)
        given = await self._put(asked, here, wanted)
        if self._revoked:  # while the values were read
            raise Refused(Status.DENIED, "secret_revoked", "the secrets of this box were revoked")
        strip = frozenset(secret.header for secret in here) | (_UNWANTED if here else frozenset())
        forbid = tuple(form for secret in self._brokered for form in _forms(secret.placeholder))
        put = {**given, "Accept-Encoding": "identity"} if here and asked.scheme == "https" else given
        caught: Callable[[bytes], Awaitable[None]] = lambda form: self.caught(asked, form.decode())  # noqa: E731
        return Substitution(strip, put, forbid, self._cleaner if here else None, caught)

    async def caught(self, asked: OutboundRequest, held: str) -> None:
        """Refuse a request with a placeholder in its body. Raises Refused once that is on record, else Unavailable."""
        for secret in self._brokered:
            if secret.placeholder == held:
                text = f"the placeholder of {secret.spec.name!r} was sent in a body"
                await self._refuse(secret, asked, "placeholder", text)

    def _cleaner(self) -> Cleaner:
        return CountingCleaner(self._secrets.stream(self._access.tenant), self.removed)

    async def _presented(self, asked: OutboundRequest, here: list[_Brokered]) -> list[_Brokered]:
        """The secrets whose placeholders stand where they belong. A placeholder anywhere else is refused."""
        wanted: list[_Brokered] = []
        for secret in self._brokered:
            held = secret.placeholder
            found = {name.lower() for name, value in asked.headers if _holds(value, held)}
            found |= {":name" for name, _ in asked.headers if held.lower() in name.lower()}
            if held in unquote(asked.path) or held in unquote(unquote(asked.path)):
                found.add(":path")
            if any(held.lower() in text.lower() for text in (asked.method, asked.host)):
                found.add(":line")
            if not found:
                continue
            if secret not in here or found != {secret.header}:
                place = "to a host that it is not for" if secret not in here else "outside of its header"
                await self._refuse(
                    secret, asked, "placeholder", f"the placeholder of {secret.spec.name!r} was sent {place}"
                )
            wanted.append(secret)
        return wanted

    async def _put(self, asked: OutboundRequest, here: list[_Brokered], wanted: list[_Brokered]) -> dict[str, str]:
        """The headers with their values. Without a placeholder, a request that may not have one goes without."""
        put: dict[str, str] = {}
        for secret in [*wanted, *(other for other in here if other not in wanted)]:
            problem = _unfit(secret.spec, asked)
            if problem is not None and secret in wanted:
                await self._refuse(secret, asked, *problem)
            if problem is not None or secret.header in {name.lower() for name in put}:
                continue
            value = await self._secrets.value(secret.spec.name, self._access)
            await self._secrets.judge(secret.spec, asked, self._access)
            put[secret.spec.header or ""] = header_text(secret.spec, value)
        return put

    async def _refuse(self, secret: _Brokered, asked: OutboundRequest, code: str, text: str) -> NoReturn:
        refused = Refused(Status.DENIED, code, text)
        await self._secrets.judge(secret.spec, asked, self._access, refused)
        raise refused


def _unfit(spec: SecretSpec, asked: OutboundRequest) -> tuple[str, str] | None:
    if asked.scheme != "https":
        return "secret_in_clear", f"secret {spec.name!r} goes over TLS alone"
    if asked.method not in spec.methods:
        return "secret_method", f"secret {spec.name!r} is not for {asked.method}"
    headers = [name.lower() for name, _ in asked.headers]
    if overrides_method(headers):
        return "method_override", f"secret {spec.name!r} is not for a method that a header overrides"
    if overrides_path(headers):
        return "path_override", f"secret {spec.name!r} is not for a path that a header overrides"
    if only_path(asked.path) is None:
        text = f"secret {spec.name!r} is not for a path that servers could read in two ways: write it plainly"
        return "ambiguous_path", text
    return None


def _holds(text: str, held: str) -> bool:
    if held in text:
        return True
    basic = _BASIC.match(text)
    if basic is None:
        return False
    try:
        return held.encode() in base64.b64decode(basic[1] + "==", altchars=b"-_" if "-" in basic[1] else None)
    except binascii.Error:
        return False


def _forms(held: str) -> tuple[bytes, ...]:
    """The forms of a placeholder: JSON and URLs write it as it is, since it has no character that they escape."""
    return (held.encode(),)


# ── All boxes ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class VaultBroker:
    """The operator's secrets, as boxes and servers get them."""

    vault: Vault
    environment: str
    judge: SecretJudge
    _cleaners: dict[str, TenantRedactor] = field(default_factory=dict)

    def check(self, access: Access) -> None:
        """Whether this could be had, before anything is read. Raises Refused, Unavailable."""
        for name in access.secrets:
            spec = self.vault.check(name, self._use(access))
            if access.url is not None:
                _check_host(spec, access.url)
                continue
            if spec.brokered and access.network == "denied" and not access.places:
                raise Unavailable(
                    "no_secret", f"secret {name!r} is for {', '.join(spec.hosts)}, and there is no network"
                )
            if not spec.brokered and (access.server is None or spec.env is None):
                raise Unavailable(
                    "no_secret", f"secret {name!r} has no hosts and header, so it cannot be used in a box"
                )

    async def issue(self, access: Access) -> BoxSecrets:
        """Issue placeholders for one box or server. Every value is read once: nothing runs if one is missing.

        Raises Refused, Unavailable.
        """
        self.check(access)
        env: dict[str, str] = {}
        brokered: list[_Brokered] = []
        for name in access.secrets:
            spec = self.vault.check(name, self._use(access))
            value = await self.value(name, access)
            if not spec.brokered:
                env[spec.variable] = value
                continue
            brokered.append(_brokered(spec, new_placeholder()))
            env[spec.variable] = brokered[-1].placeholder
        named = tuple(BrokeredSecret(one.spec.name, one.spec.variable) for one in brokered)
        return BoxSecrets(env, BoxBroker(tuple(brokered), access, self) if brokered else None, named)

    async def substitute(self, request: SubstitutionRequest) -> SubstitutionReply:
        """What changes in a request of a box that another process keeps, by what is declared now.

        Raises Refused, Unavailable.
        """
        secrets = request.secrets
        names_ = tuple(secret.name for secret in secrets.brokered)
        access = Access(
            secrets=names_,
            tenant=request.tenant,
            capability=secrets.capability,
            agent=request.agent,
            call_id=secrets.call_id,
            session=request.session,
        )
        brokered: list[_Brokered] = []
        for name, held in zip(names_, request.placeholders, strict=True):
            spec = self.vault.check(name, self._use(access))
            if not spec.brokered:
                raise Unavailable("no_secret", f"secret {name!r} no longer names the hosts that it is for")
            brokered.append(_brokered(spec, held))
        broker = BoxBroker(tuple(brokered), access, self)
        if request.asked is None:
            return SubstitutionReply()
        if request.caught is not None:
            await broker.caught(request.asked, request.caught)
        given = await broker(request.asked)
        known = None if given.clean is None else tuple((s.name, reveal(s)) for s in self.vault.known(request.tenant))
        return SubstitutionReply(tuple(sorted(given.strip)), given.put, known)

    async def value(self, name: str, access: Access) -> str:
        """The value as it is now; it may have rotated since the box was made. Raises Refused, Unavailable."""
        handle = await self.vault.secret(name, self._use(access))
        try:
            return reveal(handle)
        finally:
            handle.revoke()

    async def headers(self, access: Access) -> dict[str, str]:
        """What a request of our own to a server gets: secrets that are for its host. Raises Refused, Unavailable."""
        self.check(access)
        put: dict[str, str] = {}
        for name in access.secrets:
            spec = self.vault.check(name, self._use(access))
            put[spec.header or ""] = header_text(spec, await self.value(name, access))
        return put

    def stream(self, tenant: str) -> RedactingStream:
        """A redacting stream for answers to a box: known values only, since a shape may be what the box asked for."""
        if tenant not in self._cleaners:
            self._cleaners[tenant] = TenantRedactor(lambda: self.vault.known(tenant), shaped=False)
        return self._cleaners[tenant].stream()

    def _use(self, access: Access) -> SecretUse:
        return SecretUse(access.tenant, self.environment, access.capability, access.server, access.agent)


def _check_host(spec: SecretSpec, url: str) -> None:
    place = names.url(url)
    host = place.endpoint.host
    if not any(pattern(entry).covers(host, place.endpoint.port) for entry in spec.hosts):
        raise Unavailable("no_secret", f"secret {spec.name!r} is not for {host}: name it in its hosts")
    here = host.text == "localhost" or (host.address is not None and host.address.is_loopback)
    if place.scheme != "https" and not here:
        raise Unavailable("no_secret", f"secret {spec.name!r} goes over TLS alone, and {url} has none")
