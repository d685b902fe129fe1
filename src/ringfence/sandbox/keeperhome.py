"""Where a keeper lives, and how its clients find it there or have it started.

There is one keeper for a user and a state folder. Its folder in there says where its socket is, and two locks make it
the only one: the keeper holds `lock` as long as it lives, and who starts it holds `starting` meanwhile. A keeper that
is dead, however it died, holds nothing.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ringfence.errors import StoreError, Unavailable
from ringfence.sandbox.codec import CodecError
from ringfence.sandbox.keeping import private_folder, storing, taken, write_whole
from ringfence.sandbox.patience import Patience, group
from ringfence.sandbox.protocol import error_from_json

_SOCKET, _ADDRESS, _LOCK, _STARTING, _LOG = "socket", "address", "lock", "starting", "log"
_MOST_LOG = 1024 * 1024
_PREDECESSOR_SECONDS = 15.0
_WAITS = 20
_LONGEST_ADDRESS = 107
"""The kernel takes no longer path of a socket."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of a keeper, and those that its socket can be in, the best first."""

    folder: Path
    sockets: tuple[Path, ...]

    def prepare(self) -> None:
        """Raises StoreError where somebody else could get at it."""
        with storing("the keeper's folder"):
            private_folder(self.folder)

    def address(self) -> str | None:
        """The socket of the keeper that was here last."""
        try:
            said = json.loads((self.folder / _ADDRESS).read_bytes())
            return str(said["socket"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    # ── The keeper's own ──

    def move_in(self) -> int:
        """Wait for the keeper before to leave, and keep out others. Raises Unavailable."""
        until = time.monotonic() + _PREDECESSOR_SECONDS
        held = _lock(self.folder / _LOCK, until)
        if held is None:
            raise Unavailable("keeper_start", f"another keeper has {self.folder}; end it, or wait until it has left")
        return held

    def is_ours(self, held: int) -> bool:
        """Whether the folder is still the one that we moved into."""
        try:
            return os.path.samestat(os.fstat(held), os.stat(self.folder / _LOCK))
        except OSError:
            return False

    def is_found(self) -> bool:
        """Whether a client that looks for us comes to a socket."""
        address = self.address()
        return address is not None and os.path.exists(address)

    def listen(self) -> socket.socket:
        """A socket that can be found here. Raises Unavailable and StoreError."""
        problems = []
        for folder in self.sockets:
            try:
                listener = _listener(folder, private=folder != self.folder)
            except OSError as exc:  # not every file system has sockets
                problems.append(f"{folder}: {exc.strerror or exc}")
                continue
            said = {"socket": str(folder / _SOCKET), "process": os.getpid()}
            with storing("the keeper's address"):
                write_whole(self.folder / _ADDRESS, json.dumps(said).encode())
            return listener
        raise Unavailable("keeper_start", f"the keeper has nowhere to listen: {'; '.join(problems)}")

    def move_out(self, held: int) -> None:
        address = self.address()
        if address is not None and self.is_ours(held):
            for path in (self.folder / _ADDRESS, Path(address)):
                with suppress(OSError):
                    path.unlink()


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """The path of a socket as the kernel takes it, however long it is: a long one goes by its open folder."""
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
    path = str(folder / _SOCKET)
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
    """Make a folder that others cannot write to. Raises PermissionError for one that is theirs."""
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it belongs to somebody else or can be written by others; remove it")


# ── What a client does ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Starting:
    """How a keeper is started where there is none."""

    home: Home
    command: tuple[str, ...]
    """The number of a descriptor is added, to which it says how its start went."""
    environment: Mapping[str, str]
    order: bytes
    """It reads this first."""
    terms: str
    """What it has to have been started with, if somebody else did."""
    seconds: float = 30.0


def start_if_absent(starting: Starting) -> None:
    """When this returns, somebody listens or just did. For a thread. Raises Unavailable and StoreError."""
    home, seconds = starting.home, starting.seconds
    home.prepare()
    # Whoever starts one gives up by itself when that makes no progress; so they have the time that they need.
    held = _lock(home.folder / _STARTING, time.monotonic() + _WAITS * seconds)
    if held is None:
        raise Unavailable("keeper_start", f"somebody else starts the keeper of {home.folder}, and takes too long")
    try:
        if not _answers(home.address()):
            _start(starting, seconds)
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


def _start(starting: Starting, seconds: float) -> None:
    log = starting.home.folder / _LOG
    ours, theirs = os.pipe()
    try:
        try:
            process = _process(starting, log, theirs)
        finally:
            os.close(theirs)
        said = _read(ours, Patience(lambda: group(process.pid), seconds))
        if said is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # it leaves a child, which nobody waits for, and is gone
    finally:
        os.close(ours)
    _judge(said, log)


def _process(starting: Starting, log: Path, ready: int) -> subprocess.Popen[bytes]:
    with storing("the keeper's log"):
        errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(errors).st_size > _MOST_LOG:
            os.truncate(errors, 0)
    try:
        process = subprocess.Popen(
            [*starting.command, str(ready)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd="/",
            env=dict(starting.environment),
            start_new_session=True,
            pass_fds=(ready,),
        )
    except OSError as exc:
        raise Unavailable("keeper_start", f"the keeper cannot be started: {exc.strerror or exc}") from None
    finally:
        os.close(errors)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(starting.order)
    return process


def _judge(said: bytes | None, log: Path) -> None:
    """Raises Unavailable where the keeper did not say that it is ready."""
    if said is None:
        raise Unavailable("keeper_start", f"the keeper was not ready, and did nothing more for it; its log is {log}")
    try:
        answer = json.loads(said)
        if answer.get("ready"):
            return
        problem = error_from_json(answer.get("error"))
    except (ValueError, AttributeError, CodecError):
        problem = Unavailable("keeper_start", f"the keeper ended while it started; its log is {log}")
    raise problem if isinstance(problem, Unavailable | StoreError) else Unavailable("keeper_start", str(problem))


def _read(descriptor: int, patience: Patience) -> bytes | None:
    """All that is said, up to its end; None where nobody does anything for it any more."""
    said = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], patience.pause)
        if not ready and patience.is_over():
            return None
        if not ready:
            continue
        data = os.read(descriptor, 65_536)
        if not data:
            return said
        said += data


def _lock(path: Path, until: float) -> int | None:
    """Hold a file's lock, as long as the descriptor is open; None where it could not be had in time."""
    with storing("the keeper's folder"):
        return taken(path, until)
