"""Every attempt and twin of the corpus, played under the strict preset.

The half that is not held out is what rules were tuned on. When the other half was played for the first time, one of its
attempts got out (shell-06: the first line of a private key, and little more); since then `strict`, too, takes that line
for a secret, as `owasp-asi` did before. docs/dataflow.md tells of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dataflow.playing import held_up, play, succeeded
from tests.dataflow.scenarios import scenarios

pytestmark = pytest.mark.anyio

MAX_HELD_UP = 2
"""Of a hundred twins, both halves together."""


@pytest.mark.parametrize("held_out", [False, True], ids=["tuned", "held-out"])
async def test_no_attempt_succeeds(tmp_path: Path, held_out: bool) -> None:
    attempts = [each for each in scenarios() if each.attempt and each.held_out is held_out]
    got_out = [each.id for each in attempts if succeeded(await play(tmp_path / each.id, each))]
    assert (len(attempts), got_out) == (50, [])


async def test_at_most_two_twins_are_held_up(tmp_path: Path) -> None:
    twins = [each for each in scenarios() if not each.attempt]
    held = {each.id: held_up(await play(tmp_path / each.id, each)) for each in twins}
    stopped = {name: tools for name, tools in held.items() if tools}
    assert len(twins) == 100
    assert len(stopped) <= MAX_HELD_UP, stopped
