"""The keeper of a user's sessions: what it is made of, the program that it is, and how clients reach it.

A part of the composition root, below `runs`: whoever only keeps sessions loads neither policy nor store. The program is
started by its first client, in a session of its own, with nothing of the client's but the settings that it is told.
"""

from __future__ import annotations

import importlib
import os
import site
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from ringfence import canonical
from ringfence.backends import make_backend, templates
from ringfence.box import MIB, NetworkRule, Serve
from ringfence.config import paths
from ringfence.config.settings import SandboxSettings
from ringfence.identity import peer_uid
from ringfence.ports import Backend, Borrowing, Packing
from ringfence.sandbox.capacity import HouseRules
from ringfence.sandbox.codec import from_json, pack, to_json, unpack
from ringfence.sandbox.house import House
from ringfence.sandbox.keeperhome import Home, Starting
from ringfence.sandbox.keeperlife import Life, live
from ringfence.sandbox.keeperlink import Keeper
from ringfence.sandbox.rooms import ServeBy

LINGER_SECONDS = 10.0
_ROOT = str(Path(__file__).resolve().parent.parent)
# Forked first, so that whoever started it has no child to wait for. The modules are those that its client has.
_PROGRAM = """\
import os, sys
os.fork() and os._exit(0)
sys.path[:0] = [root for root in [sys.argv.pop(1)] if root not in sys.path]
from ringfence.keeper import main
main()
"""


def keeper_of(state: Path, settings: SandboxSettings, *, linger: float = LINGER_SECONDS) -> Keeper:
    """The way to the keeper of a state folder, which is started when it is needed."""
    return Keeper(starting(state, settings, linger=linger))


def starting(state: Path, settings: SandboxSettings, *, linger: float = LINGER_SECONDS) -> Starting:
    home = Home(Path(os.path.realpath(state)) / "keeper", paths.socket_folders(state))
    # Neither its environment nor the folder that it stands in says what is loaded.
    flags = ("-E", "-P") if site.ENABLE_USER_SITE else ("-E", "-P", "-s")
    where = (_ROOT, str(linger), str(home.folder), *map(str, home.sockets))
    return Starting(
        home,
        (sys.executable, *flags, "-c", _PROGRAM, *where),
        paths.process_environment() | paths.trust_environment() | paths.index_environment(),
        to_json(pack(SandboxSettings, settings, [])),
        terms(settings),
    )


def terms(settings: SandboxSettings) -> str:
    """What boxes are made of. How many there may be is for the first client to say; what they are is not."""
    made_of = {
        "backend": settings.backend,
        "accept_missing": sorted(settings.accept_missing),
        "templates": {name: list(packages) for name, packages in templates(settings).items()},
        "build_packages": settings.build_packages,
        "setups": {name: [setup.source, dict(setup.env), dict(setup.files)] for name, setup in settings.setups.items()},
    }
    return canonical.digest(made_of)


def house_rules(settings: SandboxSettings) -> HouseRules:
    memory = settings.max_sessions_memory_mb
    return HouseRules(
        max_sessions=settings.max_sessions,
        max_memory_bytes=None if memory is None else memory * MIB,
        max_cores=settings.max_sessions_cpu_cores,
        queue_seconds=settings.session_queue_seconds,
        retain_seconds=settings.session_retain_seconds,
        retain_bytes=settings.session_retain_mb * MIB,
        paused_seconds=settings.session_paused_seconds,
    )


def _serve_by(packing: Callable[[], Packing]) -> ServeBy:
    @cache
    def serving() -> Any:
        return importlib.import_module("ringfence.outward").Serving(packing=packing)

    def serve(rules: tuple[NetworkRule, ...], borrowing: Borrowing | None) -> Serve:
        """Loaded when a session wants a way out: most have none, and few have secrets."""
        handed = None if borrowing is None else importlib.import_module("ringfence.borrowing").Borrowed(borrowing)
        served: Serve = serving().by(rules, handed)
        return served

    return serve


def _packing(state: Path, backend: Backend, settings: SandboxSettings) -> Callable[[], Packing]:
    """Loaded when programs in a session may install something."""
    return cache(lambda: importlib.import_module("ringfence.storehouse").Packer(state, backend, settings))


def main() -> None:
    """The program: how long it lingers, its folders, and where it says that it is ready; its settings on stdin."""
    linger, folder, *sockets, ready = sys.argv[1:]
    settings: SandboxSettings = unpack(SandboxSettings, from_json(sys.stdin.buffer.read()), [])

    @asynccontextmanager
    async def open_house() -> AsyncIterator[House]:
        backend = make_backend(settings)
        try:
            state, rules = Path(folder).parent, house_rules(settings)
            serve = _serve_by(_packing(state, backend, settings))
            yield await House.open(backend, state / "sessions", rules, serve, peer_uid)
        finally:
            await backend.close()

    home = Home(Path(folder), tuple(map(Path, sockets)))
    live(Life(home, terms(settings), float(linger), open_house), int(ready))
