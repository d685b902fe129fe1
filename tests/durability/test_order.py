"""What reaches the disk before what, as the kernel sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tooling
from tests.durability.stage import Json, Said, Stage, client
from tests.durability.tracing import Event, events, traced

pytestmark = pytest.mark.anyio

SYNCS = ("fsync", "fdatasync", "sync_file_range", "msync", "syncfs")
SENDS = ("write", "writev", "sendto", "sendmsg", "pwrite64")
CALLS = f"trace={','.join((*SYNCS, *SENDS))}"
MARK = "the-text-of-this-call"


@pytest.fixture(params=["stdio", "http"])
def servers(request: pytest.FixtureRequest) -> Json:
    """A server at the end of a pipe, or of a socket."""
    if request.param == "stdio":
        return {}
    url = request.getfixturevalue("echo_url")
    return {"servers": {"tools": {"url": url, "pins": "first_use"}}}


async def observe(stage: Stage, sections: Json, mode: str) -> tuple[Said, list[Event]]:
    """One call of `echo` under a contract of this mode, and every write and sync that the gateway makes for it."""
    config = stage.configure(**{**sections, "capabilities": {"echo": {"server": "tools", "mode": mode}}})
    trace = stage.folder / "trace"
    with stage.serving(config) as gateway:
        async with client(gateway) as caller:
            await caller.call("echo", {"text": "to warm up"})
            with traced(gateway.pid, ["-y", "-s", "9000", "-o", str(trace), "-e", CALLS]):
                said = await caller.call("echo", {"text": MARK})
    assert said.status == "success", said
    return said, events(trace.read_text(errors="replace"))


def one(found: list[Event], wanted: Callable[[Event], bool]) -> Event:
    return next(event for event in found if wanted(event))


def upstream(found: list[Event]) -> Event:
    """The first byte of the call to its server: the request with its arguments, on a pipe or a socket."""
    sent = lambda e: e.name in SENDS and "tools/call" in e.text and MARK in e.text and not on_disk(e)  # noqa: E731
    return one(found, sent)


def response(found: list[Event], said: Said) -> Event:
    """The first byte of the answer to the client: it carries the receipt."""
    assert said.receipt is not None
    head = str(said.receipt["head"])
    return one(found, lambda e: e.name in SENDS and head in e.text and not on_disk(e))


def on_disk(event: Event) -> bool:
    ours = r"\d+<[^>]*/(ringfence\.db(-wal|-shm)?|checkpoints/[^>]+|chains/[^>]+\.ahead)>"
    return re.match(ours, event.text) is not None


def log_of(state: Path, found: list[Event], said: Said) -> list[Event]:
    """The writes to the write-ahead log that hold something of this call, in order."""
    wal = f"<{state / 'ringfence.db-wal'}>"
    return [e for e in found if e.name == "pwrite64" and wal in e.text and said.call_id in e.text]


def noted(state: Path, found: list[Event], said: Said) -> list[Event]:
    """What was written of this call to the file that is ahead of the database."""
    place = re.compile(rf"<{re.escape(str(state / 'chains'))}/[^/>]+\.ahead>")
    return [e for e in found if e.name == "pwrite64" and place.search(e.text) and said.call_id in e.text]


def synced(state: Path, found: list[Event], file: str) -> list[Event]:
    return [e for e in found if e.name in SYNCS and f"{state / file}" in e.text]


def signed(state: Path, found: list[Event]) -> list[Event]:
    """The writes to the checkpoint file. They need not be synced: one that is older than the log is made good."""
    return [e for e in found if e.name == "pwrite64" and f"{state / 'checkpoints'}/" in e.text]


def between(found: list[Event], first: int, last: int) -> list[Event]:
    return [e for e in found if first < e.begun and e.ended < last]


async def test_a_write_is_on_disk_before_its_first_byte_leaves_and_again_before_its_answer_does(
    stage: Stage, servers: Json
) -> None:
    tooling.need("strace")
    said, found = await observe(stage, servers, "write")
    sent, answered = upstream(found), response(found, said)
    records = log_of(stage.state, found, said)
    started = [e for e in records if e.ended < sent.begun]
    finished = [e for e in records if sent.begun < e.begun]
    assert started
    assert finished

    steps = between(found, started[0].begun, sent.begun)
    wal = synced(stage.state, steps, "ringfence.db-wal")
    checkpoint = signed(stage.state, steps)
    assert wal, "the write-ahead log was synced between the started record and the first byte to the server"
    assert wal[-1].begun > started[-1].ended, "after all of the record was written"
    assert checkpoint and checkpoint[-1].begun > wal[-1].ended, "and its signed checkpoint after it"

    steps = between(found, finished[0].begun, answered.begun)
    wal = synced(stage.state, steps, "ringfence.db-wal")
    checkpoint = signed(stage.state, steps)
    assert wal, "the write-ahead log was synced between the finished record and the answer"
    assert wal[-1].begun > [e for e in finished if e.ended < answered.begun][-1].ended
    assert checkpoint and checkpoint[-1].begun > wal[-1].ended


async def test_a_read_is_recorded_before_it_leaves_and_waits_for_no_disk(stage: Stage, servers: Json) -> None:
    tooling.need("strace")
    said, found = await observe(stage, servers, "read")
    sent, answered = upstream(found), response(found, said)
    begun, records = noted(stage.state, found, said), log_of(stage.state, found, said)
    assert any(e.ended < sent.begun for e in begun), "started before the first byte to the server"
    assert any(sent.begun < e.begun and e.ended < answered.begun for e in records), "finished before the answer"
    assert [e for e in found if e.name in SYNCS] == []
