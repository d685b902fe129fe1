"""`ringfence serve`: the gateway, over HTTP or over stdin and stdout."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import anyio
import anyio.abc
import anyio.to_thread
import typer

from ringfence.audit.explain import summary
from ringfence.cli import common
from ringfence.cli.terminal import foreign, safe
from ringfence.compose.gateway import App
from ringfence.config import Config, GatewaySettings
from ringfence.config.checks import exposed
from ringfence.front.stdio import StdioFront
from ringfence.telemetry.logs import log_as_json

log = logging.getLogger("ringfence")


def serve(
    config_path: Path | None = common.ConfigOption,
    stdio: bool = typer.Option(False, "--stdio", help="Speak MCP on stdin and stdout instead of HTTP."),
    host: str | None = typer.Option(
        None, "--host", metavar="ADDRESS", help="Address to listen on; others than loopback need identity and TLS."
    ),
    port: int | None = typer.Option(
        None, "--port", min=0, max=65_535, metavar="N", help="Port to listen on; 0 takes a free one."
    ),
    demo: bool = typer.Option(False, "--demo", help="Serve the built-in example, which needs no configuration."),
    agent: str | None = common.AgentOption,
) -> None:
    """Serve the gateway that a ringfence.yaml describes.

    Without --config it takes ./ringfence.yaml; --demo needs none. SIGHUP reloads the file. On a machine with several
    users, set `listen: unix:PATH` in the file.

    \b
    ringfence serve --demo                       try it, without any configuration
    ringfence serve --config ringfence.yaml      serve over HTTP on loopback
    ringfence serve --stdio                      as the command of an MCP client
    """
    if demo and config_path is not None:
        common.fail("--demo and --config: give one of them", 2)
    settings = common.demo_config() if demo else _settings(config_path, stdio)
    at = settings.gateway if host is None and port is None else replace(settings.gateway, socket=None)
    at = replace(at, host=host or at.host, port=at.port if port is None else port)
    if not stdio and at.socket is None:
        problem = exposed(at.host, at, agents=bool(settings.agents))
        if problem is not None:
            common.fail(f"refusing to listen on {at.host}: {problem}", 2)
    if agent is not None and not stdio:
        common.fail("--agent is for --stdio: over HTTP, each caller says by a token which agent it is", 2)
    named = common.local_agent(settings, agent) if stdio else None
    if settings.gateway.log == "json":
        log_as_json()
    for warning in settings.warnings:
        log.warning("%s", warning)
    try:
        common.run(_main, settings, None if stdio else at, demo, named, fast=True)
    except KeyboardInterrupt:
        return


def _settings(config_path: Path | None, stdio: bool) -> Config:
    if not stdio:
        return common.load(config_path)
    # Clients start their servers in a folder of their own choice.
    example = "as in ringfence serve --stdio --config /path/to/ringfence.yaml (a client starts this in any folder)"
    return common.load(config_path, f"{example}, or try without: ringfence serve --stdio --demo")


async def _main(settings: Config, at: GatewaySettings | None, demo: bool, agent: str | None) -> None:
    """`at`: where to listen; None: on stdin, and then for this agent, where some are declared."""
    # A client that started us on its own pipe may give up soon; one that connects finds us up.
    async with App.open(settings, at_once=at is None, agent=agent) as app, anyio.create_task_group() as group:
        # Before anything is announced, so that a signal which comes at once is handled.
        await group.start(_signals, app, group.cancel_scope, demo)
        await group.start(app.run_hooks)
        group.start_soon(_narrate, app, demo, sys.stderr if at is None else sys.stdout)
        if not demo:
            group.start_soon(app.watch)
            group.start_soon(app.retain)
        group.start_soon(app.warm)
        if at is None:
            app.stdio = StdioFront(app.front, lambda: app.agent)
            await app.stdio.run()
        else:
            from ringfence.cli.serve_http import serve_http  # noqa: PLC0415 - a client on a pipe waits for its answer

            await serve_http(app, at, demo)
        group.cancel_scope.cancel()


async def _signals(
    app: App,
    scope: anyio.CancelScope,
    demo: bool,
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    if sys.platform == "win32":  # its event loop handles no signals; Ctrl-C ends it anyway
        task_status.started()
        return
    with anyio.open_signal_receiver(signal.SIGHUP, signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            if number != signal.SIGHUP:
                app.pipeline.stopping = True
                scope.cancel()
                return
            if not demo:  # the demo has no file of its own to read again
                await app.reload(asked=True)


# ── What happens meanwhile ────────────────────────────────────────────────────────────────────────


_PRINTED_TOGETHER_SECONDS = 0.3
"""What happens within this time is printed together."""


async def _narrate(app: App, demo: bool, file: TextIO) -> None:
    """Tell the person at the terminal which calls wait for an approval and, in the demo, how each call ends."""
    store = app.store
    place = " --demo" if demo else f" --config {safe(shlex.quote(str(app.config.path)))}"
    asked: set[str] = set()
    printed = 0
    while True:
        await store.written.wait()
        await anyio.sleep(_PRINTED_TOGETHER_SECONDS)
        store.written.clear()
        waiting = store.reader().pending()
        for question in waiting:
            approval = None if question in asked else store.reader().approval(question, brief=True)
            if approval is not None and approval.state == "pending":
                answer = f"{common.typed_command()} approvals approve {approval.id}{place}"
                await _tell(f"A call to {foreign(approval.tool)} needs an approval: {answer}", file)
        asked = set(waiting)
        if not demo:
            continue
        newest = store.reader().records(chain=store.chain, kind="finished", newest_first=True, limit=20)
        fresh = [record for record in newest if record.seq > printed]
        for record in reversed(fresh):
            printed = max(printed, record.seq)
            call = record.body.get("call") or {}
            if call.get("kind") != "server" and record.call_id is not None:
                said = summary([r.body for r in store.reader().story(record.call_id)])
                await _tell(f"{record.call_id}: {safe(said)}", file)


async def _tell(text: str, file: TextIO) -> None:
    """In a thread: a reader that stands still must not stop the gateway, and one that is gone must not end it."""
    try:
        await anyio.to_thread.run_sync(partial(print, text, file=file, flush=True), abandon_on_cancel=True)
    except OSError as exc:
        log.warning("could not write to the terminal: %s (%s)", exc.strerror, text)
