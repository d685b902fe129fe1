"""Sessions over MCP, in both revisions, in real boxes: state that stays, pictures, resources, approvals, records."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError
from mcp.client.subscriptions import ResourcesListChanged

from tests import boxing, gateways, tooling
from tests.cli.terminals import at_terminal
from tests.mcp.gateway import ERAS, MODERN

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:.*removed as of 2026-07-28.*")]

CONFIG = """
gateway: {state: ./state, approval_wait_seconds: 0}
sandbox: {default_timeout_seconds: 8, max_memory_mb: 128, session_lifetime_seconds: 600}
policy:
  rules:
    - {id: no-removing, action: deny, tool_patterns: [remove_file]}
    - {id: ask-first, action: ask, tool_patterns: [run_shell], argument_patterns: {command: "^echo hi"}}
"""
# A picture of one pixel, shown as a library for figures would.
PICTURE = """
import base64
class Figure:
    def _repr_png_(self):
        return base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
        )
Figure()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    boxing.need_boxes()
    with gateways.serve(gateways.write(tmp_path_factory.mktemp("sessions"), CONFIG)) as served:
        yield served


@pytest.fixture(params=ERAS)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Agent:
    """A client, and the session that it works in."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.session = ""

    async def open(self, **arguments: Any) -> Agent:
        told = await self.client.call_tool("open_session", arguments)
        assert told.structured_content is not None, told
        self.session = told.structured_content["session"]
        return self

    async def __call__(self, tool: str, **arguments: Any) -> Any:
        return await self.client.call_tool(tool, {"session": self.session, **arguments})

    async def python(self, code: str, **more: Any) -> Any:
        return await self("execute_python", code=code, **more)


def about(result: Any) -> dict[str, Any]:
    return dict(result.meta["ringfence/outcome"])


def facts(result: Any) -> dict[str, Any]:
    return dict(result.meta["ringfence/facts"])


def texts(result: Any) -> list[str]:
    return [block.text for block in result.content if block.type == "text"]


async def test_each_step_builds_on_the_last(served: gateways.Served, mode: Any) -> None:
    async with Client(served.url, mode=mode) as client:
        agent = await Agent(client).open()
        await agent.python("import os; os.makedirs('data'); os.chdir('data'); x = 20")
        await agent("write_file", path="data/n.txt", text="22")
        result = await agent.python("x += int(open('n.txt').read()); print(os.getcwd()); x")
        assert texts(result) == ["/workspace/data\n", "42"]
        told = result.structured_content
        assert (told["step"], told["state"], told["interpreter_alive"]) == (2, "running", True)
        assert "facts" not in told, "they stand beside it, once"
        assert facts(result)["session"] == {
            "id": agent.session,
            "step": 2,
            "context": "default",
            "state": "running",
        }
        assert facts(result)["isolation"]["level"] == "process"
        shell = await agent("run_shell", command="cat data/n.txt")
        assert shell.structured_content["stdout"] == "22"
        await agent("close_session")


async def test_a_figure_is_seen_and_a_file_is_a_resource(served: gateways.Served, mode: Any) -> None:
    async with Client(served.url, mode=mode) as client:
        agent = await Agent(client).open()
        shown = await agent.python(PICTURE)
        (image,) = [block for block in shown.content if block.type == "image"]
        assert image.mime_type == "image/png" and base64.b64decode(image.data).startswith(b"\x89PNG")
        saved = await agent.python(
            "import os; os.mkdir('output'); open('output/p.png', 'wb').write(Figure()._repr_png_());"
        )
        (link,) = [block for block in saved.content if block.type == "resource_link"]
        assert link.uri == f"ringfence://session/{agent.session}/output/p.png"
        listed = await client.list_resources()
        assert link.uri in [str(each.uri) for each in listed.resources]
        (contents,) = (await client.read_resource(str(link.uri))).contents
        assert (contents.mime_type, base64.b64decode(contents.blob)) == (  # type: ignore[union-attr]
            "image/png",
            base64.b64decode(image.data),
        )
        (again,) = (await agent("read_file", path="output/p.png")).content
        assert (again.type, again.data) == ("image", image.data)
        await agent("close_session")
        (kept,) = (await client.read_resource(str(link.uri))).contents
        assert kept.blob == contents.blob, "what it left outlives it"  # type: ignore[union-attr]
        with pytest.raises(MCPError, match="no resource"):
            await client.read_resource(str(link.uri).replace("p.png", "q.png"))


async def test_an_error_a_timeout_and_a_dead_interpreter_are_told_apart(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        failed = await agent.python("x = 1; 1/0")
        assert (about(failed)["status"], about(failed)["reason_code"]) == ("failed", "exit_status")
        assert failed.structured_content["claimed"]["error"]["name"] == "ZeroDivisionError"
        assert texts(failed)[-1] == f"[{facts(failed)['explanation']}]"
        late = await agent.python("x += 1\nwhile True: pass")
        assert (about(late)["status"], late.structured_content["interpreter_alive"]) == ("timeout", True)
        assert texts(await agent.python("x")) == ["2"], "its variables are still there"
        dead = await agent.python("import os; os._exit(3)")
        assert (about(dead)["status"], dead.structured_content["interpreter_alive"]) == ("failed", False)
        gone = await agent.python("x")
        assert gone.structured_content["claimed"]["error"]["name"] == "NameError"
        await agent("close_session")


async def test_a_client_is_told_that_there_are_new_files(served: gateways.Served) -> None:
    async with Client(served.url, mode=MODERN) as client:
        agent = await Agent(client).open()
        async with client.listen(resources_list_changed=True) as stream:
            await agent.python("import os; os.makedirs('output', exist_ok=True); open('output/a', 'w').close()")
            with anyio.fail_after(tooling.PATIENCE):
                assert isinstance(await anext(aiter(stream)), ResourcesListChanged)
        async with Client(served.url, mode="legacy") as other:
            with pytest.raises(MCPError, match="subscribed"):
                await other.subscribe_resource(f"ringfence://session/{agent.session}/output/a")
        await agent("close_session")


async def test_a_client_names_its_session_beside_the_arguments(served: gateways.Served, mode: Any) -> None:
    async with Client(served.url, mode=mode) as client:
        agent, other = await Agent(client).open(), await Agent(client).open()
        meta: Any = {"ringfence/session": agent.session}
        await client.call_tool("execute_python", {"code": "x = 'mine'"}, meta=meta)
        told = await client.call_tool("execute_python", {"code": "x"}, meta=meta)
        assert (told.structured_content or {})["session"] == agent.session
        await client.call_tool("write_file", {"path": "a", "text": "b"}, meta=meta)
        assert texts(await agent("read_file", path="a")) == ["b"]
        theirs = await client.call_tool("execute_python", {"code": "x", "session": other.session}, meta=meta)
        assert (theirs.structured_content or {})["session"] == other.session, "what the arguments say counts"
        odd = await client.call_tool("execute_python", {"code": "1"}, meta={"ringfence/session": 5})  # type: ignore[arg-type]
        assert about(odd)["reason_code"] == "bad_arguments"
        for each in (agent, other):
            await each("close_session")


async def test_more_than_fits_lies_in_the_session(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        for size in (600_000, 3_000_000):  # cut for the result, and cut already when it was captured
            long = await agent.python(f"print('x' * {size})")
            path = long.structured_content["whole"]["stdout"]
            assert "left out" in long.structured_content["stdout"] and long.structured_content["truncated"] is True
            assert sum(len(block.text) for block in long.content) < 11_000
            assert len(json.dumps(long.structured_content)) < 12_000
            counted = await agent("run_shell", command=f"wc -c < {path}")
            assert int(counted.structured_content["stdout"]) == size + 1
        await agent("close_session")


async def test_a_command_in_the_background(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        begun = await agent("run_shell", command="while read line; do echo got $line; done; exit 4", background=True)
        number = begun.structured_content["process"]
        await agent("send_input", process=number, text="one\ntwo\n", eof=True)
        over = await agent("wait_process", process=number)
        assert (over.structured_content["running"], over.structured_content["exit_code"]) == (False, 4)
        output = await agent("process_output", process=number)
        assert output.structured_content["stdout"] == "got one\ngot two\n"
        sleeping = await agent("run_shell", command="sleep 100", background=True)
        stopped = await agent("stop_process", process=sleeping.structured_content["process"], signal="TERM")
        assert (stopped.structured_content["ended"], stopped.structured_content["signal"]) == ("signalled", 15)
        await agent("close_session")


async def test_a_paused_session_goes_on_when_it_is_used(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        await agent.python("x = 7")
        assert (await agent("pause_session")).structured_content["state"] == "paused"
        listed = await client.call_tool("list_sessions", {})
        states = {each["session"]: each["state"] for each in (listed.structured_content or {})["sessions"]}
        assert states[agent.session] == "paused"
        assert texts(await agent.python("x")) == ["7"]
        ended = await agent("close_session")
        assert ended.structured_content["why"] == "closed"
        refused = await agent.python("x")
        assert about(refused)["reason_code"] == "session_stopped" and agent.session in texts(refused)[0]


def approved(served: gateways.Served, asked: Any) -> str:
    """A person is shown what is asked, and agrees."""
    with at_terminal("approvals", "approve", about(asked)["approval_id"], "--config", served.config) as terminal:
        terminal.expect("[y/N]")
        terminal.type("y\n")
        assert terminal.end() == 0
        return terminal.shown


async def test_policy_and_approvals_hold_in_a_session(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        assert "remove_file" not in [tool.name for tool in (await client.list_tools()).tools]
        denied = await agent("remove_file", path="a")
        assert about(denied)["reason_code"] == "policy"
        asked = await agent("run_shell", command="echo hi")
        assert "after its step 0; void" in approved(served, asked)
        await agent.python("1")
        anew = await agent("run_shell", command="echo hi")
        assert about(anew)["status"] == "approval_required", "another step came between"
        assert about(anew)["approval_id"] != about(asked)["approval_id"]
        assert "after its step 1; void" in approved(served, anew)
        ran = await agent("run_shell", command="echo hi")
        assert ran.structured_content["stdout"] == "hi\n"
        await agent("close_session")


async def test_what_cannot_be_is_refused_by_name(served: gateways.Served) -> None:
    async with Client(served.url) as client:
        agent = await Agent(client).open()
        for tool, arguments, code in (
            ("execute_python", {"code": "1", "session": "box_nothing"}, "unknown_session"),
            ("execute_python", {"code": "1", "context": "c"}, "bad_arguments"),
            ("open_session", {"lifetime_seconds": 1e9}, "bad_arguments"),
            ("open_session", {"limits": {"memory_bytes": 2**40}}, "bad_arguments"),
            ("open_session", {"template": "none"}, "unknown_template"),
            ("open_session", {"snapshot": "none"}, "not_found"),
            ("read_file", {"session": agent.session, "path": "../etc/shadow"}, "not_found"),
            ("read_file", {"session": agent.session, "path": "none"}, "not_found"),
            ("write_file", {"session": agent.session, "path": "a"}, "bad_arguments"),
            ("write_file", {"session": agent.session, "path": "/etc/a", "text": ""}, "read_only"),
            ("extend_session", {"session": agent.session, "lifetime_seconds": 9}, "unknown_tool"),
        ):
            assert about(await client.call_tool(tool, arguments))["reason_code"] == code, (tool, arguments)
        await agent("close_session")


def test_each_step_is_explained(served: gateways.Served) -> None:
    """After the others: the log is one, and every step of theirs is on it."""
    steps = [body for body in gateways.finished(served.state) if (body["facts"].get("session") or {}).get("step")]
    assert len(steps) > 10
    body = next(each for each in steps if each["call"]["tool"] == "execute_python" and each["status"] == "success")
    session = body["facts"]["session"]
    told = gateways.run("audit", "explain", body["call"]["id"], "--config", served.config).stdout
    assert f"  session    {session['id']}, step {session['step']}, context default" in told
    assert gateways.verified(served.state).ok
    assert "mine" not in json.dumps(steps), "no value enters a record"
