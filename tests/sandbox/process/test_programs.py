"""Honest programs behave in a box as they do outside of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ringfence.core.box import BoxSpec, Program, SetUp
from ringfence.sandbox.process.backend import ProcessBackend
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.comparing import Honest
from tests.sandbox.process import language_programs, machine_programs, system_programs

pytestmark = pytest.mark.anyio

FULL = bool(os.environ.get("RINGFENCE_FULL"))
TASKS = Path(os.environ.get("RINGFENCE_PROGRAMS") or tooling.ROOT.parent / "shared/data/programs.jsonl.gz")
"""One JSON object with `id` and `code` on each line: programs that print little and check themselves."""

GROUPS = {
    "reading": language_programs.READING,
    "exit": language_programs.EXITS,
    "error": language_programs.ERRORS,
    "source": language_programs.SOURCES,
    "output": language_programs.OUTPUT,
    "processes": system_programs.PROCESSES,
    "signals": system_programs.SIGNALS,
    "network": machine_programs.NETWORK,
    "files": machine_programs.FILES,
    "machine": machine_programs.MACHINE,
}
PROGRAMS = [pytest.param(program, id=f"{name}-{program.name}") for name, group in GROUPS.items() for program in group]

INLINE = (
    Honest("names", "import sys\nprint(sorted(globals()), sys.argv, sys.path[0], __name__)", argv=("a",), inline=True),
    Honest("traceback", "def f(): return 1/0\nf()", inline=True),
    Honest("syntax", "x = (", inline=True),
    Honest("pickle", "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))", inline=True),
)


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_behaves_the_same_bare_and_boxed(backend: ProcessBackend, program: Honest) -> None:
    bare, boxed, report = await comparing.both(backend, program)
    assert boxed == bare
    assert report.limit is None
    assert not report.trouble


@pytest.mark.parametrize("program", INLINE, ids=[program.name for program in INLINE])
@pytest.mark.parametrize("layout", ["shared", "fresh"])
async def test_a_program_on_the_command_line_behaves_the_same(backend: ProcessBackend, program: Honest, layout) -> None:
    bare, boxed, _ = await comparing.both(backend, program, layout=layout)
    assert boxed == bare


@pytest.mark.parametrize("program", [item for item in PROGRAMS if item.id in ("error-group", "source-surroundings")])
async def test_a_program_behaves_the_same_with_a_fresh_layout(backend: ProcessBackend, program: Honest) -> None:
    bare, boxed, report = await comparing.both(backend, program, layout="fresh")
    assert boxed == bare
    assert report.isolation["memory_layout"] == "fresh"


async def test_programs_that_solve_small_tasks_behave_the_same(backend: ProcessBackend) -> None:
    if not TASKS.is_file():
        pytest.skip(f"there is no {TASKS}; RINGFENCE_PROGRAMS may name another file")
    with gzip.open(TASKS, "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file]
    chosen = tasks if FULL else tasks[::25]
    turn = asyncio.Semaphore(2)

    async def differs(task: dict[str, str]) -> bool:
        async with turn:
            bare, boxed, report = await comparing.both(backend, Honest(task["id"], task["code"]))
            return boxed != bare or bool(report.denials)

    found = await asyncio.gather(*map(differs, chosen))
    assert [task["id"] for task, different in zip(chosen, found, strict=True) if different] == []


# ── Where they differ, and how far ──


async def test_one_frame_below_the_program_is_ours_and_does_not_cost_depth(backend: ProcessBackend) -> None:
    source = """
        import inspect, sys
        def down(n):
            try: return down(n + 1)
            except RecursionError: return n
        print(len(inspect.stack()), down(0), sys.getrecursionlimit())
        """
    bare, boxed, _ = await comparing.both(backend, Honest("frames", source))
    frames, depth, limit = map(int, boxed.stdout.split())
    bare_frames, bare_depth, bare_limit = map(int, bare.stdout.split())
    assert (frames, depth) == (bare_frames + 1, bare_depth)
    assert limit in (bare_limit + 1, bare_limit + 2)


async def test_randomness_is_not_the_same_in_two_boxes(backend: ProcessBackend) -> None:
    source = "import os, random, secrets, tempfile, uuid\nprint(random.random(), uuid.uuid4(), secrets.token_hex())"
    source += "\nprint(os.urandom(8), tempfile.mktemp(), uuid.uuid1().node)"
    first, second = [(await comparing.boxed(backend, Honest("random", source)))[0].stdout.split() for _ in range(2)]
    assert not set(first) & set(second)


async def test_variables_that_python_reads_at_its_start_have_their_effect(backend: ProcessBackend) -> None:
    source = b"import sys\nprint(sys.flags.hash_randomization, sys.flags.optimize, sys.path[1], sys.stdout.encoding)"
    env = {
        "PYTHONHASHSEED": "0",
        "PYTHONOPTIMIZE": "1",
        "PYTHONPATH": "/workspace/input",
        "PYTHONIOENCODING": "latin-1",
    }
    report = await backend.run(BoxSpec(Program("python", source), env=env))
    assert report.stdout.head == b"0 1 /workspace/input iso8859-1\n"
    assert report.isolation["memory_layout"] == "fresh"


async def test_a_templates_variables_that_python_reads_at_its_start_have_their_effect() -> None:
    setup = SetUp(env={"PYTHONHASHSEED": "0", "PYTHONPATH": "/workspace/input"})
    backend = ProcessBackend(templates={"python": (), "seeded": ()}, setups={"seeded": setup}, depth=0)
    source = b"import sys\nprint(sys.flags.hash_randomization, sys.path[1])"
    try:
        report = await backend.run(BoxSpec(Program("python", source), template="seeded"))
        assert report.stdout.head == b"0 /workspace/input\n"
        plain = await backend.run(BoxSpec(Program("python", source)))
        assert plain.isolation["memory_layout"] == "shared"
    finally:
        await backend.close()


async def test_packages_are_found_beside_what_the_environment_names(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text("word = 'hello'")
    tmp_path.chmod(0o755)
    source = b"import greeting, sys\nprint(greeting.word, sys.path[1])"
    spec = BoxSpec(Program("python", source), env={"PYTHONPATH": "/workspace/input"}, packages=(tmp_path,))
    report = await backend.run(spec)
    assert (report.stdout.text, report.stderr.text) == ("hello /workspace/input\n", "")


async def test_the_time_zone_comes_from_the_environment(backend: ProcessBackend) -> None:
    source = b"import time\nprint(time.tzname, time.localtime(0).tm_hour)"
    report = await backend.run(BoxSpec(Program("python", source), env={"TZ": "EST5EDT"}))
    assert report.stdout.head == b"('EST', 'EDT') 19\n"
    assert report.isolation["memory_layout"] == "shared"
