"""Files of a session: in, out, from one to another, and watched. The boxes are fakes."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.sandbox.lodging import ME, Lodging, lodging, pieces, refused, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Lodging]:
    async with lodging(tmp_path / "state") as made:
        yield made


# ── Files ──


def _tar(**files: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


async def test_files_go_in_and_come_out(here: Lodging) -> None:
    box, house = await here.create(), here.house
    fact = await house.write(ME, box, "a/b.txt", b"one", mode=0o600)
    assert (fact.path, fact.bytes) == ("/workspace/a/b.txt", 3)
    await house.write(ME, box, "a/b.txt", b" two", append=True)
    assert await house.read(ME, box, "/workspace/a/b.txt", 2, 3) == b"e t"
    assert (await house.stat(ME, box, "a/b.txt")).mode == 0o600
    assert await house.make_dir(ME, box, "a") is False
    await house.rename(ME, box, "a/b.txt", "a/c.txt")
    await house.remove(ME, box, "a")
    assert await refused(house.read(ME, box, "a/c.txt", 0, None)) == "not_found"
    assert await refused(house.read(ME, box, "../etc/passwd", 0, None)) == "outside"
    assert await refused(house.write(ME, box, "/etc/passwd", b"")) == "outside"


async def test_folders_go_in_and_come_out_as_archives(here: Lodging) -> None:
    box = await here.create()
    archive = _tar(one=b"1" * 100_000, two=b"2")
    parts = [archive[at : at + 1000] for at in range(0, len(archive), 1000)]
    facts = await here.house.unpack(ME, box, "in", pieces(*parts))
    assert [(fact.path, fact.bytes) for fact in facts] == [("/workspace/in/one", 100_000), ("/workspace/in/two", 1)]
    packed = b"".join([piece async for piece in here.house.pack(ME, box, "in")])
    with tarfile.open(fileobj=io.BytesIO(packed)) as found:
        assert sorted(found.getnames()) == ["one", "two"]
    assert await refused(here.house.unpack(ME, box, "in", pieces(b"no archive"))) == "bad_archive"


async def test_an_upload_that_stops_leaves_nothing(here: Lodging) -> None:
    box = await here.create()
    sending = asyncio.create_task(here.house.unpack(ME, box, "in", pieces(_tar(one=b"1" * 5000)[:2000], then=600)))
    await until((here.backend.boxes[0].place / "in").exists)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await here.house.entries(ME, box, "in", 1) == []

    async def breaking() -> AsyncIterator[bytes]:
        yield _tar(one=b"1")[:600]
        raise ConnectionResetError("the client is gone")

    with pytest.raises(ConnectionResetError):
        await here.house.unpack(ME, box, "in", breaking())
    assert await here.house.entries(ME, box, "in", 1) == []


async def test_a_download_that_stops_leaves_nothing_open(here: Lodging) -> None:
    box = await here.create()
    await here.house.write(ME, box, "large", bytes(5_000_000))
    packed = here.house.pack(ME, box, ".")
    assert await anext(packed)
    await packed.aclose()
    await here.house.pack(ME, box, ".").aclose()


async def test_files_are_copied_from_session_to_session(here: Lodging) -> None:
    one, two = await here.create(), await here.create()
    await here.house.write(ME, one, "a", b"text")
    fact = await here.house.copy(ME, one, "a", two, "b/c")
    assert (fact.path, await here.house.read(ME, two, "b/c", 0, None)) == ("/workspace/b/c", b"text")
    assert await refused(here.house.copy(ME, one, "none", two, "d")) == "not_found"
    assert await refused(here.house.copy(ME, one, "a", "box_none", "d")) == "unknown_session"


async def test_changes_are_told_until_the_session_ends(here: Lodging) -> None:
    box = await here.create()
    changes = here.house.watch(ME, box, ".", False)
    assert (await anext(changes)).kind == "begun"
    await here.house.write(ME, box, "a", b"text")
    assert (await anext(changes)).path == "/workspace/a"
    rest = asyncio.ensure_future(anext(changes, None))
    await asyncio.sleep(0.02)
    await here.house.end(ME, box)
    while (await rest) is not None:
        rest = asyncio.ensure_future(anext(changes, None))
    assert await refused(anext(here.house.watch(ME, box, ".", False))) == "session_stopped"


async def test_a_session_that_is_only_watched_is_idle(here: Lodging) -> None:
    box = await here.create(idle_seconds=0.1)
    changes = here.house.watch(ME, box, ".", True)
    assert (await anext(changes)).kind == "begun"
    waiting = asyncio.ensure_future(anext(changes, None))
    await here.becomes(box, "paused")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await changes.aclose()
