"""`ringfence init --learn`: what a server lacks is offered and never taken, and what it does not need is taken back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ringfence import config
from ringfence.cli.init.learning import ServerGrant, granted, grants_of
from ringfence.sandbox.servers.startup_diagnosis import MissingGrant
from tests import boxing, gateways
from tests.cli.terminals import at_terminal
from tests.packages.servers import PYTHON


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A server that looks into two folders when it starts, and sees neither."""
    boxing.need_boxes()
    for name in ("code", "docs", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "server.py").write_text(PYTHON)
    command = json.dumps([sys.executable, str(tmp_path / "code/server.py"), str(tmp_path / "docs")])
    text = f"# mine\nversion: 1\ngateway: {{state: ./state}}\nservers:\n  small:\n    command: {command}  # as it is\n"
    return gateways.write(tmp_path, text)


def test_what_it_lacks_is_offered_and_written_as_little_as_works(path: Path) -> None:
    docs = path.parent / "docs"
    call = f"write_down={json.dumps({'path': str(docs / 'new.txt')})}"
    with at_terminal("init", "--learn", "small", "--call", call, cwd=path.parent) as terminal:
        terminal.expect(f"May small read {docs}?", 60)
        terminal.type("y\n")
        terminal.expect(f"May small read and write {docs}?", 60)
        terminal.type("y\n")
        terminal.expect("Write this to", 60)
        terminal.type("y\n")
        assert terminal.end(60) == 0
    text = path.read_text()
    assert "# mine" in text and "# as it is" in text
    settings = config.load(path)
    assert [(mount.at, mount.mode) for mount in settings.servers["small"].mounts] == [(str(docs), "rw")]
    assert {name: contract.mode for name, contract in settings.contracts.items()} == {
        "look": "read",
        "write_down": "write",
        "variable": "write",
    }
    assert (docs / "new.txt").read_text() == "written"


def test_nothing_is_given_that_nobody_agreed_to(path: Path) -> None:
    before = path.read_text()
    done = gateways.run("init", "--learn", "small", cwd=path.parent)
    assert done.returncode == 1
    assert f"--grant 'mount:{path.parent}/docs:ro'" in done.stderr
    assert "does not work with what it was given" in done.stderr
    assert path.read_text() == before


def test_a_grant_by_name_and_a_diff_that_is_not_written_unasked(path: Path) -> None:
    before = path.read_text()
    grant = f"mount:{path.parent}/docs:ro"
    done = gateways.run("init", "--learn", "small", "--grant", grant, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert "\n+    mounts:" in done.stdout
    assert path.read_text() == before
    done = gateways.run("init", "--learn", "small", "--grant", grant, "--replace", cwd=path.parent)
    assert done.returncode == 0, done.stderr
    done = gateways.run("init", "--learn", "small", cwd=path.parent)
    assert "works as it is" in done.stdout


def test_options_that_do_not_fit(path: Path) -> None:
    assert gateways.run("init", "--call", "x", cwd=path.parent).returncode == 2
    assert gateways.run("init", "--learn", "small", "--yes", "x", cwd=path.parent).returncode == 2
    assert gateways.run("init", "--learn", "small", "--call", "x={", cwd=path.parent).returncode == 2
    nobody = gateways.run("init", "--learn", "nobody", cwd=path.parent)
    assert nobody.returncode == 1 and "there are: small" in nobody.stderr


@pytest.mark.parametrize(
    ("option", "grants"),
    [
        ("--mount /a b:/a b:rw", [ServerGrant("mount", "/a b", "rw")]),
        (
            "--allow a.example:443 --allow b.example:443",
            [ServerGrant("allow", "a.example:443"), ServerGrant("allow", "b.example:443")],
        ),
        ("--allow HOST", []),
        ("--memory 1024", [ServerGrant("limit", "memory_mb", "1024")]),
        ("", []),
    ],
)
def test_wants_as_grants(option: str, grants: list[ServerGrant]) -> None:
    assert grants_of(MissingGrant("path", "x", "y", option)) == grants


def test_grants_in_a_file(tmp_path: Path) -> None:
    text = "servers:\n  a: {command: [x]}\n"
    given = [
        ServerGrant("allow", "a.example:443"),
        ServerGrant("limit", "memory_mb", "1024"),
        ServerGrant("mount", str(tmp_path), "ro"),
    ]
    settings = config.loads(granted(text, "a", given), file="x", base=Path("/"))
    assert settings.servers["a"].network == "a_network"
    assert settings.networks["a_network"].allow == ("a.example:443",)
    assert settings.servers["a"].limits["memory_bytes"] == 1024 * 1024 * 1024
