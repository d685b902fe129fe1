"""What people do in notebooks, in real boxes: in a sandbox, and in a program that runs once."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Execution, Limits, Sandbox, map_code, run_code
from ringfence.core.errors import NotFound, Refused
from ringfence.sdk.charts import chart_of
from ringfence.sdk.execution import CHART, ExecutionError
from tests import gateways, tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]

needs_node = pytest.mark.skipif(shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") is None, reason="no node")


@pytest.fixture(params=["once", "fork", "exec"])
def run(request: pytest.FixtureRequest, sandbox: Sandbox) -> Iterator[Any]:
    """Runs code once, in an interpreter that was forked, and in one that was started by exec."""
    if request.param != "exec":
        yield run_code if request.param == "once" else sandbox.run_code
        return
    with Sandbox.create(memory_layout="fresh") as made:
        yield made.run_code


Run = Callable[[str], Execution]


# ── Python ────────────────────────────────────────────────────────────────────────────────────────


def test_the_value_of_the_last_expression_is_a_result(run: Run) -> None:
    execution = run("x = 6\nx * 7")
    assert (execution.text, execution.logs.stdout) == ("42", [])
    assert [(shown.text, shown.is_main_result) for shown in execution.results] == [("42", True)]
    assert run("x = 1;").results == run("print()").results == run("'hidden';").results == []


def test_values_are_shown_as_in_a_notebook(run: Run) -> None:
    code = """
from IPython.display import display, HTML
class Table:
    def _repr_html_(self): return '<table>'
