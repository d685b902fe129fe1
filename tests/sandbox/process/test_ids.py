"""Who boxes are on the host: ids that belong to nobody, and subordinate ones."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.sandbox.process import ids, mounting
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.ids import FIRST, LAST, SIZE, Block, take_block
from ringfence.sandbox.process.zygote import kernel

TAKE = """
import pathlib, sys
from ringfence.sandbox.process.ids import take_block
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
    monkeypatch.setattr(ids, "USERS", (files["passwd"], files["group"]))
    monkeypatch.setattr(ids, "RANGES", (files["subuid"], files["subgid"]))
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
    with pytest.raises(Unavailable, match="belongs to another user"):
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
    with pytest.raises(Unavailable, match="no folder is available"):
        take_block([tmp_path / "missing" / "run"])


@given(st.lists(st.tuples(word, number, number)))
def test_users_and_groups_are_read(users: list[tuple[str, int, int]]) -> None:
    text = "".join(f"{name}:x:{uid}:{gid}:{name}:/home:/bin/sh\n" for name, uid, gid in users)
    found = {span.start for span in ids.named_ids([text])}
    assert found == {number for _, uid, gid in users for number in (uid, gid)}


@given(st.lists(st.tuples(word, number, st.integers(0, 2**20))))
def test_ranges_are_read(owners: list[tuple[str, int, int]]) -> None:
    text = "".join(f"{name}:{start}:{count}\n" for name, start, count in owners)
    assert list(ids.ranges([text])) == [range(start, start + count) for _, start, count in owners]


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    for span in [*ids.named_ids([text]), *ids.ranges([text])]:
        assert 0 <= span.start <= span.stop


def test_what_makes_no_sense_names_no_id() -> None:
    odd = "# comment\n\n+::::::\nroot:x:-1:²:\nname:x\nroot:0\na:b:c\n1:2:3:4\n"
    assert list(ids.ranges([odd])) == []
    assert list(ids.named_ids(["+::::::\nroot:x:-1:²:\nname:x\n"])) == []


# ── Subordinate ids: how they are found, which are taken, and why there may be none ──


USERS, GROUPS = (range(100_000, 165_536),), (range(300_000, 365_536),)
TAKE_SUBIDS = """
import pathlib, sys
from ringfence.sandbox.process import ids
ranges = [range(1000, 1128)], [range(5000, 5128)]
print(ids._locked(*ranges, [pathlib.Path(sys.argv[1])]).base, flush=True)
sys.stdin.read()
"""
spans = st.lists(
    st.builds(lambda start, count: range(start, start + count), st.integers(1, 2**31), st.integers(0, 200_000)),
    max_size=4,
)


