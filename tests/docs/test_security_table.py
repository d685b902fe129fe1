"""Each requirement of MCP has a test that exists, or a sentence that says why it has none."""

from __future__ import annotations

import re

from tests.tooling import ROOT

ROWS = re.findall(r"^\| (S\d+) \| (.+?) \| (.+) \|$", (ROOT / "docs" / "mcp-security.md").read_text(), re.MULTILINE)


def test_every_requirement_has_a_row() -> None:
    assert [number for number, _, _ in ROWS] == [f"S{n}" for n in range(1, 27)]


def test_every_test_that_is_named_exists() -> None:
    for number, _, shown in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", shown)
        assert named or "Does not apply" in shown, number
        assert len(named) == shown.count("`tests/"), number
        for path, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{number}: {test}"
