"""Sandboxes that begin with code of their maker's, and interpreters with a layout of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import AsyncSandbox, RingfenceError, Sandbox, SetUpFailed, run_code

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("state")]


def test_set_up_code_runs_before_the_first_cell_of_every_context() -> None:
    with Sandbox.create(setup="import math\nbase = [40]", envs={"A": "b"}) as sandbox:
        assert sandbox.run_code("base.append(2)\nsum(base)").text == "42"
        assert sandbox.run_code("sum(base)", context="other").text == "40"
        execution = sandbox.run_code("import os\nos.environ['A']")
        isolation = execution.facts["isolation"]
        assert execution.text == "'b'"
        assert isolation["memory_layout"] == "fresh"
        assert isolation["template"] == {"setup": "user", "started": "exec"}
        assert sandbox.info().isolation["template"] == {"setup": "user", "started": "exec"}


def test_an_interpreter_that_takes_the_place_of_another_is_set_up_too() -> None:
    with Sandbox.create(setup="base = 40") as sandbox:
        lost = sandbox.run_code("base = 41\nimport os; os._exit(1)")
        assert not lost.alive
        assert sandbox.run_code("base").text == "40"


async def test_where_it_fails_nothing_is_left_and_the_traceback_is_told(state: Path) -> None:
    before = await AsyncSandbox.list()
    with pytest.raises(SetUpFailed) as failed:
        await AsyncSandbox.create(setup="def load():\n    raise ValueError('no such rate')\nload()")
    assert failed.value.traceback.startswith("Traceback (most recent call last)")
    assert 'File "<setup>", line 2, in load' in failed.value.traceback
    assert failed.value.traceback.rstrip().endswith("ValueError: no such rate")
    assert [info.id for info in await AsyncSandbox.list()] == [info.id for info in before]
    ended = await AsyncSandbox.list(ended=True)
    assert "failed" in [info.why for info in ended]
    kept = [path for path in state.rglob("*") if path.is_file() and b"no such rate" in path.read_bytes()]
    assert kept == [], "what the code said is nowhere on record"


def test_a_fork_is_set_up_anew_and_a_snapshot_as_its_opener_says() -> None:
    with Sandbox.create(setup="import time\nwhen = time.monotonic_ns()") as sandbox:
        sandbox.run_code("open('/workspace/kept', 'w').write('here'); mine = 1")
        first = sandbox.run_code("when").text
        (child,) = sandbox.fork(1)
        assert not isinstance(child, RingfenceError)
        with child:
            assert child.run_code("open('/workspace/kept').read()").text == "'here'"
            assert child.run_code("when").text not in (first, "")
            assert child.run_code("mine").error is not None
        snapshot = sandbox.snapshot()
    with Sandbox.create(snapshot=snapshot, setup="kept = open('/workspace/kept').read()") as again:
        assert again.run_code("kept").text == "'here'"
        unset = again.run_code("when").error
        assert unset is not None and unset.name == "NameError"


def test_a_layout_of_their_own_is_had_for_the_asking() -> None:
    source = "(id(int), hash('ringfence'))"
    with Sandbox.create(memory_layout="fresh") as sandbox:
        one, two = sandbox.run_code(source), sandbox.run_code(source, context="other")
        assert one.text != two.text
        assert one.facts["isolation"]["memory_layout"] == "fresh"
        assert "template" not in one.facts["isolation"]
    once = run_code(f"print({source})", memory_layout="fresh")
    assert once.facts["isolation"]["memory_layout"] == "fresh"
