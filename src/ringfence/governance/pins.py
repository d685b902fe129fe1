"""Pins: which definitions of servers count. A definition is offered if it was accepted, by a person or on first use,
and if its server still shows the very same.

Here are what servers show now, what was accepted of it, and what goes on record when the two part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Contract, Definition, Json, ServerSpec
from ringfence.governance.contract import GONE, Standing
from ringfence.governance.drift import Drift
from ringfence.governance.guard import Guard
from ringfence.governance.rulebook import allowed_item
from ringfence.store import FIRST_USE, PinRow, Store, Transaction

log = logging.getLogger("ringfence")

_NAME_LENGTH = 300
_MAX_FIELDS = 50
_LONGEST_DEFINITION = 262_144
_MAX_CHANGES = 100
"""Changed definitions of one server that are each on record at once; of the rest, how many there were."""
_CHANGE_SECONDS = 300.0
"""After so long, one more is."""
_MAX_TOLD = 10
"""Definitions of one listing that the log names as left out."""
_MAX_FIRST_USE = 3000
"""Definitions of one server that are accepted without a person: what it lists, and some that it listed before."""
_GONE_SECONDS = 86400.0


class ChangePace:
    """How many changed definitions of one server are each on record. The others are counted, with the next that is: a
    server that changes them again and again does not fill the log."""

    def __init__(self) -> None:
        self._left = float(_MAX_CHANGES)
        self._at: float | None = None
        self.counted = 0

    def admit(self, changes: int, now: float) -> tuple[int, int]:
        """Of so many, how many are each put on record, and how many are counted beside them, those before included."""
        if self._at is not None:
            self._left = min(_MAX_CHANGES, self._left + (now - self._at) / _CHANGE_SECONDS)
        self._at = now
        told = min(changes, int(self._left))
        self._left -= told
        self.counted += changes - told
        more = self.counted if told else 0
        if told:
            self.counted = 0
        return told, more


@dataclass(frozen=True, slots=True)
class Pinned:
    """What was accepted and what servers show, at one moment, as the catalog has it: by server and name."""

    tools: Mapping[tuple[str, str], Definition]
    standing: Mapping[tuple[str, str], Standing]
    """How each of the tools came to be accepted."""
    live: Mapping[tuple[str, str], str]
    """The digests of the tools that servers show; GONE for an accepted one that its server does not show any more."""
    prompts: Mapping[tuple[str, str], Definition]
    unseen: frozenset[str]
    """Servers of which nothing is known."""


class DefinitionPins:
    """The definitions of all servers of a configuration: what they show, and what was accepted of it."""

    def __init__(self, store: Store, guard: Guard, malformed: Callable[[Definition], str | None]) -> None:
        """`malformed` says why a definition is none by the protocol, for which clients would refuse the whole list."""
        self._store = store
        self._guard = guard
        self._malformed = malformed
        self._servers: Mapping[str, ServerSpec] = {}
        self._contracts: Mapping[str, Contract] = {}
        self._shown: dict[str, dict[tuple[str, str], Definition]] = {}
        self._changes: dict[str, ChangePace] = {}
        self._unfit: dict[str, list[str]] = {}
        """By server: which of its definitions are not offered, and why, as the operator was told."""

    def use(self, servers: Mapping[str, ServerSpec], contracts: Mapping[str, Contract]) -> None:
        """These are configured from now on."""
        self._servers = servers
        self._contracts = contracts
        self._shown = {server: shown for server, shown in self._shown.items() if server in servers}

    def shown(self, server: str) -> list[Definition] | None:
        """What a server shows, as far as it can be offered; None as long as it was not asked."""
        found = self._shown.get(server)
        return None if found is None else list(found.values())

    def unfit(self, server: str) -> list[str]:
        """What was wrong with definitions of a server that are left out."""
        return list(self._unfit.get(server, ()))

    def drifts(self, server: str) -> list[Drift]:
        """What the configuration offers, as the server shows it, and nobody accepted."""
        accepted = {(row.definition.kind, row.definition.name): row.definition for row in self.accepted(server)}
        used = self.uses(server)
        found = [Drift(each, accepted.get((each.kind, each.name))) for each in self.shown(server) or () if used(each)]
        return [each for each in found if each.old is None or each.old.digest != each.new.digest]

    def pinned(self) -> Pinned:
        rows = self._store.reader().accepted(self._servers)
        tools = {(row.definition.server, row.definition.name): row for row in rows if row.definition.kind == "tool"}
        live = {(s, d.name): d.digest for s, found in self._shown.items() for (k, _), d in found.items() if k == "tool"}
        live |= {key: GONE for key in tools if key[0] in self._shown and key not in live}
        prompts = [row.definition for row in rows if row.definition.kind == "prompt"]
        return Pinned(
            tools={key: row.definition for key, row in tools.items()},
            standing={key: Standing(row.by_person, row.bound) for key, row in tools.items()},
            live=live,
            prompts={
                (d.server, d.name): d
                for d in prompts
                if self._shown.get(d.server, {}).get(("prompt", d.name), d).digest == d.digest
            },
            unseen=frozenset(self._servers.keys() - {*self._shown, *(row.definition.server for row in rows)}),
        )

    async def bind(self, bindings: Mapping[str, str]) -> None:
        """Put on record to which servers tools came that capabilities name without one."""
        if not bindings:
            return

        def put(tx: Transaction) -> None:
            for tool, server in bindings.items():
                tx.bind_pin(server, tool)

        try:
            await self._store.write(put, durable=True)
        except StoreError as exc:
            log.error("to which servers tools belong could not be recorded: %s", exc)

    def uses(self, server: str) -> Callable[[Definition], bool]:
        """Tells which of a server's definitions the configuration offers; the others are neither accepted nor kept."""
        spec = self._servers[server]
        contracts = [c for c in self._contracts.values() if c.is_served]
        tools = {c.tool for c in contracts if c.server in (None, server)}
        return lambda d: d.name in tools if d.kind == "tool" else allowed_item(spec, "prompt", d.name)

    async def learn(self, server: str, definitions: Sequence[Definition]) -> None:
        """Compare what a server shows with what was accepted; pin what may be pinned on first use."""
        definitions, _ = await self.offerable(server, definitions)
        rows = self.accepted(server)
        pinned = {(row.definition.kind, row.definition.name): row.definition for row in rows}
        known = self._shown.get(server, {})
        self._shown[server] = {(d.kind, d.name): d for d in definitions}
        fresh: list[Definition] = []
        changed: list[tuple[Definition, Definition]] = []
        used = self.uses(server)
        for definition in definitions:
            place = (definition.kind, definition.name)
            old = pinned.get(place)
            if old is None:
                if used(definition):
                    fresh.append(definition)
            elif old.digest != definition.digest and (place not in known or known[place].digest != definition.digest):
                changed.append((old, definition))
        if self._servers[server].direct is not None:  # the operator's own words, which are in force as they stand
            fresh, changed = [*fresh, *(new for _, new in changed)], []
        if fresh and self._servers[server].pins == "first_use":
            await self._accept_at_first_use(server, fresh, rows)
        if changed:
            await self._changed(server, changed)

    def accepted(self, server: str) -> list[PinRow]:
        spec = self._servers.get(server)
        return [] if spec is None else self._store.reader().accepted({server: spec})

    async def offerable(self, server: str, definitions: Sequence[Definition]) -> tuple[list[Definition], list[str]]:
        """Those that can be offered, and what is wrong with the others, which count as not shown. They are looked at
        beside the loop, in the order in which a server shows them: it decides how long and how many they are."""
        out, wrong = await self._guard.threads.do(server, partial(self._looked_at, list(definitions)))
        if wrong and wrong != self._unfit.get(server):
            for each in wrong[:_MAX_TOLD]:
                log.warning("server %s: it is left out of what is offered: %s", server, each)
            if len(wrong) > _MAX_TOLD:
                log.warning("server %s: %d more are left out as well", server, len(wrong) - _MAX_TOLD)
        self._unfit[server] = wrong
        return out, wrong

    def _looked_at(self, definitions: list[Definition]) -> tuple[list[Definition], list[str]]:
        out: list[Definition] = []
        wrong: list[str] = []
        for definition in definitions:
            problem = self._unfitness(definition)
            if problem is None:
                out.append(definition)
            else:
                named = self._guard.message(definition.name, most=_NAME_LENGTH)
                wrong.append(f"{definition.kind} {named}: {self._guard.message(problem, most=_NAME_LENGTH)}")
        return out, wrong

    def _unfitness(self, definition: Definition) -> str | None:
        """Why a definition is not offered: it is longer than any that a model could read; it holds a known secret,
        since an accepted one is kept and its name is shown as it is; or it is none by the protocol, for which clients
        would refuse the whole list."""
        size = len(canonical.message(definition.body, "surrogatepass"))
        if size > _LONGEST_DEFINITION:
            return f"it has {size:,} bytes, and may have {_LONGEST_DEFINITION:,}"
        if self._guard.holds_secret({"name": definition.name, "body": definition.body}):
            return "a secret stands in it"
        return self._malformed(definition)

    async def _accept_at_first_use(self, server: str, fresh: list[Definition], rows: list[PinRow]) -> None:
        """Pin what a server shows, up to a number; what it showed long ago and nobody relies on makes room."""
        mine = [row for row in rows if not row.by_person]
        excess = len(mine) + len(fresh) - _MAX_FIRST_USE
        if excess > 0:
            late = time.time() - _GONE_SECONDS
            used = self.uses(server)
            shown = self._shown[server]

            def relied_on(row: PinRow) -> bool:
                definition = row.definition
                named = definition.kind == "tool" and used(definition)
                return named or row.bound is not None or (definition.kind, definition.name) in shown

            gone = [row for row in mine if row.at < late and not relied_on(row)]
            oldest = [row.definition for row in sorted(gone, key=lambda row: row.at)[:excess]]
            if oldest:
                await self._store.write(lambda tx: tx.drop_pins(server, oldest), durable=True)
            left_out = excess - len(oldest)
            if left_out > 0:
                fresh = fresh[: max(0, len(fresh) - left_out)]
                log.error(
                    "server %s: %d definitions are not accepted on first use, since %d were: ringfence check --accept",
                    *(server, left_out, _MAX_FIRST_USE),
                )
        if fresh:
            await self.accept(fresh, FIRST_USE)

    async def accept(self, definitions: Sequence[Definition], by: str) -> None:
        """Pin definitions, on record. If a person does, capabilities that name no server follow, unless they rely on a
        definition of another server that a person accepted as well and that is still there."""
        named = [self._guard.message(each.name, most=_NAME_LENGTH) for each in definitions]
        now = time.time()
        rows = [] if by == FIRST_USE else self._store.reader().pinned()
        left = {row.definition.name: row.definition.server for row in rows if self._gives_way(row)}

        def put(tx: Transaction) -> None:
            for definition, name in zip(definitions, named, strict=True):
                tx.put_pin(definition, by, now, name)
                before = left.get(definition.name) if definition.kind == "tool" else None
                if before not in (None, definition.server):
                    tx.bind_pin(definition.server, definition.name, instead_of=before)

        await self._store.write(put, durable=True)

    def _gives_way(self, row: PinRow) -> bool:
        """Whether capabilities rely on a tool that no person accepted, or that its server does not show any more."""
        server = row.definition.server
        if row.bound is None or server not in self._servers:
            return False
        shown = self._shown.get(server)
        return not row.by_person or (shown is not None and ("tool", row.definition.name) not in shown)

    async def _changed(self, server: str, changes: list[tuple[Definition, Definition]]) -> None:
        """Put it on record that accepted definitions (the old, the new) are no longer what the server shows."""
        pace = self._changes.setdefault(server, ChangePace())
        told, more = pace.admit(len(changes), time.monotonic())
        if not told:
            return
        bodies = [self._difference(old, new) for old, new in changes[:told]]
        for body in bodies:
            log.warning(
                "server %s changed its definition of %s; it is hidden until accepted: ringfence check --accept",
                *(server, body["name"]),
            )
        if more:
            log.warning("server %s changed %d more of its definitions; they are hidden, too", server, more)
            bodies.append({"server": server, "more": more})
        await self._record_changes(bodies)

    async def _record_changes(self, bodies: Sequence[Json]) -> None:
        def put(tx: Transaction) -> None:
            for body in bodies:
                tx.append("pin_changed", None, body)

        await self._store.write(put, durable=True)

    async def record_counted_changes(self) -> None:
        """Put it on record how many changes there were that are not on it: the gateway ends."""
        left = [{"server": server, "more": pace.counted} for server, pace in self._changes.items() if pace.counted]
        if left:
            try:
                await self._record_changes(left)
            except StoreError as exc:
                log.error("that servers changed their definitions could not be recorded: %s", exc)

    def _difference(self, old: Definition, new: Definition) -> Json:
        body: Json = {"server": new.server, "of": new.kind}
        body["name"] = self._guard.message(new.name, most=_NAME_LENGTH)
        body |= {"pinned": old.digest, "seen": new.digest}
        fields = sorted(k for k in {*old.body, *new.body} if old.body.get(k) != new.body.get(k))
        body["fields"] = [self._guard.message(field, most=_NAME_LENGTH) for field in fields[:_MAX_FIELDS]]
        return body
