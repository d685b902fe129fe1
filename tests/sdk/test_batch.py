"""Many programs at once, from Python: order, options, failures, callbacks, and the end of a batch."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence import Execution, Limits, Unavailable, map_code, map_code_async
from ringfence.core.errors import ConfigError, OutcomeUnknown
from ringfence.core.model import Outcome, Status, own_words
from ringfence.sdk import engine
from ringfence.sdk.batch import default_workers, run_all
from ringfence.sdk.execution import ended, without_result
from tests import gateways, tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]

SLEEPS = "print('up', flush=True)\nimport time; time.sleep(600)"
WAITS = (
    "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('/gate/open'): time.sleep(0.01)\nprint('on')"
)
"""It runs on when its gate is opened."""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir(mode=0o755)
    return folder


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration of the user's own, with a rule against one program."""
    rule = "{id: no-evil, action: deny, tool_patterns: [execute_python], argument_patterns: {code: evil}}"
    path = gateways.write(tmp_path, f"gateway: {{state: ./state}}\npolicy: {{preset: standard, rules: [{rule}]}}\n")
    engine.close()
    monkeypatch.setenv("RINGFENCE_CONFIG", str(path))
    yield tmp_path / "state"
    engine.close()


def texts(executions: list[Execution]) -> list[str]:
    return [execution.text for execution in executions]


def test_a_hundred_programs_in_their_order_each_on_record(state: Path) -> None:
    executions = map_code(f"print({number})" for number in range(100))
    assert texts(executions) == [f"{number}\n" for number in range(100)]
    assert {(execution.status, execution.error) for execution in executions} == {("success", None)}
    on_record = {record["call"]["id"]: record for record in gateways.finished(state)}
    assert {on_record[execution.facts["call_id"]]["call"]["origin"] for execution in executions} == {"sdk"}
    assert len({execution.facts["call_id"] for execution in executions}) == 100


def test_the_order_is_that_of_the_programs_though_a_later_one_ends_first(gate: Path) -> None:
    order: list[int] = []

    def done(index: int, execution: Execution) -> None:
        order.append(index)
        (gate / "open").touch()  # what the first waits for

    executions = map_code([WAITS, "print(2)"], workers=2, mounts={"/gate": gate}, on_done=done, timeout=300)
    assert order == [1, 0]
    assert texts(executions) == ["up\non\n", "2\n"]


def test_no_more_run_at_a_time_than_there_are_workers(gate: Path) -> None:
    up: set[int] = set()
    over: set[int] = set()
    most: list[int] = []

    def begun(index: int) -> Any:
        def heard(text: str) -> None:
            up.add(index)
            most.append(len(up - over))
            if len(up) == 2:  # both workers have one: so two can run at once
                (gate / "open").touch()

        return heard

    programs = [{"code": WAITS, "on_stdout": begun(index)} for index in range(6)]
    executions = map_code(
        programs, workers=2, mounts={"/gate": gate}, on_done=lambda index, _: over.add(index), timeout=300
    )
    assert texts(executions) == ["up\non\n"] * 6
    assert max(most) == 2
    (gate / "open").touch()
    order: list[str] = []
    one_by_one = [{"code": "print(1)", "on_stdout": lambda _, n=n: order.append(f"up {n}")} for n in range(3)]
    map_code(one_by_one, workers=1, on_done=lambda index, _: order.append(f"done {index}"))
    assert order == [f"{what} {n}" for n in range(3) for what in ("up", "done")]


