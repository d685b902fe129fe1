"""All of what a step writes is kept in its box where it is more than is captured: whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.errors import Refused
from ringfence.core.model import Status
from ringfence.sandbox.files.spool import Spool
from ringfence.sandbox.files.workspace import Workspace

pytestmark = pytest.mark.anyio


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "tmp").mkdir()
    yield tmp_path
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left"


def whole(place: Path, captured: int = 4, **more: Any) -> tuple[Spool, list[Any]]:
    heard: list[Any] = []

    def workspace() -> Workspace:
        return Workspace(os.open(place, os.O_RDONLY | os.O_DIRECTORY), None)

    return Spool(workspace, captured, lambda *said: heard.append(said), wanted=True, **more), heard


async def test_what_is_captured_anyway_is_not_kept_again(place: Path) -> None:
    kept, heard = whole(place)
    kept.tell("stdout", b"ab")
    kept.tell("stdout", b"cd")
    assert (await kept.over(), list((place / "tmp").iterdir())) == ({}, [])
    assert heard == [("stdout", b"ab"), ("stdout", b"cd")]


async def test_what_is_more_is_kept_whole(place: Path) -> None:
    kept, heard = whole(place)
    for piece in (b"ab", b"cd", b"ef", b"gh"):
        kept.tell("stdout", piece)
    kept.tell("stderr", b"no")
    paths = await kept.over()
    assert list(paths) == ["stdout"]
    assert (place / paths["stdout"].removeprefix("/workspace/")).read_bytes() == b"abcdefgh"
    assert len(heard) == 5
    assert await kept.over() == {}


async def test_nobody_who_does_not_want_it_pays_for_it(place: Path) -> None:
    heard: list[Any] = []

    def never() -> Workspace:
        raise AssertionError

    kept = Spool(never, 0, lambda *said: heard.append(said), wanted=False)
    kept.tell("stdout", b"abc")
    assert (await kept.over(), heard) == ({}, [("stdout", b"abc")])


async def test_a_folder_that_leads_out_is_not_followed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (place / "tmp").rmdir()
    (place / "tmp").symlink_to(outside)
    kept, _ = whole(place)
    kept.tell("stdout", b"abcdef")
    kept.tell("stdout", b"gh")
    assert (await kept.over(), list(outside.iterdir())) == ({}, [])


async def test_without_room_there_is_none_and_no_half_of_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, heard = whole(place)
    kept.tell("stdout", b"abcdef")

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    kept.tell("stdout", b"gh")
    kept.tell("stdout", b"ij")
    monkeypatch.undo()
    assert (await kept.over(), len(heard)) == ({}, 3)
    assert [path.stat().st_size for path in (place / "tmp").iterdir()] == [0]


async def test_a_session_that_is_gone_keeps_nothing() -> None:
    def gone() -> Workspace:
        raise Refused(Status.VALIDATION_FAILURE, "session_stopped", "it is gone")

    kept = Spool(gone, 1, lambda *said: None, wanted=True)
    kept.tell("stdout", b"abc")
    kept.tell("stdout", b"abc")
    assert await kept.over() == {}
