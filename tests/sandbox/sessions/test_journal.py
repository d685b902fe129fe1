"""The journal of sessions: it outlives its keeper, whatever state that left it in."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Limits
from ringfence.core.errors import StoreError, Unavailable
from ringfence.core.sessions import Owner, SessionInfo
from ringfence.sandbox.sessions import journal as module
from ringfence.sandbox.sessions.journal import SessionJournal
from tests import tooling

pytestmark = pytest.mark.anyio

ME = Owner("t", "me")


def info(id_: str, **more: object) -> SessionInfo:
    made = SessionInfo(id_, ME, "running", "python", "2026-01-01T00:00:00.000+00:00", Limits(), metadata={"a": "b"})
    return replace(made, **more)  # type: ignore[arg-type]


def ended(id_: str, ago: float = 0.0) -> SessionInfo:
    at = (datetime.now(UTC) - timedelta(seconds=ago)).isoformat(timespec="milliseconds")
    return info(id_, state="stopped", why="closed", ended_at=at, step=3, contexts=("default", "other"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def journal(folder: Path) -> Iterator[SessionJournal]:
    made = SessionJournal(folder)
    yield made
    made.close()


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "sessions.jsonl").read_text().splitlines()]


async def test_what_was_written_is_found_again(journal: SessionJournal, folder: Path) -> None:
    journal.write("created", info("box_1"))
    journal.note("paused", "box_1", ME, 2)
    journal.write("created", info("box_2"))
    journal.write("ended", ended("box_1"), {"trouble": ["something"]})
    await journal.synced()
    assert [line["event"] for line in lines(folder)] == ["created", "paused", "created", "ended"]
    journal.close()
    again = SessionJournal(folder)
    first = again.past["box_1"]
    assert (first.state, first.why, first.step) == ("stopped", "closed", 3)
    assert (again.past["box_2"].why, again.past["box_2"].metadata) == ("keeper_died", {"a": "b"})
    again.close()
    third = SessionJournal(folder)
    assert third.past == again.past
    third.close()


async def test_names_of_contexts_are_not_kept(journal: SessionJournal, folder: Path) -> None:
    journal.write("created", info("box_1"))
    journal.write("ended", ended("box_1"))
    assert journal.past["box_1"].contexts == ("default", "other"), "for as long as the keeper lives"
    assert "other" not in (folder / "sessions.jsonl").read_text()
    journal.close()
    again = SessionJournal(folder)
    assert again.past["box_1"].contexts == ("default",) and "other" not in (folder / "sessions.jsonl").read_text()
    again.close()


async def test_what_is_noted_is_written_soon(journal: SessionJournal, folder: Path) -> None:
    journal.note("paused", "box_1", ME, 2)
    assert lines(folder) == []
    await tooling.until(lambda: lines(folder))
    assert lines(folder)[0]["step"] == 2
    journal.note("resumed", "box_1", ME, 2)
    await journal.settle()
    assert [line["event"] for line in lines(folder)] == ["paused", "resumed"]


def test_one_keeper_at_a_time(journal: SessionJournal, folder: Path) -> None:
    with pytest.raises(Unavailable, match="another keeper"):
        SessionJournal(folder)
    journal.close()
    SessionJournal(folder).close()


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        SessionJournal(tmp_path / "open")


def test_a_day_later_it_is_forgotten(journal: SessionJournal, folder: Path) -> None:
    journal.write("created", info("box_old"))
    journal.write("ended", ended("box_old", ago=module.REMEMBERED_SECONDS + 60))
    journal.write("created", info("box_new"))
    journal.write("ended", ended("box_new"))
    assert list(journal.past) == ["box_new"]
    journal.close()
    again = SessionJournal(folder)
    assert list(again.past) == ["box_new"]
    assert len(lines(folder)) == 2
    again.close()


def test_the_file_does_not_grow_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LINES", 50)
    monkeypatch.setattr(module, "_MAX_REMEMBERED", 5)
    journal = SessionJournal(folder)
    journal.write("created", info("box_open"))
    for number in range(200):
        journal.write("created", info(f"box_{number}"))
        journal.write("ended", ended(f"box_{number}"))
        assert len(lines(folder)) <= 51
    assert len(journal.past) == 5
    journal.close()
    again = SessionJournal(folder)
    assert again.past["box_open"].why == "keeper_died"
    assert again.past["box_199"].why == "closed"
    again.close()


async def test_many_who_wait_for_the_disk_wait_together(
    journal: SessionJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for number in range(20):
        journal.write("created", info(f"box_{number}"))
    await asyncio.gather(*(journal.synced() for _ in range(20)))
    assert len(synced) == 1
    await journal.synced()
    assert len(synced) == 1


async def test_a_disk_that_fails_is_told(
    journal: SessionJournal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def short(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[:10])

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        journal.write("created", info("box_1"))
        with pytest.raises(StoreError, match="No space"):
            await journal.synced()
    await journal.synced()
    for broken in (full, short):
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", broken)
            with pytest.raises(StoreError, match="make room"):
                journal.write("created", info("box_2"))
    # Half a line is on the disk; the next one stands by itself.
    journal.write("created", info("box_3"))
    journal.close()
    again = SessionJournal(folder)
    assert {"box_1", "box_3"} <= set(again.past)
    again.close()


@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b'{"event":"created"}', b'{"event":1}', b"[]"]))))
def test_whatever_is_in_the_file_it_starts(garbage: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "state"
        journal = SessionJournal(folder)
        journal.write("created", info("box_1"))
        journal.close()
        good = (folder / "sessions.jsonl").read_bytes()
        (folder / "sessions.jsonl").write_bytes(b"\n".join([*garbage, good, *garbage]))
        again = SessionJournal(folder)
        assert again.past["box_1"].why == "keeper_died"
        again.close()
