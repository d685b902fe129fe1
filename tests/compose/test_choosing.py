"""Which backend makes a box. What this host has is really tried; combinations that it cannot have are played by fakes,
which make no boxes and are named `Played`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose import lacking
from ringfence.compose.backends import ROWS, level_of, make_backend, makers, row_of
from ringfence.compose.choosing import ChosenBackend, Selected
from ringfence.compose.probes import NAME, Makers, Probed, Probes, probe
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import Runs
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BACKENDS, Attached, BoxReport, BoxSpec, OnOutput, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Recheck, Status, always
from tests.boxing import settings

pytestmark = pytest.mark.anyio
NOTHING = BoxSpec(Program("python", b"pass"))
AUTO = SandboxSettings(backend="auto")


class PlayedProbes(Probes):
    """What was found, as the test says."""

    def __init__(self, found: Mapping[str, Probed]) -> None:
        super().__init__(AUTO, None, makers())
        self._found = dict(found)
        self.asked: list[str] = []

    def must_emulate(self, name: str) -> bool:
        return False

    async def of(self, name: str) -> Probed:
        self.asked.append(name)
        return self._found[name]


@dataclass
class Played:
    """A backend that makes no boxes, and may lack what they are to have."""

    name: str
    lacks: bool = False
    runs: list[BoxSpec] = field(default_factory=list)

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        if self.lacks:
            raise Unavailable("not_supported", f"{self.name} has none of that")
        self.runs.append(spec)
        return BoxReport("exited", 0, isolation={"backend": self.name, "level": BACKENDS[self.name]})

    async def close(self) -> None: ...


def chosen_among(
    found: Mapping[str, Probed], settings: SandboxSettings = AUTO, lacking: tuple[str, ...] = ()
) -> tuple[ChosenBackend, PlayedProbes]:
    probes = PlayedProbes(found)

    def make(wanted: SandboxSettings, state: Path | None, **more: Any) -> Played:
        return Played(wanted.backend, wanted.backend in lacking)

    played = Makers(dict.fromkeys(found, ROWS["process"]), row_of, level_of, make)
    return ChosenBackend(settings, None, played, probes=probes), probes


async def chosen(level: str, found: Mapping[str, Probed], **more: Any) -> tuple[str, str]:
    backend, _ = chosen_among(found, **more)
    fact = (await backend.run(replace(NOTHING, level=level))).isolation
    return fact["backend"], fact.get("chosen", {}).get("by", "")


FAST, SLOW = Probed(start_ms=40.0), Probed(start_ms=900.0)
ABSENT = Probed("qemu is missing: apt install qemu-system-x86")
EMULATED = Probed(start_ms=30.0, emulated=True)


@pytest.mark.parametrize(
    ("level", "found", "served"),
    [
        ("process", {"process": FAST, "gvisor": FAST, "microvm": FAST}, "microvm"),
        ("process", {"process": FAST, "gvisor": FAST, "microvm": SLOW}, "gvisor"),
        ("process", {"process": FAST, "gvisor": FAST, "microvm": ABSENT}, "gvisor"),
        ("process", {"process": FAST, "gvisor": SLOW, "microvm": EMULATED}, "process"),
        ("process", {"process": FAST, "oci": Probed(start_ms=39.0)}, "oci"),
        ("process", {"process": FAST, "oci": FAST}, "process"),
        ("process", {"process": SLOW, "oci": Probed(start_ms=800.0)}, "oci"),
        ("gvisor", {"process": FAST, "gvisor": SLOW, "microvm": EMULATED}, "gvisor"),
        ("gvisor", {"process": FAST, "gvisor": ABSENT, "microvm": FAST}, "microvm"),
        ("microvm", {"gvisor": FAST, "microvm": EMULATED}, "microvm"),
        ("microvm", {"gvisor": FAST, "microvm": Probed(start_ms=700.0, emulated=True)}, "microvm"),
    ],
)
async def test_the_strongest_that_starts_soon_enough_is_chosen(
    level: str, found: Mapping[str, Probed], served: str
) -> None:
    assert await chosen(level, found) == (served, "auto")


async def test_what_is_weaker_than_the_choice_is_not_even_tried() -> None:
    backend, probes = chosen_among({"process": FAST, "gvisor": FAST, "microvm": FAST})
    await backend.run(NOTHING)
    assert probes.asked == ["microvm"]


async def test_never_a_weaker_one_than_was_asked_for() -> None:
    found = {"process": FAST, "gvisor": ABSENT, "microvm": ABSENT}
    backend, _ = chosen_among(found)
    with pytest.raises(
        Unavailable, match=r"isolation gvisor is given by no backend here .*apt install qemu"
    ) as refused:
        await backend.run(replace(NOTHING, level="gvisor"))
    assert refused.value.reason_code == "no_isolation"
    with pytest.raises(Unavailable) as before:
        backend.check("gvisor", None)
    assert str(before.value) == str(refused.value)
    emulated, _ = chosen_among({"process": FAST, "microvm": EMULATED})
    with pytest.raises(Unavailable, match="isolation gvisor"):
        await emulated.run(replace(NOTHING, level="gvisor"))


async def test_a_weaker_box_is_no_remedy_where_a_stronger_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Played, spec: BoxSpec, *more: Any) -> BoxReport:
        raise Unavailable("not_supported", f"backend {self.name} cannot give boxes that fly; backend process can")

    monkeypatch.setattr(Played, "run", refuse)
    for named in (AUTO, SandboxSettings(backend="gvisor")):
        backend, _ = chosen_among({"process": FAST, "gvisor": FAST}, settings=named)
        with pytest.raises(Unavailable, match=r"backend gvisor cannot give boxes that fly$"):
            await backend.run(replace(NOTHING, level="gvisor"))
    with pytest.raises(Unavailable, match=r"fly; backend process can$"):
        await backend.run(NOTHING)


def test_only_what_emulates_is_passed_over_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfence.compose.probes.os.access", lambda path, mode: False)
    probes = Probes(AUTO, None, makers())
    assert [name for name in ROWS if probes.must_emulate(name)] == ["microvm"]


async def test_the_named_backend_serves_what_it_is_strong_enough_for() -> None:
    found = {"process": FAST, "gvisor": FAST, "microvm": FAST}
    named = SandboxSettings(backend="gvisor")
    assert await chosen("process", found, settings=named) == ("gvisor", "")
    assert await chosen("gvisor", found, settings=named) == ("gvisor", "")
    assert await chosen("microvm", found, settings=named) == ("microvm", "contract")


async def test_a_backend_that_a_caller_names_serves_if_it_is_strong_enough() -> None:
    backend, _ = chosen_among({"process": FAST, "oci": FAST})
    report = await backend.run(replace(NOTHING, backend="oci"))
    assert report.isolation == {"backend": "oci", "level": "process"}
    report = await backend.run(replace(NOTHING, backend="auto"))
    assert report.isolation["chosen"]["by"] == "auto"
    for asked, level, match in (
        ("oci", "gvisor", "boxes of backend oci have process"),
        ("chroot", "process", "sandbox backend chroot does not exist"),
    ):
        with pytest.raises(Unavailable, match=match):
            await backend.run(replace(NOTHING, backend=asked, level=level))


async def test_one_that_cannot_give_it_is_passed_over_and_the_facts_say_so() -> None:
    backend, _ = chosen_among({"process": FAST, "microvm": FAST}, lacking=("microvm",))
    fact = (await backend.run(NOTHING)).isolation
    assert fact["backend"] == "process" and "microvm cannot: microvm has none of that" in fact["chosen"]["why"]
    backend, _ = chosen_among({"process": FAST, "microvm": FAST}, lacking=("microvm", "process"))
    with pytest.raises(Unavailable, match="process has none of that"):
        await backend.run(NOTHING)


async def test_boxes_of_a_kind_have_the_very_same_facts() -> None:
    backend, _ = chosen_among({"process": FAST})
    seen = {"backend": "process", "level": "process"}
    choice = Selected("process", "auto", "it is played")
    assert backend.fact(seen, choice) is backend.fact(seen, choice)


# ── On this host ──


async def test_a_probe_makes_boxes_and_is_remembered(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    first = await Probes(SandboxSettings(), state, makers()).of("process")
    assert first.missing is None and first.start_ms > 0 and not first.emulated
    assert (state / NAME).stat().st_mode & 0o777 == 0o600
    assert Probes(SandboxSettings(), state, makers()).known("process") == first
    assert Probes(replace(SandboxSettings(), max_memory_mb=300), state, makers()).known("process") is None
    assert Probes(SandboxSettings(), state, makers()).known("oci") is None
    (state / NAME).chmod(0o644)
    assert Probes(SandboxSettings(), state, makers()).known("process") is None, "others may have written it"


async def test_a_probe_that_does_not_end_is_given_up() -> None:
    backend = make_backend(SandboxSettings(), keep_ready=0)
    try:
        found = await probe(backend, 0.0)
    finally:
        await backend.close()
    assert found.missing is not None and found.missing.startswith("the first box of process did not end within 0 s")
    assert found.missing.endswith("; `ringfence doctor --backend process --case F01` says more")


async def test_auto_takes_what_this_host_has(tmp_path: Path) -> None:
    backend = make_backend(AUTO, tmp_path)
    try:
        report = await backend.run(replace(NOTHING, program=Program("python", b"print('ran')")))
        again = await backend.run(NOTHING)
    finally:
        await backend.close()
    assert report.stdout.text == "ran\n"
    fact = report.isolation
    assert fact["level"] == BACKENDS[fact["backend"]] and fact["chosen"]["by"] == "auto"
    assert "sandbox.max_start_ms" in fact["chosen"]["why"] and again.isolation["backend"] == fact["backend"]


# ── By calls ──


CAPABILITY = "capabilities: {strong: {transport: sandboxed_exec, tool: execute_python, isolation: LEVEL}}"


async def test_a_contract_that_nothing_here_is_strong_enough_for_is_refused_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringfence.compose.backends.ROWS", {"process": ROWS["process"]})
    wanted = settings(tmp_path, CAPABILITY.replace("LEVEL", "microvm"))
    async with Runs.open(wanted) as runs:
        refused = await runs.run(RunRequest(code="print(1)"), origin="sdk")
    assert (refused.status, refused.reason_code) == (Status.UNAVAILABLE, "no_isolation")
    assert "strong demands isolation microvm: isolation microvm is given by no backend here" in refused.message
    sentence = (await lacking.of_capabilities(wanted))["strong"]
    assert refused.message.endswith(sentence), "check and doctor say the same"


async def test_a_caller_names_the_backend_of_one_run(tmp_path: Path) -> None:
    async with Runs.open(settings(tmp_path)) as runs:
        outcome = await runs.run(RunRequest(code="print(6 * 7)", backend="oci"), origin="sdk")
        if outcome.reason_code == "no_backend":
            pytest.skip(outcome.message)
        assert outcome.facts["isolation"]["backend"] == "oci"
        usual = await runs.run(RunRequest(code="print(6 * 7)"), origin="sdk")
        assert usual.facts["isolation"]["backend"] == "process"
        nobody = await runs.run(RunRequest(code="print(6 * 7)", backend="chroot"), origin="sdk")
    assert (nobody.status, nobody.reason_code) == (Status.UNAVAILABLE, "no_backend")
    assert nobody.message.startswith("sandbox backend chroot does not exist")


@pytest.mark.slow
async def test_a_session_is_made_by_the_backend_that_its_caller_names(tmp_path: Path) -> None:
    async with Runs.open(settings(tmp_path)) as runs:

        async def opened(**wanted: str) -> Any:
            return await runs.call("open_session", wanted, Attached(), origin="sdk")

        first = await opened(backend="oci")
        if first.reason_code == "no_backend":
            pytest.skip(first.message)
        usual = await opened()
        for outcome, name in ((first, "oci"), (usual, "process")):
            assert outcome.ok, outcome.message
            session = outcome.result["structuredContent"]["session"]
            step = await runs.call("execute_python", {"session": session, "code": "6 * 7"}, Attached(), origin="sdk")
            assert step.ok and step.facts["isolation"]["backend"] == name
            await runs.call("close_session", {"session": session}, Attached(), origin="sdk")
        nobody = await opened(backend="chroot")
    assert (nobody.status, nobody.reason_code) == (Status.UNAVAILABLE, "no_backend")
