"""Whether the records of each call belong together: what began ends once, as the same call, before its chain is closed.

Tables beside the log say which calls run, and a start after a crash closes those. What it wrote is signed like all the
rest, so only this shows whether it was misled: a call closed as another one, one that never began, one left out.
"""

from __future__ import annotations

from typing import Any

from ringfence.audit.chain import CLOSED, SHARED, Findings
from ringfence.core.model import Json
from ringfence.core.record import plain

RUNNING_CHANGED = "running_changed"
"""The kind of a record that says that the table of running calls was not what the log said."""
_SAID = ("call", "contract", "decision", "arguments", SHARED)


@plain
class _End:
    """A *finished* record, and where it says that its call began."""

    call: str
    began_in: str
    began_at: int | None
    body: Json


class CallVerifier:
    """Given every record of a log, each chain in its order and the chains in any, finds calls whose records disagree.

    It keeps what is open at one moment in each chain, and no more.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._open: dict[str, dict[str, Json]] = {}
        """By chain, the *started* records of calls that began in it and have not ended."""
        self._first: dict[str, int] = {}
        """The first record that was seen of each chain: what it says of those before is not known to be wrong."""
        self._ahead: dict[tuple[str, str], _End] = {}
        """Ends in other chains than the call began in, of chains that are still to come."""

    def feed(self, body: Json) -> None:
        """A record that its chain has."""
        chain = body["chain"]
        kind = body["kind"]
        running = self._open.get(chain)
        if running is None:
            running = self._open[chain] = {}
            self._first[chain] = body["seq"]
        if kind == "started":
            self._begin(running, body)
        elif kind == "finished":
            self._end(running, body)
        elif kind == CLOSED:
            for call, begun in running.items():
                text = f"closes the chain, and call {call}, which began at record {begun['seq']}, is open"
                self._findings.add(text, chain, body["seq"])
            running.clear()
        elif kind == RUNNING_CHANGED:
            text = f"says that another program had changed the table of running calls of chain {body.get('changed')}"
            self._findings.add(text, chain, body["seq"])

    def finish(self) -> None:
        """All was seen that there is."""
        for end in self._ahead.values():
            if end.began_in in self._first:
                self._pair(None, end)

    def _begin(self, running: dict[str, Json], body: Json) -> None:
        call = body.get("call_id")
        if not isinstance(call, str):
            return
        if call in running:
            self._findings.add(f"begins call {call} a second time", body["chain"], body["seq"])
        elif self._ahead and (end := self._ahead.pop((body["chain"], call), None)) is not None:
            self._pair(body, end)
        else:
            running[call] = body

    def _end(self, running: dict[str, Json], body: Json) -> None:
        call = body.get("call_id")
        if not isinstance(call, str):
            return
        chain = body["chain"]
        where = body.get("started_chain", chain)
        if where != chain and isinstance(where, str):
            running = self._open.get(where, {})
        else:
            where = chain
        begun = running.pop(call, None)
        at = body.get("started_seq")
        if begun is not None and at == begun["seq"] and _same(begun, body):
            return
        end = _End(call, where, at if isinstance(at, int) else None, body)
        if begun is None and where != chain:
            self._ahead[where, call] = end
        else:
            self._pair(begun, end)

    def _pair(self, begun: Json | None, end: _End) -> None:
        problem = None
        if begun is None:
            if end.began_at is not None and end.began_at >= self._first[end.began_in]:
                problem = f"ends call {end.call}, which did not begin at record {end.began_at}"
        elif end.began_at not in (None, begun["seq"]):
            problem = f"ends call {end.call} as begun at record {end.began_at}, and it began at {begun['seq']}"
        elif not _same(begun, end.body):
            problem = f"ends call {end.call} as another than the one that began at record {begun['seq']}"
        if problem is not None:
            elsewhere = "" if end.began_in == end.body["chain"] else f" of chain {end.began_in}"
            self._findings.add(problem + elsewhere, end.body["chain"], end.body["seq"])


def _same(begun: Json, ended: Json) -> bool:
    """Whether *finished* says of its call, and of the decision on it, what *started* says, in the same form; or says
    nothing of it."""
    before = begun.get
    after = ended.get
    return (
        before("call") == after("call")
        and before("contract") == after("contract")
        and (before("decision") == after("decision") or _of(begun, "decision", "id") == _of(ended, "decision", "id"))
        and (before("arguments") == after("arguments") or _digest(begun) == _digest(ended))
        and _first_shared(begun) == _first_shared(ended)
    ) or not any(name in ended for name in _SAID)


def _digest(body: Json) -> Any:
    return _of(body, "arguments", "digest")


def _of(body: Json, part: str, name: str) -> Any:
    found = body.get(part)
    return found.get(name) if isinstance(found, dict) else None


def _first_shared(body: Json) -> Any:
    shared = body.get(SHARED)
    return shared[0] if isinstance(shared, list) and shared else None
