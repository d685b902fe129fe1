"""Sandboxes: real ones. How they are opened, found again, paused, copied, refused, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence import (
    AsyncSandbox,
    Denied,
    Limits,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    Refused,
    RingfenceError,
    Sandbox,
    SandboxNotFound,
    SandboxStopped,
    TimedOut,
    Unavailable,
    VolumeMount,
)
from ringfence.core.box import Mount
from ringfence.sdk import engine
from tests import gateways, tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]


# ── life ──


def test_one_that_is_only_made_is_opened_by_its_first_use(state: Path) -> None:
    before = len(Sandbox.list())
    lazy = AsyncSandbox()
    assert len(Sandbox.list()) == before
    with pytest.raises(Unavailable, match="no id before it is used"):
        _ = lazy.id
    box = Sandbox(metadata={"job": "7"})
    assert box.metadata == {"job": "7"}
    assert box.id in [info.id for info in Sandbox.list()], "a synchronous one is opened for its id"
    assert box.kill() is True and box.kill() is False


async def test_several_first_uses_at_once_open_one() -> None:
    before = len(await AsyncSandbox.list())
    async with AsyncSandbox() as box:
        await asyncio.gather(*(box.run_code("1") for _ in range(4)), box.files.list())
        assert len(await AsyncSandbox.list()) == before + 1


def test_another_process_finds_it_by_its_id(sandbox: Sandbox) -> None:
    sandbox.run_code("shared = 'across'")
    code = f"import ringfence; print(ringfence.Sandbox.connect({sandbox.id!r}).run_code('shared').text)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert shown.stdout == "'across'\n", shown.stderr


def test_connecting_takes_over_what_it_was_made_with() -> None:
    with Sandbox.create(timeout=0.5, metadata={"a": "b"}, limits=Limits(processes=20)) as made:
        other = Sandbox.connect(made.id)
        assert (other.id, other.metadata) == (made.id, {"a": "b"})
        assert other.run_code("while True: pass").status == "timeout"
        assert other.info().limits["processes"] == 20
        other.set_timeout(60)
        assert other.run_code("import time; time.sleep(0.7)").status == "success"


def test_pausing_stands_still_and_loses_nothing() -> None:
    with Sandbox.create() as box:
        box.run_code("n = 0")
        for _ in range(3):
            assert box.pause().state == "paused"
            assert box.run_code("n += 1\nn").status == "success"
        box.pause()
        assert box.info().state == "paused"
        assert box.resume().state == "running"
        assert box.run_code("n").text == "3"


def test_one_that_is_not_to_resume_by_itself_says_so() -> None:
    with Sandbox.create(auto_resume=False) as box:
        box.pause()
        with pytest.raises(Refused, match=box.id) as refused:
            box.run_code("1")
        assert refused.value.reason_code == "session_paused"
        box.resume()
        assert box.run_code("1").text == "1"


def test_idle_and_lifetime_are_clocks_of_the_box() -> None:
    with Sandbox.create(idle=0.2, lifetime=100) as box:
        box.run_code("1")
        tooling.wait_until(lambda: box.info().state == "paused")
        box.resume()
    with Sandbox.create(lifetime=100) as box:
        box.set_lifetime(0.3)
        tooling.wait_until(lambda: box.info().state == "stopped")
        assert box.info().why == "lifetime"
        with pytest.raises(SandboxStopped, match=box.id):
            box.run_code("1")


def test_the_end_is_told_and_nothing_can_be_done_afterwards() -> None:
    box = Sandbox.create()
    assert box.kill() is True
    with pytest.raises(SandboxStopped, match=box.id):
        box.run_code("1")
    with pytest.raises(SandboxStopped):
        box.files.write("a", "b")
    with pytest.raises(SandboxStopped, match="closed"):
        Sandbox.connect(box.id)
    assert (box.info().state, box.info().why) == ("stopped", "closed")
    assert box.id in {info.id for info in Sandbox.list(ended=True)} - {info.id for info in Sandbox.list()}
    assert box.kill() is False
    unused = Sandbox()
    assert unused.kill() is False
    with pytest.raises(SandboxStopped, match="killed before it was used"):
        unused.run_code("1")


def test_killing_ends_what_runs() -> None:
    box, up = Sandbox(), threading.Event()
    ended: list[Any] = []

    def work() -> None:
        try:
            code = "print(1, flush=True)\nimport time; time.sleep(600)"
            ended.append(box.run_code(code, on_stdout=lambda _: up.set(), timeout=600))
        except RingfenceError as exc:
            ended.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(120)
    box.kill()
    thread.join(120)
    assert not thread.is_alive() and len(ended) == 1
    assert getattr(ended[0], "status", "unknown") != "success"


def test_it_outlives_the_program_that_made_it_and_a_block_ends_it() -> None:
    code = """
