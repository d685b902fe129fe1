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
from tests.mcp.gateway import ACCEPT, HANDSHAKE, about
from tests.telemetry.test_traces import Collector, collecting

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TENANTS = ("acme", "beta", "gamma")
AGENTS = {f"agent{number}": TENANTS[number % 3] for number in range(10)}
EACH = 1000
"""Canaries of one principal: ten thousand in all."""
ERAS = ("handshake", "modern")
"""Of the servers whose records are watched, and of the clients that watch them."""
CALLS = 8
CANARY = re.compile(r"CANARY-\w+-\d+-[0-9a-f]{12}")
RECORD = re.compile(r"RECORD-\w+-[0-9a-f]{12}")
"""What one principal watches. Addresses of resources are on record by design; elsewhere they are its own."""
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
    heard: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ERAS, ""))
    """What its standing streams carried, by the era of the client."""
    watched: str = ""
    """The name of the records that it alone watches."""
    subscribed: int = 0
    ended: set[str] = field(default_factory=set)
    """The eras whose stream was read to its end."""

    def some(self, place: int) -> str:
        part = EACH // CALLS
        return " ".join(self.canaries[place * part : (place + 1) * part])

    def record(self, era: str) -> str:
        """What it alone watches at the server of this era."""
        return f"test://template/{era}-{self.watched}/data"

    @property
    def note(self) -> str:
        """A line of the log that is for its clients alone."""
        return self.canaries[-1]

    @property
    def is_listening(self) -> bool:
        agreed = all(self.record(era) in self.heard["modern"] for era in ERAS)
        return agreed and self.subscribed == len(ERAS)

    @property
    def has_heard(self) -> bool:
        """Whether both its streams told of both its records, and that of a 2025-11-25 client what was logged."""
        told = all(self.updates(era, at) for era in ERAS for at in ERAS)
        return told and self.note in self.heard["handshake"]

    def updates(self, era: str, at: str) -> int:
        """How often a stream said that the record at one server was changed."""
        told = [json.loads(line[5:]) for line in self.heard[era].splitlines() if line.startswith("data:")]
        updated = [each["params"]["uri"] for each in told if each.get("method") == "notifications/resources/updated"]
        return updated.count(self.record(at))


