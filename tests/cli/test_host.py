"""`ringfence host`: what it says of this host, what it says of others, and that it changes nothing unasked."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.cli import host as verb
from ringfence.config.settings import SandboxSettings
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.process.host import diagnosis, remedies
from ringfence.sandbox.process.host.diagnosis import Diagnosis, Finding, StepResult, judge
from ringfence.sandbox.process.host.info import HostInfo
from tests.sandbox.process import refusing
from tests.tooling import ROOT

REFUSED = HostInfo(settings={"kernel.unprivileged_userns_clone": 0})
COMMAND = [sys.executable, "-m", "ringfence.cli.main"]


def command(*words: str, through: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([*through, *COMMAND, *words], capture_output=True, text=True, check=False, env=env)


def told(findings: list[Finding], host: HostInfo) -> Json:
    found = Diagnosis(host, tuple(findings))
    return {
        "user": "alice",
        "works": not found.missing,
        "container": host.engine,
        "options": remedies.options(found.causes, host),
        "findings": [finding.as_json() for finding in findings],
    }


def refused(host: HostInfo = REFUSED) -> Json:
    return told(judge({"user_namespace": StepResult(errno.EPERM, "unshare: Operation not permitted")}, host), host)


# ── What it says ──


def test_it_says_whether_boxes_can_be_made_here() -> None:
    ran = command("host", "--json")
    said = json.loads(ran.stdout)
    assert ran.returncode == (0 if said["works"] else 1), ran.stderr
    if said["works"]:
        assert [(each["name"], each["state"]) for each in said["findings"]][-1] == ("a box", "ok")
    assert {each["state"] for each in said["findings"]} <= {"ok", "weaker", "missing"}
    assert all(each["remedies"] and each["follows"] for each in said["findings"] if each["state"] != "ok")


def test_what_is_missing_comes_with_a_command() -> None:
    shown = verb.text(refused())
    assert "MISSING  user namespaces" in shown and "kernel.unprivileged_userns_clone is 0" in shown
    assert "sudo sysctl -w kernel.unprivileged_userns_clone=1" in shown
    assert shown.endswith(f"No box can be made. `{remedies.fix()}` fixes what can be fixed here.")


def test_in_a_container_all_options_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    host = HostInfo(engine="docker", filtered=True, covered=("/proc/kcore",))
    shown = verb.text(refused(host))
    line = "→ start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    assert shown.count("start the container with") == 1 and line in shown
    assert "--fix" not in shown


def test_what_is_weaker_is_counted() -> None:
    weaker = Finding("memory limits by the kernel", "weaker", "why", "so", "groups", remedies.of("groups", REFUSED))
    shown = verb.text(told([weaker, replace(weaker, name="pids limits by the kernel")], REFUSED))
    assert "weaker: memory limits by the kernel, pids limits by the kernel" in shown
    assert shown.endswith("Boxes can be made; 2 things are weaker than they could be.")


def test_what_a_host_says_cannot_steer_the_terminal() -> None:
    finding = Finding("system", "missing", "Linux \x1b[2J", "so\r", "kernel", ())
    assert "\x1b" not in verb.text(told([finding], REFUSED)) and "\r" not in verb.text(told([finding], REFUSED))


def test_landlock_that_was_given_up_is_weaker() -> None:
    [*_, finding] = judge({"landlock": StepResult(errno.EOPNOTSUPP)}, HostInfo())
    assert verb._accepted(finding, SandboxSettings()).state == "missing"
    assert verb._accepted(finding, SandboxSettings(accept_missing=("landlock",))).state == "weaker"


@pytest.mark.parametrize(
    "words", [("host",), ("run", "-c", "1"), ("init", "--from", "clients.json")], ids=lambda words: words[0]
)
def test_a_real_refusal_names_its_cause_and_what_to_run(words: tuple[str, ...], tmp_path: Path) -> None:
    if any(how.number for how in diagnosis.try_steps().values()):
        pytest.skip("this host refuses something else")
    # A server that keeps data: what it would have of a volume is not the question here.
    memory = {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-memory"]}
    if words[0] == "init":
        (tmp_path / "clients.json").write_text(json.dumps({"mcpServers": {"memory": memory}}))
        words = ("init", "--from", str(tmp_path / "clients.json"), "--output", str(tmp_path / "made.yaml"))
    ran = command(*words, through=(sys.executable, "-I", "-S", refusing.__file__, "namespaces"))
    assert ran.returncode == (1 if words == ("host",) else 125), ran.stderr
    shown = " ".join((ran.stdout + ran.stderr).split())
    assert "maps no ids" not in shown
    assert "user.max_user_namespaces is 0" in shown and "ringfence host --fix" in shown


# ── What it does ──


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The changes that were made: none on this host. It is as root, and after a change nothing is missing."""
    changes: list[str] = []

    def make(change: remedies.Change) -> str:
        changes.append(change.shown)
        return ""

    monkeypatch.setattr(remedies, "make", make)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(HostInfo, "read", lambda *_, **__: REFUSED)
    monkeypatch.setattr(diagnosis, "diagnose", lambda: Diagnosis(REFUSED, (Finding("system", "ok", "Linux"),)))
    monkeypatch.setattr(verb, "_box", _no_box)
    return changes


