"""Boxes from Python: real ones, synchronous and not; options, callbacks, the end, and forks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence import AsyncSandbox, Limits, Sandbox, run_code
from ringfence.errors import Refused, StoreError, Unavailable
from ringfence.sdk import engine
from tests import boxing, gateways

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of this module's own, and an engine that is gone with it."""
    boxing.need_boxes()
    home = tmp_path_factory.mktemp("sdk-home")
    engine.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        yield home / ".local/state/ringfence"
        engine.close()


def test_one_line_in_a_box(state: Path) -> None:
    execution = run_code("print(6 * 7)")
    assert (execution.text, execution.status, execution.error) == ("42\n", "success", None)
    assert execution.facts["isolation"]["backend"] == "process"
    assert execution.facts["explanation"].startswith("exited with status 0 after ")
    record = gateways.finished(state)[-1]
    assert (record["call"]["id"], record["call"]["origin"]) == (execution.facts["call_id"], "sdk")


def test_a_program_that_fails_is_no_exception() -> None:
    failed = run_code("import json\njson.loads('{')")
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.name == "JSONDecodeError" and "Traceback" in failed.error.traceback
    slow = run_code("print('so far', flush=True)\nwhile True: pass", timeout=0.5)
    assert (slow.status, slow.text, slow.facts["ended"]) == ("timeout", "so far\n", "timeout")
    assert slow.error is not None and slow.error.name == "timeout"
    greedy = run_code("x = b'x' * (100 << 20)\nwhile True: pass", limits=Limits(memory_bytes=64 << 20))
    assert (greedy.status, greedy.facts["limit"]) == ("killed", "memory")
    assert (greedy.error.name if greedy.error else None) == "memory"