import ringfence
stays = ringfence.Sandbox.create()
with ringfence.Sandbox.create() as gone:
    gone.run_code("1")
print(stays.id, gone.id)"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    stays, gone = shown.stdout.split()
    found = Sandbox.connect(stays)
    assert found.run_code("1").text == "1"
    found.kill()
    with pytest.raises(SandboxStopped):
        Sandbox.connect(gone)


# ── what others start from ──


def test_a_snapshot_has_the_files_and_no_memory() -> None:
    with Sandbox.create() as box:
        box.run_code("memory = 1")
        box.files.write("data/a", "kept")
        taken = box.snapshot("first")
        box.files.write("data/a", "changed")
    assert (taken.name, taken.files) == ("first", 1)
    assert taken.id in [each.id for each in Sandbox.snapshots()]
    for reference in (taken, taken.id, "first"):
        with Sandbox.create(snapshot=reference) as other:
            assert other.files.read("data/a") == "kept"
            assert other.run_code("memory").status == "failed"
            assert other.info().snapshot == taken.id
    Sandbox.remove_snapshot(taken)
    with pytest.raises(NotFound):
        Sandbox.create(snapshot="first")


def test_forks_begin_alike_and_go_apart() -> None:
    with Sandbox.create(metadata={"of": "me"}) as box:
        box.files.write("a", "1")
        children = box.fork(2)
        assert len({box.id, *(child.id for child in children if isinstance(child, Sandbox))}) == 3
        for number, child in enumerate(children):
            assert isinstance(child, Sandbox)
            child.files.write("a", f"child {number}")
        assert [child.files.read("a") for child in children if isinstance(child, Sandbox)] == ["child 0", "child 1"]
        assert box.files.read("a") == "1"
        randoms = {
            c.run_code("import os; os.urandom(8).hex()").text for c in (box, *children) if isinstance(c, Sandbox)
        }
        assert len(randoms) == 3
        for child in children:
            assert isinstance(child, Sandbox) and child.kill()


def test_a_volume_outlives_its_sandboxes() -> None:
    made = Sandbox.create_volume("books", max_bytes=8 << 20)
    assert (made.name, made.max_bytes) == ("books", 8 << 20)
    with Sandbox.create(volumes={"/workspace/books": "books"}) as box:
        box.files.write("books/one", "kept")
    with Sandbox.create(volumes=[VolumeMount("books", "/workspace/read", "ro")]) as box:
        assert box.files.read("read/one") == "kept"
        assert box.run_code("open('read/two', 'w')").status == "failed"
    assert [volume.files for volume in Sandbox.volumes() if volume.name == "books"] == [1]
    Sandbox.remove_volume("books")
    with pytest.raises(NotFound):
        Sandbox.create(volumes={"/workspace/books": "books"})


def test_what_a_step_may_have_left_in_a_volume_is_no_step_without_effect() -> None:
    Sandbox.create_volume("shelf", max_bytes=8 << 20)
    with Sandbox.create(volumes={"/workspace/shelf": "shelf"}) as box:
        facts = box.run_code("open('shelf/one', 'w').write('x')").facts
        assert facts["effect"] != "none" and "nothing outside" not in facts["explanation"]
    with Sandbox.create(volumes=[VolumeMount("shelf", "/workspace/shelf", "ro")]) as box:
        assert box.run_code("1").facts["effect"] == "none"
    Sandbox.remove_volume("shelf")


