"""The process of a keeper, the folder where clients find it, and how a client starts it.

There is one keeper for each user and state folder. The keeper's folder inside the state folder names its socket, and
two locks make the keeper the only one: it holds `lock` as long as it lives, and the client that starts it holds
`starting` meanwhile. A dead keeper, however it died, holds nothing.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path

from ringfence.core.aio import new_loop
from ringfence.core.errors import RingfenceError, StoreError, Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.sandbox.files.blobstore import private_folder, storing, try_lock, write_whole
from ringfence.sandbox.keeper.codec import CodecError
from ringfence.sandbox.keeper.protocol import error_from_json, error_to_json
from ringfence.sandbox.keeper.server import KeeperServer, LocalSessions
from ringfence.sandbox.process.patience import Patience, group

log = logging.getLogger("ringfence.keeper")

_SOCKET_NAME = "socket"
_ADDRESS_NAME = "address"
_LIFE_LOCK = "lock"
_START_LOCK = "starting"
_LOG_NAME = "log"
_MAX_LOG_BYTES = 1024 * 1024
_PREDECESSOR_SECONDS = 15.0
_START_TIMEOUTS = 20
"""A client waits so many times its own limit for another client that is starting the keeper."""
_LONGEST_ADDRESS = 107
"""The kernel accepts no longer path for a socket."""
_MAX_FILES = 65_536
_REACHABLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class KeeperFolder:
    """The folder of a keeper, and the folders that its socket can be in, best first."""

    path: Path
    sockets: tuple[Path, ...]

    def prepare(self) -> None:
        """Raises StoreError if another user could write to it."""
        with storing("the keeper's folder"):
            private_folder(self.path)

    def address(self) -> str | None:
        """The socket of the last keeper."""
        try:
            address = json.loads((self.path / _ADDRESS_NAME).read_bytes())
            return str(address["socket"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    # ── For the keeper ──

    def acquire(self) -> int:
        """Wait for the previous keeper to leave, and take its lock. Raises Unavailable."""
        until = time.monotonic() + _PREDECESSOR_SECONDS
        held = _lock(self.path / _LIFE_LOCK, until)
        if held is None:
            raise Unavailable("keeper_start", f"another keeper has {self.path}; end it, or wait until it has left")
        return held

    def is_ours(self, held: int) -> bool:
        """Whether the folder is still the one whose lock we hold."""
        try:
            return os.path.samestat(os.fstat(held), os.stat(self.path / _LIFE_LOCK))
        except OSError:
            return False

    def is_found(self) -> bool:
        """Whether clients can find our socket."""
        address = self.address()
        return address is not None and os.path.exists(address)

    def listen(self) -> socket.socket:
        """A listening socket, with its address in the folder. Raises Unavailable and StoreError."""
        problems = []
        for folder in self.sockets:
            try:
                listener = _listener(folder, private=folder != self.path)
            except OSError as exc:  # not every file system has sockets
                problems.append(f"{folder}: {exc.strerror or exc}")
                continue
            address = {"socket": str(folder / _SOCKET_NAME), "process": os.getpid()}
            with storing("the keeper's address"):
                write_whole(self.path / _ADDRESS_NAME, json.dumps(address).encode())
            return listener
        raise Unavailable("keeper_start", f"the keeper has nowhere to listen: {'; '.join(problems)}")

    def release(self, held: int) -> None:
        address = self.address()
        if address is not None and self.is_ours(held):
            for path in (self.path / _ADDRESS_NAME, Path(address)):
                with suppress(OSError):
                    path.unlink()


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """The path of a socket as the kernel accepts it: a long one is reached through its open folder."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield path
        return
    parent, name = os.path.split(path)
    folder = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)


