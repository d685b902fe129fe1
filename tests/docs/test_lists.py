"""Documents that list what the source lists: whatever is added to the one is missing in the other."""

from __future__ import annotations

import re

from ringfence.doctor.cases import filesystem, proc
from ringfence.sandbox.process.zygote import template
from ringfence.sandbox.tools.toolkit import declarable_tools
from tests.tooling import ROOT


def test_the_page_of_boxes_names_every_file_of_the_hosts_etc() -> None:
    page = (ROOT / "docs/boxes.md").read_text()
    (row,) = [line for line in page.splitlines() if "copied from the host (`_ETC`)" in line]
    assert tuple(re.findall(r"`([^`]+)`", row.split("|")[1])) == template._ETC


def test_the_page_of_boxes_names_every_file_of_ours_in_etc() -> None:
    page = (ROOT / "docs/boxes.md").read_text()
    (row,) = [line for line in page.splitlines() if "ours (`WRITTEN`)" in line]
    named = {*re.findall(r"`([^`]+)`", row.split("|")[1]), template.NODE_FILE}
    assert named == set(template.WRITTEN)


def test_no_hostile_case_looks_for_a_file_of_ours_in_etc() -> None:
    absent = [case for case in (*filesystem.CASES, *proc.CASES) if case.id in ("F09", "P46")]
    assert len(absent) == 2
    given = {f"/etc/{name}" for name in (*template.WRITTEN, *template._FOR_PIP, *template._ETC)}
    assert [path for case in absent for path in re.findall(r'"(/etc/[^"]+)"', str(case.program)) if path in given] == []


def test_every_tool_that_an_agent_can_have_is_on_a_page() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("sessions.md", "sandbox.md", "commands.md")]
    assert [tool for tool in declarable_tools() if not any(f"`{tool}`" in page for page in pages)] == []
