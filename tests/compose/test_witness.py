"""What tells witnesses where the log is: to a file, a system log and a service, again until it has arrived."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import anyio
import pytest
from aiohttp import web

from ringfence.audit.chain import EMPTY_SLOT, Checkpoint, StateIdentity, pack_slot
from ringfence.audit.keys import Keys, load_or_create
from ringfence.audit.witness import witnessed
from ringfence.compose import witness
from ringfence.compose.witness import Witnesses
from ringfence.config.settings import WitnessSettings

STATE = StateIdentity("state_1", 1.0, older=False)
CHAIN = "20260101T000000Z-aaaaaaaaaa"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_or_create(tmp_path / "keys")


def sign(folder: Path, keys: Keys, seq: int, chain: str = CHAIN) -> None:
    """The checkpoint file of a chain, as it is when it was last signed there."""
    path = folder / "checkpoints" / chain
    path.parent.mkdir(parents=True, exist_ok=True)
    line = Checkpoint(chain, seq, f"{seq:064d}", seq, float(seq), state=STATE.id).sign(keys.private)
    path.write_bytes(pack_slot(line) + EMPTY_SLOT)
    os.utime(path, ns=(seq, seq))


def heads(path: Path, keys: Keys) -> list[tuple[str, int]]:
    return [(known.head.chain, known.head.seq) for known in witnessed(path, keys.public, STATE)]


def test_a_file_gets_each_head_once(tmp_path: Path, keys: Keys) -> None:
    path = tmp_path / "heads"
    path.touch()
    told = Witnesses(WitnessSettings(file=path), tmp_path / "state", keys.public)
    told.tell()
    assert path.read_text() == "", "there is no log yet"
    sign(tmp_path / "state", keys, 1)
    told.tell()
    told.tell()
    sign(tmp_path / "state", keys, 2)
    sign(tmp_path / "state", keys, 7, "another")
    told.tell()
    assert len(path.read_text().splitlines()) == 3
    assert heads(path, keys) == [(CHAIN, 1), (CHAIN, 2), ("another", 7)]


def test_what_did_not_arrive_is_told_again(tmp_path: Path, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "heads"
    told = Witnesses(WitnessSettings(file=path), tmp_path / "state", keys.public)
    sign(tmp_path / "state", keys, 1)
    with caplog.at_level(logging.WARNING):
        told.tell()
        told.tell()
    assert not path.exists(), "who made it would be its owner"
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is said once"
    path.touch()
    told.tell()
    assert heads(path, keys) == [(CHAIN, 1)]


def test_a_file_of_ours_proves_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heads"
    path.touch()
    assert "chattr +a" in str(witness.rewritable(path))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert witness.rewritable(path) is None, "another user has it"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "heads").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        witness.append(tmp_path / "heads", [b"x"])


def test_what_is_not_ours_in_a_file_is_passed_over(tmp_path: Path, keys: Keys) -> None:
    def line(seq: int, by: Keys = keys, state: str = STATE.id) -> bytes:
        return Checkpoint(CHAIN, seq, "f" * 64, seq, 1.0, state=state).sign(by.private)

    others = load_or_create(tmp_path / "others")
    path = tmp_path / "syslog"
    cut = line(5)[:90]
    given = [b"2026-11-19 host ringfence-witness: " + line(3), cut + line(4), line(8, others), line(9, keys, "state_2")]
    path.write_bytes(b"\n".join([b"\xff\xfe", b"{}", cut, *given]) + b"\n")
    assert heads(path, keys) == [(CHAIN, 3), (CHAIN, 4)]


def test_the_system_log(tmp_path: Path, keys: Keys) -> None:
    place = tmp_path / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(place))
        sign(tmp_path / "state", keys, 1)
        Witnesses(WitnessSettings(syslog=place), tmp_path / "state", keys.public).tell()
        message = log.recv(4096)
    assert message.startswith(b"<85>ringfence-witness: {")
    (tmp_path / "kept").write_bytes(message + b"\n")
    assert heads(tmp_path / "kept", keys) == [(CHAIN, 1)]


@pytest.mark.anyio
async def test_a_service(tmp_path: Path, keys: Keys) -> None:
    got: list[bytes] = []
    answers = [503, 302, 204]

    async def take(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response(status=answers.pop(0), headers={"location": "/elsewhere"})

    app = web.Application()
    app.router.add_post("/heads", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        sign(tmp_path / "state", keys, 1)
        told = Witnesses(
            WitnessSettings(webhook=f"http://127.0.0.1:{port}/heads?log=1"), tmp_path / "state", keys.public
        )
        for _ in range(4):
            await anyio.to_thread.run_sync(told.tell)
    finally:
        await runner.cleanup()
    assert answers == [] and len(got) == 3, "until one was taken, and no redirect is followed"
    (tmp_path / "kept").write_bytes(got[-1])
    assert heads(tmp_path / "kept", keys) == [(CHAIN, 1)]
