"""`ringfence wrap`: any stdio MCP server in a box, as a drop-in command for a client that knows nothing of us."""

from __future__ import annotations

from pathlib import Path

import typer

from ringfence.cli import common, program

_Words = typer.Argument(None, metavar="-- COMMAND…", help="The server's command, as its client would start it.")
_Mounts = typer.Option(
    None, "--mount", metavar="HOST:AT[:ro|rw]", help="A folder or file of yours that it sees; ro. May be repeated."
)
_Unsafe = typer.Option(None, "--unsafe", metavar="REASON", help="Why a folder with credentials may be mounted.")
_Network = typer.Option(None, "--network", metavar="NAME", help="A network of your ringfence.yaml that it may reach.")
_Allow = typer.Option(
    None, "--allow", metavar="HOST[:PORT]", help="A host, `*.suffix` or address that it may reach. May be repeated."
)
_Listen = typer.Option(False, "--listen", help="Let it wait for connections, which only its own box can make.")
_Env = typer.Option(
    None, "--env", metavar="K=V", help="A variable of the server; K alone: the one that wrap has. May be repeated."
)
_Memory = typer.Option(None, "--memory", min=16, max=2**24, metavar="MB", help="Memory of its box, in MiB.")
_Disk = typer.Option(None, "--disk", min=1, max=2**24, metavar="MB", help="Room in its workspace, in MiB.")
_Pids = typer.Option(None, "--pids", min=1, max=1_000_000, metavar="N", help="Processes and threads.")
_Config = typer.Option(
    None, "--config", help="A ringfence.yaml for networks, limits and state. Left out: the user's own, if there is one."
)


def wrap(
    words: list[str] | None = _Words,
    mount: list[str] | None = _Mounts,
    unsafe: str | None = _Unsafe,
    network: str | None = _Network,
    allow: list[str] | None = _Allow,
    listen: bool = _Listen,
    env: list[str] | None = _Env,
    memory: int | None = _Memory,
    disk: int | None = _Disk,
    pids: int | None = _Pids,
    config_path: Path | None = _Config,
) -> None:
    """Run a stdio MCP server in a box of its own: its code and what you name is all it sees of this machine.

    Stdin and stdout are passed through byte for byte, stderr too. It has no network and none of your environment. The
    interpreter, virtual environment or node_modules that the command needs are found from it and shown read-only.
    Signals are passed on; the exit code is the server's, and 128+n for one that died of signal n. Ours are: 2 wrong
    usage, 125 the box itself failed. What a server that fails seems to lack is said on stderr, with the option for it.

    \b
    ringfence wrap -- node node_modules/.bin/mcp-server-memory
    ringfence wrap --mount ~/notes:/notes -- mcp-server-filesystem /notes
    ringfence wrap --mount .:/repo:rw -- .venv/bin/mcp-server-git --repository /repo
    ringfence wrap --allow api.example.com:443 --env API_URL=https://api.example.com -- ./server
    """
    if not words:
        common.fail("nothing to run: ringfence wrap [OPTIONS] -- COMMAND…", 2)
    wrapped = common.loaded("ringfence.cli.wrapped")
    spec = wrapped.spec(list(words), wrapped.mounts(mount or [], unsafe or ""), wrapped.variables(env or []))
    settings = wrapped.settings(config_path, network)
    limits = wrapped.limits(memory, disk, pids)
    wanted = wrapped.Wanted(spec, network or "denied", program.places(allow or []), limits, listen)
    raise typer.Exit(common.run(wrapped.run, wanted, settings))
