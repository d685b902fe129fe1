"""`ringfence serve`: the gateway, over HTTP or over stdin and stdout."""

from __future__ import annotations

import gc
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import anyio
import anyio.abc
import anyio.to_thread
import typer
from starlette.types import Scope

from ringfence import config, identity
from ringfence.audit.explain import summary
from ringfence.cli import common
from ringfence.cli.terminal import foreign, safe
from ringfence.compose.console import LINK_SECONDS, make_console, new_link
from ringfence.compose.gateway import App
from ringfence.config import Config, GatewaySettings
from ringfence.config.checks import exposed
from ringfence.core import own_ports, system
from ringfence.core.model import Json
from ringfence.front.answers import AnswersFront
from ringfence.front.http import HttpFront, Identify, MetricsPage
from ringfence.front.identify import PEER, Identities
from ringfence.front.listen import (
    AT_A_SOCKET,
    LOOPBACK,
    GatewayApp,
    Listener,
    open_socket,
    same_user,
    tls_context,
    unix_socket,
)
from ringfence.front.stdio import StdioFront
from ringfence.governance.by_webhook import WebhookAnswers
from ringfence.telemetry.logs import log_as_json
from ringfence.telemetry.registry import CONTENT_TYPE

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
        elif at.socket is not None:
            with unix_socket(at.socket) as listening:
                app.http = HttpFront(app.front, _identify(app), AT_A_SOCKET, None, at.url)
                announce(app, f"unix:{at.socket}", demo)
                await _http(app, at, listening, by_account=True)
        else:
            await _tcp(app, at, demo)
        group.cancel_scope.cancel()


async def _tcp(app: App, at: GatewaySettings, demo: bool) -> None:
    tls = None if at.tls is None else tls_context(at.tls.cert, at.tls.key)
    listening = open_socket(at.host, at.port)
    address, port = listening.getsockname()[:2]
    # Where agents are declared, each has tokens of its own.
    needed = not system.tells_peers() and not app.directory.tells_apart
    token = identity.local_token(config.key_folder()) if needed else None
    # What reaches us over another address than loopback may come out of a box of ours, or through a proxy.
    by_account = config.is_loopback(at.host) and not at.trusted_proxy
    scheme: Literal["http", "https"] = "http" if tls is None else "https"
    identify = _identify(app, token, by_account=by_account)
    app.http = HttpFront(app.front, identify, LOOPBACK, port, at.url, scheme)
    host = f"[{address}]" if ":" in address else address
    mark = own_ports.announce(address, port)
    base = at.url or f"{scheme}://{host}:{port}"
    announce(app, f"{base}/mcp", demo, token)
    await _tell_console(app, base)
    try:
        await _http(app, at, listening, tls, by_account=by_account)
    finally:
        if mark is not None:
            mark.close()


async def _tell_console(app: App, base: str) -> None:
    """Say where the console is, on the terminal of the gateway: with a link for the person of this account."""
    if identity.person_of(app.config.people, identity.os_user()) is None:
        print(f"Console, for people with a token (ringfence token create --person NAME): {base}/console\n", flush=True)
        return
    if _goes_to_a_journal():
        print(f"Console: {base}/console (ringfence console prints a link on your terminal)\n", flush=True)
        return
    made, link = new_link()
    await app.store.write(lambda tx: tx.put_token(made))
    print(f"Console, by a link that works once, within {LINK_SECONDS // 60} minutes:\n\n  {base}{link}\n", flush=True)


