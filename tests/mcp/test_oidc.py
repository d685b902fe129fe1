"""Tokens of a real OpenID provider: those that are for the gateway are served, and more is asked for where it must."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import tooling
from tests.mcp import gateway
from tests.mcp.gateway import JSON, about
from tests.mcp.test_bearer import Place, served

pytestmark = pytest.mark.anyio

RESOURCE = "https://gateway.corp.example/mcp"


@contextmanager
def provided() -> Iterator[str]:
    """The address of a provider of identities, while the block lasts."""
    port = tooling.free_port()
    script = tooling.ROOT / "tests" / "fixtures" / "oidc" / "provider.mjs"
    command = [str(tooling.node()), str(script), str(port), RESOURCE, str(tooling.oidc_provider())]
    with tooling.start_process(command) as started:
        started.wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def identified(folder: Path, command: list[str], issuer: str, **more: Any) -> AsyncIterator[Place]:
    agents = {
        "robot": {"capabilities": ["echo", "counter"], "oidc_client": "robot", "tenant": "acme"},
        "bob": {"capabilities": ["counter"]},
    }
    oidc = {"issuer": issuer, "audience": RESOURCE, "scopes": ["mcp"], "step_up": {"tools:write": ["count*"]}, **more}
    whole = {"state": "./state", "approval_wait_seconds": 0.2, "oidc": oidc}
    async with served(folder, command, agents=agents, gateway=whole) as place:
        yield place


async def token(issuer: str, client: str = "robot", scope: str = "mcp", resource: str = RESOURCE) -> str:
    form = {"grant_type": "client_credentials", "scope": scope, "resource": resource}
    async with httpx2.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{issuer}/token", data=form, auth=(client, f"{client}-secret"))
    return str(answer.json()["access_token"])


def counter() -> JSON:
    return gateway.call("counter")


async def test_a_client_of_the_provider_is_its_agent_and_steps_up_for_more(
    tmp_path: Path, hostile_command: list[str]
) -> None:
    with provided() as issuer:
        async with identified(tmp_path, hostile_command, issuer) as place:
            little, much = await token(issuer), await token(issuer, scope="mcp tools:write")
            said = gateway.read_answer(await place.ask(gateway.call("echo", {"text": "hello"}), little))["result"]
            assert about(said)["status"] == "success"
            refused = await place.ask(counter(), little)
            told = refused.headers["www-authenticate"]
            assert refused.status_code == 403 and 'error="insufficient_scope"' in told
            assert 'scope="mcp tools:write"' in told and "resource_metadata=" in told
            assert json.loads(refused.content)["id"] == counter()["id"]
            allowed = gateway.read_answer(await place.ask(counter(), much))["result"]
            assert about(allowed)["status"] == "success"
            assert [(body["reason_code"], body["principal"]["agent"]) for body in await place.refused()] == [
                ("insufficient_scope", "robot")
            ]
            calls = [record.body["call"] for record in place.app.store.reader().records(kind="finished")]
            made = [call["principal"] for call in calls if call["kind"] == "tool"]
            assert [(each["tenant"], each["agent"]) for each in made] == [("acme", "robot")] * 2
            assert gateway.text_of(said).endswith("hello") and little not in json.dumps(said)


async def test_tokens_of_others_and_for_others_are_refused(tmp_path: Path, hostile_command: list[str]) -> None:
    with provided() as issuer, provided() as other:
        async with identified(tmp_path, hostile_command, issuer) as place:
            good = await token(issuer)
            head, body, signature = good.split(".")
            cases = [
                (await token(issuer, "stranger"), 403, "unknown_agent"),
                (await token(issuer, scope="tools:write"), 403, "insufficient_scope"),
                (await token(issuer, resource="https://other.corp.example/mcp"), 401, "bad_token"),
                (await token(other), 401, "bad_token"),
                (f"{head}.{body}.{signature[:-8]}AAAAAAAA", 401, "bad_token"),
                (f"{head}.{body}.", 401, "bad_token"),
            ]
            for text, status, _ in cases:
                answer = await place.ask(gateway.call("echo", {"text": "x"}), text)
                assert answer.status_code == status and "resource_metadata=" in answer.headers["www-authenticate"]
            counted: dict[str, int] = {}
            for each in await place.refused():
                counted[each["reason_code"]] = counted.get(each["reason_code"], 0) + each["count"]
            assert counted == {"unknown_agent": 1, "insufficient_scope": 1, "bad_token": 4}
            own = await place.ask(counter(), place.token("bob"))
            assert own.status_code == 200, "tokens of the gateway's own are limited by no scope, and served beside"


async def test_without_its_provider_the_gateway_serves_nobody_by_it(tmp_path: Path, hostile_command: list[str]) -> None:
    with provided() as issuer:
        text = await token(issuer)
    async with identified(tmp_path, hostile_command, issuer) as place:
        answer = await place.ask(gateway.call("echo", {"text": "x"}), text)
        assert answer.status_code == 503 and "keys cannot be had" in answer.text
