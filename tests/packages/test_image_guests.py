"""Images as roots of guests: whatever an image has or lacks, the agent runs beside it with an interpreter of ours."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.compose.backends import make_backend
from ringfence.compose.packages import PackageService, package_cache
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BoxReport, BoxSpec, ImageRoot, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.core.sessions import Cell, Command, StaySpec, discard_output, discard_value
from ringfence.packages.images import guests
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.interpreter import GuestInterpreter
from tests.rooting import system_root, variant

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module", params=["oci"])
async def backend(state: Path, request: pytest.FixtureRequest) -> AsyncIterator[GuestBackend]:
    made = make_backend(SandboxSettings(backend=request.param), state)
    assert isinstance(made, GuestBackend)
    try:
        await made.run(BoxSpec(Program("command", argv=("true",))))
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return system_root(tmp_path_factory.mktemp("system") / "root")


async def taken(state: Path, root: Path) -> ImageRoot:
    process = make_backend(SandboxSettings(), keep_ready=0)
    try:
        return await PackageService(state, process, SandboxSettings()).images.find(str(root))
    finally:
        await process.close()


async def run(backend: Backend, image: ImageRoot, program: Program, **more: object) -> BoxReport:
    return await backend.run(BoxSpec(program, env=image.env, root=image.folder, image=image, **more))  # type: ignore[arg-type]


async def shell(backend: Backend, image: ImageRoot, words: str, **more: object) -> BoxReport:
    return await run(backend, image, Program("command", argv=("/bin/sh", "-c", words)), **more)


async def test_a_program_runs_with_the_interpreter_of_its_image(backend: Backend, state: Path, system: Path) -> None:
    image = await taken(state, system)
    look = "import os, sys; print(sys.version_info[:2], sys.executable, os.getcwd(), sys.argv, os.getuid())"
    report = await run(backend, image, Program("python", look.encode(), argv=("a",)))
    assert report.stdout.text == f"{image.version} {image.python} /workspace ['-c', 'a'] 1000\n"
    assert report.isolation["root"] == "image"
    assert report.isolation["image"] == {"name": image.name, "digest": image.digest}
    report = await shell(backend, image, "echo x > /usr/x; echo kept > output/f; cat output/f")
    assert (report.stdout.text, report.exit_status) == ("kept\n", 0) and "Read-only file system" in report.stderr.text


async def test_an_image_without_python_runs_commands(
    backend: Backend, state: Path, system: Path, tmp_path: Path
) -> None:
    bare = variant(system, tmp_path / "bare")
    for path in (bare / "usr/bin").glob("python*"):
        path.unlink()
    image = await taken(state, bare)
    assert (await shell(backend, image, "echo $((6 * 7))")).stdout.text == "42\n"
    with pytest.raises(ValueError, match=r"has no Python of 3\.8 or later: run a command, or name another image"):
        await run(backend, image, Program("python", b"print(1)"))


async def test_an_image_cannot_be_in_the_way_of_what_a_box_has(
    backend: Backend, state: Path, system: Path, tmp_path: Path
) -> None:
    hostile = variant(system, tmp_path / "hostile")
    for name in ("tmp", "workspace", "home", "var", "proc"):
        (hostile / name).symlink_to("/usr")
    (hostile / "dev").write_text("no folder")
    (hostile / ".ringfence").mkdir()
    (hostile / ".ringfence" / "usr").symlink_to("/nowhere")
    (hostile / "etc").mkdir()
    (hostile / "etc" / "ld.so.preload").write_text("/usr/lib/evil.so\n")
    (hostile / "etc" / "ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1" + bytes(200))
    (hostile / "etc" / "passwd").mkdir()
    (hostile / "etc" / "passwd" / "inside").write_text("hidden")
    (hostile / "etc" / "os-release").write_text("ID=theirs\n")
    image = await taken(state, hostile)
    report = await shell(backend, image, "cat /etc/os-release; echo x > /tmp/y; cat /workspace/tmp/y; id -u; ls /usr/y")
    assert report.stdout.text == "ID=theirs\nx\n1000\n", report.stderr.text
    assert "evil" not in report.stderr.text


async def test_a_mount_is_not_put_where_a_link_of_the_image_leads(
    backend: Backend, state: Path, system: Path, tmp_path: Path
) -> None:
    linked = variant(system, tmp_path / "linked")
    (linked / "srv").symlink_to("usr")
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent" / "a").write_text("lent")
    image = await taken(state, linked)
    with pytest.raises(ValueError, match="/srv is a link to"):
        await shell(backend, image, "true", mounts=(Mount(str(tmp_path / "lent"), "/srv/lent"),))
    report = await shell(backend, image, "cat /opt/lent/a", mounts=(Mount(str(tmp_path / "lent"), "/opt/lent"),))
    assert report.stdout.text == "lent", report.stderr.text


async def test_what_shows_values_needs_an_interpreter_of_our_version(
    backend: Backend, state: Path, system: Path
) -> None:
    image = await taken(state, system)
    report = await run(backend, image, Program("python", b"6 * 7", cell=True))
    shown = [each.data["text/plain"] for each in report.shown]
    assert shown == (["42"] if image.version == sys.version_info[:2] else []) and report.exit_status == 0


async def test_cells_run_with_the_interpreter_of_the_image_and_keep_their_state(
    backend: GuestBackend, state: Path, system: Path
) -> None:
    image = await taken(state, system)
    box = await backend.open(StaySpec(root=image.folder, image=image, env=image.env, setup="ready = 35"))
    try:
        interpreter = await box.interpreter()
        done = [await value(interpreter, each) for each in ("import sys\nx = 7\n(sys.executable, ready)", "ready + x")]
        assert done == [f"({image.python!r}, 35)", "42"]
        assert box.isolation["image"]["digest"] == image.digest
        command = await box.command(Command((), source=b"import sys; print(sys.executable)"), discard_output)
        assert (await command.over()).stdout.text == f"{image.python}\n"
    finally:
        await box.end()
    old = replace(image, version=(3, 9))
    box = await backend.open(StaySpec(root=image.folder, image=old))
    try:
        with pytest.raises(Unavailable, match=r"has Python 3\.9, and interpreters that keep their state need"):
            await box.interpreter()
    finally:
        await box.end()


async def value(interpreter: GuestInterpreter, source: str) -> str:
    report = await interpreter.run(Cell(source.encode()), discard_output, discard_value)
    assert report.error is None, report.error
    return report.results[-1].data["text/plain"]


async def test_the_root_is_made_once_takes_no_room_and_is_looked_at(
    backend: Backend, state: Path, system: Path
) -> None:
    image = await taken(state, system)
    assert (await shell(backend, image, "true")).exit_status == 0
    (made,) = image.folder.parent.glob("guest-*")
    inside = "usr/bin/cat" if os.path.exists(made / "usr/bin/cat") else "bin/cat"
    assert os.path.samefile(made / inside, image.folder / inside)
    tools = next(
        tree
        for entry in package_cache(state).entries()
        if entry.digest and made.name.endswith(entry.digest.removeprefix("sha256:")[:24])
        for tree in [package_cache(state).tree(entry.digest)]
    )
    assert guests.joined(package_cache(state), image.folder, tools) == made
    (made / "usr" / "more").write_text("put there later")
    with pytest.raises(Unavailable, match="is not as it was made; remove") as refused:
        guests.joined(package_cache(state), image.folder, tools)
    (made / "usr" / "more").unlink()
    assert refused.value.reason_code == "package_altered"
