# mypy: ignore-errors
# (what it imports is installed in an environment of its own)
"""A workspace of pydantic-ai over our sandboxes, and the suite that pydantic-ai has for such workspaces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import pytest
from pydantic_ai.workspaces import (
    CommandResult,
    WorkspaceBackend,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from ringfence import AsyncSandbox, Limits
from ringfence.core.errors import NotFound, SandboxStopped

_LONGEST = 3600


class RingfenceWorkspace:
    """Files go by commands, as pydantic-ai does them wherever a workspace has no others."""

    def __init__(self, ref: WorkspaceRef | None = None) -> None:
        self._ref = ref
        self._sandbox = AsyncSandbox(limits=Limits(capture_bytes=32 << 20)) if ref is None else None

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def sandbox(self) -> AsyncSandbox:
        """Ours, opened by whoever comes first; or the one that was named."""
        try:
            if self._sandbox is None:
                self._sandbox = await AsyncSandbox.connect(self._ref.id)
            self._ref = WorkspaceRef(provider="ringfence", id=await self._sandbox.open())
        except (SandboxStopped, NotFound) as exc:
            raise WorkspaceUnavailableError(str(exc)) from exc
        return self._sandbox

    async def working_dir(self) -> str:
        await self.sandbox()
        return "/workspace"

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        if shell is not isinstance(command, str):
            raise TypeError("a line goes with shell=True, words go without")
        sandbox = await self.sandbox()
        try:
            done = await sandbox.commands.run(command, envs=env or {}, timeout=timeout or _LONGEST)
        except SandboxStopped as exc:
            raise WorkspaceUnavailableError(str(exc)) from exc
        if done.status == "timeout":
            raise WorkspaceTimeoutError(done.facts["explanation"], stdout=done.stdout, stderr=done.stderr)
        if done.status == "killed":
            raise WorkspaceUnavailableError(done.facts["explanation"])
        if done.facts["output"]["truncated"]:
            raise RuntimeError("the output was cut")
        return CommandResult(exit_code=done.exit_code, stdout=done.stdout, stderr=done.stderr)

    async def realpath(self, path: str) -> str:
        found = await self.run(["realpath", "--canonicalize-missing", "--", path])
        if found.exit_code:
            raise OSError(found.stderr)
        return found.stdout.removesuffix("\n")


class TestRingfence(WorkspaceBackendSuite):
    @pytest.fixture(scope="class")
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture(scope="class")
    async def backend(self, anyio_backend: str) -> AsyncIterator[WorkspaceBackend]:
        workspace = RingfenceWorkspace()
        yield workspace
        await (await workspace.sandbox()).kill()

    @pytest.fixture
    async def fresh_backend(self) -> AsyncIterator[Callable[[], WorkspaceBackend]]:
        made: list[RingfenceWorkspace] = []

        def make() -> RingfenceWorkspace:
            made.append(RingfenceWorkspace())
            return made[-1]

        yield make
        for workspace in made:
            await (await workspace.sandbox()).kill()

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], WorkspaceBackend]:
        return RingfenceWorkspace

    @pytest.fixture
    def destroy_environment(self) -> Callable[[WorkspaceBackend], Awaitable[None]]:
        async def destroy(workspace: RingfenceWorkspace) -> None:
            await (await workspace.sandbox()).kill()

        return destroy
