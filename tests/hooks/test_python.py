"""A function in Python as a hook: in a process of its own, which may do anything, and be loaded from anywhere."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ringfence.core.model import HookSpec
from ringfence.hooks.delivery import HookFailed
from ringfence.hooks.python import PythonHook
from tests.tooling import alive, until

pytestmark = pytest.mark.anyio

WRITES = """
import asyncio, os, time
def record(each):
    print("told of", each["id"])
    with open("seen", "a") as file:
        file.write(each["id"] + "\\n")
async def later(each):
    await asyncio.sleep(0)
    record(each)
def picky(each):
    if each["id"] == "c:2" and not os.path.exists("ready"):
        raise RuntimeError("not yet")
    record(each)
def hangs(each):
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
def dies(each):
    os._exit(3)
"""
RECORDS = [{"id": f"c:{number}", "record": {"status": "success"}} for number in (1, 2, 3)]


@asynccontextmanager
async def made(folder: Path, target: str = "", **more: float) -> AsyncIterator[PythonHook]:
    (folder / "hook.py").write_text(WRITES)
    spec = HookSpec("tally", python=f"{folder / 'hook.py'}:{target}" if ":" not in target else target, **more)  # type: ignore[arg-type]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    hook = PythonHook(spec, environment, str(folder))
    try:
        yield hook
    finally:
        await hook.close()


def seen(folder: Path) -> list[str]:
    path = folder / "seen"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("function", ["record", "later"])
async def test_it_is_called_with_each_record(tmp_path: Path, function: str) -> None:
    async with made(tmp_path, function) as hook:
        await hook.take(RECORDS)
        await hook.take(RECORDS[:1])
    assert seen(tmp_path) == ["c:1", "c:2", "c:3", "c:1"]


async def test_an_exception_says_how_many_were_taken(tmp_path: Path) -> None:
    async with made(tmp_path, "picky") as hook:
        with pytest.raises(HookFailed, match=r"it raised an exception") as failed:
            await hook.take(RECORDS)
        assert (failed.value.taken, failed.value.output) == (1, "RuntimeError")
        (tmp_path / "ready").touch()
        await hook.take(RECORDS[1:])
    assert seen(tmp_path) == ["c:1", "c:2", "c:3"]


async def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    async with made(tmp_path, "hangs", timeout_seconds=5.0) as hook:
        with pytest.raises(HookFailed, match=r"it took longer than 5 s"):
            await hook.take(RECORDS)
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: not alive(pid))


async def test_one_that_dies_is_started_again(tmp_path: Path) -> None:
    async with made(tmp_path, "dies") as hook:
        for _ in range(2):
            with pytest.raises(HookFailed, match=r"its process ended"):
                await hook.take(RECORDS)


@pytest.mark.parametrize("target", ["missing", "no_such_module:record", "json:loads.nothing"])
async def test_one_that_cannot_be_loaded_says_so(tmp_path: Path, target: str) -> None:
    async with made(tmp_path, target) as hook:
        with pytest.raises(HookFailed, match=r"it cannot be loaded"):
            await hook.take(RECORDS)


async def test_it_may_be_in_an_installed_module(tmp_path: Path) -> None:
    async with made(tmp_path, "pprint:pformat") as hook:
        await hook.take(RECORDS)
