"""A real agent, as a process of its own, in no container."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from ringfence.sandbox.guests.backend import agent_code
from ringfence.sandbox.guests.engine import BOOT, LINK
from ringfence.sandbox.guests.link import Link, first_words


@asynccontextmanager
async def agent(*, compiled: bool = True, python: str = sys.executable, **told: Any) -> AsyncIterator[Link]:
    ours, theirs = socket.socketpair()
    moved = f'exec "$@" {LINK}<&0 0</dev/null'
    words = ("sh", "-c", moved, "sh", python, "-I", "-S", "-c", BOOT)
    process = await asyncio.create_subprocess_exec(*words, stdin=theirs.fileno())
    theirs.close()
    env = {"PATH": os.environ["PATH"]}
    link = await Link.over(ours, first_words(agent_code(compiled=compiled), {"env": env, **told}, b""))
    try:
        yield link
    finally:
        link.close()
        await process.wait()


@contextmanager
def agent_elsewhere(**how: Any) -> Iterator[tuple[Link, asyncio.AbstractEventLoop]]:
    """The same, with its link served by a loop in another thread."""
    loop = asyncio.new_event_loop()
    serving = threading.Thread(target=loop.run_forever)
    serving.start()
    held = agent(**how)
    try:
        link = asyncio.run_coroutine_threadsafe(held.__aenter__(), loop).result(60)
        try:
            yield link, loop
        finally:
            asyncio.run_coroutine_threadsafe(held.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        serving.join()
        loop.close()
