"""Documents that list what the source lists: whatever is added to the one is missing in the other."""

from __future__ import annotations

import re

from ringfence.sandbox.process.zygote import template
from ringfence.sandbox.tools.toolkit import declarable_tools
from tests.tooling import ROOT


def test_the_page_of_boxes_names_every_file_of_the_hosts_etc() -> None:
    page = (ROOT / "docs/boxes.md").read_text()
    (row,) = [line for line in page.splitlines() if "copied from the host (`_ETC`)" in line]
    assert tuple(re.findall(r"`([^`]+)`", row.split("|")[1])) == template._ETC


def test_every_tool_that_an_agent_can_have_is_on_a_page() -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("sessions.md", "sandbox.md", "commands.md")]
    assert [tool for tool in declarable_tools() if not any(f"`{tool}`" in page for page in pages)] == []
