"""Tells witnesses where each chain of the log is: a file of another owner, the system log, a service on the web."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import field
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import FILE_BYTES
from ringfence.audit.witness import signed_heads
from ringfence.config.settings import WitnessSettings
from ringfence.core import system
from ringfence.core.record import dataclass

log = logging.getLogger(__name__)

_SECONDS = 10.0
_PRIORITY = 10 * 8 + 5
"""authpriv.notice"""
_GET_FLAGS = 0x80086601
_APPEND_ONLY = 0x20
_AT_ONCE = 500
"""Lines in one message to a service."""

Send = Callable[[list[bytes]], None]
"""Raises OSError where they did not arrive."""


@dataclass(slots=True)
class _Told:
    """One witness, and what it has."""

    name: str
    send: Send
    heads: dict[str, int] = field(default_factory=dict)
    failed: bool = False


class Witnesses:
    """All witnesses of one state."""

    def __init__(self, settings: WitnessSettings, state: Path, public: Ed25519PublicKey) -> None:
        self._every = settings.every_seconds
        self._checkpoints = state / "checkpoints"
        self._public = public
        self._seen: dict[str, int] = {}
        self._told: list[_Told] = []
        if (path := settings.file) is not None:
            self._told.append(_Told(f"file {path}", lambda lines: append(path, lines)))
            if (doubt := rewritable(path)) is not None:
                log.warning("%s", doubt)
        if (place := settings.syslog) is not None:
            self._told.append(_Told(f"system log {place}", lambda lines: to_syslog(place, lines)))
        if (url := settings.webhook) is not None:
            self._told.append(_Told(f"webhook {url}", lambda lines: post(url, lines)))

    async def run(self) -> None:
        """Tell them again and again."""
        while self._told:
            await anyio.to_thread.run_sync(self.tell, abandon_on_cancel=True)
            await anyio.sleep(self._every)

    def tell(self) -> None:
        """Tell each what it does not have yet. One that cannot be reached gets it the next time."""
        checkpoints = self._changed()
        for witness in self._told:
            news = {
                head.chain: (head.seq, line)
                for head, line in signed_heads(checkpoints, self._public)
                if witness.heads.get(head.chain) != head.seq
            }
            try:
                for chain, (seq, line) in news.items():
                    witness.send([line])
                    witness.heads[chain] = seq
            except OSError as exc:
                self._seen.clear()  # they are read again
                if not witness.failed:
                    log.error("the witness (%s) was not told where the log is: %s", witness.name, exc.strerror or exc)
                witness.failed = True
            else:
                if witness.failed:
                    log.warning("the witness (%s) is told again where the log is", witness.name)
                witness.failed = False

    def _changed(self) -> dict[str, bytes]:
        """The checkpoint files that were written since they were last read."""
        found: dict[str, bytes] = {}
        with suppress(OSError), os.scandir(self._checkpoints) as entries:
            for entry in entries:
                changed = entry.stat(follow_symlinks=False).st_mtime_ns
                if self._seen.get(entry.name) != changed and entry.is_file(follow_symlinks=False):
                    found[entry.name] = Path(entry.path).read_bytes()[:FILE_BYTES]
                    self._seen[entry.name] = changed
        return found


# ── Kinds of witnesses ────────────────────────────────────────────────────────────────────────────


def append(path: Path, lines: list[bytes]) -> None:
    """To the end of a file that is there. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | system.PRIVATE | system.UNHURRIED
    with closing(_Descriptor(os.open(path, flags))) as file:
        # After a line that a full disk cut off, the next begins one of its own.
        data = b"".join(line + b"\n" for line in lines)
        if os.write(file.number, data) != len(data):
            raise OSError(f"{path} did not take all of it")
        if stat.S_ISREG(os.fstat(file.number).st_mode):
            os.fsync(file.number)


@dataclass(slots=True)
class _Descriptor:
    number: int

    def close(self) -> None:
        os.close(self.number)


def rewritable(path: Path) -> str | None:
    """Why a file proves little: whoever can cut the log can cut it, too."""
    try:
        info = path.stat()
    except OSError:
        return None  # the caller logs that when it writes to it
    if system.stranger(info) or sys.platform != "linux":
        return None
    import fcntl  # noqa: PLC0415 - not every system has it

    with suppress(OSError), closing(_Descriptor(os.open(path, os.O_RDONLY | system.PRIVATE))) as file:
        (flags,) = struct.unpack("l", fcntl.ioctl(file.number, _GET_FLAGS, struct.pack("l", 0)))
        if flags & _APPEND_ONLY:
            return None
    return (
        f"the witness {path} belongs to this user and can be cut like the log itself: give it to another user, who lets"
        " this one write to it, or make it append-only (as root: chattr +a)"
    )


def to_syslog(place: Path, lines: list[bytes]) -> None:
    """Raises OSError."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as log_socket:
        log_socket.settimeout(_SECONDS)
        log_socket.connect(str(place))
        for line in lines:
            log_socket.send(b"<%d>ringfence-witness: %s" % (_PRIORITY, line))


def post(url: str, lines: list[bytes]) -> None:
    """Raises OSError. No redirect is followed, and no proxy asked."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    made = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(
        parts.hostname or "", parts.port, timeout=_SECONDS
    )
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    with closing(made) as connection:
        try:
            headers = {"content-type": "application/x-ndjson"}
            connection.request("POST", path, b"".join(line + b"\n" for line in lines), headers)
            answer = connection.getresponse()
            answer.read(1000)
        except http.client.HTTPException as exc:
            raise OSError(f"it answers no HTTP: {type(exc).__name__}") from None
        if not 200 <= answer.status < 300:
            raise OSError(f"it answers {answer.status}")
