"""The result of the self-test, kept from one process to the next: used while it holds, and never in doubt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process import selftest
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import capabilities, remembered
from tests import boxing

ALL = capabilities.Tested({"landlock": True, "proc": True}, "2026-01-01T00:00:00Z", frozenset())


async def verified(state: Path, **options: Any) -> dict[str, Any]:
    backend = ProcessBackend(depth=0, state=state, **options)
    try:
        report = await backend.run(BoxSpec(Program("python", source=b"pass")))
    finally:
        await backend.close()
    assert report.ended == "exited"
    return report.isolation


@pytest.mark.anyio
async def test_what_holds_is_not_tested_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxing.need_boxes()
    first = await verified(tmp_path)
    kept = json.loads((tmp_path / remembered.NAME).read_text())
    assert kept["at"] == first["verified_at"]
    monkeypatch.setattr(selftest, "PROGRAM", b"print('no answer')")
    assert await verified(tmp_path) == first  # no box was asked: its answer would have been none
    (tmp_path / remembered.NAME).unlink()
    with pytest.raises(Unavailable, match="could not be looked at"):
        await verified(tmp_path)
    assert not (tmp_path / remembered.NAME).exists(), "what failed is not kept"


@pytest.mark.anyio
async def test_who_gives_something_up_is_tested_each_time(tmp_path: Path) -> None:
    boxing.need_boxes()
    await verified(tmp_path, accept_missing=("landlock",))
    await verified(tmp_path, without=("host_name",))
    assert list(tmp_path.iterdir()) == []


def test_it_is_given_back_for_the_same_grounds_alone(tmp_path: Path) -> None:
    remembered.keep(tmp_path, "these", ALL)
    assert remembered.recall(tmp_path, "these") == ALL
    assert remembered.recall(tmp_path, "others") is None
    assert [path.name for path in tmp_path.iterdir()] == [remembered.NAME]
    assert (tmp_path / remembered.NAME).stat().st_mode & 0o777 == 0o600


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        kept = json.loads(path.read_text())
        change(kept)
        path.write_text(json.dumps(kept))

    return act


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(rewritten(lambda kept: kept.update(boot="another")), id="another boot"),
        pytest.param(rewritten(lambda kept: kept.update(uptime=kept["uptime"] - 4000)), id="old"),
        pytest.param(rewritten(lambda kept: kept.update(uptime=kept["uptime"] + 4000)), id="of the future"),
        pytest.param(rewritten(lambda kept: kept.pop("found")), id="incomplete"),
        pytest.param(lambda path: path.write_text("[]"), id="something else"),
        pytest.param(lambda path: path.chmod(0o620), id="writable for others"),
        pytest.param(linked, id="a link"),
    ],
)
def test_what_is_in_doubt_is_not_used(tmp_path: Path, change: Callable[[Path], None]) -> None:
    remembered.keep(tmp_path, "these", ALL)
    change(tmp_path / remembered.NAME)
    assert remembered.recall(tmp_path, "these") is None


@pytest.mark.parametrize(
    "tested",
    [capabilities.Tested({"proc": False}, "", frozenset()), capabilities.Tested({}, "", frozenset({"landlock"}))],
)
def test_a_box_that_lacked_something_is_not_kept(tmp_path: Path, tested: capabilities.Tested) -> None:
    remembered.keep(tmp_path, "these", tested)
    assert list(tmp_path.iterdir()) == []


def test_the_grounds_change_with_what_they_rest_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = remembered.grounds(["memory"])
    assert remembered.grounds(["memory"]) == now
    assert remembered.grounds([]) != now
    code = tmp_path / "code"
    code.mkdir()
    (code / "confine.py").write_text("pass")
    monkeypatch.setattr(remembered, "_CODE", str(code))
    ours = remembered.grounds([])
    (code / "confine.py").write_text("pass  # otherwise")
    assert remembered.grounds([]) != ours
