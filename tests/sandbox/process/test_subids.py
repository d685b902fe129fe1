"""Subordinate ids: how they are found, which are taken, and why there may be none."""

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

from ringfence.errors import Unavailable
from ringfence.sandbox.process import kernel, mounting, subids
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.uids import SIZE, Block

USERS, GROUPS = (range(100_000, 165_536),), (range(300_000, 365_536),)
TAKE = """
import pathlib, sys
from ringfence.sandbox.process import subids
ranges = [range(1000, 1128)], [range(5000, 5128)]
print(subids._locked(*ranges, [pathlib.Path(sys.argv[1])]).base, flush=True)
sys.stdin.read()
"""
spans = st.lists(
    st.builds(lambda start, count: range(start, start + count), st.integers(1, 2**31), st.integers(0, 200_000)),
    max_size=4,
)


@pytest.fixture
def held() -> Iterator[list[Block]]:
    blocks: list[Block] = []
    yield blocks
    for block in blocks:
        block.release()


@pytest.fixture
def with_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who has everything."""
    monkeypatch.setattr(subids, "found", lambda: (USERS, GROUPS))
    monkeypatch.setattr(subids, "closed_to_others", lambda _: None)
    monkeypatch.setattr(subids, "_release", lambda: (6, 12))
    monkeypatch.setattr(subids, "_folders", lambda: (tmp_path / "locks",))
    monkeypatch.setattr(subids, "_refusals", [])
    monkeypatch.setattr(kernel, "prctl", lambda _: 0)


# ── What was set apart ──


def test_a_user_is_named_or_numbered_in_the_files() -> None:
    text = "ann:100000:65536\n# bob:1:2\nbob:200000:65536\n1001:300000:10\nbob:400000:5\nbob:x:7\nbob:1:2:3\n\n"
    assert subids.written(text, ("bob", "1001")) == (
        *(range(200_000, 265_536), range(300_000, 300_010), range(400_000, 400_005)),
    )


def test_the_answer_of_the_program_is_read() -> None:
    text = "0: bob 100000 65536\n1: bob 400000 10\n"
    assert subids.answered(text) == (range(100_000, 165_536), range(400_000, 400_010))


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    for found in (*subids.written(text, ("a", "0")), *subids.answered(text)):
        assert found.start > 0 and found.stop <= 2**32


def test_ids_that_the_kernel_does_not_have_are_none() -> None:
    assert subids.written("a:0:10\na:4294967290:100\na:5:0\n", ("a",)) == (range(5, 5),)


# ── Which are taken ──


@given(spans)
def test_blocks_lie_in_what_was_set_apart_and_not_where_containers_are(given: list[range]) -> None:
    starts = subids.blocks(given)
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
    held += [subids.take(Baseline(), by_v1=False) for _ in range(40)]
    for bases in (sorted(block.base for block in held), sorted(block.groups for block in held)):
        assert all(after - before >= SIZE for before, after in pairwise(bases))
    assert all(block.base in USERS[0] and block.groups in GROUPS[0] for block in held)
    assert all(block.base + block.size <= USERS[0].stop for block in held)


def test_another_process_takes_another_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TAKE, str(tmp_path / "locks")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second,
    ):
        assert first.stdout is not None and second.stdout is not None
        bases = {int(first.stdout.readline()), int(second.stdout.readline())}
        assert bases == {1000, 1064}
        with pytest.raises(Unavailable, match="in use"):
            subids._locked([range(1000, 1128)], [range(5000, 5128)], [tmp_path / "locks"])
        first.kill()
        first.wait()
        subids._locked([range(1000, 1128)], [range(5000, 5128)], [tmp_path / "locks"]).release()


# ── Why there may be none ──


@pytest.mark.usefixtures("with_ids")
def test_who_sees_folders_of_the_user_has_the_users_id(tmp_path: Path) -> None:
    found = mounting.Placed(str(tmp_path), "/data", writable=True, folder=True, identity=(0, 0, 0, 0))
    for baseline in (Baseline(mounts=(found,)), Baseline(image=found)):
        with pytest.raises(Unavailable, match="folders of this user"):
            subids.take(baseline, by_v1=False)


@pytest.mark.usefixtures("with_ids")
def test_other_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="control groups of v1"):
        subids.take(Baseline(), by_v1=True)
    with pytest.raises(Unavailable, match="steps are left out"):
        subids.take(Baseline(without=("identity",)), by_v1=False)
    subids.take(Baseline(without=("landlock", "memfd")), by_v1=False).release()
    monkeypatch.setattr(kernel, "prctl", lambda _: 1)
    with pytest.raises(Unavailable, match="no_new_privs"):
        subids.take(Baseline(), by_v1=False)
    monkeypatch.setattr(subids, "_release", lambda: (6, 1))
    with pytest.raises(Unavailable, match=r"Linux 6\.3"):
        subids.take(Baseline(), by_v1=False)


@pytest.mark.usefixtures("with_ids")
def test_a_refusal_is_remembered() -> None:
    subids.refuse("it does not want to")
    with pytest.raises(Unavailable, match="it does not want to"):
        subids.take(Baseline(), by_v1=False)


@pytest.mark.parametrize("mode", [0o700, 0o711])
def test_packages_that_only_their_owner_can_read(mode: int, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "module.py").touch()
    tmp_path.chmod(0o755)
    where = str(tmp_path)
    baseline = Baseline(trees=(where,), packages=(where,))
    before = subids.closed_to_others(baseline)
    assert before is None or not before.startswith(where)
    (tmp_path / "package").chmod(mode)
    if before is None:
        assert subids.closed_to_others(baseline) == f"{where}/package"
        assert subids.closed_to_others(replace(baseline, packages=())) is None, "it is not looked at everything"


def test_without_helpers_or_ranges_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subids, "helper", lambda what: f"/usr/bin/new{what[0]}idmap")
    monkeypatch.setattr(subids, "_ranges", lambda what, user: USERS if what == "user" else (range(1, 20),))
    with pytest.raises(Unavailable, match=r"/etc/subgid has no 64 ids in a row .* usermod --add-subuids"):
        subids.found()
    monkeypatch.undo()
    monkeypatch.setattr(subids, "_PLACES", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    subids.helper.cache_clear()
    with pytest.raises(Unavailable, match="newuidmap is not installed"):
        subids.found()
    subids.helper.cache_clear()


def test_the_words_of_a_helper_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[Block]) -> None:
    program = tmp_path / "helper"
    program.write_text('#!/bin/sh\necho "$@" >> $0.said\ntest $2 != 7 || { echo refused >&2; exit 1; }\n')
    program.chmod(0o755)
    monkeypatch.setattr(subids, "helper", lambda _: str(program))
    held.append(Block(100, 64, os.open("/dev/null", os.O_RDONLY), 900))
    subids.map_into(4711, held[0])
    said = (tmp_path / "helper.said").read_text().splitlines()
    assert said == [f"4711 0 100 64 1000 {os.getuid()} 1", f"4711 0 900 64 1000 {os.getgid()} 1"]
    program.write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    with pytest.raises(Unavailable, match="refused"):
        subids.map_into(4711, held[0])


def test_another_user_who_makes_our_folder_first_keeps_no_box_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    (temporary / f"ringfence-{os.geteuid()}").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_dir=str(home), pw_name="somebody"))
    assert subids._folders()[1] == temporary / f"ringfence-{os.geteuid()}"
    if os.geteuid() != 0:
        monkeypatch.setattr(subids, "_is_taken", lambda folder, user: True)  # only root can give a folder away
    else:
        os.chown(temporary / f"ringfence-{os.geteuid()}", 1_900_000_017, -1)
    ours = subids._folders()
    assert ours[1].is_relative_to(home)
    subids._locked([range(1000, 1128)], [range(5000, 5128)], ours[1:]).release()
