"""User ids that nobody else has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.errors import Unavailable
from ringfence.sandbox.process import uids
from ringfence.sandbox.process.uids import FIRST, LAST, SIZE, Block, take_block

TAKE = """
import pathlib, sys
from ringfence.sandbox.process.uids import take_block
print(take_block([pathlib.Path(sys.argv[1])]).base, flush=True)
sys.stdin.read()
"""
word = st.text(st.characters(exclude_characters=":\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", codec="utf-8"), max_size=8)
number = st.integers(0, 2**32 - 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def held() -> Iterator[list[Block]]:
    blocks: list[Block] = []
    yield blocks
    for block in blocks:
        block.release()


def test_a_block_lies_where_nobody_else_takes_ids(folder: Path, held: list[Block]) -> None:
    held.append(take_block([folder]))
    assert held[0].base >= FIRST
    assert held[0].base + held[0].size - 1 <= LAST < 2**31
    assert held[0].size == SIZE == 64
    assert folder.stat().st_mode & 0o777 == 0o700


def test_blocks_of_one_process_do_not_overlap(folder: Path, held: list[Block]) -> None:
    held += [take_block([folder]) for _ in range(20)]
    bases = sorted(block.base for block in held)
    assert all(after - before >= SIZE for before, after in pairwise(bases))


def test_a_released_block_can_be_taken_again(folder: Path, held: list[Block]) -> None:
    first = take_block([folder])
    held.append(take_block([folder]))
    first.release()
    first.release()
    held.append(take_block([folder]))
    assert held[-1].base == first.base


def test_two_processes_never_get_the_same_block_and_a_killed_one_frees_its_own(folder: Path, held: list[Block]) -> None:
    folder.mkdir(0o700)
    command = [sys.executable, "-c", TAKE, str(folder)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    try:
        bases = [int(holder.stdout.readline()) for holder in holders if holder.stdout]
        held.append(take_block([folder]))
        assert len({*bases, held[0].base}) == 5
        holders[0].kill()
        holders[0].wait()
        held.append(take_block([folder]))
        assert held[1].base == bases[0]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_ids_that_the_host_names_are_left_alone(
    folder: Path, held: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = take_block([folder])
    usual.release()
    files = {name: tmp_path / name for name in ("passwd", "group", "subuid", "subgid")}
    files["passwd"].write_text(f"somebody:x:{usual.base + 63}:100::/:/bin/sh\n")
    files["group"].write_text(f"some:x:{usual.base + 64}:\n")
    files["subuid"].write_text(f"somebody:{usual.base + 130}:100\n")
    monkeypatch.setattr(uids, "USERS", (files["passwd"], files["group"]))
    monkeypatch.setattr(uids, "RANGES", (files["subuid"], files["subgid"]))
    held.append(take_block([folder]))
    assert held[0].base == usual.base + 4 * SIZE


def test_a_folder_that_others_could_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(Unavailable, match="can be written by others"):
        take_block([folder])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(Unavailable, match="belongs to somebody else"):
        take_block([folder])


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(Unavailable, match="not a folder"):
        take_block([folder])
    folder.unlink()
    folder.mkdir(0o700)
    (folder / "uids").symlink_to(elsewhere / "planted")
    with pytest.raises(Unavailable):
        take_block([folder])
    assert list(elsewhere.iterdir()) == []


def test_the_next_folder_serves_where_one_cannot_be_made(folder: Path, held: list[Block], tmp_path: Path) -> None:
    held.append(take_block([tmp_path / "missing" / "run", folder]))
    assert (folder / "uids").exists()
    with pytest.raises(Unavailable, match="no folder for the locks"):
        take_block([tmp_path / "missing" / "run"])


@given(st.lists(st.tuples(word, number, number)))
def test_users_and_groups_are_read(users: list[tuple[str, int, int]]) -> None:
    text = "".join(f"{name}:x:{uid}:{gid}:{name}:/home:/bin/sh\n" for name, uid, gid in users)
    found = {span.start for span in uids.named_ids([text])}
    assert found == {number for _, uid, gid in users for number in (uid, gid)}


@given(st.lists(st.tuples(word, number, st.integers(0, 2**20))))
def test_ranges_are_read(owners: list[tuple[str, int, int]]) -> None:
    text = "".join(f"{name}:{start}:{count}\n" for name, start, count in owners)
    assert list(uids.ranges([text])) == [range(start, start + count) for _, start, count in owners]


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    for span in [*uids.named_ids([text]), *uids.ranges([text])]:
        assert 0 <= span.start <= span.stop


def test_what_makes_no_sense_names_no_id() -> None:
    odd = "# comment\n\n+::::::\nroot:x:-1:²:\nname:x\nroot:0\na:b:c\n1:2:3:4\n"
    assert list(uids.ranges([odd])) == []
    assert list(uids.named_ids(["+::::::\nroot:x:-1:²:\nname:x\n"])) == []
