"""A box works in a folder of the host, and what the host's other programs go by in it stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfence.box import BoxReport, BoxSpec, Mount, Program
from ringfence.sandbox.process import guarded, mounting
from ringfence.sandbox.process.backend import ProcessBackend

pytestmark = pytest.mark.anyio

HERE = "/project"
ATTACKS = """
import os, shutil
def tried(name, do):
    try:
        do()
        print(name, "done")
    except OSError as exc:
        print(name, exc.strerror)
os.chdir("/project")
def write(path, text="evil"):
    with open(path, "w") as file:
        file.write(text)
def swapped(path):
    write("new")
    os.rename("new", path)
tried("hook", lambda: write(".git/hooks/pre-commit"))
tried("hooks", lambda: os.rename(".git/hooks", ".git/old"))
tried("config", lambda: write(".git/config"))
tried("config swapped", lambda: swapped(".git/config"))
tried("config removed", lambda: os.remove(".git/config"))
tried("git moved", lambda: os.rename(".git", "git2"))
tried("git removed", lambda: shutil.rmtree(".git/hooks"))
tried("git exchanged", lambda: os.replace("other", ".git"))
tried("envrc", lambda: write(".envrc"))
tried("envrc cut", lambda: os.truncate(".envrc", 0))
tried("envrc mode", lambda: os.chmod(".envrc", 0o777))
tried("envrc linked", lambda: os.link(".envrc", "same"))
tried("vscode", lambda: write(".vscode/tasks.json"))
tried("vscode new", lambda: write(".vscode/settings.json"))
tried("vscode moved", lambda: os.rename(".vscode", "code"))
"""
WORK = """
tried("work", lambda: write("main.py", "print(1)"))
tried("index", lambda: write(".git/index"))
tried("object", lambda: os.mkdir(".git/objects"))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for folder in (".git/hooks", ".vscode", "other"):
        (project / folder).mkdir(parents=True)
    (project / ".git/hooks/pre-commit").write_text("good")
    (project / ".git/config").write_text("good")
    (project / ".envrc").write_text("good")
    (project / ".vscode/tasks.json").write_text("good")
    return project


async def run(backend: ProcessBackend, source: str, *mounts: Mount) -> tuple[dict[str, str], BoxReport]:
    report = await backend.run(BoxSpec(Program("python", source.encode()), mounts=mounts))
    assert report.ended == "exited" and not report.stderr.total, report.stderr.text
    return dict(_apart(line) for line in report.stdout.text.splitlines()), report


def _apart(line: str) -> tuple[str, str]:
    name = next(each for each in sorted(_names(), key=len, reverse=True) if line.startswith(f"{each} "))
    return name, line.removeprefix(f"{name} ")


def _names() -> list[str]:
    return [part.split('"')[1] for part in (ATTACKS + WORK).splitlines() if part.startswith("tried(")]


async def test_what_the_host_goes_by_cannot_be_changed_and_the_rest_can(backend: ProcessBackend, project: Path) -> None:
    told, report = await run(backend, ATTACKS + WORK, Mount(str(project), HERE, "rw"))
    assert {name: text for name, text in told.items() if text == "done"} == dict.fromkeys(
        ("work", "index", "object"), "done"
    )
    assert set(told) == set(_names()) and report.planted == ()
    for path in (".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json"):
        assert (project / path).read_text() == "good", path
    assert sorted(os.listdir(project / ".vscode")) == ["tasks.json"] and sorted(os.listdir(project / ".git")) == [
        "config",
        "hooks",
        "index",
        "objects",
    ]


async def test_the_control_a_mount_that_is_said_to_be_unsafe(backend: ProcessBackend, project: Path) -> None:
    told, report = await run(backend, ATTACKS, Mount(str(project), HERE, "rw", unsafe="a test of it"))
    assert {told[name] for name in ("hook", "hooks", "config", "envrc", "vscode", "git moved")} == {"done"}
    assert (project / ".envrc").read_text() == "" and report.planted == ()


async def test_what_was_not_there_is_told_of(backend: ProcessBackend, tmp_path: Path) -> None:
    project = tmp_path / "bare"
    (project / ".idea").mkdir(parents=True)
    os.symlink("/nowhere", project / ".profile")
    source = """
import os
os.makedirs("/project/.git/hooks")
open("/project/.git/hooks/pre-commit", "w").close()
open("/project/.envrc", "w").close()
os.remove("/project/.profile")
open("/project/.profile", "w").close()
open("/project/harmless", "w").close()
"""
    _, report = await run(backend, source, Mount(str(project), HERE, "rw"))
    assert report.planted == (f"{HERE}/.git", f"{HERE}/.envrc", f"{HERE}/.profile")
    # The next box cannot change what is there by now.
    told, report = await run(backend, ATTACKS.split('tried("hooks"')[0], Mount(str(project), HERE, "rw"))
    assert told == {"hook": "Read-only file system"} and report.planted == ()


async def test_in_a_read_only_mount_there_is_nothing_to_guard(project: Path) -> None:
    assert [each.at for each in mounting.place([Mount(str(project), HERE)])] == [HERE]
    placed = mounting.place([Mount(str(project), HERE, "rw")])
    assert [(each.at.removeprefix(HERE), each.writable) for each in placed] == [
        ("", True),
        ("/.envrc", False),
        ("/.git", True),
        ("/.git/config", False),
        ("/.git/hooks", False),
        ("/.vscode", False),
    ]
    (project / ".envrc").unlink()
    os.symlink("/etc/passwd", project / ".envrc")
    assert f"{HERE}/.envrc" not in [each.at for each in mounting.place([Mount(str(project), HERE, "rw")])]
    assert guarded.look([Mount(str(project), HERE)]) == {}


async def test_git_works_in_a_box(backend: ProcessBackend, tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    for words in (["init", "-q"], ["config", "user.name", "Test"], ["config", "user.email", "t@example.org"]):
        subprocess.run([git, "-C", tmp_path, *words], check=True)
    (tmp_path / "a.txt").write_text("one\n")
    script = "cd /project && git add . && git commit -qm first && git switch -qc other && git log --oneline | wc -l"
    command = Program("command", argv=("/bin/sh", "-c", script))
    report = await backend.run(BoxSpec(command, mounts=(Mount(str(tmp_path), HERE, "rw"),), env={"HOME": "/workspace"}))
    assert (report.stdout.text.strip(), report.stderr.text) == ("1", "")


def test_the_list_is_the_documented_one() -> None:
    text = (Path(__file__).parents[3] / "docs/servers.md").read_text()
    section = text.partition("### What a writable mount does not give")[2].partition("\n## ")[0]
    shells = (".bash", ".zsh", ".zlog", ".zprofile")
    assert [name for name in guarded.NAMES if not name.startswith(shells) and f"`{name}`" not in section] == []
