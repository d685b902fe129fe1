"""Data flow: which labels a call has, which are in force when it is decided, and to what they stick.

Labels accumulate for each agent over a time, and for each of its sessions as long as that lasts. They also stick where
data lies: to a place in a server, to a box that stays, its snapshots and volumes. Whoever reads there has them from
then on. They are written down before anything is sent, so that neither a crash nor a new connection clears any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.expression import Expression, ExpressionError, variables
from ringfence.core.labels import PRIVATE, SINK, UNTRUSTED, in_force, of_content
from ringfence.core.model import Answer, Call, Contract, Definition, Flow, Json, Mode, ServerSpec, Status, Transport
from ringfence.core.record import dataclass
from ringfence.governance.contract import Capability
from ringfence.sandbox.tools import resources
from ringfence.sandbox.tools.toolkit import FORKS_A_SESSION
from ringfence.store import Held, Scopes, Store, Transaction
from ringfence.store.labels import REFRESH_SECONDS

if TYPE_CHECKING:
    from ringfence.governance.rulebook import Rulebook

_DAY = 86_400.0
_FORGOTTEN = {"s:": 60 * _DAY, "b:": 800 * _DAY}
"""How the scopes of what ends some time begin, sessions of clients and boxes, and how long they are kept without use. A
box may be paused for a year, and what it left is kept for up to another."""
_OPENS, _KEEPS = "open_session", "snapshot_session"
_OWN_BOX = ("own", "unsafe_host", "session")


@cache
def _expression(source: str, result: str) -> Expression:
    return Expression(source, result=result)


def own_labels(call: Call, contract: Contract, environment: str) -> tuple[str, ...]:
    """The labels that a contract gives this call. A condition that fails counts as met: a label only restricts."""
    found = dict.fromkeys(contract.labels)
    if contract.result.trust == "untrusted":
        found[UNTRUSTED] = None
    if contract.transport is Transport.SANDBOXED_EXEC and contract.network != "denied":
        found[SINK] = None  # what runs there sends what it likes
    see: Json | None = None
    for each in contract.labels_when:
        if each.label in found:
            continue
        try:
            see = see or variables(call, replace(contract, labels=()), environment)
            if _expression(each.when, "bool").test(see):
                found[each.label] = None
        except (ExpressionError, ValueError, TypeError, RecursionError):
            found[each.label] = None
    return tuple(found)


# ── Ways out that have no label ───────────────────────────────────────────────────────────────────

_ADDRESSES = frozenset(
    (
        *("address", "bcc", "cc", "channel", "cmd", "code", "command", "domain", "email", "endpoint", "host"),
        *("hostname", "href", "link", "recipient", "recipients", "script", "shell", "to", "uri", "url", "urls"),
        "webhook",
    )
)
"""Names of arguments that choose where something goes, or what is run and then sends where it likes."""
_FORMATS = frozenset(("email", "hostname", "idn-email", "idn-hostname", "iri", "uri"))


def unlabelled_ways_out(capabilities: Iterable[Capability]) -> list[str]:
    """Tools of servers that take an address or a command and are never an `external_sink`, each in a sentence. Only
    where rules about labels could stop anything: something is private, and something untrusted."""
    every = list(capabilities)
    said = {label for each in every for label in _said(each.contract)}
    if not {PRIVATE, UNTRUSTED} <= said:
        return []
    return [
        f"capability {each.contract.name!r} takes {', '.join(found)} and is never labelled {SINK}: what was read can"
        " leave by it unasked; label it, at least where a condition says so"
        for each in every
        if each.contract.is_served and SINK not in _said(each.contract) and (found := _addresses(each.definition))
    ]


def _said(contract: Contract) -> set[str]:
    """The labels that calls under a contract may have."""
    untrusted = {UNTRUSTED} if contract.result.trust == "untrusted" else set[str]()
    return {*contract.labels, *(each.label for each in contract.labels_when), *untrusted}


def _addresses(definition: Definition | None) -> list[str]:
    """The arguments that a tool's schema declares for addresses and commands."""
    schema = definition.body.get("inputSchema") if definition is not None else None
    declared = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(declared, dict):
        return []
    return [
        name
        for name, shape in declared.items()
        if _ADDRESSES.intersection(re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
        or (isinstance(shape, dict) and shape.get("format") in _FORMATS)
    ]


# ── Scopes ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Reach:
    """What a call reads and writes, by the names of scopes."""

    agent: str
    session: str | None = None
    reads: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    """It may read anything whose name begins so."""
    writes: tuple[str, ...] = ()
    whole: str = ""
    """The server of what it writes, where that is one of many places."""

    def places(self) -> Scopes:
        return Scopes(self.reads, (), self.below)

    @property
    def own(self) -> tuple[str, ...]:
        """Where what the call reads is put down."""
        return (self.agent,) if self.session is None else (self.agent, self.session)


def _scope(kind: str, whose: str, *name: str) -> str:
    """The name of a scope. What callers named is in it as a digest: it may be anything, of any length."""
    return f"{kind}:{whose}:{canonical.digest(list(name)).removeprefix('sha256:')[:32]}" if name else f"{kind}:{whose}:"


def reach(rules: Rulebook, call: Call, contract: Contract) -> Reach:
    """What a call reads and writes to which labels stick."""
    whose = call.principal.key
    agent = _scope("a", whose)
    session = None if call.session is None else _scope("s", whose, call.session)
    found = Reach(agent, session)
    if call.kind == "resource" and (at := resources.located(call.tool)) is not None:
        return replace(found, reads=(_scope("b", whose, at[0]),))
    own = contract.transport is Transport.SANDBOXED_EXEC
    boxes = (call.session_named, call.arguments.get("to_session")) if own else (call.box,)
    held = tuple(_scope("b", whose, box) for box in boxes if isinstance(box, str) and box)
    found = replace(found, reads=held, writes=held)
    if own:
        reads = (*held, *_brought(call, whose))
        return replace(found, reads=reads, writes=(*held, *_kept_as(call, contract, whose)))
    spec = rules.servers.get(contract.server or "")
    return found if spec is None else _in_server(rules, found, call, contract, spec)


def _brought(call: Call, whose: str) -> Iterator[str]:
    """What a session is opened with."""
    snapshot = call.arguments.get("snapshot")
    if isinstance(snapshot, str):
        yield _scope("n", whose, snapshot)
    yield from _volumes(call)


def _kept_as(call: Call, contract: Contract, whose: str) -> Iterator[str]:
    """The name that a snapshot is to have. It is known beforehand, and leads to it even if the answer is lost."""
    name = call.arguments.get("name")
    if contract.tool == _KEEPS and isinstance(name, str):
        yield _scope("n", whose, name)


def _volumes(call: Call) -> Iterator[str]:
    """By whose they are: to others, and to its owner if it likes, a volume is OWNER/NAME."""
    who = call.principal
    volumes = call.arguments.get("volumes")
    for each in volumes if isinstance(volumes, list) else ():
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            owner, slash, name = each["name"].rpartition("/")
            yield _scope("v", replace(who, agent=owner).key if slash else who.key, name)


def _in_server(rules: Rulebook, found: Reach, call: Call, contract: Contract, spec: ServerSpec) -> Reach:
    """What of a server it is. Where others of that server name places, a read that names none may be of any of them; a
    server that has a folder, or a box that others use, is one place as a whole."""
    whole = f"p:{call.principal.tenant}:{spec.name}:"
    if contract.place is not None:
        place = _place(call, contract, rules.environment)
        if place is not None:
            at = whole + canonical.digest([place]).removeprefix("sha256:")[:32]
            wrote = (at,) if contract.mode is not Mode.READ else ()
            return replace(found, reads=(*found.reads, at, whole), writes=(*found.writes, *wrote), whole=whole)
    keeps = bool(spec.volumes) or spec.placement not in _OWN_BOX or any(each.mode == "rw" for each in spec.mounts)
    writes = contract.mode is not Mode.READ
    if contract.place is None and not keeps and (writes or spec.name not in rules.catalog.placed):
        return found
    return replace(found, below=(whole,), writes=(*found.writes, whole) if writes else found.writes)


def _place(call: Call, contract: Contract, environment: str) -> str | None:
    """The place that a call names; None where its contract's expression gives none."""
    assert contract.place is not None
    try:
        return _expression(contract.place, "text").text(variables(call, contract, environment))
    except (ExpressionError, ValueError, TypeError, RecursionError):
        return None


# ── Account ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class FlowState:
    """What one call has to do with labels, from its decision to its end."""

    reach: Reach
    own: tuple[str, ...]
    before: Mapping[str, Held]
    """What its agent read before, and where that came from."""
    found: Mapping[str, Held]
    """What lies where it reads, likewise."""
    said: frozenset[str]
    """What was put down of its agent, and of its session, a moment ago."""
    by: tuple[str, str]
    noted: bool = False
    """Whether what it reads was put down."""
    boxes: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()
    """The scopes of what it made."""
    volumes: tuple[str, ...] = ()
    """What is mounted in the boxes that it made."""

    def answered_by(self, call: Call, contract: Contract, answer: Answer) -> None:
        """What a call of a tool of ours made: before the guard, which may remove from the answer what says so."""
        whose = call.principal.key
        told = (answer.result or {}).get("structuredContent") or {}
        if contract.tool == _KEEPS:
            made = (told.get("snapshot"), told.get("name"))
            self.snapshots = tuple(_scope("n", whose, each) for each in made if isinstance(each, str))
        elif contract.tool == FORKS_A_SESSION:
            forks = told.get("sessions", ())
            self.boxes = tuple(_scope("b", whose, each["session"]) for each in forks if "session" in each)
        elif contract.tool == _OPENS and answer.within is not None:
            self.boxes = (_scope("b", whose, answer.within.session),)
            self.volumes = tuple(_volumes(call))

    @property
    def flow(self) -> Flow:
        return Flow(self.own, in_force(self.own, (*self.before, *self.found)))

    @property
    def of_result(self) -> tuple[str, ...]:
        """The labels of what comes back."""
        return tuple(sorted({*of_content(self.own), *self.found} - {SINK}))


def begun(rules: Rulebook, store: Store, call: Call, contract: Contract, now: float) -> FlowState | None:
    """The labels of a call that is to be decided; None where nothing here has any. Raises StoreError."""
    where = reach(rules, call, contract)
    # Other configurations may share this state, and with it sessions and what outlives them: theirs may have labels.
    if not rules.labelled and not ((where.reads or where.below) and store.reader().has_labels()):
        return None
    reader = store.reader()
    before = known = reader.labels(Scopes((), (where.agent,), (), now - rules.label_seconds))
    if where.session is not None:
        session = reader.labels(Scopes((where.session,)))
        before, known = session | before, {name: held for name, held in before.items() if name in session}
    found = reader.labels(where.places()) if where.reads or where.below else {}
    own = own_labels(call, contract, rules.environment)
    if SINK in found and SINK not in own:
        own = (*own, SINK)  # the box that it runs in was opened with a way out
    said = frozenset(name for name, held in known.items() if now - held.last_at <= REFRESH_SECONDS)
    return FlowState(where, own, before, found, said, (call.id, call.tool if call.kind == "tool" else call.kind))


def unsaid(state: FlowState) -> bool:
    """Whether anything has to be written down before the call begins."""
    left = bool(state.reach.writes) and not {*state.flow.labels}.issubset(state.found)
    return not state.said.issuperset(state.of_result) or left or (SINK in state.own and _has_places(state))


def _has_places(state: FlowState) -> bool:
    return bool(state.reach.reads or state.reach.below)


def note(tx: Transaction, state: FlowState) -> None:
    """Put down what the call reads and where it writes, before it begins. Raises Refused where what it would send lies
    in a place that has got another label since it was decided."""
    place = state.reach
    if SINK in state.own and _has_places(state) and tx.labels(place.places()).keys() - {*state.found, *state.before}:
        text = "What it would send was changed while it was decided, and has other labels now; make it again."
        raise Refused(Status.DENIED, "labels_changed", text)
    _read(tx, state)
    labels = state.flow.labels
    for scope in place.writes if labels else ():
        room = not place.whole or scope == place.whole or tx.has_room_for_labels(place.whole, scope)
        tx.add_labels((scope if room else place.whole,), labels, state.by)


def _read(tx: Transaction, state: FlowState) -> None:
    if read := state.of_result:
        if state.reach.session is not None and not state.noted:
            for beginning, seconds in _FORGOTTEN.items():
                tx.forget_labels(beginning, seconds)
        tx.add_labels(state.reach.own, read, state.by)
    state.noted = True


def close(tx: Transaction, state: FlowState) -> None:
    """Put down what is known only when the call is over: what came to lie where it read meanwhile, and what was made of
    the box that it ran in. Before its result is given to anyone."""
    found = tx.labels(state.reach.places()) if _has_places(state) else {}
    late = found.keys() - state.found.keys() - {SINK}
    state.found = {**found, **state.found}
    if late or not state.noted:
        _read(tx, state)
    labels = state.flow.labels
    out = (SINK,) if SINK in state.own else ()
    made = (*state.boxes, *state.snapshots)
    if made and (labels or out):
        tx.add_labels(made, (*labels, *out), state.by)
    for box in state.boxes:
        tx.link_labels(box, state.volumes)
        for parent in state.reach.writes:  # that of a fork, whose volumes it has
            tx.link_labels_like(box, parent)
    if state.volumes and labels:
        tx.add_labels(state.volumes, labels, state.by)


def as_fact(state: FlowState) -> Json | None:
    """The labels of a call as its facts say them; None where there are none."""
    flow = state.flow
    if not (flow.own or flow.labels):
        return None
    return {"call": sorted(flow.own), "in_force": list(flow.labels), "result": list(state.of_result)}


def shown(state: FlowState) -> Json:
    """What a person who is asked is told: the labels, and by which call each came to be in force."""
    every = sorted({**state.found, **state.before}.items())
    since = {name: {"call": held.call_id, "tool": held.tool} for name, held in every if name != SINK}
    return {"call": sorted(state.own), "in_force": list(state.flow.labels), "since": since}
