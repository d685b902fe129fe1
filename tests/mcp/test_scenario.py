"""What an agent does with sessions, with a client that is not ours: three files with dates written three ways become
one table, its averages, a chart and a report, in five steps; and the log explains each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from tests import boxing, gateways, tooling
from tests.mcp.gateway import ERAS

pytestmark = pytest.mark.anyio

FILES = {
    "north.csv": "date,value\n2026-01-03,10\n2026-02-14,20\n2026-03-01,30\n",
    "south.csv": "date;value\n03/01/2026;12\n15/02/2026;24\n31/03/2026;36\n",
    "west.csv": 'when,amount\n"Jan 9, 2026",14\n"Feb 28, 2026",28\n"Mar 12, 2026",42\n',
}
AVERAGES = {"2026-01": 12.0, "2026-02": 24.0, "2026-03": 36.0}

NORMALISE = """
import csv
from datetime import datetime
FORMATS = {"north": ("%Y-%m-%d", ","), "south": ("%d/%m/%Y", ";"), "west": ("%b %d, %Y", ",")}
tables = {}
for name, (form, delimiter) in FORMATS.items():
    with open(f"data/{name}.csv") as file:
        rows = list(csv.reader(file, delimiter=delimiter))[1:]
    tables[name] = [(datetime.strptime(day, form).date().isoformat(), float(value)) for day, value in rows]
{name: rows[0] for name, rows in tables.items()}
"""
MERGE = """
merged = sorted((day, name, value) for name, rows in tables.items() for day, value in rows)
import os
os.mkdir("output")
with open("output/merged.csv", "w", newline="") as file:
    csv.writer(file).writerows([("date", "region", "value"), *merged])
len(merged)
"""
AVERAGE = """
from collections import defaultdict
from statistics import mean
months = defaultdict(list)
for day, _, value in merged:
    months[day[:7]].append(value)
averages = {month: mean(values) for month, values in sorted(months.items())}
averages
"""
DRAW = """
bars = "".join(
    f'<rect x="{20 + 60 * n}" y="{120 - 3 * value}" width="40" height="{3 * value}"/>'
    f'<text x="{20 + 60 * n}" y="135" font-size="10">{month}</text>'
    for n, (month, value) in enumerate(averages.items())
)
class Chart:
    text = f'<svg xmlns="http://www.w3.org/2000/svg" width="220" height="140">{bars}</svg>'
    def _repr_svg_(self):
        return self.text
with open("output/chart.svg", "w") as file:
    file.write(Chart.text)
Chart()
"""
PLOT = """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(3, 2))
axes.bar(list(averages), list(averages.values()))
figure.savefig("output/chart.png")
figure
"""
REPORT = """
lines = ["# Averages by month", "", "| month | average |", "|---|---|"]
lines += [f"| {month} | {value:.1f} |" for month, value in averages.items()]
with open("output/report.md", "w") as file:
    file.write("\\n".join(lines) + "\\n")
print("written")
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gateways.Served]:
    boxing.need_boxes()
    text = "gateway: {state: ./state, approval_wait_seconds: 0}\nsandbox: {max_memory_mb: 512, max_processes: 128}\n"
    with gateways.serve(gateways.write(tmp_path_factory.mktemp("scenario"), text)) as served:
        yield served


class Agent:
    """Knows tools, and one session; whatever does not go well ends the test."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.session: dict[str, str] = {}
        self.steps: list[str] = []

    async def use(self, tool: str, **arguments: Any) -> Any:
        result = await self.client.call_tool(tool, {**self.session, **arguments})
        assert not result.is_error, result.content
        return result

    async def step(self, code: str) -> Any:
        result = await self.use("execute_python", code=code)
        self.steps.append(result.meta["ringfence/outcome"]["call_id"])
        return result

    async def begin(self, **wanted: Any) -> None:
        opened = await self.use("open_session", **wanted)
        self.session = {"session": opened.structured_content["session"]}
        for name, text in FILES.items():
            await self.use("write_file", path=f"data/{name}", text=text)

    async def resources(self) -> dict[str, Any]:
        """What the session left, by name."""
        listed = (await self.client.list_resources()).resources
        mine = [each for each in listed if f"/{self.session['session']}/" in str(each.uri)]
        read = [(await self.client.read_resource(str(each.uri))).contents[0] for each in mine]
        return {each.name: contents for each, contents in zip(mine, read, strict=True)}


def value(result: Any) -> Any:
    """The last expression's value, as it is claimed."""
    (shown,) = result.structured_content["claimed"]["results"]
    return shown["data"]["text/plain"]


