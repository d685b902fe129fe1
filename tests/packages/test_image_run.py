"""Any image as the root of a run: from a folder, an archive or an OCI layout, with the image's own interpreter."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend
from ringfence.compose.packages import PackageService
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import ImageRoot
from ringfence.core.errors import Unavailable
from ringfence.packages.cache import fingerprint
from ringfence.packages.images import manifests, packing
from ringfence.packages.images.manifests import ImageConfig
from tests import boxing, gateways
from tests.rooting import system_root, variant

LOOK = """
import os, sys
print(sys.version_info[:2], sys.executable, sys.argv[1:], os.environ.get("FROM_IMAGE"), os.getcwd())
print(os.path.exists(%r), sorted(name for name in globals() if name[:2] != "__"))
"""
CONFIG = ImageConfig(env={"PATH": "/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE": "yes", "HOME": "/nowhere"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    boxing.need_boxes()
    return system_root(tmp_path_factory.mktemp("system") / "root")


@pytest.fixture(scope="module")
def layout(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout") / "oci"
    packing.write_oci(root, folder, CONFIG, {}, lambda _: None)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose state is kept from test to test, and with it what was taken over."""
    return gateways.write(tmp_path_factory.mktemp("own"), "version: 1\ngateway: {state: ./state}\n")


