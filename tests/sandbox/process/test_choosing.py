"""Which programs a box has where they are named: found with every link, and nothing under another name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ringfence.box import Programs
from ringfence.sandbox.process import choosing
from ringfence.sandbox.process.choosing import Choice, choose, exists, names


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small system: two folders of programs and a folder of libraries."""
    for folder in ("bin", "sbin", "lib/core", "etc"):
        (tmp_path / folder).mkdir(parents=True)
    program(tmp_path / "bin/sh")
    for name in ("cat", "tool", "perl5.36", "python3"):
        program(tmp_path / "bin" / name, name)
    os.link(tmp_path / "bin/perl5.36", tmp_path / "bin/perl")
    os.symlink(tmp_path / "etc/awk", tmp_path / "bin/awk")
    os.symlink("../bin/mawk", tmp_path / "etc/awk")
    program(tmp_path / "bin/mawk", "mawk")
    program(tmp_path / "lib/core/tool", "tool")
    program(tmp_path / "lib/core/helper", "helper")
    script(tmp_path / "bin/report", f"#!{tmp_path}/bin/env -S python3 -I\n")
    program(tmp_path / "bin/env", "env")
    (tmp_path / "bin/readme").write_text("no program")
    os.symlink("nowhere", tmp_path / "bin/dangling")
    monkeypatch.setattr(choosing, "SEARCHED", (str(tmp_path / "sbin"), str(tmp_path / "bin")))
    monkeypatch.setattr(choosing, "SYSTEM", (str(tmp_path),))
    monkeypatch.setattr(choosing, "SHELL", str(tmp_path / "bin/sh"))
    return tmp_path


def program(path: Path, mark: str = "") -> None:
    """A program of this host that needs the loader, and is like no other."""
    shutil.copyfile("/bin/sh", path)
    with path.open("ab") as file:
        file.write(mark.encode())
    path.chmod(0o755)


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def chosen(
    host: Path, allow: tuple[str, ...] | None, deny: tuple[str, ...] = (), given: tuple[Path, ...] = ()
) -> Choice:
    return choose(Programs(allow, deny), "", (str(host),), tuple(map(str, given)))


