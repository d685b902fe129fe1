"""`ringfence serve` over HTTP: at a TCP address or a unix socket, with the console and the page of metrics.

A gateway on the pipe of its client has none of this, and its client waits meanwhile, so it is loaded for HTTP alone.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from typing import Literal

import anyio
from starlette.types import Scope

from ringfence import config, identity
from ringfence.cli import common
from ringfence.compose.console import LINK_SECONDS, make_console, new_link
from ringfence.compose.gateway import App
from ringfence.config import GatewaySettings
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
from ringfence.governance.by_webhook import WebhookAnswers
from ringfence.telemetry.registry import CONTENT_TYPE

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


async def serve_http(app: App, at: GatewaySettings, demo: bool) -> None:
    """Serve there until this is cancelled."""
    if at.socket is None:
        await _tcp(app, at, demo)
        return
    with unix_socket(at.socket) as listening:
        app.http = HttpFront(app.front, identify(app), AT_A_SOCKET, None, at.url)
        announce(app, f"unix:{at.socket}", demo)
        await _http(app, at, listening, by_account=True)


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
    app.http = HttpFront(app.front, identify(app, token, by_account=by_account), LOOPBACK, port, at.url, scheme)
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


def identify(app: App, token: str | None = None, *, by_account: bool = True) -> Identify:
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
        typed = common.typed_command()
        print(_TRY.replace("URL", url).replace("ringfence ", f"{typed} "), flush=True)
