"""Ten principals in three tenants at once, ten thousand canaries: none is found where it is not its principal's."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests import gateways, tooling
from tests.console.people import Browser, token
from tests.mcp import gateway
from tests.mcp.gateway import about
from tests.telemetry.test_traces import Collector, collecting

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TENANTS = ("acme", "beta", "gamma")
AGENTS = {f"agent{number}": TENANTS[number % 3] for number in range(10)}
EACH = 1000
"""Canaries of one principal: ten thousand in all."""
CALLS = 8
CANARY = re.compile(r"CANARY-\w+-\d+-[0-9a-f]{12}")
SPY = """
import os, pathlib
print(MINE)
pathlib.Path("/tmp/mine").write_text(MINE)
for folder in ("/tmp", "/workspace", "/home/user", "/dev/shm"):
    for path in pathlib.Path(folder).rglob("*"):
        print(path, path.read_text(errors="replace") if path.is_file() else "")
print(dict(os.environ))
"""


@dataclass
class One:
    """One principal: what it carries, and all that it was told, byte for byte."""

    name: str
    token: str
    canaries: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    session: str = ""

    def some(self, place: int) -> str:
        part = EACH // CALLS
        return " ".join(self.canaries[place * part : (place + 1) * part])


@contextmanager
def place(folder: Path) -> Iterator[tuple[gateways.Served, Collector]]:
    with collecting() as (collector, otlp), tooling.serve_fixture("helpdesk_server.py") as url:
        whole = {
            "version": 1,
            "gateway": {"listen": "127.0.0.1:0", "state": "./state", "approval_wait_seconds": 60, "log": "json"},
            "telemetry": {"otlp": otlp},
            "people": {f"boss-{tenant}": {"roles": ["manager"], "tenant": tenant} for tenant in TENANTS},
            "agents": {
                **{name: {"capabilities": ["*"], "resources": ["*"], "tenant": of} for name, of in AGENTS.items()},
                "scraper": {"metrics": True},
            },
            "policy": {"preset": "permissive"},
            "servers": {"helpdesk": {"url": url, "pins": "first_use"}},
            "approvals": {"boss": {"roles": ["manager"]}},
            "capabilities": {
                "search_docs": {"server": "helpdesk", "mode": "read"},
                "create_ticket": {"server": "helpdesk", "mode": "write", "approval": "boss"},
            },
        }
        path = gateways.write(folder, json.dumps(whole))
        with gateways.serve(path) as served:
            yield served, collector


async def tell(served: gateways.Served, one: One, tool: str, arguments: Any, **meta: Any) -> Any:
    message = gateway.modern(gateway.call(tool, arguments))
    message["params"]["_meta"].update({f"ringfence/{name}": value for name, value in meta.items()})
    message["params"]["_meta"]["progressToken"] = one.name
    headers = {**gateway.modern_headers(message), "authorization": f"Bearer {one.token}"}
    async with httpx2.AsyncClient(timeout=tooling.PATIENCE) as http:
        answer = await http.post(served.url, json=message, headers=headers)
    one.told.append(answer.text)
    return gateway.read_answer(answer)["result"]


async def work(served: gateways.Served, one: One) -> None:
    """Calls of each kind, with the same idempotency keys as everybody else."""
    for number in range(4):
        found = await tell(served, one, "search_docs", {"query": one.some(number)}, idempotency_key=f"k{number}")
        assert one.some(number) in found["content"][0]["text"]
    ran = await tell(served, one, "execute_python", {"code": f"MINE = {one.some(4)!r}\n{SPY}"})
    assert about(ran)["status"] == "success", ran
    opened = await tell(served, one, "open_session", {})
    one.session = opened["structuredContent"]["session"]
    in_it = {"session": one.session, "code": f"MINE = {one.some(5)!r}\n{SPY}"}
    assert about(await tell(served, one, "execute_python", in_it))["status"] == "success"
    asked = await tell(served, one, "create_ticket", {"title": one.some(6)})
    assert about(asked)["status"] == "approval_required"
    # Once more with a wait, in which its stream has notifications.
    waited = await tell(served, one, "create_ticket", {"title": one.some(7)}, wait_seconds=3)
    assert about(waited)["status"] == "approval_required" and "notifications/progress" in one.told[-1]


async def pry(served: gateways.Served, one: One, others: list[One]) -> None:
    """What others have, by its name."""
    await tell(served, one, "list_sessions", {})
    for other in others:
        taken = await tell(served, one, "execute_python", {"session": other.session, "code": "print(MINE)"})
        assert about(taken)["status"] != "success", (one.name, other.name)


def strangers(text: str, mine: set[str]) -> set[str]:
    return set(CANARY.findall(text)) - mine


def scraped(served: gateways.Served, token: str) -> str:
    answer = httpx2.get(served.url.replace("/mcp", "/metrics"), headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    return answer.text


async def test_no_canary_is_found_where_it_is_not_its_principals(tmp_path: Path) -> None:
    with place(tmp_path) as (served, collector):
        every = [One(name, token(served, "agent", name)["token"]) for name in AGENTS]
        for one in every:
            one.canaries = [f"CANARY-{one.name}-{number}-{secrets.token_hex(6)}" for number in range(EACH)]
        assert sum(len(set(one.canaries)) for one in every) == 10_000
        scraper = token(served, "agent", "scraper")["token"]
        async with anyio.create_task_group() as group:
            for one in every:
                group.start_soon(work, served, one)
        async with anyio.create_task_group() as group:
            for number, one in enumerate(every):
                group.start_soon(pry, served, one, [every[number - 1], every[number - 3]])

        # A person of each tenant, in the console.
        seen: dict[str, str] = {}
        for tenant in TENANTS:
            browser = Browser(served.url)
            assert browser.log_in(token(served, "person", f"boss-{tenant}")["token"]).status == 303
            pages = [browser.get(f"/console/{page}").text for page in ("approvals", "history", "live", "sessions")]
            questions = sorted(set(re.findall(r'/console/approvals/(apr_\w+)"', pages[0])))
            pages += [browser.get(f"/console/approvals/{each}").text for each in questions]
            seen[tenant] = "\n".join(pages)

        public = {
            "metrics": scraped(served, scraper),
            "log of the gateway": served.started.output(),
            "records": "\n".join(map(json.dumps, gateways.records(served.state))),
        }
    public["traces"] = "\n".join(map(str, collector.spans))
    assert collector.spans and "calls_total" in public["metrics"]

    for one in every:
        told = "\n".join(one.told)
        assert strangers(told, set(one.canaries)) == set(), one.name
        assert len(set(CANARY.findall(told))) >= 6 * EACH // CALLS, "its own came back to it"
    for tenant, shown in seen.items():
        theirs = {canary for one in every if AGENTS[one.name] == tenant for canary in one.canaries}
        assert set(CANARY.findall(shown)) and strangers(shown, theirs) == set(), tenant
    assert {name: len(set(CANARY.findall(text))) for name, text in public.items()} == dict.fromkeys(public, 0)
