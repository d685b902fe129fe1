"""`ringfence wrap`: any stdio MCP server in a box, as a drop-in command for an MCP client."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import typer

from ringfence.cli import common, named_paths, options, program
from ringfence.cli.streams import StdinPipe
from ringfence.cli.terminal import safe
from ringfence.config import paths, validators
from ringfence.config.folders import declared
from ringfence.config.settings import Config
from ringfence.core.box import Mount, Stream
from ringfence.core.errors import RingfenceError
from ringfence.core.model import SYSTEM, ServerSpec, ServerVolume
from ringfence.core.record import dataclass
from ringfence.core.system import write_all

if TYPE_CHECKING:
    from ringfence.cli.init.planning import Runner
    from ringfence.compose.runs import Runs
    from ringfence.sandbox.servers.boxed_server import BoxedServer

_NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_FETCHERS = ("npx", "bunx", "npm", "pnpm", "yarn", "uvx", "uv", "pipx", "cmd")

_Words = typer.Argument(None, metavar="-- COMMAND…", help="The server's command, as its client would start it.")
_Mounts = typer.Option(
    None,
    "--mount",
    metavar="HOST:AT[:ro|rw]",
    help="A folder or file of this host that it sees, by default read-only. May be repeated.",
)
_Volumes = typer.Option(
    None,
    "--volume",
    metavar="NAME:AT",
    help="A folder that outlives the box, for what the server keeps. May be repeated.",
)
_Unsafe = typer.Option(None, "--unsafe", metavar="REASON", help="Why a folder with credentials may be mounted.")
_Network = typer.Option(None, "--network", metavar="NAME", help="A network of your ringfence.yaml that it may reach.")
_Env = typer.Option(
    None, "--env", metavar="K=V", help="A variable of the server; K alone copies ours. May be repeated."
)
_Config = typer.Option(
    None,
    "--config",
    metavar="FILE",
    help="A ringfence.yaml for networks, limits and state. Default: the user's own, if there is one.",
)


def wrap(
    words: list[str] | None = _Words,
    mount: list[str] | None = _Mounts,
    volume: list[str] | None = _Volumes,
    unsafe: str | None = _Unsafe,
    network: str | None = _Network,
    allow: options.Allow = None,
    listen: options.Listen = False,
    env: list[str] | None = _Env,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    config_path: Path | None = _Config,
) -> None:
    """Run a stdio MCP server in a box of its own. It sees only its own code and what you name.

    Stdin, stdout and stderr are passed through byte for byte. It has no network and none of your environment. The
    interpreter, virtual environment or node_modules that it needs are detected from the command and mounted read-only.
    What npx, uvx or pipx would fetch is fetched once, in a box that reaches its registry alone.
    Signals are passed on. The exit code is the server's, or 128+n if signal n killed it; Ringfence's own are: 2 wrong
    usage, 125 the box itself failed. If the server fails, stderr says what it seems to lack, with the option for it.

    \b
    ringfence wrap -- npx -y @modelcontextprotocol/server-memory
    ringfence wrap --volume memory:/data --env MEMORY_FILE_PATH=/data/memory.jsonl -- \\
        node node_modules/.bin/mcp-server-memory
    ringfence wrap --mount ~/notes:/notes -- mcp-server-filesystem /notes
    ringfence wrap --mount .:/repo:rw -- .venv/bin/mcp-server-git --repository /repo
    ringfence wrap --allow api.example.com:443 --env API_URL=https://api.example.com -- ./server
    """
    if not words:
        common.fail("nothing to run: ringfence wrap [OPTIONS] -- COMMAND…", 2)
    spec = _spec(list(words), _mounts(mount or [], unsafe or ""), _variables(env or []))
    spec = replace(spec, volumes=_volumes(volume or []))
    settings = _settings(config_path, network)
    spec = common.run(_fetched, spec, settings)
    limits = _limits(memory, disk, pids)
    wanted = WrapRequest(spec, network or "denied", program.places(allow or []), limits)
    raise typer.Exit(common.run(run_server, wanted, settings))


def _spec(words: list[str], mounted: tuple[Mount, ...], env: dict[str, str]) -> ServerSpec:
    name = Path(words[0]).name
    return ServerSpec(name, tuple(words), env=env, cwd=str(Path.cwd()), mounts=mounted)


def _mounts(given: list[str], unsafe: str) -> tuple[Mount, ...]:
    """The mounts, each written as HOST:AT[:ro|rw]; HOST alone is seen at its own path."""
    out: list[Mount] = []
    for text in given:
        words = text.split(":")
        mode = words.pop() if words[-1] in ("ro", "rw") and len(words) > 1 else "ro"
        if len(words) not in (1, 2) or not all(words):
            common.fail(f"--mount {text}: write HOST:AT, HOST:AT:ro or HOST:AT:rw", 2)
        named = paths.resolve(words[0], Path())
        host = str(named_paths.resolve("--mount", named))
        try:
            mount = Mount(host, words[1] if len(words) == 2 else str(named), "rw" if mode == "rw" else "ro", unsafe)
            out.append(declared(mount, Path()))
        except ValueError as exc:
            common.fail(f"--mount {text}: {str(exc).replace('unsafe: REASON', '--unsafe REASON')}", 2)
    return tuple(out)


def _volumes(given: list[str]) -> tuple[ServerVolume, ...]:
    out: list[ServerVolume] = []
    for text in given:
        name, _, at = text.partition(":")
        try:
            out.append(ServerVolume(validators.volume(name), validators.path_inside(at)))
        except ValueError as exc:
            common.fail(f"--volume {text}: write NAME:AT, as in memory:/data ({exc})", 2)
    return tuple(out)


def _variables(given: list[str]) -> dict[str, str]:
    """K=V, or K for the value in our own environment."""
    pairs: list[str] = []
    for text in given:
        if "=" in text:
            pairs.append(text)
            continue
        value = paths.variable(text)
        if value is None:
            common.fail(f"--env {text}: there is no such variable here", 2)
        pairs.append(f"{text}={value}")
    return dict(program.environment(pairs))


def _limits(memory: int | None, disk: int | None, pids: int | None) -> dict[str, float | int]:
    given = {"memory_bytes": memory, "disk_bytes": disk, "processes": pids}
    return {name: value for name, value in given.items() if value is not None}


def _settings(path: Path | None, network: str | None) -> Config:
    loaded = common.own_config(path)
    if network is not None and network not in loaded.networks:
        known = f"there are: {', '.join(loaded.networks)}" if loaded.networks else "define it under `networks:`"
        common.fail(f"--network {network}: there is no such network in {loaded.path}; {known}", 2)
    return loaded


# ── What npx and uvx would fetch ──


async def _fetched(spec: ServerSpec, settings: Config) -> ServerSpec:
    """The server from its packages, where its command would fetch them: a box without a network cannot. They are
    fetched once, in a box that reaches their registry alone, and kept."""
    from ringfence.cli.init import keeping  # noqa: PLC0415 - `--help` need not load it

    runner: Runner | None = None
    if Path(spec.command[0]).name.partition(".")[0] in _FETCHERS:
        from ringfence.cli.init import planning  # noqa: PLC0415 - most commands fetch nothing

        try:
            runner = planning.taken_apart(spec.command)
        except planning.NotTaken as exc:
            common.fail(f"ringfence wrap: {exc}; install it, and name its program instead", 2)
        if runner is not None:
            spec = await _from_packages(spec, settings, runner)
    store = keeping.known(spec.command, runner.packages if runner is not None else ())
    if store is not None and store.variable is not None and store.variable not in spec.env and not spec.volumes:
        at = keeping.place()
        spec = replace(spec, env={**spec.env, store.variable: f"{at}/{store.file}"})
        if at == keeping.AT:
            spec = replace(spec, volumes=(ServerVolume(store.program, at),))
            common.say(f"ringfence wrap: what it keeps is in the volume {store.program}, which outlives the box")
    return spec


async def _from_packages(spec: ServerSpec, settings: Config, runner: Runner) -> ServerSpec:
    from ringfence.cli.init import planning  # noqa: PLC0415 - as above
    from ringfence.cli.progress import progress  # noqa: PLC0415 - as above
    from ringfence.compose.packages import fetch, mount  # noqa: PLC0415 - it loads all of packages
    from ringfence.packages.install import InstallRequest  # noqa: PLC0415 - as above

    try:
        with progress(f"fetching {' '.join(runner.packages)} in a box"):
            wanted = InstallRequest(runner.kind, runner.packages)
            tree = await fetch(settings.gateway.state, settings.sandbox, wanted)
        command = (*planning.start_words(tree, runner), *runner.arguments)
    except (RingfenceError, ValueError) as exc:
        common.fail(f"ringfence wrap: {exc}", common.NO_BOX)
    seen = mount(tree)
    env = {**spec.env, "PYTHONPATH": seen.at} if tree.kind == "pypi" else spec.env
    return replace(spec, command=command, env=env, mounts=(*spec.mounts, seen))


# ── The server ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WrapRequest:
    """A server, and what its box gets."""

    server: ServerSpec
    network: str = "denied"
    places: tuple[str, ...] = ()
    limits: dict[str, float | int] = field(default_factory=dict)


async def run_server(wanted: WrapRequest, configured: Config) -> int:
    """Run the server until it ends; returns the exit code."""
    from ringfence.compose.runs import Runs  # noqa: PLC0415 - `--help` need not load it
    from ringfence.compose.servers import boxes_of  # noqa: PLC0415 - `--help` need not load it

    server = replace(wanted.server, network=wanted.network, limits=wanted.limits)
    source = StdinPipe()
    started: list[BoxedServer] = []
    try:
        async with Runs.open(configured) as runs:
            boxes = boxes_of(runs.executor, wanted.places, configured.gateway.state)

            async def start() -> None:
                started.append(await boxes.start(server, SYSTEM, source.descriptor))

            with _signals(started):
                await runs.pipeline.server_start(server, SYSTEM, start, wanted.places)
                try:
                    return await _live(started[0])
                finally:
                    await _tell_network(runs, server, started[0])
    except RingfenceError as exc:
        _say(str(exc))
        return common.NO_BOX


async def _tell_network(runs: Runs, spec: ServerSpec, server: BoxedServer) -> None:
    """Nothing here is a call, so all that its box asked of the network is one record."""
    with anyio.CancelScope(shield=True):
        network = server.network_since_start()
        if network is not None and any(network.values()):
            await runs.pipeline.server_network(spec, SYSTEM, network)


async def _live(server: BoxedServer) -> int:
    try:
        async with anyio.create_task_group() as group:
            for stream in _NUMBERS:
                group.start_soon(_pass_on, server, stream)
            report = await server.over()
    finally:
        with anyio.CancelScope(shield=True):
            await server.stop()
    if report.ended not in ("exited", "signalled"):
        limit = f", limit: {report.limit}" if report.limit is not None else ""
        _say(f"the box ended the server ({report.ended}{limit})")
    if report.ended != "exited" or report.exit_status:
        for want in server.lacked():
            _say(f"it wanted {want.what}: {want.option or want.line}")
    return 128 + report.signal if report.signal is not None else report.exit_status or 0


async def _pass_on(server: BoxedServer, stream: Stream) -> None:
    while chunk := await server.receive(stream):
        try:
            # If the client does not read, only this stream waits.
            await anyio.to_thread.run_sync(write_all, _NUMBERS[stream], chunk)
        except OSError:
            server.signal(signal.SIGTERM)  # the client is gone
            return


@contextmanager
def _signals(started: list[BoxedServer]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def heard(number: int) -> None:
        if not started:
            raise SystemExit(128 + number)
        started[0].signal(number)

    for number in _PASSED_ON:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in _PASSED_ON:
            loop.remove_signal_handler(number)


def _say(text: str) -> None:
    print(f"ringfence wrap: {safe(text, lines=True)}", file=sys.stderr, flush=True)
