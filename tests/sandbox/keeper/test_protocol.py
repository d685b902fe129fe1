"""The protocol: a method of the client for each verb; what is sent once, and what is not sent to a client that does not
listen."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ringfence.core.box import BoxReport
from ringfence.core.model import Json, Recheck, always
from ringfence.core.sessions import (
    CellReport,
    CellRequest,
    CommandRequest,
    OnShown,
    Owner,
    StepReport,
    Tell,
    discard_output,
    discard_value,
)
from ringfence.sandbox.keeper import protocol
from ringfence.sandbox.keeper.client import KeeperClient, KeeperConnection
from ringfence.sandbox.keeper.codec import pack, place, unpack
from ringfence.sandbox.keeper.protocol import AS_BEFORE, MAX_REMEMBERED, VERBS, IsolationReceived, IsolationSent
from ringfence.sandbox.keeper.wire import WireError
from ringfence.sandbox.sessions.service import SessionService, verb
from tests.sandbox.keeper.parrot import ANN, Parrot, kept, linked, session

pytestmark = pytest.mark.anyio


# ── A method of the client for each verb ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", VERBS)
def test_the_client_has_the_method_of_each_verb(name: str) -> None:
    method = getattr(KeeperClient, name)
    assert inspect.signature(method) == inspect.signature(getattr(SessionService, name))
    assert inspect.iscoroutinefunction(method) == (VERBS[name].yields is None)


def test_a_verb_does_not_exist_without_a_word_on_what_it_changes_and_whether_it_waits() -> None:
    async def silent(self: Any, owner: Owner) -> None: ...

    with pytest.raises(TypeError, match="silent: a verb says by `@verb`"):
        protocol.derived("silent", silent)
    assert protocol.derived("silent", verb(changes=True, in_line=False)(silent)).takes_turns is False


async def test_arguments_are_those_of_the_signature() -> None:
    parrot = Parrot()
    id_ = session(parrot)
    async with linked(parrot) as keeper:
        call: Any = keeper
        assert await call.info(ANN, id=id_) == await call.info(ANN, id_)
        for wrong in ((), (ANN,), (ANN, id_, "more")):
            with pytest.raises(TypeError):
                await call.info(*wrong)
        for named in ({"ids": id_}, {"id": id_, "more": 1}, {"owner": ANN, "id": id_}):
            with pytest.raises(TypeError):
                await call.info(ANN, **named)
        with pytest.raises(TypeError, match="unexpected argument: more"):
            await call.write(ANN, id_, "a.txt", b"", more=1)
        with pytest.raises(TypeError, match="tell"):
            await call.command(ANN, id_, CommandRequest(("true",)))


# ── What is sent once, and to whom ────────────────────────────────────────────────────────────────


@dataclass
class Isolating(Parrot):
    """Each of its sessions has an isolation of its own, the very same in each of its steps until it changes."""

    isolations: dict[str, Json] = field(default_factory=dict)
    deaf: list[bool] = field(default_factory=list)

    async def run(
        self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown, recheck: Recheck = always
    ) -> StepReport:
        self.deaf.append(tell is discard_output and shown is discard_value)
        report = await super().run(owner, id, request, tell, shown, recheck)
        told = self.isolations.setdefault(id, {"backend": "parrot", "of": id, "protections": {"a": {"on": True}}})
        return replace(report, cell=replace(report.cell, report=replace(report.cell.report, isolation=told)))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """What clients hear, as it comes over the wire."""
    heard: list[Json] = []
    message = KeeperConnection.message

    def hearing(self: KeeperConnection, said: Json, attachments: list[bytes], size: int) -> None:
        heard.append({**said, "done": _copied(said["done"])} if "done" in said else dict(said))
        message(self, said, attachments, size)

    monkeypatch.setattr(KeeperConnection, "message", hearing)
    return heard


def _copied(done: Any) -> Any:
    """As it was before the client filled in what was left out."""
    cell, report, isolation = place(StepReport, "cell"), place(CellReport, "report"), place(BoxReport, "isolation")
    return done[cell][report][isolation] if isinstance(done, list) and len(done) > cell else done


async def step(keeper: KeeperClient, id_: str, source: str = "say 0") -> Json:
    report = await keeper.run(ANN, id_, CellRequest(source), discard_output, discard_value)
    return report.cell.report.isolation


async def test_whoever_does_not_listen_is_told_the_end_alone(messages: list[Json]) -> None:
    parrot = Isolating()
    id_ = session(parrot)
    async with linked(parrot) as keeper:
        heard: list[Any] = []
        quiet = await keeper.run(ANN, id_, CellRequest("show 3"), discard_output, discard_value)
        assert [message for message in messages if "item" in message] == []
        loud = await keeper.run(ANN, id_, CellRequest("show 3"), discard_output, heard.append)
        assert [shown.data["text/plain"] for shown in heard] == ["0", "1", "2"]
        assert quiet == loud and len(quiet.cell.results) == 3
        lines: list[tuple[str, bytes]] = []
        await keeper.run(
            ANN, id_, CellRequest("say 2"), lambda stream, data: lines.append((stream, data)), discard_value
        )
        assert lines == [("stdout", b"line 0\n"), ("stderr", b"line 1\n")]
        assert parrot.deaf == [True, False, False]


async def test_every_step_has_its_isolation_and_the_wire_has_it_once(messages: list[Json]) -> None:
    parrot = Isolating()
    one, two = session(parrot), session(parrot)
    async with kept(parrot) as (_, there):
        async with KeeperClient.connect(there) as keeper:
            for id_ in (one, one, two, one, two):
                assert await step(keeper, id_) == parrot.isolations[id_]
            said = [message["done"] for message in messages if "done" in message]
            first, other = parrot.isolations[one], parrot.isolations[two]
            assert said == [first, AS_BEFORE, other, AS_BEFORE, AS_BEFORE]
            # It changes: then it is said anew.
            parrot.isolations[one] = {"backend": "parrot", "of": "another"}
            assert await step(keeper, one) == {"backend": "parrot", "of": "another"} == await step(keeper, one)
        # Another client has heard nothing yet.
        async with KeeperClient.connect(there) as keeper:
            messages.clear()
            assert await step(keeper, two) == other
            assert [message["done"] for message in messages if "done" in message] == [other]


async def test_of_more_sessions_than_are_remembered_each_has_its_own() -> None:
    parrot, choice = Isolating(), random.Random(1)
    ids = [session(parrot) for _ in range(2 * MAX_REMEMBERED + 100)]
    async with linked(parrot) as keeper:
        for _ in range(3):
            choice.shuffle(ids)
            for id_ in [*ids, *ids[:50], *ids[-50:]]:
                assert (await step(keeper, id_))["of"] == id_


# ── Both ends agree on what was sent, however many sessions there are ────────────────────────────────


def reported(session_id: str, isolation: dict[str, Any]) -> StepReport:
    return StepReport(session_id, 1, CellReport(BoxReport("exited", isolation=isolation)))


def passed(said: IsolationSent, heard: IsolationReceived, report: StepReport) -> tuple[bool, StepReport]:
    """Whether it was said in full, and what arrives."""
    beside: list[bytes] = []
    done = pack(StepReport, report, beside)
    said.shorten(done, report)
    full = AS_BEFORE not in str(done)
    heard.lengthen(done)
    return full, unpack(StepReport, done, beside)


def test_the_same_is_said_once_and_another_again() -> None:
    said, heard, one, other = IsolationSent(), IsolationReceived(), {"level": "process"}, {"level": "other"}
    told = [passed(said, heard, reported("a", isolation)) for isolation in (one, one, other, one)]
    assert [full for full, _ in told] == [True, False, True, True]
    assert [report.cell.report.isolation for _, report in told] == [one, one, other, one]


def test_whatever_a_keeper_remembers_its_client_does_too() -> None:
    said, heard = IsolationSent(), IsolationReceived()
    isolations = {str(number): {"number": number} for number in range(3 * MAX_REMEMBERED)}
    for id_ in [*isolations, *isolations, *reversed(isolations)]:
        _, report = passed(said, heard, reported(id_, isolations[id_]))
        assert report.cell.report.isolation == isolations[id_]


@pytest.mark.parametrize("done", [None, [], ["a"], {"session": "a"}, ["a", 1, [["x"]]]])
def test_a_step_that_is_none_is_not_taken(done: Any) -> None:
    with pytest.raises(WireError):
        IsolationReceived().lengthen(done)


def test_nobody_is_told_as_before_who_was_not_told() -> None:
    said, isolation = IsolationSent(), {"level": "process"}
    passed(said, IsolationReceived(), reported("a", isolation))
    with pytest.raises(WireError):
        passed(said, IsolationReceived(), reported("a", isolation))
