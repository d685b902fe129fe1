"""What a box gets, what comes out of it, and what is said of it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, BoxReport, BoxSpec, FileFact, Input, Layout, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.files import collect as collecting
from ringfence.sandbox.process.backend import ProcessBackend
from tests import tooling
from tests.sandbox import comparing
from tests.sandbox.process import looking

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[ProcessBackend]:
    async for made in comparing.opened():
        yield made


async def run(backend: ProcessBackend, source: str, **more) -> BoxReport:
    return await backend.run(BoxSpec(Program("python", source.encode()), **more))


# ── What goes in ──


async def test_the_environment_is_what_was_declared_and_little_else(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_SUPERVISOR", "x")
    report = await run(backend, "import os\nprint(sorted(os.environ), os.environ['MINE'])", env={"MINE": "ü=1"})
    names = ["HOME", "LANG", "LOGNAME", "MINE", "NODE_OPTIONS", "PATH", "TERM", "TMPDIR", "USER"]
    assert report.stdout.text == f"{names} ü=1\n"
    report = await backend.run(BoxSpec(Program("command", argv=("env",)), env={"MINE": "1"}))
    assert sorted(line.partition("=")[0] for line in report.stdout.text.splitlines()) == names


@pytest.mark.parametrize("size", [0, 10, 100_000, 3_000_000])
async def test_standard_input_is_read_to_its_end(backend: ProcessBackend, size: int) -> None:
    program = Program("python", b"import sys\nprint(len(sys.stdin.buffer.read()))", stdin=b"x" * size)
    assert (await backend.run(BoxSpec(program))).stdout.text == f"{size}\n"


async def test_streams_can_be_opened_again_by_name(backend: ProcessBackend) -> None:
    read, write = os.pipe()
    os.write(write, b"in\n")
    os.close(write)
    line = "echo out > /dev/stdout; echo err > /dev/stderr; cat /dev/stdin"
    for stdin in (b"in\n", read):
        report = await backend.run(BoxSpec(Program("command", argv=("sh", "-c", line), stdin=stdin)))
        assert (report.stdout.text, report.stderr.text) == ("out\nin\n", "err\n")
    os.close(read)


async def test_no_input_can_be_opened_again_by_name(backend: ProcessBackend) -> None:
    source = b"print(repr(open('/dev/stdin').read()), open('/dev/fd/0').read() == '')"
    with open("/dev/null", "rb") as nothing:
        for stdin in (b"", nothing.fileno()):
            report = await backend.run(BoxSpec(Program("python", source, stdin=stdin)))
            assert report.stdout.text == "'' True\n", report.stderr.text


@pytest.mark.parametrize("layout", ["shared", "fresh"])
async def test_many_long_words_reach_a_program(backend: ProcessBackend, layout: Layout) -> None:
    source = b"import os, sys; print(len(sys.argv), sum(map(len, sys.argv[1:])), len(os.environ['A']))"
    program = Program("python", source, argv=("x" * 100_000,) * 18)
    report = await backend.run(BoxSpec(program, env={"A": "a" * 100_000}, layout=layout))
    assert report.stdout.text == "19 1800000 100000\n", report.stderr.text


async def test_standard_input_may_be_a_pipe(backend: ProcessBackend) -> None:
    read, write = os.pipe()
    program = Program("command", argv=("cat",), stdin=read)
    running = asyncio.create_task(backend.run(BoxSpec(program)))
    await asyncio.sleep(0.2)
    os.write(write, b"later")
    os.close(write)
    report = await running
    os.close(read)  # it is still ours
    assert report.stdout.text == "later"


async def test_inputs_can_be_read_and_not_changed(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "host.txt").write_bytes(b"from the host")
    source = """
import os
for name in ("a.txt", "folder/b.txt"): print(open("/workspace/input/" + name).read())
for act in (lambda: open("/workspace/input/a.txt", "a"), lambda: os.remove("/workspace/input/a.txt"),
            lambda: os.chmod("/workspace/input/a.txt", 0o777), lambda: os.mkdir("/workspace/input/x")):
    try: print("could", act())
    except OSError as exc: print(exc.errno)
"""
    inputs = (Input("a.txt", b"bytes"), Input("folder/b.txt", tmp_path / "host.txt"))
    report = await run(backend, source, inputs=inputs)
    assert report.stdout.text.split("\n")[:2] == ["bytes", "from the host"]
    assert "could" not in report.stdout.text
    assert report.inputs == (
        FileFact("/workspace/input/a.txt", 5, hashlib.sha256(b"bytes").hexdigest()),
        FileFact("/workspace/input/folder/b.txt", 13, hashlib.sha256(b"from the host").hexdigest()),
    )


async def test_trees_can_be_read_at_their_own_path(backend: ProcessBackend, tmp_path: Path) -> None:
    tree = tmp_path / "library"
    tree.mkdir()
    (tree / "shown.py").write_text("value = 42\n")
    (tmp_path / "beside.txt").write_text("not shown")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        if folder.owner() == tmp_path.owner():
            folder.chmod(0o755)
    source = f"""
