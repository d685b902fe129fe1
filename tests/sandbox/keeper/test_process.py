"""How a keeper is found, started, and replaced: in processes of their own, as it is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.core.errors import OutcomeUnknown, Refused, StoreError, Unavailable
from ringfence.core.sessions import CellRequest, SessionSpec
from ringfence.sandbox.keeper.client import KeeperClient
from ringfence.sandbox.keeper.process import KeeperFolder, KeeperLaunch
from tests import tooling
from tests.sandbox.keeper.parrot import ANN, keeper_launch, quiet, short_folder

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path
        process = process_of(path)
        if process is not None:
            os.kill(process, signal.SIGKILL)
            tooling.wait_until_gone(process)


def process_of(folder: Path) -> int | None:
    """The keeper that lives there, if any."""
    try:
        process = int(json.loads((folder / "keeper" / "address").read_text())["process"])
    except FileNotFoundError:
        return None
    return process if tooling.alive(process) and process != os.getpid() else None


def client(there: KeeperLaunch, body: str) -> subprocess.Popen[str]:
    """Another process with a client of its own, as `keeper`."""
    code = f"""
import asyncio, sys
sys.path[:0] = {[str(tooling.ROOT), str(tooling.ROOT / "src")]!r}
from pathlib import Path
from tests.sandbox.keeper.parrot import *
async def main():
    async with KeeperClient.connect(keeper_launch(Path({str(there.folder.path.parent)!r}))) as keeper:
        {body}
asyncio.run(main())
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


# ── One keeper ────────────────────────────────────────────────────────────────────────────────────


async def test_ten_clients_that_come_at_once_start_one_keeper(folder: Path) -> None:
    keepers = [KeeperClient.lazy(keeper_launch(folder)) for _ in range(10)]
    try:
        await asyncio.gather(*(keeper.create(ANN, SessionSpec()) for keeper in keepers))
        assert {keeper._connection.keeper for keeper in keepers if keeper._connection} == {process_of(folder)}
        assert len(await keepers[0].list(ANN)) == 10
    finally:
        for keeper in keepers:
            await keeper.close()


async def test_processes_share_a_keeper_and_what_it_keeps(folder: Path) -> None:
    body = (
        "print((await keeper.create(ANN, SessionSpec())).id, keeper._connection.keeper, flush=True); sys.stdin.read()"
    )
    both = [client(keeper_launch(folder), body) for _ in range(2)]
    try:
        said = [await asyncio.to_thread(each.stdout.readline) for each in both if each.stdout]
        assert {line.split()[1] for line in said} == {str(process_of(folder))}
        async with KeeperClient.connect(keeper_launch(folder)) as keeper:
            assert {info.id for info in await keeper.list(ANN)} == {line.split()[0] for line in said}
            for each in both:
                each.kill()
            for each in both:
                await asyncio.to_thread(each.wait)
            assert len(await keeper.list(ANN)) == 2  # whoever made them may go
    finally:
        for each in both:
            each.kill()
            each.communicate()


async def test_a_keeper_takes_nothing_of_its_starter_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "s3cret")
    there = replace(keeper_launch(folder), environment={"LANG": "C"})
    shared, other = os.pipe()
    os.set_inheritable(shared, True)
    os.set_inheritable(other, True)
    try:
        async with KeeperClient.connect(there):
            process = process_of(folder)
            assert process is not None
            environment = Path(f"/proc/{process}/environ").read_bytes()
            assert b"s3cret" not in environment and b"LANG=C" in environment
            assert os.getsid(process) not in (os.getsid(0), process)  # a session without a terminal, and no way to one
            assert os.readlink(f"/proc/{process}/cwd") == "/"
            held = {os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()}
            assert os.readlink(f"/proc/self/fd/{shared}") not in held
            parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            assert parent != os.getpid()
    finally:
        os.close(shared)
        os.close(other)


async def test_a_keeper_with_nothing_to_do_leaves_and_the_next_client_starts_another(folder: Path) -> None:
    there = keeper_launch(folder, linger=0.2)
    async with KeeperClient.connect(there) as keeper:
        await keeper.end(ANN, (await keeper.create(ANN, SessionSpec())).id)
        first = process_of(folder)
    assert first is not None
    await asyncio.to_thread(tooling.wait_until_gone, first)
    assert sorted(os.listdir(folder / "keeper")) == ["lock", "log", "starting"]
    async with KeeperClient.connect(there):
        assert process_of(folder) not in (None, first)


async def test_clients_that_come_while_it_leaves_are_served_by_the_next(folder: Path) -> None:
    there = keeper_launch(folder, linger=0.01)
    for _ in range(3):
        async with KeeperClient.connect(there) as keeper:
            assert await keeper.list(ANN) == []
        await asyncio.sleep(0.015)


