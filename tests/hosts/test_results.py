"""Results of guests: kept for the code that they are of, and told in a table that leaves the rest of its page alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hosts import results
from hosts.guests import ALL_CLASSES
from hosts.results import Result, Results

CGROUP = {"memory": "cgroup", "pids": "cgroup", "cpu": "cgroup"}
GOOD = {"name": "a program runs", "ok": True, "note": ""}
BAD = {"name": "its exit code is ours", "ok": False, "note": "exit 125"}
RUN = Result("one", "root", "run", "abc", "6.1.0", "2026-11-16T10:00:00+00:00", 9.0, [GOOD], {"limits": CGROUP})
CASES = {"kept": 40, "broken": 1, "not_counted": 2, "broken_cases": {"G05": "holds"}}
DOCTOR = Result("one", "root", "doctor", "abc", "6.1.0", "2026-11-17T10:00:00+00:00", 9.0, [GOOD], CASES)


def test_a_result_is_found_again_for_the_same_code_alone(tmp_path: Path) -> None:
    kept = Results(tmp_path)
    assert kept.find("one", "root-run", "abc") is None
    kept.keep("root-run", RUN)
    assert kept.find("one", "root-run", "abc") == RUN
    assert kept.find("one", "root-run", "other") is None
    assert kept.find("two", "root-run", "abc") is None


def test_a_result_that_was_cut_off_counts_as_none(tmp_path: Path) -> None:
    kept = Results(tmp_path)
    kept.keep("root-run", RUN)
    file = tmp_path / "one" / "root-run.json"
    file.write_text(file.read_text()[:-20])
    assert kept.find("one", "root-run", "abc") is None


def test_the_last_line_of_a_part_is_its_result() -> None:
    told = results.read('ok: something\n{"part": "run", "checks": [], "data": {"a": 1}}\n')
    assert told["data"] == {"a": 1}


def test_a_part_that_died_has_failed() -> None:
    for output in ("", "Traceback", '{"no": "checks"}', "3"):
        told = results.read(output)
        assert [check["ok"] for check in told["checks"]] == [False]


def test_who_holds_the_limits() -> None:
    assert results.limits_by(CGROUP) == "the kernel"
    mixed = {"memory": "watchdog", "pids": "cgroup", "cpu": "cgroup"}
    assert results.limits_by(mixed) == "memory: watchdog, pids and cpu: the kernel"


def test_a_row_says_what_was_tried_and_what_failed() -> None:
    rows = results.table([RUN, replace(DOCTOR, checks=[GOOD, BAD], words=["--class", "F,K"])], "", ["one"])
    assert rows.splitlines()[2:] == [
        "| 2026-11-17 | one | 6.1.0 | root | the kernel | 40 kept, 1 broken, 2 not counted (FK) |"
        " 2 parts, 3 checks, 1 failed | broken: G05; doctor: its exit code is ours |"
    ]


def test_classes_that_were_tried_one_by_one_are_added_up() -> None:
    each = [replace(DOCTOR, data={**CASES, "kept": 2}, words=["--class", name]) for name in ALL_CLASSES]
    whole, some = (results.table(chosen, "", ["one"]) for chosen in (each, each[:3]))
    assert "| 20 kept, 10 broken, 20 not counted |" in whole
    assert "| 6 kept, 3 broken, 6 not counted (FPD) |" in some


def test_the_table_stands_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "hosts.md"
    page.write_text(f"# Hosts\n\nProse.\n\n{results.START}\nold\n{results.END}\n\nMore.\n")
    results.write(page, [RUN], ["one"])
    once = page.read_text()
    assert once.startswith("# Hosts\n\nProse.\n\n") and once.endswith("\n\nMore.\n")
    assert "| one | 6.1.0 | root |" in once and "old" not in once
    results.write(page, [RUN], ["one"])
    assert page.read_text() == once


def test_rows_of_guests_that_were_not_tried_this_time_stay(tmp_path: Path) -> None:
    page = tmp_path / "hosts.md"
    results.write(page, [replace(RUN, guest="two", kernel="a|b"), RUN], ["one", "two"])
    results.write(page, [replace(RUN, kernel="6.2.0")], ["one", "two"])
    rows = page.read_text().splitlines()
    assert [row for row in rows if "| two | a\\|b |" in row]
    assert [row for row in rows if "| one | 6.2.0 |" in row]
    assert not [row for row in rows if "| one | 6.1.0 |" in row]
    results.write(page, [], ["one"])
    assert "two" not in page.read_text()


def test_a_row_is_of_one_code_alone_and_says_how_much_is_left() -> None:
    old = Result("one", "root", "run", "m", "6.1.0", "2026-11-16T01:00:00+00:00", 1.0, code="a", of=3)
    new = Result("one", "root", "host", "m", "6.1.0", "2026-11-17T01:00:00+00:00", 1.0, code="b", of=3)
    row = results.table([old, new], "", ["one"]).splitlines()[2]
    assert "| 1 of 3 parts, 0 checks |" in row
