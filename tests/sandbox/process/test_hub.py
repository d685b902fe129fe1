"""Descriptors that are waited for together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial

import pytest

from ringfence.sandbox.process.hub import Hub
from tests import tooling

pytestmark = pytest.mark.anyio


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub()
    yield made
    made.close()


async def test_whoever_asked_is_called_for_bytes_and_for_the_end(hub: Hub) -> None:
    read, write = os.pipe()
    heard: list[bytes] = []
    over = asyncio.Event()

    def hear() -> None:
        heard.append(os.read(read, 100))
        if not heard[-1]:
            hub.remove(read)
            over.set()

    hub.add(read, hear)
    os.write(write, b"one")
    await tooling.until(lambda: heard)
    os.close(write)
    await asyncio.wait_for(over.wait(), tooling.PATIENCE)
    assert heard == [b"one", b""]
    os.close(read)


async def test_one_that_was_removed_is_left_alone(hub: Hub) -> None:
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []

    def call(index: int) -> None:
        """The first to be called takes both away: neither may be called again, though both had something to read."""
        called.append(index)
        for read, _ in pipes:
            hub.remove(read)

    for index, (read, write) in enumerate(pipes):
        hub.add(read, partial(call, index))
        os.write(write, b"x")
    await tooling.until(lambda: called)
    await asyncio.sleep(0.05)
    assert len(called) == 1
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)


async def test_a_closed_hub_calls_nobody(hub: Hub) -> None:
    read, write = os.pipe()
    called: list[None] = []
    hub.add(read, lambda: called.append(None))
    hub.close()
    hub.close()
    os.write(write, b"x")
    await asyncio.sleep(0.05)
    assert not called
    os.close(read)
    os.close(write)