def _listener(folder: Path, *, private: bool) -> socket.socket:
    if private:
        folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _own(folder.parent)
        _own(folder)
    path = str(folder / _SOCKET_NAME)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        with reachable(path) as address:
            listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _own(folder: Path) -> None:
    """Make a folder that no other user can write to. Raises PermissionError if it is another user's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to another user or can be written by others; remove it")


# ── Starting it, from a client ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class KeeperLaunch:
    """How a keeper is started if there is none."""

    folder: KeeperFolder
    command: tuple[str, ...]
    """The number of a descriptor is appended, to which the keeper reports the result of its start."""
    environment: Mapping[str, str]
    order: bytes
    """Its standard input."""
    settings_digest: str
    """Of the settings that a keeper must have been started with, if another client started it."""
    seconds: float = 30.0


def start_if_absent(launch: KeeperLaunch) -> None:
    """When this returns, a keeper listens or just did. For a thread. Raises Unavailable: nothing has run."""
    try:
        _start_if_absent(launch)
    except StoreError as exc:
        raise Unavailable("keeper_start", f"the keeper cannot be started: {exc}") from exc
    except OSError as exc:
        raise Unavailable("keeper_start", f"the keeper cannot be started: {exc.strerror or exc}") from exc


def _start_if_absent(launch: KeeperLaunch) -> None:
    folder = launch.folder
    seconds = launch.seconds
    folder.prepare()
    # A client that starts a keeper gives up by itself when it makes no progress, so it may take the time that it needs.
    held = _lock(folder.path / _START_LOCK, time.monotonic() + _START_TIMEOUTS * seconds)
    if held is None:
        raise Unavailable(
            "keeper_start", f"another process is starting the keeper of {folder.path}, and takes too long"
        )
    try:
        if not _answers(folder.address()):
            _start(launch, seconds)
    finally:
        os.close(held)


def _answers(address: str | None) -> bool:
    if address is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            with reachable(address) as path:
                probe.connect(path)
        except OSError:
            return False
    return True


def _start(launch: KeeperLaunch, seconds: float) -> None:
    log_file = launch.folder.path / _LOG_NAME
    ours, theirs = os.pipe()
    try:
        try:
            process = _spawn(launch, log_file, theirs)
        finally:
            os.close(theirs)
        report = _read(ours, Patience(lambda: group(process.pid), seconds))
        if report is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # it forks the keeper, which is no child of ours, and exits
    finally:
        os.close(ours)
    _check_started(report, log_file)


def _spawn(launch: KeeperLaunch, log_file: Path, ready: int) -> subprocess.Popen[bytes]:
    with storing("the keeper's log"):
        errors = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(errors).st_size > _MAX_LOG_BYTES:
            os.truncate(errors, 0)
    try:
        process = subprocess.Popen(
            [*launch.command, str(ready)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd="/",
            env=dict(launch.environment),
            start_new_session=True,
            pass_fds=(ready,),
        )
    except OSError as exc:
        raise Unavailable("keeper_start", f"the keeper cannot be started: {exc.strerror or exc}") from None
    finally:
        os.close(errors)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(launch.order)
    return process


def _check_started(report: bytes | None, log_file: Path) -> None:
    """Raises Unavailable unless the keeper reported that it is ready."""
    if report is None:
        raise Unavailable(
            "keeper_start", f"the keeper was not ready, and did nothing more for it; its log is {log_file}"
        )
    try:
        answer = json.loads(report)
        if answer.get("ready"):
            return
        problem = error_from_json(answer.get("error"))
    except (ValueError, AttributeError, CodecError):
        problem = Unavailable("keeper_start", f"the keeper ended while it started; its log is {log_file}")
    raise problem if isinstance(problem, Unavailable | StoreError) else Unavailable("keeper_start", str(problem))


def _read(descriptor: int, patience: Patience) -> bytes | None:
    """Everything up to the end; None if the processes that should write it make no more progress."""
    data = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], patience.pause)
        if not ready and patience.is_over():
            return None
        if not ready:
            continue
        chunk = os.read(descriptor, 65_536)
        if not chunk:
            return data
        data += chunk


def _lock(path: Path, until: float) -> int | None:
    """Lock a file as long as the descriptor is open; None if the lock was not free in time."""
    with storing("the keeper's folder"):
        return try_lock(path, until)


# ── The process itself ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class KeeperProcess:
    """A keeper's process, from its first moment to its last."""

    folder: KeeperFolder
    settings_digest: str
    linger: float
    open_sessions: Callable[[], AbstractAsyncContextManager[LocalSessions]]
    """Called once this is the only keeper of its folder."""

    def run(self, ready: int) -> None:
        """Serve until there is no session and no client. `ready` is the descriptor on which the client that
        starts it waits for the result of the start."""
        os.set_inheritable(ready, False)
        _reset_inherited()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(self._run(_Starter(ready)))

    async def _run(self, starter: _Starter) -> None:
        try:
            self.folder.prepare()
            held = self.folder.acquire()  # for the rest of this process
            async with self.open_sessions() as sessions:
                await self._serve(sessions, held, starter)
        except RingfenceError as exc:
            log.error("%s", exc)
            starter.report({"error": error_to_json(exc)})

    async def _serve(self, sessions: LocalSessions, held: int, starter: _Starter) -> None:
        server = KeeperServer(sessions, self.settings_digest, self.linger)
        try:
            await server.listen(self.folder.listen())
        except RingfenceError:
            await sessions.close()
            raise
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.leave)
        starter.report({"ready": True})
        watching = loop.create_task(self._stay_reachable(server, held))
        try:
            await server.serve()
        finally:
            watching.cancel()
            self.folder.release(held)

    async def _stay_reachable(self, server: KeeperServer, held: int) -> None:
        """Listen anew if a cleanup job deletes the socket. If the folder is gone, so are the sessions: leave."""
        while True:
            await asyncio.sleep(_REACHABLE_SECONDS)
            try:
                if not self.folder.is_ours(held):
                    log.error("the folder %s was taken away; leaving", self.folder.path)
                    server.leave()
                elif not self.folder.is_found():
                    await server.listen(self.folder.listen())
            except RingfenceError as exc:
                log.error("%s", exc)
                server.leave()


class _Starter:
    """The client that started the keeper and waits for the result."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def report(self, result: Json) -> None:
        """Send the result of the start. Only the first call does."""
        if self._descriptor is not None:
            with suppress(BrokenPipeError), open(self._descriptor, "wb") as pipe:
                self._descriptor = None
                pipe.write(json.dumps(result).encode())


def _reset_inherited() -> None:
    """Inherit nothing of the process that started us: signals, umask, limits."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
