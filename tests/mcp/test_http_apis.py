"""HTTP APIs behind a gateway: operations of an OpenAPI document and requests that capabilities declare, called by a
client of MCP, against a real server of HTTP."""

from __future__ import annotations

import http.server
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import gateways
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, Gateway, about, facts, text_of
from tests.upstream.openapi import generated

pytestmark = pytest.mark.anyio
TOKEN = "t0ken-of-the-api-4711"


class Api(http.server.ThreadingHTTPServer):
    """Answers as its paths say, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, kind, answer, more = answered(self.command, urlsplit(self.path).path, self.path, body)
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(answer)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = any

    def log_message(self, *words: object) -> None:
        """Nothing: pytest shows what failed."""


def answered(method: str, path: str, target: str, body: bytes) -> tuple[int, str, bytes, dict[str, str]]:
    end = path.rpartition("/")[2]
    match end:
        case "moved":
            return 302, "text/plain", b"", {"location": "/v1/things0"}
        case "missing":
            return 404, "application/json", b'{"error": "no such thing"}', {}
        case "broken":
            return 500, "text/html", b"<h1>sorry</h1>", {}
        case "picture":
            return 200, "image/png", b"\x89PNG\0\xff", {}
        case "liar":
            return 200, "application/json", b'{"a": 1, "a": 2}', {}
        case "squeezed":
            return 200, "application/json", zlib.compress(b'{"a": 1}'), {"content-encoding": "deflate"}
        case "slow_to_decode":
            return 200, "text/plain; charset=punycode", b"abc" * 1000, {}
        case "endless":
            return 200, "text/plain", b"x" * 9_000_000, {}
        case "echo":
            return 200, "application/json", json.dumps({"said": f"Bearer {TOKEN}"}).encode(), {}
        case "empty":
            return 204, "text/plain", b"", {}
    told = {"method": method, "target": target, "body": body.decode("latin-1")}
    return 200, "application/json", json.dumps(told).encode(), {"link": '<https://other.example/?p=2>; rel="next"'}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def config_of(api: Api, folder: Path, **more: Any) -> JSON:
    (folder / "things.json").write_text(json.dumps(generated.document(100)))
    servers = {"things": {"openapi": "things.json", "base_url": f"{api.url}/v1", "secrets": ["key"]}}
    port = api.server_address[1]
    secrets = {"key": {"from": "file", "path": "key", "hosts": [f"127.0.0.1:{port}"], "header": "Authorization"}}
    (folder / "key").write_text(TOKEN)
    (folder / "key").chmod(0o600)
    item = {"type": "object", "properties": {"id": {"type": "string"}, "note": {}}, "required": ["id"]}
    capabilities: dict[str, JSON] = {
        "item": {
            "transport": "direct",
            "mode": "read",
            "secrets": ["key"],
            "request": {"method": "GET", "url": f"{api.url}/items/{{id}}", "query": {"note": "{note}"}},
            "input": item,
        },
        "add_item": {
            "transport": "direct",
            "mode": "write",
            "request": {
                "method": "POST",
                "url": f"{api.url}/items",
                "headers": {"X-Team": "red {id}"},
                "body": {"id": "{id}", "note": "{note}", "said": "it is {id}", "kind": "item"},
            },
            "input": item,
        },
        "delete_things1": {"server": "things", "mode": "high_risk"},
    }
    return gateway.configuration(servers, capabilities, secrets=secrets, **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, api: Api) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("apis")
    with gateway.serve(folder, config_of(api, folder)) as running:
        yield running


@pytest.mark.parametrize("mode", ERAS)
async def test_every_operation_is_a_tool_with_its_schema(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        found: dict[str, Any] = {}
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len([name for name in found if "things" in name]) == 600
        assert found["list_things7"].annotations.read_only_hint is True
        assert found["create_things7"].annotations.read_only_hint is False


async def test_calls_become_requests_and_answers_results(served: Gateway, api: Api) -> None:
    async with served.client("legacy") as client:
        got = await client.call_tool("get_things3", {"id": "a/b ü?#"})
        method, target, headers, _ = api.asked[-1]
        assert (method, target) == ("GET", "/v1/things3/a%2Fb%20%C3%BC%3F%23")
        assert headers["authorization"] == f"Bearer {TOKEN}"
        assert got.structured_content is not None
        assert got.structured_content["body"]["target"] == target
        assert got.structured_content["links"] == {"next": "https://other.example/?p=2"}
        assert facts(got)["effect"] == "none" and not got.is_error
        made = await client.call_tool("create_things3", {"body": {"name": "x", "children": [{"name": "y"}]}})
        assert json.loads(api.asked[-1][3]) == {"name": "x", "children": [{"name": "y"}]}
        assert facts(made)["effect"] == "confirmed"
        await client.call_tool("list_things3", {"limit": 5, "cursor": "a&b", "X-Team": "red"})
        assert api.asked[-1][1] == "/v1/things3?cursor=a%26b&limit=5" and api.asked[-1][2]["x-team"] == "red"


REFUSED: dict[str, tuple[str, JSON]] = {
    "dots": ("get_things3", {"id": ".."}),
    "nothing": ("get_things3", {"id": ""}),
    "a control character": ("get_things3", {"id": "a\rb"}),
    "a header with a line": ("list_things3", {"X-Team": "a\nHost: evil"}),
    "too much": ("list_things3", {"limit": 500}),
    "an unknown argument": ("list_things3", {"Authorization": "mine"}),
    "a body that does not fit": ("create_things3", {"body": {"name": 5}}),
    "no body": ("create_things3", {}),
    "dots in a declared request": ("item", {"id": ".."}),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_arguments_that_make_no_such_request_are_refused_before_anything_is_sent(
    served: Gateway, api: Api, case: str
) -> None:
    before = len(api.asked)
    tool, arguments = REFUSED[case]
    async with served.client("legacy") as client:
        result = await client.call_tool(tool, arguments)
    assert result.is_error and about(result)["status"] == "validation_failure"
    assert about(result)["reason_code"] == "bad_arguments" and facts(result)["effect"] == "none"
    assert len(api.asked) == before


async def test_answers_of_every_kind(served: Gateway, api: Api) -> None:
    async with served.client("legacy") as client:

        async def get(name: str) -> Any:
            return await client.call_tool("get_things5", {"id": name})

        before = len(api.asked)
        moved = await get("moved")
        assert moved.is_error and "not followed" in text_of(moved) and len(api.asked) == before + 1
        missing = await get("missing")
        assert missing.is_error and "404" in text_of(missing) and "no such thing" in text_of(missing)
        assert "500" in text_of(await get("broken"))
        picture = (await get("picture")).structured_content
        assert picture["base64"] == "iVBORwD/" and "body" not in picture
        assert (await get("liar")).structured_content["body"] == '{"a": 1, "a": 2}'
        assert (await get("squeezed")).structured_content["body"] == {"a": 1}
        assert (await get("empty")).structured_content == {"status": 204}
        assert "base64" in (await get("slow_to_decode")).structured_content
        assert (await get("endless")).is_error
        echoed = await get("echo")
        assert TOKEN not in text_of(echoed) and TOKEN not in json.dumps(echoed.structured_content)
        assert not (await get("fine")).is_error


async def test_a_declared_request_is_made_as_it_was_declared(served: Gateway, api: Api) -> None:
    async with served.client("legacy") as client:
        await client.call_tool("item", {"id": "x/y", "note": "a b"})
        assert api.asked[-1][:2] == ("GET", "/items/x%2Fy?note=a%20b")
        assert api.asked[-1][2]["authorization"] == f"Bearer {TOKEN}"
        await client.call_tool("item", {"id": "x"})
        assert api.asked[-1][1] == "/items/x"
        await client.call_tool("add_item", {"id": "7", "note": {"deep": [1]}})
        _, _, headers, body = api.asked[-1]
        assert headers["x-team"] == "red 7" and "authorization" not in headers
        assert json.loads(body) == {"id": "7", "note": {"deep": [1]}, "said": "it is 7", "kind": "item"}


async def test_a_contract_of_its_own_holds_for_an_operation(served: Gateway, api: Api) -> None:
    before = len(api.asked)
    async with served.client("legacy") as client:
        result = await client.call_tool("delete_things1", {"id": "x"})
    assert about(result)["status"] == "approval_required" and len(api.asked) == before


async def test_an_api_that_is_down_never_ran(tmp_path: Path, api: Api) -> None:
    text = config_of(api, tmp_path)
    text["servers"]["things"]["base_url"] = "http://127.0.0.1:9/v1"
    del text["servers"]["things"]["secrets"]
    with gateway.serve(tmp_path, text) as running:
        async with running.client("legacy") as client:
            result = await client.call_tool("create_things3", {"body": {"name": "x"}})
    assert about(result)["status"] == "unavailable" and facts(result)["effect"] == "none"


def test_a_document_behind_a_url_is_fetched_when_it_is_accepted(tmp_path: Path) -> None:
    document = json.dumps(generated.document(1)).encode()

    class Documents(Handler):
        def any(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        do_GET = any

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Documents) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/api.json"
        servers = {"things": {"openapi": url, "base_url": "http://127.0.0.1:9"}}
        path = gateway.write(tmp_path, gateway.configuration(servers, {})).config
        checked = gateways.run("check", path)
        assert checked.returncode == 0 and "was not fetched yet" in checked.stdout
        accepted = gateways.run("check", path, "--accept", "--yes")
        assert accepted.returncode == 0 and "get_things0" in accepted.stdout
        server.shutdown()
    checked = gateways.run("check", path)
    assert "not fetched" not in checked.stdout and "6 capabilities" in checked.stdout
