# mypy: ignore-errors
# (what it imports is installed in an environment of its own)
"""A sandbox backend of deepagents over ours, and the suite that langchain-tests has for such backends."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests

from ringfence import Limits, Sandbox
from ringfence.core.errors import Refused

_WORDS = {"not_found": "file_not_found", "not_a_file": "is_directory", "no_permission": "permission_denied"}
_LONGEST = 3600


class RingfenceBackend(BaseSandbox):
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        return self._sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        done = self._sandbox.commands.run(command, timeout=timeout or _LONGEST)
        return ExecuteResponse(done.stdout + done.stderr, done.exit_code, done.facts["output"]["truncated"])

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, self._tried(path, self._sandbox.files.write, data)[1]) for path, data in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, *self._tried(path, self._sandbox.files.read, "bytes")) for path in paths]

    def _tried(self, path: str, action: Callable[..., Any], *more: Any) -> tuple[Any, str | None]:
        """What an action gave, or deepagents' word for what hindered it."""
        if not path.startswith("/"):
            return None, "invalid_path"
        try:
            return action(path, *more), None
        except Refused as exc:
            return None, _WORDS.get(exc.reason_code, str(exc))


class PlainBackend(BaseSandbox):
    """No sandbox at all: what fails here, too, is not ours to mend."""

    id = "plain"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=timeout or _LONGEST)
        return ExecuteResponse(done.stdout + done.stderr, done.returncode)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        for path, data in files:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        return [FileUploadResponse(path) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, Path(path).read_bytes()) for path in paths]


class TestRingfence(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[RingfenceBackend]:
        with Sandbox.create(limits=Limits(capture_bytes=32 << 20)) as sandbox:
            yield RingfenceBackend(sandbox)


class TestPlain(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> PlainBackend:
        return PlainBackend()

    def sandbox_path(self, relative_path: str, *, root_dir: str | None = None) -> str:
        return super().sandbox_path(relative_path, root_dir=root_dir or str(Path.cwd()))
