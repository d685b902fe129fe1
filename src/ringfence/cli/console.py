"""`ringfence console`: a link to the console of a running gateway, for the person at this terminal."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import typer

from ringfence import config, identity
from ringfence.cli import common
from ringfence.cli.terminal import tell
from ringfence.compose.console import LINK_SECONDS, new_link
from ringfence.core import system

_SECONDS = 5.0


def console(
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    url: str | None = typer.Option(
        None, "--url", metavar="URL", help="Where the gateway is, if not where the configuration says."
    ),
) -> None:
    """Print a link that logs you in to the console of a running gateway, once.

    It is shown on the terminal itself, never on stdout, and works for ten minutes. People whose account is not that of
    the gateway log in with a token: ringfence token create --person NAME.

    \b
    ringfence console
    ringfence console --demo
    ringfence console --url http://127.0.0.1:8701
    """
    settings = common.demo_config() if demo else common.load(config_path)
    user = identity.os_user()
    if identity.person_of(settings.people, user) is None:
        common.fail(f"account {user} is not one of the people in {settings.path}; log in with a token of a person")
    at = settings.gateway
    if url is None and at.socket is not None:
        common.fail(f"the gateway listens on unix:{at.socket}, where no browser can look; let it listen on HOST:PORT")
    scheme = "http" if at.tls is None else "https"
    base = (url or at.url or f"{scheme}://{at.host}:{at.port}").removesuffix("/mcp").rstrip("/")
    _reached(base)
    made, link = new_link()
    with common.writing(at.state) as store:
        store.write_sync(lambda tx: tx.put_token(made))
    tell(f"{base}{link}\n\nIt logs {user} in, once, within {LINK_SECONDS // 60} minutes.\n")


def _reached(base: str) -> None:
    """Make no link that leads nowhere, or to a port that another account of this machine holds."""
    place = urlsplit(base)
    host = place.hostname or ""
    try:
        port = place.port or (443 if place.scheme == "https" else 80)
        with socket.create_connection((host, port), timeout=_SECONDS) as connection:
            if place.scheme == "https" or not config.is_loopback(host) or not system.tells_peers():
                return
            # Whose it is can be known once it has taken the connection.
            connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
            connection.recv(1)
            whose = identity.peer_uid(connection)
    except (OSError, ValueError):
        common.fail(f"no gateway listens at {base}; start it (ringfence serve), or name its address with --url URL")
    if whose not in (os.geteuid(), 0):
        common.fail(f"what listens at {base} is no gateway of this account: it would learn the link")