display(HTML('<b>'), Table())
display(5)
!echo from a command
%matplotlib inline
"""
    execution = run(code)
    assert execution.error is None, execution.error
    assert [shown.html for shown in execution.results] == ["<b>", "<table>", None]
    assert execution.results[2].text == "5" and execution.logs.stdout == ["from a command\n"]


def test_a_failure_beside_a_command_has_its_line_and_nothing_of_ours(run: Run) -> None:
    failed = run("!true\n%time x = 1\n1 / 0").error
    assert failed is not None and failed.name == "ZeroDivisionError"
    assert "line 3" in failed.traceback and "notebook" not in failed.traceback
    failed = run("%pip install nothing").error
    assert failed is not None and failed.name == "UsageError" and "packages=[" in failed.value
    assert "line 1" in failed.traceback and "notebook" not in failed.traceback


def test_a_command_is_in_the_box_of_its_cell_and_has_its_limits(run: Run) -> None:
    hidden = run("!ls /home /work /root 2>/dev/null; cat /proc/1/environ 2>/dev/null | wc -c; id -u")
    assert (
        hidden.logs.stdout
        == run("import os\nos.system('ls /home /work /root 2>/dev/null; echo 0; id -u');").logs.stdout
    )
    slow = run_code("!sleep 600", timeout=0.5)
    assert (slow.status, slow.facts["ended"]) == ("timeout", "timeout")


def test_a_chart_is_a_picture_and_data(run: Run) -> None:
    where = tooling.charts()
    code = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.title('Sums')\nplt.show()\n1;"
    mounts = {"/workspace/site": where}
    with Sandbox.create(mounts=mounts, limits=Limits(memory_bytes=512 << 20)) as box:
        setup = "import sys\nsys.path.append('/workspace/site')\n"
        if run is run_code:
            execution = run_code(setup + code, mounts=mounts, limits=Limits(memory_bytes=512 << 20), timeout=120)
        else:
            execution = box.run_code(setup + code, timeout=120)
    assert execution.error is None, execution
    (shown,) = execution.results
    assert base64.b64decode(shown.png or "").startswith(b"\x89PNG")
    chart = shown.chart
    assert chart is not None and (chart.type, chart.title) == ("bar", "Sums")
    assert [(bar["label"], bar["value"]) for bar in chart.elements] == [("a", 1.0), ("b", 2.0)]
    assert {"png", "chart", "text"} == set(shown.formats()) and chart.to_dict()["type"] == "bar"


def test_what_is_no_chart_is_none() -> None:
    for text in (None, "", "[1]", '{"type": "bar"}', '{"type": "x", "elements": []}', "[" * 100_000):
        assert chart_of(text) is None
    deep = '{"type": "superchart", "elements": [' * 5 + "]}" * 5
    assert chart_of(deep) is not None
    assert run_code(f"display({{{CHART!r}: 'forged'}}, raw=True)").results[0].chart is None


# ── What a program that runs once shows ───────────────────────────────────────────────────────────


def test_what_is_printed_comes_first_for_a_program_that_runs_once() -> None:
    execution = run_code("print('said')\nopen('output/x', 'w').write('abc')")
    assert (execution.text, execution.results[0].text) == ("said\n", "3")
    assert [done.text for done in map_code(["1 + 1", "print(2)"])] == ["2", "2\n"]


def test_claims_that_a_program_forges_are_bounded_and_harm_nobody() -> None:
    place = "/workspace/tmp/.shown"
    for content in ("b'\\xff' * 100", "b'\\0\\0\\0\\5hello'", "b'\\0' * 1000", "b'\\0\\0\\0\\1['*2000000"):
        forged = run_code(f"open({place!r}, 'wb').write({content});\nprint('ran')")
        assert (forged.status, forged.results, forged.text) == ("success", [], "ran\n")
    for setup in (f"os.symlink('/etc/passwd', {place!r})", f"os.mkfifo({place!r})", f"os.mkdir({place!r})"):
        forged = run_code(f"import os\n{setup}\ndisplay(1)")
        assert (forged.status, forged.results) == ("success", [])


def test_it_shows_no_more_than_there_is_room_for() -> None:
    much = run_code("for n in range(20): display('x' * 1_000_000)")
    assert much.status == "success"
    assert sum(len(shown.text or "") for shown in much.results) < 9_000_000


def test_the_end_of_a_program_is_what_it_was() -> None:
    code = "class A:\n    def __del__(self): print('gone')\na = A()\ndisplay(1)\nimport sys\nsys.exit(3)"
    execution = run_code(code)
    assert (execution.facts["exit_status"], execution.logs.stdout) == (3, ["gone\n"])
    assert run_code("import os\nif os.fork() == 0:\n    display(2)\nelse:\n    os.wait()").logs.stdout == ["2\n"]


def test_a_command_line_is_as_python_would_have_it(state: Path) -> None:
    ran = gateways.run("run", "-c", "1 + 1\ndisplay(1)")
    assert ran.returncode == 1 and "NameError" in ran.stderr and ran.stdout == ""


# ── Other languages ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["once", "session"])
def cell(request: pytest.FixtureRequest, sandbox: Sandbox) -> Any:
    return run_code if request.param == "once" else sandbox.run_code


def test_a_cell_of_bash(cell: Any) -> None:
    execution = cell("[[ ab == a* ]] && echo $WHO; echo no >&2; exit 3", language="bash", envs={"WHO": "me"})
    assert (execution.text, execution.logs.stderr) == ("me\n", ["no\n"])
    assert execution.error == ExecutionError("ExitStatus", "3", "no\n")
    heard: list[str] = []
    assert cell("echo fine", language="bash", on_stdout=heard.append).error is None
    assert heard == ["fine\n"]


@needs_node
def test_a_cell_of_javascript(cell: Any) -> None:
    assert cell("const x = [1, 2]\nx.map(y => y * 2)", language="javascript").text == "[ 2, 4 ]\n"
    assert cell("const os = require('os'); console.log(os.EOL === '\\n')", language="javascript").text == "true\n"
    module = "import { sep } from 'node:path'\nconsole.log(sep, await Promise.resolve(1))"
    assert cell(module, language="javascript").text == "/ 1\n"
    thrown = cell("null.x", language="javascript").error
    assert thrown is not None and thrown.name == "TypeError" and "null" in thrown.value
    wrong = cell("let = = 1", language="javascript").error
    assert wrong is not None and wrong.name == "SyntaxError"


def test_without_node_javascript_fails_and_stderr_says_why(cell: Any) -> None:
    ran = cell("1", language="javascript", envs={"PATH": "/nowhere"})
    assert ran.error is not None and "node: No such file" in "".join(ran.logs.stderr)


def test_what_makes_no_sense_with_another_language_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(Refused, match="only with Python"):
        sandbox.run_code("ls", language="bash", context="mine")
    with pytest.raises(Refused, match="write it into a file"):
        sandbox.run_code("#" * 200_000, language="bash")
    with pytest.raises(Refused):
        sandbox.run_code("1", language="cobol")  # type: ignore[arg-type]


# ── Contexts ──────────────────────────────────────────────────────────────────────────────────────


def test_contexts_are_listed_restarted_and_removed() -> None:
    with Sandbox.create() as box:
        made = box.create_code_context()
        assert box.run_code("v = 1\nv", context=made).text == "1"
        box.run_code("v = 2", context="other")
        assert [each.id for each in box.list_code_contexts()] == ["default", made.id, "other"]
        assert box.restart_code_context(made) is True
        gone = box.run_code("v", context=made)
        assert gone.error is not None and gone.error.name == "NameError"
        assert box.run_code("v", context="other").text == "2"
        assert (box.remove_code_context(made), box.remove_code_context(made)) == (True, False)
        assert [each.id for each in box.list_code_contexts()] == ["default", "other"]
        assert box.restart_code_context() is False, "it has not run anything yet"
        with pytest.raises(Refused, match="restart it"):
            box.remove_code_context("default")
        entered = box.create_code_context("there", cwd="/tmp")
        assert box.run_code("import os\nos.path.samefile('.', '/tmp')", context=entered).text == "True"
        with pytest.raises(NotFound):
            box.create_code_context(cwd="/nowhere")


async def test_a_context_that_runs_is_ended_and_those_that_wait_have_another() -> None:
    async with await AsyncSandbox.create() as box:
        begun = asyncio.Event()
        code = "v = 1\nprint(1, flush=True)\nwhile True: pass"
        running = asyncio.ensure_future(box.run_code(code, context="c", on_stdout=lambda _: begun.set()))
        await begun.wait()
        waiting = asyncio.ensure_future(box.run_code("'v' in globals()", context="c"))
        await asyncio.sleep(0.1)
        assert await box.remove_code_context("c") is True
        ended = await running
        assert ended.status == "killed" and not ended.alive
        assert (await waiting).text == "False"
