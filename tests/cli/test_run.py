"""`ringfence run`: real programs in real boxes; what is printed where, what is kept, and what the exit code says."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import run as boxed
from ringfence.cli.streams import Sink, StdinPipe
from ringfence.core.box import Ran
from ringfence.core.model import Outcome, Status
from tests import boxing, gateways, tooling


@pytest.fixture(scope="module", autouse=True)
def _boxes() -> None:
    boxing.need_boxes()


def run(*words: str | Path, stdin: str | bytes = "", **more: Any) -> subprocess.CompletedProcess[str]:
    command = gateways.ringfence("run", *words)
    given = {"text": True, "encoding": "utf-8", "errors": "surrogateescape", "input": stdin, "timeout": 300, **more}
    ended = subprocess.run(command, capture_output=True, check=False, **given)
    assert "Traceback" not in ended.stderr or "most recent call last" in ended.stderr
    return ended  # type: ignore[no-any-return]


def last(own_home: Path) -> dict[str, Any]:
    return gateways.finished(own_home / ".local/state/ringfence")[-1]


# ── programs ──


def test_python_with_arguments_stdin_and_an_exit_code_of_its_own(tmp_path: Path, own_home: Path) -> None:
    file = tmp_path / "sum.py"
    file.write_text("import sys\nprint(sum(map(int, sys.stdin.read().split())), sys.argv[1:], __name__)\nsys.exit(7)\n")
    ended = run(file, "--timeout", "20", "--", "-x", "--timeout", stdin="1 2 3")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "6 ['-x', '--timeout'] __main__\n", "")
    record = last(own_home)
    assert (record["call"]["tool"], record["call"]["origin"], record["status"]) == ("execute_python", "cli", "failed")
    assert gateways.run("audit", "explain", "last", cwd=tmp_path).stdout.startswith("execute_python, call_")


def test_scripts_are_run_by_who_they_are_for(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('echo "$@" from $0; pwd')
    assert run(tmp_path / "a.sh", "--", "1", "2").stdout == "1 2 from /workspace/input/a.sh\n/workspace\n"
    (tmp_path / "b").write_text("#!/usr/bin/env -S sed -n s/a/b/p\n")
    assert run(tmp_path / "b", "--", "input/b").stdout.startswith("#!/usr/bin/env")


def test_facts_replace_what_is_there_and_are_written_through_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "folder").symlink_to(tmp_path)
    for place in (tmp_path / "link", tmp_path / "folder/precious"):
        with pytest.raises(SystemExit) as ended:
            boxed.FactsFile(str(place))
        assert ended.value.code == 2 and "is a link, which is not followed" in capsys.readouterr().err
    second = tmp_path / "second"
    second.hardlink_to(precious)
    boxed.FactsFile(str(second)).write({"a": 1})
    assert (precious.read_text(), json.loads(second.read_text())) == ("precious", {"a": 1})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "link", "precious", "second"]
    boxed.FactsFile("/dev/null").write({})


def test_node_where_it_is_installed(tmp_path: Path) -> None:
    if not Path("/usr/bin/node").exists():
        pytest.skip("no Node under /usr/bin")
    (tmp_path / "a.js").write_text("console.log(process.argv.slice(2).join())")
    assert run(tmp_path / "a.js", "--", "x", "y").stdout == "x,y\n"


def test_a_program_from_stdin_and_a_line_for_the_shell() -> None:
    assert run("-", "--", "a", stdin="import sys; print(sys.argv)").stdout == "['-c', 'a']\n"
    ended = run("--shell", "echo out; echo err >&2; exit 3")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "out\n", "err\n")


def test_a_syntax_error_is_the_programs_own() -> None:
    ended = run("-c", "def f(:")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"


def test_what_goes_in_and_comes_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.csv").write_text("1\n2\n")
    code = "cat input/data/a.csv; echo $WHO; cp input/data/a.csv output/b.csv; echo x > input/y || echo read-only"
    facts = tmp_path / "facts.json"
    files = ("--input", tmp_path / "data", "--output", tmp_path / "out/deep", "--facts", facts)
    ended = run("--shell", code, "--env", "WHO=me", *files)
    assert ended.stdout == "1\n2\nme\nread-only\n"
    assert (tmp_path / "out/deep/b.csv").read_text() == "1\n2\n"
    told = json.loads(facts.read_text())
    assert [entry["path"] for entry in told["inputs"]] == ["/workspace/input/data/a.csv"]
    assert [(entry["path"], entry["bytes"]) for entry in told["files"]] == [("/workspace/output/b.csv", 4)]
    assert told["isolation"]["backend"] == "process" and told["ended"] == "exited"


def test_files_that_are_copied_out_are_an_effect(tmp_path: Path, own_home: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/main.py").write_text("precious")
    facts = tmp_path / "facts.json"
    for code, effect in (("echo evil > output/main.py", "confirmed"), ("true", "none")):
        assert run("--shell", code, "--output", tmp_path / "out", "--facts", facts).returncode == 0
        told = json.loads(facts.read_text())
        assert (told["effect"], last(own_home)["facts"]["effect"]) == (effect, effect)
        assert "no side effect was possible" not in told["explanation"]
    assert (tmp_path / "out/main.py").read_text() == "evil\n"
    run("--shell", "echo evil > output/main.py; false", "--output", tmp_path / "out", "--facts", facts)
    assert json.loads(facts.read_text())["effect"] == "unknown"


def test_what_is_not_copied_out_is_named(tmp_path: Path) -> None:
    code = "ln -s /etc/passwd output/link; echo x > output/.envrc; echo y > output/fine; "
    ended = run("--shell", code, "--output", tmp_path / "out")
    assert ended.stderr.splitlines() == [
        "ringfence: not copied: /workspace/output/.envrc: tools on the host act upon a file of this name by themselves",
        "ringfence: not copied: /workspace/output/link: it is a symbolic link",
    ]
    many = run("--shell", "for n in $(seq 30); do mkfifo output/$n; done", "--output", tmp_path / "out")
    assert len(many.stderr.splitlines()) == 11 and many.stderr.endswith("not copied: 20 more; --facts names them\n")
    assert run("--shell", code).stderr == "", "nothing was to be copied"


def test_nothing_that_a_program_leaves_replaces_what_rules_over_it(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: []\n")
    path = tmp_path / "config.yaml"
    path.write_text("version: 1\ngateway: {state: ./state}\npolicy: {files: [rules.yaml]}\n")
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"code": "1"}\n')
    for place in (".", "state", "state/checkpoints"):
        for what in (("--shell", "echo > output/rules.yaml"), ("--batch", batch)):
            ended = run(*what, "--output", tmp_path / place, "--config", path)
            assert ended.returncode == 2 and "what comes out of a box could replace the" in ended.stderr
            assert "name another folder" in ended.stderr
    assert (tmp_path / "rules.yaml").read_text() == "rules: []\n"
    code = ("--shell", "echo x > output/rules.yaml")
    assert run(*code, "--output", tmp_path / "out", "--config", path).returncode == 0
    assert (tmp_path / "out/rules.yaml").read_text() == "x\n"


@pytest.mark.parametrize("place", ["out/facts.json", "link/facts.json", "out/sub/../facts.json"])
def test_facts_do_not_lie_where_the_program_could_write_them(tmp_path: Path, place: str) -> None:
    (tmp_path / "out/sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    code = "open('output/facts.json', 'w').write('{}')"
    ended = run("-c", code, "--output", tmp_path / "out", "--facts", tmp_path / place)
    assert ended.returncode == 2 and "is in the folder of --output" in ended.stderr
    assert not (tmp_path / "out/facts.json").exists()


def test_output_is_the_very_bytes() -> None:
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)))"
    ended = subprocess.run(gateways.ringfence("run", "-c", code), capture_output=True, check=True)
    assert ended.stdout == bytes(range(256))


def test_output_comes_as_it_is_written() -> None:
    code = "import time; print('first', flush=True); time.sleep(600)"
    with tooling.start_process(gateways.ringfence("run", "-c", code)) as started:
        started.wait_for("first")
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(60) == 143


def test_nothing_of_the_callers_is_there(tmp_path: Path) -> None:
    code = "import os; print('SECRET' in os.environ, os.path.exists('/home'), os.listdir('/home'), os.getuid())"
    ended = run("-c", code, env={**os.environ, "SECRET": "x"})
    assert ended.stdout == "False True ['user'] 1000\n"


# ── endings ──


@pytest.mark.parametrize(
    ("words", "code", "sentence", "status"),
    [
        (
            ("-c", "import time; time.sleep(600)", "--timeout", "0.5"),
            124,
            "terminated by timeout after 0.5 s",
            "timeout",
        ),
        (
            ("-c", "x = b'x' * (90 << 20)\nwhile True: pass", "--memory", "64"),
            137,
            "killed for using more than 64 MiB of memory",
            "killed",
        ),
        (("-c", "import os; os.kill(os.getpid(), 11)"), 139, "ended by signal 11 (SIGSEGV)", "failed"),
    ],
    ids=["timeout", "memory", "signal"],
)
def test_the_exit_code_tells_how_it_ended(
    own_home: Path, words: tuple[str, ...], code: int, sentence: str, status: str
) -> None:
    ended = run(*words)
    assert ended.returncode == code
    assert ended.stderr.startswith("ringfence: ") and ended.stderr.count("\n") == 1
    assert sentence.replace("0.5 s", "") in ended.stderr
    assert last(own_home)["status"] == status


def test_limits_can_be_set_for_one_run() -> None:
    code = "try: open('x', 'wb').write(b'x' * (3 << 20))\nexcept OSError as e: print(e.errno)"
    assert run("-c", code, "--disk", "2").stdout == "28\n"
    assert run("-c", code, "--disk", "8").stdout == ""


def test_a_policy_refuses_with_126(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\npolicy: {preset: none}\n")
    ended = run("-c", "print(1)", "--config", path, "--facts", "-")
    assert (ended.returncode, ended.stdout) == (126, "")
    assert "Refused by policy: denied: no rule matched" in ended.stderr and '"ended": "policy"' in ended.stderr
    assert gateways.finished(tmp_path / "state")[-1]["status"] == "denied"
    asking = gateways.write(tmp_path, "gateway: {state: ./state, approval_wait_seconds: 0}\npolicy: {preset: strict}\n")
    ended = run("-c", "print(1)", "--config", asking)
    assert ended.returncode == 126 and "apr_" in ended.stderr


def test_a_configuration_in_this_folder_is_not_taken(tmp_path: Path) -> None:
    gateways.write(tmp_path, "policy: {preset: none}")
    assert run("-c", "print(1)", cwd=tmp_path).stdout == "1\n"


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("-c", "1", "--allow", "http://example.org"), 2, "--allow http://example.org: "),
        (("-c", "1", "--allow", "example.org:0"), 2, "--allow example.org:0: '0' is not a port"),
        (("-c", "1", "--backend", "microsandbox"), 125, "sandbox backend microsandbox is not built yet"),
        (("-c", "1", "--config", "missing.yaml"), 2, "missing.yaml: there is no such file"),
        (("-c", "1", "--template", "dta"), 2, "there is no template"),
        (("-c", "1", "--memory", "-5"), 2, "Invalid value for '--memory'"),
        (("-c", "1", "--memory", "much"), 2, "'much' is not a size: write MiB as a plain number, as in 512, or"),
        (("-c", "1", "--memory", "8M"), 2, "Invalid value for '--memory': 8M is too small: 16M is the least"),
        (("-c", "1", "--disk", "64K"), 2, "Invalid value for '--disk': 64K is too small: 1M is the least"),
        (("-c", "1", "--disk", "17T"), 2, "Invalid value for '--disk': 17T is too large: 16777216M is the most"),
        (("-c", "1", "--pids", "0"), 2, "Invalid value for '--pids'"),
        (("-c", "1", "--disk", "99999999999"), 2, "Invalid value for '--disk'"),
        (("-c", "1", "--timeout", "nan"), 2, "--timeout"),
        (("-c", "1", "--facts", "/nonexistent/facts"), 2, "--facts /nonexistent/facts: No such file"),
        (("-c", "1", "--input", "missing"), 2, "--input missing: No such file"),
        ((), 2, "nothing to run"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(words: tuple[str, ...], code: int, problem: str) -> None:
    ended = run(*words)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert problem in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(("size", "number"), [("3", 3 << 20), ("3M", 3 << 20), ("1.5mib", 3 << 19), ("0.5G", 1 << 29)])
def test_a_size_may_have_a_unit(size: str, number: int) -> None:
    ended = run(
        "-c", "import os; s = os.statvfs('.'); print(s.f_blocks * s.f_frsize)", "--disk", size, "--memory", "1G"
    )
    assert (ended.returncode, ended.stdout) == (0, f"{number}\n"), ended.stderr


def test_a_state_that_cannot_be_written_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run("-c", "print(1)", env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "file")})
    assert (ended.returncode, ended.stdout) == (125, "")
    assert ended.stderr.startswith("ringfence: ") and ended.stderr.count("\n") == 1


def test_an_interrupted_run_leaves_a_cancelled_call(own_home: Path) -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    with tooling.start_process(gateways.ringfence("run", "-c", code)) as started:
        started.wait_for("up")
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(60) == 130
    record = last(own_home)
    assert (record["reason_code"], record["facts"]["ended"], record["effect"]) == ("cancelled", "cancelled", "none")


def test_nobody_reads_any_more(own_home: Path) -> None:
    code = "while True: print('x' * 1000)"
    with subprocess.Popen(gateways.ringfence("run", "-c", code), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
    assert last(own_home)["reason_code"] == "cancelled"


def test_a_stdin_that_never_ends_is_no_matter() -> None:
    reading, writing = os.pipe()
    try:
        ended = subprocess.run(
            gateways.ringfence("run", "-c", "print(1)"), stdin=reading, capture_output=True, timeout=300, check=False
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert (ended.returncode, ended.stdout) == (0, b"1\n")


def test_passwords_of_package_indexes_beside_an_interpreter_are_not_in_a_box(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # boxes are other users
    (tmp_path / "etc").mkdir()
    for name in ("pip.conf", "etc/npmrc", "other"):
        (tmp_path / name).write_text("index-url = https://me:password@index.example")
    shown = run("--tree", tmp_path, "--shell", f"cd {tmp_path} && wc -c pip.conf etc/npmrc other | head -3")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["0", "0", "45"], shown


def test_a_tree_with_credentials_is_refused(tmp_path: Path) -> None:
    home = Path(os.environ["HOME"])
    (home / ".aws").mkdir(parents=True, exist_ok=True)
    refused = run("--tree", home / ".aws", "-c", "pass")
    assert refused.returncode == 2 and "holds credentials of AWS" in refused.stderr


def test_the_file_of_facts_is_never_for_others_to_write(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        boxed.FactsFile(str(tmp_path / "facts.json")).write({})
    finally:
        os.umask(previous)
    assert (tmp_path / "facts.json").stat().st_mode & 0o777 == 0o644


def test_boxes_are_made_under_any_umask(tmp_path: Path) -> None:
    command = gateways.ringfence("run", "--shell", "umask; echo x > output/f", "--output", tmp_path / "out")
    ended = subprocess.run(command, capture_output=True, timeout=300, check=False, umask=0o077)
    assert (ended.returncode, ended.stdout) == (0, b"0022\n"), ended.stderr
    assert (tmp_path / "out" / "f").stat().st_mode & 0o777 == 0o600


def test_a_terminal_gets_nothing_that_it_would_act_upon() -> None:
    code = "print('\\x1b]52;c;AAAA\\x07 \\x9b2J caf\\u00e9')"
    ours, theirs = pty.openpty()
    with subprocess.Popen(gateways.ringfence("run", "-c", code), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break
            if not chunk:
                break
            shown += chunk
        assert process.wait(60) == 0
    os.close(ours)
    assert shown.decode().strip() == "\\x1b]52;c;AAAA\\x07 \\x9b2J café"


# ── parts ──


def test_a_contract_that_redacts_is_shown_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    structured = {"stdout": "a [redacted]\n", "stderr": "e"}
    outcome = Outcome(
        Status.FAILED,
        "exit_status",
        result={"structuredContent": structured},
        facts={"exit_status": 4, "explanation": "x"},
    )
    assert boxed._ended(outcome, Sink(), boxed.FactsFile(None)) == 4
    assert capsys.readouterr() == ("a [redacted]\n", "eringfence: x\n")


@pytest.mark.parametrize(("ended", "code"), [({"exit_status": 0}, 0), ({"exit_status": 255}, 255)])
def test_a_plain_exit_says_nothing(ended: Any, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    seen = boxing.report(**ended)
    status = Status.FAILED if code else Status.SUCCESS
    outcome = Outcome(status, "x", result={}, ran=Ran(boxing.fake()[0].provision.limits, seen))
    assert boxed._ended(outcome, Sink(), boxed.FactsFile(None)) == code
    assert capsys.readouterr() == ("", "")


def test_output_is_written_in_order_and_a_broken_pipe_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    sink = Sink()
    for number in range(100):
        sink.tell("stdout", f"{number}\n".encode())
    sink.close()
    assert capfd.readouterr().out.split() == [str(number) for number in range(100)]
    assert sink.heard and not sink.broken


def test_stdin_of_a_terminal_or_none_is_not_passed_on() -> None:
    code = "from ringfence.cli.streams import StdinPipe; print(StdinPipe.there())"
    for stdin, there in ((subprocess.DEVNULL, True), (subprocess.PIPE, True)):
        with subprocess.Popen([sys.executable, "-c", code], stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
            assert process.communicate()[0].strip() == str(there)
    closed = subprocess.run(
        ["sh", "-c", f'exec {sys.executable} -c "{code}" <&-'], capture_output=True, text=True, check=True
    )
    assert closed.stdout.strip() == "False"
    assert StdinPipe.__doc__
