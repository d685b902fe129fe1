"""The index of calls: it says what the log says, page by page, and is made anew where it cannot be used."""

from __future__ import annotations

import pytest

from ringfence.core.model import Json
from ringfence.store import Conflict, Store
from ringfence.store import history as module
from ringfence.store.history import FOLDER, WIDTHS, History
from ringfence.store.searching import CallSearch

PATIENT = 600.0


def ended(number: int, **more: object) -> tuple[str, Json]:
    tenant, tool, status = ("acme" if number % 5 == 0 else "local"), f"tool_{number % 3}", "success"
    call: Json = {"id": f"call_{number:06}", "tool": tool, "kind": "tool", "server": "desk"}
    call |= {"principal": {"tenant": tenant, "agent": f"agent_{number % 2}", "person": None}}
    body: Json = {"call": call, "status": status, "reason_code": "ok", "message": "", "started_seq": 1}
    body |= {"facts": {"wall_ms": float(number), "usage": {"cpu_ms": 2.0, "peak_memory_bytes": 1024}}, **more}
    return f"call_{number:06}", body


def put(store: Store, numbers: range, **more: object) -> None:
    def work(tx: object) -> None:
        for number in numbers:
            call_id, body = ended(number, **more)
            tx.append("finished", call_id, body)  # type: ignore[attr-defined]

    store.write_sync(work)


def index(store: Store) -> History:
    return History(store.folder, store.reader)


def names(history: History, limit: int = 10_000, **wanted: object) -> list[str]:
    assert history.catch_up(PATIENT)
    return [each.call_id for each in history.find(CallSearch(**wanted), limit)]  # type: ignore[arg-type]


def test_every_call_is_found_the_newest_first_and_later_ones_as_they_end(store: Store) -> None:
    history = index(store)
    assert names(history) == []
    put(store, range(700))
    assert names(history) == [f"call_{number:06}" for number in reversed(range(700))]
    put(store, range(700, 703))
    assert names(history, 2) == ["call_000702", "call_000701"]
    (newest,) = history.find(CallSearch(), 1)
    assert (newest.wall_ms, newest.cpu_ms, newest.memory, newest.server) == (702.0, 2.0, 1024, "desk")


def test_pages_follow_each_other_both_ways_without_a_gap(store: Store) -> None:
    history = index(store)
    put(store, range(100))
    assert history.catch_up(PATIENT)
    first = history.find(CallSearch(tenant="local"), 30)
    second = history.find(CallSearch(tenant="local", before=first[-1].id), 30)
    back = history.find(CallSearch(tenant="local", after=second[0].id), 30)
    assert [each.id for each in back] == [each.id for each in first]
    assert len({each.id for each in [*first, *second]}) == 60
    assert all(each.tenant == "local" for each in [*first, *second])


def test_each_condition_holds_and_all_of_them_together(store: Store) -> None:
    history = index(store)
    put(store, range(60))
    put(store, range(60, 63), status="denied", reason_code="policy", message="Nothing deletes 100% of EVERYTHING")
    assert len(names(history, tenant="acme")) == 13
    assert len(names(history, status="denied")) == 3
    assert names(history, words="deletes everything") == names(history, status="denied")
    assert names(history, words="100%_") == [] and names(history, words="call_000061") == ["call_000061"]
    assert names(history, tool="tool_1", agent="agent_1", tenant="local", status="denied") == ["call_000061"]
    assert names(history, until=0.0) == [] and len(names(history, since=0.0)) == 63
    assert history.choices("acme")["status"] == ["denied", "success"]


def test_what_the_gateway_did_itself_is_found_when_it_is_asked_for(store: Store) -> None:
    history = index(store)
    call_id, body = ended(1)
    body["call"]["kind"] = "server"
    store.write_sync(lambda tx: tx.append("finished", call_id, body))
    assert names(history) == [] and names(history, system=True) == [call_id]