@contextmanager
def place(folder: Path) -> Iterator[tuple[gateways.Served, Collector]]:
    with (
        collecting() as (collector, otlp),
        tooling.serve_fixture("helpdesk_server.py") as url,
        tooling.serve_fixture("records_server.py", "--era", "handshake") as old,
        tooling.serve_fixture("records_server.py", "--era", "modern") as new,
    ):
        records = {
            era: {"url": at, "pins": "first_use", "resources": [f"test://template/{era}-*"]}
            for era, at in zip(ERAS, (old, new), strict=True)
        }
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
            "servers": {"helpdesk": {"url": url, "pins": "first_use"}, **records},
            "approvals": {"boss": {"roles": ["manager"]}},
            "capabilities": {
                "search_docs": {"server": "helpdesk", "mode": "read"},
                "create_ticket": {"server": "helpdesk", "mode": "write", "approval": "boss"},
                **{f"change_{era}": {"server": era, "tool": "change_record", "mode": "write"} for era in ERAS},
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


async def follow(one: One, era: str, answer: httpx2.Response) -> None:
    """Read a standing stream to its end. That of a 2026-07-28 client has none but the gateway's."""
    assert answer.status_code == 200, await answer.aread()
    try:
        async for piece in answer.aiter_text():
            one.heard[era] += piece
    except (httpx2.RemoteProtocolError, httpx2.ReadError):
        assert era == "modern"
    one.ended.add(era)


async def listen_old(served: gateways.Served, one: One, done: anyio.Event) -> None:
    """A 2025-11-25 client: resources/subscribe, and the standing stream."""
    bearer = {"authorization": f"Bearer {one.token}"}
    async with httpx2.AsyncClient(timeout=tooling.PATIENCE, headers={**ACCEPT, **bearer}) as http:
        opened = await http.post(served.url, json=gateway.initialize())
        http.headers |= {"mcp-session-id": opened.headers["mcp-session-id"], "mcp-protocol-version": HANDSHAKE}

        async def asked(method: str, params: Any) -> None:
            answer = await http.post(served.url, json=gateway.request(method, params))
            one.told.append(answer.text)
            assert "result" in gateway.read_answer(answer), answer.text

        await http.post(served.url, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        await asked("logging/setLevel", {"level": "debug"})
        async with http.stream("GET", served.url) as answer, anyio.create_task_group() as group:
            group.start_soon(follow, one, "handshake", answer)
            for era in ERAS:
                await asked("resources/subscribe", {"uri": one.record(era)})
                one.subscribed += 1
            await done.wait()
            assert (await http.delete(served.url)).status_code == 200


async def listen_new(served: gateways.Served, one: One) -> None:
    """A 2026-07-28 client: subscriptions/listen."""
    lists = dict.fromkeys(("toolsListChanged", "promptsListChanged", "resourcesListChanged"), True)
    wanted = {**lists, "resourceSubscriptions": [one.record(era) for era in ERAS]}
    message = gateway.modern(gateway.request("subscriptions/listen", {"notifications": wanted}))
    headers = {**gateway.modern_headers(message), "authorization": f"Bearer {one.token}"}
    async with (
        httpx2.AsyncClient(timeout=tooling.PATIENCE) as http,
        http.stream("POST", served.url, json=message, headers=headers) as answer,
    ):
        await follow(one, "modern", answer)


async def change(served: gateways.Served, one: One) -> None:
    for era in ERAS:
        changed = await tell(served, one, f"change_{era}", {"uri": one.record(era), "note": one.note})
        assert about(changed)["status"] == "success", changed


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
    return {*CANARY.findall(text), *RECORD.findall(text)} - mine


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
        for one in every:
            one.watched = f"RECORD-{one.name}-{secrets.token_hex(6)}"
        scraper = token(served, "agent", "scraper")["token"]
        done = anyio.Event()
        async with anyio.create_task_group() as streams:
            for one in every:
                streams.start_soon(listen_old, served, one, done)
                streams.start_soon(listen_new, served, one)
            await tooling.until(lambda: all(one.is_listening for one in every))
            async with anyio.create_task_group() as group:
                for one in every:
                    group.start_soon(work, served, one)
                    group.start_soon(change, served, one)
            await tooling.until(lambda: all(one.has_heard for one in every))
            async with anyio.create_task_group() as group:
                for number, one in enumerate(every):
                    group.start_soon(pry, served, one, [every[number - 1], every[number - 3]])
                    group.start_soon(change, served, one)

            # A person of each tenant, in the console.
            seen: dict[str, str] = {}
            for tenant in TENANTS:
                browser = Browser(served.url)
                assert browser.log_in(token(served, "person", f"boss-{tenant}")["token"]).status == 303
                pages = [browser.get(f"/console/{page}").text for page in ("approvals", "history", "live", "sessions")]
                questions = sorted(set(re.findall(r'/console/approvals/(apr_\w+)"', pages[0])))
                pages += [browser.get(f"/console/approvals/{each}").text for each in questions]
                seen[tenant] = "\n".join(pages)

            metrics = scraped(served, scraper)
            done.set()
            await tooling.until(lambda: all("handshake" in one.ended for one in every))
            await anyio.to_thread.run_sync(served.started.stop)

        public = {
            "metrics": metrics,
            "log of the gateway": served.started.output(),
            "records": "\n".join(map(json.dumps, gateways.records(served.state))),
        }
    public["traces"] = "\n".join(map(str, collector.spans))
    assert collector.spans and "calls_total" in public["metrics"]

    for one in every:
        told, mine = "\n".join(one.told), {*one.canaries, one.watched}
        assert strangers(told, mine) == set(), one.name
        assert len(set(CANARY.findall(told))) >= 6 * EACH // CALLS, "its own came back to it"
        assert one.ended == {*ERAS}
        for era, heard in one.heard.items():
            assert strangers(heard, mine) == set(), (one.name, era)
            assert [one.updates(era, at) for at in ERAS] == [2, 2], (one.name, era)
    for tenant, shown in seen.items():
        theirs = {each for one in every if AGENTS[one.name] == tenant for each in (*one.canaries, one.watched)}
        assert set(CANARY.findall(shown)) and strangers(shown, theirs) == set(), tenant
    assert {name: len(set(CANARY.findall(text))) for name, text in public.items()} == dict.fromkeys(public, 0)
    assert RECORD.findall(public["metrics"]) == RECORD.findall(public["traces"]) == []
