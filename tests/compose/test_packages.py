"""Packages through real install boxes, from registries on loopback: what is kept is what the registry said, its code
runs in no box that reaches anything, and nothing but the registry is reached."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.compose import packages
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import Installs
from ringfence.core.errors import Unavailable
from ringfence.egress.tls import Authority
from ringfence.packages.cache import Tree
from ringfence.packages.install import InstallRequest
from ringfence.sandbox.process.backend import ProcessBackend
from tests.boxing import boxes_run
from tests.packages.registry import Registry, known_alone, served

pytestmark = pytest.mark.anyio

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed here")
MODULE = {"greeting.py": "def main():\n    print('hello')\n"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The operator's own npm and pip know this one and no other."""
    with served() as found:
        known_alone(found, monkeypatch)
        yield found


async def fetch(state: Path, kind: str, *names: str, scripts: bool = False) -> Tree:
    return await packages.fetch(state, SandboxSettings(), InstallRequest(kind, names, scripts))  # type: ignore[arg-type]


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
        with pytest.raises(Unavailable, match=f"refused a connection to 127.0.0.1:{elsewhere.port}"):
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
    with pytest.raises(Unavailable, match="not as they were fetched"):
        packages.package_cache(tmp_path).tree(tree.digest)
    with pytest.raises(Unavailable, match="not as they were fetched"):
        await fetch(tmp_path, "pypi", "greeting")


# ── Registries that want to know who asks ──

PASSWORD = "correct-horse-battery"


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    basic = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    with served(Authority(), f"Basic {basic}") as found:
        assert found.secured is not None
        (tmp_path / "ca.pem").write_bytes(found.secured.pem)
        known_alone(found, monkeypatch)
        monkeypatch.setenv("PIP_CERT", str(tmp_path / "ca.pem"))
        monkeypatch.setenv("PIP_INDEX_URL", f"https://me:{PASSWORD}@localhost:{found.port}/simple")
        yield found


