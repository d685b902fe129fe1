"""The stream between a host and the agent of a guest: a real agent, as a process of its own, in no container."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.sandbox.guests.link import CREDIT, GuestGone, GuestOrder, Link, collected, first_words, said
from tests.sandbox.guests.agents import agent

pytestmark = pytest.mark.anyio


def captured(channel: GuestOrder) -> dict[bytes, bytearray]:
    found = {b"1": bytearray(), b"2": bytearray()}
    channel.on_output = lambda kind, data: found[kind].extend(data)
    return found


async def ran(link: Link, *argv: str, **more: Any) -> tuple[dict[str, Any], bytes, bytes]:
    channel = link.open({"do": "run", "argv": list(argv), "cwd": "/", **more})
    found = captured(channel)
    return await channel.result, bytes(found[b"1"]), bytes(found[b"2"])


@pytest.mark.parametrize("compiled", [True, False])
async def test_a_program_runs_and_its_end_is_told(compiled: bool) -> None:
    async with agent(compiled=compiled) as link:
        told = await link.ready()
        assert tuple(told["python"][:2]) == sys.version_info[:2]
        result, out, err = await ran(link, "sh", "-c", "echo one; echo two >&2; exit 3")
        assert (os.waitstatus_to_exitcode(result["status"]), out, err) == (3, b"one\n", b"two\n")
        result, _, _ = await ran(link, "sh", "-c", "kill -TERM $$")
        assert os.WTERMSIG(result["status"]) == signal.SIGTERM
        result, _, err = await ran(link, "/nonexistent/program")
        assert os.waitstatus_to_exitcode(result["status"]) == 127 and b"No such file" in err


async def test_what_a_program_writes_comes_whole_and_no_faster_than_it_is_taken() -> None:
    async with agent() as link:
        channel = link.open({"do": "run", "argv": [sys.executable, "-c", "print('x' * 3_000_000)"], "cwd": "/"})
        most = 0
        held: list[asyncio.Future[None]] = []
        got = 0

        def take(kind: bytes, data: bytes) -> asyncio.Future[None]:
            nonlocal most, got
            got += len(data)
            held.append(asyncio.get_running_loop().create_future())
            most = max(most, sum(not each.done() for each in held) and got)
            return held[-1]

        channel.on_output = take
        while got < CREDIT:
            await asyncio.sleep(0.001)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert got == CREDIT, "nothing more comes before it is taken"
        while not channel.result.done():
            for each in held:
                if not each.done():
                    each.set_result(None)
            await asyncio.sleep(0.001)
        assert got == 3_000_001


async def test_input_is_passed_on_to_its_end() -> None:
    data = os.urandom(2_000_000)
    async with agent() as link:
        channel = link.open({"do": "run", "argv": ["sha256sum"], "cwd": "/", "input": True})
        found = captured(channel)
        await channel.write(data)
        channel.end()
        await channel.result
    assert found[b"1"].split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_input_that_nothing_reads_holds_nobody_up() -> None:
    async with agent() as link:
        channel = link.open({"do": "run", "argv": ["true"], "cwd": "/", "input": True})
        await channel.write(bytes(5_000_000))
        assert (await channel.result)["status"] == 0


async def test_code_is_at_a_descriptor_of_its_own() -> None:
    async with agent() as link:
        program = "import os, sys; print(os.read(3, 99)); print(sorted(os.listdir('/proc/self/fd')))"
        channel = link.open({"do": "run", "argv": [sys.executable, "-I", "-c", program], "cwd": "/"}, b"the code")
        found = captured(channel)
        await channel.result
    assert bytes(found[b"1"]) == b"b'the code'\n['0', '1', '2', '3', '4']\n", "and none of the agent's is there"


async def test_a_terminal_has_its_size_and_takes_what_is_typed() -> None:
    async with agent() as link:
        order = {"do": "run", "argv": ["sh", "-c", "read x; stty size; echo got $x"], "cwd": "/", "pty": [100, 30]}
        channel = link.open(order)
        found = captured(channel)
        channel.act({"size": [132, 43]})
        await channel.write(b"hello\n")
        await channel.result
    assert b"43 132" in found[b"1"] and b"got hello" in found[b"1"]


async def test_a_program_can_be_sent_signals_and_ended() -> None:
    async with agent() as link:
        channel = link.open({"do": "run", "argv": ["sleep", "1000"], "cwd": "/"})
        channel.act({"signal": 15})
        assert os.WTERMSIG((await channel.result)["status"]) == signal.SIGTERM
        channel = link.open({"do": "run", "argv": ["sleep", "1000"], "cwd": "/"})
        channel.kill()
        assert os.WTERMSIG((await channel.result)["status"]) == signal.SIGKILL


async def test_several_run_beside_each_other() -> None:
    async with agent() as link:
        results = await asyncio.gather(*(ran(link, "sh", "-c", f"sleep 0.0{n}; echo {n}") for n in range(8)))
    assert [out for _, out, _ in results] == [f"{n}\n".encode() for n in range(8)]


async def test_a_folder_comes_as_an_archive(tmp_path: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").write_text("a")
    what = {"folder": str(tmp_path), "names": ["out", "nothing"], "most": 100, "named": 9}
    async with agent() as link:
        data = b"".join([piece async for piece in collected(link.open({"do": "pack", "what": what}))])
        assert b"out/a.txt" in data and len(data) % 512 == 0
        missing = collected(link.open({"do": "pack", "what": {**what, "folder": "/nonexistent"}}))
        with pytest.raises(Unavailable, match="No such file"):
            await anext(missing)


async def test_an_order_that_the_agent_does_not_know_fails_alone() -> None:
    async with agent() as link:
        assert "failed" in await link.open({"do": "dance"}).result
        assert (await ran(link, "true"))[0]["status"] == 0


async def test_the_end_of_the_agent_is_the_end_of_everything_in_it() -> None:
    async with agent() as link:
        pid = (await link.ready())["pid"]
        channel = link.open({"do": "run", "argv": ["sleep", "1000"], "cwd": "/"})
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GuestGone):
            await channel.result
        assert link.gone.done()
        with pytest.raises(GuestGone):
            link.open({"do": "run", "argv": ["true"]})


# ── What no agent would send ──────────────────────────────────────────────────────────────────────

FRAME = struct.Struct(">IcI")


def frame(kind: bytes, number: int, body: bytes) -> bytes:
    return FRAME.pack(5 + len(body), kind, number) + body


def hostile() -> st.SearchStrategy[bytes]:
    kinds = st.sampled_from([b"1", b"2", b"N", b"R", b"W", b"H", b"A", b"\0"])
    bodies = st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"[]", b"{}", b"1", b"[" * 5000, b'{"status": -1}', b'{"status": 1e999}', b"NaN"]),
    )
    frames = st.builds(frame, kinds, st.integers(0, 3), bodies)
    return st.lists(st.one_of(frames, st.binary(max_size=20)), max_size=8).map(b"".join)


@given(data=hostile(), cut=st.integers(1, 50))
def test_whatever_comes_ends_the_link_at_most(data: bytes, cut: int) -> None:
    async def play() -> None:
        link = Link()
        sent = bytearray()
        link.connection_made(Pretended(sent))
        channel = link.open({"do": "run"})
        for start in range(0, len(data), cut):
            link.data_received(data[start : start + cut])
        if channel.result.done() and channel.result.exception() is None:
            assert isinstance(channel.result.result(), dict)
        elif channel.result.done():
            assert isinstance(channel.result.exception(), GuestGone)

    asyncio.run(play())


class Pretended(asyncio.Transport):
    """A fake: it keeps what is sent."""

    def __init__(self, sent: bytearray) -> None:
        super().__init__()
        self._sent = sent
        self._closed = False
        self.unsent = 0

    def write(self, data: Any) -> None:
        self._sent += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        self._closed = True


async def test_a_frame_of_impossible_length_ends_it() -> None:
    for data in (FRAME.pack(2**31, b"1", 1), FRAME.pack(0, b"1", 1)):
        link = Link()
        link.connection_made(Pretended(bytearray()))
        link.data_received(data)
        assert "impossible length" in link.gone.result()


def lied_to(channel: Callable[[Link], GuestOrder], *frames: bytes) -> str:
    """Why a link is over that is sent these."""

    async def play() -> str:
        link = Link()
        link.connection_made(Pretended(bytearray()))
        channel(link)
        for each in frames:
            link.data_received(each)
        return link.gone.result() if link.gone.done() else "it goes on"

    return asyncio.run(play())


def waiting(link: Link) -> GuestOrder:
    made = link.open({"do": "run"})
    made.on_output = lambda kind, data: asyncio.get_running_loop().create_future()
    return made


def test_a_guest_that_sends_or_allows_more_than_it_may_is_gone() -> None:
    piece = frame(b"1", 1, bytes(CREDIT // 4))
    assert lied_to(waiting, *[piece] * 4) == "it goes on"
    assert "more than it may" in lied_to(waiting, *[piece] * 6)
    assert lied_to(lambda link: link.open({"do": "run"}), *[piece] * 100) == "it goes on", "it is taken at once"
    assert "output that is none" in lied_to(waiting, frame(b"2", 1, b""))
    assert lied_to(waiting, frame(b"W", 1, struct.pack(">I", 1))) == "it goes on"
    assert "room that there is not" in lied_to(waiting, frame(b"W", 1, struct.pack(">I", CREDIT)))


async def test_a_guest_that_reads_nothing_is_gone() -> None:
    link = Link()
    stream = Pretended(bytearray())
    link.connection_made(stream)
    channel = link.open({"do": "run"})
    stream.unsent = 100_000_000
    channel.kill()
    assert "takes nothing" in link.gone.result() and stream.is_closing()
    with pytest.raises(GuestGone):
        await channel.result


async def test_what_a_guest_says_is_short_and_printable() -> None:
    assert said("a\x1b[31m" + "b" * 10_000).startswith("a") and "\x1b" not in said("a\x1b")
    assert len(said("b" * 10_000)) == 300


def test_the_first_words_are_the_agent_and_what_it_must_know() -> None:
    first = first_words(b"agent", {"env": {}}, b"code")
    assert first[:9] == b"\0\0\0\5agent"
    size, kind, _ = FRAME.unpack_from(first, 9)
    assert kind == b"H" and size == len(first) - 13
    (length,) = struct.unpack_from(">I", first, 18)
    assert json.loads(first[22 : 22 + length]) == {"env": {}} and first.endswith(b"code")
