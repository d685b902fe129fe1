"""`ringfence init --from` with servers of `docker run`, out of a real registry (Debian's): fetched, pinned, and run in
boxes whose root is the image."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from tests import boxing, gateways, tooling
from tests.packages import images
from tests.packages.hostile import serving
from tests.packages.images import Image, Registry, layer
from tests.packages.servers import PYTHON

pytestmark = pytest.mark.slow

VALUE = "q8Zk2mP0vX7tR4wL9sB1"
WANTS = {
    "--config.entrypoint": ["python3", "/app/server.py"],
    "--config.env": ["PATH=/usr/bin:/bin", "FLAVOUR=plain"],
    "--config.workingdir": ["/app"],
    "--config.user": ["nobody"],
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    boxing.need_boxes()
    with images.registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    (folder / "docs").mkdir(parents=True)
    (folder / "docs" / "a.txt").write_text("kept in docs")
    return folder


def client_file(project: Path, **servers: Any) -> Path:
    path = project / ".mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def taken(project: Path, *names: str) -> str:
    """What was said when these servers were taken over."""
    accepted = [word for name in names for word in ("--yes", name)]
    accepted += ["--plain", "LEVEL"]
    done = gateways.run("init", "--from", project / ".mcp.json", *accepted, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "did not start" not in done.stdout, done.stderr
    return done.stdout + done.stderr


def called(project: Path, tool: str, **arguments: str) -> dict[str, Any]:
    done = gateways.run("call", tool, "--args", json.dumps(arguments), "--json", cwd=project)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def said(project: Path, tool: str, **arguments: str) -> str:
    return str(called(project, tool, **arguments)["content"][0]["text"])


def test_a_server_of_docker_run_ends_in_a_gateway_that_works(registry: Registry, project: Path) -> None:
    """As the page on images has it, but for the name of its registry."""
    digest = registry.push(Image([images.debian(), layer(("app/server.py", PYTHON))], WANTS), "tools/time:1")
    page = (tooling.ROOT / "docs/images.md").read_text()
    block = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    (project / ".mcp.json").write_text(block.replace("registry.corp.example", registry.host))
    taken(project, "time")
    spec = config.load(project / "ringfence.yaml").servers["time"]
    assert spec.packages is not None
    assert spec.packages.names == (f"{registry.host}/tools/time:1@{digest}",)
    assert spec.command == ("/usr/bin/python3", "/app/server.py")
    assert (spec.cwd, spec.env) == ("/app", {"PATH": "/usr/bin:/bin", "FLAVOUR": "plain", "LEVEL": "info"})
    assert "a box has an id of its own" in (project / "ringfence.yaml").read_text()
    found = called(project, "look", path="/docs/a.txt")
    assert found["content"][0]["text"] == "kept in docs"
    assert found["facts"]["isolation"]["level"] == "process"
    assert said(project, "variable", name="FLAVOUR") == "plain"
    assert called(project, "write_down", path="/docs/b.txt")["status"] == "failed"
    assert called(project, "look", path=str(project / ".mcp.json"))["status"] == "failed"


def test_an_image_is_checked_at_each_start_and_can_be_fetched_again(registry: Registry, project: Path) -> None:
    registry.push(Image([images.debian(), layer(("app/server.py", PYTHON))], WANTS), "me/small:1")
    client_file(project, small={"command": "podman", "args": ["run", "-i", f"{registry.host}/me/small:1"]})
    taken(project, "small")
    packages = config.load(project / "ringfence.yaml").servers["small"].packages
    assert packages is not None
    tree = Path(packages.folder)
    with (tree / "app/server.py").open("a") as stream:
        stream.write("# more")
    assert "not as they were fetched" in json.dumps(called(project, "look", path="/app/server.py"))
    shutil.rmtree(tree.parents[1])
    assert "ringfence init --fetch" in json.dumps(called(project, "look", path="/app/server.py"))
    done = gateways.run("init", "--fetch", cwd=project)
    assert (done.stdout, done.returncode) == ("small: as it was pinned\n", 0), done.stderr


def test_a_secret_of_docker_run_becomes_a_name(
    registry: Registry, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMALL_TOKEN", VALUE)
    registry.push(Image([images.debian(), layer(("app/server.py", PYTHON))], WANTS), "me/secret:1")
    words = ["run", "-i", "-e", f"SMALL_TOKEN={VALUE}", f"{registry.host}/me/secret:1"]
    client_file(project, small={"command": "docker", "args": words})
    told = taken(project, "small")
    assert VALUE not in told + (project / "ringfence.yaml").read_text()
    assert config.load(project / "ringfence.yaml").servers["small"].secrets == ("small_token",)


def test_one_image_does_not_take_the_others_along(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxing.need_boxes()
    monkeypatch.setenv("API_TOKEN", "another value entirely")
    (project / "server.py").write_text(PYTHON)
    wants: dict[str, Any] = {"blank": {"Entrypoint": [""]}, "long": {"Env": [f"V{n}={'x' * 30_000}" for n in range(9)]}}
    wants["named"] = {"Entrypoint": ["/x"], "Env": ["API_TOKEN=", f"BAKED={VALUE}"]}
    with serving() as fake:
        for tag, config_ in wants.items():
            fake.say(fake.image(layer(("x", "")), config=config_), tag)
        images_ = {
            tag: {"command": "docker", "args": ["run", "-e", "API_TOKEN", f"{fake.host}/it:{tag}"]} for tag in wants
        }
        images_["nowhere"] = {"command": "docker", "args": ["run", "-w", "", f"{fake.host}/it:named"]}
        client_file(project, plain={"command": sys.executable, "args": [str(project / "server.py")]}, **images_)
        accepted = [word for name in ("plain", *images_) for word in ("--yes", name)]
        done = gateways.run("init", "--from", project / ".mcp.json", *accepted, cwd=project)
    assert done.returncode == 0, done.stderr
    servers = config.load(project / "ringfence.yaml").servers
    assert servers.keys() == {"plain", "named"}, done.stderr
    # What the image has for it would stand before the secret.
    assert (servers["named"].secrets, [*servers["named"].env]) == (("api_token",), ["PATH", "BAKED"])
    assert "BAKED is as the image has it, and looks like a secret" in (project / "ringfence.yaml").read_text()


def test_a_server_that_others_wrote(registry: Registry, project: Path, tmp_path: Path) -> None:
    tooling.need("mcp-server-time")
    server = images.installed(tmp_path / "packages", "mcp-server-time==2026.10.19")
    wants = {
        "--config.entrypoint": ["/usr/bin/python3", "-m", "mcp_server_time"],
        "--config.cmd": ["--local-timezone=Europe/Berlin"],
        "--config.env": ["PYTHONPATH=/app/packages"],
    }
    registry.push(Image([images.debian(), server], wants), "others/time:1")
    client_file(project, time={"command": "docker", "args": ["run", "-i", "--rm", f"{registry.host}/others/time:1"]})
    taken(project, "time")
    assert "datetime" in said(project, "get_current_time", timezone="Europe/Berlin")