def _goes_to_a_journal() -> bool:
    """Whether stdout is that of a service: a journal keeps it, and others may read that."""
    try:
        return stat.S_ISSOCK(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def _identify(app: App, token: str | None = None, *, by_account: bool = True) -> Identify:
    """Says which agent a caller is; a reload of the configuration can declare agents, or none any more."""
    own = same_user(lambda: app.agent, token) if by_account else _nobody
    known = Identities(lambda: app.directory, app.tokens, by_account=by_account, issued=app.issued)
    return lambda scope: known(scope) if app.directory.tells_apart else own(scope)


def _published(app: App) -> Json | None:
    """What clients need to know to get a token; None where they need none."""
    if not app.directory.tells_apart:
        return None
    issuer = app.config.gateway.oidc
    if issuer is None:
        return {}
    scopes = list(dict.fromkeys([*issuer.scopes, *app.config.gateway.step_up]))
    more: Json = {"authorization_servers": [issuer.issuer], **({"scopes_supported": scopes} if scopes else {})}
    if "://" in issuer.audience:
        more["resource"] = issuer.audience  # what tokens must name
    return more


def _nobody(scope: Scope) -> None:
    return None


def _is_operator(by_account: bool) -> Callable[[Scope], bool]:
    """Says whether a request comes from the account of this gateway, which can read its state anyway. A caller with
    a credential is judged by that."""
    mine = os.getuid() if by_account and system.tells_peers() else None

    def is_operator(scope: Scope) -> bool:
        shows = any(name == b"authorization" for name, _ in scope["headers"])
        return mine is not None and scope.get(PEER) == mine and not shows

    return is_operator


async def _http(
    app: App, at: GatewaySettings, listening: socket.socket, tls: ssl.SSLContext | None = None, *, by_account: bool
) -> None:
    front = app.http
    assert front is not None
    apart, only = app.directory.tells_apart, at.trusted_proxy
    metrics = MetricsPage(app.metrics_text, CONTENT_TYPE.encode(), _is_operator(by_account))
    console = make_console(app, front)
    by_webhook = WebhookAnswers(app.store, lambda: app.config.people, app.clean)
    answers = AnswersFront(by_webhook.take, front.refusals)
    serves = GatewayApp(front, lambda: _published(app), metrics, console, answers)
    # Agents and people of other accounts show tokens.
    listener = Listener(serves, tokens=apart or bool(app.config.people), only=only, tls=tls)
    # Everything loaded by now stays: the garbage collector need not look at it again every few calls.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    async with anyio.create_task_group() as group:
        group.start_soon(front.sessions.sweep)
        group.start_soon(front.shut_out)
        try:
            await listener.run_on([listening])
        finally:
            console.close()
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


def announce(app: App, url: str, demo: bool, token: str | None = None) -> None:
    """Print what a person needs once the gateway is up."""
    tools = [t["name"] for t in app.front.listing.tools()]
    print(f"Ringfence serves {len(tools)} tools at {url}: {', '.join(tools) or 'none yet'}", flush=True)
    print(f"State and audit log: {app.store.folder}", flush=True)
    if url.startswith("unix:"):
        print(
            f"Clients speak HTTP there, to http://localhost/mcp, as in: ringfence call TOOL --url {url}\n", flush=True
        )
        print("Paste into .mcp.json, for a client that speaks no HTTP over unix sockets:\n", flush=True)
        command, *arguments = common.own_command()
        started = [*arguments, "serve", "--stdio", "--config", str(app.config.path)]
        entry: dict[str, object] = {"command": command, "args": started}
    else:
        print("\nPaste into .mcp.json:\n", flush=True)
        entry = {"type": "http", "url": url}
    if app.directory.tells_apart and not url.startswith("unix:"):
        entry["headers"] = {"Authorization": "Bearer TOKEN"}
        print("Callers show a token: ringfence token create --agent NAME prints one for TOKEN below.", flush=True)
    elif token is not None:
        entry["headers"] = {"Authorization": f"Bearer {token}"}
    print(f"  {json.dumps({'mcpServers': {'ringfence': entry}})}\n", flush=True)
    if demo:
        typed = _own_command()
        print(_TRY.replace("URL", url).replace("ringfence ", f"{typed} "), flush=True)


def _own_command() -> str:
    """What to type for `ringfence`: after `make run` it is in a virtual environment that is not on the PATH."""
    if shutil.which("ringfence"):
        return "ringfence"
    if sys.argv[0].endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m ringfence.cli.main"
    return shlex.quote(sys.argv[0])


# ── What happens meanwhile ────────────────────────────────────────────────────────────────────────


_PRINTED_TOGETHER_SECONDS = 0.3
"""What happens within this time is printed together."""
_TRY = """Three calls to try, in another terminal:

  1. allowed — rule std-read of preset standard lets a read pass:
     ringfence call search_docs --args '{"query": "refunds"}' --url URL

  2. waits for approval — the contract requires one when the priority is high:
     ringfence call create_ticket --args '{"title": "Broken", "priority": "high"}' --url URL
     ringfence approvals list --demo          (in a third terminal, while the call waits)
     ringfence approvals approve ID --demo

  3. refused — rule no-bulk-delete denies it, and the refusal is on record:
     ringfence call delete_all_tickets --url URL

How each ends is printed below; `ringfence audit explain last --demo` explains it. Stop with Ctrl-C.
"""


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
                answer = f"{_own_command()} approvals approve {approval.id}{place}"
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
