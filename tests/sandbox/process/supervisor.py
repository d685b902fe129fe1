"""A supervisor for tests to kill: `python supervisor.py WHAT`. Says `ready` when the boxes are in full swing."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time

from ringfence.box import BoxSpec, Limits, Program
from ringfence.sandbox.process.backend import ProcessBackend

PROGRAMS = {
    "busy": """
import os
for _ in range(3): os.fork()
while True: pass
""",
    "stopped": """
import os, signal, time
child = os.fork()
if child: os.kill(child, signal.SIGSTOP)
time.sleep(600)
""",
    "daemons": """
import os, signal, time
if not os.fork():
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP): signal.signal(number, signal.SIG_IGN)
    os.fork()
time.sleep(600)
""",
}


def spec(source: str) -> BoxSpec:
    return BoxSpec(Program("python", source.encode()), Limits(wall_seconds=600))


async def ready() -> None:
    await asyncio.sleep(0.7)
    print("ready", flush=True)


async def run_for_ever(source: str) -> None:
    backend = ProcessBackend()
    await backend.warm(spec(source))
    await asyncio.gather(ready(), *(backend.run(spec(source)) for _ in range(2)))


async def make_for_ever() -> None:
    backend = ProcessBackend()
    await backend.warm(spec("pass"))
    saying = asyncio.create_task(ready())
    while True:
        await asyncio.gather(*(backend.run(spec("pass")) for _ in range(8)))
        await asyncio.sleep(0)
        assert not saying.cancelled()


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
        asyncio.run(run_for_ever(PROGRAMS[what]))


async def forked() -> None:
    backend = ProcessBackend()
    await backend.run(spec("pass"))
    child = os.fork()
    if not child:
        time.sleep(10)
        os._exit(0)
    print("ready", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
