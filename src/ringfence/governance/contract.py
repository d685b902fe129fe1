"""What each capability may do, whether a call fits it, and what is offered.

`build` fills a contract from what the operator wrote and the defaults of its mode. `Schemas` checks arguments and
results against the pinned JSON Schema. `Catalog` answers which capability a call means.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import re2

from ringfence.core import canonical
from ringfence.core.box import CommandRules, Listening, Mount
from ringfence.core.errors import Refused
from ringfence.core.expression import Expression, ExpressionError
from ringfence.core.labels import labelled
from ringfence.core.model import (
    Call,
    Contract,
    Definition,
    Effects,
    LabelWhen,
    LogPolicy,
    Mode,
    Rate,
    ResultPolicy,
    Retry,
    Status,
    Transport,
)
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.core.schema import MAX_COST, Schema, Unusable
from ringfence.governance.permission import UNLIMITED, Permission
from ringfence.sandbox.tools import toolkit

ContractProblem = tuple[tuple[str | int, ...], str]
"""Path of the key inside the capability, and what is wrong with it."""

# ── Building ──────────────────────────────────────────────────────────────────────────────────────

_OWN_CHARS = 10_000
"""What our own tools give a model to read, unless the contract says otherwise."""
_re2_options = re2.Options()
_re2_options.log_errors = False  # the engine would write the pattern to stderr


def build(name: str, given: Mapping[str, Any]) -> tuple[Contract, list[ContractProblem]]:
    """The contract of a capability from the keys that were written, and what contradicts itself in them.

    `config` checks shapes and names when it reads the file; here is only what the keys mean together.
    """
    mode = Mode(given.get("mode", Mode.WRITE))
    transport = Transport(given.get("transport", Transport.MCP))
    idempotent = given.get("idempotent", False)
    key = idempotent.get("key") if isinstance(idempotent, Mapping) else None
    filesystem = given.get("filesystem")
    mounts = filesystem.get("mounts", ()) if isinstance(filesystem, Mapping) else ()
    result = dict(given.get("result") or {})
    if result.get("fields") is not None:
        result["fields"] = tuple(result["fields"])
    if result.get("max_chars") is None and transport is Transport.SANDBOXED_EXEC:
        result["max_chars"] = _OWN_CHARS
    environments = given.get("environments")
    written = given.get("labels") or ()
    contract = Contract(
        name=name,
        transport=transport,
        server=given.get("server"),
        tool=given.get("tool") or name,
        mode=mode,
        description=given.get("description"),
        network=given.get("network") or "denied",
        mounts=tuple(Mount(**mount) for mount in mounts),
        secrets=_names(given.get("secrets")),
        environments=None if environments is None else tuple(environments),
        isolation=given.get("isolation") or ("process" if transport is Transport.SANDBOXED_EXEC else "none"),
        memory_layout=given.get("memory_layout") or "shared",
        template=given.get("template") or "python",
        listen=Listening.of(given.get("listen")),
        commands=_commands(given.get("commands")),
        timeout_seconds=float(given.get("timeout_seconds", 30.0)),
        retry=_retry(given.get("retry") or {}, mode, bool(idempotent)),
        idempotent=bool(idempotent),
        idempotent_key=key,
        rate=Rate(**(given.get("rate") or {})),
        cost=given.get("cost", 1),
        approval=given.get("approval") or ("always" if mode is Mode.HIGH_RISK else "none"),
        log=LogPolicy(**(given.get("log") or {})),
        redact=tuple(given.get("redact") or ()),
        result=ResultPolicy(**result),
        effects=Effects(**(given.get("effects") or {})),
        labels=tuple(each for each in written if isinstance(each, str)),
        labels_when=tuple(LabelWhen(**each) for each in written if not isinstance(each, str)),
        place=given.get("place"),
        meta=tuple(given.get("meta") or ()),
        record=given.get("record") or "facts",
        request=given.get("request"),
    )
    return sealed(contract), list(_contradictions(contract))


def built_in(tool: str, timeout_seconds: float, most_bytes: int | None = None, network: str = "denied") -> Contract:
    """The contract of our own tool that the operator did not declare. It asks no person: the box is the control."""
    given: dict[str, Any] = {"transport": "sandboxed_exec", "mode": toolkit.mode(tool), "approval": "none"}
    if most_bytes is not None:
        given["result"] = {"max_bytes": most_bytes}
    if toolkit.is_box_maker(tool):
        given["network"] = network
    return build(tool, {**given, "timeout_seconds": timeout_seconds})[0]


def sealed(contract: Contract) -> Contract:
    """The contract with the digest of everything else in it."""
    fields = asdict(contract)
    del fields["digest"]
    if contract.request is None:
        del fields["request"]
    return replace(contract, digest=canonical.digest(fields))


def _names(secrets: Any) -> tuple[str, ...]:
    if secrets is None or secrets == "none":
        return ()
    return (secrets,) if isinstance(secrets, str) else tuple(secrets)


def _commands(given: Mapping[str, Any] | None) -> CommandRules | None:
    if given is None:
        return None
    allow = given.get("allow")
    return CommandRules(
        allow=None if allow is None else tuple(allow),
        ask=tuple(given.get("ask") or ()),
        deny=tuple(given.get("deny") or ()),
    )


def _retry(given: Mapping[str, Any], mode: Mode, idempotent: bool) -> Retry:
    may_repeat = mode is Mode.READ or (mode is Mode.WRITE and idempotent)
    attempts = given.get("attempts")
    return Retry(
        attempts=(2 if may_repeat else 0) if attempts is None else attempts,
        on=tuple(given.get("on") or ("unavailable",)),
    )


def _contradictions(contract: Contract) -> Iterator[ContractProblem]:
    if contract.retry.attempts > 0 and contract.mode is Mode.HIGH_RISK:
        yield ("retry", "attempts"), "a high_risk capability is never retried"
    elif contract.retry.attempts > 0 and contract.mode is Mode.WRITE and not contract.idempotent:
        yield ("retry", "attempts"), "a write is retried only where it is idempotent"
    if contract.rate.burst is not None and contract.rate.per_minute is None:
        yield ("rate", "burst"), "a burst needs per_minute"
    if contract.meta and contract.transport is Transport.SANDBOXED_EXEC:
        yield ("meta",), "what runs in a box has no server that _meta could reach"
    if contract.idempotent_key is not None:
        try:
            Expression(contract.idempotent_key, result="text")
        except ExpressionError as exc:
            yield ("idempotent", "key"), f"{exc.text} (at {exc.line}:{exc.column} of the key)"
    for each in contract.labels_when:
        if problem := _expression_problem(each.when, "bool"):
            yield ("labels",), f"when of {each.label}: {problem}"
    if contract.place is not None and (problem := _expression_problem(contract.place, "text")):
        yield ("place",), problem
    for index, pattern in enumerate(contract.redact):
        try:
            re2.compile(pattern, _re2_options)
        except re2.error as exc:
            detail = exc.args[0]
            text = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
            yield ("redact", index), f"bad pattern: {text}"


def _expression_problem(source: str, result: str) -> str | None:
    try:
        Expression(source, result=result)
    except ExpressionError as exc:
        return f"{exc.text} (at {exc.line}:{exc.column})"
    return None


# ── Schemas ───────────────────────────────────────────────────────────────────────────────────────

MAX_ARGUMENTS_BYTES = 1_000_000
_ANYTHING = Schema(True)
_MAX_COST = 8 * MAX_COST
"""Of the compiled schemas that are kept, and of all schemas of one server."""


class Schemas:
    """Compiled schemas by the digest of the definition they came in. Nothing is ever fetched for one."""

    def __init__(self, kept: int = 1024, most_bytes: int = MAX_ARGUMENTS_BYTES) -> None:
        self._kept = kept
        self._most_bytes = most_bytes
        self._cache: OrderedDict[tuple[str, str], Schema | Unusable] = OrderedDict()
        self._cost = 0
        """Of those in the cache; one that cannot be used has none of its own there."""

    def unusable(self, definition: Definition) -> str | None:
        """Why the definition's schemas cannot be used, if so."""
        for key in ("inputSchema", "outputSchema"):
            schema = self._compiled(definition, key)
            if isinstance(schema, Unusable):
                return f"its {key} cannot be used: {schema}"
        return None

    def arguments_problem(self, definition: Definition | None, arguments: Any) -> str | None:
        """What is wrong with the arguments, naming places but never values. Raises Refused for a bad schema."""
        schema = self._compiled(definition, "inputSchema") if definition is not None else None
        if definition is not None and isinstance(schema, Unusable):
            raise _bad_schema(definition.name, f"its inputSchema cannot be used: {schema}")
        checked = schema if isinstance(schema, Schema) else _ANYTHING  # still plain JSON, and of bounded size
        return checked.problem(arguments, "arguments", self._most_bytes)

    def result_problem(self, definition: Definition, structured: Any) -> str | None:
        """What is wrong with a successful result's structured content; None stands for none at all."""
        schema = self._compiled(definition, "outputSchema")
        if schema is None:
            return None
        if isinstance(schema, Unusable):
            return f"the tool's outputSchema cannot be used: {schema}"
        if structured is None:
            return "the tool has an outputSchema but returned no structured content"
        return schema.problem(structured, "result")

    def cost(self, definition: Definition) -> int:
        """What it takes to compile the definition's schemas, also where they turn out to be unusable."""
        found = [self._compiled(definition, key) for key in ("inputSchema", "outputSchema")]
        return sum(schema.cost for schema in found if schema is not None)

    def _compiled(self, definition: Definition, key: str) -> Schema | Unusable | None:
        root = definition.body.get(key)
        if root is None:
            return None
        place = (definition.digest, key)
        found = self._cache.get(place)
        if found is None:
            try:
                found = Schema(root)
            except Unusable as exc:
                found = Unusable(str(exc), exc.cost)  # without the frames that it came through
            self._cache[place] = found
            self._cost += _kept(found)
            while len(self._cache) > self._kept or self._cost > _MAX_COST:
                self._cost -= _kept(self._cache.popitem(last=False)[1])
        else:
            self._cache.move_to_end(place)
        return found


