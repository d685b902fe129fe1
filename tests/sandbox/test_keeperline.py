"""What a keeper does not say twice, and what it does not say to whoever does not listen."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ringfence.box import BoxReport
from ringfence.model import Json
from ringfence.sandbox.codec import place
from ringfence.sandbox.keeperline import Line
from ringfence.sandbox.keeperlink import Keeper
from ringfence.sandbox.repeats import AS_BEFORE, MOST_TOLD
from ringfence.sandbox.verbs import OnShown, unheard, unseen
from ringfence.sessions import CellReport, CellRequest, Owner, StepReport, Tell
from tests.sandbox.parrot import ANN, Parrot, kept, linked, session

pytestmark = pytest.mark.anyio


@dataclass
class Isolating(Parrot):
    """Each of its sessions has an isolation of its own, the very same in each of its steps until it changes."""

    isolations: dict[str, Json] = field(default_factory=dict)
    deaf: list[bool] = field(default_factory=list)

    async def run(self, owner: Owner, id: str, request: CellRequest, tell: Tell, shown: OnShown) -> StepReport:
        self.deaf.append(tell is unheard and shown is unseen)
        report = await super().run(owner, id, request, tell, shown)
        told = self.isolations.setdefault(id, {"backend": "parrot", "of": id, "protections": {"a": {"on": True}}})
        return replace(report, cell=replace(report.cell, report=replace(report.cell.report, isolation=told)))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Json]:
    """What clients hear, as it comes over the wire."""
    heard: list[Json] = []
    message = Line.message

    def hearing(self: Line, said: Json, attachments: list[bytes], size: int) -> None:
        heard.append({**said, "done": _copied(said["done"])} if "done" in said else dict(said))
        message(self, said, attachments, size)

    monkeypatch.setattr(Line, "message", hearing)
    return heard


def _copied(done: Any) -> Any:
    """As it was before the client filled in what was left out."""
    cell, report, isolation = place(StepReport, "cell"), place(CellReport, "report"), place(BoxReport, "isolation")
    return done[cell][report][isolation] if isinstance(done, list) and len(done) > cell else done


async def step(keeper: Keeper, id_: str, source: str = "say 0") -> Json:
    report = await keeper.run(ANN, id_, CellRequest(source), unheard, unseen)
    return report.cell.report.isolation


async def test_whoever_does_not_listen_is_told_the_end_alone(messages: list[Json]) -> None:
    parrot = Isolating()
    id_ = session(parrot)
    async with linked(parrot) as keeper:
        heard: list[Any] = []
        quiet = await keeper.run(ANN, id_, CellRequest("show 3"), unheard, unseen)
        assert [message for message in messages if "item" in message] == []
        loud = await keeper.run(ANN, id_, CellRequest("show 3"), unheard, heard.append)
        assert [shown.data["text/plain"] for shown in heard] == ["0", "1", "2"]
        assert quiet == loud and len(quiet.cell.results) == 3
        lines: list[tuple[str, bytes]] = []
        await keeper.run(ANN, id_, CellRequest("say 2"), lambda stream, data: lines.append((stream, data)), unseen)
        assert lines == [("stdout", b"line 0\n"), ("stderr", b"line 1\n")]
        assert parrot.deaf == [True, False, False]


async def test_every_step_has_its_isolation_and_the_wire_has_it_once(messages: list[Json]) -> None:
    parrot = Isolating()
    one, two = session(parrot), session(parrot)
    async with kept(parrot) as (_, there):
        async with Keeper.connect(there) as keeper:
            for id_ in (one, one, two, one, two):
                assert await step(keeper, id_) == parrot.isolations[id_]
            said = [message["done"] for message in messages if "done" in message]
            first, other = parrot.isolations[one], parrot.isolations[two]
            assert said == [first, AS_BEFORE, other, AS_BEFORE, AS_BEFORE]
            # It changes: then it is said anew.
            parrot.isolations[one] = {"backend": "parrot", "of": "another"}
            assert await step(keeper, one) == {"backend": "parrot", "of": "another"} == await step(keeper, one)
        # Another client has heard nothing yet.
        async with Keeper.connect(there) as keeper:
            messages.clear()
            assert await step(keeper, two) == other
            assert [message["done"] for message in messages if "done" in message] == [other]


async def test_of_more_sessions_than_are_remembered_each_has_its_own() -> None:
    parrot, choice = Isolating(), random.Random(1)
    ids = [session(parrot) for _ in range(2 * MOST_TOLD + 100)]
    async with linked(parrot) as keeper:
        for _ in range(3):
            choice.shuffle(ids)
            for id_ in [*ids, *ids[:50], *ids[-50:]]:
                assert (await step(keeper, id_))["of"] == id_
