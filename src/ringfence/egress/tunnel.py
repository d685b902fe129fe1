"""A tunnel: bytes in both directions, unread but for the hello that must be for the host of the tunnel."""

from __future__ import annotations

import asyncio
import contextlib

from ringfence.egress.hello import ACCESS_DENIED, BadHello, HelloGuard
from ringfence.egress.ledger import Entry
from ringfence.egress.meter import Meter
from ringfence.egress.names import Host
from ringfence.egress.refusal import Denied, Stopped
from ringfence.egress.wire import Closed, Limits, Outside, Wire


class Tunnel:
    def __init__(self, client: Wire, outside: Outside, meter: Meter, entry: Entry) -> None:
        self._client = client
        self._outside = outside
        self._meter = meter
        self._entry = entry
        self._moved = 0

    async def run(self, host: Host, limits: Limits) -> None:
        """Until both sides have ended. Raises Denied, after the client was told."""
        guard = HelloGuard(host)
        for wire in (self._client, self._outside):
            wire.wait_at_most(None)  # One direction may be silent as long as the other is not.
        try:
            try:
                async with asyncio.timeout(limits.head_seconds):
                    await self._greet(guard)
            except TimeoutError:
                raise Denied(self._entry.rule, "sni_missing", "no TLS hello came") from None
            await self._relay(guard, limits)
        except BadHello as error:
            with contextlib.suppress(Closed):
                await self._client.send(ACCESS_DENIED)
            raise Denied(self._entry.rule, str(error)) from error
        except Closed:
            pass
        finally:
            await self._outside.close()

    async def _greet(self, guard: HelloGuard) -> None:
        while not (ready := guard.feed(await self._read_client())):
            pass
        await self._send_out(ready)

    async def _read_client(self) -> bytes:
        data = await self._client.some()
        if not data:
            raise Closed
        return data

    async def _send_out(self, data: bytes) -> None:
        self._meter.outward(len(data), self._entry)
        await self._outside.send(data)

    async def _relay(self, guard: HelloGuard, limits: Limits) -> None:
        both = {asyncio.create_task(self._outward(guard)), asyncio.create_task(self._inward())}
        try:
            seen = -1
            waiting = both
            while waiting and seen != self._moved:
                seen = self._moved
                done, waiting = await asyncio.wait(
                    waiting, timeout=limits.idle_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                self._moved += len(done)
                for task in done:
                    task.result()
        except (Stopped, BadHello, Closed):
            self._outside.abort()
            raise
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _outward(self, guard: HelloGuard) -> None:
        while data := await self._client.some():
            self._moved += 1
            ready = data if guard.open else guard.feed(data)
            if ready:
                await self._send_out(ready)
        await self._outside.finish()

    async def _inward(self) -> None:
        while data := await self._outside.some():
            self._moved += 1
            self._meter.inward(len(data), self._entry)
            await self._client.send(data)
        await self._client.finish()
