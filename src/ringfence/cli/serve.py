"""`ringfence serve`: the gateway, over HTTP or over stdin and stdout."""

from __future__ import annotations

import gc
import json
import logging
import secrets
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import anyio
import anyio.abc
import typer

from ringfence import config, identity, system
from ringfence.app import App
from ringfence.cli import common
from ringfence.cli.demo.narrate import narrate
from ringfence.config import Config
from ringfence.front.http import HttpFront
from ringfence.front.listen import LOOPBACK, Listener, Site, open_socket, same_user
from ringfence.front.stdio import StdioFront

log = logging.getLogger("ringfence")


def serve(
    config_path: Path | None = common.ConfigOption,
    stdio: bool = typer.Option(False, "--stdio", help="Speak MCP on stdin and stdout instead of HTTP."),
    host: str | None = typer.Option(None, "--host", help="Address to listen on; loopback only in this version."),
    port: int | None = typer.Option(None, "--port", help="Port to listen on; 0 takes a free one."),
    demo: bool = typer.Option(False, "--demo", help="Serve the built-in example: no configuration needed."),
) -> None:
    """Serve the gateway that a ringfence.yaml describes.

    Without --config it takes ./ringfence.yaml; with --demo it needs none. SIGHUP reads the file again.

    \b
    ringfence serve --demo                       try it, without any configuration
    ringfence serve --config ringfence.yaml      serve over HTTP on loopback
    ringfence serve --stdio                      as the command of an MCP client
    """
    settings = demo_config(port) if demo else common.load(config_path)
    listen = (host or settings.gateway.host, port if port is not None else settings.gateway.port)
    if not stdio and not config.is_loopback(listen[0]):
        common.fail(
            f"refusing to listen on {listen[0]}: callers from elsewhere cannot prove who they are yet. "
            "Use 127.0.0.1, or --stdio.",
            2,
        )
    for warning in settings.warnings:
        log.warning("%s", warning)
    try:
        common.run(_main, settings, stdio, listen, demo, fast=True)
    except KeyboardInterrupt:
        return


def demo_config(port: int | None) -> Config:
    folder = resources.files("ringfence.cli.demo")
    text = folder.joinpath("ringfence.yaml").read_text(encoding="utf-8")
    with resources.as_file(folder.joinpath("server.py")) as server:
        text = text.replace("@PYTHON@", sys.executable).replace("@SERVER@", str(server))
        settings = config.loads(text, file="ringfence.yaml", base=Path(str(server)).parent)
    return replace(settings, gateway=replace(settings.gateway, state=common.demo_state()))


async def _main(settings: Config, stdio: bool, listen: tuple[str, int], demo: bool) -> None:
    async with App.open(settings) as app, anyio.create_task_group() as group:
        # Before anything is announced: a signal that comes at once must find somebody who takes it.
        await group.start(_signals, app, group.cancel_scope, demo)
        if demo and not stdio:
            group.start_soon(narrate, app.store)
        if not demo:
            group.start_soon(app.watch)
        group.start_soon(app.warm)
        if stdio:
            app.stdio = StdioFront(app.front, lambda: app.agent)
            await app.stdio.run()
        else:
            await _http(app, listen, demo)
        group.cancel_scope.cancel()


async def _http(app: App, listen: tuple[str, int], demo: bool) -> None:
    socket = open_socket(*listen)
    address, port = socket.getsockname()[:2]
    token = None if system.tells_peers() else identity.local_token(config.key_folder())
    front = app.http = HttpFront(app.front, same_user(lambda: app.agent, token), LOOPBACK, port)
    listener = Listener(Site(front))
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    # What is loaded now stays for good: the collector need not look at it again for every few calls.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    announce(app, url, demo, token)
    async with anyio.create_task_group() as group:
        group.start_soon(front.sessions.sweep)
        try:
            await listener.run_on([socket])
        finally:
            with anyio.CancelScope(shield=True):
                await front.sessions.close()
            group.cancel_scope.cancel()


async def _signals(
    app: App,
    scope: anyio.CancelScope,
    demo: bool,
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    if sys.platform == "win32":  # where an event loop takes no signals; Ctrl-C ends it by itself
        task_status.started()
        return
    with anyio.open_signal_receiver(signal.SIGHUP, signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            if number != signal.SIGHUP:
                scope.cancel()
                return
            if not demo:  # the demo has no file of its own to read again
                await app.reload(asked=True)


def announce(app: App, url: str, demo: bool, token: str | None = None) -> None:
    """What a person sees when the gateway is up."""
    tools = [t["name"] for t in app.front.shelf.tools()]
    print(f"Ringfence serves {len(tools)} tools at {url}/mcp: {', '.join(tools) or 'none yet'}", flush=True)
    print(f"State and audit log: {app.store.folder}", flush=True)
    print(f"Console (one-time link, for when it comes): {url}/console?link={secrets.token_urlsafe(16)}\n", flush=True)
    print("Paste into .mcp.json:\n", flush=True)
    entry: dict[str, object] = {"type": "http", "url": f"{url}/mcp"}
    if token is not None:
        entry["headers"] = {"Authorization": f"Bearer {token}"}
    print(f"  {json.dumps({'mcpServers': {'ringfence': entry}})}\n", flush=True)
    if demo:
        command = _own_command()
        print(_TRY.replace("URL", f"{url}/mcp").replace("ringfence ", f"{command} "), flush=True)


def _own_command() -> str:
    """What to type for `ringfence`: right after `make run` it is in a virtual environment that no shell knows of."""
    if shutil.which("ringfence"):
        return "ringfence"
    if sys.argv[0].endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m ringfence.cli.main"
    return shlex.quote(sys.argv[0])


_TRY = """Three calls to try, in another terminal:

  1. allowed — rule std-read of preset standard lets a read pass:
     ringfence call search_docs --args '{"query": "refunds"}' --url URL

  2. waits for a person, and gets it — the contract asks one when the priority is high:
     ringfence call create_ticket --args '{"title": "Broken", "priority": "high"}' --url URL
     ringfence approvals list --demo          (in a third terminal, while the call waits)
     ringfence approvals approve ID --demo

  3. refused — rule no-bulk-delete denies it, and the refusal is on record:
     ringfence call delete_all_tickets --url URL

What `ringfence audit explain last --demo` says of each is printed below as it ends. Stop with Ctrl-C.
"""