def run(own: Path, image: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    return gateways.run("run", "--config", own, "--image", image, *words, cwd=own.parent)


async def found(state: Path, name: str) -> ImageRoot:
    backend = make_backend(SandboxSettings(), keep_ready=0)
    try:
        images = PackageService(state, backend, SandboxSettings()).images
        images.check(name)
        return await images.find(name)
    finally:
        await backend.close()


def version(root: Path) -> tuple[int, int]:
    name = os.path.basename(os.path.realpath(root / "usr/bin/python3"))
    major, _, minor = name.removeprefix("python").partition(".")
    return int(major), int(minor)


def test_a_program_runs_with_the_interpreter_of_its_image(root: Path, layout: Path, own: Path, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    look = LOOK % sys.base_prefix
    ended = run(own, layout, "--facts", str(facts), "-c", look, "--", "a", "-b")
    assert ended.returncode == 0, ended.stderr
    # Our own interpreter lies below /usr where there is no other, and then so does the image's.
    there = not os.path.relpath(sys.base_prefix, "/usr").startswith("..")
    assert ended.stdout.splitlines() == [
        f"{version(root)} /usr/bin/python3 ['a', '-b'] yes /workspace",
        f"{there} ['os', 'sys']",
    ]
    told = json.loads(facts.read_text())["isolation"]
    index = json.loads((layout / "index.json").read_bytes())
    assert told["root"] == "image"
    assert told["image"]["name"] == f"local/oci@{index['manifests'][0]['digest']}"
    assert told["image"]["digest"].startswith("sha256:")


def test_files_commands_and_exit_codes_are_as_in_any_box(layout: Path, own: Path, tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text("import sys\nprint(__file__, sys.argv[1:], sys.stdin.read())\nsys.exit(7)\n")
    words: list[str | Path] = ["run", "--config", own, "--image", layout, tmp_path / "it.py", "--", "x"]
    ended = subprocess.run(gateways.ringfence(*words), input="given", capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (7, "/workspace/it.py ['x'] given\n"), ended.stderr
    (tmp_path / "in.txt").write_text("hello")
    out = tmp_path / "out"
    shell = "cat input/in.txt; echo kept > output/f; echo x > /usr/x"
    ended = run(own, layout, "--input", str(tmp_path / "in.txt"), "--output", str(out), "--shell", shell)
    assert ended.stdout == "hello" and ended.returncode != 0
    assert "Read-only file system" in ended.stderr
    assert (out / "f").read_text() == "kept\n"


def test_a_program_longer_than_a_word_of_the_command_line_runs(layout: Path, own: Path, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(f"x = {'1' * 200_000!r}\nprint(len(x), __name__)\n")
    code = "import ringfence, sys\nfound = ringfence.run_code(open(sys.argv[1]).read(), image=sys.argv[2])\n"
    code += "print(''.join(found.logs.stdout), end=''); print(found.facts['isolation']['image']['name'][:9])"
    env = {**os.environ, "RINGFENCE_CONFIG": str(own)}
    words = [sys.executable, "-c", code, str(tmp_path / "long.py"), str(layout)]
    ended = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert (ended.returncode, ended.stdout) == (0, "200000 __main__\nlocal/oci\n"), ended.stderr


@pytest.mark.anyio
async def test_folder_archives_and_layouts_come_to_one_tree(root: Path, layout: Path, tmp_path: Path) -> None:
    with (tmp_path / "root.tar").open("wb") as file:
        packing.write_tar(root, file, {}, lambda _: None)
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        archive.add(layout, ".")
    state = tmp_path / "state"
    those = [root, layout, tmp_path / "root.tar", tmp_path / "oci.tar"]
    images = [await found(state, str(path)) for path in those]
    assert {fingerprint(each.folder) for each in images} == {fingerprint(images[0].folder)}
    assert {(each.python, each.version) for each in images} == {("/usr/bin/python3", version(root))}
    assert [each.name.partition("@")[0] for each in images] == [f"local/{path.name}" for path in those]
    assert "HOME" not in images[1].env and images[1].env["FROM_IMAGE"] == "yes"
    shutil.rmtree(layout.parent / "again", ignore_errors=True)
    by_digest = await found(state, images[1].digest)
    assert (by_digest, await found(state, str(images[1].folder))) == (images[1], images[1])


def test_an_image_without_python_runs_commands_alone(root: Path, own: Path, tmp_path: Path) -> None:
    bare = variant(root, tmp_path / "bare")
    for path in (bare / "usr/bin").glob("python*"):
        path.unlink()
    ended = run(own, bare, "-c", "print(1)")
    assert ended.returncode == 2
    assert "local/bare has no Python of 3.8 or later: run a command, or name another image" in ended.stderr
    assert run(own, bare, "--shell", "echo $((6 * 7))").stdout == "42\n"


def test_what_a_box_with_an_image_cannot_have_is_named(root: Path, own: Path) -> None:
    ended = run(own, root, "--template", "data", "-c", "1")
    assert (ended.returncode, "it cannot have the template data" in ended.stderr) == (2, True), ended.stderr


# ── Bad names and bad images ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nothing", "nothing cannot be read: No such file or directory"),
        (f"sha256:{'0' * 64}", "make one with `ringfence image build`"),
        ("What is this?", "is not the name of an image"),
        ("nobody-has-this", "names no registry, and none is set"),
    ],
)
def test_a_name_that_leads_to_no_image(name: str, says: str, own: Path, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    words = gateways.ringfence("run", "--config", own, "--image", name, "-c", "1")
    ended = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert (ended.returncode, says in ended.stderr, ended.stderr.count("\n")) == (125, True, 1), ended.stderr


def spoilt(layout: Path, folder: Path, **about: Any) -> Path:
    """The same layout, with another configuration."""
    shutil.copytree(layout, folder)
    index = json.loads((folder / "index.json").read_bytes())
    manifest = json.loads(blob(folder, index["manifests"][0]["digest"]).read_bytes())
    config = json.loads(blob(folder, manifest["config"]["digest"]).read_bytes()) | about
    manifest["config"] |= put(folder, config)
    index["manifests"] = [{"mediaType": manifests.MANIFEST_TYPES[0], **put(folder, manifest)}]
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / digest.replace(":", "/")


def put(folder: Path, document: Any) -> dict[str, Any]:
    data = json.dumps(document).encode()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blob(folder, digest).write_bytes(data)
    return {"digest": digest, "size": len(data)}


@pytest.mark.anyio
async def test_an_image_for_another_machine(layout: Path, tmp_path: Path) -> None:
    other = "arm64" if platform.machine() == "x86_64" else "amd64"
    wrong = spoilt(layout, tmp_path / "wrong", architecture=other)
    with pytest.raises(Unavailable, match=f"it is for linux/{other}, and this is linux/{manifests.machine()}"):
        await found(tmp_path / "state", str(wrong))


@pytest.mark.anyio
async def test_a_layout_whose_parts_are_not_what_it_says(layout: Path, tmp_path: Path) -> None:
    altered = spoilt(layout, tmp_path / "altered")
    largest = max((altered / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.write(b"X")
    with pytest.raises(Unavailable, match="is not what the registry says that it is"):
        await found(tmp_path / "state", str(altered))
    largest.unlink()
    with pytest.raises(Unavailable, match="there is no blobs/sha256/"):
        await found(tmp_path / "state", str(altered))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("data", "says"), [(b"no archive", "no archive that can be read"), (b"", "no archive that can be read")]
)
async def test_a_file_that_is_no_archive(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "it.tar").write_bytes(data)
    with pytest.raises(Unavailable, match=says):
        await found(tmp_path / "state", str(tmp_path / "it.tar"))


def test_a_configuration_may_name_the_image_of_every_box(layout: Path, tmp_path: Path) -> None:
    shutil.copytree(layout, tmp_path / "oci")
    text = "version: 1\ngateway: {state: ./state}\nsandbox: {docker_image: ./oci}\n"
    own = gateways.write(tmp_path, text)
    ended = gateways.run("run", "--config", own, "-c", "import sys; print(sys.executable)", cwd=tmp_path)
    assert ended.stdout == "/usr/bin/python3\n", ended.stderr
    ended = gateways.run("run", "--config", own, "--template", "data", "-c", "1", cwd=tmp_path)
    assert (ended.returncode, "it cannot have the template data" in ended.stderr) == (2, True), ended.stderr
