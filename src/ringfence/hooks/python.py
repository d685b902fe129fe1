"""A hook that is a function in Python: it runs in a process of its own, which it may crash or hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ringfence.core import canonical
from ringfence.core.model import HookSpec, Json
from ringfence.hooks.delivery import HookFailed

_MAX_ANSWER = 65_536
_GRACE_SECONDS = 5.0
_LOAD_SECONDS = 60.0
"""The time to import the function's module, on a host that may be busy. The time for a record begins after that."""


class PythonHook:
    """The function's process stays for further records. After a failure that ends it, a new one is started."""

    def __init__(self, spec: HookSpec, environment: Mapping[str, str], folder: str) -> None:
        """`folder` is its working folder: that of the configuration."""
        assert spec.python is not None
        self._spec = spec
        self._target = spec.python
        self._environment = environment
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def take(self, records: Sequence[Json]) -> None:
        for number, record in enumerate(records):
            try:
                await self._take(record)
            except HookFailed as exc:
                exc.taken = number
                raise

    async def _take(self, record: Json) -> None:
        seconds = _LOAD_SECONDS
        try:
            if self._process is None:
                async with asyncio.timeout(seconds):
                    await self._start()
            seconds = self._spec.timeout_seconds
            async with asyncio.timeout(seconds):
                process = self._process
                assert process is not None and process.stdin is not None
                process.stdin.write(canonical.dumps(record) + b"\n")
                await process.stdin.drain()
                answer = await self._answer(process)
        except TimeoutError:
            await self._end()
            raise HookFailed(f"it took longer than {seconds:g} s") from None
        except (OSError, EOFError):
            await self._end()
            raise HookFailed("its process ended") from None
        except BaseException:
            await self._end()
            raise
        if answer.get("taken") is not True:
            raise HookFailed("it raised an exception", output=str(answer.get("error"))[:100])

    async def _start(self) -> None:
        command = [sys.executable, "-P", "-m", "ringfence.hooks.entry", self._target]
        # Its stdout carries answers; what it prints goes where our log goes.
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=dict(self._environment),
            cwd=self._folder,
            start_new_session=True,
            limit=_MAX_ANSWER,
        )
        answer = await self._answer(process)
        if answer.get("loaded") is not True:
            raise HookFailed("it cannot be loaded", output=str(answer.get("error"))[:100])

    async def _answer(self, process: asyncio.subprocess.Process) -> Json:
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            answer = json.loads(line)
        except ValueError:
            raise EOFError from None
        if not isinstance(answer, dict):
            raise EOFError
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()

    async def close(self) -> None:
        await self._end()
