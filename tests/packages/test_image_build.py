"""A root file system out of this host: the same bytes each time, read by others' programs, and the root of a box."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence.compose import images
from ringfence.compose.images import ImageWanted
from ringfence.config.settings import SandboxSettings
from ringfence.core import system
from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.packages.cache import PackageCache
from ringfence.packages.images import build, manifests, packing
from ringfence.packages.images.build import BuildRequest, BuiltImage
from ringfence.packages.images.host import elf
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.packages.images.library import root_of
from ringfence.packages.inside.layers import Layers
from ringfence.sandbox.process.backend import ProcessBackend
from tests import boxing, gateways

NATIVE = tuple(name for name in ("markupsafe", "numpy") if EnvironmentPackages().has(name))
"""Packages of this environment that have code for the machine, with libraries of their own."""
USES = """
import ctypes, json, sqlite3, ssl, sys, zoneinfo
import markupsafe._speedups
found = {"python": sys.executable, "prefix": sys.prefix, "libc": ctypes.CDLL(None).getpid() > 0}
found["sqlite"] = sqlite3.connect(":memory:").execute("select 6 * 7").fetchone()[0]
found["authorities"] = len(ssl.create_default_context().get_ca_certs()) > 0
found["zone"] = str(zoneinfo.ZoneInfo("Europe/Vienna"))
found["compiled"] = [name for name in ("json", "ssl") if not sys.modules[name].__cached__]
if "numpy" in sys.argv:
    import numpy
    found["numpy"] = int((numpy.arange(4) @ numpy.arange(4)).sum())
