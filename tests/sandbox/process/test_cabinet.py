"""Boxes that have named programs alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.box import BoxReport, BoxSpec, Mount, Program, Programs
from ringfence.sandbox.process.backend import ProcessBackend
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