async def test_an_idle_keeper_with_other_settings_is_replaced(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)):
        first = process_of(folder)
    async with KeeperClient.connect(keeper_launch(folder, settings_digest="others")) as keeper:
        assert await keeper.list(ANN) == []
        assert process_of(folder) not in (None, first)
        box = (await keeper.create(ANN, SessionSpec())).id
    with pytest.raises(Unavailable, match="other sandbox settings"):
        await KeeperClient.lazy(keeper_launch(folder)).list(ANN)
    async with KeeperClient.connect(keeper_launch(folder, settings_digest="others")) as keeper:
        assert [info.id for info in await keeper.list(ANN)] == [box]


# ── Its death ─────────────────────────────────────────────────────────────────────────────────────


async def test_who_waits_when_the_keeper_is_killed_hears_that_the_outcome_is_unknown(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
        process = process_of(folder)
        assert process is not None
        step = asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 60"), quiet, quiet))
        changes = keeper.watch(ANN, box, "/workspace", True)
        await anext(changes)
        await asyncio.sleep(0.05)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(OutcomeUnknown) as unknown:
            await step
        assert unknown.value.reason_code == "keeper_died" and "run" in unknown.value.message
        with pytest.raises(Unavailable, match="died"):
            await drain(changes)
        # The next question goes to a keeper that never heard of the session.
        with pytest.raises(Refused, match="there is no session"):
            await keeper.info(ANN, box)
        assert process_of(folder) not in (None, process)


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_question_that_changes_nothing_is_put_to_the_next_keeper(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
        process = process_of(folder)
        assert process is not None
        for seconds in tooling.LONGER:
            waiting = asyncio.create_task(keeper.wait(ANN, box, 7, seconds))
            await asyncio.sleep(0.1)
            if not waiting.done():  # otherwise we were too slow
                break
        os.kill(process, signal.SIGKILL)
        assert (await waiting).process == 7
        assert process_of(folder) not in (None, process)


async def test_a_keeper_is_killed_again_and_again_and_its_clients_go_on(folder: Path) -> None:
    keepers = [KeeperClient.lazy(keeper_launch(folder)) for _ in range(3)]
    try:
        for _ in range(3):
            await asyncio.gather(*(keeper.list(ANN) for keeper in keepers))
            process = process_of(folder)
            assert process is not None
            os.kill(process, signal.SIGKILL)
        await asyncio.gather(*(keeper.list(ANN) for keeper in keepers))
    finally:
        for keeper in keepers:
            await keeper.close()


async def test_a_keeper_that_is_told_to_end_says_goodbye(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
        step = asyncio.create_task(keeper.run(ANN, box, CellRequest("sleep 1"), quiet, quiet))
        await asyncio.sleep(0.1)
        await keeper.info(ANN, box)  # which is answered after that has begun
        process = process_of(folder)
        assert process is not None
        os.kill(process, signal.SIGTERM)
        assert (await step).session == box
        await asyncio.to_thread(tooling.wait_until_gone, process)
    assert not (folder / "keeper" / "socket").exists()


async def test_a_keeper_that_stopped_does_not_hold_up_a_client_for_ever(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder), request_timeout=0.3) as keeper:
        process = process_of(folder)
        assert process is not None
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="request_timeout"):
            await keeper.list(ANN)
        os.kill(process, signal.SIGCONT)
        async with asyncio.timeout(tooling.PATIENCE):
            while True:
                with suppress(Unavailable):  # a slow machine is not as fast as that
                    assert await keeper.list(ANN) == []
                    break


# ── Where there is none to be had ─────────────────────────────────────────────────────────────────


async def test_a_keeper_that_cannot_be_started_is_unavailable(folder: Path) -> None:
    missing = replace(keeper_launch(folder), command=("/does/not/exist",))
    with pytest.raises(Unavailable, match="cannot be started: No such file"):
        await KeeperClient.lazy(missing).list(ANN)
    broken = replace(keeper_launch(folder), command=(sys.executable, "-c", "1 / 0"))
    with pytest.raises(Unavailable, match="ended while it started; its log is"):
        await KeeperClient.lazy(broken).list(ANN)
    assert "ZeroDivisionError" in (folder / "keeper" / "log").read_text()
    stuck = replace(keeper_launch(folder), command=(sys.executable, "-c", "import time; time.sleep(60)"), seconds=0.3)
    with pytest.raises(Unavailable, match="not ready, and did nothing more for it"):
        await KeeperClient.lazy(stuck).list(ANN)


async def test_what_a_keeper_says_about_a_start_that_failed_is_passed_on(folder: Path) -> None:
    said = '{"error": {"kind": "unavailable", "reason_code": "no_backend", "message": "no boxes here"}}'
    program = f"import os, sys; os.write(int(sys.argv[1]), b'{said}')"
    failing = replace(keeper_launch(folder), command=(sys.executable, "-c", program))
    with pytest.raises(Unavailable, match="no boxes here") as unavailable:
        await KeeperClient.lazy(failing).list(ANN)
    assert unavailable.value.reason_code == "no_backend"


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    (folder / "keeper").mkdir(mode=0o777)
    (folder / "keeper").chmod(0o777)
    with pytest.raises(StoreError, match="chmod 700"):
        KeeperFolder(folder / "keeper", ()).prepare()


async def test_for_want_of_a_folder_of_its_own_a_keeper_is_not_started_and_nothing_ran(folder: Path) -> None:
    (folder / "keeper").mkdir(exist_ok=True)
    (folder / "keeper").chmod(0o777)
    with pytest.raises(Unavailable, match=r"the keeper cannot be started: .*chmod 700") as unavailable:
        await KeeperClient.lazy(keeper_launch(folder)).list(ANN)
    assert unavailable.value.reason_code == "keeper_start"


async def test_a_folder_that_a_keeper_cannot_use_is_a_start_that_failed(folder: Path) -> None:
    said = '{"error": {"kind": "store", "message": "run: chmod 700 sessions"}}'
    program = f"import os, sys; os.write(int(sys.argv[1]), b'{said}')"
    failing = replace(keeper_launch(folder), command=(sys.executable, "-c", program))
    with pytest.raises(Unavailable, match="chmod 700 sessions") as unavailable:
        await KeeperClient.lazy(failing).list(ANN)
    assert unavailable.value.reason_code == "keeper_start"


async def test_a_keeper_is_reached_however_long_its_path_is(folder: Path) -> None:
    deep = folder / ("long" * 30) / ("longer" * 20)
    deep.mkdir(parents=True, mode=0o700)
    began = keeper_launch(deep)
    for _ in range(2):  # the first starts it
        async with KeeperClient.connect(began) as keeper:
            assert await keeper.list(ANN) == []
    assert len(began.folder.address() or "") > 200


@pytest.mark.parametrize("bad", ["open", "link", "file", "above"])
def test_a_socket_folder_that_cannot_be_ours_alone_is_not_used(folder: Path, bad: str) -> None:
    sockets = folder / "sockets" / "one"
    sockets.parent.mkdir(mode=0o700)
    if bad == "link":
        (folder / "elsewhere").mkdir(mode=0o700)
        sockets.symlink_to(folder / "elsewhere")
    elif bad == "file":
        sockets.touch()
    elif bad == "open":
        sockets.mkdir()
        sockets.chmod(0o777)
    elif bad == "above":
        sockets.parent.chmod(0o777)
    home = KeeperFolder(folder / "keeper", (sockets,))
    home.prepare()
    with pytest.raises(Unavailable, match=r"nowhere to listen: .*sockets"):
        home.listen()
    assert home.address() is None
    second = KeeperFolder(folder / "keeper", (sockets, folder / "more" / "one"))
    with second.listen():
        assert home.address() == str(folder / "more" / "one" / "socket")
        assert oct((folder / "more" / "one" / "socket").stat().st_mode)[-3:] == "600"


async def test_a_keeper_whose_socket_is_swept_away_can_be_reached_again(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        box = (await keeper.create(ANN, SessionSpec())).id
    process = process_of(folder)
    (folder / "keeper" / "socket").unlink()
    await tooling.until((folder / "keeper" / "socket").exists)
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        assert [info.id for info in await keeper.list(ANN)] == [box]
    assert process_of(folder) == process


async def test_a_keeper_whose_folder_is_taken_away_leaves(folder: Path) -> None:
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        await keeper.create(ANN, SessionSpec())
        process = process_of(folder)
    assert process is not None
    (folder / "keeper").rename(folder / "elsewhere")
    async with KeeperClient.connect(keeper_launch(folder)) as keeper:
        assert await keeper.list(ANN) == []
        assert process_of(folder) not in (None, process)
        await asyncio.to_thread(tooling.wait_until_gone, process)
        assert await keeper.list(ANN) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"socket": 3}'])
async def test_an_address_that_cannot_be_read_is_none(folder: Path, text: str) -> None:
    there = keeper_launch(folder)
    there.folder.prepare()
    (there.folder.path / "address").write_text(text)
    with anyio.fail_after(tooling.PATIENCE):
        async with KeeperClient.connect(there) as keeper:
            assert await keeper.list(ANN) == []
