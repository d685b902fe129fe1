"""Servers that others wrote, each with its work and with what it must not manage to do, in a box.

`Outside` plays everything else: files that no box is to see, and listeners that no box is to reach.
"""

from __future__ import annotations

import os
import socketserver
import sqlite3
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp import Client

from tests import tooling
from tests.mcp.gateway import JSON, text_of

CANARY = "a canary that nobody in a box may see"
HOST = "127.0.0.2"
"""On this host's loopback, and not one of those names that programs reach without a proxy."""
# On x86_64 Debian's starter looks for the processor in /proc/cpuinfo, which boxes do not have.
_CHROMIUM = "/usr/lib/chromium/chromium" if os.uname().machine == "x86_64" else "/usr/bin/chromium"
CHROMIUM_ROOM = {"memory_mb": 1024, "processes": 512}


@dataclass(slots=True)
class Outside:
    """What is not a box's."""

    folder: Path
    page: int = 0
    """A port where a page is served, which boxes may be allowed to reach."""
    other: int = 0
    """One that they may not."""
    visits: list[int] = field(default_factory=list)

    @property
    def canary(self) -> Path:
        return self.folder / "canary.txt"

    @property
    def share(self) -> Path:
        """What is mounted."""
        return self.folder / "share"

    def url(self, port: int) -> str:
        return f"http://{HOST}:{port}/page.html"


@contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    made = Outside(folder)
    made.share.mkdir()
    made.canary.write_text(CANARY)
    (made.share / "note.txt").write_text("a note to read")
    for repository in (made.share / "repository", folder / "private"):
        git = [str(tooling.need("git")), "-C", str(repository)]
        repository.mkdir()
        for words in (["init", "-q", "-b", "main"], ["config", "user.name", "T"], ["config", "user.email", "t@e.org"]):
            subprocess.run([*git, *words], check=True)
        (repository / "file.txt").write_text(CANARY if repository.name == "private" else "tracked")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", f"of {repository.name}"], check=True)
    with closing(sqlite3.connect(folder / "private.db")) as database, database:
        database.execute("create table secrets (value text)")
        database.execute("insert into secrets values (?)", (CANARY,))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.visits.append(self.connection.getsockname()[1])
            body = b"<html><body><h1>A page</h1><p>served outside</p></body></html>"
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    serve = socketserver.ThreadingTCPServer
    with serve((HOST, 0), Page) as page, serve((HOST, 0), Page) as other:
        made.page, made.other = page.server_address[1], other.server_address[1]
        for server in (page, other):
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        for server in (page, other):
            server.shutdown()


