"""What a server says reaches the client unchanged, and what a client says of itself reaches no server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import HANDSHAKE, JSON, MODERN, Gateway, RawHttp, about, text_of
from tests.mcp.mirror_server import EXOTIC, FAILED, HINTS, SCHEMA, definitions

UPSTREAMS = ("handshake", "modern")
OURS = ("ringfence/", "io.modelcontextprotocol/")
ENVELOPE = ("resultType", "ttlMs", "cacheScope")
TOKEN = "Bearer inbound-credential"

both = pytest.mark.parametrize("revision", [HANDSHAKE, MODERN])
upstreams = pytest.mark.parametrize("upstream", UPSTREAMS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, hostile_command: list[str]) -> Iterator[Gateway]:
    """Mirrors of both revisions under mild and wild hints, and the hostile server over stdio."""
    servers: dict[str, JSON] = {"hostile": {"command": hostile_command, "pins": "first_use"}}
    contracts: dict[str, JSON] = {}
    for tool in ("exotic", "error"):
        contracts[f"hostile_{tool}"] = {"transport": "mcp", "server": "hostile", "tool": tool, "mode": "read"}
    with ExitStack() as stack:
        for era, hints in (("handshake", "mild"), ("modern", "mild"), ("modern", "wild")):
            port = tooling.free_port()
            script = Path(__file__).with_name("mirror_server.py")
            stack.enter_context(
                tooling.serve([sys.executable, script, "--port", str(port), "--era", era, "--hints", hints], port)
            )
            name = era if hints == "mild" else hints
            servers[name] = {"url": f"http://127.0.0.1:{port}/mcp", "pins": "first_use"}
            for tool in ("exotic", "failed", "seen"):
                contracts[f"{name}_{tool}"] = {"transport": "mcp", "server": name, "tool": tool, "mode": "read"}
            contracts[f"{name}_seen"]["meta"] = ["vendor.example/trace"]
        for name, server in (("mild_write", "modern"), ("wild_write", "wild")):
            contracts[name] = {"transport": "mcp", "server": server, "tool": "exotic", "mode": "write"}
        for name, server in (("mild_risky", "modern"), ("wild_risky", "wild")):
            contracts[name] = {"transport": "mcp", "server": server, "tool": "exotic", "mode": "high_risk"}
        config = gateway.configuration(servers, contracts, policy={"preset": "standard"})
        yield stack.enter_context(gateway.serve(tmp_path_factory.mktemp("fidelity"), config))


def ask(served: Gateway, revision: str, message: JSON, **headers: str) -> JSON:
    """The result of one raw request by a client of that revision, with nothing read by any SDK."""
    with RawHttp(served) as raw:
        if revision == HANDSHAKE:
            answer = raw.open().post(message, **headers)
        else:
            raw.http.headers.update(headers)
            answer = raw.modern(message)
    assert answer.status_code == 200, answer.text
    return gateway.read_answer(answer)["result"]


def stripped(result: JSON) -> JSON:
    """The result without what the gateway and the revision put around it."""
    meta = {key: value for key, value in result.get("_meta", {}).items() if not key.startswith(OURS)}
    rest = {key: value for key, value in result.items() if key not in (*ENVELOPE, "_meta")}
    return {**rest, "_meta": meta} if meta else rest


@both
@upstreams
def test_definitions_pass_unchanged(served: Gateway, revision: str, upstream: str) -> None:
    listed = {tool["name"]: tool for tool in ask(served, revision, gateway.request("tools/list"))["tools"]}
    for definition in definitions(HINTS["mild"]):
        name = f"{upstream}_{definition['name']}"
        assert listed[name] == {**definition, "name": name}
        assert listed[name]["inputSchema"] == SCHEMA


@both
@upstreams
def test_results_pass_unchanged(served: Gateway, revision: str, upstream: str) -> None:
    result = ask(served, revision, gateway.call(f"{upstream}_exotic", {"value": None}))
    assert stripped(result) == EXOTIC
    assert about(result)["status"] == "success"


@both
@upstreams
def test_failures_keep_their_structured_content(served: Gateway, revision: str, upstream: str) -> None:
    result = ask(served, revision, gateway.call(f"{upstream}_failed"))
    assert stripped(result) == FAILED
    assert (about(result)["status"], about(result)["reason_code"]) == ("failed", "tool_error")


@both
def test_results_of_a_stdio_server_pass_unchanged(served: Gateway, revision: str) -> None:
    strange = {"type": "hologram", "data": {"deep": [None, 2**70, -0.5, "\u2028"]}, "annotations": None}
    assert stripped(ask(served, revision, gateway.call("hostile_exotic"))) == {
        "content": [strange, {"type": "text", "text": "known"}],
        "x-unknown": [1, None, {"a": 2**64}],
        "structuredContent": {},
    }
    assert stripped(ask(served, revision, gateway.call("hostile_error"))) == {
        "content": [{"type": "text", "text": "it went wrong"}],
        "isError": True,
        "structuredContent": {"code": 42, "why": None},
        "x-unknown": {"kept": True},
        "_meta": {"vendor/x": 1},
    }


def seen_by(served: Gateway, revision: str, upstream: str, message: JSON, **headers: str) -> Any:
    return json.loads(text_of(ask(served, revision, message, **headers)))


@both
@upstreams
def test_arguments_pass_unchanged_and_of_meta_only_what_the_contract_names(
    served: Gateway, revision: str, upstream: str
) -> None:
    arguments = {"value": None, "big": 2**70, "any": [{"": -0.5}, "\u2028", []]}
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    message = gateway.call(f"{upstream}_seen", arguments)
    message["params"]["_meta"] = {
        "vendor.example/trace": {"id": None}, "vendor.example/other": "smuggled", "ringfence/session": "mine",
        "progressToken": "smuggled", "traceparent": parent, "baggage": "smuggled\n",
        "io.modelcontextprotocol/logLevel": "smuggled", "io.modelcontextprotocol/more": "smuggled",
    }  # fmt: skip
    message["params"]["more"] = "smuggled"
    seen = seen_by(served, revision, upstream, message)
    params, meta = seen["params"], dict(seen["params"]["_meta"])
    assert params["name"] == "seen" and params["arguments"] == arguments
    assert (meta.pop("vendor.example/trace"), meta.pop("traceparent")) == ({"id": None}, parent)
    assert isinstance(meta.pop("progressToken"), int)
    hop = {key.removeprefix("io.modelcontextprotocol/") for key in meta}
    # A client of before listens to every level until it says otherwise.
    level = {"logLevel"} if revision == HANDSHAKE else set()
    assert hop == ({"protocolVersion", "clientInfo", "clientCapabilities", *level} if upstream == "modern" else set())
    assert "smuggled" not in json.dumps(seen)


@upstreams
def test_what_a_client_says_of_its_capabilities_is_said_anew(served: Gateway, upstream: str) -> None:
    claimed = {"elicitation": {"url": {"x": "smuggled"}, "smuggled": 1}, "sampling": "smuggled", "smuggled": {}}
    with RawHttp(served) as raw:
        answer = gateway.read_answer(raw.modern(gateway.call(f"{upstream}_seen"), claimed))["result"]
    seen = json.loads(text_of(answer))
    assert "smuggled" not in json.dumps(seen)
    if upstream == "modern":
        said = seen["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"]
        assert said == {"elicitation": {"url": {}}}


@both
@upstreams
def test_inbound_credentials_reach_no_server(served: Gateway, revision: str, upstream: str) -> None:
    secret = {"authorization": TOKEN, "cookie": "session=inbound-credential", "x-api-key": "inbound-credential"}
    seen = seen_by(served, revision, upstream, gateway.call(f"{upstream}_seen"), **secret)
    assert "inbound-credential" not in json.dumps(seen)
    assert not {name.lower() for name in seen["headers"]} & set(secret)


@pytest.mark.parametrize("kind", ["exotic", "write", "risky"])
def test_hints_change_no_decision(served: Gateway, kind: str) -> None:
    """The same contract on a tool that calls itself harmless and on one that does not."""
    decided = []
    for name in ("modern" if kind == "exotic" else "mild", "wild"):
        told = about(ask(served, MODERN, gateway.call(f"{name}_{kind}")))
        finished = served.finished(told["call_id"])
        decision = {key: value for key, value in finished["decision"].items() if key != "id"}
        decided.append((told["status"], told["reason_code"], finished["effect"], decision))
    assert decided[0] == decided[1]