@pytest.fixture
def with_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has everything."""
    monkeypatch.setattr(ids, "found_subids", lambda: (USERS, GROUPS))
    monkeypatch.setattr(ids, "closed_to_others", lambda _: None)
    monkeypatch.setattr(ids, "_release", lambda: (6, 12))
    monkeypatch.setattr(ids, "_lock_folders", lambda: (tmp_path / "locks",))
    monkeypatch.setattr(ids, "_refusals", [])
    monkeypatch.setattr(kernel, "prctl", lambda _: 0)


# ── What was set apart ──


def test_a_user_is_named_or_numbered_in_the_files() -> None:
    text = "ann:100000:65536\n# bob:1:2\nbob:200000:65536\n1001:300000:10\nbob:400000:5\nbob:x:7\nbob:1:2:3\n\n"
    assert ids.written(text, ("bob", "1001")) == (
        *(range(200_000, 265_536), range(300_000, 300_010), range(400_000, 400_005)),
    )


def test_the_answer_of_the_program_is_read() -> None:
    text = "0: bob 100000 65536\n1: bob 400000 10\n"
    assert ids.answered(text) == (range(100_000, 165_536), range(400_000, 400_010))


@given(st.text(max_size=200))
def test_any_list_of_subids_can_be_read(text: str) -> None:
    for found in (*ids.written(text, ("a", "0")), *ids.answered(text)):
        assert found.start > 0 and found.stop <= 2**32


def test_ids_that_the_kernel_does_not_have_are_none() -> None:
    assert ids.written("a:0:10\na:4294967290:100\na:5:0\n", ("a",)) == (range(5, 5),)


# ── Which are taken ──


@given(spans)
def test_blocks_lie_in_what_was_set_apart_and_not_where_containers_are(given: list[range]) -> None:
    starts = ids.blocks(given)
    for start in starts:
        span = [each for each in given if each.start <= start and start + SIZE <= each.stop]
        assert span
        assert any(each.start + 65_533 not in range(start, start + SIZE) for each in span), "nobody of a container"
    if len(given) == 1:
        assert all(after - before >= SIZE for before, after in pairwise(sorted(starts)))
        halves = [start - given[0].start >= len(given[0]) // 2 for start in starts]
        assert halves == sorted(halves, reverse=True), "the upper half goes first"


@pytest.mark.usefixtures("with_ids")
def test_blocks_of_one_user_do_not_overlap(held: list[Block]) -> None:
    held += [ids.take_subids(Baseline(), by_v1=False) for _ in range(40)]
    for bases in (sorted(block.base for block in held), sorted(block.groups for block in held)):
        assert all(after - before >= SIZE for before, after in pairwise(bases))
    assert all(block.base in USERS[0] and block.groups in GROUPS[0] for block in held)
    assert all(block.base + block.size <= USERS[0].stop for block in held)


def test_another_process_takes_another_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE_SUBIDS, str(tmp_path / "locks")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        assert first.stdout is not None and second.stdout is not None
        bases = {int(first.stdout.readline()), int(second.stdout.readline())}
        assert bases == {1000, 1064}
        with pytest.raises(Unavailable, match="in use"):
            ids._locked([range(1000, 1128)], [range(5000, 5128)], [tmp_path / "locks"])
        first.kill()
        first.wait()
        ids._locked([range(1000, 1128)], [range(5000, 5128)], [tmp_path / "locks"]).release()


# ── Why there may be none ──


@pytest.mark.usefixtures("with_ids")
def test_who_sees_folders_of_the_user_has_the_users_id(tmp_path: Path) -> None:
    found = mounting.Placed(str(tmp_path), "/data", writable=True, folder=True, identity=(0, 0, 0, 0))
    for baseline in (Baseline(mounts=(found,)), Baseline(image=found)):
        with pytest.raises(Unavailable, match="this user's folders"):
            ids.take_subids(baseline, by_v1=False)


@pytest.mark.usefixtures("with_ids")
def test_other_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="control groups of v1"):
        ids.take_subids(Baseline(), by_v1=True)
    with pytest.raises(Unavailable, match="steps are left out"):
        ids.take_subids(Baseline(without=("identity",)), by_v1=False)
    ids.take_subids(Baseline(without=("landlock", "memfd")), by_v1=False).release()
    monkeypatch.setattr(kernel, "prctl", lambda _: 1)
    with pytest.raises(Unavailable, match="no_new_privs"):
        ids.take_subids(Baseline(), by_v1=False)
    monkeypatch.setattr(ids, "_release", lambda: (6, 1))
    with pytest.raises(Unavailable, match=r"Linux 6\.3"):
        ids.take_subids(Baseline(), by_v1=False)


@pytest.mark.usefixtures("with_ids")
def test_a_refusal_is_remembered() -> None:
    ids.refuse("it does not want to")
    with pytest.raises(Unavailable, match="it does not want to"):
        ids.take_subids(Baseline(), by_v1=False)


@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_packages_that_only_their_owner_can_read(mode: int, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "module.py").touch()
    tmp_path.chmod(0o755)
    where = str(tmp_path)
    baseline = Baseline(trees=(where,), packages=(where,))
    before = ids.closed_to_others(baseline)
    assert before is None or not before.startswith(where)
    (tmp_path / "package").chmod(mode)
    if before is None:
        assert ids.closed_to_others(baseline) == f"{where}/package"
        assert ids.closed_to_others(replace(baseline, packages=())) is None, "it is not looked at everything"


def test_without_helpers_or_ranges_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "helper", lambda what: f"/usr/bin/new{what[0]}idmap")
    monkeypatch.setattr(ids, "_ranges", lambda what, user: USERS if what == "user" else (range(1, 20),))
    with pytest.raises(Unavailable, match=r"/etc/subgid has no 64 ids in a row .* usermod --add-subuids"):
        ids.found_subids()
    monkeypatch.undo()
    monkeypatch.setattr(ids, "_PLACES", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    ids.helper.cache_clear()
    with pytest.raises(Unavailable, match="newuidmap is not installed"):
        ids.found_subids()
    ids.helper.cache_clear()


def test_the_words_of_a_helper_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[Block]) -> None:
    program = tmp_path / "helper"
    program.write_text('#!/bin/sh\necho "$@" >> $0.said\ntest $2 != 7 || { echo refused >&2; exit 1; }\n')
    program.chmod(0o755)
    monkeypatch.setattr(ids, "helper", lambda _: str(program))
    held.append(Block(100, 64, os.open("/dev/null", os.O_RDONLY), 900))
    ids.map_by_helpers(4711, held[0])
    said = (tmp_path / "helper.said").read_text().splitlines()
    assert said == [f"4711 0 100 64 1000 {os.getuid()} 1", f"4711 0 900 64 1000 {os.getgid()} 1"]
    program.write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    with pytest.raises(Unavailable, match="refused"):
        ids.map_by_helpers(4711, held[0])


def test_another_user_who_makes_our_folder_first_keeps_no_box_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    (temporary / f"ringfence-{os.geteuid()}").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_dir=str(home), pw_name="somebody"))
    assert ids._lock_folders()[1] == temporary / f"ringfence-{os.geteuid()}"
    if os.geteuid() != 0:
        monkeypatch.setattr(ids, "_is_taken", lambda folder, user: True)  # only root can give a folder away
    else:
        os.chown(temporary / f"ringfence-{os.geteuid()}", 1_900_000_017, -1)
    ours = ids._lock_folders()
    assert ours[1].is_relative_to(home)
    ids._locked([range(1000, 1128)], [range(5000, 5128)], ours[1:]).release()
