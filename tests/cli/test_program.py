"""What `ringfence run` is to run: read and checked before anything runs, each problem in one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ringfence.cli import named_paths, program
from ringfence.compose.run_request import named
from ringfence.core.box import Input
from ringfence.core.errors import Unavailable
from ringfence.sdk.once import inputs_of


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.endswith("\n")
    return told[:-1]


def test_code_a_line_and_a_file(tmp_path: Path) -> None:
    assert program.chosen(["a", "-b"], "print(1)", None) == program.RunTarget(code="print(1)", argv=("a", "-b"))
    assert program.chosen([], None, "ls | wc") == program.RunTarget(command="ls | wc")
    words = program.chosen(["x", "y"], None, "echo $1").argv
    assert words == ("/bin/sh", "-c", "echo $1", "sh", "x", "y")
    file = tmp_path / "x.py"
    file.write_text("print(1)")
    assert program.chosen([str(file), "a"], None, None) == program.RunTarget(
        code="print(1)", argv=("a",), name="/workspace/x.py"
    )


@pytest.mark.parametrize(
    ("name", "text", "by"),
    [
        ("x.py", "1", None),
        ("x", "1", None),
        ("x.txt", "#!/usr/bin/env python3\n1", None),
        ("x.txt", "#!/opt/python3.13/bin/python3.13 -u\n1", None),
        ("x.txt", "#!/usr/bin/env -S python3 -u\n1", None),
        ("x.js", "#!/usr/bin/python3\n1", None),
        ("x.sh", "1", ("sh",)),
        ("x.SH", "1", ("sh",)),
        ("x.py", "#!/bin/sh -e\n1", ("/bin/sh", "-e")),
        ("x", "#!/usr/bin/env -S awk -f x\n1", ("/usr/bin/env", "-S awk -f x")),
        ("x", "#! /usr/bin/awk -f\n1", ("/usr/bin/awk", "-f")),
        ("x", "#!\n1", None),
        ("#!", "1", None),
    ],
)
def test_who_runs_a_file(tmp_path: Path, name: str, text: str, by: tuple[str, ...] | None) -> None:
    file = tmp_path / name
    file.write_text(text)
    chosen = program.chosen([str(file), "a"], None, None)
    if by is None:
        assert (chosen.code, chosen.argv, chosen.name) == (text, ("a",), f"/workspace/{name}")
    else:
        assert (chosen.code, chosen.argv) == (None, (*by, f"/workspace/input/{name}", "a"))
        assert chosen.script == Input(name, text.encode())


def test_an_interpreter_that_is_not_there_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_PATH", str(tmp_path))
    (tmp_path / "x.js").write_text("1")
    with pytest.raises(SystemExit):
        program.chosen([str(tmp_path / "x.js")], None, None)
    assert "node is not installed where boxes find it" in refused(capsys)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a\0b", "a NUL byte at offset 1: this is not source code"),
        (b"ab\xff", "not UTF-8: byte 0xff at offset 2"),
        (b"#" * (10 * 1024 * 1024 + 1), "longer than 10 MiB"),
        (None, "No such file or directory"),
        ("folder", "Is a directory"),
    ],
)
def test_what_is_no_source_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes | str | None, problem: str
) -> None:
    file = tmp_path / "x.py"
    if isinstance(data, bytes):
        file.write_bytes(data)
    elif data == "folder":
        file.mkdir()
    with pytest.raises(SystemExit) as ended:
        program.chosen([str(file)], None, None)
    assert ended.value.code == 2
    assert refused(capsys).startswith(f"{file}: {problem}")


@pytest.mark.parametrize(
    ("words", "code", "shell", "problem"),
    [
        ([], None, None, "nothing to run"),
        ([], "1", "ls", "give one of them"),
        (["\udcff"], None, None, "not UTF-8"),
        ([], "\udcff", None, "not UTF-8"),
        ([], "a\0b", None, "-c: a NUL byte"),
    ],
)
def test_one_program_is_named(
    words: list[str], code: str | None, shell: str | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.chosen(words, code, shell)
    assert ended.value.code == 2 and problem in refused(capsys)


# ── files in and out ──


def test_inputs_are_files_under_their_names_and_folders_with_all_below(tmp_path: Path) -> None:
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "data/b.csv").write_text("b")
    (tmp_path / "data/deep/c.csv").write_text("c")
    found = program.inputs([tmp_path / "a.csv", tmp_path / "data"], Input("s.js", b"1"))
    assert {each.name: each.source for each in found} == {
        "s.js": b"1", "a.csv": tmp_path / "a.csv",
        "data/b.csv": tmp_path / "data/b.csv", "data/deep/c.csv": tmp_path / "data/deep/c.csv",
    }  # fmt: skip


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("name", ["file", "folder", "folder/private", "above/../folder/private"])
def test_no_link_in_a_folder_that_somebody_filled_leads_inputs_or_output_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, absolute: bool
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/private").write_text("private")
    (tmp_path / "cloned/above").mkdir(parents=True)
    (tmp_path / "cloned/file").symlink_to("../secrets/private")
    (tmp_path / "cloned/folder").symlink_to(tmp_path / "secrets")
    monkeypatch.chdir(tmp_path / "cloned")
    path = tmp_path / "cloned" / name if absolute else Path(name)
    link = tmp_path / "cloned" / ("file" if name == "file" else "folder")
    for look_up in (
        lambda: program.inputs([path], None),
        lambda: program.output_folder(path),
        lambda: program.trees([path]),
        lambda: named_paths.resolve("--mount", path),
    ):
        with pytest.raises(SystemExit) as ended:
            look_up()
        said = refused(capsys)
        assert ended.value.code == 2 and f"{link} is a link, which is not followed" in said
        assert f"If you mean {link.resolve()}, name that" in said


def test_links_of_the_person_and_of_the_system_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("a")
    home = Path(os.environ["HOME"])
    (home / "mine").symlink_to(tmp_path / "data")
    (found,) = program.inputs([home / "mine/a"], None)
    assert found.source == (tmp_path / "data/a").resolve()
    assert program.trees([home / "mine"]) == ((tmp_path / "data").resolve(),)
    assert named_paths.resolve("--output", Path("/proc/self")) == Path(f"/proc/{os.getpid()}")


def test_links_in_a_folder_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("a")
    (tmp_path / "data/secret").symlink_to("/etc/passwd")
    (tmp_path / "data/folder").symlink_to("/etc")
    os.mkfifo(tmp_path / "data/pipe")
    assert [each.name for each in program.inputs([tmp_path / "data"], None)] == ["data/a"]
    assert "3 links and special files left out" in capsys.readouterr().err


def test_a_file_of_a_folder_that_becomes_a_link_is_never_looked_up_again(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_text("a")
    (tmp_path / "private").write_text("private")
    (found,) = program.inputs([tmp_path / "data"], None)
    (tmp_path / "data/a").unlink()
    (tmp_path / "data/a").symlink_to(tmp_path / "private")
    (again,) = inputs_of({"inputs": {found.name: found}})  # as `box create` passes it on
    assert (again.source, again.links) == (tmp_path / "data/a", False)
    with pytest.raises(Unavailable):
        named(again)


def test_a_name_that_is_not_utf_8_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / os.fsdecode(b"a\xff")).write_text("a")
    with pytest.raises(SystemExit) as ended:
        program.inputs([tmp_path / "data"], None)
    assert ended.value.code == 2 and "is not UTF-8" in refused(capsys)


@pytest.mark.parametrize("what", ["missing", "pipe", "loop", "same", "unreadable"])
def test_an_input_that_cannot_be_given_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    given, problem = [tmp_path / what], "--input "
    if what == "pipe":
        os.mkfifo(given[0])
    elif what == "loop":
        given[0].symlink_to(given[0])
    elif what == "same":
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "x").touch()
        given, problem = [tmp_path / "a/x", tmp_path / "b/x"], "two of them are called x"
    elif what == "unreadable":
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        given[0].touch(0)
    with pytest.raises(SystemExit) as ended:
        program.inputs(given, None)
    assert ended.value.code == 2 and problem in refused(capsys)


def test_an_output_folder_is_made(tmp_path: Path) -> None:
    assert program.output_folder(tmp_path / "a/b") == tmp_path / "a/b"
    assert (tmp_path / "a/b").is_dir()


@pytest.mark.parametrize("what", ["file", "read-only"])
def test_an_output_folder_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    place = tmp_path / "out"
    if what == "file":
        place.touch()
    elif os.geteuid() == 0:
        place = Path("/proc/self")  # where not even root can
    else:
        place.mkdir(0o500)
    with pytest.raises(SystemExit) as ended:
        program.output_folder(place)
    assert ended.value.code == 2 and refused(capsys).startswith("--output ")


def test_trees_are_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.trees([tmp_path]) == (tmp_path.resolve(),)
    with pytest.raises(SystemExit):
        program.trees([Path(sys.executable).resolve()])
    assert "not a folder" in refused(capsys)


def test_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.environment(["A=b", "C=", "D=e=f", "A=g"]) == {"A": "g", "C": "", "D": "e=f"}
    for wrong in ("A", "=b", ""):
        with pytest.raises(SystemExit) as ended:
            program.environment([wrong])
        assert ended.value.code == 2 and "NAME=VALUE" in refused(capsys)


@pytest.mark.parametrize("name", ["input", "output", "tmp"])
def test_a_file_named_like_a_folder_of_the_workspace_is_not_in_its_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1")
    assert program.chosen([str(tmp_path / name)], None, None).name == f"/workspace/tmp/{name}"
