"""One program in a fresh box, from Python: options, callbacks, the end, and forks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ringfence
from ringfence import Limits, run_code, run_code_async
from ringfence.core.box import Mount
from ringfence.core.errors import ConfigError, Refused, StoreError, Unavailable
from ringfence.sdk import engine
from tests import gateways, tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]


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
    for seconds in tooling.LONGER:
        slow = run_code("print('so far', flush=True)\nwhile True: pass", timeout=seconds)
        if slow.text:
            break
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


@pytest.mark.parametrize("place", [".", "state", "state/ringfence/checkpoints", "home"])
def test_nothing_that_a_program_leaves_replaces_what_rules_over_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/ringfence.yaml").write_text("version: 1\n")
    code = f"""
import ringfence
try:
    ringfence.run_code("open('output/ringfence.yaml', 'w').write('x')", output={str(tmp_path / place)!r})
except ValueError as exc:
    print(exc)"""
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **state})
    assert "what comes out of a box could replace" in done.stdout and "name another folder" in done.stdout, done
    assert (tmp_path / "home/ringfence.yaml").read_text() == "version: 1\n"


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
    assert {thread for _, _, thread in heard} == {threading.main_thread()}


def test_a_callback_that_raises_ends_the_run() -> None:
    def refuse(text: str) -> None:
        raise KeyError(text)

    began = time.monotonic()
    with pytest.raises(KeyError):
        run_code("print('x', flush=True)\nimport time; time.sleep(600)", on_stdout=refuse, timeout=600)
    assert time.monotonic() - began < 300
    assert run_code("print(1)").text == "1\n"


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"timeout": -1}, ValueError, "timeout must be a number from 0.001 to 86400"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a number"),
        ({"timeout": "5"}, ValueError, "timeout must be a number"),
        ({"limits": Limits(memory_bytes=-1)}, ValueError, "memory_bytes must be"),
        ({"limits": Limits(processes=10**9)}, ValueError, "processes must be"),
        ({"template": "dta"}, Refused, "there is no template"),
        ({"backend": "microsandbox"}, Unavailable, "microsandbox is not built yet"),
        ({"netwrok": True}, TypeError, "there is no option netwrok"),
        ({"network": ["a b"]}, Refused, "invalid network"),
        ({"network": "nowhere"}, Unavailable, "there is no network 'nowhere'"),
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


def test_a_secret_of_the_configuration_is_a_placeholder_in_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "correct-horse-battery-staple")
    text = "gateway: {state: ./state}\nsecrets: {demo: {from: env, name: DEMO_TOKEN, hosts: [api.example]}}\n"
    monkeypatch.setenv("RINGFENCE_CONFIG", str(gateways.write(tmp_path, text)))
    engine.close()
    code = "import os\nprint(os.environ['DEMO_TOKEN'], 'correct-horse' + '-battery-staple')"
    said = run_code(code, network=["api.example"], secrets=["demo"]).text.split()
    assert said[0].startswith("ringfence_") and said[1] == "[redacted]"
    with pytest.raises(Unavailable, match="there is no network"):
        run_code(code, secrets=["demo"])
    with pytest.raises(Unavailable, match="there is no secret 'other'"):
        run_code(code, network=["api.example"], secrets=["other"])
    with pytest.raises(TypeError, match="secrets are named in a list"):
        run_code(code, secrets="demo")


def test_a_policy_of_the_users_own_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\npolicy: {preset: none}\n")
    gateways.write(tmp_path, "nonsense: true", "other.yaml")
    monkeypatch.setenv("RINGFENCE_CONFIG", str(path))
    engine.close()
    with pytest.raises(Refused, match="Refused by policy"):
        run_code("1")
    engine.close()
    monkeypatch.setenv("RINGFENCE_CONFIG", str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigError, match="does not exist"):
        run_code("1")
    monkeypatch.delenv("RINGFENCE_CONFIG")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    for _ in range(2):
        with pytest.raises(StoreError):
            run_code("1")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert run_code("print(1)").text == "1\n", "what failed to open is tried again"


async def test_an_asynchronous_callback_that_raises_ends_the_run() -> None:
    async def refuse(text: str) -> None:
        raise KeyError(text)

    began = time.monotonic()
    with pytest.raises(KeyError):
        await run_code_async("print('x', flush=True)\nimport time; time.sleep(600)", on_stdout=refuse, timeout=600)
    assert time.monotonic() - began < 300


def test_the_same_failure_again_and_again_is_no_loop_of_a_model() -> None:
    assert {run_code("1/0").status for _ in range(205)} == {"failed"}


def test_nothing_is_left_for_the_next() -> None:
    run_code("open('left', 'w').write('x'); import os; os.environ['LEFT'] = 'x'")
    seen = run_code("import os; print(sorted(os.listdir()), 'LEFT' in os.environ)")
    assert seen.text == "['input', 'output', 'tmp'] False\n"
    assert (seen.results, seen.context, seen.step, seen.alive) == ([], None, None, True)


async def test_the_same_awaited() -> None:
    heard: list[str] = []

    async def hear(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    runs = [
        run_code_async(f"import os; print({n}, os.environ['A'])", envs={"A": "b"}, on_stdout=hear) for n in range(5)
    ]
    assert [execution.text for execution in await asyncio.gather(*runs)] == [f"{n} b\n" for n in range(5)]
    assert sorted(heard) == [f"{n} b\n" for n in range(5)]


async def test_cancelling_ends_the_box(state: Path) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(
        run_code_async("print(1, flush=True); import time; time.sleep(600)", on_stdout=lambda _: started.set())
    )
    await asyncio.wait_for(started.wait(), tooling.PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await run_code_async("print(2)")).text == "2\n"
    # Whoever cancelled waits for the box to be gone, not for the record to be written.
    async with asyncio.timeout(tooling.PATIENCE):
        while "cancelled" not in [record["reason_code"] for record in gateways.finished(state)]:
            await asyncio.sleep(0.05)


async def test_what_a_cancelled_run_did_until_then_is_on_record(state: Path, tmp_path: Path) -> None:
    """An agent can cancel its call as soon as its program has planted something."""
    project = tmp_path / "project"
    project.mkdir()
    code = "open('/srv/p/.envrc', 'w').write('x')\nprint(1, flush=True)\nimport time; time.sleep(600)"
    started = asyncio.Event()
    task = asyncio.create_task(
        run_code_async(code, mounts=[Mount(str(project), "/srv/p", "rw")], on_stdout=lambda _: started.set())
    )
    await asyncio.wait_for(started.wait(), tooling.PATIENCE)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await tooling.until(lambda: [r for r in gateways.finished(state) if r["facts"]["effect"] == "unknown"])
    record = next(r for r in gateways.finished(state) if r["facts"]["effect"] == "unknown")
    facts = record["facts"]
    assert (facts.get("planted"), facts["ended"], record["reason_code"]) == (
        ["/srv/p/.envrc"],
        "cancelled",
        "cancelled",
    )
    assert (facts["output"]["stdout_bytes"], facts["denials"], facts["network"]["allowed"]) == (2, {}, [])
    assert facts["usage"]["cpu_ms"] is not None and facts["isolation"]["mounts"] == [{"at": "/srv/p", "mode": "rw"}]


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
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
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
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert shown.stdout.strip() == "[]"


def test_a_program_that_runs_once_loads_nothing_that_sessions_need() -> None:
    code = """
import sys, ringfence
ringfence.run_code('1')
print(sorted(name for name in sys.modules if name.startswith(('ringfence.sdk.', 'ringfence.sandbox.'))))"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    loaded = set(eval(shown.stdout))
    assert {name for name in loaded if ".sdk." in name} == {
        f"ringfence.sdk.{n}" for n in ("engine", "execution", "once")
    }
    assert not {name for name in loaded if name.rpartition(".")[2] in ("workspace", "snapshots", "volumes", "watching")}


def test_one_engine_serves_all() -> None:
    run_code("1")
    assert engine.engine() is engine.engine()
    before = threading.active_count()
    for _ in range(10):
        run_code("1")
    assert threading.active_count() <= before + 4  # those who do what blocks are a few, and none for each run
    assert ringfence.run_code is run_code
