"""A grant of a tool that concerns a session, with whoever keeps sessions, and how its answer is made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict

from ringfence.box import Attached, FileFact
from ringfence.errors import Refused
from ringfence.model import Answer, Call, Grant, Json, Principal, Status
from ringfence.plain import plain
from ringfence.ports import Packed, Passage
from ringfence.sandbox.order import Provision
from ringfence.sandbox.results import text
from ringfence.sandbox.screening import Screen
from ringfence.sandbox.verbs import Keeping
from ringfence.sessions import Owner, SessionInfo, Within

_NOTHING = Attached()
_NO_WAY = Passage()


def _forgotten(_: SessionInfo) -> None:
    """Whoever does not want to know."""


def owner_of(principal: Principal) -> Owner:
    """Whose sessions a caller's are."""
    return Owner(principal.tenant, principal.agent)


@plain
class Task:
    """What is to be done, for whom, by whom."""

    grant: Grant
    keeper: Keeping
    provision: Provision
    isolation: Json
    """As far as it is known without looking at the session."""
    screen: Screen
    """What comes out of the session passes it."""
    passage: Passage = _NO_WAY
    """The way out of a session that is to be opened."""
    packed: Packed | None = None
    """What is installed for it."""
    learn: Callable[[SessionInfo], None] = _forgotten
    """Gets what was opened, so that nobody need ask for it."""

    @property
    def call(self) -> Call:
        return self.grant.call

    @property
    def given(self) -> Json:
        return self.grant.call.arguments

    @property
    def owner(self) -> Owner:
        return owner_of(self.grant.call.principal)

    @property
    def session(self) -> str:
        return str(self.given["session"])

    @property
    def attached(self) -> Attached:
        attached = self.grant.call.attached
        return _NOTHING if attached is None else self.screen.attached(attached)

    @property
    def wide(self) -> bool:
        """Whether the caller is in this process."""
        return self.grant.call.attached is not None

    @property
    def open(self) -> bool:
        """Whether anything may be seen as it comes: of what a contract removes something from, nothing may."""
        contract = self.grant.contract
        return not contract.redact and contract.result.fields is None

    @property
    def most_bytes(self) -> int:
        return self.grant.contract.result.max_bytes

    def done(
        self, structured: Json, words: str, content: Sequence[Json] = (), given: Sequence[FileFact] = ()
    ) -> Answer:
        """It was done in the session that the call names."""
        within = Within(self.session, given=tuple(given))
        blocks = [*content] if content else [text(words)]
        told = {"session": self.session, **structured, "facts": {}}
        return Answer({"content": blocks, "structuredContent": told}, isolation=self.isolation, within=within)

    def told(self, info: SessionInfo, words: str) -> Answer:
        """What a session is by now."""
        packages = self.packed.packages if self.packed is not None else ()
        within = Within(info.id, info.step, state=info.state, packages=packages)
        structured = {**session_json(info, wide=self.wide), "facts": {}}
        isolation = dict(info.isolation) or self.isolation
        return Answer({"content": [text(words)], "structuredContent": structured}, isolation=isolation, within=within)

    def listed(self, structured: Json, words: str) -> Answer:
        """What concerns no session in particular."""
        told = {**structured, "facts": {}}
        return Answer({"content": [text(words)], "structuredContent": told}, isolation=self.isolation)


Carry = Callable[[Task], Awaitable[Answer]]


def session_json(info: SessionInfo, *, wide: bool = False) -> Json:
    told: Json = {
        "session": info.id,
        "state": info.state,
        "template": info.template,
        "created_at": info.created_at,
        "expires_at": info.expires_at,
        "ended_at": info.ended_at,
        "why": info.why,
        "step": info.step,
        "contexts": list(info.contexts),
        "metadata": dict(info.metadata),
        "snapshot": info.snapshot,
        "memory_bytes": info.memory_bytes,
        "limits": asdict(info.limits),
        "network": list(info.network),
    }
    return {**told, "isolation": dict(info.isolation)} if wide else told


def file_json(fact: FileFact) -> Json:
    return {"path": fact.path, "bytes": fact.bytes, "sha256": fact.sha256}


def bad(words: str) -> Refused:
    return Refused(Status.VALIDATION_FAILURE, "bad_arguments", words)