@pytest.fixture
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree that a box is given besides, with a program in it."""
    folder = tmp_path_factory.mktemp("apart")
    program(folder / "extra", "extra")
    return folder


def there(choice: Choice) -> dict[str, str]:
    return {name: leads for _, entries in choice.folders for name, leads in entries}


def test_nothing_but_the_shell_where_nothing_is_allowed(host: Path) -> None:
    choice = chosen(host, ())
    assert there(choice) == {"sh": ""}
    assert set(choice.hidden) == {str(host / "lib/core/tool"), str(host / "lib/core/helper")}
    assert not choice.advisory


def test_links_are_kept_and_what_they_lead_to(host: Path) -> None:
    choice = chosen(host, ("awk", "cat"))
    assert there(choice) == {"awk": str(host / "etc/awk"), "mawk": "", "cat": "", "sh": ""}
    assert choice.advisory, "awk is an interpreter"
    assert not chosen(host, ("cat",)).advisory


def test_a_script_brings_its_interpreter_and_what_env_is_to_find(host: Path) -> None:
    choice = chosen(host, ("report",))
    assert set(there(choice)) == {"report", "env", "python3", "sh"}
    assert choice.advisory


def test_a_denied_program_is_gone_under_every_name_and_as_a_copy(host: Path) -> None:
    choice = chosen(host, None, ("perl", "tool"))
    assert {"perl", "perl5.36", "tool"}.isdisjoint(there(choice))
    assert {"cat", "awk", "mawk", "report", "sh"} <= set(there(choice))
    assert choice.hidden == (str(host / "lib/core/tool"),)
    assert "mawk" not in there(chosen(host, ("awk", "cat"), ("mawk",)))
    assert "awk" not in there(chosen(host, ("awk", "cat"), ("mawk",)))


def test_one_that_cannot_be_read_is_gone_all_the_same(host: Path) -> None:
    (host / "bin/tool").chmod(0o111)
    assert "tool" not in there(chosen(host, None, ("tool",)))
    assert "tool" not in there(chosen(host, ("cat",)))


def test_of_the_shells_own_file_only_other_names_go(host: Path) -> None:
    os.link(host / "bin/sh", host / "bin/dash")
    assert "dash" not in there(chosen(host, None, ("dash",)))
    assert "sh" in there(chosen(host, None, ("dash",)))


def test_an_absolute_path_is_that_file_wherever_it_lies(host: Path) -> None:
    choice = chosen(host, (str(host / "lib/core/helper"), str(host / "bin/cat")))
    assert there(choice) == {"cat": "", "sh": ""}
    assert choice.hidden == (str(host / "lib/core/tool"),)
    assert str(host / "lib/core/helper") in choice.executable


def test_the_same_file_elsewhere_may_run_too(host: Path) -> None:
    os.link(host / "bin/cat", host / "lib/core/cat")
    choosing._searched.clear()
    choice = chosen(host, ("cat",))
    assert str(host / "lib/core/cat") in choice.executable
    assert str(host / "lib/core/cat") not in choice.hidden


def test_a_program_elsewhere_is_one_whatever_its_name_mode_and_folder(host: Path) -> None:
    (host / "share/doc").mkdir(parents=True)
    for name in ("share/doc/notes.txt", "lib/core/lib.so", "lib/core/lib.so.1"):
        program(host / name, "other")
        (host / name).chmod(0o644)
    (host / "lib/core/data.txt").write_text("no program")
    os.mkfifo(host / "lib/core/pipe")
    hidden = {os.path.relpath(path, host) for path in chosen(host, ("cat",)).hidden}
    assert hidden == {"share/doc/notes.txt", *(f"lib/core/{name}" for name in ("lib.so", "lib.so.1", "tool", "helper"))}


def test_nothing_runs_from_what_a_box_is_given_besides(host: Path, apart: Path) -> None:
    (apart / "deeper").mkdir()
    choice = chosen(host, ("cat",), given=(apart, apart / "deeper"))
    assert (choice.sealed, choice.spared, choice.advisory) == ((str(apart),), (), False)
    assert not [path for path in (*choice.executable, *choice.hidden) if path.startswith(str(apart))]
    assert choice != chosen(host, ("cat",)), "its boxes are others"


def test_an_allowed_program_there_is_spared(host: Path, apart: Path) -> None:
    choice = chosen(host, ("cat", str(apart / "extra")), given=(apart,))
    assert (choice.sealed, choice.spared) == ((str(apart),), (str(apart / "extra"),))
    assert str(apart / "extra") in choice.executable and not choice.advisory


def test_the_system_is_spared_where_a_tree_has_it_within(host: Path) -> None:
    choice = chosen(host, ("cat",), given=(host.parent,))
    assert (choice.sealed, choice.spared, choice.advisory) == ((str(host.parent),), (str(host),), False)


def test_where_code_may_run_from_there_it_is_said(host: Path, apart: Path) -> None:
    with_interpreter = chosen(host, ("python3",), given=(apart,))
    assert with_interpreter.advisory and not with_interpreter.sealed, "packages are for interpreters"
    denied = chosen(host, None, ("python3", "perl", "awk", "mawk", "report"), given=(apart,))
    assert denied.advisory and not denied.sealed and str(apart) in denied.executable
    assert not chosen(host, None, ("python3", "perl", "awk", "mawk", "report")).advisory
    assert chosen(host, ("cat",), given=(host / "lib",)).advisory, "it is the system's, and that has to run"


def test_only_the_folders_and_the_loader_may_be_executed(host: Path) -> None:
    choice = chosen(host, ("cat",))
    folders = {str(host / "bin"), str(host / "sbin")}
    assert folders <= set(choice.executable)
    assert set(choice.executable) == folders, "the loader is not in this tree"


def test_a_choice_is_the_same_until_programs_change(host: Path) -> None:
    first = chosen(host, ("cat",))
    assert chosen(host, ("cat",)) is first
    assert chosen(host, ("cat", "nothing")) == first
    assert chosen(host, ("cat", "tool")) != first
    program(host / "bin/new", "new")
    (host / "bin/cat").unlink()
    program(host / "bin/cat", "another")
    assert chosen(host, ("cat",)) != first


def test_names_are_known(host: Path) -> None:
    assert exists("cat") and exists(str(host / "lib/core/helper"))
    assert not any(exists(name) for name in ("readme", "dangling", "nothing", str(host / "bin")))
    assert {"cat", "awk"} <= set(names())