@pytest.mark.parametrize("workers", [1, 3, 50])
async def test_workers_are_all_used_and_never_more(workers: int) -> None:
    running, most = 0, 0

    async def one(index: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return index

    assert await run_all(20, one, workers) == list(range(20))
    assert most == min(workers, 20)
    assert await run_all(0, one, workers) == []
    assert default_workers() >= 2


def test_one_that_fails_harms_no_other(configured: Path) -> None:
    programs: list[Any] = [
        "print('first')",
        "{}['missing']",
        "print('evil')",
        {"code": "print(1)", "template": "dta"},
        {"code": "print(1)", "inputs": {"a": Path("/nonexistent/a")}},
        {"code": "print(1)", "backend": "microsandbox"},
        {"code": "while True: pass", "timeout": 0.2},
        "a\0b",
        "print('last')",
    ]
    executions = map_code(programs)
    assert [execution.status for execution in executions] == [
        *("success", "failed", "denied", "validation_failure", "unavailable"),
        *("unavailable", "timeout", "validation_failure", "success"),
    ]
    assert [execution.error.name if execution.error else None for execution in executions] == [
        *(None, "KeyError", "policy", "unknown_template", "no_input"),
        *("no_backend", "timeout", "bad_arguments", None),
    ]
    refused = executions[2]
    assert refused.error is not None and "no-evil" in refused.error.value
    assert (refused.text, refused.facts["ended"], refused.facts["rules"]) == (
        "",
        "policy",
        ["no-evil", "std-high-risk"],
    )
    assert texts(executions)[::8] == ["first\n", "last\n"]
    assert {record["status"] for record in gateways.finished(configured)} >= {"denied", "failed", "success"}


def test_what_never_ran_or_is_not_known_is_an_execution_too() -> None:
    lost = ended(Outcome(Status.UNKNOWN, "box_failed", own_words("nobody knows"), facts={"effect": "unknown"}))
    assert lost.error is not None
    assert (lost.status, lost.error.name, lost.error.value) == ("unknown", "box_failed", "nobody knows")
    assert lost.facts == {"effect": "unknown"} and lost.text == ""
    assert without_result(OutcomeUnknown("box_failed", "gone")).status == "unknown"
    assert without_result(Unavailable("no_box", "none")).status == "unavailable"


def test_options_for_all_and_options_of_its_own(tmp_path: Path) -> None:
    code = "import os\nprint(os.environ['A'], os.environ.get('B'), *sorted(os.listdir('input')))\n"
    code += "open('output/made', 'w').write(os.environ['A'])"
    own = {"code": code, "envs": {"A": "own"}, "inputs": {"b": "b"}, "output": tmp_path / "its own"}
    executions = map_code([code, own], envs={"A": "all", "B": "b"}, inputs={"a": "a"}, output=tmp_path / "out")
    assert texts(executions) == ["all b a\n", "own b a b\n"]
    assert (tmp_path / "out/0/made").read_text() == "all"
    assert (tmp_path / "its own/made").read_text() == "own"
    assert os.listdir(tmp_path / "out") == ["0"]


def test_limits_of_its_own_win_one_by_one() -> None:
    waits = "import time; time.sleep(600)"
    eats = "x = b'x' * (100 << 20)\nwhile True: pass"
    executions = map_code(
        [{"code": waits, "limits": Limits(wall_seconds=0.2)}, {"code": waits, "timeout": 0.2}, eats],
        timeout=3600,
        limits=Limits(memory_bytes=64 << 20),
    )
    assert [execution.facts["limit"] for execution in executions] == ["wall", "wall", "memory"]


def test_callbacks_are_called_in_the_thread_that_waits() -> None:
    heard: dict[int, Execution] = {}
    threads: set[threading.Thread] = set()
    said: list[str] = []

    def done(index: int, execution: Execution) -> None:
        threads.add(threading.current_thread())
        heard[index] = execution

    def hear(text: str) -> None:
        threads.add(threading.current_thread())
        said.append(text)

    executions = map_code(["print(0)", {"code": "print(1)", "on_stdout": hear}, "1 / 0"], on_done=done)
    assert [heard[index] for index in range(3)] == executions
    assert (threads, said) == ({threading.main_thread()}, ["1\n"])


def test_a_callback_that_raises_ends_the_batch_and_leaves_nothing_running(state: Path) -> None:
    def refuse(index: int, execution: Execution) -> None:
        raise KeyError(index)

    before = len(gateways.finished(state))
    with pytest.raises(KeyError, match="1"):
        map_code([SLEEPS, "print(1)", SLEEPS, SLEEPS], workers=2, on_done=refuse, timeout=600)
    tooling.wait_until(lambda: all_over(state, before))
    assert texts(map_code(["print(1)"])) == ["1\n"]


def all_over(state: Path, before: int) -> bool:
    """Whether what was begun has ended, and what was running was cancelled."""
    calls = {record["call_id"] for record in gateways.records(state, kind="started")}
    over = gateways.finished(state)
    reasons = [record["reason_code"] for record in over[before:]]
    return "cancelled" in reasons and calls <= {record["call"]["id"] for record in over}


@pytest.mark.parametrize(
    ("programs", "options", "kind", "text"),
    [
        (["1", 5], {}, TypeError, r"programs\[1\]: a program is text, or a mapping with code and options; this is int"),
        (["1", b"1"], {}, TypeError, r"programs\[1\]: .* this is bytes"),
        ([{"cod": "1"}], {}, TypeError, r"programs\[0\]: code is missing"),
        ([{"code": 1}], {}, TypeError, r"programs\[0\]: code is text; this is int"),
        (["1", {"code": "1", "timeot": 1}], {}, TypeError, r"programs\[1\]: there is no option timeot; there are "),
        (["1", {"code": "1", "timeout": -1}], {}, ValueError, r"programs\[1\]: timeout must be"),
        ([{"code": "1", "envs": 5}], {}, TypeError, r"programs\[0\]: "),
        ([{"code": "1", "mounts": ["/a"]}], {}, ValueError, r"programs\[0\]: mounts: a mapping"),
        (["1"], {"timeot": 1}, TypeError, "^there is no option timeot"),
        (["1"], {"timeout": "5"}, ValueError, "^timeout must be"),
        (["1"], {"workers": 0}, ValueError, "workers must be 1 or more, this is 0"),
        (["1"], {"workers": 1.5}, TypeError, "workers is a whole number"),
        ("print(1)", {}, TypeError, "programs is a list of programs; for one program there is run_code"),
        ({"code": "1"}, {}, TypeError, "programs is a list of programs"),
    ],
)
async def test_wrong_usage_is_told_before_anything_runs(
    state: Path, programs: Any, options: Any, kind: type[Exception], text: str
) -> None:
    map_code(["1"])
    before = len(gateways.records(state))
    with pytest.raises(kind, match=text):
        map_code(programs, **options)
    with pytest.raises(kind, match=text):
        await map_code_async(programs, **options)
    assert len(gateways.records(state)) == before


def test_a_folder_of_output_that_is_a_link_is_refused_before_anything_runs(tmp_path: Path, state: Path) -> None:
    """The caller names the folder above; who could write there chose where the link leads."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "1").symlink_to(elsewhere)
    program = "open('/workspace/output/a', 'w').write('x')"
    with pytest.raises(ValueError, match=r"programs\[1\]: output: .* is a link; remove it, or name another folder"):
        map_code([program, program], output=out)
    assert list(elsewhere.iterdir()) == []
    assert not (out / "0").exists()


def test_where_nothing_can_run_at_all_the_batch_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert map_code([]) == []
    with pytest.raises(Unavailable, match="microsandbox is not built yet"):
        map_code(["1"], backend="microsandbox")
    engine.close()
    monkeypatch.setenv("RINGFENCE_CONFIG", str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="does not exist"):
        map_code(["1"])


async def test_the_same_awaited() -> None:
    heard: list[int] = []
    at_once = 0

    async def done(index: int, execution: Execution) -> None:
        nonlocal at_once
        at_once += 1
        assert at_once == 1 and execution.text == f"{index}\n"
        await asyncio.sleep(0)
        at_once -= 1
        heard.append(index)

    with pytest.raises(TypeError, match="await map_code_async"):
        map_code(["1"], on_done=done)
    executions = await map_code_async([f"print({n})" for n in range(8)], workers=4, on_done=done)
    assert texts(executions) == [f"{n}\n" for n in range(8)]
    assert sorted(heard) == list(range(8))


async def test_an_asynchronous_callback_that_raises_ends_the_batch(state: Path) -> None:
    async def refuse(index: int, execution: Execution) -> None:
        await asyncio.sleep(0)
        raise KeyError(index)

    before = len(gateways.finished(state))
    with pytest.raises(KeyError, match="1"):
        await map_code_async([SLEEPS, "print(1)", SLEEPS], workers=2, on_done=refuse, timeout=600)
    await tooling.until(lambda: all_over(state, before))


async def test_cancelling_ends_the_boxes_that_run(state: Path) -> None:
    up: list[str] = []
    before = len(gateways.finished(state))
    running = asyncio.create_task(map_code_async([SLEEPS] * 5, workers=2, on_stdout=up.append, timeout=600))
    await tooling.until(lambda: len(up) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await tooling.until(lambda: len(gateways.finished(state)) == before + 2)
    assert {record["reason_code"] for record in gateways.finished(state)[before:]} == {"cancelled"}


def test_ctrl_c_ends_the_boxes_that_run(tmp_path: Path) -> None:
    script = f"""
import ringfence
try:
    ringfence.map_code([{SLEEPS!r}] * 5, workers=2, on_stdout=lambda text: print(text, end="", flush=True), timeout=600)
except KeyboardInterrupt:
    print("interrupted", ringfence.run_code("print(1)").text)
"""
    env = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted 1\n"
        assert process.wait(tooling.PATIENCE) == 0
    reasons = [record["reason_code"] for record in gateways.finished(tmp_path / ".local/state/ringfence")]
    assert sorted(reasons) == ["cancelled", "cancelled", "ok"]


def test_it_is_public() -> None:
    assert (ringfence.map_code, ringfence.map_code_async) == (map_code, map_code_async)
