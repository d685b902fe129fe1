"""A look at a server before there is a gateway: boxed, once, and what it lacked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ringfence.compose.servers import inspect_server
from ringfence.config import SandboxSettings
from ringfence.core.box import Mount
from ringfence.core.model import PackageSpec, ServerSpec
from ringfence.packages.cache import AT, FOLDER, Package, PackageCache
from tests import tooling

pytestmark = pytest.mark.anyio


async def test_what_it_offers(hostile_command: list[str]) -> None:
    seen = await inspect_server(ServerSpec("hostile", tuple(hostile_command)), SandboxSettings())
    assert seen.problem is None and seen.wanted == ()
    assert {"echo", "counter"} <= {definition.name for definition in seen.definitions}


async def test_what_it_lacked_and_that_a_grant_helps(tmp_path: Path) -> None:
    data, script = tmp_path / "data.json", tmp_path / "code" / "server.py"
    data.write_text("{}")
    script.parent.mkdir()
    hostile = tooling.fixture_command("hostile_server.py")[1]
    script.write_text(f"open({str(data)!r}).close()\nimport runpy\nrunpy.run_path({hostile!r}, run_name='__main__')\n")
    fixtures = str(tooling.FIXTURES)
    spec = ServerSpec("needy", (sys.executable, str(script)), mounts=(Mount(fixtures, fixtures),))
    seen = await inspect_server(spec, SandboxSettings())
    assert seen.definitions == () and "FileNotFoundError" in seen.said
    assert seen.problem is not None and f"it wanted to see {data}" in seen.problem
    (want,) = seen.wanted
    assert (want.kind, want.line) == ("path", f"mounts: [{{host: {data}, at: {data}, mode: ro}}]")
    granted = ServerSpec("needy", spec.command, mounts=(*spec.mounts, Mount(str(data), str(data))))
    assert (await inspect_server(granted, SandboxSettings())).problem is None


async def test_packages_that_were_altered_are_not_run(tmp_path: Path, hostile_command: list[str]) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "server.py").write_text("print('started', file=open('/workspace/started', 'w'))")
    tree = PackageCache(tmp_path / FOLDER).put("pypi", made, (Package("server", "1", "sha256:00"),), {})
    mounted = Mount(str(tree.folder), AT)
    command = (hostile_command[0], f"{AT}/server.py")
    packed = PackageSpec("pypi", ("server",), tree.digest, str(tree.folder))
    spec = ServerSpec("packaged", command, mounts=(mounted,), packages=packed)
    seen = await inspect_server(spec, SandboxSettings())
    assert seen.problem is not None and "not as they were fetched" not in seen.problem
    (tree.folder / "server.py").write_text("evil")
    for _ in range(2):
        seen = await inspect_server(spec, SandboxSettings())
        assert seen.problem is not None and "not as they were fetched" in seen.problem
        assert seen.said == "" and seen.definitions == ()


async def test_what_cannot_be_looked_at() -> None:
    seen = await inspect_server(ServerSpec("none", ("/no/such/server",)), SandboxSettings())
    assert seen.problem is not None and "there is no program" in seen.problem
    seen = await inspect_server(ServerSpec("none", ("true",)), SandboxSettings(backend="microsandbox"))
    assert seen.problem is not None and "not built" in seen.problem
