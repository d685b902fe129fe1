"""Commands in a sandbox: waited for, and in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ringfence import AsyncSandbox, Limits, NotFound, Refused, Sandbox, TimedOut, run_code
from tests import tooling

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]


# ── waited for ──


def test_a_command_that_fails_is_a_result(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code, done.status) == ("out\n", "err\n", 3, "failed")
    assert done.facts["exit_status"] == 3
    assert sandbox.commands.run(["printf", "%s|", "a b", "c"]).stdout == "a b|c|"


def test_it_has_the_files_and_what_it_is_given(sandbox: Sandbox) -> None:
    sandbox.files.write("sub/in", "from a file\n")
    assert sandbox.commands.run("cat in; pwd", cwd="sub").stdout == "from a file\n/workspace/sub\n"
    assert sandbox.commands.run("cat", stdin="typed").stdout == "typed"
    assert sandbox.commands.run("echo $WHO", envs={"WHO": "me"}).stdout == "me\n"
    assert sandbox.commands.run("cat").stdout == ""


def test_its_time_is_limited_and_so_says_its_exit_code(sandbox: Sandbox) -> None:
    for seconds in tooling.LONGER:
        slow = sandbox.commands.run("echo so far; sleep 600", timeout=seconds)
        if slow.stdout:
            break
    assert (slow.exit_code, slow.status, slow.stdout) == (124, "timeout", "so far\n")


def test_output_is_told_as_it_comes_in_the_thread_that_waits(sandbox: Sandbox) -> None:
    heard: list[Any] = []
    sandbox.commands.run(
        "for n in 1 2 3; do echo é $n; echo $n >&2; sleep 0.05; done",
        on_stdout=lambda text: heard.append(("out", text, threading.current_thread())),
        on_stderr=lambda text: heard.append(("err", text, threading.current_thread())),
    )
    assert "".join(text for stream, text, _ in heard if stream == "out") == "é 1\né 2\né 3\n"
    assert "".join(text for stream, text, _ in heard if stream == "err") == "1\n2\n3\n"
    assert {thread for _, _, thread in heard} == {threading.main_thread()}


def test_a_terminal_is_one(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("test -t 0 && test -t 1 && stty size", pty=(100, 30))
    assert (done.stdout.strip(), done.exit_code) == ("30 100", 0)


# ── in the background ──


def test_a_job_runs_while_nobody_waits(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo one; read line; echo two >&2; exit 4", background=True)
    assert sandbox.run_code("1 + 1").text == "2"
    assert [each.running for each in sandbox.commands.list() if each.pid == job.pid] == [True]
    job.send_stdin("\n")
    done = job.wait()
    assert (done.stdout, done.stderr, done.exit_code, done.status) == ("one\n", "two\n", 4, "failed")
    assert (job.stdout, job.stderr) == ("one\n", "two\n")
    (info,) = [each for each in sandbox.commands.list() if each.pid == job.pid]
    assert (info.running, info.exit_code, info.ended) == (False, 4, "exited")
    assert job.wait().exit_code == 4, "one that is over can still be asked"


def test_waiting_no_longer_leaves_it_running(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("sleep 600", background=True)
    with pytest.raises(TimedOut, match=f"command {job.pid} of sandbox {sandbox.id} still runs after 0.2 s"):
        job.wait(timeout=0.2)
    assert job.kill() is True
    ended = job.wait(timeout=120)
    assert (ended.exit_code, ended.status) == (137, "failed")


def test_what_it_wrote_is_read_without_waiting_and_only_once(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo one; read line; echo $line; echo last >&2", background=True)
    seen, until = "", time.monotonic() + tooling.PATIENCE
    while not seen and time.monotonic() < until:
        seen = job.read()[0]
    assert (seen, job.read()) == ("one\n", ("", ""))
    job.send_stdin("typed\n")
    assert job.wait(timeout=120).stdout == "one\ntyped\n"
    assert job.read() == ("", "")
    assert (job.stdout, job.stderr) == ("one\ntyped\n", "last\n")


def test_input_is_sent_and_ended(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("sort", background=True)
    job.send_stdin("b\n")
    job.send_stdin(b"a\n", eof=True)
    assert job.wait(timeout=120).stdout == "a\nb\n"


def test_a_terminal_gets_another_size(sandbox: Sandbox) -> None:
    watching = "trap 'stty size' WINCH; stty size; echo $TERM; while :; do read line && echo got $line; done"
    job = sandbox.commands.run(watching, background=True, pty=(80, 24))

    def shows(text: str) -> None:
        until = time.monotonic() + tooling.PATIENCE
        while text not in job.stdout and time.monotonic() < until:
            time.sleep(0.01)
        assert text in job.stdout

    shows("24 80\r\nxterm-256color")
    job.resize(100, 30)
    job.send_stdin("\n")
    shows("30 100")
    job.kill()
    plain = sandbox.commands.run("sleep 600", background=True)
    with pytest.raises(Refused, match=r"has no terminal: start it with pty=\(columns, rows\)"):
        plain.resize(100, 30)
    plain.kill()


def test_output_is_iterated_as_it_comes(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo é; read a; echo err >&2; read b; echo out", background=True)
    pieces = []
    for piece in job:
        pieces.append(piece)
        if piece[1] != "out\n":
            job.send_stdin("\n")  # it goes on only when this was heard
    assert "".join(text for stream, text in pieces if stream == "stdout") == "é\nout\n"
    assert [text for stream, text in pieces if stream == "stderr"] == ["err\n"]
    assert len(pieces) >= 3


def test_callbacks_hear_a_job_while_it_is_waited_for(sandbox: Sandbox) -> None:
    heard: list[str] = []
    job = sandbox.commands.run("echo one; sleep 0.1; echo two", background=True, on_stdout=heard.append)
    job.wait()
    assert "".join(heard) == "one\ntwo\n"


def test_another_takes_it_up_by_its_number(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo before; read line; echo $line", background=True)
    other = Sandbox.connect(sandbox.id).commands.connect(job.pid)
    assert other.info.running
    other.send_stdin("after\n")
    assert other.wait(timeout=120).stdout == "before\nafter\n"
    with pytest.raises(NotFound):
        sandbox.commands.connect(99_999)
    assert sandbox.commands.kill(99_999) is False


def test_what_a_handle_shows_grows_while_the_command_runs(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo one; echo err >&2; read line; echo two", background=True)
    tooling.wait_until(lambda: (job.stdout, job.stderr) == ("one\n", "err\n"))
    assert job.read() == ("one\n", "err\n"), "showing it has not taken it away"
    heard: list[str] = []
    job.send_stdin("\n")
    tooling.wait_until(lambda: job.stdout == "one\ntwo\n")
    job.wait(timeout=120, on_stdout=heard.append)
    assert (heard, job.stdout) == (["two\n"], "one\ntwo\n")


def test_another_handle_sees_what_came_before(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("echo before; read line; echo after", background=True)
    tooling.wait_until(lambda: job.stdout == "before\n")
    other = Sandbox.connect(sandbox.id).commands.connect(job.pid)
    assert other.stdout == "before\n"
    job.send_stdin("\n")
    assert "".join(text for _, text in other) == "before\nafter\n", "an iteration begins with what was only shown"
    assert other.stdout == "before\nafter\n"


async def test_what_a_handle_shows_grows_while_it_is_awaited(state: Path) -> None:
    async with AsyncSandbox() as box:
        job = await box.commands.run("echo one; read line; echo two", background=True)
        await tooling.until(lambda: job.stdout == "one\n")
        waiting = asyncio.create_task(job.wait())
        await job.send_stdin("\n")
        assert (await waiting).stdout == "one\ntwo\n" == job.stdout
        stopped = await box.commands.run("sleep 600", background=True)
    assert stopped.stdout == "", "a handle of a command that is gone shows what it saw"


def test_a_timeout_ends_a_job_too(sandbox: Sandbox) -> None:
    job = sandbox.commands.run("sleep 600", background=True, timeout=0.3)
    ended = job.wait(timeout=120)
    assert (ended.exit_code, ended.status) == (124, "timeout")


async def test_the_same_awaited(state: Path) -> None:
    async with AsyncSandbox() as box:
        job = await box.commands.run("for n in 1 2 3; do echo $n; sleep 0.05; done; cat", background=True)
        heard: list[str] = []
        waiting = asyncio.create_task(job.wait(on_stdout=heard.append))
        await asyncio.sleep(0.3)
        await job.send_stdin("x", eof=True)
        assert (await waiting).stdout == "1\n2\n3\nx" == "".join(heard)
        again = await box.commands.run(["sh", "-c", "echo a; echo b"], background=True)
        assert "".join([text async for _, text in again]) == "a\nb\n"
        both = await asyncio.gather(box.commands.run("sleep 0.1; echo x"), box.commands.run("echo y"))
        assert [each.stdout for each in both] == ["x\n", "y\n"]


async def test_giving_up_waiting_leaves_it_running(state: Path) -> None:
    async with AsyncSandbox() as box:
        job = await box.commands.run("read line; echo done", background=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await job.wait()
        await job.send_stdin("\n")
        assert (await job.wait()).stdout == "done\n"


# ── Bytes, and output that is cut ──


def test_output_as_bytes_is_what_was_written(sandbox: Sandbox) -> None:
    heard: list[bytes] = []
    done = sandbox.commands.run("printf '\\377\\000\\n'; printf '\\376' >&2; exit 4", output="bytes")
    assert (done.stdout, done.stderr, done.exit_code, done.truncated) == (b"\xff\x00\n", b"\xfe", 4, False)
    again = sandbox.commands.run("printf '\\303'; sleep 0.1; printf '\\251'", output="bytes", on_stdout=heard.append)
    assert (again.stdout, b"".join(heard)) == ("é".encode(), "é".encode())
    assert all(isinstance(piece, bytes) for piece in heard)
    with pytest.raises(ValueError, match="into a file"):
        sandbox.commands.run("true", background=True, output="bytes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="text or bytes"):
        sandbox.commands.run("true", output="base64")  # type: ignore[call-overload]


def test_output_that_is_cut_says_so_where_the_caller_looks() -> None:
    with Sandbox.create(limits=Limits(capture_bytes=100)) as box:
        assert box.commands.run("seq 1000").truncated is True
        assert box.commands.run("seq 10").truncated is False
        cut = box.commands.run("seq 1000", output="bytes")
        assert cut.truncated and cut.stdout.startswith(b"1\n") and cut.stdout.endswith(b"1000\n")
        assert box.commands.run("seq 1000", background=True).wait().truncated is True
        assert box.run_code("print('x' * 1000)").logs.truncated is True
        assert box.run_code("print('x')").logs.truncated is False
        assert box.run_code("seq 1000", language="bash").logs.truncated is True
    assert run_code("print('x' * 1000)", limits=Limits(capture_bytes=100)).logs.truncated is True
