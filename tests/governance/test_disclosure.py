"""What of the facts goes on record, and which of them others chose: said of each, and closed where it is not said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ringfence.governance.disclosure import FACTS, chosen_by_others, for_record
from tests.tooling import ROOT

EVIL = "/workspace/output/evil\u202ename"


def test_a_fact_that_is_not_listed_does_not_go_on_record() -> None:
    assert for_record({"ended": "exited", "largest_file": EVIL}, b"salt") == {"ended": "exited"}
    late = {"cpu_ms": 1.0, "largest_file": EVIL}
    assert for_record({"late": late}, b"salt") == {"late": {"cpu_ms": 1.0}}
    assert EVIL not in str(for_record({"output": {"stdout_bytes": 3, "largest_file": EVIL}}, b"salt"))


@pytest.mark.parametrize(
    "facts",
    [
        {"largest_file": EVIL},
        {"session": {"id": "s", "step": 1, "state": "idle", "context": "default", "largest_file": EVIL}},
        {"network": {"bytes_in": 0, "bytes_out": 0, "largest_file": EVIL}},
        {"output": {"stdout_bytes": 3, "sha256": "ab", "truncated": True, "largest_file": EVIL}},
        {"usage": {"cpu_ms": 1.0, "largest_file": EVIL}},
        {"late": {"largest_file": EVIL}},
    ],
)
def test_what_is_not_listed_counts_as_chosen_by_a_program(facts: dict[str, Any]) -> None:
    ((name, value),) = facts.items()
    assert chosen_by_others(name, value)


@pytest.mark.parametrize(
    "facts",
    [
        {"session": {"id": "s", "step": 1, "state": "idle", "context": "default"}},
        {"network": {"allowed": [], "denied": [], "bytes_in": 1, "bytes_out": 1}},
        {"output": {"stdout_bytes": 3, "stderr_bytes": 0, "sha256": "ab", "truncated": True}},
        {"files": []},
    ],
)
def test_what_only_we_wrote_costs_no_search(facts: dict[str, Any]) -> None:
    ((name, value),) = facts.items()
    assert not chosen_by_others(name, value)


def test_files_that_are_left_out_on_record_are_counted_wherever_they_stand() -> None:
    files = [{"path": EVIL, "bytes": 1, "sha256": "ab"}] * 101
    told = for_record({"files": files, "files_left_out": 5, "late": {"files": files}}, b"salt")
    assert (told["files_left_out"], told["late"]["files_left_out"]) == (6, 1)
    assert EVIL not in str(told)


def test_the_page_has_a_row_for_every_fact_and_no_other() -> None:
    page = (ROOT / "docs/facts.md").read_text()
    tables = page[page.index("## Of every call") : page.index("## Effect")]
    rows = re.findall(r"(?m)^\| (`[^|]+) \|", tables)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(FACTS)