async def test_a_password_in_an_address_is_put_in_on_the_way_and_is_in_no_box(
    secured: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = secured.wheel("greeting", "1.2", MODULE)
    seen = boxes_run(monkeypatch)
    tree = await fetch(tmp_path / "state", "pypi", "greeting")
    assert [package.integrity for package in tree.packages] == [f"sha256:{digest}"]
    assert set(secured.presented) == {secured.wants}
    assert seen and not any(PASSWORD in str(spec) or secured.wants in str(spec) for spec in seen)
    assert not any(PASSWORD.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


async def test_a_password_that_comes_back_does_not_reach_the_box_and_is_in_no_error(
    secured: Registry, tmp_path: Path
) -> None:
    link = f"<a href='../{PASSWORD}-1.tar.gz'>{PASSWORD}-1.tar.gz</a>"
    page = f"<!DOCTYPE html><html><body>{secured.wants} {link}</body></html>"
    secured.pages["/simple/greeting/"] = page.encode()
    with pytest.raises(Unavailable, match="could not be fetched") as refused:
        await fetch(tmp_path / "state", "pypi", "greeting")
    assert PASSWORD not in str(refused.value)


async def test_a_password_is_never_sent_in_the_clear(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:{PASSWORD}@127.0.0.1:{registry.port}/simple")
    with pytest.raises(Unavailable, match="plain HTTP") as refused:
        await fetch(tmp_path, "pypi", "greeting")
    assert PASSWORD not in str(refused.value)
    assert registry.asked == []


@needs_npm
async def test_a_token_of_npm_is_put_in_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Authority(), f"Bearer {PASSWORD}") as found:
        assert found.secured is not None
        (tmp_path / "ca.pem").write_bytes(found.secured.pem)
        (tmp_path / "npmrc").write_text(f"//localhost:{found.port}/:_authToken=${{OUR_TOKEN}}\n")
        monkeypatch.setenv("OUR_TOKEN", PASSWORD)
        monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
        monkeypatch.setenv("npm_config_cafile", str(tmp_path / "ca.pem"))
        monkeypatch.setenv("npm_config_registry", f"{found.url}/")
        integrity = found.npm("tool", "1.0.0", {"cli.js": "1"}, bin="cli.js")
        tree = await fetch(tmp_path / "state", "npm", "tool")
        assert [package.integrity for package in tree.packages] == [integrity]
        assert set(found.presented) == {found.wants}
    assert not any(PASSWORD.encode() in path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())


async def test_a_registry_that_does_not_answer_is_told_from_one_that_has_nothing(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ProcessBackend()
    try:
        having = packages.PackageService(tmp_path, backend, SandboxSettings()).index(Installs(("*",)))
        assert (await having.answer("/simple/nobody-has-this/")).status == 404
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
        gone = packages.PackageService(tmp_path, backend, SandboxSettings()).index(Installs(("*",)))
        page = await gone.answer("/simple/nobody-has-this/")
        assert isinstance(page.body, bytes) and b"the.registry.did.not.answer" in page.body
        assert "127.0.0.1:1" in (await gone.answer("/refused/nobody-has-this/x.whl")).phrase
    finally:
        await backend.close()


# ── Sources ──

BACKEND = """
import os, socket, zipfile
{imports}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    try:
        socket.create_connection(("127.0.0.1", {port}), 2).close()
        seen = "reached"
    except OSError:
        seen = "nobody"
    seen += " " + ",".join(sorted(name for name in os.environ if "proxy" in name.lower()))
    name = "{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as packed:
        packed.writestr("built_seen.py", f"seen = {{seen!r}}\\n")
        info = "{name}-1.0.dist-info/"
        packed.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        told = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        packed.writestr(info + "WHEEL", told)
        packed.writestr(info + "RECORD", "")
    return name
"""
PROJECT = '[build-system]\nrequires = [{needs}]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
BUILDS = SandboxSettings(build_packages=True)


def sources(registry: Registry, name: str = "built", *, needs: str = "", imports: str = "", as_: str = "") -> str:
    backend = BACKEND.format(port=registry.port, name=as_ or name, imports=imports)
    return registry.sources(name, "1.0", {"pyproject.toml": PROJECT.format(needs=needs), "backend.py": backend})


async def test_sources_are_built_in_a_box_that_reaches_nothing_and_what_comes_of_it_says_so(
    registry: Registry, tmp_path: Path
) -> None:
    digest = sources(registry)
    tree = await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("built",)))
    (package,) = tree.packages
    assert (package.name, package.version, package.built_from) == ("built", "1.0", f"sha256:{digest}")
    assert (tree.folder / "built_seen.py").read_text() == "seen = 'nobody '\n"
    asked = len(registry.asked)
    again = await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("built==1.0",)))
    assert again.packages == tree.packages and not any(path.startswith("/files") for path in registry.asked[asked:])


async def test_a_build_has_the_tools_that_it_names(registry: Registry, tmp_path: Path) -> None:
    registry.wheel("tool", "2.0", {"tool.py": "x = 1\n"})
    sources(registry, needs='"tool >= 1", "never; python_version < \'3\'"', imports="import tool; assert tool.x")
    tree = await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("built",)))
    assert not (tree.folder / "tool.py").exists()


async def test_sources_that_come_to_another_package_are_refused(registry: Registry, tmp_path: Path) -> None:
    sources(registry, as_="other")
    with pytest.raises(Unavailable, match="another package"):
        await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("built",)))


async def test_sources_that_are_not_what_the_index_says_are_not_built(registry: Registry, tmp_path: Path) -> None:
    sources(registry)
    registry.pages["/files/built-1.0.tar.gz"] = b"something else"
    with pytest.raises(Unavailable, match="not what the registry says"):
        await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("built",)))


async def test_a_wheel_in_our_cache_that_was_altered_is_not_handed_out(registry: Registry, tmp_path: Path) -> None:
    registry.wheel("greeting", "1.2", MODULE)
    await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("greeting",)))
    (kept,) = (tmp_path / "packages" / "wheels").rglob("*.whl")
    kept.write_bytes(kept.read_bytes() + b"x")
    with pytest.raises(Unavailable, match="not what was fetched"):
        await packages.fetch(tmp_path, BUILDS, InstallRequest("pypi", ("greeting==1.2",)))
