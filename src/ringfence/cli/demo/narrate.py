"""The demo tells, as calls end, what `ringfence audit explain` says of each."""

from __future__ import annotations

import anyio

from ringfence.audit.explain import explain
from ringfence.cli.terminal import safe
from ringfence.store import Store

_SECONDS = 0.3
"""What ends within so short a time is told together."""


async def narrate(store: Store) -> None:
    """Runs for as long as the demo."""
    told = 0
    while True:
        await store.written.wait()
        await anyio.sleep(_SECONDS)
        store.written.clear()
        newest = store.reader().records(chain=store.chain, kind="finished", newest_first=True, limit=20)
        fresh = [record for record in newest if record.seq > told]
        for record in reversed(fresh):
            told = max(told, record.seq)
            call = record.body.get("call") or {}
            if call.get("kind") != "server" and record.call_id is not None:
                said = explain([r.body for r in store.reader().story(record.call_id)])
                print(f"explain {record.call_id}: {safe(said)}\n", flush=True)