def _kept(schema: Schema | Unusable) -> int:
    return schema.cost if isinstance(schema, Schema) else 0


def _bad_schema(tool: str, text: str) -> Refused:
    return Refused(Status.UNAVAILABLE, "bad_schema", f"The tool {tool!r} is not available: {text}")


# ── Catalog ───────────────────────────────────────────────────────────────────────────────────────


GONE = ""
"""Stands for the digest of a definition that its server, which is there, does not show any more."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a definition came to be accepted, and whether capabilities rely on it already."""

    by_person: bool = True
    bound: int | None = None
    """The place in the order in which tools came to capabilities that name no server; None: it came to none."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A contract with the pinned definition of the tool behind it; None where there is no server."""

    contract: Contract
    definition: Definition | None


class Catalog:
    """The capabilities in force. Never changes; a new configuration or pin makes a new one."""

    def __init__(
        self,
        contracts: Mapping[str, Contract],
        definitions: Mapping[tuple[str, str], Definition],
        *,
        live: Mapping[tuple[str, str], str] | None = None,
        schemas: Schemas | None = None,
        own: Mapping[str, Definition | Refused] | None = None,
        standing: Mapping[tuple[str, str], Standing] | None = None,
        unseen: Iterable[str] = (),
    ) -> None:
        """`definitions` are the accepted ones by (server, tool), and `standing` how they came to be; `live` are the
        digests that servers show now; `unseen` are servers of which nothing is known; `own` are the definitions of
        capabilities that run in a box, by their names, or why they cannot run."""
        self.schemas = schemas or Schemas()
        self._contracts = dict(contracts)
        self._definitions = dict(definitions)
        self._live = dict(live or {})
        self._own = dict(own or {})
        self._unseen = frozenset(unseen)
        self._accepted: dict[str, dict[str, Standing]] = {}
        """By tool, then by server."""
        for server, tool in self._definitions:
            self._accepted.setdefault(tool, {})[server] = (standing or {}).get((server, tool), Standing())
        self._shown: dict[str, set[str]] = {}
        for (server, tool), digest in self._live.items():
            if digest != GONE:
                self._shown.setdefault(tool, set()).add(server)
        self.bindings: dict[str, str] = {}
        """Tools that capabilities name without a server, and the servers that they have come to now."""
        self.doubts: list[str] = []
        """What the operator should settle: tools that several servers have, and no contract says which is meant."""
        self._compiled: dict[str, dict[str, int]] = {}
        """By server, the digests of the definitions whose schemas were compiled, and what that took."""
        self._usable: dict[str, Capability | Refused] = {n: self._usability(c) for n, c in self._contracts.items()}

        self.labelled = any(map(labelled, self._contracts.values()))
        """Whether any call can have a label."""
        placed = [each for each in self._contracts.values() if each.place is not None]
        self.placed = frozenset(each.server or self.bindings.get(each.tool) for each in placed)
        """Servers of which some contract says to what in them labels stick."""

    def __contains__(self, name: str) -> bool:
        """Whether there is a capability of this name, offered or not."""
        return name in self._contracts

    def every(self) -> list[tuple[Contract, Refused | None]]:
        """All contracts, in the order of the configuration, and why one leads to nothing that can be called."""
        found = ((contract, self._usable[name]) for name, contract in self._contracts.items())
        return [(contract, usable if isinstance(usable, Refused) else None) for contract, usable in found]

    def offered(self, environment: str) -> list[Capability]:
        """What may be called in this environment, in the order of the configuration."""
        return [
            found
            for name, found in self._usable.items()
            if isinstance(found, Capability) and _in(self._contracts[name], environment)
        ]

    def serving(self, tool: str, environment: str) -> list[Contract]:
        """The contracts for one of our own tools that are offered in this environment."""
        offered = [capability.contract for capability in self.offered(environment)]
        return [each for each in offered if each.tool == tool and each.transport is Transport.SANDBOXED_EXEC]

    def named(self, name: str, environment: str) -> Contract | None:
        """The contract of this name, where it is offered in this environment."""
        found = self._usable.get(name)
        offered = isinstance(found, Capability) and _in(self._contracts[name], environment)
        return self._contracts[name] if offered else None

    def resolve(self, call: Call, environment: str, permission: Permission = UNLIMITED) -> Capability:
        """The capability that the call means, its arguments checked. Raises Refused."""
        if call.fault is not None:
            raise Refused(Status.VALIDATION_FAILURE, "bad_request", f"The request cannot be read: {call.fault}")
        permission.require_any(call)
        contract = self._contracts.get(call.tool)
        if contract is None:
            raise self._unknown(call.tool, environment, permission)
        if permission.narrows:
            permission.require_tool(call, (each.contract.name for each in self.offered(environment)))
        if not _in(contract, environment):
            text = f"The tool {call.tool!r} is not offered in the environment {environment!r}."
            raise Refused(Status.VALIDATION_FAILURE, "wrong_environment", text)
        found = self._usable[call.tool]
        if isinstance(found, Refused):
            raise Refused(found.status, found.reason_code, found.message)
        problem = self.schemas.arguments_problem(found.definition, call.arguments)
        if problem is not None:
            text = f"The arguments of {call.tool!r} do not fit: {problem}.{_meant(found.definition, call.arguments)}"
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", text)
        return found

    def _unknown(self, tool: str, environment: str, permission: Permission) -> Refused:
        offered = (capability.contract.name for capability in self.offered(environment))
        names = [name for name in offered if permission.calls(name)]
        import difflib  # noqa: PLC0415 - for names that do not exist

        near = difflib.get_close_matches(tool[:128], names, n=3)
        hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
        return Refused(Status.VALIDATION_FAILURE, "unknown_tool", f"There is no tool {quoted(tool, 128)}.{hint}")

    def _usability(self, contract: Contract) -> Capability | Refused:
        """The capability, or the refusal that every call of it gets."""
        definition: Definition | None = None
        if contract.transport is Transport.SANDBOXED_EXEC:
            own = self._own.get(contract.name) or _no_backend(contract.name)
            # Its schemas are ours, and compiled for the first call: a run of one program calls one tool.
            return own if isinstance(own, Refused) else Capability(contract, own)
        if contract.is_served:
            server = contract.server or self._server_of(contract)
            if isinstance(server, Refused):
                return server
            definition = self._definitions.get((server, contract.tool)) if server is not None else None
            if definition is None:
                text = f"The tool {contract.name!r} is not available: its definition was not accepted yet"
                return Refused(Status.UNAVAILABLE, "not_pinned", f"{text} (run `ringfence check --accept`).")
            live = self._live.get((definition.server, definition.name), definition.digest)
            if live == GONE:
                text = f"The tool {contract.name!r} is not available: its server no longer offers it."
                return Refused(Status.UNAVAILABLE, "tool_gone", text)
            if live != definition.digest:
                text = f"The tool {contract.name!r} is not available: its definition changed since it was accepted"
                return Refused(Status.UNAVAILABLE, "pin_changed", f"{text} (run `ringfence check --accept`).")
            if contract.server is None:
                contract = sealed(replace(contract, server=definition.server))
        problem = self._unusable(definition) if definition is not None else None
        return Capability(contract, definition) if problem is None else _bad_schema(contract.name, problem)

    def _unusable(self, definition: Definition) -> str | None:
        compiled = self._compiled.setdefault(definition.server, {})
        if definition.digest not in compiled and sum(compiled.values()) >= _MAX_COST:
            return "the patterns of its server's other tools already cost all that may be spent on compiling"
        problem = self.schemas.unusable(definition)
        compiled[definition.digest] = self.schemas.cost(definition)
        return problem

    def _server_of(self, contract: Contract) -> str | Refused | None:
        """The server of a capability that names none; None where nobody accepted such a tool.

        Once a tool has come to a server it stays there, whatever others offer, and whether that server is up or not.
        It comes to the one that a person accepted it from; or, if it was accepted on first use, to the only one that
        offers it, once every other server has shown what it has: else whichever is up first could take the calls.
        """
        tool = contract.tool
        accepted = self._accepted.get(tool, {})
        there = [server for server in accepted if self._live.get((server, tool)) != GONE]
        offering = {*there, *self._shown.get(tool, ())}
        by_people = [server for server in there if accepted[server].by_person]
        bound = [(standing.bound, server) for server, standing in accepted.items() if standing.bound is not None]
        if bound:
            chosen = min(bound)[1]
        elif not there:
            return next(iter(accepted), None)
        elif len(by_people) == 1:
            chosen = self.bindings[tool] = by_people[0]
        elif len(offering) == 1 and self._unseen <= offering:
            chosen = self.bindings[tool] = there[0]
        else:
            return self._ambiguous(contract, offering)
        if others := sorted(offering - {chosen}):
            self.doubts.append(
                f"the capability {contract.name!r} means {tool!r} of server {chosen}, which had it first; one of that"
                f" name is offered by {_listed(others)}, too: name the server in the capability"
            )
        return chosen

    def _ambiguous(self, contract: Contract, offering: set[str]) -> Refused:
        unknown = sorted(self._unseen - offering)
        hidden = f", and nothing was seen yet of {_listed(unknown)}" if unknown else ""
        self.doubts.append(
            f"the capability {contract.name!r} names no server: {contract.tool!r} is offered by"
            f" {_listed(sorted(offering))}{hidden}: name the server in the capability"
        )
        text = f"The tool {contract.name!r} is not available: several servers have it or may, the contract names none."
        return Refused(Status.UNAVAILABLE, "ambiguous_server", text)


