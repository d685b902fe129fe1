"""A gateway as its users run it, raw messages to speak to it, and its records to look at afterwards."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import mcp_types as types
from mcp import Client, StdioServerParameters

from ringfence.audit.chain import Record
from ringfence.store import Reader
from tests import tooling

JSON = dict[str, Any]
HANDSHAKE, MODERN = "2025-11-25", "2026-07-28"
ERAS = ("legacy", MODERN)
"""What `mcp.Client` calls the two."""
_PREFIX = "io.modelcontextprotocol/"
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


def configuration(servers: Mapping[str, JSON], capabilities: Mapping[str, JSON], **more: Any) -> JSON:
    """A whole ringfence.yaml as data; JSON is YAML, so it is written as it is."""
    return {
        "version": 1,
        "environment": "development",
        "gateway": {"state": "./state", "approval_wait_seconds": 0.2, **more.pop("gateway", {})},
        "policy": more.pop("policy", {"preset": "permissive"}),
        "servers": servers,
        "capabilities": capabilities,
        **more,
    }


def tools(server: str, *names: str, **more: Any) -> dict[str, JSON]:
    """A read contract for each tool of a server, under its own name."""
    return {name: {"transport": "mcp", "server": server, "mode": "read", **more} for name in names}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ringfence.cli.main", *(str(word) for word in arguments)]


@dataclass(slots=True)
class Gateway:
    """A running gateway, or the files of one that a client starts itself."""

    config: Path
    started: tooling.Started | None = None
    url: str = ""
    _reader: Reader | None = field(default=None, repr=False)

    @property
    def state(self) -> Path:
        return self.config.parent / "state"

    @property
    def port(self) -> int:
        return int(self.url.removesuffix("/mcp").rpartition(":")[2])

    def log(self) -> str:
        assert self.started is not None
        return self.started.output()

    def healthy(self) -> bool:
        answer = httpx2.get(self.url.replace("/mcp", "/healthz"), timeout=60, verify=False)
        return answer.status_code == 200 and answer.json() == {"status": "ok"}

    def stdio(self) -> StdioServerParameters:
        """How a client starts this gateway on its own pipes."""
        first, *rest = command("serve", "--stdio", "--config", self.config)
        # The tests have a home of their own, and the keys belong into it.
        return StdioServerParameters(command=first, args=rest, env=dict(os.environ))

    def records(self, **wanted: Any) -> list[Record]:
        if self._reader is None:
            self._reader = Reader.open(self.state)
        return list(self._reader.records(**wanted))

    def finished(self, call_id: str) -> JSON:
        """The one *finished* record of a call."""
        found = [record.body for record in self.records(call_id=call_id, kind="finished")]
        assert len(found) == 1, f"{len(found)} finished records of {call_id}"
        return found[0]

    def last_finished(self, tool: str, wait: float = tooling.PATIENCE) -> JSON:
        """How the newest call of a tool ended, as soon as it has."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            for record in self.records(newest_first=True, limit=200):
                if record.body.get("call", {}).get("tool") != tool:
                    continue
                if record.kind == "finished":
                    return record.body
                break
            time.sleep(0.05)
        raise AssertionError(f"no call of {tool} has ended")

    def client(self, mode: str, **options: Any) -> Client:
        return Client(self.url, mode=mode, cache=None, **options)


def write(folder: Path, config: JSON | str) -> Gateway:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ringfence.yaml"
    path.write_text(config if isinstance(config, str) else json.dumps(config, indent=1))
    return Gateway(path)


@contextmanager
def serve(folder: Path, config: JSON | str, *options: str) -> Iterator[Gateway]:
    """Run `ringfence serve` on a free port while the block lasts."""
    gateway = write(folder, config)
    with tooling.start_process(command("-v", "serve", "--config", gateway.config, "--port", "0", *options)) as started:
        said = started.wait_for("Paste into")
        found = re.search(r" at (http://\S+/mcp):", said)
        assert found, said
        gateway.started, gateway.url = started, found[1]
        yield gateway