print(json.dumps(found))
"""
ONE_USER = os.geteuid() != 0


def nothing(_: int) -> None:
    return None


def made(state: Path) -> BuiltImage:
    return images.make(state, BuildRequest(NATIVE), nothing, nothing)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    return made(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def copies(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("copies")
    for form in images.FORMS:
        images.write(image, out, form, nothing)
    return out


def sums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(image: BuiltImage, copies: Path, tmp_path: Path) -> None:
    again = made(tmp_path)
    assert again.tree.digest == image.tree.digest
    assert again.tree.folder != image.tree.folder
    os.utime(again.tree.folder / "etc/passwd", (1, 1))
    for form in ("tar", "oci"):
        images.write(again, tmp_path / "out", form, nothing)
    assert sums(tmp_path / "out") == {
        name: digest for name, digest in sums(copies).items() if not name.startswith("root/")
    }


def test_what_was_built_of_the_same_files_is_not_built_again(image: BuiltImage) -> None:
    begun: list[int] = []
    again = images.make(image.tree.folder.parents[2], BuildRequest(NATIVE), begun.append, begun.append)
    assert (again.tree, begun) == (image.tree, [])


@pytest.mark.slow
def test_everybody_may_read_it_and_nothing_in_it_has_an_owner_or_a_time(image: BuiltImage, copies: Path) -> None:
    modes = {path.stat().st_mode & 0o7777 for path in image.tree.folder.rglob("*") if not path.is_symlink()}
    assert modes == {0o755, 0o644}
    with tarfile.open(copies / "root.tar") as archive:
        members = archive.getmembers()
    assert {(each.uid, each.gid, each.uname, each.mtime) for each in members} == {(0, 0, "", 0)}
    assert {each.name: oct(each.mode) for each in members if each.mode not in (0o755, 0o644, 0o777)} == {
        "tmp": "0o1777",
        "var/tmp": "0o1777",
    }
    home = os.path.expanduser("~").lstrip("/")
    assert not [each.name for each in members if home != "root" and each.name.startswith(home)]


@pytest.mark.anyio
async def test_it_is_the_root_of_a_box_whose_python_is_its_own(image: BuiltImage) -> None:
    boxing.need_boxes()
    backend = ProcessBackend()
    try:
        argv = ("python3", "-c", USES, *NATIVE)
        report = await backend.run(BoxSpec(Program("command", argv=argv), root=image.tree.folder))
        shell = Program("command", argv=("sh", "-c", "ls / | head -3; awk 'BEGIN {print 6 * 7}' </dev/null"))
        listed = await backend.run(BoxSpec(shell, root=image.tree.folder))
        own = root_of(image.tree)
        cell = Program("python", b"import json\njson.dumps([6 * 7])", cell=True)
        shown = await backend.run(BoxSpec(cell, root=own.folder, image=own))
    finally:
        await backend.close()
    assert (own.python, own.version) == (str(Path(own.python).parent / "python3"), sys.version_info[:2])
    assert [value.data["text/plain"] for value in shown.shown] == ["'[42]'"], shown.stderr.text
    assert report.exit_status == 0, report.stderr.text
    found = json.loads(report.stdout.text)
    programs = Path(image.tree.about["python"]).parent
    expected: dict[str, object] = {"python": str(programs / "python3"), "prefix": str(programs.parent)}
    expected |= {"libc": True, "sqlite": 42, "authorities": True, "zone": "Europe/Vienna", "compiled": []}
    assert found == {**expected, **({"numpy": 14} if "numpy" in NATIVE else {})}
    assert listed.stdout.text == "bin\ndev\netc\n42\n"


@pytest.mark.slow
def test_our_own_code_reads_the_oci_layout_back(image: BuiltImage, copies: Path, tmp_path: Path) -> None:
    blobs = copies / "oci" / "blobs"

    def blob(digest: str) -> bytes:
        return (blobs / digest.replace(":", "/")).read_bytes()

    digest = manifests.chosen((copies / "oci/index.json").read_bytes(), "it")
    assert digest is not None
    manifest = manifests.manifest(blob(digest), "it")
    config = manifests.config(blob(manifest.config.digest), "it")
    assert (config.cmd, config.cwd, config.user) == ((image.tree.about["python"],), "/workspace", build.USER)
    (layer,) = manifest.layers
    assert (len(blob(layer.digest)), layer.packed) == (layer.size, "gzip")
    merged = Layers(100_000)
    with tarfile.open(blobs / layer.digest.replace(":", "/"), "r|gz") as archive:
        merged.apply(archive, str(tmp_path))
    assert merged.left_out == {}
    found = {path: (kind, executable) for path, kind, executable, _ in merged.listing()}
    tree = image.tree.folder
    assert found == {
        str(path.relative_to(tree)): (
            ("link", False)
            if path.is_symlink()
            else ("folder", False)
            if path.is_dir()
            else ("file", bool(path.stat().st_mode & 0o100))
        )
        for path in tree.rglob("*")
    }


@pytest.mark.slow
def test_programs_of_others_read_the_oci_layout(image: BuiltImage, copies: Path, tmp_path: Path) -> None:
    if shutil.which("umoci") is None or shutil.which("skopeo") is None:
        pytest.skip("umoci and skopeo are not installed here")
    place = f"{copies / 'oci'}:latest"
    told = subprocess.run(["skopeo", "inspect", f"oci:{place}"], capture_output=True, check=True).stdout
    assert json.loads(told)["Architecture"] == manifests.machine()
    words = ["umoci", "unpack", *(["--rootless"] if ONE_USER else []), "--image", place, str(tmp_path / "it")]
    subprocess.run(words, capture_output=True, check=True)
    assert sums(tmp_path / "it/rootfs") == sums(image.tree.folder)
    assert sums(copies / "root") == sums(image.tree.folder)


# ── What is asked ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.anyio
async def test_packages_of_this_environment_come_with_what_they_require(tmp_path: Path) -> None:
    wanted = await images.request(tmp_path, SandboxSettings(), ImageWanted(packages=("Jinja2",)))
    assert wanted == BuildRequest(("Jinja2",))
    here = EnvironmentPackages()
    assert here.with_requirements(wanted.packages) == ("jinja2", "markupsafe")
    files = here.files(("markupsafe",))
    assert {"markupsafe/__init__.py", "markupsafe/_native.py"} <= files.keys()
    assert not [name for name in files if name.startswith(("..", "/"))]


@pytest.mark.anyio
async def test_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="there is no template nonsense; there are data, python"):
        await images.request(tmp_path, SandboxSettings(), ImageWanted(template="nonsense"))


def test_what_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_text("mine")
    ended = gateways.run("image", "build", "--out", tmp_path, cwd=tmp_path)
    assert ended.returncode == 1
    assert "root.tar is there already; remove it, or name another folder with --out" in ended.stderr
    ended = gateways.run("image", "build", "--as", "oci", cwd=tmp_path)
    assert (ended.returncode, "say where to with --out DIR" in ended.stderr) == (2, True)
    ended = gateways.run("image", "build", "--as", "zip", "--out", "x", cwd=tmp_path)
    assert (ended.returncode, "there are folder, tar, oci" in ended.stderr) == (2, True)


def test_the_command_builds_it_and_the_state_shows_and_prunes_it(image: BuiltImage, tmp_path: Path) -> None:
    state = image.tree.folder.parents[2]
    file = gateways.write(tmp_path, f"version: 1\ngateway: {{state: {state}}}\n")
    words = [word for name in NATIVE for word in ("--package", name)]
    ended = gateways.run("image", "build", *words, "--config", file, "--json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["digest"], told["folder"]) == (image.tree.digest, str(image.tree.folder))
    assert (told["bytes"], told["missing_libraries"]) == (packing.size(image.tree.folder), list(image.missing))
    (shown,) = [each for each in PackageCache(state / "packages").entries() if each.kind == "image"]
    assert (shown.digest, shown.names) == (image.tree.digest, (f"host/{system.interpreter().name}",))
    ended = gateways.run("state", "--config", file, "--json", cwd=tmp_path)
    (place,) = [each for each in json.loads(ended.stdout)["places"] if each["name"] == "images"]
    assert place["removable"] and place["bytes"] > told["bytes"]


# ── Headers ───────────────────────────────────────────────────────────────────────────────────────


def test_headers_name_what_the_loader_of_this_host_loads() -> None:
    python = str(system.interpreter())
    wants = elf.needs(python)
    assert wants is not None and os.path.exists(wants.loader)
    found, loaders, missing = elf.Libraries().closure([python])
    assert (list(loaders), missing) == ([wants.loader], set())
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = {line.split()[-1] for line in maps if ".so" in line}
    libc = next(place for name, place in found.items() if name.startswith("libc."))
    assert any(os.path.samefile(libc, place) for place in mapped if place.startswith("/"))


def broken() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    yield "cut", lambda data: data[:100]
    yield "a table of segments beyond the end", lambda data: data[:32] + struct.pack("<Q", 1 << 62) + data[40:]
    yield "segments of no size", lambda data: data[:54] + struct.pack("<H", 0) + data[56:]
    yield "another kind of word", lambda data: data[:4] + b"\x07" + data[5:]
    yield "text", lambda _: b"#!/bin/sh\n"
    yield "empty", lambda _: b""


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=name) for name, spoil in broken()])
def test_a_malformed_file_needs_nothing(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(spoil(Path(sys.executable).read_bytes()[:4096]))
    wants = elf.needs(tmp_path / "file")
    assert wants is None or wants.libraries == ()


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    python = str(system.interpreter())
    found, _, missing = elf.Libraries(system=()).closure([python])
    wants = elf.needs(python)
    assert wants is not None
    assert missing and missing | found.keys() >= set(wants.libraries)