import os, sys
sys.path.append({str(tree)!r})
import shown
print(shown.value, os.path.exists({str(tmp_path / "beside.txt")!r}))
try: open({str(tree / "new")!r}, "w")
except OSError as exc: print(exc.errno)
"""
    assert (await run(backend, source, trees=(tree,))).stdout.text == "42 False\n30\n"


async def test_a_tree_that_became_a_link_is_not_shown(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    for name, leads in (("tree", "private"), ("above", ".")):
        (tmp_path / name).symlink_to(leads)
    for tree in (tmp_path / "tree", tmp_path / "above/private"):
        with pytest.raises(Unavailable, match="symbolic links"):
            await run(backend, "pass", trees=(tree,))


@pytest.mark.skipif(not importlib.util.find_spec("numpy"), reason="numpy is not installed")
async def test_the_data_template_has_packages_loaded(backend: ProcessBackend) -> None:
    source = (
        "import sys\nprint('numpy' in sys.modules)\nimport numpy\nprint(numpy.arange(3).sum(), numpy.random.rand())"
    )
    first, second = [(await run(backend, source, template="data")).stdout.text.split() for _ in range(2)]
    assert first[:2] == second[:2] == ["True", "3"]
    assert first[2] != second[2]


async def test_what_programs_import_most_is_loaded_before_them(backend: ProcessBackend) -> None:
    """Nothing that must not be the same in two boxes is: neither threads nor random numbers."""
    source = """
import sys
print([name in sys.modules for name in ("json", "re", "collections", "datetime")])
print([name for name in ("random", "threading", "secrets", "uuid", "tempfile", "numpy") if name in sys.modules])
import random
print(random.random())
"""
    first, second = [(await run(backend, source)).stdout.text.splitlines() for _ in range(2)]
    assert first[:2] == second[:2] == ["[True, True, True, True]", "[]"]
    assert first[2] != second[2]


async def test_a_fresh_interpreter_loads_nothing_large_that_its_program_does_not_use(backend: ProcessBackend) -> None:
    source = "import sys\nprint([name for name in ('_ast', 'ctypes', 'json') if name in sys.modules])"
    assert (await run(backend, source, layout="fresh")).stdout.text == "[]\n"


@pytest.mark.parametrize("layout", ["shared", "fresh"])
async def test_what_a_library_in_c_holds_is_written_at_the_end(backend: ProcessBackend, layout: Layout) -> None:
    source = "import ctypes\nctypes.CDLL(None).printf(b'held')\ndel ctypes"
    assert (await run(backend, source, layout=layout)).stdout.text == "held"


async def test_a_fresh_layout_has_a_hash_seed_and_addresses_of_its_own(backend: ProcessBackend) -> None:
    source = "import ctypes\nprint(hash('x'), ctypes.cast(ctypes.CDLL(None).printf, ctypes.c_void_p).value)"
    shared = [await run(backend, source) for _ in range(8)]
    fresh = [await run(backend, source, layout="fresh") for _ in range(3)]
    assert len({report.stdout.text for report in shared}) <= len(looking.zygotes()) < 8
    words = [report.stdout.text.split() for report in (shared[0], *fresh)]
    assert len({seed for seed, _ in words}) == len({address for _, address in words}) == 4
    assert [report.isolation["memory_layout"] for report in (*shared, *fresh)] == ["shared"] * 8 + ["fresh"] * 3


async def test_boxes_know_nothing_of_each_other(backend: ProcessBackend) -> None:
    source = """
