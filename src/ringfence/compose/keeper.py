"""The keeper of a user's sessions: what it is made of, the program that it is, and how clients reach it.

A part of the composition root, below `runs`: a process that only keeps sessions loads neither policy nor store. Its
first client starts the program, in a session of its own. It inherits nothing of the client but gets its settings.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import ringfence
from ringfence.compose.backends import chosen_backend, make_staying_backend, templates
from ringfence.config import paths
from ringfence.config.settings import SandboxSettings
from ringfence.core import canonical
from ringfence.core.box import MIB, NetworkRule, Serve
from ringfence.core.ports import Backend, PackageInstaller
from ringfence.identity import peer_uid
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.codec import from_json, pack, to_json, unpack
from ringfence.sandbox.keeper.process import KeeperFolder, KeeperLaunch, KeeperProcess
from ringfence.sandbox.sessions.capacity import KeeperRules
from ringfence.sandbox.sessions.manager import MakeRoute, SessionManager
from ringfence.sandbox.sessions.remote_secrets import RemoteSecrets

if TYPE_CHECKING:
    from ringfence.governance.route import ProxyServer

LINGER_SECONDS = 10.0
_ROOT = str(Path(ringfence.__file__).resolve().parent.parent)
# Forked first, so that the client that started it has no child to wait for. The modules are those of its client.
_PROGRAM = """\
import os, sys
os.fork() and os._exit(0)
sys.path[:0] = [root for root in [sys.argv.pop(1)] if root not in sys.path]
from ringfence.compose.keeper import main
main()
"""


def keeper_of(state: Path, settings: SandboxSettings, *, linger: float = LINGER_SECONDS) -> KeeperClient:
    """The client of the keeper of a state folder, which is started when it is needed."""
    return KeeperClient.lazy(keeper_launch(state, settings, linger=linger))


def keeper_launch(state: Path, settings: SandboxSettings, *, linger: float = LINGER_SECONDS) -> KeeperLaunch:
    """How the keeper of a state folder is started."""
    home = KeeperFolder(Path(os.path.realpath(state)) / "keeper", paths.socket_folders(state))
    # Neither its environment nor its working directory decides which modules are loaded.
    flags = ("-E", "-P") if site.ENABLE_USER_SITE else ("-E", "-P", "-s")
    where = (_ROOT, str(linger), str(home.path), *map(str, home.sockets))
    return KeeperLaunch(
        home,
        (sys.executable, *flags, "-c", _PROGRAM, *where),
        paths.process_environment() | paths.trust_environment() | paths.index_environment(),
        to_json(pack(SandboxSettings, settings, [])),
        settings_digest(settings),
    )


def settings_digest(settings: SandboxSettings) -> str:
    """Digest of the settings that decide what boxes are made of. The first client decides how many there may be."""
    made_of = {
        "backend": settings.backend,
        "accept_missing": sorted(settings.accept_missing),
        "templates": {name: list(packages) for name, packages in templates(settings).items()},
        "build_packages": settings.build_packages,
        "max_start_ms": settings.max_start_ms,
        "docker_host": settings.docker_host,
        "docker_runtime": settings.docker_runtime,
        "microvm_kernel": settings.microvm_kernel,
        "firecracker_kernel_path": settings.firecracker_kernel_path,
        "firecracker_rootfs_path": settings.firecracker_rootfs_path,
        "setups": {name: [setup.source, dict(setup.env), dict(setup.files)] for name, setup in settings.setups.items()},
    }
    return canonical.digest(made_of)


def keeper_rules(settings: SandboxSettings) -> KeeperRules:
    memory = settings.max_sessions_memory_mb
    return KeeperRules(
        max_sessions=settings.max_sessions,
        max_memory_bytes=None if memory is None else memory * MIB,
        max_cores=settings.max_sessions_cpu_cores,
        queue_seconds=settings.session_queue_seconds,
        retain_seconds=settings.session_retain_seconds,
        retain_bytes=settings.session_retain_mb * MIB,
        paused_seconds=settings.session_paused_seconds,
        reclaim_seconds=settings.reclaim_after_seconds,
    )


def _serve_by(installer: Callable[[], PackageInstaller]) -> MakeRoute:
    @cache
    def serving() -> ProxyServer:
        from ringfence.governance.route import ProxyServer  # noqa: PLC0415 - most sessions have no route

        return ProxyServer(installer=installer)

    def serve(rules: tuple[NetworkRule, ...], secrets: RemoteSecrets | None) -> Serve:
        return serving().by(rules, secrets)

    return serve


def _installer(state: Path, backend: Backend, settings: SandboxSettings) -> Callable[[], PackageInstaller]:
    @cache
    def installer() -> PackageInstaller:
        from ringfence.compose.packages import PackageService  # noqa: PLC0415 - few sessions install something

        return PackageService(state, backend, settings)

    return installer


def main() -> None:
    """The program. Arguments: how long it lingers, its folders, the descriptor for its report. Settings: stdin."""
    linger, folder, *sockets, ready = sys.argv[1:]
    settings: SandboxSettings = unpack(SandboxSettings, from_json(sys.stdin.buffer.read()), [])

    @asynccontextmanager
    async def open_sessions() -> AsyncIterator[SessionManager]:
        state = Path(folder).parent
        backend = make_staying_backend(settings, state)
        chosen = chosen_backend(settings, state, backend)
        try:
            rules = keeper_rules(settings)
            serve = _serve_by(_installer(state, backend, settings))
            yield await SessionManager.open(chosen, state / "sessions", rules, serve, peer_uid)
        finally:
            await chosen.close()
            await backend.close()

    home = KeeperFolder(Path(folder), tuple(map(Path, sockets)))
    KeeperProcess(home, settings_digest(settings), float(linger), open_sessions).run(int(ready))
