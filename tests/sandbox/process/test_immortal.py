"""An interpreter whose objects were made to last goes on as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ringfence
from ringfence.box import BoxSpec, Program
from ringfence.sandbox.process.backend import ProcessBackend
from tests.sandbox import comparing

LASTING = sys.version_info >= (3, 12)
PROGRAM = """
import collections, gc, json, re, sys
from ringfence.sandbox.process import immortal

class Kept:
    pass

class Dies:
    def __del__(self):
        said.append("gone")

said, kept = [], Kept()
before = sys.getrefcount(kept)
count = immortal.make_everything_last()
more = [kept] * 100
assert (sys.getrefcount(kept) == before + 100) is (count == 0), "nobody counts any more"
kept.itself = kept
del kept, more
Dies()
loop = Dies()
loop.itself = loop
del loop
gc.collect()
assert said == ["gone"] * 2, "what is made later is freed as ever"
gc.freeze()
gc.unfreeze()
gc.collect()
for _ in range(200):
    made = type("Made", (Kept,), {"field": []})()
    made.field.append(collections.OrderedDict(a=made))
    assert json.loads(json.dumps(re.findall("[0-9]+", "1 22"))) == ["1", "22"]
    try:
        raise ValueError(made)
    except ValueError:
        pass
gc.collect()
print(count)
"""
MANY = """
import collections, concurrent.futures, decimal, gc, sqlite3, tempfile
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert sum(pool.map(len, ["a"] * 100)) == 100
for module in (collections, decimal, tempfile, sqlite3):
    vars(module).clear()
gc.unfreeze()
gc.collect()
print("well")
"""


def test_programs_run_on_and_what_they_make_is_still_freed() -> None:
    source = str(Path(ringfence.__file__).parent.parent)
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (int(ran.stdout) > 1000) is LASTING


@pytest.mark.anyio
async def test_boxes_of_a_zygote_that_has_settled_are_like_the_first() -> None:
    async for backend in comparing.opened():
        assert isinstance(backend, ProcessBackend)
        said = [await backend.run(BoxSpec(Program("python", MANY.encode()))) for _ in range(16)]
        assert [(report.exit_status, report.stdout.text, report.stderr.text) for report in said] == [
            (0, "well\n", "")
        ] * len(said)
