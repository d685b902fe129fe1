"""What bad clients can do to a keeper, and to its other clients: nothing."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.core.box import MIB
from ringfence.core.sessions import CellRequest
from ringfence.sandbox.keeper import server as keepers
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.codec import pack
from ringfence.sandbox.keeper.server import KeeperServer
from ringfence.sandbox.keeper.wire import MAX_FRAME, MAX_MESSAGE, SLACK, WINDOW
from tests.sandbox.keeper.parrot import ANN, CHUNK, Parrot, kept, session
from tests.sandbox.keeper.rawclient import HELLO, LIST, Raw, frame, raw, serves
from tests.sandbox.keeper.test_client import until

pytestmark = pytest.mark.anyio


# ── Clients that speak nonsense ───────────────────────────────────────────────────────────────────────────────────

BAD = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "a huge length": frame(b"", length=2**32 - 1),
    "a length just beyond": frame(b"", length=MAX_FRAME + 1),
    "no JSON": frame(b"{"),
    "JSON that is no object": frame([1]),
    "deep JSON": frame(b"[" * 1_000_000),
    "an unknown kind": frame(LIST, kind=9),
    "an attachment for nothing": frame(b"data", kind=2),
    "a chunk for nothing": frame(b"data", kind=3),
    "no number": frame({"do": "list"}),
    "a number that is none": frame(LIST | {"id": "1"}),
    "a number that is too large": frame(LIST | {"id": 2**64}),
    "no verb": frame(LIST | {"do": "format_disk"}),
    "a verb that is for here": frame(LIST | {"do": "close"}),
    "a private name": frame(LIST | {"do": "__init__"}),
    "nothing": frame({"id": 1}),
    "attachments of a negative size": frame(LIST | {"sizes": [-1]}),
    "attachments of a huge size": frame(LIST | {"sizes": [MAX_MESSAGE + 1]}),
    "attachments that are no list": frame(LIST | {"sizes": 3}),
    "another frame than the attachment": frame(LIST | {"sizes": [3]}) + frame(LIST),
    "an attachment that is too long": frame(LIST | {"sizes": [3]}) + frame(b"1234", kind=2),
    "a large message without itself": frame({"large": True}),
    "a large message that is none": frame({"large": True, "sizes": [2]}) + frame(b"[]", kind=2),
    "a number twice": frame(LIST | {"do": "wait", "with": {}}) * 2,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("greeting", [True, False], ids=["greeted", "at once"])
async def test_a_client_that_speaks_nonsense_is_cut_off(
    bad: str, greeting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(Parrot()) as (_, there), KeeperClient.connect(there) as honest:
        with raw(there) as client, caplog.at_level(logging.CRITICAL):
            if greeting:
                await client.greeted()
            await client.say(BAD[bad])
            assert await client.hung_up()
        assert await honest.list(ANN) == []


@pytest.mark.parametrize(
    "asked",
    [None, [], {"owner": None}, {"owner": ["a"]}, {"owner": list(ANN), "more": 1}, {}],
    ids=["nothing", "a list", "no owner", "half an owner", "more than it takes", "none"],
)
async def test_bad_arguments_are_refused_and_the_client_is_not(asked: Any) -> None:
    async with kept(Parrot()) as (_, there):
        with raw(there) as client:
            await client.greeted()
            await client.say(frame(LIST | {"with": asked}))
            error = (await client.message())["error"]
            assert (error["kind"], error["reason_code"]) == ("refused", "bad_request")
            await client.say(frame(LIST))
            assert (await client.message())["done"] == []


async def test_what_is_said_about_requests_that_are_over_is_passed_over() -> None:
    async with kept(Parrot()) as (_, there):
        with raw(there) as client:
            await client.greeted()
            for said in (
                {"id": 7, "cancel": True},
                {"id": 7, "room": 5},
                {"id": 7, "end": True},
                {"id": 7, "room": -1},
            ):
                await client.say(frame(said))
            await client.say(frame(struct.pack(">QB", 7, 0) + b"data", kind=3), frame(LIST))
            assert (await client.message())["done"] == []


async def test_any_bytes_harm_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async with kept(Parrot()) as (_, there), KeeperClient.connect(there) as honest:
        inputs: list[bytes] = []

        @settings(max_examples=50, suppress_health_check=list(HealthCheck), database=None)
        @given(st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=60)), max_size=4), st.binary(max_size=8))
        def collect(frames: list[tuple[int, bytes]], rest: bytes) -> None:
            inputs.append(b"".join(frame(data, kind) for kind, data in frames) + rest)

        collect()
        with caplog.at_level(logging.CRITICAL):
            for said in inputs:
                with raw(there) as client:
                    await client.greeted()
                    await client.say(said)
        assert await honest.list(ANN) == []


async def test_a_client_that_never_greets_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_GREETING_SECONDS", 0.1)
    async with kept(Parrot()) as (_, there):
        with raw(there) as silent, raw(there) as half:
            await half.say(frame(HELLO)[:7])
            assert await silent.hung_up() and await half.hung_up()


async def test_a_thousand_connections_are_borne(caplog: pytest.LogCaptureFixture) -> None:
    if (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < 2500:
        pytest.skip(f"both ends of a thousand connections need more than {most} descriptors (ulimit -n)")
    async with kept(Parrot()) as (server, there), KeeperClient.connect(there) as honest:
        every = []
        try:
            for _ in range(1000):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                every.append(connection)
                connection.setblocking(False)
                while True:
                    try:
                        connection.connect(there.folder.address() or "")
                        break
                    except BlockingIOError:  # as many wait as are let in at all
                        await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            assert len(server._clients) <= keepers.MAX_CLIENTS
            last = Raw(every[-1])
            assert (await last.message())["refused"]["reason_code"] == "too_many_clients"
            assert await honest.list(ANN) == []
        finally:
            for connection in every:
                connection.close()
        await until(lambda: len(server._clients) == 1)
        assert await serves(there)


# ── Clients that do not read ──────────────────────────────────────────────────────────────────────


async def begin(client: Raw, number: int, verb: str, **arguments: Any) -> None:
    await client.say(frame({"id": number, "do": verb, "with": {"owner": list(ANN), **arguments}}))


def cell(source: str) -> Any:
    return pack(CellRequest, CellRequest(source), [])


@pytest.mark.parametrize(("verb", "asked"), [("run", {"request": cell("flood 10000")}), ("pack", {"path": "10000"})])
async def test_a_client_that_does_not_read_is_waited_for(verb: str, asked: dict[str, Any]) -> None:
    parrot = Parrot()
    async with kept(parrot) as (_, there), KeeperClient.connect(there) as honest:
        box = session(parrot)
        with raw(there) as client:
            await client.greeted()
            await begin(client, 1, verb, id=box, **asked)
            await until(lambda: parrot.told + parrot.poured)
            await asyncio.sleep(0.3)
            assert parrot.told + parrot.poured <= WINDOW + SLACK + 2 * CHUNK
            assert (await honest.info(ANN, box)).id == box
        await until(lambda: parrot.done)
        assert parrot.done in (["flood was cancelled"], ["pack is over"])


async def test_room_that_is_granted_without_reading_gains_nothing() -> None:
    parrot = Parrot()
    async with kept(parrot) as (server, there):
        box = session(parrot)
        with raw(there) as client:
            await client.greeted()
            await begin(client, 1, "run", id=box, request=cell("blind 10000"))
            for _ in range(100):
                await client.say(frame({"id": 1, "room": 2**60}))
            await asyncio.sleep(0.3)
            (caller,) = server._clients
            transport: Any = caller.wire._transport
            assert transport.get_write_buffer_size() < 12 * MIB


async def test_answers_that_are_not_read_do_not_pile_up() -> None:
    parrot = Parrot()
    async with kept(parrot) as (server, there), KeeperClient.connect(there) as honest:
        box = session(parrot)
        with raw(there) as client:
            await client.greeted()
            for number in range(64):
                await begin(client, number, "read", id=box, path="a", offset=0, length=8 * MIB)
            number = 100
            while await client.say(frame(LIST | {"id": number})):
                number += 1
            assert number < 20_000
            assert parrot.done.count("read") <= 2
            waiting = sum(caller.wire._transport.get_write_buffer_size() for caller in _others(server))  # type: ignore[union-attr]
            assert waiting < 20 * MIB
            assert (await honest.info(ANN, box)).id == box


def _others(server: KeeperServer) -> list[Any]:
    return [caller for caller in server._clients if caller.wire._transport is not None]


async def test_a_client_that_sends_more_than_there_is_room_for_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    parrot = Parrot()
    gate = asyncio.Event()

    async def unpack(*asked: Any, **more: Any) -> Any:
        await gate.wait()

    parrot.unpack = unpack  # type: ignore[method-assign]
    async with kept(parrot) as (_, there):
        with raw(there) as client, caplog.at_level(logging.CRITICAL):
            await client.greeted()
            await begin(client, 1, "unpack", id=session(parrot), path="a")
            chunk = frame(struct.pack(">QB", 1, 0) + bytes(CHUNK), kind=3)
            for _ in range((WINDOW + SLACK) // CHUNK + 3):
                await client.say(chunk)
            assert await client.hung_up()
        gate.set()
        assert await serves(there)
