"""A server as a process of this host, in no box: it may do all that we may. Only where an operator says so."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

import anyio
import anyio.abc

from ringfence.core.box import Stream
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Json, Principal, ServerSpec
from ringfence.core.ports import Access, Launched, Launcher, Router
from ringfence.core.quoting import whole_lines

_GRACE_SECONDS = 2.0
_LAST_WORDS = 16_384
_GONE = (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError)


async def launch_server(launcher: Launcher | Unavailable, spec: ServerSpec, principal: Principal) -> Launched:
    """A server where it is to be, and nowhere else. Raises Unavailable."""
    if isinstance(launcher, Unavailable):
        text = f"server {spec.name} runs in a box, and none can be made: {launcher.message}"
        raise Unavailable(launcher.reason_code, f"{text}; with placement: unsafe_host it would run without one")
    return await launcher.launch(spec, principal)


class HostLauncher:
    """Implements `ports.Launcher`."""

    def __init__(self, environment: Mapping[str, str], router: Callable[[], Router] | None = None) -> None:
        self._environment = environment
        self._router = router

    def isolation(self, spec: ServerSpec) -> Json:
        return {"backend": "host", "level": "none", "protections": {}}

    async def launch(self, spec: ServerSpec, principal: Principal) -> HostProcess:
        if spec.packages is not None and spec.packages.kind == "image":
            raise Unavailable("server_start", f"server {spec.name} is an image, and an image runs only in a box")
        environment = {**self._environment, **spec.env, **await self._secrets(spec, principal)}
        try:
            process = await anyio.open_process(
                list(spec.command), env=environment, cwd=spec.cwd, start_new_session=True
            )
        except (OSError, ValueError) as exc:
            raise Unavailable("server_start", f"server {spec.name} cannot be started: {exc}") from None
        return HostProcess(process, self.isolation(spec))

    async def _secrets(self, spec: ServerSpec, principal: Principal) -> Mapping[str, str]:
        if not spec.secrets or self._router is None:
            return {}
        access = Access(secrets=spec.secrets, tenant=principal.tenant, server=spec.name)
        try:
            return (await self._router().route(access)).env
        except Refused as exc:
            raise Unavailable(exc.reason_code, f"server {spec.name}: {exc.message}") from None


class HostProcess:
    """Implements `ports.Launched`."""

    def __init__(self, process: anyio.abc.Process, isolation: Json) -> None:
        self._process = process
        self._stderr = b""
        self.isolation = isolation

    def network_meter(self) -> Callable[[], Json | None]:
        """What it does on the network is not seen."""
        return lambda: None

    def network_since_start(self) -> Json | None:
        return None

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise BrokenPipeError(32, "its input is closed") from None

    async def receive(self, stream: Stream) -> bytes:
        source = self._process.stdout if stream == "stdout" else self._process.stderr
        assert source is not None
        try:
            data = await source.receive()
        except _GONE:
            return b""
        if stream == "stderr":
            self._stderr = (self._stderr + data)[-_LAST_WORDS:]
        return data

    hint = ""
    """It sees all of the host."""

    @property
    def last_stderr(self) -> str:
        return whole_lines(self._stderr, _LAST_WORDS)

    async def stop(self) -> str:
        """Close its stdin, then end its whole process group, each step bounded."""
        process = self._process
        ended = process.returncode
        assert process.stdin is not None
        if ended is not None:
            with anyio.move_on_after(_GRACE_SECONDS):  # its children may hold the other end
                while await self.receive("stderr"):
                    pass
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.aclose()
        for end in (None, _terminate, _kill):
            if end is not None:
                end(process)
            deadline = anyio.current_time() + _GRACE_SECONDS
            while process.returncode is None and anyio.current_time() < deadline:
                await anyio.sleep(0.01)
            if process.returncode is not None:
                break
        # Children that outlived their parent are in its group still.
        _kill(process)
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.aclose()
        return "" if ended is None else f"it ended with status {ended}"


# Windows has no process groups to end: there a server's own children are its own affair.


def _terminate(process: anyio.abc.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGTERM)


def _kill(process: anyio.abc.Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
