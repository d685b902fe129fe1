"""Servers in boxes: each in its own or several in one, with what they need and nothing else, and gone with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from ringfence.core.box import Limits, Mount
from ringfence.core.errors import Unavailable
from ringfence.core.model import PackageSpec, Principal, ServerSpec, ServerVolume
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.servers.boxed_server import BoxedServer
from ringfence.sandbox.servers.launcher import BoxLauncher, LaunchSettings
from ringfence.upstream.host_process import HostLauncher
from tests import tooling
from tests.rooting import PYTHON, system_root

pytestmark = pytest.mark.anyio

Boxes = Callable[..., BoxLauncher]
WHO = Principal("agent")
REPEATER = """
import json, os, sys
for line in sys.stdin:
    try:
        value = eval(line)
    except Exception as exc:
        value = f"{type(exc).__name__}: {exc}"
    print(json.dumps(value, default=str), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A server that says what each line of Python comes to."""
    (tmp_path / "code").mkdir(mode=0o700)
    path = tmp_path / "code" / "repeater.py"
    path.write_text(REPEATER)
    return path


@pytest.fixture
def boxes(backend: ProcessBackend) -> Boxes:
    def made(*servers: ServerSpec) -> BoxLauncher:
        given = LaunchSettings(Limits(), {"PATH": os.defpath}, lambda path: None, None, {s.name: s for s in servers})
        return BoxLauncher(backend, given)

    return made


def spec(script: Path, name: str = "s", **more: object) -> ServerSpec:
    return ServerSpec(name, (sys.executable, str(script)), **more)  # type: ignore[arg-type]


async def asked(server: BoxedServer, expression: str) -> object:
    await server.send(expression.encode() + b"\n")
    data = b""
    with anyio.fail_after(tooling.PATIENCE):
        while not data.endswith(b"\n"):
            chunk = await server.receive("stdout")
            assert chunk, server.last_stderr
            data += chunk
    return json.loads(data)


async def test_a_server_sees_its_code_and_its_mounts_and_nothing_else(
    boxes: Boxes, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("not for boxes")
    (tmp_path / "share").mkdir()
    mounts = (Mount(str(tmp_path / "share"), "/share", "rw"),)
    server = await boxes().start(spec(script, env={"OWN": "1"}, mounts=mounts), WHO)
    try:
        assert server.isolation["level"] == "process"
        assert await asked(server, f"os.listdir({str(tmp_path)!r})") == ["code"]
        assert "FileNotFoundError" in str(await asked(server, f"open({str(tmp_path / 'canary')!r})"))
        assert "Read-only" in str(await asked(server, f"open({str(script)!r}, 'a')"))
        assert await asked(server, "open('/share/new', 'w').write('x')") == 1
        assert await asked(server, "open('/workspace/own', 'w').write('x')") == 1
        environment = await asked(server, "sorted(os.environ)")
        names = "HOME LANG LOGNAME NODE_OPTIONS OWN PATH TERM TMPDIR USER"
        assert set(environment) - {"LC_CTYPE"} == set(names.split())  # type: ignore[call-overload]
        unreachable = "__import__('socket').create_connection(('192.0.2.1', 80), 25)"
        assert "unreachable" in str(await asked(server, unreachable))
    finally:
        assert await server.stop() == ""
    assert (tmp_path / "share" / "new").read_text() == "x"


async def test_servers_of_one_name_share_a_box_until_the_last_leaves(boxes: Boxes, script: Path) -> None:
    one, two = (spec(script, name, placement="team") for name in ("one", "two"))
    alone = spec(script, "alone")
    launcher = boxes(one, two, alone)
    first, second = await launcher.start(one, WHO), await launcher.start(two, WHO)
    third = await launcher.start(alone, WHO)
    stranger = await launcher.start(two, Principal("other"))
    await asked(first, "open('/workspace/shared', 'w').write('by one')")
    assert await asked(second, "open('/workspace/shared').read()") == "by one"
    for apart in (third, stranger):
        assert "FileNotFoundError" in str(await asked(apart, "open('/workspace/shared')"))
    await first.stop()
    assert await asked(second, "open('/workspace/shared').read()") == "by one"
    await second.stop()
    again = await launcher.start(one, WHO)
    assert "FileNotFoundError" in str(await asked(again, "open('/workspace/shared')")), "another box by now"
    for each in (again, third, stranger):
        await each.stop()


async def test_what_a_server_left_where_programs_of_the_host_look_is_said_when_its_box_ends(
    boxes: Boxes, script: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "share").mkdir()
    mounts = (Mount(str(tmp_path / "share"), "/share", "rw"),)
    one, two = spec(script, "one", mounts=mounts), spec(script, "two", mounts=mounts, placement="team")
    launcher = boxes(one, two)
    for server, name in ((one, ".envrc"), (two, ".npmrc")):
        started = await launcher.start(server, WHO)
        assert await asked(started, f"open('/share/{name}', 'w').write('x')") == 1
        assert caplog.text == ""
        await started.stop()
        assert f"server {server.name}" in caplog.text and f"'/share/{name}'" in caplog.text
        caplog.clear()
    harmless = await launcher.start(one, WHO)
    await asked(harmless, "open('/share/other', 'w').write('x')")
    await harmless.stop()
    assert caplog.text == ""


async def test_limits_are_the_servers_own_and_what_it_lacked_is_told(boxes: Boxes, script: Path) -> None:
    small = await boxes().start(spec(script, limits={"memory_bytes": 64 * 2**20}), WHO)
    await small.send(b"len(bytearray(300 * 2**20))\n")
    with anyio.fail_after(tooling.PATIENCE):
        said = await small.receive("stdout")
    why = await small.stop()
    if b"MemoryError" not in said:  # where there are no control groups the kernel refuses the memory
        assert said == b"" and "more memory (servers.s: limits: {memory_mb: 1024})" in why

    failing = ServerSpec("f", ("/bin/sh", "-c", f"cat {script}; exit 4"))
    server = await boxes().start(failing, WHO)
    with anyio.fail_after(tooling.PATIENCE):
        assert (await server.over()).exit_status == 4
    why = await server.stop()
    assert why.startswith("it ended with status 4; it wanted files that its box does not have")
    assert str(script) not in why
    assert f"servers.f: mounts: [{{host: {script}, at: {script}, mode: ro}}]" in server.hint


async def test_what_cannot_be_started(boxes: Boxes, script: Path, tmp_path: Path) -> None:
    for bad in (
        ServerSpec("x", ("/no/such/program",)),
        spec(script, mounts=(Mount(str(tmp_path / "absent"), "/x"),)),
        spec(script, mounts=(Mount(str(tmp_path), "/etc/x"),)),
        spec(script, network="somewhere"),
    ):
        with pytest.raises(Unavailable):
            await boxes().start(bad, WHO)
    with pytest.raises(Unavailable, match="there are none here"):
        await boxes().launch(spec(script, placement="session:abc"), WHO)


async def test_a_server_out_of_an_image_has_that_as_its_root(boxes: Boxes, script: Path, tmp_path: Path) -> None:
    root = system_root(tmp_path / "root")
    (root / "app").mkdir()
    (root / "app" / "server.py").write_text(REPEATER)
    image = PackageSpec("image", ("host/name:tag",), "", str(root))
    server = ServerSpec("i", (PYTHON, "server.py"), env={"OWN": "1"}, cwd="/app", packages=image)
    started = await boxes().start(server, WHO)
    try:
        assert started.isolation["root"] == "image"
        assert await asked(started, "os.getcwd(), os.environ['OWN'], sys.executable") == ["/app", "1", PYTHON]
        assert "Read-only" in str(await asked(started, "open('server.py', 'a')"))
        assert await asked(started, "open('/workspace/own', 'w').write('x')") == 1
        for path in (str(script), sys.prefix, "/usr/share/doc"):
            assert await asked(started, f"os.path.exists({path!r})") is False
        assert "unreachable" in str(
            await asked(started, "__import__('socket').create_connection(('192.0.2.1', 80), 25)")
        )
    finally:
        assert await started.stop() == ""


async def test_where_an_image_cannot_be_the_root(boxes: Boxes, script: Path, tmp_path: Path) -> None:
    image = ServerSpec("i", ("/bin/sh",), packages=PackageSpec("image", ("host/name",), "", str(tmp_path)))
    with pytest.raises(Unavailable, match="a root of its own"):
        boxes().needed(image)
    one, other = replace(image, placement="pair"), spec(script, placement="pair")
    with pytest.raises(Unavailable, match="have one root"):
        await boxes(one, other).start(one, WHO)
    with pytest.raises(Unavailable, match="runs only in a box"):
        await HostLauncher({}).launch(replace(image, placement="unsafe_host"), WHO)
    with pytest.raises(Unavailable, match="of a box is its own"):
        await boxes().start(replace(image, command=("/workspace/server",)), WHO)


async def test_a_server_that_writes_faster_than_it_is_read_waits(boxes: Boxes, script: Path) -> None:
    server = await boxes().start(spec(script), WHO)
    await server.send(b"'x' * 5_000_000\n")
    await anyio.sleep(0.5)
    data = b""
    with anyio.fail_after(tooling.PATIENCE):
        while not data.endswith(b"\n"):
            chunk = await server.receive("stdout")
            assert len(chunk) <= 3 * 65_536
            data += chunk
    assert len(data) == 5_000_003
    await server.stop()
    with pytest.raises(OSError, match="closed"):
        await server.send(b"x")


async def test_a_volume_outlives_the_box_and_is_each_agents_own(boxes: Boxes, script: Path, tmp_path: Path) -> None:
    launcher = boxes()
    launcher.settings = replace(launcher.settings, volumes=tmp_path / "state")
    keeping = spec(script, volumes=(ServerVolume("notes", "/data"),))

    async def said(who: Principal, expression: str) -> object:
        server = await launcher.start(keeping, who)
        try:
            return await asked(server, expression)
        finally:
            await server.stop()

    assert await said(WHO, "open('/data/a', 'w').write('kept')") == 4
    assert await said(WHO, "open('/data/a').read()") == "kept"
    assert await said(Principal("other"), "os.listdir('/data')") == []
    folders = list((tmp_path / "state").iterdir())
    assert len(folders) == 2 and all(each.stat().st_mode & 0o777 == 0o700 for each in folders)


async def test_a_volume_needs_a_state_to_lie_in(boxes: Boxes, script: Path) -> None:
    with pytest.raises(Unavailable, match="no state"):
        await boxes().start(spec(script, volumes=(ServerVolume("notes", "/data"),)), WHO)
