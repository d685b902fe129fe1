"""Which backends there are, and what is said of one that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.compose.backends import ROWS, boxes_stay, level_of, make_backend, makers
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BACKENDS, LEVELS, NOT_BUILT, BoxSpec, Program, SetUp
from ringfence.core.errors import ConfigError, Unavailable
from ringfence.sandbox.guests.docker import DockerEngine
from ringfence.sandbox.guests.gvisor import GvisorEngine
from ringfence.sandbox.guests.microvm.engine import MicrovmEngine
from ringfence.sandbox.guests.oci import OciEngine


def test_every_backend_is_in_one_list_and_has_a_row_once_it_is_built() -> None:
    assert set(BACKENDS.values()) <= set(LEVELS)
    assert ROWS.keys() == BACKENDS.keys() - NOT_BUILT


@pytest.mark.parametrize("name", [*sorted(NOT_BUILT), "chroot"])
def test_a_backend_that_is_not_there_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(Unavailable, match=f"sandbox backend {name} (is not built yet|does not exist)"):
        make_backend(SandboxSettings(backend=name))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["oci", "gvisor", "docker", "microvm", "firecracker"])
async def test_every_backend_of_guests_knows_the_set_up_of_templates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(engine: object) -> None: ...

    for engine in (OciEngine, GvisorEngine, DockerEngine, MicrovmEngine):
        monkeypatch.setattr(engine, "open", nothing)
    settings = SandboxSettings(backend=name, templates={"mine": ()}, setups={"mine": SetUp(source="x = 1")})
    made = make_backend(settings, tmp_path)
    with pytest.raises(Unavailable, match="that run one program of a template with set-up"):
        await made.run(BoxSpec(Program("python", b"pass"), template="mine"))


def test_an_installed_package_brings_a_backend_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brought.py").write_text(
        "from ringfence.compose.backends import BackendRow, ROWS\n"
        "row = BackendRow(ROWS['process'].make, level='gvisor')\nother = 7\n"
    )
    about = tmp_path / "brought-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ringfence.backends]\nmine = brought:row\nwrong = brought:other\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert level_of("mine") == "gvisor" and boxes_stay(SandboxSettings(backend="mine"))
    with pytest.raises(Unavailable, match="wrong: brought:other is no BackendRow"):
        make_backend(SandboxSettings(backend="wrong"))
    read = config.loads("sandbox: {backend: mine}", file="f", base=tmp_path)
    assert read.sandbox.backend == "mine" and "mine" not in makers().rows, "auto does not choose it"
    with pytest.raises(ConfigError, match=r"no backend named 'proces'.*did you mean 'process'"):
        config.loads("sandbox: {backend: proces}", file="f", base=tmp_path)
