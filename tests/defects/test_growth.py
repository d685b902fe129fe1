"""A defect that was proven in another gateway, and that this one must not have: growing, and mixing callers.

The number in a test's name is the number of the defect.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence import config
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import canonical
from ringfence.core.model import Call, Outcome, Principal
from ringfence.upstream.pool import MAX_PER_SERVER
from tests import gateways

pytestmark = pytest.mark.anyio

CALLS, PRINCIPALS, AT_ONCE = 5000, 100, 20
MAX_ENTRIES = 2100
"""More than any of our bounds that so many calls can reach, and much less than the number of calls."""
CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
servers:
  echo:    {url: "@URL@", pins: first_use}
  hostile: {command: @HOSTILE@, pins: first_use}
capabilities:
  echo:    {server: echo, mode: read, rate: {per_minute: 1000000}}
  limited: {server: echo, tool: echo, mode: read, rate: {per_minute: 1}}
  written: {server: hostile, tool: counter, mode: write}
  counter: {server: hostile, mode: read}
policy:
  preset: permissive
  rules: [{id: r, action: audit, argument_patterns: {text: "^x"}}]
"""


@pytest.fixture
def path(echo_url: str, tmp_path: Path) -> Path:
    hostile = gateways.server("hostile_server.py")
    return gateways.write(tmp_path, CONFIG.replace("@URL@", echo_url).replace("@HOSTILE@", hostile))


def asking(agent: str, tool: str, arguments: dict[str, Any], **more: Any) -> Call:
    return Call(canonical.new_id("call"), Principal(agent), tool, arguments, **more)


async def asked(app: App, agent: str, tool: str, arguments: dict[str, Any], **more: Any) -> Outcome:
    return await app.handle(asking(agent, tool, arguments, **more), UNATTENDED)


async def test_defect_20_nothing_grows_with_the_number_of_calls(path: Path) -> None:
    async with App.open(config.load(path)) as app:
        await busy(app, 0, CALLS // 10)
        before = resident()
        await busy(app, CALLS // 10, CALLS)
        gc.collect()
        grown = resident() - before
        sizes = dict(containers(app))
        assert max(sizes.values()) <= MAX_ENTRIES, sorted(sizes.items(), key=lambda item: -item[1])[:5]
        assert len(app.pool._held) <= MAX_PER_SERVER + 1
        assert not app.front.paused._waiting
        assert app.store.reader().running() == []
    assert grown < 40_000_000, f"{grown} bytes more after {CALLS} calls"
    assert len(gateways.finished(path.parent / "state")) == CALLS


async def busy(app: App, first: int, last: int) -> None:
    """Every call has arguments of its own; some fail, some name a tool of their own, some come from a new caller."""
    numbers = iter(range(first, last))

    async def worker() -> None:
        for number in numbers:
            agent = f"agent-{number % PRINCIPALS}" if number % 25 == 0 else "agent"
            if number % 2:
                outcome = await asked(app, agent, "echo", {"text": f"call {number}"})
                assert outcome.ok, outcome
            elif number % 4:
                await asked(app, agent, "echo", {"text": number})
            else:
                await asked(app, agent, f"tool-{number}", {})

    async with anyio.create_task_group() as group:
        for _ in range(AT_ONCE):
            group.start_soon(worker)


def resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def containers(root: object) -> Iterator[tuple[str, int]]:
    """The size of every container that can be reached from an object through our own types."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("app", root)]
    while waiting:
        place, item = waiting.pop()
        if id(item) in seen or isinstance(item, str | bytes | int | float | type):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping | list | tuple | set | frozenset | deque):
            yield place, len(item)
            inner = list(item.items()) if isinstance(item, Mapping) else enumerate(item)
            waiting += [(f"{place}[{key!r:.40}]", value) for key, value in inner]
        elif is_dataclass(item) or type(item).__module__.startswith(("ringfence", "mcp")):
            names = {name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())}
            names |= set(getattr(item, "__dict__", ()))
            waiting += [(f"{place}.{name}", getattr(item, name, None)) for name in names if name != "__weakref__"]


def on_disk(state: Path) -> int:
    return sum(path.stat().st_size for path in state.rglob("*") if path.is_file())


async def test_a_call_leaves_at_most_two_and_a_half_kilobytes(path: Path) -> None:
    sizes = []
    for count in (1, 400):
        async with App.open(config.load(path)) as app:
            for number in range(count):
                assert (await asked(app, "agent", "echo", {"text": f"call {number}"})).ok
        sizes.append(on_disk(path.parent / "state"))
    each = (sizes[1] - sizes[0]) / 400
    assert each <= 2500, f"{each} bytes"
    ended = gateways.finished(path.parent / "state")[-1]
    assert (ended["call"]["tool"], ended["status"], ended["contract"]["name"]) == ("echo", "success", "echo")
    assert ended["facts"]["isolation"]["level"]


async def test_defect_20_callers_share_nothing(path: Path) -> None:
    async with App.open(config.load(path)) as app:
        # A connection, and so a server's memory, belongs to one caller.
        assert [(await asked(app, "a", "counter", {})).text for _ in range(3)] == ["1", "2", "3"]
        assert (await asked(app, "b", "counter", {})).text == "1"

        # So does a rate ...
        limits = [(await asked(app, agent, "limited", {"text": "x"})).reason_code for agent in ("a", "a", "b")]
        assert limits == ["ok", "throttled", "ok"]

        # ... and an idempotency key: another caller's neither conflicts with it nor sees its outcome.
        first = await asked(app, "a", "written", {}, idempotency_key="k")
        again = await asked(app, "a", "written", {}, idempotency_key="k")
        other = await asked(app, "b", "written", {}, idempotency_key="k")
        assert (first.text, again.text, other.text) == ("4", "4", "2")
        told = {key: held.principal.key for key, held in app.pool._held.items()}
        assert all(key[1] == principal for key, principal in told.items())
