"""Blocks of Python in an interpreter that keeps its state: values, errors, clocks, callbacks; in real boxes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Result, Sandbox
from ringfence.core import canonical
from ringfence.core.box import Mount
from tests import gateways, tooling
from tests.forging import CHANNEL

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]


def test_what_a_step_leaves_the_next_one_finds(sandbox: Sandbox) -> None:
    sandbox.run_code("import os\nx = 6\nos.mkdir('output')\nos.chdir('output')")
    execution = sandbox.run_code("print('here', os.getcwd())\nx * 7")
    assert (execution.text, execution.logs.stdout) == ("42", ["here /workspace/output\n"])
    assert [result.is_main_result for result in execution.results] == [True]
    assert (execution.status, execution.error, execution.alive) == ("success", None, True)
    assert execution.step is not None and execution.facts["isolation"]["backend"] == "process"
    sandbox.run_code("os.chdir('/workspace')")


def test_tasks_go_on_between_steps_and_what_they_print_is_late() -> None:
    with Sandbox.create() as sandbox:
        ticking = """
import asyncio, os
async def tick():
    while not os.path.exists('go'):
        await asyncio.sleep(0.01)
    print('late')
    open('done', 'w').close()
task = asyncio.create_task(tick())
await asyncio.sleep(0)
"""
        first = sandbox.run_code(ticking)
        assert (first.error, first.late.stdout) == (None, [])
        sandbox.files.write("go", "")
        tooling.wait_until(lambda: sandbox.files.exists("done"))
        second = sandbox.run_code("print('mine')\ntask.done()")
        assert (second.text, second.logs.stdout, second.late.stdout) == ("True", ["mine\n"], ["late\n"])
        assert second.facts["late"]["stdout_bytes"] == 5
        assert sandbox.commands.run("true").late.stdout == []


def test_what_holds_for_all_steps_is_written_out_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolation is most of a step's record, and the same in each."""
    sandbox.run_code("1")
    written: list[Any] = []
    write = canonical.Written.__init__

    def noted(self: canonical.Written, value: Any) -> None:
        written.append(value)
        write(self, value)

    monkeypatch.setattr(canonical.Written, "__init__", noted)
    for _ in range(3):
        assert sandbox.run_code("1").facts["isolation"]["protections"]
    assert written == []


