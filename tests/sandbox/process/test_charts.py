"""Charts of matplotlib as data, in the form that E2B gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringfence.sandbox.process.guest.charts import MIME
from tests.sandbox.process.celling import Interpreter


def drawn(plotting: Interpreter, code: str) -> Any:
    outcome = plotting(f"import matplotlib.pyplot as plt\n{code};")
    assert outcome.ok, outcome.error
    (result,) = outcome.results
    assert "image/png" in result.data
    return json.loads(result.data[MIME])


def test_lines(plotting: Interpreter) -> None:
    code = "plt.plot([1, 2, 3], [4, 5, float('nan')], label='speed')\nplt.plot([1, 2], [0, 1])\nplt.axhline(2)\n"
    chart = drawn(plotting, f"{code}plt.title('A title')\nplt.xlabel('time (s)')\nplt.ylabel('way [m]')")
    assert (chart["type"], chart["title"]) == ("line", "A title")
    assert [chart[name] for name in ("x_label", "x_unit", "y_label", "y_unit")] == ["time (s)", "s", "way [m]", "m"]
    assert [chart["x_scale"], chart["y_scale"]] == ["linear", "linear"]
    assert chart["elements"] == [
        {"label": "speed", "points": [[1.0, 4.0], [2.0, 5.0], [3.0, None]]},
        {"label": "Line 1", "points": [[1.0, 0.0], [2.0, 1.0]]},
    ]
    assert len(chart["x_ticks"]) == len(chart["x_tick_labels"])


def test_dates_categories_and_other_scales(plotting: Interpreter) -> None:
    days = "import datetime\nplt.plot([datetime.date(2026, 1, n) for n in (1, 2)], [1, 10])\nplt.yscale('log')"
    chart = drawn(plotting, days)
    assert (chart["x_scale"], chart["y_scale"]) == ("datetime", "log")
    assert chart["elements"][0]["points"] == [["2026-01-01", 1.0], ["2026-01-02", 10.0]]
    assert chart["x_ticks"][0].startswith("202")
    assert drawn(plotting, "plt.plot(['a', 'b'], [1, 2])")["x_scale"] == "categorical"


def test_points(plotting: Interpreter) -> None:
    chart = drawn(plotting, "plt.scatter([1, 2], [3, 4], label='seen')")
    assert (chart["type"], chart["elements"]) == ("scatter", [{"label": "seen", "points": [[1.0, 3.0], [2.0, 4.0]]}])


def test_bars_standing_lying_and_in_groups(plotting: Interpreter) -> None:
    chart = drawn(plotting, "plt.bar(['a', 'b'], [1, 2], label='x')")
    assert (chart["type"], chart["elements"]) == (
        "bar",
        [{"label": "a", "group": "x", "value": 1.0}, {"label": "b", "group": "x", "value": 2.0}],
    )
    chart = drawn(plotting, "plt.barh(['a', 'b'], [3, 3])")
    assert [(bar["label"], bar["value"]) for bar in chart["elements"]] == [("a", 3.0), ("b", 3.0)]
    chart = drawn(plotting, "plt.hist([1, 1, 2], bins=2)")
    assert [bar["value"] for bar in chart["elements"]] == [2.0, 1.0]


def test_pies(plotting: Interpreter) -> None:
    chart = drawn(plotting, "plt.pie([1, 3], labels=['a', 'b'])")
    assert chart["type"] == "pie" and "x_label" not in chart
    assert [(each["label"], each["angle"], each["radius"]) for each in chart["elements"]] == [
        ("a", 90.0, 1.0),
        ("b", 270.0, 1.0),
    ]


@pytest.mark.parametrize("how", ["", "patch_artist=True", "orientation='horizontal'"])
def test_boxes_with_whiskers(plotting: Interpreter, how: str) -> None:
    chart = drawn(plotting, f"plt.boxplot([[1, 2, 3, 4, 5, 100], [1, 2, 3, 4, 5]], tick_labels=['a', 'b'], {how})")
    assert chart["type"] == "box_and_whisker"
    first, second = chart["elements"]
    assert (first["label"], first["outliers"], first["max"]) == ("a", [100.0], 5.0)
    assert second == {
        **{"label": "b", "min": 1.0, "first_quartile": 2.0, "median": 3.0, "third_quartile": 4.0, "max": 5.0},
        "outliers": [],
    }


def test_several_axes_are_several_charts(plotting: Interpreter) -> None:
    code = "figure, (a, b) = plt.subplots(1, 2)\na.plot([1])\nb.bar(['x'], [1])\nfigure.suptitle('Both')"
    chart = drawn(plotting, code)
    assert (chart["type"], chart["title"]) == ("superchart", "Both")
    assert [each["type"] for each in chart["elements"]] == ["line", "bar"]


def test_what_is_none_of_these_is_unknown(plotting: Interpreter) -> None:
    chart = drawn(plotting, "plt.imshow([[1, 2], [3, 4]])\nplt.title('Heat')")
    assert (chart["type"], chart["title"], chart["elements"]) == ("unknown", "Heat", [])


def test_long_series_are_cut_and_say_so(plotting: Interpreter) -> None:
    chart = drawn(plotting, "plt.plot(range(20_000))\nplt.plot([1, 2])")
    assert [len(each["points"]) for each in chart["elements"]] == [10_000, 0]
    assert chart["truncated"] is True


def test_a_figure_without_axes_has_only_its_picture(plotting: Interpreter) -> None:
    (result,) = plotting("import matplotlib.pyplot as plt\nplt.figure();").results
    assert list(result.data) == ["text/plain", "image/png"]
