"""The output files of a guest that stays: what is new or changed, as its agent lists it.

Their digests are the agent's word. It reads them with the rights of programs, but no program can make it say anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from ringfence.core.box import FileFact
from ringfence.core.errors import Unavailable
from ringfence.sandbox.files.acted_upon import WHY, is_acted_upon
from ringfence.sandbox.files.collect import OUTPUT
from ringfence.sandbox.files.paths import shown, unfit
from ringfence.sandbox.guests.link import GuestGone, Link, collected

_MAX_FILES = 10_000
_MOST = 4 * 1024 * 1024
_SECONDS = 30.0
_BYTES_A_SECOND = 1e7

_NOTHING: tuple[tuple[FileFact, ...], Mapping[str, str]] = ((), {})


class GuestOutputs:
    def __init__(
        self,
        link: Link,
        max_bytes: int,
        mappings: Callable[[], int],
        awake: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        """`mappings`: how often memory was shared with a file; what is written there leaves no trace in its times."""
        self._link = link
        self._max_bytes = max_bytes
        self._mappings = mappings
        self._awake = awake
        self._mapped = False
        self._known: dict[str, str] = {}
        self._turn = asyncio.Lock()

    async def changed(self) -> tuple[tuple[FileFact, ...], Mapping[str, str]]:
        """Files that are new or changed since the last call, and what cannot be taken, and why."""
        async with self._turn, self._awake():
            self._mapped = self._mapped or self._mappings() > 0
            order = {"do": "changed", "again": self._mapped, "max_bytes": self._max_bytes, "max_files": _MAX_FILES}
            try:
                told = await self._told(order)
                return _NOTHING if told is None else self._new(told)
            except GuestGone:
                return _NOTHING
            except (Unavailable, TimeoutError, ValueError, TypeError, KeyError, RecursionError) as problem:
                return (), {OUTPUT: f"it cannot be read: {problem}"}

    async def _told(self, order: Mapping[str, object]) -> object:
        """What its agent lists; None: nothing has changed. Raises GuestGone, Unavailable, TimeoutError, ValueError,
        RecursionError."""
        channel = self._link.open(order)
        try:
            async with asyncio.timeout(_SECONDS + self._max_bytes / _BYTES_A_SECOND):
                data = bytearray()
                async for piece in collected(channel):
                    data += piece
                    if len(data) > _MOST:
                        raise Unavailable("guest_failed", "it lists too much")
                if (await channel.result).get("same"):
                    return None
        finally:
            if not channel.result.done():
                channel.kill()
        return await asyncio.to_thread(json.loads, data) if data else {}

    def _new(self, told: object) -> tuple[tuple[FileFact, ...], Mapping[str, str]]:
        """Raises ValueError, TypeError, KeyError for what is no list."""
        files: list[FileFact] = []
        skipped: dict[str, str] = {}
        if not isinstance(told, dict):
            raise ValueError("it is no list")
        listed, left_out = told.get("files", []), told.get("skipped", {})
        if not isinstance(listed, list) or not isinstance(left_out, dict):
            raise ValueError("it is no list")
        if max(len(listed), len(left_out)) > _MAX_FILES:
            raise ValueError("it lists too much")
        for path, size, digest in listed:
            if not (isinstance(path, str) and type(size) is int and size >= 0 and isinstance(digest, str)):
                raise ValueError("it is no list of files")
            if problem := _problem(path):
                skipped[f"{OUTPUT}/{shown(path)}"] = problem
            else:
                files.append(FileFact(f"{OUTPUT}/{path}", size, digest[:64]))
        skipped |= {f"{OUTPUT}/{shown(str(path))}": shown(str(why))[:200] for path, why in left_out.items()}
        if told.get("unnamed"):
            skipped[OUTPUT] = "more were left out"
        new = tuple(fact for fact in sorted(files, key=lambda each: each.path) if self._is_new(fact))
        self._known = {fact.path: fact.sha256 for fact in files}
        return new, skipped

    def _is_new(self, fact: FileFact) -> bool:
        return self._known.get(fact.path) != fact.sha256


def _problem(path: str) -> str | None:
    *folders, name = path.split("/")
    for each in (*folders, name):
        if problem := unfit(each):
            return problem
    if any(is_acted_upon(each, folder=True) for each in folders) or is_acted_upon(name, folder=False):
        return WHY
    return None