@pytest.mark.parametrize("times", [1, 3])
async def test_whoever_gives_up_hears_no_more_of_it(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[dict[str, Any]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_exception_handler", problems.append)
    async with AsyncSandbox() as box:
        await box.run_code("import time; kept = 1")
        running = asyncio.create_task(box.run_code("time.sleep(600)"))
        await asyncio.sleep(0.3)
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await box.run_code("kept")).text == "1"
    del running
    gc.collect()
    await asyncio.sleep(0)
    assert problems == []


def test_without_a_value_the_text_is_what_was_printed(sandbox: Sandbox) -> None:
    assert sandbox.run_code("print('a')").text == "a\n"
    assert sandbox.run_code("None").text == ""


def test_what_code_does_wrong_is_no_exception(sandbox: Sandbox) -> None:
    failed = sandbox.run_code("kept = 1\n1 / 0")
    assert failed.status == "failed" and failed.error is not None
    assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
    assert "Traceback" in failed.error.traceback
    assert sandbox.run_code("kept").text == "1"
    unreadable = sandbox.run_code("def f(:")
    assert unreadable.error is not None and unreadable.error.name == "SyntaxError"


def test_nobody_answers_a_question(sandbox: Sandbox) -> None:
    asked = sandbox.run_code("input('name? ')")
    assert asked.status == "failed" and asked.error is not None
    assert "input" in asked.error.value or "stdin" in asked.error.value


def test_a_run_timeout_stops_the_work_and_the_variables_stay(sandbox: Sandbox) -> None:
    for seconds in tooling.LONGER:
        slow = sandbox.run_code("y = 5\nprint('so far', flush=True)\nwhile True: pass", timeout=seconds)
        if slow.logs.stdout:
            break
    assert (slow.status, slow.logs.stdout, slow.facts["ended"]) == ("timeout", ["so far\n"], "timeout")
    assert slow.error is not None and slow.error.name == "timeout"
    assert sandbox.run_code("y").text == "5"


def test_an_interpreter_that_ends_itself_is_told_and_replaced() -> None:
    with Sandbox() as box:
        box.run_code("z = 1\nopen('file', 'w').write('still here')")
        ended = box.run_code("import os\nos._exit(3)")
        assert (ended.status, ended.alive) == ("failed", False)
        assert ended.error is not None and "the next run has a fresh one" in ended.error.value
        gone = box.run_code("z")
        assert gone.error is not None and gone.error.name == "NameError"
        assert box.files.read("file") == "still here"


def test_contexts_have_variables_of_their_own_and_files_together(sandbox: Sandbox) -> None:
    sandbox.run_code("v = 'one'", context="one")
    sandbox.run_code("v = 'two'\nopen('shared', 'w').write(v)", context="two")
    assert sandbox.run_code("v", context="one").text == "'one'"
    assert sandbox.run_code("open('shared').read()", context="one").text == "'two'"
    assert {"one", "two"} <= set(sandbox.info().contexts)


def test_results_come_in_forms_and_as_they_are_shown(sandbox: Sandbox) -> None:
    code = """
class Table:
    def __repr__(self): return 'a table'
    def _repr_html_(self): return '<table></table>'
    def _repr_json_(self): return {'rows': 0}
display(Table())
print('between')
Table()"""
    heard: list[Any] = []
    execution = sandbox.run_code(code, on_result=heard.append, on_stdout=heard.append)
    assert [(r.text, r.html, r.is_main_result) for r in execution.results] == [
        ("a table", "<table></table>", False),
        ("a table", "<table></table>", True),
    ]
    assert execution.results[0].json == {"rows": 0}
    assert [type(each) for each in heard].count(Result) == 2 and "between\n" in heard
    assert [each for each in heard if isinstance(each, Result)] == execution.results


def test_callbacks_are_called_in_the_thread_that_waits(sandbox: Sandbox) -> None:
    threads: list[Any] = []
    sandbox.run_code("print(1)", on_stdout=lambda _: threads.append(threading.current_thread()))
    assert threads == [threading.main_thread()]


def test_interrupting_raises_in_the_code_and_keeps_the_variables(sandbox: Sandbox) -> None:
    up = threading.Event()
    ended: list[Any] = []
    code = "w = 7\nprint(1, flush=True)\nimport time\ntime.sleep(600)"
    thread = threading.Thread(target=lambda: ended.append(sandbox.run_code(code, on_stdout=lambda _: up.set())))
    thread.start()
    assert up.wait(120)
    assert sandbox.interrupt() is True
    thread.join(120)
    assert ended[0].error.name == "KeyboardInterrupt"
    assert sandbox.run_code("w").text == "7"
    assert sandbox.interrupt() is False


async def test_the_same_awaited() -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    async with await AsyncSandbox.create(envs={"A": "b"}) as box:
        runs = [box.run_code(f"import os; print({n}, os.environ['A'])", on_stdout=hear) for n in range(5)]
        assert [execution.text for execution in await asyncio.gather(*runs)] == [f"{n} b\n" for n in range(5)]
        assert sorted(heard) == [f"{n} b\n" for n in range(5)]
        assert (await box.run_code("os.environ['A']", envs={"A": "c"})).text == "'c'"
        assert (await box.run_code("os.environ['A']")).text == "'b'"


async def test_a_callback_that_raises_stops_the_work_and_the_sandbox_goes_on() -> None:
    async with AsyncSandbox() as box:

        def refuse(text: str) -> None:
            raise KeyError(text)

        code = "u = 1\nprint('x', flush=True)\nimport time; time.sleep(600)"
        began = time.monotonic()
        with pytest.raises(KeyError):
            await box.run_code(code, on_stdout=refuse, timeout=600)
        assert time.monotonic() - began < 300
        # On a machine that stands still the cell may not end in time, and then its interpreter is a new one.
        assert (await box.run_code("globals().get('u', 'a new one')")).text in ("1", "'a new one'")


FORGE = f"""{CHANNEL}
channel.send(b'{{"t":"done","id":%d,"ok":true,"left_out":0}}')
while True: pass
"""


def test_a_cell_that_says_done_and_goes_on_is_told_as_forged_and_the_next_one_is_not_charged(state: Path) -> None:
    with Sandbox.create() as box:
        forged = box.run_code(FORGE % 1, timeout=0.5)
        honest = box.run_code("1 + 1")
    assert (forged.status, forged.alive) == ("killed", False)
    assert forged.error is not None and forged.error.name == "forged"
    told = forged.facts
    assert (told["ended"], told["limit"], told["forged"], told["exit_status"]) == ("policy", "wall", True, None)
    assert "said that it was done and went on (forged)" in told["explanation"]
    assert told["usage"]["cpu_ms"] > honest.facts["usage"]["cpu_ms"]
    assert (honest.text, honest.facts["ended"], honest.facts.get("late")) == ("2", "exited", None)
    assert honest.facts["claimed"] == ["exit_status"], "that it did not fail is its interpreter's word"
    recorded = [record["facts"] for record in gateways.records(state, kind="finished")]
    assert [each.get("forged") for each in recorded[-3:-1]] == [True, None]


def test_what_a_cell_left_running_stands_apart_in_the_facts_and_on_record(state: Path) -> None:
    left = """
import threading, time
used = [0.0]
def spin():
    while True: used[0] = time.thread_time()
threading.Thread(target=spin, daemon=True).start()
"""
    with Sandbox.create() as box:
        box.run_code(left)
        beside = box.run_code("began = used[0]\nwhile used[0] < began + 0.3: time.sleep(0.01)", timeout=120)
    late = beside.facts["late"]
    assert late["tasks"] == 1 and late["cpu_ms"] >= 250 > beside.facts["usage"]["cpu_ms"]
    assert "left by earlier steps or set-up code and charged to none: " in beside.facts["explanation"]
    recorded = gateways.records(state, kind="finished")[-2]["facts"]
    assert recorded["late"] == late


def test_a_session_with_a_writable_mount_may_change_it_by_code_and_by_files(state: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with Sandbox.create(mounts=[Mount(str(tmp_path), "/workspace/host", "rw")]) as box:
        step = box.run_code("1")
        box.files.write("/workspace/host/by-file", b"x")
        box.files.list("/workspace/host")
    assert (tmp_path / "by-file").read_bytes() == b"x"
    assert step.facts["effect"] == "confirmed"
    started = {record["call"]["tool"]: record["effect_possible"] for record in gateways.records(state, kind="started")}
    assert (started["execute_python"], started["write_file"], started["list_files"]) == (True, True, False)
