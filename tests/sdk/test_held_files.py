"""The files of a live box where it sees a folder of the host: what it may not change there, it may not change by us."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Refused, Sandbox
from ringfence.core.box import Mount
from ringfence.sandbox.files.acted_upon import acts

pytestmark = pytest.mark.usefixtures("state")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name in (".git/hooks", ".git/objects", ".git/refs/heads", ".vscode", "src"):
        (folder / name).mkdir(parents=True)
    for name, text in ((".git/HEAD", "ref: refs/heads/main\n"), (".git/config", "[core]\n"), (".envrc", "good\n")):
        (folder / name).write_text(text)
    (folder / "src" / "main.py").write_text("1\n")
    subprocess.run(["chmod", "-R", "a+rwX", tmp_path], check=True)
    return folder


@pytest.fixture
def box(project: Path) -> Iterator[Sandbox]:
    with Sandbox.create(mounts=[Mount(str(project), "/workspace/p", "rw")]) as made:
        yield made


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_programs_of_the_host_obey_is_not_changed_by_the_files_of_a_box(box: Sandbox, project: Path) -> None:
    before = contents(project)
    box.run_code("import os; os.symlink('/workspace/p/.git', '/workspace/alias')")
    for path in ("p/.git/config", "p/.envrc", "p/.git/hooks/pre-commit", "p/.vscode/tasks.json", "alias/config"):
        with pytest.raises(Refused):
            box.files.write(path, "evil")
    for path in ("p/.mise.toml", "p/src/.vscode/x", "p/.GIT/config", "alias/config.worktree"):
        with pytest.raises(Refused):
            box.files.write(path, "new")
    for path in ("p/.git", "p/.envrc", "p/.vscode", "p/.git/hooks"):
        with pytest.raises(Refused):
            box.files.remove(path)
        with pytest.raises(Refused):
            box.files.rename(path, "p/elsewhere")
    with pytest.raises(Refused):
        box.files.rename("p/src/main.py", "p/.envrc")
    with pytest.raises(Refused):
        box.files.make_dir("p/src/.git")
    assert contents(project) == before
    assert sorted(os.listdir(project)) == [".envrc", ".git", ".vscode", "src"]
    held = box.run_code("open('/workspace/p/.envrc', 'w')")
    assert held.error is not None and held.error.name == "OSError", "it is still held in the box"


def test_the_rest_of_a_project_can_be_changed(box: Sandbox, project: Path) -> None:
    box.files.write("p/src/main.py", "2\n")
    box.files.write("p/.git/objects/aa", "x")
    box.files.rename("p/src/main.py", "p/src/other.py")
    box.files.make_dir("p/docs")
    box.files.remove("p/src")
    assert (project / ".git" / "objects" / "aa").read_text() == "x"
    assert (project / "docs").is_dir() and not (project / "src").exists()


def test_no_file_that_is_mounted_is_replaced_or_removed(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("mounted")
    tmp_path.chmod(0o755)
    (tmp_path / "one").chmod(0o666)
    with Sandbox.create(mounts=[Mount(str(tmp_path / "one"), "/workspace/d/one", "ro")]) as box:
        for change in (
            lambda: box.files.write("d/one", "other"),
            lambda: box.files.remove("d/one"),
            lambda: box.files.remove("d"),
            lambda: box.files.rename("d", "e"),
        ):
            with pytest.raises(Refused):
                change()
        assert box.files.read("d/one") == "mounted"
        assert box.run_code("print(open('/workspace/d/one').read())").logs.stdout == ["mounted\n"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("src/main.py", None), (".git/objects/aa", None), (".git/refs/heads/main", None), (".config/app/x", None),
        (".git", ".git"), (".git/config", ".git/config"), (".git/hooks/x", ".git/hooks/x"), ("a/b/.envrc", ".envrc"),
        (".vscode/tasks.json", ".vscode"), (".config/autostart/x", ".config/autostart/x"), ("a/HEAD", "HEAD"),
        ("ringfence.yaml", "ringfence.yaml"),
    ],
)  # fmt: skip
def test_which_part_of_a_path_acts(path: str, named: str | None) -> None:
    assert acts(path.split("/")) == named
