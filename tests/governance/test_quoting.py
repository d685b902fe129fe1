"""What messages repeat of a call: whole for its caller, not at all on record, and never half a secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.runs import Runs
from ringfence.core.box import Attached
from ringfence.core.quoting import quoted
from ringfence.secrets.redaction import TenantRedactor
from tests import gateways
from tests.boxing import settings
from tests.faking import Said, governed
from tests.sandbox.tools.calling import calling

pytestmark = pytest.mark.anyio

VALUE = "CONFIDENTIAL-patient-4711"
TOKEN = "ghp_" + "aB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW0xYzAbC"
LENGTHS = (0, 20, 50, 70, 300, 3000, 9000)


def calls(session: str, pad: str) -> list[tuple[str, dict[str, Any]]]:
    """Refused for many reasons, with a value in each place that messages tell of."""
    return [
        ("read_file", {"session": session, "path": f"/workspace/{VALUE}{pad}"}),
        ("read_file", {"session": session, "path": f"/workspace//./{VALUE}{pad}"}),
        ("read_file", {"session": session, "path": f"/workspace/{VALUE}é'\"\\{pad}"}),
        ("write_file", {"session": session, "path": f"/workspace/{VALUE}/" + "d/" * (len(pad) // 2), "text": "x"}),
        ("write_file", {"session": session, "path": f"/etc/{VALUE}{pad}", "text": "x"}),
        ("read_file", {"session": f"{VALUE}{pad}"[:200], "path": "/workspace/a"}),
        ("open_session", {"snapshot": f"{VALUE}{pad}"}),
        ("open_session", {"volumes": [{"name": f"{VALUE}{pad}", "at": "/workspace/v"}]}),
        ("open_session", {"volumes": [{"name": "v", "at": f"/{VALUE}{pad}"}]}),
        ("open_session", {"template": f"{VALUE}{pad}"}),
        ("execute_python", {"session": session, "code": "say x", "context": f"{VALUE} {pad}"[:100]}),
        ("snapshot_session", {"session": session, "name": f"{VALUE}/{pad}"[:64]}),
    ]


@pytest.mark.parametrize("length", LENGTHS)
async def test_no_value_of_an_argument_and_no_part_of_one_stays_in_a_message_on_record(
    tmp_path: Path, length: int
) -> None:
    async with calling(tmp_path / "house") as house, Runs.open(settings(tmp_path), house.executor) as runs:
        session = (await runs.call("open_session", {}, Attached(), origin="sdk")).structured["session"]
        for tool, arguments in calls(session, "x" * length):
            outcome = await runs.call(tool, arguments, Attached(), origin="sdk")
            assert not outcome.ok or tool in ("snapshot_session", "write_file"), (tool, outcome)
    for record in gateways.finished(tmp_path / "state"):
        assert VALUE[:8] not in json.dumps(record), record["message"]


@pytest.mark.parametrize("length", [0, 30, 60, 75, 100, 120, 900, 990, 3950])
@pytest.mark.parametrize("kind", ["tool", "resource", "prompt"])
async def test_a_secret_in_a_name_goes_whole_or_not_at_all(tmp_path: Path, length: int, kind: Any) -> None:
    async with governed(tmp_path, Said()) as way:
        way.pipeline._guard.redactor = TenantRedactor(lambda: ())
        outcome = await way.call("A" * length + " " + TOKEN, {}, kind=kind)
        shown = json.dumps([outcome.message, way.finished()[0]])
    assert not any(TOKEN[at : at + 8] in shown for at in range(4, 28))


def test_a_message_repeats_all_of_what_was_written_or_only_how_long_it_is() -> None:
    assert quoted("it's") == '"it\'s"'
    assert quoted("x" * 80) == repr("x" * 80)
    assert quoted("x" * 81) == "… (81 characters)"
    assert quoted("é", form=ascii) == "'\\xe9'"
    assert quoted(12, 2) == "'12'"
