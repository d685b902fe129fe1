"""The control: the same program as in the box, by `launcher.py`. It answers like a backend, and protects nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from anyio import to_thread

from ringfence.core import system
from ringfence.core.box import BoxReport, BoxSpec, Captured, OnOutput, Stream
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Recheck, always
from ringfence.core.record import dataclass
from ringfence.doctor.case import Control
from ringfence.doctor.props import CONTROL_ID, secret

_LAUNCHER = Path(__file__).with_name("launcher.py")
_BETWEEN = b"\x1e\n"
_KILLED = 128 + signal.SIGKILL
_TIMED_OUT = 124


@dataclass(slots=True)
class _Heard:
    """What came out of a launcher."""

    streams: dict[str, bytearray] = field(default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})
    frames: bytearray = field(default_factory=bytearray)
    flooded: bool = False
    wall_ms: float = 0.0


class ControlLauncher:
    """The process that controls are forked from. Started when it is first needed, and inherits what we have then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, descriptors: list[int]) -> int:
        """Hand it the descriptors of an order; the process that carries it out."""
        with self._lock:
            if self._control is None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [b"run"], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise Unavailable("control_failed", "the launcher of controls is gone")
        return int(answer)

    def stop(self, pid: int) -> None:
        with self._lock, suppress(OSError):
            if self._control is not None:
                self._control.send(f"stop {pid}".encode())

    def close(self) -> None:
        with self._lock:
            if self._control is not None and self._process is not None:
                self._control.close()
                self._process.wait()
            self._control = self._process = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            # Whatever is inheritable is inherited: that is one of the things to be shown.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_LAUNCHER), str(theirs.fileno())], stdin=subprocess.DEVNULL, close_fds=False
            )


class ControlBackend:
    """Runs programs as an unprivileged user in namespaces of their own, and without any other protection."""

    name = "control"

    def __init__(self, launcher: ControlLauncher, settings: Control | None = None) -> None:
        self._launcher = launcher
        self._settings = settings or Control()

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        await recheck()
        return (await self.run_all([spec], tell))[0]

    async def run_all(self, specs: list[BoxSpec], tell: OnOutput | None = None) -> list[BoxReport]:
        """Run them one after the other in the same place, forked from one process that has them all."""
        loop = asyncio.get_running_loop()

        def pass_on(stream: Stream, data: bytes) -> None:
            if tell is not None:
                loop.call_soon_threadsafe(tell, stream, data)

        heard = await to_thread.run_sync(self._run, specs, pass_on)
        # Output that the thread passed on arrives before the end.
        await asyncio.sleep(0)
        return self._reports(heard, len(specs))

    async def close(self) -> None:
        """Nothing is kept ready."""

    # ── In a thread ──

    def _run(self, specs: list[BoxSpec], tell: OnOutput) -> _Heard:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-control-")))
            folder.chmod(0o777)
            order = stack.enter_context(tempfile.TemporaryFile())
            order.write(json.dumps(self._order(specs, folder)).encode())
            order.seek(0)
            given = specs[0].program.stdin
            held = stack.enter_context(open(os.memfd_create("stdin"), "wb", buffering=0))
            if isinstance(given, bytes):
                held.write(given)
                held.seek(0)
                given = held.fileno()
            pairs = {"status": os.pipe(), "stdout": _stdout(self._settings), "stderr": os.pipe()}
            for ours, _ in pairs.values():
                stack.callback(os.close, ours)
            theirs = [theirs for _, theirs in pairs.values()]
            began = time.monotonic()
            try:
                pid = self._launcher.run([order.fileno(), theirs[0], given, *theirs[1:]])
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            ways = {ours: name for name, (ours, _) in pairs.items()}
            heard = _listen(ways, specs[0].limits.output_bytes * 2, tell, lambda: self._launcher.stop(pid))
            heard.wall_ms = (time.monotonic() - began) * 1000
            return heard

    def _order(self, specs: list[BoxSpec], folder: Path) -> Json:
        first = specs[0]
        return {
            "programs": [base64.b64encode(spec.program.source).decode() for spec in specs],
            "command": list(first.program.argv) if first.program.kind == "command" else [],
            "inputs": {
                item.name: base64.b64encode(_content(item.source)).decode() for spec in specs for item in spec.inputs
            },
            "env": {"HOME": str(folder), **first.env},  # or what it leaves there stays in the caller's home
            "share": sorted(self._settings.share),
            "features": sorted(self._settings.features),
            "limits": asdict(first.limits),
            "deadline": first.limits.wall_seconds * 2,
            "workspace": str(folder),
            "output": str(first.output) if first.output else None,
            "id": CONTROL_ID,
            "groups": os.getgroups() if os.geteuid() == 0 else [],
            "umask": system.umask(),
            "secret": secret(),
        }

    def _reports(self, heard: _Heard, count: int) -> list[BoxReport]:
        frames = _parsed(bytes(heard.frames))
        statuses = [frame["status"] for frame in frames if isinstance(frame.get("status"), int)]
        late = any(frame.get("late") for frame in frames)
        if not any(frame.get("begun") for frame in frames):
            text = bytes(heard.streams["stderr"]).decode(errors="replace").strip().splitlines()
            raise Unavailable("control_failed", text[-1] if text else "the control said nothing")
        observed = {key: value for frame in frames for key, value in frame.items() if key != "status"}
        parts = bytes(heard.streams["stdout"]).split(_BETWEEN) if count > 1 else [bytes(heard.streams["stdout"])]
        stderr = _captured(bytes(heard.streams["stderr"]))
        out = []
        for index in range(count):
            status = statuses[index] if index < len(statuses) else None
            shown = _captured(parts[index] if index < len(parts) else b"")
            ended = _ended(status, self._settings, shown, late, heard.flooded)
            out.append(
                BoxReport(
                    **ended,
                    wall_ms=heard.wall_ms,
                    stdout=shown,
                    stderr=stderr,
                    isolation={"backend": "control", "level": "none", "protections": {}, "control": observed},
                )
            )
        return out