async def analysed(agent: Agent, draw: str) -> list[Any]:
    first = await agent.step(NORMALISE)
    assert (
        value(first) == "{'north': ('2026-01-03', 10.0), 'south': ('2026-01-03', 12.0), 'west': ('2026-01-09', 14.0)}"
    )
    merged = await agent.step(MERGE)
    assert value(merged) == "9"
    averaged = await agent.step(AVERAGE)
    assert value(averaged) == repr(AVERAGES)
    return [first, merged, averaged, await agent.step(draw), await agent.step(REPORT)]


def explained(served: gateways.Served, agent: Agent) -> None:
    name = agent.session["session"]
    for number, call in enumerate(agent.steps, 1):
        told = gateways.run("audit", "explain", call, "--config", served.config).stdout
        assert told.startswith("execute_python, call_") and "  called     by agent local" in told
        assert f"  session    {name}, step {number}, context default" in told
        assert "  result     success; nothing outside was changed; " in told
    uploads = [
        body
        for body in gateways.finished(served.state)
        if body["call"]["tool"] == "write_file" and body["facts"]["session"]["id"] == name
    ]
    assert [body["facts"]["inputs"][0]["bytes"] for body in uploads] == [len(text) for text in FILES.values()]
    assert gateways.verified(served.state).ok


@pytest.mark.parametrize("mode", ERAS)
async def test_an_analysis_in_five_steps(served: gateways.Served, mode: Any) -> None:
    async with Client(served.url, mode=mode) as client:
        agent = Agent(client)
        await agent.begin(metadata={"task": "averages"})
        steps = await analysed(agent, DRAW)
        assert [each.structured_content["step"] for each in steps] == [1, 2, 3, 4, 5]
        drawn = next(block for block in steps[3].content if block.type == "resource")
        assert drawn.resource.mime_type == "image/svg+xml" and drawn.resource.text.count("<rect") == 3
        links = [str(block.uri) for each in steps for block in each.content if block.type == "resource_link"]
        left = await agent.resources()
        assert sorted(left) == ["chart.svg", "merged.csv", "report.md"]
        assert len(links) == 3
        assert left["report.md"].text.splitlines()[4:] == [f"| {m} | {v:.1f} |" for m, v in AVERAGES.items()]
        assert (left["chart.svg"].mime_type, left["chart.svg"].text) == ("image/svg+xml", drawn.resource.text)
        assert len(left["merged.csv"].text.splitlines()) == 10
        await agent.use("close_session")
        assert (await agent.resources())["report.md"].text == left["report.md"].text, "results outlive the session"
    explained(served, agent)


DRAWN = """
import sys
sys.path.append("/workspace/site")
import matplotlib.pyplot as plt
plt.plot([1, 2], label="a")
plt.show()
"""


async def test_a_chart_is_an_image_block_in_a_session_and_without_one(tmp_path: Path) -> None:
    boxing.need_boxes()
    mounts = f"filesystem: {{mounts: [{{host: {tooling.charts()}, at: /workspace/site, mode: ro}}]}}"
    text = "gateway: {state: ./state, approval_wait_seconds: 0}\nsandbox: {max_memory_mb: 512, max_processes: 128}\n"
    text += "capabilities:\n"
    for name in ("execute_python", "open_session"):
        text += f"  {name}: {{transport: sandboxed_exec, approval: none, timeout_seconds: 120, {mounts}}}\n"
    with gateways.serve(gateways.write(tmp_path, text)) as served:
        async with Client(served.url) as client:
            agent = Agent(client)
            once = await agent.use("execute_python", code=DRAWN)
            await agent.begin()
            inside = await agent.use("execute_python", code=DRAWN)
    for result in (once, inside):
        (image,) = [block for block in result.content if block.type == "image"]
        assert image.mime_type == "image/png" and image.data.startswith("iVBOR")
        (shown,) = result.structured_content["claimed"]["results"]
        assert list(shown["data"]) == ["text/plain"], "a model is not given the picture again, as text"


async def test_a_chart_of_matplotlib_is_seen(served: gateways.Served) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed beside Ringfence")
    async with Client(served.url) as client:
        agent = Agent(client)
        await agent.begin(template="data")
        steps = await analysed(agent, PLOT)
        images = [block for block in steps[3].content if block.type == "image"]
        assert [image.mime_type for image in images] == ["image/png"]
        left = await agent.resources()
        assert left["chart.png"].mime_type == "image/png" and "report.md" in left
        await agent.use("close_session")
    explained(served, agent)