def test_what_goes_in_and_comes_out(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("from a file")
    code = """
import os
for name in sorted(os.listdir('input')): print(open(f'input/{name}').read())
print(os.environ['WHO'])
open('output/r', 'w').write('result')
"""
    execution = run_code(
        code,
        inputs={"a": "text", "b": tmp_path / "b", "c": b"bytes"},
        envs={"WHO": "me"},
        output=tmp_path / "out",
    )
    assert execution.text == "text\nfrom a file\nbytes\nme\n"
    assert (tmp_path / "out/r").read_text() == "result"
    assert [file["path"] for file in execution.facts["files"]] == ["/workspace/output/r"]


def test_a_sandbox_has_its_own_variables_limits_and_words() -> None:
    with Sandbox.create(
        envs={"A": "1", "B": "1"}, timeout=20, metadata={"job": "7"}, limits=Limits(processes=9)
    ) as box:
        assert box.id.startswith("box_") and box.metadata == {"job": "7"}
        assert box.run_code("import os; print(os.environ['A'], os.environ['B'])", envs={"B": "2"}).text == "1 2\n"
        done = box.commands.run("echo out; echo err >&2; exit 3")
        assert (done.stdout, done.stderr, done.exit_code, done.status) == ("out\n", "err\n", 3, "failed")
        assert box.commands.run(["printf", "%s|", "a b", "c"]).stdout == "a b|c|"
        assert box.commands.run("sleep 30", timeout=0.3).exit_code == 124
        box.run_code("open('left', 'w')")
        assert box.commands.run("ls").stdout.split() == ["input", "output", "tmp"], "each run has a box of its own"
    with pytest.raises(Unavailable, match="killed"):
        box.run_code("1")


def test_output_is_told_as_it_comes_in_the_thread_that_waits() -> None:
    heard: list[tuple[str, str, Any]] = []
    code = (
        "import sys, time\nfor n in range(3):\n print('é', n, flush=True); print(n, file=sys.stderr); time.sleep(0.05)"
    )
    run_code(
        code,
        on_stdout=lambda text: heard.append(("out", text, threading.current_thread())),
        on_stderr=lambda text: heard.append(("err", text, threading.current_thread())),
    )
    assert "".join(text for stream, text, _ in heard if stream == "out") == "é 0\né 1\né 2\n"
    assert "".join(text for stream, text, _ in heard if stream == "err") == "0\n1\n2\n"
    assert len(heard) > 2 and {thread for _, _, thread in heard} == {threading.main_thread()}


def test_a_callback_that_raises_ends_the_run() -> None:
    def refuse(text: str) -> None:
        raise KeyError(text)

    began = time.monotonic()
    with pytest.raises(KeyError):
        run_code("print('x', flush=True)\nimport time; time.sleep(30)", on_stdout=refuse)
    assert time.monotonic() - began < 10
    assert run_code("print(1)").text == "1\n"


async def test_an_asynchronous_callback_that_raises_ends_the_run() -> None:
    async def refuse(text: str) -> None:
        raise KeyError(text)

    began = time.monotonic()
    with pytest.raises(KeyError):
        await AsyncSandbox().run_code("print('x', flush=True)\nimport time; time.sleep(30)", on_stdout=refuse)
    assert time.monotonic() - began < 10


def test_the_same_failure_again_and_again_is_no_loop_of_a_model() -> None:
    with Sandbox() as box:
        assert {box.run_code("1/0").status for _ in range(205)} == {"failed"}


async def test_the_same_awaited() -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    async with await AsyncSandbox.create(envs={"A": "b"}) as box:
        runs = [box.run_code(f"import os; print({n}, os.environ['A'])", on_stdout=hear) for n in range(5)]
        ended = await asyncio.gather(*runs)
        assert [execution.text for execution in ended] == [f"{n} b\n" for n in range(5)]
        assert sorted(heard) == [f"{n} b\n" for n in range(5)]
        assert (await box.commands.run("exit 4")).exit_code == 4


async def test_cancelling_ends_the_box(state: Path) -> None:
    box = AsyncSandbox()
    started = asyncio.Event()
    task = asyncio.create_task(
        box.run_code("print(1, flush=True); import time; time.sleep(30)", on_stdout=lambda _: started.set())
    )
    await asyncio.wait_for(started.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await box.run_code("print(2)")).text == "2\n"
    assert "cancelled" in [record["reason_code"] for record in gateways.finished(state)[-2:]]


async def test_kill_ends_what_runs() -> None:
    box = AsyncSandbox()
    started = asyncio.Event()
    task = asyncio.create_task(
        box.run_code("print(1, flush=True); import time; time.sleep(30)", on_stdout=lambda _: started.set())
    )
    await asyncio.wait_for(started.wait(), 20)
    await box.kill()
    with pytest.raises(Refused, match="killed while it ran"):
        await task
    with pytest.raises(Unavailable, match="the sandbox was killed"):
        await box.run_code("1")


def test_kill_from_another_thread() -> None:
    box, up = Sandbox(), threading.Event()
    ended: list[BaseException] = []

    def work() -> None:
        try:
            box.run_code("print(1, flush=True); import time; time.sleep(30)", on_stdout=lambda _: up.set())
        except Refused as exc:
            ended.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(20)
    box.kill()
    thread.join(10)
    assert [type(exc) for exc in ended] == [Refused]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"timeout": -1}, ValueError, "timeout must be a number from 0.001 to 86400"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a number"),
        ({"timeout": "5"}, ValueError, "timeout must be a number"),
        ({"limits": Limits(memory_bytes=-1)}, ValueError, "memory_bytes must be"),
        ({"limits": Limits(processes=10**9)}, ValueError, "processes must be"),
        ({"template": "dta"}, Refused, "there is no template"),
        ({"backend": "docker"}, Unavailable, "docker is not built yet"),
        ({"network": True}, TypeError, "there is no option network"),
        ({"inputs": {"a": Path("/nonexistent/a")}}, Unavailable, "No such file"),
        ({"inputs": {"../a": b""}}, Refused, "no such box can be made"),
        ({"envs": {"A=B": "c"}}, Refused, "env"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run_code("print(1)", **options)


@pytest.mark.parametrize("code", ["a\0b", "#" * (10 * 1024 * 1024 + 1), "\ud800"])
def test_what_is_no_source_is_refused(code: str) -> None:
    with pytest.raises(Refused) as refused:
        run_code(code)
    assert refused.value.status == "validation_failure"


def test_a_policy_of_the_users_own_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\npolicy: {preset: none}\n")
    gateways.write(tmp_path, "nonsense: true", "other.yaml")
    monkeypatch.setenv("RINGFENCE_CONFIG", str(path))
    engine.close()
    with pytest.raises(Refused, match="Refused by policy"):
        run_code("1")
    engine.close()
    monkeypatch.setenv("RINGFENCE_CONFIG", str(tmp_path / "missing.yaml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    for _ in range(2):
        with pytest.raises(StoreError):
            run_code("1")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert run_code("print(1)").text == "1\n", "what failed to open is tried again"


# ── the process ──

SCRIPT = """
import os, sys, ringfence
print(ringfence.run_code("print(1)").text, end="", flush=True)
@BODY@
"""
BODIES = {
    "it just ends": ("", ""),
    "it forks": (
        """
pid = os.fork()
print(ringfence.run_code(f"print({2 if pid == 0 else 3})").text, end="", flush=True)
if pid: os.waitpid(pid, 0)""",
        "23",
    ),
    "it raises": ("sys.exit('bye')", ""),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_program_that_used_boxes_ends_by_itself_and_leaves_a_closed_record(case: str, tmp_path: Path) -> None:
    body, more = BODIES[case]
    env = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.replace("@BODY@", body)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(ended.stdout.split()) == sorted(["1", *more]), ended.stderr
    assert "Traceback" not in ended.stderr and "never retrieved" not in ended.stderr
    records = gateways.records(tmp_path / ".local/state/ringfence")
    closed = [body["chain"] for body in records if body["kind"] == "chain_closed"]
    assert set(closed) == {body["chain"] for body in records}


def test_importing_is_cheap_and_a_box_loads_no_gateway() -> None:
    heavy = ("mcp", "pydantic", "starlette", "aiohttp", "ruamel")
    code = (
        f"import sys, ringfence; ringfence.run_code('1'); print([n for n in sys.modules if n.split('.')[0] in {heavy}])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_one_engine_serves_all() -> None:
    run_code("1")
    assert engine.engine() is engine.engine()
    before = threading.active_count()
    for _ in range(3):
        Sandbox().run_code("1")
    assert threading.active_count() == before
    assert ringfence.Sandbox is Sandbox