def _listed(servers: list[str]) -> str:
    return f"server{'' if len(servers) == 1 else 's'} {', '.join(servers)}"


def _no_backend(tool: str) -> Refused:
    text = f"The tool {tool!r} is not available: it needs a box, and none can be made here."
    return Refused(Status.UNAVAILABLE, "no_backend", text)


def _in(contract: Contract, environment: str) -> bool:
    return contract.environments is None or environment in contract.environments


_MAX_NAMES = 12


def _meant(definition: Definition | None, arguments: Mapping[str, Any]) -> str:
    """What a caller may have meant by names that the tool does not take. Only its own names are said."""
    schema = definition.body.get("inputSchema") if definition is not None else None
    takes = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(takes, dict) or not (unknown := [name for name in arguments if name not in takes]):
        return ""
    free = [name for name in takes if name not in arguments][:_MAX_NAMES]
    import difflib  # noqa: PLC0415 - few calls are wrong

    near = (difflib.get_close_matches(name[:100], free, 1) for name in unknown[:_MAX_NAMES])
    if meant := list(dict.fromkeys(name for found in near for name in found)):
        return f" Did you mean {' and '.join(map(repr, meant))}?"
    return f" It takes: {', '.join(list(takes)[:_MAX_NAMES]) or 'nothing'}."
