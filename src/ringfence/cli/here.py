"""`ringfence call` without a running gateway: one opens in this process, for one call."""

from __future__ import annotations

import time
from pathlib import Path

import anyio

from ringfence import canonical
from ringfence.app import App
from ringfence.cli import common
from ringfence.cli.call import Ended, Wanted, failed
from ringfence.cli.serve import demo_config
from ringfence.cli.telling import Told
from ringfence.config import Config
from ringfence.errors import StoreError
from ringfence.model import Call, Json, Outcome, Status

_GRACE_SECONDS = 0.5


def settings(config_path: Path | None, demo: bool) -> Config:
    return demo_config(None) if demo else common.load(config_path)


async def call(wanted: Wanted, configured: Config, told: Told) -> Ended:
    call_id = canonical.new_id("call")
    limit = wanted.timeout
    try:
        async with App.open(configured) as app:
            made = Call(
                id=call_id,
                principal=app.agent,
                tool=wanted.tool,
                arguments=wanted.arguments,
                origin="cli",
                idempotency_key=wanted.key,
                fault=wanted.fault,
                deadline=None if limit is None else time.monotonic() + limit,
            )
            # The deadline ends the call itself; this ends what comes before, such as waiting for a person.
            with anyio.move_on_after(None if limit is None else limit + _GRACE_SECONDS):
                return _of_outcome(await app.handle(made, told), call_id)
    except StoreError as exc:
        return failed(Status.UNAVAILABLE, "store", str(exc))
    return failed(Status.TIMEOUT, "caller_timeout", f"gave up after {limit:g} s; the call is cancelled", call_id)


def _of_outcome(outcome: Outcome, call_id: str) -> Ended:
    more: Json = {"call_id": call_id, "trust": outcome.trust}
    if outcome.approval_id is not None:
        more["approval_id"] = outcome.approval_id
    if outcome.receipt is not None:
        receipt = outcome.receipt
        more["receipt"] = {"chain": receipt.chain, "seq": receipt.seq, "head": receipt.head}
    return Ended(outcome.status, outcome.reason_code, outcome.content, outcome.structured, outcome.facts, more)