async def _no_box(sandbox: SandboxSettings, found: Diagnosis) -> Finding:
    return Finding("a box", "ok", "made")


def test_changes_are_shown_made_and_looked_at(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    after = verb._fix(refused(), None, yes=True)
    assert after is not None and after["works"]
    shown = capsys.readouterr().out
    assert made[-1] == "write 1 to /proc/sys/kernel/unprivileged_userns_clone"
    assert "write /etc/sysctl.d/60-ringfence.conf" in shown and f"done: {made[-1]}" in shown
    assert shown.index("To fix it:") < shown.index("done:") < shown.index("Afterwards:")


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_is_asked(made: list[str], monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    asked: list[str] = []

    def ask(shown: str, question: str) -> bool:
        asked.append(shown + question)
        return answer

    monkeypatch.setattr(verb, "confirm", ask)
    if answer:
        verb._fix(refused(), None, yes=False)
    else:
        with pytest.raises(SystemExit):
            verb._fix(refused(), None, yes=False)
    assert bool(made) == answer
    assert "60-ringfence.conf" in asked[0] and "Make these 2 changes?" in asked[0]


def test_without_a_terminal_nothing_is_changed(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.cli.terminal._TERMINAL", "/nothing/of/this/name")
    with pytest.raises(Unavailable, match="no terminal"):
        verb._fix(refused(), None, yes=False)
    assert made == []


def test_whoever_is_not_root_is_told_to_use_sudo(
    made: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        verb._fix(refused(), None, yes=True)
    assert remedies.fix() in capsys.readouterr().err and made == []


def test_a_container_is_not_mended_from_within(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    host = HostInfo(engine="podman", filtered=True)
    assert verb._fix(refused(host), None, yes=True) is None
    assert "when it is started" in capsys.readouterr().out and made == []


def test_where_nothing_is_missing_nothing_is_done(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert verb._fix(told([Finding("system", "ok", "Linux")], REFUSED), None, yes=True) is None
    assert "nothing to fix" in capsys.readouterr().out and made == []


def test_it_is_done_for_whoever_called_sudo(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert verb._user(None) is None, "root itself"
    monkeypatch.setenv("SUDO_UID", "0")
    assert verb._user(None) is None
    monkeypatch.setattr(remedies.User, "named", lambda text: remedies.User(int(text), "alice"))
    monkeypatch.setenv("SUDO_UID", "1000")
    assert verb._user(None) == remedies.User(1000, "alice")
    assert verb._user("1001") == remedies.User(1001, "alice")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        verb._user("1001")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_told_what_that_user_would_be() -> None:
    try:
        nobody = remedies.User.named("nobody")
        said = verb._of_other(nobody)
    except (LookupError, SystemExit):
        pytest.skip("nobody cannot run this installation")
    assert said["user"] == "nobody"
    assert any(finding["name"] == "a user id for each box" for finding in said["findings"])


def test_who_cannot_run_this_installation_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", sys.executable)

    monkeypatch.setattr(subprocess, "run", denied)
    with pytest.raises(SystemExit):
        verb._of_other(remedies.User(os.getuid(), "alice"))
    said = " ".join(capsys.readouterr().err.split())
    assert "alice cannot run this installation" in said and "Permission denied" in said
    assert "Install Ringfence where that user can run it" in said and "have alice run `ringfence host`" in said


def test_wrong_usage() -> None:
    assert command("host", "--fix", "--json").returncode == 2
