"""Images that mean ill: no name of a layer leads out of the tree, and none takes more room than there is."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB
from ringfence.packages import install_boxes
from ringfence.packages.images import fetch as images
from tests import tooling
from tests.packages.hostile import LAYER, Fake, fetch, refused
from tests.packages.images import entry, layer

pytestmark = pytest.mark.anyio
SMALL = layer(("x", "1"))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("../out", "x")], "leads out"),
        ([("a/../../out", "x")], "leads out"),
        ([entry("h", tarfile.LNKTYPE, "nothing")], "which is not there"),
        ([entry("h", tarfile.LNKTYPE, "/etc/passwd")], "which is not there"),
        ([entry("h", tarfile.LNKTYPE, "../x")], "leads out"),
        ([entry("d", tarfile.DIRTYPE), entry("h", tarfile.LNKTYPE, "d")], "which is not there"),
        ([entry("l", tarfile.SYMTYPE, "l"), ("l/x", "")], "round in a circle"),
        ([("x" * 300, "")], "too long"),
        ([("/".join("d" * 200), "")], "too long"),
        ([("./", "a file as the root")], "something else than a folder"),
    ],
)
async def test_names_that_lead_out_or_nowhere(fake: Fake, tmp_path: Path, entries: list[Any], why: str) -> None:
    fake.say(fake.image(layer(*entries)))
    await refused(tmp_path, fake, why)


async def test_what_could_lead_out_stays_within(fake: Fake, tmp_path: Path) -> None:
    lower = layer(
        entry("evil", tarfile.SYMTYPE, "/etc"),
        entry("up", tarfile.SYMTYPE, "../../../.."),
        entry("null", tarfile.CHRTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        ("/absolute", "a"),
        entry("l", tarfile.SYMTYPE, "/etc/passwd"),
        entry("second", tarfile.LNKTYPE, "l"),
    )
    upper = layer(("evil/planted", "p"), ("up/beside", "b"), (".wh.nothing", ""), ("evil/.wh.passwd", ""))
    fake.say(fake.image(lower, upper))
    tree = await fetch(tmp_path, fake)
    found = {str(path.relative_to(tree.folder)) for path in tree.folder.rglob("*")}
    assert found == {"evil", "up", "etc", "etc/planted", "beside", "absolute", "l", "second"}
    assert (tree.folder / "second").is_symlink()
    assert tree.about["left_out"] == {"devices, pipes and the like": 2}
    assert not Path("/etc/planted").exists()


async def test_no_file_has_more_rights_than_to_be_read_and_executed(fake: Fake, tmp_path: Path) -> None:
    wild, closed = tarfile.TarInfo("wild"), tarfile.TarInfo("closed")
    wild.mode, closed.mode = 0o6777, 0o000
    folder = entry("d", tarfile.DIRTYPE)
    folder.mode = 0o1000
    fake.say(fake.image(layer(wild, closed, folder)))
    tree = await fetch(tmp_path, fake)
    assert {path.name: oct(path.stat().st_mode & 0o7777) for path in tree.folder.iterdir()} == {
        "wild": "0o755",
        "closed": "0o644",
        "d": "0o755",
    }


async def test_a_layer_that_unpacks_to_more_than_there_is_room_for(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_boxes, "_LIMITS", replace(install_boxes._LIMITS, disk_bytes=32 * MIB))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        info = tarfile.TarInfo("zeros")
        info.size = 256 * MIB
        packed.addfile(info, io.BytesIO(bytes(info.size)))
    fake.say(fake.image(out.getvalue()))
    await refused(tmp_path, fake, "could not be laid out")


async def test_more_entries_than_are_kept(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MAX_ENTRIES", 2_000)
    fake.say(fake.image(layer(*((f"n{number}", "") for number in range(2_001)))))
    await refused(tmp_path, fake, "more than 2000 entries")


@pytest.mark.parametrize(
    "data",
    [b"", b"no archive", gzip.compress(SMALL)[:-20], gzip.compress(b"x" * 2000)],
    ids=["empty", "no archive", "cut", "no entries"],
)
async def test_a_layer_that_is_no_archive(fake: Fake, tmp_path: Path, data: bytes) -> None:
    told = fake.image(SMALL)
    told["layers"] = [fake.blob(data, kind=LAYER)]
    fake.say(told)
    await refused(tmp_path, fake, "could not be laid out")


@pytest.mark.parametrize(("cut", "problem"), [(0, None), (20, "could not be laid out")])
async def test_a_layer_packed_with_zstd(fake: Fake, tmp_path: Path, cut: int, problem: str | None) -> None:
    made = subprocess.run([tooling.need("zstd"), "-cq"], input=SMALL, capture_output=True, check=True).stdout
    told = fake.image(SMALL)
    told["layers"] = [fake.blob(made[: len(made) - cut], kind="application/vnd.oci.image.layer.v1.tar+zstd")]
    fake.say(told)
    if problem is None:
        assert ((await fetch(tmp_path, fake)).folder / "x").read_text() == "1"
    else:
        await refused(tmp_path, fake, problem)