def _stdout(settings: Control) -> tuple[int, int]:
    """Our end and theirs."""
    if "socket" in settings.features:
        ours, theirs = socket.socketpair()
        return ours.detach(), theirs.detach()
    return os.pipe()


def _listen(ways: dict[int, str], most: int, tell: OnOutput, stop: Callable[[], None]) -> _Heard:
    """Read output until the program and all that it started are gone, or it has written more than twice what it may."""
    heard = _Heard()
    total = 0
    with selectors.DefaultSelector() as selector:
        for descriptor, name in ways.items():
            selector.register(descriptor, selectors.EVENT_READ, name)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    data = os.read(key.fd, 65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    selector.unregister(key.fd)
                elif key.data == "status":
                    heard.frames += data
                elif not heard.flooded:
                    total += len(data)
                    heard.streams[key.data] += data
                    tell(key.data, data)
                    if total > most:
                        heard.flooded = True
                        stop()
    return heard


def _parsed(frames: bytes) -> list[dict[str, Any]]:
    found = []
    for line in frames.splitlines():
        with suppress(ValueError):
            frame = json.loads(line)
            if isinstance(frame, dict):
                found.append(frame)
    return found


def _ended(status: int | None, settings: Control, shown: Captured, late: bool, flooded: bool) -> dict[str, Any]:
    """How the program ended, as a naive supervisor tells it."""
    if status is None:
        return {"ended": "output" if flooded else "timeout" if late else "infra"}
    if "trailer" in settings.features:
        claimed = [frame["exit_code"] for frame in _parsed(shown.head) if "exit_code" in frame]
        return {"ended": "exited", "exit_status": claimed[-1] if claimed else os.waitstatus_to_exitcode(status)}
    code = os.waitstatus_to_exitcode(status)
    if "shell" in settings.features:
        code = code if code >= 0 else 128 - code
        if code in (_KILLED, _TIMED_OUT):
            return {"ended": "oom" if code == _KILLED else "timeout", "limit": "memory" if code == _KILLED else "wall"}
        return {"ended": "exited", "exit_status": code, "limit": "memory" if b"MemoryError" in shown.head else None}
    if code < 0:
        return {"ended": "signalled", "signal": -code}
    return {"ended": "exited", "exit_status": code}


def _captured(data: bytes) -> Captured:
    return Captured(head=data, total=len(data), sha256=hashlib.sha256(data).hexdigest())


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()