import os, socket
print(sorted(os.listdir("/workspace")), os.listdir("/workspace/tmp"), os.uname().nodename, os.getpid())
open("/workspace/tmp/left", "w").write("x")
with socket.socket() as server: server.bind(("127.0.0.1", 8080))
"""
    reports = await asyncio.gather(*(run(backend, source) for _ in range(3)))
    assert {report.stdout.text for report in reports} == {"['input', 'output', 'tmp'] [] box 2\n"}


# ── What makes no sense ──


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), 2**63])
@pytest.mark.parametrize(
    "name",
    [field.name for field in fields(Limits) if field.name != "capture_bytes"],
)
async def test_absurd_limits_are_refused(backend: ProcessBackend, name: str, value) -> None:
    with pytest.raises(ValueError, match=name):
        await run(backend, "pass", limits=Limits(**{name: value}))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (Program("python", b"print(1)\0"), "NUL"),
        (Program("python", b"pass", argv=("a\0b",)), "NUL"),
        (Program("python", b"#" * 50_000_000), "50000000 bytes long"),
        (Program("python", b"pass", name="/etc/passwd"), "a file of /workspace"),
        (Program("python", b"pass", name="/workspace/../etc/x"), "a file of /workspace"),
        (Program("python", b"pass", name="/workspace/input"), "a file of /workspace"),
        (Program("python", b"pass", stdin=9999), "descriptor 9999"),
        (Program("python", b"pass", argv=("x" * 3_000_000,)), "longer than"),
        (Program("command"), "at least one word"),
        (Program("command", argv=("",)), "at least one word"),
    ],
    ids=["nul", "nul in argv", "long", "name outside", "name above", "name taken", "stdin", "argv", "none", "empty"],
)
async def test_programs_that_make_no_sense_are_refused(backend: ProcessBackend, program: Program, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        await backend.run(BoxSpec(program))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"env": {"": "x"}}, "environment"),
        ({"env": {"a=b": "x"}}, "environment"),
        ({"env": {"a": "x\0"}}, "NUL"),
        ({"template": "nonesuch"}, "nonesuch"),
        ({"trees": (Path("/etc/passwd"),)}, "not a folder"),
        ({"trees": (Path("/nonexistent"),)}, "not a folder"),
        ({"inputs": (Input("a", Path("/nonexistent")),)}, "nonexistent"),
        ({"inputs": (Input("../a", b""),)}, "relative path"),
        ({"inputs": (Input("a", b""), Input("a", b""))}, "same name"),
        ({"output": Path("/etc/passwd")}, "not a folder"),
    ],
)
async def test_surroundings_that_make_no_sense_are_refused(backend: ProcessBackend, more, words: str) -> None:
    await tooling.until(lambda: looking.at_rest(backend))  # boxes that are kept ready may still be coming
    before = looking.descriptors()
    with pytest.raises(ValueError, match=words):
        await run(backend, "pass", **more)
    assert looking.descriptors() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_an_output_folder_that_cannot_be_written_is_refused(backend: ProcessBackend, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(ValueError, match="cannot be written"):
        await run(backend, "pass", output=tmp_path)


# ── What comes out ──


async def test_output_files_are_collected_with_their_digests(backend: ProcessBackend, tmp_path: Path) -> None:
    source = """
import os
os.chdir("/workspace/output")
os.mkdir("folder"); open("folder/r.csv", "w").write("a,b\\n"); open("empty", "w")
os.symlink("/etc/passwd", "link"); os.mkfifo("pipe")
open("/workspace/elsewhere", "w").write("not collected")
"""
    report = await run(backend, source, output=tmp_path)
    assert [(fact.path, fact.bytes) for fact in report.files] == [
        ("/workspace/output/empty", 0),
        ("/workspace/output/folder/r.csv", 4),
    ]
    assert report.files[1].sha256 == hashlib.sha256(b"a,b\n").hexdigest()
    assert (tmp_path / "folder/r.csv").read_text() == "a,b\n"
    assert sorted(report.skipped) == ["/workspace/output/link", "/workspace/output/pipe"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "folder"]


async def test_files_are_collected_from_a_run_that_was_ended(backend: ProcessBackend, tmp_path: Path) -> None:
    source = "open('/workspace/output/part', 'w').write('half')\nwhile True: pass"
    part = tmp_path / "part"
    for seconds in tooling.LONGER:
        report = await run(backend, source, limits=Limits(wall_seconds=seconds), output=tmp_path)
        if part.exists() and part.read_text():
            break
    assert (report.ended, part.read_text()) == ("timeout", "half")


async def test_of_long_output_head_and_tail_are_kept(backend: ProcessBackend) -> None:
    source = "import sys\nsys.stdout.write('begin' + 'x' * 500_000 + 'end')\nsys.stderr.write('short')"
    report = await run(backend, source, limits=Limits(capture_bytes=1000))
    stdout = report.stdout
    assert stdout.truncated and len(stdout.head) + len(stdout.tail) == 1000
    assert stdout.head.startswith(b"beginx") and stdout.tail.endswith(b"xend")
    assert stdout.total == 500_008
    assert stdout.sha256 == hashlib.sha256(b"begin" + b"x" * 500_000 + b"end").hexdigest()
    assert "499008 bytes left out" in stdout.text
    assert (report.stderr.head, report.stderr.tail, report.stderr.truncated) == (b"short", b"", False)


async def test_output_is_told_as_it_comes(backend: ProcessBackend) -> None:
    """It goes on only when the last line was heard."""
    heard: list[tuple[str, bytes]] = []
    source = """
