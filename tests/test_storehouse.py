"""Packages through real install boxes, from registries on loopback: what is kept is what the registry said, its code
runs in no box that reaches anything, and nothing but the registry is reached."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import storehouse
from ringfence.config.settings import SandboxSettings
from ringfence.errors import Unavailable
from ringfence.packages.installing import Wanted
from ringfence.packages.shelf import Tree
from tests.packages.registry import Registry, served

pytestmark = pytest.mark.anyio

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here")
MODULE = {"greeting.py": "def main():\n    print('hello')\n"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The operator's own npm and pip know this one and no other."""
    with served() as found:
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple")
        monkeypatch.setenv("npm_config_registry", f"{found.url}/")
        yield found


async def fetch(state: Path, kind: str, *names: str, scripts: bool = False) -> Tree:
    return await storehouse.fetch(state, SandboxSettings(), Wanted(kind, names, scripts))  # type: ignore[arg-type]


async def test_a_wheel_is_fetched_once_and_kept_by_what_it_holds(registry: Registry, tmp_path: Path) -> None:
    digest = registry.wheel("greeting", "1.2", MODULE, script="greet = greeting:main")
    tree = await fetch(tmp_path, "pypi", "greeting")
    assert [(p.name, p.version, p.integrity) for p in tree.packages] == [("greeting", "1.2", f"sha256:{digest}")]
    assert tree.programs == {"greet": "bin/greet"}
    assert (tree.folder / "greeting.py").read_text() == MODULE["greeting.py"]
    assert list((tree.folder / "__pycache__").iterdir())
    asked = len(registry.asked)
    assert await fetch(tmp_path, "pypi", "greeting") == tree
    assert len(registry.asked) == asked


async def test_a_wheel_that_is_not_what_the_index_says_is_not_kept(registry: Registry, tmp_path: Path) -> None:
    registry.wheel("greeting", "1.2", MODULE, told=b"something else")
    with pytest.raises(Unavailable, match="could not be fetched"):
        await fetch(tmp_path, "pypi", "greeting")
    assert not [path for path in (tmp_path / "packages").iterdir() if not path.name.startswith(".")]


async def test_what_has_only_sources_is_not_built(registry: Registry, tmp_path: Path) -> None:
    registry.pages["/simple/built/"] = (
        b'<!DOCTYPE html><html><body><a href="built-1.tar.gz#sha256=00">built-1.tar.gz</a></body></html>'
    )
    with pytest.raises(Unavailable, match="could not be fetched"):
        await fetch(tmp_path, "pypi", "built")


@pytest.mark.parametrize("name", ["./here", "git+https://x.example/y", "--index-url=http://x", "a @ file:///b", "-r x"])
async def test_only_names_of_packages_are_taken(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a package"):
        await fetch(tmp_path, "pypi", name)


@needs_npm
async def test_an_npm_package_with_all_that_it_needs(registry: Registry, tmp_path: Path) -> None:
    needed = registry.npm("needed", "2.0.0", {"index.js": "module.exports = 1"})
    asked = registry.npm("@me/tool", "1.0.1", {"cli.js": "1"}, bin="cli.js", dependencies={"needed": "^2.0.0"})
    tree = await fetch(tmp_path, "npm", "@me/tool")
    found = {(p.name, p.version, p.integrity) for p in tree.packages}
    assert found == {("@me/tool", "1.0.1", asked), ("needed", "2.0.0", needed)}
    assert tree.programs == {"tool": "node_modules/@me/tool/cli.js", "@me/tool": "node_modules/@me/tool/cli.js"}
    assert (tree.folder / "node_modules/needed/index.js").read_text() == "module.exports = 1"


@needs_npm
async def test_an_archive_that_is_not_what_the_registry_says_is_not_kept(registry: Registry, tmp_path: Path) -> None:
    registry.npm("tool", "1.0.0", {"cli.js": "1"}, bin="cli.js")
    registry.pages["/tool/-/1.0.0.tgz"] += b"more"
    with pytest.raises(Unavailable, match="could not be fetched"):
        await fetch(tmp_path, "npm", "tool")


@needs_npm
async def test_an_install_box_reaches_the_registry_alone(registry: Registry, tmp_path: Path) -> None:
    with served() as elsewhere:
        registry.npm("tool", "1.0.0", {"cli.js": "1"}, at=elsewhere.url)
        elsewhere.npm("tool", "1.0.0", {"cli.js": "1"})
        with pytest.raises(Unavailable, match=f"not let to 127.0.0.1:{elsewhere.port}"):
            await fetch(tmp_path, "npm", "tool")
        assert elsewhere.asked == []


@needs_npm
async def test_scripts_of_packages_run_only_where_asked_for_and_reach_nothing(
    registry: Registry, tmp_path: Path
) -> None:
    reach = f"require('http').get('{registry.url}/reached').on('error', () => 0)"
    script = f"require('fs').writeFileSync('made', 'x'); {reach}"
    registry.npm("tool", "1.0.0", {"cli.js": "1", "install.js": script}, scripts={"postinstall": "node install.js"})
    quiet = await fetch(tmp_path, "npm", "tool")
    assert not (quiet.folder / "node_modules/tool/made").exists()
    loud = await fetch(tmp_path, "npm", "tool", scripts=True)
    assert (loud.folder / "node_modules/tool/made").exists()
    assert "/reached" not in registry.asked


async def test_a_tree_that_was_altered_is_not_used(registry: Registry, tmp_path: Path) -> None:
    registry.wheel("greeting", "1.2", MODULE)
    tree = await fetch(tmp_path, "pypi", "greeting")
    (tree.folder / "greeting.py").write_text("evil")
    with pytest.raises(Unavailable, match="not what was fetched"):
        storehouse.shelf(tmp_path).tree(tree.digest)
    with pytest.raises(Unavailable, match="not what was fetched"):
        await fetch(tmp_path, "pypi", "greeting")


async def test_a_registry_with_a_password_in_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:pass@index.example/simple")
    with pytest.raises(Unavailable, match="no secret enters"):
        await fetch(tmp_path, "pypi", "greeting")
