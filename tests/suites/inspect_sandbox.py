# mypy: ignore-errors
# (what it imports is installed in an environment of its own)
"""A sandbox environment of inspect-ai over ours, and the checks that inspect-ai has for such environments."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest_asyncio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - it is how they are meant to be used

from ringfence import AsyncSandbox, Limits
from ringfence.core.errors import Refused

_NUMBERS = {"not_found": errno.ENOENT, "not_a_file": errno.EISDIR, "no_permission": errno.EACCES}
_LONGEST = 3600
_NOT_EXECUTABLE = 126


@contextmanager
def _errors_of_python(file: str) -> Iterator[None]:
    try:
        yield
    except Refused as exc:
        number = _NUMBERS.get(exc.reason_code, errno.EINVAL)
        raise OSError(number, os.strerror(number), file) from exc


class RingfenceEnvironment(SandboxEnvironment):
    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user is not None:
            raise SandboxUserUnsupportedError("a box has one user")
        more = {"cwd": cwd} if cwd is not None else {}
        done = await self._sandbox.commands.run(
            cmd, stdin=input or b"", envs=env or {}, timeout=timeout or _LONGEST, **more
        )
        if done.status == "timeout":
            raise TimeoutError(done.facts["explanation"])
        if done.exit_code == _NOT_EXECUTABLE:
            raise PermissionError(done.stderr)
        if done.facts["output"]["truncated"]:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, done.stdout)
        return ExecResult(done.exit_code == 0, done.exit_code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        with _errors_of_python(file):
            await self._sandbox.files.write(file, contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        with _errors_of_python(file):
            data = await self._sandbox.files.read(file, "bytes")
        if len(data) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    @classmethod
    async def sample_cleanup(cls, task_name, config, environments, interrupted) -> None:
        for environment in environments.values():
            await environment._sandbox.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RingfenceEnvironment]:
    limits = Limits(capture_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
    async with await AsyncSandbox.create(limits=limits) as sandbox:
        yield RingfenceEnvironment(sandbox)


@pytest_asyncio.fixture
async def sandbox_env(shared: RingfenceEnvironment) -> RingfenceEnvironment:
    return shared
