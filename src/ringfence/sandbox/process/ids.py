"""Who the boxes of a zygote are on the host: nobody else, or where that cannot be the supervisor's own user."""

from __future__ import annotations

import asyncio
import os

from ringfence.errors import Unavailable
from ringfence.model import Json
from ringfence.sandbox.process import subids, uids
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.groups import Groups
from ringfence.sandbox.process.uids import Block


class Unmapped(Exception):
    """Ids were set apart, but could not be mapped, and why."""


def take(baseline: Baseline, groups: Groups) -> tuple[Block | None, Json]:
    """Ids for one zygote, if there are any, and the fact. Raises Unavailable for root, who needs them."""
    if os.geteuid() == 0:
        block = uids.take_block()
        # A mount is mapped to one id, so all boxes that see the same have that one.
        return block, {"whose": "own"} if not baseline.mounts else {"whose": "shared", "with": "boxes of these mounts"}
    try:
        return subids.take(baseline, by_v1=groups.of_v1), {"whose": "own"}
    except Unavailable as exc:
        return None, _users(exc.message)


def shared(why: str) -> Json:
    """The fact where they could not be mapped; it is not tried again."""
    subids.refuse(why)
    return _users(why)


def _users(why: str) -> Json:
    return {"whose": "user", "why": why}


async def map_into(process: int, block: Block) -> None:
    """Write the maps of its user namespace. Raises OSError, Unmapped."""
    if os.geteuid() == 0:
        uids.map_into(process, block)
        return
    try:
        await asyncio.to_thread(subids.map_into, process, block)
    except Unavailable as exc:
        raise Unmapped(exc.message) from None
