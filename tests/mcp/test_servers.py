"""Servers that others wrote do their work behind one gateway, for clients of both revisions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mcp_types as types
import pytest
from mcp import Client

from tests import tooling
from tests.gateways import own_tools
from tests.mcp import gateway
from tests.mcp.gateway import ERAS, JSON, Gateway, about, facts, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("mode", ERAS), pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class House:
    """The gateway with all the servers, and the folders that they work in."""

    gateway: Gateway
    files: Path
    graph: Path
    repository: Path


def stdio(*command: str, **more: object) -> JSON:
    return {"command": list(command), "pins": "first_use", **more}


def shared(folder: Path) -> JSON:
    return {"host": str(folder), "at": str(folder), "mode": "rw"}


def contracts() -> dict[str, JSON]:
    return {
        **gateway.tools("everything", "echo", "get-sum", "get-structured-content", "trigger-long-running-operation"),
        **gateway.tools("files", "read_text_file", "list_directory"),
        **gateway.tools("files", "write_file", mode="write"),
        **gateway.tools("memory", "read_graph", "search_nodes"),
        **gateway.tools("memory", "create_entities", "create_relations", mode="write"),
        **gateway.tools("time", "convert_time", "get_current_time"),
        **gateway.tools("git", "git_status", "git_log"),
        **gateway.tools("git", "git_add", "git_commit", mode="write"),
        "remote_echo": {"transport": "mcp", "server": "remote", "tool": "echo", "mode": "read"},
    }


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    base = tmp_path_factory.mktemp("house")
    files, graph, repository = base / "files", base / "memory" / "graph.jsonl", base / "repository"
    for folder in (files, graph.parent, repository):
        folder.mkdir()
    for words in (["init", "-q", "-b", "main"], ["config", "user.name", "Test"], ["config", "user.email", "t@e.org"]):
        subprocess.run([tooling.need("git"), "-C", repository, *words], check=True)
    (repository / "first.txt").write_text("one\n")
    port = tooling.free_port()
    remote = tooling.npm_command("mcp-server-everything", "streamableHttp")
    servers: dict[str, JSON] = {
        "everything": stdio(
            *tooling.npm_command("mcp-server-everything", "stdio"), resources=["demo://*"], prompts=["*"]
        ),
        "remote": {"url": f"http://127.0.0.1:{port}/mcp", "pins": "first_use"},
        "files": stdio(*tooling.npm_command("mcp-server-filesystem", str(files)), mounts=[shared(files)]),
        "memory": stdio(
            *tooling.npm_command("mcp-server-memory"),
            env={"MEMORY_FILE_PATH": str(graph)},
            mounts=[shared(graph.parent)],
        ),
        "time": stdio(str(tooling.python_server("mcp-server-time"))),
        "git": stdio(str(tooling.python_server("mcp-server-git")), mounts=[shared(repository)]),
    }
    with (
        tooling.serve(remote, port, env={"PORT": str(port)}),
        gateway.serve(base / "gateway", gateway.configuration(servers, contracts())) as served,
    ):
        yield House(served, files, graph, repository)


async def call(client: Client, tool: str, arguments: JSON | None = None) -> types.CallToolResult:
    result = await client.call_tool(tool, arguments or {})
    assert not result.is_error, text_of(result)
    return result


async def test_every_tool_is_offered_under_its_contract(house: House, mode: str) -> None:
    async with house.gateway.client(mode) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == {*contracts(), *own_tools()}
        assert client.protocol_version == (gateway.HANDSHAKE if mode == "legacy" else gateway.MODERN)


async def test_everything_over_stdio(house: House, mode: str) -> None:
    seen: list[float] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async with house.gateway.client(mode) as client:
        assert "7" in text_of(await call(client, "get-sum", {"a": 3, "b": 4}))
        structured = (await call(client, "get-structured-content", {"location": "Chicago"})).structured_content
        assert structured is not None and set(structured) == {"temperature", "conditions", "humidity"}
        await client.call_tool(
            "trigger-long-running-operation", {"duration": 0.5, "steps": 3}, progress_callback=progress
        )
        assert seen and seen == sorted(seen)
        listed = [str(resource.uri) for resource in (await client.list_resources()).resources]
        assert "demo://resource/static/document/features.md" in listed
        read = (await client.read_resource("demo://resource/static/document/features.md")).contents[0]
        assert isinstance(read, types.TextResourceContents) and "Features" in read.text
        prompt = await client.get_prompt("args-prompt", {"city": "Oslo"})
        assert "Oslo" in str(prompt.messages[0].content)
        reference = types.PromptReference(name="completable-prompt")
        completed = await client.complete(reference, {"name": "department", "value": "E"})
        assert completed.completion.values == ["Engineering"]


async def test_everything_over_http(house: House, mode: str) -> None:
    async with house.gateway.client(mode) as client:
        result = await call(client, "remote_echo", {"message": "from afar"})
    assert "from afar" in text_of(result)
    assert facts(result)["isolation"] == {"backend": "remote", "level": "none", "protections": {}}


async def test_filesystem_writes_a_real_file(house: House, mode: str) -> None:
    file = house.files / f"note-{mode}.txt"
    async with house.gateway.client(mode) as client:
        written = await call(client, "write_file", {"path": str(file), "content": "on disk"})
        assert file.read_text() == "on disk"
        assert "on disk" in text_of(await call(client, "read_text_file", {"path": str(file)}))
        assert file.name in text_of(await call(client, "list_directory", {"path": str(house.files)}))
        outside = await client.call_tool("read_text_file", {"path": "/etc/passwd"})
    assert outside.is_error and about(outside)["status"] == "failed"
    assert facts(written)["effect"] == "confirmed"


async def test_memory_is_kept_in_its_file(house: House, mode: str) -> None:
    entity = {"name": f"fence-{mode}", "entityType": "thing", "observations": ["stands"]}
    async with house.gateway.client(mode) as client:
        await call(client, "create_entities", {"entities": [entity]})
        found = await call(client, "search_nodes", {"query": entity["name"]})
        assert found.structured_content is not None
        assert [node["name"] for node in found.structured_content["entities"]] == [entity["name"]]
    kept = [json.loads(line) for line in house.graph.read_text().splitlines()]
    assert entity["name"] in [node["name"] for node in kept]


async def test_time_is_converted(house: House, mode: str) -> None:
    wanted = {"source_timezone": "Etc/UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    async with house.gateway.client(mode) as client:
        assert "21:00" in text_of(await call(client, "convert_time", wanted))
        wrong = await client.call_tool("convert_time", {**wanted, "target_timezone": "Moon/Base"})
    assert wrong.is_error and about(wrong)["status"] == "failed"


async def test_git_commits_to_a_real_repository(house: House, mode: str) -> None:
    where = {"repo_path": str(house.repository)}
    name = f"{mode}.txt"
    (house.repository / name).write_text("two\n")
    async with house.gateway.client(mode) as client:
        assert name in text_of(await call(client, "git_status", where))
        await call(client, "git_add", {**where, "files": [name]})
        await call(client, "git_commit", {**where, "message": f"add {name}"})
        assert f"add {name}" in text_of(await call(client, "git_log", where))
    log = subprocess.run(
        ["git", "-C", house.repository, "log", "--format=%s"], capture_output=True, text=True, check=True
    )
    assert f"add {name}" in log.stdout.splitlines()


async def test_each_server_speaks_its_own_revision_in_a_box(house: House, mode: str) -> None:
    """Both revisions are among the servers; the facts say that each is in a box, and the log has nothing to warn of."""
    async with house.gateway.client(mode) as client:
        for tool in ("echo", "get_current_time"):
            arguments = {"message": "hi"} if tool == "echo" else {"timezone": "Etc/UTC"}
            result = await call(client, tool, arguments)
            isolation = facts(result)["isolation"]
            assert (isolation["backend"], isolation["level"]) == ("process", "process")
            assert isolation["protections"]["seccomp"] == {"on": True, "verified": "run"}
    starts = [r.body for r in house.gateway.records(kind="finished") if r.body["call"]["method"] == "server/start"]
    assert {body["call"]["server"] for body in starts} == {"everything", "remote", "files", "memory", "time", "git"}
    assert all(body["status"] == "success" for body in starts)
    assert "without a box" not in house.gateway.log()


async def test_every_call_is_on_record(house: House, mode: str) -> None:
    async with house.gateway.client(mode) as client:
        result = await call(client, "write_file", {"path": str(house.files / "r.txt"), "content": "secret words"})
    told = about(result)
    kinds = [record.kind for record in house.gateway.records(call_id=told["call_id"])]
    assert kinds == ["started", "finished"]
    finished = house.gateway.finished(told["call_id"])
    assert (finished["status"], finished["call"]["server"], finished["effect"]) == ("success", "files", "confirmed")
    assert "secret words" not in json.dumps(finished)