import sys
for number in range(3):
    print("out", number, flush=True); sys.stdin.readline()
    print("err", number, file=sys.stderr, flush=True); sys.stdin.readline()
"""
    read, write = os.pipe()

    def hear(stream: str, chunk: bytes) -> None:
        heard.append((stream, chunk))
        os.write(write, b"\n")

    report = await backend.run(BoxSpec(Program("python", source.encode(), stdin=read)), hear)
    os.close(write)
    os.close(read)
    assert heard == [(f"std{word}", f"{word} {number}\n".encode()) for number in range(3) for word in ("out", "err")]
    assert report.stdout.text == "out 0\nout 1\nout 2\n"


# ── What is said ──


async def test_usage_is_plausible(backend: ProcessBackend) -> None:
    source = """
import os, time
much = bytearray(50_000_000)
for place in range(0, len(much), 4096): much[place] = 1
if not os.fork(): time.sleep(0.1); os._exit(0)
os.wait()
end = time.process_time() + 0.3
while time.process_time() < end: pass
"""
    began = time.monotonic()
    report = await run(backend, source)
    most = (time.monotonic() - began) * 1000
    usage = report.usage
    # Clocks are coarse, and not all of them go on at the same moment.
    assert 290 <= (usage.cpu_ms or 0) <= most * (os.cpu_count() or 1)
    assert 50_000_000 <= (usage.peak_memory_bytes or 0) < 120 * MIB
    assert usage.processes is None or 2 <= usage.processes <= 4
    assert 390 < report.wall_ms <= most


async def test_refused_system_calls_are_counted_by_name(backend: ProcessBackend) -> None:
    source = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
for _ in range(3): print(libc.unshare(0x10000000), ctypes.get_errno())
libc.ptrace(0, 0, 0, 0)
try: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
except PermissionError: pass
"""
    report = await run(backend, source)
    assert report.stdout.text == "-1 1\n" * 3
    assert report.denials == {"unshare": 3, "ptrace": 1, "socket": 1}
    assert report.ended == "exited"


async def test_nobody_gets_a_box_before_one_was_looked_at() -> None:
    fresh = ProcessBackend()
    try:
        reports = await asyncio.gather(*(fresh.run(BoxSpec(Program("python", source=b"pass"))) for _ in range(4)))
    finally:
        await fresh.close()
    assert all(report.isolation["verified_at"] for report in reports)


async def test_isolation_is_on_record(backend: ProcessBackend) -> None:
    isolation = (await run(backend, "pass")).isolation
    assert (isolation["backend"], isolation["level"]) == ("process", "process")
    protections = isolation["protections"]
    assert all(each["on"] for each in protections.values())
    assert {each["verified"] for each in protections.values()} == {"run", "host"}
    assert protections["seccomp"] == {"on": True, "verified": "run"}
    assert set(isolation["limits"]) >= {"memory", "pids", "cpu"}
    assert all(each["by"] in ("cgroup", "rlimit", "watchdog", "affinity") for each in isolation["limits"].values())
    page = (tooling.ROOT / "docs/facts.md").read_text().partition("\n## Isolation\n")[2].partition("\n## ")[0]
    assert set(isolation) <= set(re.findall(r"`([a-z_]+)`", page)), "docs/facts.md lists every key"


BEFORE_OTHERS = """
import os, ringfence
os.setpriority(os.PRIO_PROCESS, 0, -5)
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
print(*ringfence.run_code("import os; print(os.getpriority(os.PRIO_PROCESS, 0))").logs.stdout)
print(*ringfence.run_code("print(open('/proc/self/stat').read().rpartition(')')[2].split()[38])").logs.stdout)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may go before others")
def test_a_supervisor_that_goes_before_others_does_not_take_its_boxes_along(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_OTHERS],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert done.stdout.split() == ["0", str(os.SCHED_OTHER)], done.stderr


async def test_results_are_read_beside_the_event_loop_however_little_of_them_is_on_disk(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def watched(*given: Any, **more: Any) -> Any:
        readers.append(threading.current_thread())
        return collect(*given, **more)

    collect = collecting.collect
    monkeypatch.setattr(collecting, "collect", watched)
    report = await run(backend, "import os\nos.truncate(os.open('output/x', os.O_CREAT | os.O_WRONLY), 1 << 20)")
    assert [file.bytes for file in report.files] == [1 << 20]
    assert readers and threading.main_thread() not in readers
    assert (await run(backend, "pass")).files == () and len(readers) == 1