Call = Callable[..., Awaitable[types.CallToolResult]]
Work = Callable[[Call, Outside], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Server:
    """One that somebody else wrote."""

    name: str
    command: Callable[[Outside], list[str]]
    works: Work
    """It does what it is for, with what it was given."""
    fails: Work
    """It does not get at anything else."""
    tools: tuple[str, ...]
    mounted: bool = False
    reaches: bool = False
    """It may reach the page."""
    env: Callable[[Outside], dict[str, str]] = lambda outside: {}
    limits: JSON = field(default_factory=dict)


async def good(call: Call, tool: str, **arguments: Any) -> str:
    result = await call(tool, arguments)
    assert not result.is_error, text_of(result)
    return text_of(result)


async def bad(call: Call, tool: str, **arguments: Any) -> str:
    """It fails, or says that it did, and there is no canary in what it says."""
    result = await call(tool, arguments)
    said = " ".join(block.text for block in result.content if isinstance(block, types.TextContent))
    assert CANARY not in said
    return said


def client_call(client: Client) -> Call:
    async def call(tool: str, arguments: JSON) -> types.CallToolResult:
        return await client.call_tool(tool, arguments)

    return call


# ── npm ──


def _node(program: str, *words: str) -> list[str]:
    return tooling.npm_command(program, *words)


async def _files_work(call: Call, outside: Outside) -> None:
    assert await good(call, "read_text_file", path=f"{outside.share}/note.txt") == "a note to read"
    await good(call, "write_file", path=f"{outside.share}/written.txt", content="by the server")
    assert (outside.share / "written.txt").read_text() == "by the server"


async def _files_fail(call: Call, outside: Outside) -> None:
    # It was told that all of / is its own, so nothing but the box is in its way.
    for path in (outside.canary, Path("/etc/shadow"), Path("/root/.ssh"), Path(f"/proc/1/root{outside.canary}")):
        assert (await call("read_text_file", {"path": str(path)})).is_error, path
        await bad(call, "read_text_file", path=str(path))
    await call("write_file", {"path": str(outside.folder / "planted"), "content": "x"})
    await call("write_file", {"path": "/usr/bin/planted", "content": "x"})
    assert not (outside.folder / "planted").exists() and not Path("/usr/bin/planted").exists()
    (outside.share / "link").unlink(missing_ok=True)
    (outside.share / "link").symlink_to(outside.canary)
    await bad(call, "read_text_file", path=f"{outside.share}/link")


async def _memory_works(call: Call, outside: Outside) -> None:
    entity = {"name": "Ada", "entityType": "person", "observations": ["wrote the first program"]}
    await good(call, "create_entities", entities=[entity])
    assert "first program" in await good(call, "search_nodes", query="Ada")
    assert "Ada" in (outside.share / "graph.jsonl").read_text()


async def _memory_fails(call: Call, outside: Outside) -> None:
    assert CANARY not in await good(call, "read_graph")


async def _everything_works(call: Call, outside: Outside) -> None:
    assert "7" in await good(call, "get-sum", a=3, b=4)


async def _everything_fails(call: Call, outside: Outside) -> None:
    told = await good(call, "get-env")
    assert "RINGFENCE" not in told and "PYTEST" not in told and CANARY not in told


async def _browser_works(call: Call, outside: Outside) -> None:
    await good(call, "browser_navigate", url=outside.url(outside.page))
    assert "served outside" in await good(call, "browser_snapshot")


async def _browser_fails(call: Call, outside: Outside) -> None:
    before = len(outside.visits)
    await bad(call, "browser_navigate", url=outside.url(outside.other))
    await bad(call, "browser_navigate", url=f"file://{outside.canary}")
    assert outside.other not in outside.visits[before:]


# ── PyPI ──


def _python(name: str, *words: str) -> list[str]:
    return [str(tooling.python_server(name)), *words]


async def _git_works(call: Call, outside: Outside) -> None:
    where = {"repo_path": f"{outside.share}/repository"}
    assert "of repository" in await good(call, "git_log", **where)
    (outside.share / "repository" / "new.txt").write_text(str(time.monotonic_ns()))
    await good(call, "git_add", files=["new.txt"], **where)
    await good(call, "git_commit", message="by the server", **where)


async def _git_fails(call: Call, outside: Outside) -> None:
    assert "of private" not in await bad(call, "git_log", repo_path=str(outside.folder / "private"))


async def _time_works(call: Call, outside: Outside) -> None:
    assert "Tokyo" in await good(
        call, "convert_time", source_timezone="Europe/Oslo", time="12:00", target_timezone="Asia/Tokyo"
    )


async def _nothing_to_try(call: Call, outside: Outside) -> None:
    assert CANARY not in await good(call, "get_current_time", timezone="Etc/UTC")


async def _fetch_works(call: Call, outside: Outside) -> None:
    assert "served outside" in await good(call, "fetch", url=outside.url(outside.page), raw=True)


async def _fetch_fails(call: Call, outside: Outside) -> None:
    before = len(outside.visits)
    for url in (outside.url(outside.other), f"http://127.0.0.1:{outside.page}/", "http://169.254.169.254/latest/"):
        assert (await call("fetch", {"url": url})).is_error, url
    await bad(call, "fetch", url=f"file://{outside.canary}")
    assert outside.other not in outside.visits[before:]


async def _sqlite_works(call: Call, outside: Outside) -> None:
    await good(call, "create_table", query="create table if not exists t (a text)")
    await good(call, "write_query", query="insert into t values ('kept')")
    assert "kept" in await good(call, "read_query", query="select * from t")
    with closing(sqlite3.connect(outside.share / "own.db")) as database:
        assert database.execute("select a from t").fetchall()


async def _sqlite_fails(call: Call, outside: Outside) -> None:
    await bad(call, "write_query", query=f"attach '{outside.folder}/private.db' as p")
    await bad(call, "read_query", query="select * from p.secrets")
    await bad(call, "write_query", query=f"attach '{outside.folder}/planted.db' as q")
    assert not (outside.folder / "planted.db").exists()


SERVERS = (
    Server(
        "filesystem",
        lambda outside: _node("mcp-server-filesystem", "/"),
        _files_work,
        _files_fail,
        ("read_text_file", "write_file"),
        mounted=True,
    ),
    Server(
        "memory",
        lambda outside: _node("mcp-server-memory"),
        _memory_works,
        _memory_fails,
        ("create_entities", "search_nodes", "read_graph"),
        mounted=True,
        env=lambda outside: {"MEMORY_FILE_PATH": f"{outside.share}/graph.jsonl"},
    ),
    Server(
        "everything",
        lambda outside: _node("mcp-server-everything", "stdio"),
        _everything_works,
        _everything_fails,
        ("get-sum", "get-env"),
    ),
    Server(
        "playwright",
        lambda outside: [
            *_node("playwright-mcp", "--executable-path", _CHROMIUM, "--headless", "--no-sandbox"),
            *("--isolated", "--proxy-server", "http://127.0.0.1:3128", "--output-dir", "/workspace/out"),
        ],
        _browser_works,
        _browser_fails,
        ("browser_navigate", "browser_snapshot"),
        reaches=True,
        limits=CHROMIUM_ROOM,
    ),
    Server(
        "git",
        lambda outside: _python("mcp-server-git"),
        _git_works,
        _git_fails,
        ("git_log", "git_add", "git_commit"),
        mounted=True,
    ),
    Server(
        "time",
        lambda outside: _python("mcp-server-time"),
        _time_works,
        _nothing_to_try,
        ("convert_time", "get_current_time"),
    ),
    Server(
        "fetch",
        lambda outside: _python("mcp-server-fetch", "--ignore-robots-txt", "--allow-private-ips"),
        _fetch_works,
        _fetch_fails,
        ("fetch",),
        reaches=True,
    ),
    Server(
        "sqlite",
        lambda outside: _python("mcp-server-sqlite", "--db-path", f"{outside.share}/own.db"),
        _sqlite_works,
        _sqlite_fails,
        ("create_table", "write_query", "read_query"),
        mounted=True,
    ),
)


def needed(server: Server) -> None:
    """Skip the test where what it needs is not installed."""
    if server.name == "playwright":
        tooling.need("chromium")