# ── what is refused ──


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"timeout": -1}, ValueError, "timeout must be a number from 0.001 to 86400"),
        ({"lifetime": "5"}, ValueError, "lifetime must be a number"),
        ({"idle": float("inf")}, ValueError, "idle must be a number"),
        ({"limits": Limits(memory_bytes=-1)}, ValueError, "memory_bytes must be"),
        ({"template": "dta"}, Refused, "there is no template"),
        ({"backend": "microsandbox"}, Unavailable, "microsandbox is not built yet"),
        ({"network": ["a b"]}, Refused, "invalid network"),
        ({"network": "nowhere"}, Unavailable, "there is no network 'nowhere'"),
        ({"secrets": ["a"]}, Unavailable, "there is no secret 'a'"),
        ({"secrets": "a"}, TypeError, "secrets are named in a list"),
        ({"mounts": ["/srv"]}, ValueError, "mounts: a mapping"),
        ({"netwrok": []}, TypeError, "there is no option netwrok; there are timeout"),
        ({"inputs": {"a": Path("/nonexistent/a")}}, Unavailable, "No such file"),
        ({"envs": {"A=B": "c"}}, Refused, "env"),
        ({"snapshot": "nowhere"}, NotFound, "nowhere"),
        ({"volumes": {"/workspace/x": "nowhere"}}, NotFound, "nowhere"),
    ],
)
def test_what_makes_no_sense_is_told_when_it_is_made(options: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Sandbox.create(**options)


def test_an_id_that_is_not_yours_does_not_exist() -> None:
    with pytest.raises(SandboxNotFound, match="box_nowhere"):
        Sandbox.connect("box_nowhere")
    with pytest.raises(TypeError, match="there is no option contxt"):
        Sandbox().run_code("1", contxt="x")  # type: ignore[call-arg]


async def test_an_answer_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> Any:
        await asyncio.sleep(600)

    box = AsyncSandbox.over(never, "box_x", {"request_timeout": 0.05})
    with pytest.raises(TimedOut, match=r"pause_session of sandbox box_x had no answer after 0\.05 s") as ended:
        await box.pause()
    assert isinstance(ended.value, TimeoutError)


@contextmanager
def configured(folder: Path, text: str) -> Iterator[Path]:
    """The state folder of a configuration that is in force meanwhile."""
    path = gateways.write(folder, f"gateway: {{state: ./state}}\n{text}")
    engine.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_CONFIG", str(path))
        yield folder / "state"
        engine.close()


def test_policy_has_a_say_in_every_step(tmp_path: Path) -> None:
    rules = "policy: {rules: [{id: no-shell, action: deny, tool_patterns: ['run_shell']}]}"
    with configured(tmp_path, rules) as state:
        with Sandbox() as box:
            assert box.run_code("1").text == "1"
            with pytest.raises(Denied, match="no-shell"):
                box.commands.run("ls")
        told = [(body["call"]["tool"], body["status"]) for body in gateways.finished(state)]
    assert told == [
        ("open_session", "success"),
        ("execute_python", "success"),
        ("run_shell", "denied"),
        ("close_session", "success"),
    ]


def test_where_there_is_no_room_the_limit_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with configured(tmp_path, "sandbox: {max_sessions: 2, session_queue_seconds: 0.2}"), Sandbox.create() as box:
        children = box.fork(2)
        (first,) = [child for child in children if isinstance(child, Sandbox)]
        assert [type(child) for child in children if child is not first] == [QuotaExceeded]
        with pytest.raises(QuotaExceeded, match="max_sessions") as full:
            Sandbox.create()
        assert full.value.reason_code == "capacity"
        assert len(Sandbox.list()) == 2
        first.kill()
        with Sandbox.create() as other:
            assert other.run_code("1").text == "1"


def test_when_the_keeper_dies_nobody_knows_and_nothing_is_lost_in_silence(tmp_path: Path) -> None:
    with configured(tmp_path, "") as state:
        box, up = Sandbox.create(), threading.Event()
        ended: list[Any] = []

        def work() -> None:
            try:
                code = "print(1, flush=True)\nimport time; time.sleep(600)"
                box.run_code(code, on_stdout=lambda _: up.set(), timeout=600)
            except RingfenceError as exc:
                ended.append(exc)

        thread = threading.Thread(target=work)
        thread.start()
        assert up.wait(120)
        os.kill(json.loads((state / "keeper/address").read_text())["process"], signal.SIGKILL)
        thread.join(120)
        assert [type(exc) for exc in ended] == [OutcomeUnknown]
        with pytest.raises(SandboxStopped, match=box.id):
            box.run_code("1")
        assert (box.info().state, box.info().why) == ("stopped", "keeper_died")
        with Sandbox.create() as other:
            assert other.run_code("1").text == "1", "the next one is with the next keeper"


def test_files_can_be_given_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("from a file")
    with Sandbox.create(inputs={"a": "text", "b": tmp_path / "b"}, envs={"WHO": "me"}) as box:
        code = "import os\n[open(f'input/{n}').read() for n in sorted(os.listdir('input'))] + [os.environ['WHO']]"
        assert box.run_code(code).text == "['text', 'from a file', 'me']"
        assert box.run_code("open('input/c', 'w')").status == "failed"


def test_a_forked_child_has_a_way_of_its_own(sandbox: Sandbox) -> None:
    sandbox.run_code("f = 1")
    code = f"""
import os, ringfence
box = ringfence.Sandbox.connect({sandbox.id!r})
pid = os.fork()
print(box.run_code("f").text, flush=True)
if pid: os.waitpid(pid, 0)"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    shown = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False)
    assert shown.stdout == "1\n1\n", shown.stderr


def test_what_came_to_be_where_programs_of_the_host_look_is_told(state: Path, tmp_path: Path) -> None:
    (tmp_path / ".vscode").mkdir()
    with Sandbox.create(mounts=[Mount(str(tmp_path), "/project", "rw")]) as sandbox:
        assert "planted" not in sandbox.run_code("open('/project/main.py', 'w').close()").facts
        assert sandbox.run_code("open('/project/.envrc', 'w').close()").facts["planted"] == ["/project/.envrc"]
        assert "planted" not in sandbox.run_code("1").facts
        ran = sandbox.commands.run("mkdir -p /project/.claude; touch /project/.vscode/tasks.json")
        assert ran.exit_code == 1 and ran.facts["planted"] == ["/project/.claude"]
        # It was not there when the box was made, and is not held in it.
        assert sandbox.commands.run("echo more > /project/.envrc").facts["planted"] == ["/project/.envrc"]
        ran = sandbox.commands.run("mkdir /project/.claude/hooks")
        assert ran.facts["planted"] == ["/project/.claude"]


def test_what_a_program_of_the_host_replaced_is_no_longer_held_and_is_told_of(state: Path, tmp_path: Path) -> None:
    (tmp_path / ".envrc").write_text("old")
    with Sandbox.create(mounts=[Mount(str(tmp_path), "/project", "rw")]) as sandbox:
        assert sandbox.commands.run("echo evil > /project/.envrc").exit_code != 0
        (tmp_path / "new").write_text("new")
        os.replace(tmp_path / "new", tmp_path / ".envrc")
        # Between two steps nobody can tell who did it: what an earlier step left could have.
        assert sandbox.commands.run("true").facts["planted"] == ["/project/.envrc"]
        assert "planted" not in sandbox.commands.run("true").facts
        ran = sandbox.commands.run("echo evil > /project/.envrc")
        assert ran.exit_code == 0 and ran.facts["planted"] == ["/project/.envrc"]


def test_a_copy_of_what_is_not_there_makes_no_folders_and_never_ran(state: Path, tmp_path: Path) -> None:
    with Sandbox.create(mounts=[Mount(str(tmp_path), "/project", "rw")]) as sandbox:
        with pytest.raises(NotFound):
            sandbox.files.copy("missing", "/project/new/folder/copy")
        assert list(tmp_path.iterdir()) == []
        ended = gateways.records(state, kind="finished")[-1]
        assert (ended["status"], ended["reason_code"], ended["effect"]) == ("validation_failure", "not_found", "none")
        sandbox.files.write("there", "x")
        sandbox.files.copy("there", "/project/new/folder/copy")
        assert (tmp_path / "new" / "folder" / "copy").read_text() == "x"


def test_what_a_volume_could_not_keep_is_said_when_its_sandbox_is_killed(state: Path) -> None:
    Sandbox.create_volume("full", max_bytes=16 << 20)
    box = Sandbox.create(volumes={"/workspace/v": "full"})
    box.run_code("open('/workspace/v/result', 'w').write('work')")
    box.run_code("import os; os.makedirs('/workspace/v/' + 'd/' * 66)")
    with pytest.warns(RuntimeWarning, match="volumes were not saved"):
        assert box.kill()
    facts = gateways.finished(state)[-1]["facts"]
    assert "volumes were not saved" in facts["not_kept"][0] and facts["session"]["id"] == box.id
