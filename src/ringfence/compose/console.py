"""The console of a gateway, and the links that let people in."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence import config, identity
from ringfence.audit.keys import PUBLIC, published
from ringfence.compose.examined import kept
from ringfence.compose.gateway import App
from ringfence.console.app import Console
from ringfence.console.gateway import ConsoleGateway, ConsoleServers
from ringfence.core import system
from ringfence.core.model import DEFAULT_TENANT, IssuedToken
from ringfence.front.http import HttpFront
from ringfence.front.refusals import Refusal
from ringfence.store.history import History

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.service import SessionService

LINK_SECONDS = 600
_KEEPER_SECONDS = 20.0


def make_console(app: App, front: HttpFront) -> Console:
    return Console(
        ConsoleGateway(
            store=app.store,
            tokens=app.tokens,
            people=lambda: app.config.people,
            account=identity.os_user(),
            clean=app.clean,
            public_key=_public_key,
            refused=lambda reason, uid: front.refusals.count(Refusal("console", reason, uid)),
            history=History(app.store.folder, app.store.reader),
            is_ours=front.is_ours,
            sessions=partial(_sessions, app),
            boxes=lambda: {
                **app.boxes,
                "reports": kept((app.config.gateway.state, config.state_folder()), app.config.sandbox.backend),
            },
            servers=ConsoleServers(
                specs=lambda: app.config.servers,
                contracts=lambda: app.pipeline.rules.catalog.every(),
                pins=app.pins,
                connected=lambda: {name: int(count) for (name,), count in app.pool.connected().items()},
                accepted=app.refresh,
            ),
        )
    )


@asynccontextmanager
async def _sessions(app: App) -> AsyncIterator[SessionService | None]:
    """A connection of its own: a keeper stays as long as somebody is connected, and looking is no reason to stay."""
    if system.no_boxes() is not None:
        yield None
        return
    from ringfence.compose.keeper import keeper_launch  # noqa: PLC0415 - for Linux alone
    from ringfence.sandbox.keeper.client import KeeperClient  # noqa: PLC0415

    launch = keeper_launch(app.config.gateway.state, app.config.sandbox)
    if not launch.folder.is_found():
        yield None
        return
    async with KeeperClient.connect(launch, request_timeout=_KEEPER_SECONDS) as client:
        yield client


def _public_key() -> Ed25519PublicKey | None:
    folder = config.key_folder()
    return published(folder) if (folder / PUBLIC).exists() else None


def new_link() -> tuple[IssuedToken, str]:
    """A link that lets the person of this account log in to the console, once and soon: what is to be kept of it, and
    what stands behind the address of the page, where no request and no log has it."""
    ident, text, digest = identity.new_token()
    now = time.time()
    user = identity.os_user()
    made = IssuedToken(ident, digest, "link", user, DEFAULT_TENANT, user, now, now + LINK_SECONDS)
    return made, f"/console/login#{text}"
