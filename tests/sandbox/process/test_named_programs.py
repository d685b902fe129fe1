"""Named programs: just enough of ELF, which programs run code, and which of them a box has."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.core.box import Programs
from ringfence.sandbox.process import named_programs
from ringfence.sandbox.process.named_programs import Choice, choose, exists, is_program, loader_of, names, runs_code


def test_a_program_names_its_loader() -> None:
    loader = loader_of("/bin/sh")
    if loader is None:
        pytest.skip("the shell of this host needs no loader")
    assert os.path.exists(loader)


def test_what_is_no_program_names_none(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    (tmp_path / "empty").write_bytes(b"")
    assert {loader_of(path) for path in (tmp_path / "script", tmp_path / "empty", tmp_path / "none", tmp_path)} == {
        None
    }


def made(kind: int, *, loader: bool = False, told: tuple[tuple[int, int], ...] = ()) -> bytes:
    """A file with a table of parts: perhaps one that names a loader, and one of these entries."""
    dynamic = b"".join(struct.pack("<QQ", *each) for each in (*told, (0, 0)))
    parts, rest = ([(2, dynamic)] if told else []) + ([(3, b"/lib/ld.so\0")] if loader else []), b""
    table, at = b"", 64 + 56 * len(parts)
    for number, data in parts:
        table += struct.pack("<IIQQQQQQ", number, 4, at + len(rest), 0, 0, len(data), len(data), 8)
        rest += data
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", kind, 183, 1, 0, 64, 0, 0, 64, 56, len(parts), 0, 0, 0)
    )
    return header + table + rest


@pytest.mark.parametrize(
    ("data", "program"),
    [
        (made(2), True),  # static, at a fixed address
        (made(2, loader=True), True),
        (made(3, told=((0x6FFFFFFB, 0x08000000),)), True),  # static, anywhere in memory
        (made(3, loader=True, told=((0x6FFFFFFB, 0x08000001), (14, 1))), True),
        (made(3, loader=True), True),  # from before programs were marked
        (made(3, told=((14, 1),)), False),
        (made(3), False),
        (made(3, loader=True, told=((14, 1), (0x6FFFFFFB, 1))), False),  # as the C library
        (made(1), False),
        (made(4, loader=True), False),
        (b"#!/bin/sh\n" + bytes(64), False),
    ],
)
def test_a_program_is_told_from_a_library(tmp_path: Path, data: bytes, program: bool) -> None:
    (tmp_path / "file.so.1").write_bytes(data)
    assert is_program(tmp_path / "file.so.1") is program


def test_a_program_is_one_whatever_its_name_and_mode(tmp_path: Path) -> None:
    for path in ("/bin/sh", os.path.realpath(sys.executable)):
        shutil.copyfile(path, tmp_path / "picture.png")
        (tmp_path / "picture.png").chmod(0o400)
        assert is_program(tmp_path / "picture.png")
        (tmp_path / "picture.png").unlink()


def test_libraries_of_this_process_are_none() -> None:
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = {line.split()[-1] for line in file if "/" in line}
    libraries = {path for path in mapped if ".so" in os.path.basename(path) and os.path.isfile(path)}
    assert libraries and not [path for path in libraries if is_program(path)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 63), st.binary(min_size=1, max_size=16))
def test_a_broken_one_is_no_program(tmp_path: Path, rest: bytes, at: int, written: bytes) -> None:
    data = bytearray(b"\x7fELF\x02\x01" + bytes(58) + rest)
    data[at : at + len(written)] = written
    (tmp_path / "broken").write_bytes(data)
    found = loader_of(tmp_path / "broken")
    assert found is None or len(found) <= 4096
    assert is_program(tmp_path / "broken") in (True, False)


# ── Programs that run code by themselves ──


@pytest.mark.parametrize(
    "name", ["python", "python3", "python3.13", "python3.13t", "perl5.36.0", "node-20", "bash", "gawk", "qemu-x86_64"]
)
def test_an_interpreter_is_known_by_its_name_whatever_its_version(name: str) -> None:
    assert runs_code(name)


@pytest.mark.parametrize(
    "name",
    [
        *("vim.basic", "vim.tiny", "vim.gtk3", "vim.nox", "rview", "emacs-nox", "emacs-28.2-nox", "bash-static"),
        *("zsh5-static", "gdb-multiarch", "python3.11-dbg", "php-cgi8.2", "perl5.36-x86_64-linux-gnu", "perl-x86_64"),
        *("aarch64-linux-gnu-gdb", "python3.13-aarch64-linux-musl", "perl5.36-arm-linux-gnueabihf", "gdb-x86_64-linux"),
    ],
)
def test_an_interpreter_is_known_by_its_name_whatever_its_variant_and_machine(name: str) -> None:
    assert runs_code(name)


@pytest.mark.parametrize(
    "name", ["x86_64-linux-gnu-ld", "cpp-x86_64-linux-gnu", "ls-static", "less.basic", "python3-config", "static", ""]
)
def test_a_variant_of_another_program_is_no_interpreter(name: str) -> None:
    assert not runs_code(name)


@pytest.mark.parametrize("name", ["ls", "cat", "git", "env", "xargs", "find", "md5sum", "b2sum", "x86_64", "2to3"])
def test_what_only_runs_other_programs_or_none_is_no_interpreter(name: str) -> None:
    assert not runs_code(name)


# ── Which programs a box has: found with every link, and nothing under another name ──


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
    monkeypatch.setattr(named_programs, "SEARCHED", (str(tmp_path / "sbin"), str(tmp_path / "bin")))
    monkeypatch.setattr(named_programs, "SYSTEM", (str(tmp_path),))
    monkeypatch.setattr(named_programs, "SHELL", str(tmp_path / "bin/sh"))
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


def test_another_name_of_a_program_that_runs_code_is_told_by_its_file(host: Path) -> None:
    program(host / "lib/core/machine", "machine")
    os.symlink("../lib/core/machine", host / "bin/vim")
    os.symlink("../lib/core/machine", host / "bin/editor")
    os.link(host / "bin/perl", host / "bin/report-maker")
    named_programs._searched.clear()
    for name in ("editor", "report-maker", str(host / "lib/core/machine")):
        assert chosen(host, ("cat", name)).advisory, name
    assert not chosen(host, ("cat", "tool")).advisory


def test_the_shells_own_file_under_another_name_is_no_other_program(host: Path) -> None:
    for name in ("busybox", "ls"):
        os.symlink("sh", host / "bin" / name)
    assert not chosen(host, ("cat", "ls")).advisory


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
    named_programs._searched.clear()
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
