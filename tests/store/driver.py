"""A process of its own that uses a store, for tests that kill it, race it or break its disk. Run by path.

driver.py write FOLDER KEYS COUNT    COUNT calls, started and finished, one after the other; prints each as acked
driver.py load FOLDER KEYS           eight tasks write until killed; prints every acknowledged record
driver.py hold FOLDER KEYS           opens, prints its chain, leaves a call running, waits for a line, closes
driver.py begin FOLDER KEYS          a call from beginning to end, and two that only begin; waits to be killed
driver.py consume FOLDER KEYS DIGEST TRIES   races for one approval; prints how often it was given
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from ringfence.audit.signing import signing_key
from ringfence.core.errors import StoreError
from ringfence.core.model import Receipt
from ringfence.store import Store, Transaction

PR_SET_PTRACER = 0x59616D61
"""Lets any process of ours trace this one, where the system otherwise allows that to parents alone."""


def say(*words: object) -> None:
    """One line, in one write, so that a kill never leaves half of it; only then is anything acknowledged."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def write(folder: Path, keys: Path, count: str, wait: str = "") -> None:
    """Goes on after every failure: a disk that recovers must find a store that does."""
    for _ in range(20):
        try:
            store = Store.open(folder, signing_key(keys))
            break
        except StoreError as exc:
            say("unopened", exc)
    else:
        return
    say("opened", store.chain)
    if wait:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        sys.stdin.readline()
    for number in range(int(count)):
        for kind in ("started", "finished"):
            await attempt(store, kind, f"call_{number}")
    try:
        await store.aclose()
        say("closed")
    except StoreError as exc:
        say("unclosed", exc)


async def attempt(store: Store, kind: str, call_id: str) -> None:
    body = {"effect_possible": True}
    try:
        receipt = await store.write(lambda tx: tx.append(kind, call_id, body), durable=True)
    except StoreError as exc:
        say("failed", kind, call_id, exc)
    else:
        say("acked", receipt.chain, receipt.seq, receipt.head)


async def load(folder: Path, keys: Path) -> None:
    store = Store.open(folder, signing_key(keys))
    say("opened", store.chain)

    async def one(task: int) -> None:
        number = 0
        while True:
            number += 1
            call_id = f"{store.chain}-{task}-{number}"
            for kind in ("started", "finished"):
                work = partial(begin, kind=kind, call_id=call_id)
                receipt = await store.write(work, durable=number % 3 == 0)
                say("acked", receipt.chain, receipt.seq, receipt.head)

    await asyncio.gather(*(one(task) for task in range(8)))


def begin(tx: Transaction, kind: str, call_id: str) -> Receipt:
    if kind == "started":
        tx.take_key("load", call_id, "digest", call_id)
    else:
        tx.settle_key("load", call_id, "done", {"ok": True})
    return tx.append(kind, call_id, {"effect_possible": True})


async def hold(folder: Path, keys: Path) -> None:
    store = Store.open(folder, signing_key(keys))
    await store.write(lambda tx: tx.append("started", f"held-{store.chain}", {}))
    say("opened", store.chain)
    sys.stdin.readline()
    await store.write(lambda tx: tx.append("finished", f"held-{store.chain}", {"status": "success"}))
    await store.aclose()
    say("closed")


async def leave_begun(folder: Path, keys: Path) -> None:
    store = Store.open(folder, signing_key(keys))
    say("opened", store.chain)
    for call_id in ("first", "second", "third"):
        await store.begin(call_id, {"effect_possible": False}, b"0123456789abcdef", alone=True)
        if call_id == "first":
            await store.write(lambda tx: tx.append("finished", "first", {"status": "success"}), alone=True)
    say("begun")
    sys.stdin.readline()  # on the loop's own thread: nothing catches up meanwhile


async def consume(folder: Path, keys: Path, digest: str, tries: str) -> None:
    store = Store.open(folder, signing_key(keys))
    say("opened", store.chain)
    sys.stdin.readline()

    async def one(number: int) -> bool:
        call_id = f"{store.chain}-{number}"
        return await store.write(lambda tx: tx.consume_approval(digest, call_id, time.time()) is not None)

    given = await asyncio.gather(*(one(number) for number in range(int(tries))))
    say("given", sum(given))
    await store.aclose()


if __name__ == "__main__":
    verbs: dict[str, Any] = {"write": write, "load": load, "hold": hold, "begin": leave_begun, "consume": consume}
    verb = verbs[sys.argv[1]]
    asyncio.run(verb(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
