"""A keeper's process, from its first moment to its last. Whose sessions it keeps, its caller says."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from ringfence.errors import RingfenceError
from ringfence.model import Json
from ringfence.sandbox.keeper import House, Server
from ringfence.sandbox.keeperhome import Home
from ringfence.sandbox.protocol import error_as_json
from ringfence.sandbox.waiting import new_loop

log = logging.getLogger("ringfence.keeper")

_MOST_FILES = 65_536
_REACHABLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Life:
    home: Home
    terms: str
    linger: float
    open_house: Callable[[], AbstractAsyncContextManager[House]]
    """Called once this is the only keeper."""


def live(life: Life, ready: int) -> None:
    """Until nobody needs it. `ready` is a descriptor: what is said there is all that the starter hears."""
    os.set_inheritable(ready, False)
    _settle()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_live(life, _Starter(ready)))


class _Starter:
    """Who waits to hear how the start went."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def hear(self, said: Json) -> None:
        """Once."""
        if self._descriptor is not None:
            with suppress(BrokenPipeError), open(self._descriptor, "wb") as told:
                self._descriptor = None
                told.write(json.dumps(said).encode())


async def _live(life: Life, starter: _Starter) -> None:
    try:
        life.home.prepare()
        held = life.home.move_in()  # for the rest of this process
        async with life.open_house() as house:
            await _serve(life, house, held, starter)
    except RingfenceError as exc:
        log.error("%s", exc)
        starter.hear({"error": error_as_json(exc)})


async def _serve(life: Life, house: House, held: int, starter: _Starter) -> None:
    server = Server(house, life.terms, life.linger)
    try:
        await server.listen(life.home.listen())
    except RingfenceError:
        await house.close()
        raise
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.leave)
    starter.hear({"ready": True})
    looking = loop.create_task(_stay_reachable(life.home, server, held))
    try:
        await server.serve()
    finally:
        looking.cancel()
        life.home.move_out(held)


async def _stay_reachable(home: Home, server: Server, held: int) -> None:
    """A socket may be swept away by whoever tidies up; with the folder goes everything that we keep."""
    while True:
        await asyncio.sleep(_REACHABLE_SECONDS)
        try:
            if not home.is_ours(held):
                log.error("the folder %s was taken away; leaving", home.folder)
                server.leave()
            elif not home.is_found():
                await server.listen(home.listen())
        except RingfenceError as exc:
            log.error("%s", exc)
            server.leave()


def _settle() -> None:
    """Whatever the process that started us was like, we are not."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
