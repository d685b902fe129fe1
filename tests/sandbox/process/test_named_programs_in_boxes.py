"""Boxes that have named programs alone."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Mount, Program, Programs
from ringfence.sandbox.process import memory_file, streams
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.named_programs import loader_of
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, line: str, *allow: str, mounts: tuple[Mount, ...] = ()) -> BoxReport:
    program = Program("command", argv=("/bin/sh", "-c", line))
    return await backend.run(BoxSpec(program, programs=Programs(allow), mounts=mounts))


async def test_only_what_is_allowed_is_there(backend: ProcessBackend) -> None:
    report = await run(backend, "ls /bin /usr/bin | sort -u; cat /etc/hostname; echo; id", "ls", "sort")
    said = report.stdout.text.split()
    assert {"ls", "sort", "sh"} <= set(said) and not {"cat", "id", "python3"} & set(said)
    assert "cat: not found" in report.stderr.text and "id: not found" in report.stderr.text
    assert (report.exit_status, report.commands) == (127, "enforced")


async def test_a_pipeline_of_allowed_programs_works(backend: ProcessBackend) -> None:
    report = await run(backend, "printf '3\\n1\\n2\\n' > tmp/x && sort tmp/x | head -n 2 | wc -l", "sort", "head", "wc")
    assert (report.stdout.text.strip(), report.stderr.text) == ("2", "")


async def test_an_interpreter_makes_it_advisory_and_still_finds_no_other_program(backend: ProcessBackend) -> None:
    line = "python3 -c 'import json, subprocess; print(json.dumps(1)); subprocess.run([\"id\"])'"
    report = await run(backend, line, "python3")
    assert report.stdout.text == "1\n"
    assert "FileNotFoundError" in report.stderr.text
    assert report.commands == "advisory"


@pytest.mark.parametrize("sealed", [True, False], ids=["as it is", "a kernel before 6.3"])
async def test_what_comes_through_the_input_is_not_executed(
    backend: ProcessBackend, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sealed:
        for module in (memory_file, streams):
            monkeypatch.setattr(module, "can_be_sealed", lambda: False)
    line = "chmod 755 /proc/$$/fd/0 /dev/stdin; /proc/$$/fd/0 -d /etc; echo $?; wc -c"
    program = Program("command", argv=("/bin/sh", "-c", line), stdin=Path("/bin/ls").read_bytes())
    report = await backend.run(BoxSpec(program, programs=Programs(("chmod", "wc"))))
    assert report.stdout.text.split() == ["126", str(Path("/bin/ls").stat().st_size)], report.stderr.text
    assert report.commands == "enforced"


def test_a_memory_file_of_an_old_kernel_has_no_permission_to_be_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "can_be_sealed", lambda: False)
    descriptor = memory_file.memory_file(b"x")
    try:
        assert os.fstat(descriptor).st_mode & 0o777 == 0o444
    finally:
        os.close(descriptor)


async def test_nothing_that_was_written_or_mounted_is_executed(backend: ProcessBackend, tmp_path: Path) -> None:
    shutil.copyfile("/bin/ls", tmp_path / "tool")
    (tmp_path / "tool").chmod(0o755)
    mounts = tuple(Mount(os.path.realpath(tmp_path), f"/srv/{mode}", mode) for mode in ("ro", "rw"))  # type: ignore[arg-type]
    line = (
        "for at in /srv/ro /srv/rw; do $at/tool; done; cp /bin/ls tmp/; tmp/ls; echo '#!/bin/sh' > x; chmod +x x; ./x"
    )
    report = await run(backend, line, "cp", "ls", "chmod", mounts=mounts)
    assert report.stdout.text == ""
    assert report.stderr.text.count("Permission denied") == 4, report.stderr.text
    plain = await backend.run(BoxSpec(Program("command", argv=("/bin/sh", "-c", "/srv/ro/tool /")), mounts=mounts[:1]))
    assert plain.exit_status == 0 and plain.commands is None


async def test_a_box_without_named_programs_is_as_ever(backend: ProcessBackend) -> None:
    line = "cp /bin/ls tmp/; tmp/ls /workspace; python3 -c 'import os; os.memfd_create(\"x\")'; id -u"
    report = await backend.run(BoxSpec(Program("command", argv=("/bin/sh", "-c", line))))
    assert report.stdout.text.split()[:3] == ["input", "output", "tmp"]
    assert report.stdout.text.split()[-1] == "1000"


async def test_what_nobody_has_or_boxes_do_not_see_is_simply_absent(backend: ProcessBackend, tmp_path: Path) -> None:
    shutil.copyfile("/bin/ls", tmp_path / "tool")
    (tmp_path / "tool").chmod(0o755)
    assert (await run(backend, "echo here", str(tmp_path / "tool"))).stdout.text == "here\n"
    report = await run(backend, "echo here; no-such-program", "no-such-program")
    assert (report.stdout.text, report.exit_status) == ("here\n", 127)


# ── What a box is given besides ───────────────────────────────────────────────────────────────────


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Programs as a package may have them: as they are, without the right to be executed, named like a library."""
    for name in ("tool", "tool.so.1", "tool.txt"):
        shutil.copyfile(os.path.realpath("/bin/ls"), tmp_path / name)
    (tmp_path / "tool").chmod(0o755)
    tmp_path.chmod(0o755)  # started as root, boxes are another user
    return tmp_path


