"""Requests that are refused before they are calls: on record, and never more of them than the log can bear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from ringfence.core.model import Json, Principal
from ringfence.front import refusals
from ringfence.front.refusals import Refusal, Refusals
from ringfence.store import Store
from tests import gateways

pytestmark = pytest.mark.anyio

ANN = Principal("ann", person="anna")
SEEN = ("origin", "reason_code", "peer_uid", "count")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "state", gateways.keys()) as opened:
        yield opened


def recorded(store: Store) -> list[Json]:
    return [record.body for record in store.reader().records(kind=refusals.KIND)]


async def test_of_a_known_caller_each_is_on_record_at_once(store: Store) -> None:
    kept = Refusals(store)
    for reason in ("header_mismatch", "not_json"):
        await kept.record(Refusal("mcp-http", reason, 1000, ANN), "tools/call")
    first, second = recorded(store)
    assert [first[name] for name in SEEN] == ["mcp-http", "header_mismatch", 1000, 1]
    assert first["principal"] == {"tenant": "local", "agent": "ann", "person": "anna", "kind": "agent"}
    assert (second["reason_code"], second["method"]) == ("not_json", "tools/call")
    assert first["first"] == first["last"] <= second["first"]


async def test_before_a_caller_is_known_they_are_counted_by_user_and_reason(store: Store) -> None:
    kept = Refusals(store)
    for number in range(3000):
        kept.count(Refusal("mcp-http", "unknown_caller" if number % 3 else "bad_http", 65534))
    kept.count(Refusal("mcp-http", "unknown_caller", None))
    assert recorded(store) == [], "nobody writes a record by coming"
    await kept.flush()
    told = {(body["peer_uid"], body["reason_code"]): body for body in recorded(store)}
    counts = {key: body["count"] for key, body in told.items()}
    assert counts == {(65534, "unknown_caller"): 2000, (65534, "bad_http"): 1000, (None, "unknown_caller"): 1}
    body = told[65534, "unknown_caller"]
    assert body["principal"] is None and body["first"] <= body["last"]
    await kept.flush()
    assert len(recorded(store)) == 3, "what was told is told once"


async def test_nobody_can_make_the_log_grow_by_being_refused(store: Store) -> None:
    kept = Refusals(store)
    for flush in range(20):  # as many users as somebody with subordinate ids has
        for uid in range(500):
            kept.count(Refusal("mcp-http", "unknown_caller", 100_000 + uid + flush * 500))
        await kept.flush(everything=False)
    for number in range(1000):
        await kept.record(Refusal("mcp-http", "not_json", 1000, ANN), "tools/call" if number % 2 else None)
    await kept.flush()
    bodies = recorded(store)
    assert len(bodies) < 300
    assert sum(body["count"] for body in bodies) == 20 * 500 + 1000, "none of them is forgotten"
    others = [body for body in bodies if body["reason_code"] == "other"]
    assert others and others[0]["peer_uid"] is None


async def test_what_was_counted_is_recorded_within_the_minute(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SECONDS", 0.01)
    kept = Refusals(store)
    async with anyio.create_task_group() as group:
        group.start_soon(kept.run)
        for count in (1, 2):
            kept.count(Refusal("mcp-http", "unknown_caller", 65534))
            with anyio.fail_after(60):
                while len(recorded(store)) < count:
                    await anyio.sleep(0.01)
        group.cancel_scope.cancel()


async def test_a_refusal_stands_also_where_it_cannot_be_recorded(store: Store) -> None:
    kept = Refusals(store)
    store.close()
    await kept.record(Refusal("mcp-stdio", "line_too_long", principal=ANN))
    await Refusals().record(Refusal("mcp-stdio", "line_too_long", principal=ANN))
