"""What a handler gets: the grant of a call for a session, the keeper of sessions, and ways to answer."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ringfence.core.box import MIB, Attached, FileFact, ImageRoot
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.core.model import Answer, Call, Grant, Json, Principal, Status
from ringfence.core.ports import InstalledPackages, Route
from ringfence.core.record import plain
from ringfence.core.sessions import Owner, SessionInfo, Within
from ringfence.sandbox.tools.request import FromSnapshot, Provision
from ringfence.sandbox.tools.results import text

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService
    from ringfence.sandbox.tools.screening import OutputScreen

_NOTHING = Attached()
_NO_ROUTE = Route()
_FROM_NONE = FromSnapshot()
_PIECE = MIB
_MAX_SENT = 64 * MIB
_METADATA_SHOWN = 200


def _never(_: str) -> bool:
    return False


def _forgotten(_: SessionInfo) -> None:
    """Does not remember the session that was opened."""


def owner_of(principal: Principal) -> Owner:
    """The owner of the sessions that a caller opens."""
    return Owner(principal.tenant, principal.agent)


@plain
class Task:
    """A call to be carried out, with its caller and the keeper."""

    grant: Grant
    keeper: SessionService
    provision: Provision
    isolation: Json
    """As far as it is known without looking at the session."""
    screen: OutputScreen
    """The output of the session passes through it."""
    route: Route = _NO_ROUTE
    """The route out of a session that is to be opened."""
    installed: InstalledPackages | None = None
    """The packages that are installed for it."""
    image: ImageRoot | None = None
    """The image that is its root."""
    kept: FromSnapshot = _FROM_NONE
    """What a session that it opens has from its snapshot."""
    learn: Callable[[SessionInfo], None] = _forgotten
    """Remembers what was opened, so that the keeper need not be asked for it."""
    is_handed_over: Callable[[str], bool] = _never
    """Whether a session of a program is for agents, too."""

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
        """Whether output may be shown as it comes: not where a contract removes something from it."""
        contract = self.grant.contract
        return not contract.redact and contract.result.fields is None

    @property
    def most_bytes(self) -> int:
        return self.grant.contract.result.max_bytes

    @property
    def most_chars(self) -> int | None:
        return self.grant.contract.result.max_chars

    def answer(
        self, structured: Json, words: str, content: Sequence[Json] = (), given: Sequence[FileFact] = ()
    ) -> Answer:
        """The answer of a call that was carried out in its session."""
        within = Within(self.session, given=tuple(given))
        blocks = [*content] if content else [text(words)]
        structured = {"session": self.session, **structured}
        return Answer({"content": blocks, "structuredContent": structured}, isolation=self.isolation, within=within)

    def session_answer(self, info: SessionInfo, words: str) -> Answer:
        """An answer with the present state of a session."""
        packages = self.installed.packages if self.installed is not None else ()
        within = Within(
            info.id, info.step, state=info.state, packages=packages, planted=info.planted, not_kept=info.not_kept
        )
        structured = session_json(info, wide=self.wide)
        isolation = dict(info.isolation) or self.isolation
        return Answer({"content": [text(words)], "structuredContent": structured}, isolation=isolation, within=within)

    def listing(self, structured: Json, words: str) -> Answer:
        """An answer that concerns no session in particular."""
        return Answer({"content": [text(words)], "structuredContent": structured}, isolation=self.isolation)


# ── Parts of answers ──────────────────────────────────────────────────────────────────────────────


def session_json(info: SessionInfo, *, wide: bool) -> Json:
    """What is told of a session: to a caller in this process all of it, to a model what it needs to go on."""
    structured: Json = {
        "session": info.id,
        "state": info.state,
        "template": info.template,
        "step": info.step,
        "expires_at": info.expires_at,
        "why": info.why,
        "contexts": list(info.contexts),
    }
    if info.not_kept:
        structured["not_kept"] = list(info.not_kept)
    if not wide:
        return {**structured, "metadata": _begin(info.metadata)}
    return {
        **structured,
        "metadata": dict(info.metadata),
        "created_at": info.created_at,
        "ended_at": info.ended_at,
        "snapshot": info.snapshot,
        "memory_bytes": info.memory_bytes,
        "given_back_bytes": info.given_back_bytes,
        "limits": asdict(info.limits),
        "network": list(info.network),
        "isolation": dict(info.isolation),
    }


def _begin(metadata: Mapping[str, str]) -> Json:
    """As much of it as has room where many sessions are listed."""
    shown: Json = {}
    room = _METADATA_SHOWN
    for key, value in metadata.items():
        room -= len(key)
        if room <= 0:
            break
        shown[key] = value if len(value) <= room else f"{value[:room]}…"
        room -= len(value)
    return shown


@contextmanager
def already_begun() -> Iterator[None]:
    """For what follows something that was done: a failure here does not mean that nothing was. Raises OutcomeUnknown
    instead of what would say so."""
    try:
        yield
    except Unavailable as exc:
        raise OutcomeUnknown(exc.reason_code, exc.message) from None
    except Refused as exc:
        if exc.status is not Status.VALIDATION_FAILURE:
            raise
        raise OutcomeUnknown(exc.reason_code, exc.message) from None


def bad(words: str) -> Refused:
    return Refused(Status.VALIDATION_FAILURE, "bad_arguments", words)


# ── Attached bytes: the arguments name them by digest, and what arrives must match ────────────────


def _changed() -> Refused:
    text = "what was to be written changed after it was named, so nothing was written"
    return Refused(Status.FAILED, "input_changed", text)


async def data_of(task: Task) -> bytes:
    """Read all of it at once. Raises Refused where it does not match its digest."""
    if task.given["data"]["bytes"] > _MAX_SENT:
        raise Refused(Status.VALIDATION_FAILURE, "too_large", f"no more than {_MAX_SENT} bytes can be sent at once")
    return b"".join([piece async for piece in pieces_of(task)])


async def pieces_of(task: Task) -> AsyncIterator[bytes]:
    """Yield the pieces; at the end raise Refused where they do not match their digest."""
    named = task.given["data"]
    given = task.attached.data
    size = 0
    digest = hashlib.sha256()
    async for piece in _cut(given) if isinstance(given, bytes) else given:
        size += len(piece)
        digest.update(piece)
        if size > named["bytes"]:
            raise _changed()
        yield piece
    if size != named["bytes"] or digest.hexdigest() != named["sha256"]:
        raise _changed()


async def _cut(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), _PIECE):
        yield data[at : at + _PIECE]
