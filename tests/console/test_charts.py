"""Charts: what they draw is what happened, in shapes that need no style, program or mouse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from ringfence.console.charts import Line, bar_chart, line_chart, nice
from tests.console import people
from tests.console.people import Browser, call, token, visitor
from tests.gateways import Served


def drawn(chart: dict[str, object]) -> ElementTree.Element:
    text = str(chart["svg"])
    assert "style" not in text
    return ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (0.03, 0.05), (1.0, 1.0), (7.0, 10.0), (21.0, 25.0), (1001.0, 2000.0)]
)
def test_a_scale_ends_at_a_round_number(value: float, top: float) -> None:
    assert nice(value) == pytest.approx(top)


def test_a_line_has_a_gap_where_nothing_is_known_and_says_its_numbers() -> None:
    values = [1.0, 2.0, None, 4.0, 4.0]
    svg = drawn(line_chart("Took", [0.0, 1.0, 2.0, 3.0, 4.0], [Line("mean", values)], lambda value: f"{value} ms"))
    lines = [each.get("points") for each in svg if each.tag == "polyline"]
    assert len(lines) == 2 and lines[1] is not None and lines[1].split()[-1] == "640.0,30.4"
    assert svg.get("aria-label") == "Took: mean 4.0 ms at the end, at most 4.0 ms"


def test_bars_add_up_and_tell_their_numbers() -> None:
    parts = [Line("other", [3.0, 0.0]), Line("refused", [1.0, 0.0])]
    svg = drawn(bar_chart("Calls", [0.0, 60.0], parts, lambda value: f"{value:.0f}", 60.0))
    columns = [each for each in svg if each.tag == "g"]
    bars = [each for each in columns[0] if (each.get("class") or "").startswith("bar")]
    tops = [float(each.get("y") or 0) for each in bars]
    assert [each.get("class") for each in bars] == ["bar other", "bar refused"] and tops[1] < tops[0]
    assert (columns[0].findtext("title") or "").endswith("01-01 00:01: 3 other, 1 refused")
    assert [each.get("class") for each in columns[1]][:1] == ["column"] and len(columns[1]) == 2


def test_names_of_others_are_text_in_a_chart() -> None:
    svg = str(line_chart("<script>", [0.0, 1.0], [Line("a", [1.0, 2.0])], lambda value: '"><script>')["svg"])
    assert "<script>" not in svg


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with people.serve(tmp_path_factory.mktemp("charts")) as served:
        yield served


def totals(browser: Browser, span: str = "hour") -> tuple[str, ...]:
    page = browser.get(f"/console/charts?span={span}").text
    found = re.search(r"([\d,]+) calls, ([\d,]+) refused, ([\d,]+) failed", page)
    assert found is not None
    return found.groups()


def test_calls_are_counted_for_their_tenant_alone(served: Served) -> None:
    omar = visitor(served, token(served, "person", "omar")["token"])
    eve = visitor(served, token(served, "person", "eve")["token"])
    assert totals(omar) == ("0", "0", "0") and "Nothing was called" in omar.get("/console/charts").text
    for tool, arguments in (("search_docs", {"query": "x"}), ("search_docs", {"query": "y"}), ("no_such_tool", {})):
        call(served, tool, arguments)
    for span in ("hour", "day", "week", "month", "eternity"):
        assert totals(omar, span) == ("3", "1", "0")
        assert totals(eve, span) == ("0", "0", "0")
    page = omar.get("/console/charts").text
    assert page.count("<svg") == 4 and "search_docs" in page
    assert "search_docs" not in eve.get("/console/charts").text