# ── raw messages ──────────────────────────────────────────────────────────────────────────────────


def envelope(capabilities: JSON | None = None) -> JSON:
    return {
        f"{_PREFIX}protocolVersion": MODERN,
        f"{_PREFIX}clientInfo": {"name": "raw", "version": "0"},
        f"{_PREFIX}clientCapabilities": capabilities or {},
    }


def request(method: str, params: Any = None, ident: Any = 1) -> JSON:
    message: JSON = {"jsonrpc": "2.0", "id": ident, "method": method}
    if params is not None:
        message["params"] = params
    return message


def call(tool: Any, arguments: Any = None, ident: Any = 1) -> JSON:
    return request("tools/call", {"name": tool, "arguments": {} if arguments is None else arguments}, ident)


def initialize(capabilities: JSON | None = None) -> JSON:
    info = {"name": "raw", "version": "0"}
    return request("initialize", {"protocolVersion": HANDSHAKE, "capabilities": capabilities or {}, "clientInfo": info})


def modern(message: JSON, capabilities: JSON | None = None) -> JSON:
    """The same message with the envelope of 2026-07-28."""
    params = message.get("params") or {}
    return {**message, "params": {**params, "_meta": {**params.get("_meta", {}), **envelope(capabilities)}}}


def modern_headers(message: JSON) -> dict[str, str]:
    headers = {**ACCEPT, "mcp-protocol-version": MODERN, "mcp-method": message["method"]}
    params = message.get("params") or {}
    named = params.get("uri" if message["method"] == "resources/read" else "name")
    return {**headers, "mcp-name": named} if isinstance(named, str) else headers


def last_event(text: str) -> JSON:
    """The final message of a stream of events."""
    return json.loads([line for line in text.splitlines() if line.startswith("data:")][-1][5:])


def read_answer(answer: httpx2.Response) -> JSON:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return last_event(answer.text)
    return answer.json()


class RawHttp:
    """Posts bytes as they are given. Of the handshake era once `open` was called."""

    def __init__(self, gateway: Gateway) -> None:
        self.url = gateway.url
        self.http = httpx2.Client(timeout=120, verify=False)
        self.session: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()

    def open(self, capabilities: JSON | None = None) -> RawHttp:
        answer = self.http.post(self.url, json=initialize(capabilities), headers=ACCEPT)
        assert answer.status_code == 200, answer.text
        self.session = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": HANDSHAKE}
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert self.post(note).status_code == 202
        return self

    def post(self, body: JSON | list[Any] | bytes, **headers: str) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(self.url, content=data, headers={**ACCEPT, **self.session, **headers})

    def result(self, message: JSON) -> JSON:
        answer = self.post(message)
        assert answer.status_code == 200, answer.text
        return read_answer(answer)["result"]

    def modern(self, message: JSON, capabilities: JSON | None = None) -> httpx2.Response:
        whole = modern(message, capabilities)
        return self.http.post(self.url, content=json.dumps(whole).encode(), headers=modern_headers(whole))


# ── results ───────────────────────────────────────────────────────────────────────────────────────


def about(result: JSON | types.CallToolResult) -> JSON:
    """Status, reason code and call id of a result."""
    meta = result.get("_meta") if isinstance(result, dict) else result.meta
    assert meta, result
    return meta["ringfence/outcome"]


def facts(result: JSON | types.CallToolResult) -> JSON:
    meta = result.get("_meta") if isinstance(result, dict) else result.meta
    assert meta, result
    return meta["ringfence/facts"]


def text_of(result: JSON | types.CallToolResult) -> str:
    if isinstance(result, dict):
        return "".join(block.get("text", "") for block in result["content"])
    return "".join(block.text for block in result.content if isinstance(block, types.TextContent))
