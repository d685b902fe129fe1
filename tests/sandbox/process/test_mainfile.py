"""Programs that came as text: `__file__`, their parent, and the processes that multiprocessing starts for them."""

from __future__ import annotations

from typing import Literal

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Limits, Program
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.live import LiveBox
from tests.sandbox.process.celling import Interpreter
from tests.sandbox.process.test_live import run, said

pytestmark = pytest.mark.anyio

METHODS = ("spawn", "forkserver")
ROOMY = Limits(wall_seconds=120, processes=64)


async def ran(
    backend: ProcessBackend, source: str, *, name: str = "-c", layout: Literal["shared", "fresh"] = "shared"
) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode(), name=name), ROOMY, layout=layout))


@pytest.mark.parametrize("layout", ["shared", "fresh"])
@pytest.mark.parametrize("method", METHODS)
async def test_new_processes_find_the_functions_of_a_program_that_came_as_text(
    backend: ProcessBackend, method: str, layout: Literal["shared", "fresh"]
) -> None:
    source = f"""
import multiprocessing
from collections import namedtuple
Pair = namedtuple("Pair", "x y")
LIMIT = 10
print("once")
def square(x):
    return Pair(x, min(x * x, LIMIT))
with multiprocessing.get_context({method!r}).Pool(2) as pool:
    print([tuple(pair) for pair in pool.map(square, range(5))])
"""
    report = await ran(backend, source, layout=layout)
    assert report.stdout.text == "once\n[(0, 0), (1, 1), (2, 4), (3, 9), (4, 10)]\n"
    assert (report.exit_status, report.stderr.text) == (0, "")


async def test_a_program_that_guards_itself_is_loaded_whole(backend: ProcessBackend) -> None:
    source = """
import multiprocessing, time
made = time.strftime("made")
def show(x):
    return made * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(show, [2]))
"""
    report = await ran(backend, source)
    assert (report.stdout.text, report.stderr.text) == ("['mademade']\n", "")


async def test_what_a_definition_lacks_is_an_error_of_the_task_and_does_not_hang(backend: ProcessBackend) -> None:
    source = """
import multiprocessing, time
made = time.time()
@made.nonsense if made == 0 else (lambda f: f)
def decorated():
    pass
def show(x):
    return made
with multiprocessing.get_context("spawn").Pool(1) as pool:
    try:
        pool.map(show, [2])
    except NameError as exc:
        print(exc)
"""
    report = await ran(backend, source)
    assert (report.stdout.text, report.stderr.text) == ("name 'made' is not defined\n", "")


async def test_a_program_that_names_its_file_has_one(backend: ProcessBackend) -> None:
    source = "import os\nprint(os.path.dirname(__file__), 'print' in open(__file__).read())"
    assert (await ran(backend, source)).stdout.text == "/workspace True\n"
    assert (await ran(backend, source, layout="fresh")).stdout.text == "/workspace True\n"
    silent = "import os\nprint([name for name in os.listdir() if name.endswith('.py')])"
    assert (await ran(backend, silent)).stdout.text == "[]\n"


async def test_the_parent_of_a_program_is_the_first_process_and_cannot_be_harmed(backend: ProcessBackend) -> None:
    source = """
import os, signal
parent = os.getppid()
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
    try:
        os.kill(parent, number)
    except PermissionError:
        pass
print(parent)
"""
    for name in ("-c", "/workspace/program.py"):
        report = await ran(backend, source, name=name)
        assert (report.ended, report.exit_status, report.stderr.text) == ("exited", 0, "")
        assert report.stdout.text == "1\n"


@pytest.mark.parametrize("method", METHODS)
async def test_new_processes_find_what_cells_defined(box: LiveBox, method: str) -> None:
    interpreter = await box.interpreter()
    pool = f"with multiprocessing.get_context({method!r}).Pool(1) as pool:\n    found = pool.map(twice, [1, 2])\nfound"
    first = await run(interpreter, "import multiprocessing\nprint('once')\ndef twice(x):\n    return 2 * x")
    assert first.report.stdout.text == "once\n"
    report = await run(interpreter, pool, wall_seconds=120, processes=64)
    assert (said(report), report.report.stdout.text, report.report.stderr.text) == ("[2, 4]", "", "")
    await run(interpreter, "def twice(x):\n    return -2 * x")
    report = await run(interpreter, pool, wall_seconds=120, processes=64)
    assert said(report) == "[-2, -4]"


async def test_cells_that_name_their_file_have_one_and_a_parent(box: LiveBox) -> None:
    interpreter = await box.interpreter()
    report = await run(interpreter, "import os\nos.path.dirname(__file__), os.path.exists(__file__), os.getppid()")
    assert said(report) == "('/workspace', True, 1)"


def test_only_definitions_are_repeated(fresh: Interpreter) -> None:
    fresh("import multiprocessing.spawn as spawning, runpy\nsaid = []\nseen = said.append(1)\nx, y = 1, {'a': [2]}")
    fresh("def f():\n    return x\nclass C:\n    pass\nz = f()\nC.attribute = 5\nfor i in 'ab':\n    pass")
    fresh("try:\n    import nonesuch\nexcept ImportError:\n    nonesuch = None\nwrong syntax")
    fresh("path = spawning.get_preparation_data('')['init_main_from_path']")
    named = "sorted(name for name in runpy.run_path(path) if not name.startswith('__'))"
    assert fresh(named).text == "['C', 'f', 'runpy', 'said', 'spawning', 'x', 'y']"


async def test_an_interpreter_that_is_started_by_exec_shows_values_and_quotes_the_program(
    backend: ProcessBackend,
) -> None:
    source = """
import os, sys, traceback
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
print(os.getppid(), sys.argv, sys.path[0], [name for name in sys.modules if "ringfence" in name])
display(7)
6 * 7
"""
    program = Program("python", source.encode(), ("a",), cell=True)
    report = await backend.run(BoxSpec(program, ROOMY, layout="fresh"))
    assert [each.data["text/plain"] for each in report.shown] == ["7", "42"]
    assert report.stdout.text == "1 ['-c', 'a']  []\n"
    assert "begin()" not in report.stderr.text and 'File "<string>", line 4' in report.stderr.text
    failed = await ran(backend, "def f():\n    1 / 0\nf()", layout="fresh")
    assert [line for line in failed.stderr.text.splitlines() if "File" in line] == [
        '  File "<string>", line 3, in <module>',
        '  File "<string>", line 2, in f',
    ]
