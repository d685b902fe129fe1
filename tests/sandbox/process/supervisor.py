"""A supervisor for tests to kill: `python supervisor.py WHAT`. Says `ready` when the boxes are in full swing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import time

from ringfence.core.box import BoxSpec, Limits, Program
from ringfence.sandbox.process.backend import ProcessBackend

PROGRAMS = {
    "busy": """
import os
for _ in range(3): os.fork()
print("up", flush=True)
while True: pass
""",
    "stopped": """
import os, signal, time
child = os.fork()
if child:
    os.kill(child, signal.SIGSTOP)
    print("up", flush=True)
time.sleep(600)
""",
    "daemons": """
import os, signal, time
if not os.fork():
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP): signal.signal(number, signal.SIG_IGN)
    os.fork()
print("up", flush=True)
time.sleep(600)
""",
}
"""What never ends by itself. Each says `up` as often as `UPS` tells, and then all of its processes are there."""
UPS = {"busy": 8, "stopped": 1, "daemons": 3}


def spec(source: str) -> BoxSpec:
    return BoxSpec(Program("python", source.encode()), Limits(wall_seconds=600))


class Ups:
    """Hears until programs have said often enough that they are up."""

    def __init__(self, wanted: int) -> None:
        self.all = asyncio.Event()
        self._left = wanted

    def __call__(self, stream: str, chunk: bytes) -> None:
        self._left -= chunk.count(b"up")
        if self._left <= 0:
            self.all.set()


async def run_for_ever(what: str) -> None:
    backend, wanted = ProcessBackend(), spec(PROGRAMS[what])
    await backend.warm(wanted)
    heard = Ups(2 * UPS[what])
    running = [asyncio.create_task(backend.run(wanted, heard)) for _ in range(2)]
    await heard.all.wait()
    print("ready", flush=True)
    await asyncio.gather(*running)


async def make_for_ever() -> None:
    backend = ProcessBackend()
    await backend.warm(spec("pass"))
    for number in itertools.count():
        await asyncio.gather(*(backend.run(spec("pass")) for _ in range(8)))
        await asyncio.sleep(0)
        if number == 3:
            print("ready", flush=True)


async def run_once() -> None:
    await ProcessBackend().run(spec("pass"))


def main(what: str) -> None:
    if what == "making":
        asyncio.run(make_for_ever())
    elif what == "forgetful":  # the loop ends, and nobody closed the backend
        asyncio.run(run_once())
        gc.collect()
        print("ready", flush=True)
        time.sleep(600)
    elif what == "forked":  # a child inherits everything that is open, and lives on
        asyncio.run(forked())
    else:
        asyncio.run(run_for_ever(what))


async def forked() -> None:
    backend = ProcessBackend()
    await backend.run(spec("pass"))
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    print("ready", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
