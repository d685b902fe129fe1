"""One server's malformed entries cost clients those entries, and neither its others nor those of other servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import tooling
from tests.gateways import own_tools
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, Gateway, about

pytestmark = pytest.mark.anyio
eras = pytest.mark.parametrize("mode", ERAS)
NAMES = ("fine", "titled", "hinted", "pictured", "listed", "textual", "shapeless", "later")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    offers = {"prompts": ["*"], "resources": ["doc:*", "http:*"]}
    malformed = {"command": tooling.fixture_command("malformed_server.py"), "pins": "first_use", **offers}
    other = {"command": tooling.fixture_command("hostile_server.py"), "pins": "first_use"}
    capabilities = {**gateway.tools("malformed", *NAMES), **gateway.tools("other", "echo")}
    config = gateway.configuration({"malformed": malformed, "other": other}, capabilities)
    with gateway.serve(tmp_path_factory.mktemp("malformed"), config) as running:
        yield running


@eras
async def test_a_client_reads_every_list_though_a_server_has_malformed_entries(served: Gateway, mode: str) -> None:
    async with served.client(mode) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        prompts = [prompt.name for prompt in (await client.list_prompts()).prompts]
        resources = [str(resource.uri) for resource in (await client.list_resources()).resources]
        templates = [each.uri_template for each in (await client.list_resource_templates()).resource_templates]
        called = await client.call_tool("fine", {})
        gone = await client.call_tool("titled", {})
    assert tools == ["fine", "later", "echo", *own_tools()]
    assert prompts == ["greet"]
    assert resources == ["doc:fine"]
    assert [each for each in templates if not each.startswith("ringfence:")] == ["doc:{fine}"]
    assert about(called)["status"] == "success"
    assert about(gone)["status"] == "unavailable"


async def test_the_log_says_of_which_server_and_why(served: Gateway) -> None:
    async with served.client(ERAS[0]) as client:
        await client.list_resources()
    log = served.log()
    left = "server malformed: it is left out of what is offered:"
    assert f"{left} tool titled: title: Input should be a valid string" in log
    assert f"{left} tool textual: inputSchema.type: " in log
    assert "server malformed: 6 of its resources are not listed" in log
