"""What is offered to a client: tools by their contracts, resources and prompts by their servers' lists."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

import anyio
import anyio.to_thread

from ringfence.core import canonical, invisible
from ringfence.core.errors import Refused
from ringfence.core.model import Call, Contract, Definition, Json, Origin, Principal, ServerSpec, Transport
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.front import entries
from ringfence.front.calls import CallPipeline
from ringfence.governance.permission import UNLIMITED
from ringfence.governance.rulebook import Rulebook, allowed_item
from ringfence.governance.uris import normal_uri
from ringfence.identity import LOCAL_AGENT
from ringfence.sandbox.tools.resources import PREFIX
from ringfence.sandbox.tools.toolkit import SERVER
from ringfence.upstream.link import HANDSHAKE, MODERN
from ringfence.upstream.pool import SilentChannel

log = logging.getLogger("ringfence.front")

_RESOURCES = ("resources/list", "resources")
_TEMPLATES = ("resources/templates/list", "resourceTemplates")
_SHOWN = 200
"""Characters of what a server chose, in the log."""


@dataclass(frozen=True, slots=True)
class _Offer:
    rules: Rulebook
    basis: object
    """What was taken out of what servers say."""
    tools: dict[str, list[Json]]
    """By the revision that a client speaks."""
    header_schemas: dict[str, Json]
    in_sessions: frozenset[str]
    """Tools of ours that take a session."""


@dataclass(frozen=True, slots=True)
class _Prompts:
    rules: Rulebook
    basis: object
    names: dict[str, tuple[str, str]]
    """(server, the server's own name) by the name under which it is offered."""
    listed: dict[str, list[tuple[tuple[str, str], Json]]]
    """Whose each is, and its entry, by the revision that a client speaks."""


def _offer(pipeline: CallPipeline, principal: Principal | None) -> _Offer:
    """What this principal is offered; None: what anyone is."""
    rules, basis, clean = pipeline.rules, pipeline.redaction_basis, pipeline.listed
    permission = UNLIMITED if principal is None else rules.permissions.of(principal)
    as_agent = principal or Principal(LOCAL_AGENT)
    tools: dict[str, list[Json]] = {version: [] for version in entries.REVISIONS}
    header_schemas: dict[str, Json] = {}
    in_sessions: set[str] = set()
    for capability in rules.catalog.offered(rules.environment):
        name = capability.contract.name
        if (
            capability.definition is None
            or not permission.calls(name)
            or _pointless(rules, capability.contract, as_agent)
        ):
            continue
        body = _shown(clean, capability.definition)
        if body is None:
            continue
        body["name"] = name
        if capability.contract.description is not None:
            body["description"] = capability.contract.description
        if capability.contract.result.fields is not None:
            body.pop("outputSchema", None)  # what is left of the result is no longer what the server promises
        schema = body.get("inputSchema")
        if isinstance(schema, dict) and b"x-mcp-header" in canonical.dumps(schema):
            header_schemas[name] = schema
        if capability.contract.transport is Transport.SANDBOXED_EXEC and "session" in body["inputSchema"]["properties"]:
            in_sessions.add(name)
        for version, shown in tools.items():
            fitting = _fitting("tool", body, capability.definition.server, version)
            if fitting is not None:
                shown.append(fitting)
    return _Offer(rules, basis, tools, header_schemas, frozenset(in_sessions))


def _shown(clean: Callable[[Json], Json], definition: Definition) -> Json | None:
    """A definition as a client may see it; None where it cannot be shown without deceiving the client."""
    try:
        return {**clean(definition.body)}
    except Refused as exc:
        kind = definition.kind
        name = invisible.visible(definition.name)
        log.warning("server %s: its %s %s is not offered: %s", definition.server, kind, name, exc)
        return None


def _fitting(kind: entries.Kind, body: Json, server: str, version: str) -> Json | None:
    """An entry for clients of this revision; None where it would cost them the whole list."""
    try:
        return entries.as_listed(kind, body, version)
    except entries.MalformedEntry as exc:
        name = quoted(body.get("name"), _SHOWN, invisible.visible)
        text = "server %s: its %s %s is not listed for clients of %s, which could not read the list: %s"
        log.warning(text, server, kind, name, version, quoted(exc, _SHOWN, invisible.visible))
        return None


def _pointless(rules: Rulebook, contract: Contract, principal: Principal) -> bool:
    """A tool of our own that policy never allows. No operator declared it, so it is not listed."""
    if contract.transport is not Transport.SANDBOXED_EXEC:
        return False
    return rules.policy.never_allows(Call("", principal, contract.name, {}), contract)


def _revision(version: str) -> str:
    return MODERN if version == MODERN else HANDSHAKE


def _owner(name: str, servers: Collection[str]) -> str | None:
    """The server that an offered name is said to be of, or looks as if: the one with the longest name that it begins
    with. We are one, too."""
    known = {server: invisible.alike(server) for server in (*servers, SERVER)}
    longest = 2 * max(map(len, known))
    begins = {invisible.alike(name[:place]) for place, letter in enumerate(name[:longest]) if letter == "."}
    owners = (server for server, like in known.items() if like in begins)
    return max(owners, key=lambda server: (name.startswith(f"{server}."), len(server)), default=None)


_MAX_LEARNT = 5_000
"""Resources of one server of which it is remembered whose they are."""
_PIECE = 500
"""Entries of a server's list that are checked in one turn."""


def _checked(
    kind: entries.Kind,
    spec: ServerSpec,
    pipeline: CallPipeline,
    principal: Principal,
    items: list[Json],
    version: str,
) -> list[tuple[str, Json] | tuple[None, str]]:
    """What of a server's resources, or templates, may be offered: each in its normal form, and as a client is shown it;
    or None, and why it is malformed."""
    rules = pipeline.rules
    permission = rules.permissions.of(principal)
    key = "uriTemplate" if kind == "template" else "uri"
    out: list[tuple[str, Json] | tuple[None, str]] = []
    for item in items:
        uri = item.get(key)
        known = normal_uri(uri) if isinstance(uri, str) else None
        if known is None:
            out.append((None, f"{key}: there is none, or none that has one meaning"))
        elif allowed_item(spec, "resource", known) and permission.reads(known):
            try:
                # As it will be compared and sent when it is asked for.
                out.append((known, pipeline.listed(entries.as_listed(kind, {**item, key: known}, version))))
            except entries.MalformedEntry as exc:
                out.append((None, str(exc)))
            except Refused as exc:
                out.append((None, exc.message))
    return out


class Listing:
    """Reads the rulebook in force each time, so a reload shows at once."""

    def __init__(self, pipeline: CallPipeline) -> None:
        self._pipeline = pipeline
        self._owners: dict[tuple[str, str], str] = {}
        """(principal, uri) → server, learnt from listings."""
        self._learnt: Counter[str] = Counter()
        """How many of them each server has."""
        self._unlisted: Counter[str] = Counter()
        """How many resources of each server were left out of its last list."""
        self._offered: dict[str | None, _Offer] = {}
        """By agent; None: all that is offered to anyone."""
        self._prompts: _Prompts | None = None
        self._checking = anyio.CapacityLimiter(1)
        self.has_sessions: Callable[[], bool] = lambda: False
        """What sessions left are resources, too."""

    def tools(self, version: str = MODERN, principal: Principal | None = None) -> list[Json]:
        """What a principal may call; None: what anyone may."""
        return self._offer(principal).tools[_revision(version)]

    def header_schema(self, tool: str) -> Json | None:
        """The input schema of a tool that wants some arguments repeated as HTTP headers."""
        return self._offer().header_schemas.get(tool)

    def takes_session(self, tool: str) -> bool:
        return tool in self._offer().in_sessions

    def _offer(self, principal: Principal | None = None) -> _Offer:
        """The offer to an agent. It is cached until the rules or the known secrets change: clients ask for it far more
        often than that."""
        rules, basis = self._pipeline.rules, self._pipeline.redaction_basis
        if not rules.permissions.declared:
            principal = None
        elif principal is not None and rules.permissions.of(principal).refusal is not None:
            return _Offer(rules, None, {version: [] for version in entries.REVISIONS}, {}, frozenset())
        place = None if principal is None else principal.agent
        found = self._offered.get(place)
        if found is None or found.rules is not rules or found.basis is not basis:
            current = {name: each for name, each in self._offered.items() if each.rules is rules}
            self._offered = {name: each for name, each in current.items() if each.basis is basis}
            found = self._offered[place] = _offer(self._pipeline, principal)
        return found

    def prompts(self, version: str = MODERN, principal: Principal | None = None) -> list[Json]:
        permission = UNLIMITED if principal is None else self._pipeline.rules.permissions.of(principal)
        return [body for key, body in self._offered_prompts().listed[_revision(version)] if permission.uses(*key)]

    def prompt(self, name: str) -> tuple[str, str] | None:
        """(server, the server's own name) of an offered prompt."""
        return self._offered_prompts().names.get(name)

    async def prepare_prompts(self) -> None:
        """What servers say of their prompts is cleaned beside the loop, once for each rulebook, before it is needed."""
        if self._current_prompts() is None:
            self._prompts = await anyio.to_thread.run_sync(self._prompts_now, limiter=self._checking)

    def _current_prompts(self) -> _Prompts | None:
        found, pipeline = self._prompts, self._pipeline
        current = found is not None and found.rules is pipeline.rules and found.basis is pipeline.redaction_basis
        return found if current else None

    def _offered_prompts(self) -> _Prompts:
        found = self._current_prompts()
        if found is None:
            found = self._prompts = self._prompts_now()
        return found

    def _prompts_now(self) -> _Prompts:
        rules, basis = self._pipeline.rules, self._pipeline.redaction_basis
        names = self._prompt_names(rules)
        listed: dict[str, list[tuple[tuple[str, str], Json]]] = {version: [] for version in entries.REVISIONS}
        for name, key in names.items():
            body = _shown(self._pipeline.listed, rules.prompts[key])
            for version, entry in listed.items() if body is not None else ():
                fitting = _fitting("prompt", {**(body or {}), "name": name}, key[0], version)
                if fitting is not None:
                    entry.append((key, fitting))
        return _Prompts(rules, basis, names, listed)

    def _prompt_names(self, rules: Rulebook) -> dict[str, tuple[str, str]]:
        """Offered names. A prompt is preceded by its server's name where two servers have it, or names that look like
        it, and where its own name begins like that of another server: what is offered as SERVER.NAME is that server's,
        whoever else says so."""
        keys = [k for k in rules.prompts if k[0] in rules.servers and allowed_item(rules.servers[k[0]], "prompt", k[1])]
        # A name is sent back as it was shown.
        keys = [key for key in keys if invisible.name(key[1]) == key[1] and self._shows(key[1])]
        likes = {key: invisible.alike(key[1]) for key in keys}
        times = Counter(like for like, _ in {(likes[key], key[0]) for key in keys})
        offered: dict[str, tuple[str, str]] = {}
        for server, name in keys:
            owner = _owner(name, rules.servers)
            free = owner is None or (owner == server and (server, name.removeprefix(f"{server}.")) not in rules.prompts)
            shown = name if times[likes[server, name]] == 1 and free else f"{server}.{name}"
            if shown == name or _owner(shown, rules.servers) == server:  # otherwise it is the name of another's
                offered[shown] = (server, name)
        return offered

    def _shows(self, name: str) -> bool:
        """Whether nothing in this name is a secret, or has the shape of one."""
        return bool(self._pipeline.listed({"name": name})["name"] == name)

    async def resources(
        self, principal: Principal, *, templates: bool, origin: Origin = "system", version: str = MODERN
    ) -> list[Json]:
        """The resources of every server that lists any; a server that is down is logged and left out."""
        out: list[Json] = []
        permission = self._pipeline.rules.permissions.of(principal)
        kind: entries.Kind = "template" if templates else "resource"
        for spec in self._with_resources() if permission.reads_any else ():
            bad: list[str] = []
            listed = await self._listing(spec.name, principal, templates, origin)
            # What a server sent is checked beside the loop, and other servers' lists in between.
            for start in range(0, len(listed), _PIECE):
                piece = listed[start : start + _PIECE]
                check = partial(_checked, kind, spec, self._pipeline, principal, piece, version)
                for entry in await anyio.to_thread.run_sync(check, limiter=self._checking):
                    if entry[0] is None:
                        bad.append(entry[1])
                    elif self._is_read_from(principal, entry[0], spec):
                        out.append(entry[1])
            self._tell_unlisted(spec.name, bad)
        if self.has_sessions():
            out += await self._listing(SERVER, principal, templates, origin)
        return out

    def _is_read_from(self, principal: Principal, known: str, spec: ServerSpec) -> bool:
        """Whether a resource that this server listed is read from it; if not, it is not this one's to describe."""
        self._learn(principal, known, spec.name)
        owner = self._owners.get((principal.key, known), spec.name)
        other = self._pipeline.rules.servers.get(owner)
        return other is None or other is spec or not allowed_item(other, "resource", known)

    def _tell_unlisted(self, server: str, bad: list[str]) -> None:
        """How many of a server's resources are left out, and why the first is; once for each number."""
        if len(bad) != self._unlisted[server] and bad:
            text = "server %s: %d of its resources are not listed, since clients could not read the list; the first: %s"
            log.warning(text, server, len(bad), quoted(bad[0], _SHOWN, invisible.visible))
        self._unlisted[server] = len(bad)

    async def _listing(self, server: str, principal: Principal, templates: bool, origin: Origin) -> list[Json]:
        """What one server lists now, asked for by a call like any other."""
        method, key = _TEMPLATES if templates else _RESOURCES
        call = Call(canonical.new_id("call"), principal, method, {}, "listing", origin, server, method=method)
        outcome = await self._pipeline.handle(call, SilentChannel())
        if outcome.result is None:
            log.warning("server %s: its resources cannot be listed: %s", server, outcome.message)
            return []
        items = outcome.result.get(key)
        return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []

    async def resource_server(self, principal: Principal, uri: str) -> str | None:
        """The server whose list has this URI: the only one that may, else the one that listed it."""
        uri = normal_uri(uri) or uri
        if uri.startswith(PREFIX):
            return SERVER
        candidates = [s.name for s in self._with_resources() if allowed_item(s, "resource", uri)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        known = self._owners.get((principal.key, uri))
        if known is None:
            await self.resources(principal, templates=False)
            known = self._owners.get((principal.key, uri))
        return known if known in candidates else candidates[0]

    def _with_resources(self) -> list[ServerSpec]:
        return [s for s in self._pipeline.rules.servers.values() if s.resources]

    def _learn(self, principal: Principal, uri: str, server: str) -> None:
        # The first that listed it keeps it, as long as it may: another must not take it over by listing it, too. So one
        # that lists very many is forgotten alone.
        place = (principal.key, uri)
        if place in self._owners:
            return
        self._owners[place] = server
        self._learnt[server] += 1
        if self._learnt[server] > _MAX_LEARNT:
            self._owners = {place: owner for place, owner in self._owners.items() if owner != server}
            self._learnt[server] = 0

    async def digest(self) -> str:
        """Changes when what a client would be shown changes."""
        await self.prepare_prompts()
        return canonical.digest([self.tools(), self.prompts(), self._pipeline.rules.permissions.digest])