async def given(backend: ProcessBackend, line: str, apart: Path, *allow: str, as_packages: bool = True) -> BoxReport:
    spec = BoxSpec(Program("command", argv=("/bin/sh", "-c", line)), programs=Programs(allow))
    more = {"packages": (apart,)} if as_packages else {"trees": (apart,)}
    return await backend.run(dataclasses.replace(spec, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("as_packages", [True, False], ids=["packages", "trees"])
async def test_no_code_of_a_package_or_tree_runs(backend: ProcessBackend, apart: Path, as_packages: bool) -> None:
    loader = loader_of("/bin/sh")
    names = ("tool", "tool.so.1", "tool.txt")
    line = "; ".join(f"{loader or ''} {apart}/{name} -d /workspace; {apart}/{name} -d /workspace" for name in names)
    report = await given(backend, line, apart, "cat", as_packages=as_packages)
    assert (report.stdout.text, report.commands) == ("", "enforced")
    assert report.stderr.text.count("Permission denied") == (3 if loader else 6), report.stderr.text
    assert report.stderr.text.count("failed to map") == (3 if loader else 0), report.stderr.text
    read = await given(backend, f"cat {apart}/tool | wc -c", apart, "cat", "wc", as_packages=as_packages)
    assert int(read.stdout.text) == (apart / "tool").stat().st_size, "it can be read as ever"


async def test_no_library_of_a_package_is_put_into_an_allowed_program(backend: ProcessBackend, apart: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = '#include <stdio.h>\n__attribute__((constructor)) static void go(void) { puts("native"); }\n'
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(apart / "evil.so")]
    subprocess.run(command, input=source, text=True, check=True)
    line = "export LD_PRELOAD=$PYTHONPATH/evil.so; cat /etc/hostname"
    report = await given(backend, line, apart, "cat")
    assert (report.stdout.text, report.commands) == ("box\n", "enforced")
    plain = BoxSpec(Program("command", argv=("/bin/sh", "-c", line)), packages=(apart,))
    assert "native" in (await backend.run(plain)).stdout.text, "else this would show nothing"


async def test_an_allowed_program_in_a_tree_runs_and_no_other(backend: ProcessBackend, apart: Path) -> None:
    shutil.copy(apart / "tool", apart / "other")
    line = f"{apart}/tool -d /workspace; {apart}/other -d /workspace"
    report = await given(backend, line, apart, str(apart / "tool"), as_packages=False)
    assert (report.stdout.text, report.commands) == ("/workspace\n", "enforced")
    assert "Permission denied" in report.stderr.text


async def test_an_interpreter_has_its_packages_whole_and_is_told_of(backend: ProcessBackend, apart: Path) -> None:
    native = next(iter(Path(sys.base_prefix).glob("lib/python3*/lib-dynload/_json.*.so")), None)
    if native is None:
        pytest.skip("this interpreter has no such module")
    shutil.copy(native, apart / native.name)
    code = 'import os, sys; sys.path.insert(0, os.environ["PYTHONPATH"]); import _json; print(_json.__file__)'
    line = f"python3 -c '{code}'"
    report = await given(backend, line, apart, "python3")
    assert (report.stdout.text.strip(), report.commands) == (str(apart / native.name), "advisory"), report.stderr.text
