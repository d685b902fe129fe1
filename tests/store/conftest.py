"""A store of one's own, and its driver in another process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys, load_or_create
from ringfence.store import Reader, Store

DRIVER = Path(__file__).with_name("driver.py")
SOURCE = Path(__file__).parents[2] / "src"

Drive = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_or_create(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(folder: Path, keys: Keys) -> Iterator[Store]:
    opened = Store.open(folder, keys)
    yield opened
    opened.close()


@pytest.fixture
def drive(folder: Path, keys: Keys) -> Iterator[Drive]:
    """Start the driver on this test's store; whatever still runs at the end is killed."""
    with contextlib.ExitStack() as running:

        def start(verb: str, *more: str, wrapper: tuple[str, ...] = ()) -> subprocess.Popen[str]:
            command = [*wrapper, sys.executable, str(DRIVER), verb, str(folder), str(keys.folder), *more]
            path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
            env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield start


@pytest.fixture
def verified(folder: Path, keys: Keys) -> Callable[[], None]:
    """Asserts that the whole store verifies against its checkpoints."""

    def check() -> None:
        reader = Reader.open(folder)
        try:
            report = verify_live(*reader.evidence(), keys.public, reader.record)
        finally:
            reader.close()
        assert report.ok, str(report)

    return check