def test_spans_of_time_count_what_happened_in_them(store: Store) -> None:
    history = index(store)
    put(store, range(10))
    put(store, range(10, 13), status="denied")
    put(store, range(13, 15), status="unknown")
    assert history.catch_up(PATIENT)
    at = history.find(CallSearch(), 1)[0].at
    for width in WIDTHS:
        spans = history.buckets(None, int(at // width) - 1, width, 3)
        assert sum(each.calls for each in spans) == 15
        assert (sum(each.refused for each in spans), sum(each.failed for each in spans)) == (3, 2)
        assert max(each.slowest_ms or 0 for each in spans) == 14.0
        assert sum(each.calls for each in history.buckets("acme", int(at // width) - 1, width, 3)) == 3
        tools = history.tools(None, int(at // width) - 1, width, 10)
        assert [(each.tool, each.calls) for each in tools] == [("tool_0", 5), ("tool_1", 5), ("tool_2", 5)]
        assert sum(each.wall_ms or 0 for each in tools) == 6.0 + 7.0 + 8.0


@pytest.mark.parametrize("damage", ["gone", "no database", "other version"])
def test_an_index_that_cannot_be_used_is_made_anew(store: Store, damage: str) -> None:
    history = index(store)
    put(store, range(20))
    assert len(names(history)) == 20
    if damage == "other version":
        with history._open() as connection:
            connection.execute("PRAGMA user_version = 99")
    history.close()
    (file,) = (store.folder / FOLDER).glob("*.db")
    if damage == "gone":
        file.unlink()
    elif damage == "no database":
        file.write_bytes(b"this is no database" * 1000)
    assert len(names(index(store))) == 20


def test_two_processes_keep_one_index(store: Store) -> None:
    put(store, range(600))
    one, two = index(store), index(store)
    assert one.catch_up(0.0) is False
    assert len(names(two)) == 600 and len(names(one)) == 600


def test_what_was_pruned_is_not_listed(store: Store) -> None:
    history = index(store)
    put(store, range(50))
    assert len(names(history)) == 50
    with history._open() as connection:
        connection.execute("UPDATE calls SET id = id + 100000 WHERE call_id < 'call_000040'")  # as if those were gone
    assert names(history) == [f"call_{number:06}" for number in reversed(range(40, 50))]


def test_what_pages_ask_of_the_index_looks_at_few_calls_however_many_there_are(store: Store) -> None:
    history = index(store)
    put(store, range(50))
    assert history.catch_up(PATIENT)
    asked: list[str] = []
    with history._open() as connection:
        connection.set_trace_callback(asked.append)
    for tenant in (None, "local"):
        history.choices(tenant)
        history.unsettled(tenant)
        history.buckets(tenant, 0, 60, 3)
        history.tools(tenant, 0, 60, 3)
        for wanted in ({"tool": "tool_1"}, {"agent": "agent_1"}, {"status": "denied"}, {"effect": "unknown"}):
            history.find(CallSearch(tenant=tenant, **wanted), 5)  # type: ignore[arg-type]
    with history._open() as connection:
        connection.set_trace_callback(None)
        asked = [text for text in asked if "sqlite_master" not in text]
        plans = {text: [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")] for text in asked}
    assert len(plans) >= 16
    for text, plan in plans.items():
        assert plan and all(step.startswith(("SEARCH", "USE TEMP B-TREE")) for step in plan), (text, plan)
    # The newest come first by themselves: so many are looked at as are shown.
    with history._open() as connection:
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN SELECT * FROM calls ORDER BY id DESC LIMIT 5")]
    assert plan == ["SCAN calls"]


@pytest.mark.parametrize("by_texts", [True, False])
def test_words_are_found_wherever_they_stand(store: Store, monkeypatch: pytest.MonkeyPatch, by_texts: bool) -> None:
    if not by_texts:  # as with an SQLite that is too old for it
        monkeypatch.setattr(module, "can_have_texts", lambda connection: False)
    history = index(store)
    put(store, range(20))
    put(store, range(20, 22), message='It said "no\0where" to GRÜSSE, ja')
    two = ["call_000021", "call_000020"]
    for words in ('"no', 'where"', "rüsse", "said ja", "ja", 'aid "', "where grü"):
        assert names(history, words=words) == two, words
    for words in ("nowhere", "grüssen", "no\0thing", "* said", "OR", "words:said", "zzz", "call_0000210"):
        assert names(history, words=words) == [], words
    assert names(history, words="said", tool="tool_2", agent="agent_0", tenant="acme") == ["call_000020"]
    assert names(history, words="said", tool="tool_1") == []
    assert names(history, words="", tool="tool_2", agent="agent_0", tenant="acme") == ["call_000020"]
    (page,) = (history.find(CallSearch(words="tool"), 5),)
    older = history.find(CallSearch(words="tool", before=page[-1].id), 5)
    newer = history.find(CallSearch(words="tool", after=older[0].id), 5)
    assert [each.id for each in newer] == [each.id for each in page] and older[0].id == page[-1].id - 1


def test_a_search_for_words_looks_at_few_calls_however_many_there_are(store: Store) -> None:
    history = index(store)
    searches = [
        {"words": "nowhere"},
        {"words": "tool"},
        {"words": "desk call_000007"},
        {"words": "tool", "tool": "t_9"},
    ]

    def steps() -> list[int]:
        """Of SQLite's machine, for each search."""
        assert history.catch_up(PATIENT)
        out = []
        with history._open() as connection:
            ran = [0]

            def one_more() -> None:
                ran[0] += 1

            connection.set_progress_handler(one_more, 1)
        for search in searches:
            ran[0] = 0
            history.find(CallSearch(**search), 5)  # type: ignore[arg-type]
            out.append(ran[0])
        with history._open() as connection:
            connection.set_progress_handler(None, 0)
        return out

    put(store, range(50))
    few = steps()
    put(store, range(50, 1500))
    many = steps()
    assert max(now - before for now, before in zip(many, few, strict=True)) < 10_000, (few, many)


@pytest.mark.parametrize("happened", [True, False])
def test_a_key_is_free_again_only_if_its_call_did_nothing(store: Store, happened: bool) -> None:
    def work(tx: object) -> None:
        body = {"call": {"id": "call_1", "tool": "t", "principal": {"tenant": "local", "agent": "a"}}}
        tx.take_key("local/a/t/", "k", "sha256:1", "call_1")  # type: ignore[attr-defined]
        tx.settle_key("local/a/t/", "k", "unknown", None)  # type: ignore[attr-defined]
        tx.append("finished", "call_1", {**body, "status": "unknown", "effect": "unknown"})  # type: ignore[attr-defined]

    store.write_sync(work)
    history = index(store)
    assert history.catch_up(PATIENT) and history.unsettled(None) == history.unsettled("local") == 1
    assert history.unsettled("acme") == 0
    assert store.write_sync(lambda tx: tx.settle_unknown("call_1", happened, {"person": "dora"})) is True
    with pytest.raises(Conflict):
        store.write_sync(lambda tx: tx.settle_unknown("call_1", not happened, {"person": "dora"}))
    row = store.reader().key("local/a/t/", "k")
    assert (row is None) is not happened and (row is None or (row.state, row.outcome) == ("done", None))
    assert history.catch_up(PATIENT) and history.unsettled(None) == 0
    assert [each.call_id for each in history.find(CallSearch(effect="settled"), 5)] == ["call_1"]
