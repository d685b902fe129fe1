"""Handing records to a hook: all of them, in order, from where it was, and without anybody waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core.errors import StoreError
from ringfence.core.model import Json
from ringfence.hooks.delivery import MAX_TOGETHER, HookDelivery, HookFailed
from ringfence.hooks.position import FOLDER
from ringfence.store import Store
from tests.tooling import until

pytestmark = pytest.mark.anyio


class Told:
    """A hook that remembers what it was given, and does what a test wants."""

    def __init__(self, *wanted: Any) -> None:
        self.given: list[str] = []
        self.batches: list[int] = []
        self.wanted = list(wanted)
        self.closed = False

    async def take(self, records: Sequence[Json]) -> None:
        wish = self.wanted.pop(0) if self.wanted else None
        if wish is not None and wish.taken == 0:
            raise wish
        taken = records if wish is None else records[: wish.taken]
        self.batches.append(len(taken))
        self.given += [record["record"]["call_id"] for record in taken]
        if wish is not None:
            raise wish

    async def close(self) -> None:
        self.closed = True


class Standing(Told):
    """A hook that never returns."""

    async def take(self, records: Sequence[Json]) -> None:
        await anyio.sleep_forever()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "state", load_or_create(tmp_path / "keys"))
    yield opened
    opened.close()


async def end(store: Store, *calls: str) -> None:
    for call in calls:
        await store.write(lambda tx, call=call: tx.append("finished", call, {"status": "success"}))  # type: ignore[misc]


@asynccontextmanager
async def handing(store: Store, hook: Told, name: str = "tally") -> Any:
    delivery = HookDelivery(name, hook, store, pauses=(0.01,))
    delivery.begin()
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.run)
        yield delivery
        group.cancel_scope.cancel()


def kinds(store: Store) -> list[str]:
    return [record.kind for record in store.reader().records() if record.kind.startswith("hook_")]


async def test_a_new_hook_gets_what_ends_from_then_on_in_order(store: Store) -> None:
    hook = Told()
    await end(store, "before")
    async with handing(store, hook):
        await end(store, *(f"call_{number}" for number in range(250)))
        await until(lambda: len(hook.given) >= 250)
    assert hook.given == [f"call_{number}" for number in range(250)]
    assert max(hook.batches) <= MAX_TOGETHER
    assert hook.closed


async def test_it_goes_on_from_where_it_was(store: Store) -> None:
    first, second = Told(), Told()
    async with handing(store, first):
        await end(store, "one")
        await until(lambda: first.given)
    await end(store, "two", "three")
    async with handing(store, second):
        await until(lambda: len(second.given) == 2)
    assert (first.given, second.given) == (["one"], ["two", "three"])


async def test_what_was_not_taken_is_given_again_and_what_was_is_not(store: Store) -> None:
    hook = Told(HookFailed("it answered 500"), HookFailed("it raised an exception", taken=1))
    async with handing(store, hook) as delivery:
        await store.write(lambda tx: [tx.append("finished", each, {}) for each in ("one", "two", "three")])
        await until(lambda: len(hook.given) == 3)
        await until(lambda: "hook_recovered" in kinds(store))
        assert (delivery.counts.taken, delivery.counts.failures, delivery.counts.failing) == (3, 2, None)
    assert hook.given == ["one", "two", "three"]
    assert kinds(store) == ["hook_failing", "hook_recovered"]
    (failing,) = store.reader().records(kind="hook_failing")
    assert {name: failing.body[name] for name in ("hook", "why")} == {"hook": "tally", "why": "it answered 500"}


async def test_a_hook_that_stands_still_holds_up_no_record_and_loses_none(store: Store) -> None:
    after = Told()
    async with handing(store, Standing()) as delivery:
        await end(store, *(f"call_{number}" for number in range(150)))
        assert delivery.behind() == 150
    assert sum(record.kind == "finished" for record in store.reader().records()) == 150
    async with handing(store, after) as delivery:
        await until(lambda: len(after.given) == 150)
        await until(lambda: delivery.behind() == 0)


async def test_of_two_with_one_state_one_hands_over_and_the_other_takes_its_place(store: Store) -> None:
    first, second = Told(), Told()
    async with handing(store, second):  # the first has the lock while the second waits
        pass
    one = HookDelivery("tally", first, store, pauses=(0.01,))
    other = HookDelivery("tally", second, store, pauses=(0.01,))
    one.begin()
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def run_first() -> None:
            with scope:
                await one.run()

        group.start_soon(run_first)
        group.start_soon(other.run)
        await end(store, "one")
        await until(lambda: first.given)
        assert second.given == []
        scope.cancel()
        await end(store, "two")
        await until(lambda: second.given)
        group.cancel_scope.cancel()
    assert (first.given, second.given) == (["one"], ["two"])


async def test_a_log_that_is_shorter_than_it_was_is_given_again(store: Store) -> None:
    hook = Told()
    await end(store, "one", "two")
    (store.folder / FOLDER).mkdir(mode=0o700)
    (store.folder / FOLDER / "tally.json").write_text('{"after": 999999}')
    async with handing(store, hook):
        await until(lambda: len(hook.given) == 2)


async def test_a_place_that_cannot_be_read_is_not_guessed(store: Store) -> None:
    (store.folder / FOLDER).mkdir(mode=0o700)
    (store.folder / FOLDER / "tally.json").write_text('{"after": "never"}')
    with pytest.raises(StoreError, match=r"tally.json does not say how far hook tally has come; remove it"):
        HookDelivery("tally", Told(), store).begin()


async def test_a_hook_that_cannot_begin_says_so_until_it_can(store: Store) -> None:
    place = store.folder / FOLDER
    place.mkdir(mode=0o700)
    (place / "tally.json").write_text("damaged")
    hook = Told()
    delivery = HookDelivery("tally", hook, store)
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.run)
        await until(lambda: delivery.counts.failures)
        assert "remove it to begin from now" in str(delivery.counts.failing)
        (place / "tally.json").unlink()
        await until(lambda: delivery.counts.failing is None)
        await end(store, "one")
        await until(lambda: hook.given == ["one"])
        group.cancel_scope.cancel()
    assert kinds(store) == ["hook_failing", "hook_recovered"]


async def test_a_fault_of_ours_is_a_failure_of_the_hook_and_ends_nothing(store: Store) -> None:
    hook = Told()
    faults = [OSError(24, "Too many open files"), KeyError("x")]
    take = hook.take

    async def faulty(records: Sequence[Json]) -> None:
        if faults:
            raise faults.pop(0)
        await take(records)

    hook.take = faulty  # type: ignore[method-assign]
    async with handing(store, hook) as delivery:
        await end(store, "one")
        await until(lambda: hook.given == ["one"])
        await until(lambda: kinds(store) == ["hook_failing", "hook_recovered"])
        assert delivery.counts.failures == 2


async def test_two_hooks_do_not_wait_for_each_other(store: Store) -> None:
    hook = Told()
    async with handing(store, Standing(), "slow"), handing(store, hook, "quick"):
        await end(store, "one")
        await until(lambda: hook.given)
