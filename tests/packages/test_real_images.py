"""Images of a real registry (Debian's), made and pushed by others' programs: fetched, checked, laid out, kept."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose import packages
from ringfence.config.settings import SandboxSettings
from ringfence.core.errors import Unavailable
from ringfence.packages.cache import Tree
from ringfence.packages.install import InstallRequest
from tests import boxing
from tests.packages import images
from tests.packages.images import Image, Registry, entry, layer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    boxing.need_boxes()
    with images.registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


async def fetch(state: Path, name: str) -> Tree:
    return await packages.fetch(state, SandboxSettings(), InstallRequest("image", (name,)))


def listed(root: Path) -> dict[str, Any]:
    """What a tree holds: of files their text and right to be executed, of links their targets."""
    found: dict[str, Any] = {}
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = Path(folder) / name
            inside = str(path.relative_to(root))
            if path.is_symlink():
                found[inside] = os.readlink(path)
            elif path.is_dir():
                found[inside] = None
            else:
                found[inside] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


LOWER = layer(
    entry("a", tarfile.DIRTYPE),
    ("a/gone", "1"),
    ("a/kept", "2"),
    entry("b", tarfile.DIRTYPE),
    ("b/lower", "3"),
    entry("b/deep", tarfile.DIRTYPE),
    ("b/deep/lower", "4"),
    ("changed", "5"),
    entry("link", tarfile.SYMTYPE, "a"),
    entry("out", tarfile.SYMTYPE, "/../../etc/passwd"),
    entry("same", tarfile.LNKTYPE, "a/kept"),
    entry("folder", tarfile.DIRTYPE),
    ("folder/below", "6"),
    ("file", "7"),
)
UPPER = layer(
    ("a/.wh.gone", ""),
    ("b/.wh..wh..opq", ""),
    ("b/upper", "8"),
    ("changed", "9"),
    ("link/through", "10"),
    ("folder", "11"),
    entry("file", tarfile.DIRTYPE),
    ("file/below", "12"),
)


async def test_layers_come_to_what_another_program_makes_of_them(registry: Registry, tmp_path: Path) -> None:
    digest = registry.push(Image([LOWER, UPPER]), "me/layers:1")
    tree = await fetch(tmp_path, f"{registry.host}/me/layers:1")
    assert tree.packages[0].integrity == digest
    assert tree.packages[0].name == f"{registry.host}/me/layers:1@{digest}"
    assert listed(tree.folder) == listed(registry.unpacked("me/layers:1"))
    assert {oct(path.stat().st_mode & 0o7777) for path in tree.folder.rglob("*") if not path.is_symlink()} == {"0o755"}


async def test_what_was_pinned_is_had_without_its_registry(registry: Registry, tmp_path: Path) -> None:
    digest = registry.push(Image([layer(("x", "1"))]), "me/pinned:1")
    tree = await fetch(tmp_path, f"{registry.host}/me/pinned:1")
    shutil.rmtree(registry.folder / "store/docker/registry/v2/repositories/me/pinned")
    assert await fetch(tmp_path, f"{registry.host}/me/pinned:1@{digest}") == tree
    with pytest.raises(Unavailable, match="could not be fetched"):
        await fetch(tmp_path, f"{registry.host}/me/pinned:1")


async def test_an_image_that_was_altered_is_not_used(registry: Registry, tmp_path: Path) -> None:
    registry.push(
        Image([layer(("x", "1"), entry("l", tarfile.SYMTYPE, "x"), entry("d", tarfile.DIRTYPE))]), "me/whole:1"
    )
    tree = await fetch(tmp_path, f"{registry.host}/me/whole:1")
    packages.package_cache(tmp_path).tree(tree.digest)
    (tree.folder / "l").unlink()
    (tree.folder / "l").symlink_to("d")
    with pytest.raises(Unavailable, match="not as they were fetched"):
        packages.package_cache(tmp_path).tree(tree.digest)


async def test_a_tag_that_means_what_it_meant_is_not_fetched_again(registry: Registry, tmp_path: Path) -> None:
    registry.push(Image([layer(("x", "1"))]), "me/again:1")
    tree = await fetch(tmp_path, f"{registry.host}/me/again:1")
    blobs = registry.folder / "store/docker/registry/v2/repositories/me/again/_layers"
    shutil.rmtree(blobs)
    assert await fetch(tmp_path, f"{registry.host}/me/again:1") == tree


async def test_an_image_that_nobody_has(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="answered with 404"):
        await fetch(tmp_path, f"{registry.host}/me/nobody-has-this:1")


PASSWORD = "correct-horse-battery"


async def test_a_registry_that_lets_in_only_whom_it_knows(own_engines: Path) -> None:
    """Over TLS, with a certificate that the operator's engines trust, and their password."""
    with images.registry(own_engines / "registry", password=PASSWORD) as registry:
        digest = registry.push(Image([layer(("x", "1"))]), "me/private:1")
        name = f"{registry.host}/me/private:1"
        trusted = own_engines / "config/containers/certs.d" / registry.host
        trusted.mkdir(parents=True)
        shutil.copy(registry.folder / "ca.crt", trusted / "ca.crt")
        with pytest.raises(Unavailable, match="wants to know who asks"):
            await fetch(own_engines / "state", name)
        auth = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        (own_engines / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        tree = await fetch(own_engines / "state", name)
    assert tree.packages[0].integrity == digest
    kept = (path for path in (own_engines / "state").rglob("*") if path.is_file())
    assert not any(PASSWORD.encode() in path.read_bytes() for path in kept)


@pytest.mark.parametrize("host", ["169.254.169.254", "2852039166:80", "[fd00:ec2::254]:80"])
async def test_a_service_that_hands_out_credentials_is_no_registry(tmp_path: Path, host: str) -> None:
    boxing.need_boxes()
    with pytest.raises(Unavailable, match="no registry does"):
        await fetch(tmp_path, f"{host}/x:1")
