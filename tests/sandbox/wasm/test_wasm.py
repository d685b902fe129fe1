"""Programs in WebAssembly: what they get, what comes out, what is said of it, and that they kill nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.backends import make_backend, make_staying_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import MIB, BoxReport, BoxSpec, ImageRoot, Input, Limits, Mount, Program, Programs
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.doctor import Options, run
from ringfence.doctor.cases import CATALOGUE
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.wasm import runtime
from ringfence.sandbox.wasm.backend import WasmBackend

pytestmark = pytest.mark.anyio
SLOW = Limits(wall_seconds=300)
DEADLY = {
    "nested parentheses": "print(" + "(" * 3000 + "1" + ")" * 3000 + ")",
    "a chain of signs": "eval('-' * 100_000 + '1')",
    "a chain of attributes": "eval('a' + '.b' * 100_000)",
    "nested functions": "eval('lambda: ' * 100_000 + '0')",
    "a nested value that is shown": "x = []\nfor _ in range(100_000): x = [x]\nrepr(x)",
    "a nested value that is read": "import json\njson.loads('[' * 100_000 + ']' * 100_000)",
    "recursion without a limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
}
"""Programs that kill the process in which the runtime is: it has no limit for its stack that it survives."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def backend(state: Path) -> AsyncIterator[Backend]:
    made = make_backend(SandboxSettings(backend="wasm"), state)
    try:
        await made.run(BoxSpec(Program("python", b"pass"), SLOW))
    except Unavailable as exc:
        await made.close()
        pytest.skip(str(exc))
    yield made
    await made.close()


async def ran(backend: Backend, source: str, limits: Limits = SLOW, **more: Any) -> BoxReport:
    program = Program("python", source.encode(), **more.pop("program", {}))
    return await backend.run(BoxSpec(program, limits, **more))


# ── What runs ──


async def test_a_program_runs_and_its_end_is_told(backend: Backend) -> None:
    report = await ran(backend, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (report.ended, report.exit_status, report.stdout.text, report.stderr.text) == ("exited", 3, "out\n", "err\n")
    assert report.usage.peak_memory_bytes is not None and report.wall_ms > 0
    report = await ran(backend, "import sys; sys.exit('so it is')")
    assert (report.exit_status, report.stderr.text) == (1, "so it is\n")
    for status in (0, 7, 200):
        assert (await ran(backend, f"import os; os._exit({status})")).exit_status == status


async def test_an_exception_is_shown_as_anywhere(backend: Backend) -> None:
    report = await ran(backend, "def f():\n    raise ValueError('x')\nf()")
    lines = report.stderr.text.splitlines()
    assert report.exit_status == 1 and (lines[0], lines[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: x",
    )
    assert [line.strip() for line in lines if "File" in line] == [
        'File "<string>", line 3, in <module>',
        'File "<string>", line 2, in f',
    ]


async def test_both_walls_are_in_the_facts(backend: Backend) -> None:
    isolation = (await ran(backend, "pass")).isolation
    assert (isolation["backend"], isolation["level"], isolation["memory_layout"]) == ("wasm", "process", "shared")
    protections = isolation["protections"]
    assert protections["webassembly"] == {"on": True, "verified": "host"}
    assert protections["seccomp"] == {"on": True, "verified": "run"} and len(protections) >= 12
    assert isolation["engine"].startswith("pyeryx 0.")


async def test_a_program_begins_as_it_does_anywhere(backend: Backend) -> None:
    shown = await ran(
        backend,
        "import sys, os; print(sys.platform, sys.argv, __name__, os.getcwd(), sys.path[0], __file__)",
        program={"name": "/workspace/program.py", "argv": ("a", "b")},
    )
    assert shown.stdout.text == (
        "wasi ['/workspace/program.py', 'a', 'b'] __main__ /workspace /workspace /workspace/program.py\n"
    )
    names = ["HOME", "LANG", "LOGNAME", "MINE", "PATH", "TERM", "TMPDIR", "USER"]
    shown = await ran(backend, "import os; print(sorted(os.environ), os.environ['MINE'])", env={"MINE": "ü=1"})
    assert shown.stdout.text == f"{names} ü=1\n"


@pytest.mark.parametrize("size", [0, 10, 3_000_000])
async def test_standard_input_is_read_to_its_end(backend: Backend, size: int) -> None:
    program = {"stdin": b"x" * size}
    shown = await ran(backend, "import sys; print(len(sys.stdin.buffer.read()))", program=program)
    assert shown.stdout.text == f"{size}\n"


async def test_standard_input_may_be_a_pipe_and_is_read_as_it_comes(backend: Backend) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\n")

    def answer(stream: str, data: bytes) -> None:
        if data == b"got one\n":
            os.write(writing, b"two\n")
            os.close(writing)

    source = "import sys\nfor line in sys.stdin: print('got', line, end='', flush=True)"
    try:
        shown = await backend.run(BoxSpec(Program("python", source.encode(), stdin=reading), SLOW), answer)
    finally:
        os.close(reading)
    assert shown.stdout.text == "got one\ngot two\n"


async def test_a_cell_shows_its_values(backend: Backend) -> None:
    report = await ran(backend, "display(1)\n40 + 2", program={"cell": True})
    assert [(each.data["text/plain"], each.main) for each in report.shown] == [("1", False), ("42", True)]


async def test_coroutines_run(backend: Backend) -> None:
    source = """
import asyncio
async def main():
    print(await asyncio.gather(asyncio.sleep(0.01, 1), asyncio.sleep(0.02, 2)))
asyncio.run(main())
"""
    assert (await ran(backend, source)).stdout.text == "[1, 2]\n"


async def test_no_two_programs_have_the_same_random_numbers(backend: Backend) -> None:
    source = "import random, os; print(random.random(), os.urandom(4))"
    assert len({(await ran(backend, source)).stdout.text for _ in range(3)}) == 3


# ── Files ──


async def test_inputs_are_there_and_cannot_be_changed(backend: Backend) -> None:
    source = "print(open('/workspace/input/a/b').read())\nopen('/workspace/input/a/b', 'w')"
    report = await ran(backend, source, inputs=(Input("a/b", b"given"),))
    assert report.stdout.text == "given\n" and "PermissionError" in report.stderr.text
    assert [(fact.path, fact.bytes) for fact in report.inputs] == [("/workspace/input/a/b", 5)]


async def test_output_files_come_out(backend: Backend, tmp_path: Path) -> None:
    source = """
import os, shutil
os.makedirs('output/deep')
with open('output/deep/a.txt', 'w') as file:
    file.write('hello')
shutil.copy('output/deep/a.txt', 'output/b.txt')
"""
    report = await ran(backend, source, output=tmp_path)
    assert report.stderr.text == ""
    assert {fact.path for fact in report.files} == {"/workspace/output/b.txt", "/workspace/output/deep/a.txt"}
    assert (tmp_path / "deep" / "a.txt").read_text() == (tmp_path / "b.txt").read_text() == "hello"


async def test_folders_of_the_host_are_seen_as_they_are_lent(backend: Backend, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("the host's")
    source = """
print(open('/srv/ro/a.txt').read())
open('/srv/rw/b.txt', 'w').write('from inside')
open('/srv/ro/b.txt', 'w')
"""
    mounts = (Mount(str(tmp_path / "ro"), "/srv/ro"), Mount(str(tmp_path / "rw"), "/srv/rw", "rw"))
    report = await ran(backend, source, mounts=mounts)
    assert report.stdout.text == "the host's\n" and "PermissionError" in report.stderr.text
    assert (tmp_path / "rw" / "b.txt").read_text() == "from inside"
    assert not (tmp_path / "ro" / "b.txt").exists()


async def test_nothing_else_of_the_host_is_there(backend: Backend) -> None:
    source = """
import os
for path in ('/', '/etc/passwd', '/proc/self/status', '/workspace/../etc/passwd', os.environ['HOME'] + '/../../etc'):
    try:
        print(path, os.stat(path))
    except FileNotFoundError:
        pass
"""
    report = await ran(backend, source)
    assert (report.stdout.text, report.stderr.text) == ("", "")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("os.stat('output/n')", "FileNotFoundError"),
        ("os.unlink('output/n')", "FileNotFoundError"),
        ("os.rename('output/n', 'output/m')", "FileNotFoundError"),
        ("os.listdir('output/n')", "FileNotFoundError"),
        ("os.mkdir('output')", "FileExistsError"),
        ("os.listdir('input/a')", "NotADirectoryError"),
        ("os.unlink('output')", "IsADirectoryError"),
        ("os.chmod('input/a', 0o777)", "PermissionError"),
        ("socket.socket()", "PermissionError"),
        ("threading.Thread(target=print).start()", "RuntimeError"),
        ("subprocess.run(['ls'])", "OSError"),
    ],
)
async def test_what_fails_fails_with_the_error_that_programs_expect(backend: Backend, what: str, error: str) -> None:
    source = (
        f"import os, socket, subprocess, threading\ntry: {what}\nexcept Exception as exc: print(type(exc).__name__)"
    )
    report = await ran(backend, source, inputs=(Input("a", b""),))
    assert report.stdout.text == f"{error}\n"


async def test_all_of_a_long_text_is_written(backend: Backend) -> None:
    report = await ran(backend, "import os; print(os.write(1, b'x' * 300_000) == 300_000)")
    assert report.stdout.total == 300_005


async def test_packages_are_found_and_native_ones_refused(backend: Backend, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "given.py").write_text("there = True\n")
    report = await ran(backend, "import given; print(given.there)", packages=(tmp_path,))
    assert report.stdout.text == "True\n", report.stderr.text
    (tmp_path / "fast.cpython-313-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(Unavailable, match=r"packages with native code \(fast.*so\)"):
        await ran(backend, "pass", packages=(tmp_path,))


# ── Limits ──


async def test_the_clock_ends_it(backend: Backend) -> None:
    for source in ("while True: pass", "9 ** 9 ** 9", "import time; time.sleep(1000)"):
        report = await ran(backend, source, Limits(wall_seconds=0.5))
        assert (report.ended, report.limit, report.signal) == ("timeout", "wall", signal.SIGKILL)


async def test_processor_time_ends_it_and_what_made_it_ready_is_not_its_own(backend: Backend) -> None:
    report = await ran(backend, "while True: pass", Limits(cpu_seconds=0.2, wall_seconds=600))
    assert (report.ended, report.limit) == ("timeout", "cpu")
    report = await ran(backend, "print(1)", Limits(cpu_seconds=0.2, wall_seconds=600))
    assert (report.ended, report.stdout.text) == ("exited", "1\n")


async def test_memory_ends_it(backend: Backend) -> None:
    limits = Limits(memory_bytes=64 * MIB, disk_bytes=16 * MIB, wall_seconds=600)
    report = await ran(backend, "x = [bytearray(b'x' * (4 << 20)) for _ in range(200)]", limits)
    assert (report.ended, report.limit) == ("oom", "memory")
    report = await ran(backend, "x = bytearray(b'x' * (24 << 20)); print(len(x))", limits)
    assert (report.ended, report.stdout.text) == ("exited", f"{24 << 20}\n")
    assert 24 * MIB <= (report.usage.peak_memory_bytes or 0) <= 64 * MIB


async def test_a_full_disk_is_told(backend: Backend) -> None:
    limits = Limits(disk_bytes=4 * MIB, wall_seconds=300)
    report = await ran(backend, "open('big', 'wb').write(bytes(20 << 20))", limits)
    assert "I/O error" in report.stderr.text and (report.ended, report.limit) == ("exited", "disk")


async def test_too_much_output_ends_it(backend: Backend) -> None:
    limits = Limits(output_bytes=MIB, capture_bytes=1000, wall_seconds=300)
    report = await ran(backend, "while True: print('x' * 1000)", limits)
    assert (report.ended, report.limit) == ("output", "output") and report.stdout.truncated


# ── What kills the runtime ──


@pytest.mark.parametrize("name", DEADLY)
async def test_what_kills_the_runtime_kills_its_worker_alone(backend: Backend, name: str) -> None:
    report = await ran(backend, f"print('begun', flush=True)\n{DEADLY[name]}\nprint('survived')")
    if report.ended == "exited":  # a later runtime may learn to survive it: then it is the program's own error
        assert report.exit_status == 1 and "Error" in report.stderr.text
    elif report.ended == "oom":
        assert (report.limit, name) == ("memory", "recursion without a limit")
    else:
        assert (report.ended, report.signal, report.limit) == ("signalled", signal.SIGABRT, None)
        assert "overflowed its stack" in report.stderr.text
    assert "survived" not in report.stdout.text
    assert report.isolation["backend"] == "wasm" and report.trouble == ()
    assert (await ran(backend, "print('next')")).stdout.text == "next\n"


async def test_the_first_of_these_really_kills_it(backend: Backend) -> None:
    report = await ran(backend, DEADLY["nested parentheses"])
    assert (report.ended, report.signal) == ("signalled", signal.SIGABRT)


async def test_the_runtime_is_never_loaded_here(backend: Backend) -> None:
    assert "eryx" not in sys.modules


# ── What it cannot give ──


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"programs": Programs(allow=("sh",))}, "named programs"),
        ({"root": Path("/")}, "an image"),
        ({"image": ImageRoot(Path("/"), "x", "sha256:0")}, "an image"),
        ({"installs": True}, "installs"),
        ({"layout": "fresh"}, "a hash seed"),
        ({"template": "data"}, "template data"),
        ({"network": object()}, "a network"),
    ],
)
async def test_what_it_cannot_give_is_refused(state: Path, asked: dict[str, Any], what: str) -> None:
    made = WasmBackend(state)
    with pytest.raises(Unavailable, match=f"backend wasm cannot give boxes {what}") as refused:
        await ran(made, "pass", **asked)
    assert refused.value.reason_code == "not_supported" and "backend process can" in str(refused.value)
    made = WasmBackend(state, templates={"python": (), "mine": ()}, setups=("mine",))
    with pytest.raises(Unavailable, match="template mine: its set-up is for boxes that stay"):
        await ran(made, "pass", template="mine")
    with pytest.raises(Unavailable, match="there are no processes"):
        await made.run(BoxSpec(Program("command", argv=("true",))))


def test_its_boxes_do_not_stay(state: Path) -> None:
    with pytest.raises(Unavailable, match="wasm do not stay; those of process, oci, docker, microvm, firecracker do"):
        make_staying_backend(SandboxSettings(backend="wasm"), state)


async def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(runtime, "OLDEST", (3, 0))
    monkeypatch.setattr(runtime, "version", nothing)
    with pytest.raises(Unavailable) as refused:
        await ran(WasmBackend(state), "pass")
    assert str(refused.value) == "backend wasm needs the package pyeryx: pip install 'pyeryx>=0.11,<0.12'"
    monkeypatch.setattr(runtime, "OLDEST", (4, 0))
    with pytest.raises(Unavailable, match=r"needs Python 3\.12 or later, and this is 3"):
        runtime.find()


async def test_without_a_control_group_it_is_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    monkeypatch.setattr(ProcessBackend, "counts_memory", False)
    with pytest.raises(Unavailable, match="needs a control group for memory: run `ringfence host`"):
        await ran(WasmBackend(state), "pass")


def test_another_package_of_that_name_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "eryx").mkdir()
    (tmp_path / "eryx" / "__init__.py").write_text("")
    real = PathFinder.find_spec

    def here(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return real(name, [str(tmp_path)], target)

    monkeypatch.setattr(runtime, "OLDEST", (3, 0))
    monkeypatch.setattr(runtime, "version", lambda name: "0.11.0")
    monkeypatch.setattr(PathFinder, "find_spec", here)
    with pytest.raises(Unavailable, match="what is installed as eryx is not the package pyeryx"):
        runtime.find()


async def test_a_runtime_that_does_not_run_is_found_out_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "OLDEST", (3, 0))
    library = tmp_path / "eryx" / "_eryx.abi3.so"
    library.parent.mkdir()
    (library.parent / "__init__.py").write_text("from eryx import _eryx\n")
    library.write_bytes(b"no library")
    found = runtime.Runtime(library.parent, "0.11.0", library)
    asked: list[runtime.Runtime] = []

    def find() -> runtime.Runtime:
        asked.append(found)
        return found

    monkeypatch.setattr(runtime, "find", find)
    made = WasmBackend(tmp_path / "state")
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"cannot be unpacked into .*: it does not run here: ImportError"):
            await ran(made, "pass")
    assert len(asked) == 1
    assert list((tmp_path / "state" / "wasm").iterdir()) == []


# ── Its end ──


async def test_eight_at_once(backend: Backend) -> None:
    reports = await asyncio.gather(*(ran(backend, f"print({n})") for n in range(8)))
    assert [report.stdout.text for report in reports] == [f"{n}\n" for n in range(8)]


async def test_one_that_is_cancelled_ends(backend: Backend) -> None:
    begun = asyncio.Event()
    program = Program("python", b"print('begun', flush=True)\nwhile True: pass")
    running = asyncio.ensure_future(backend.run(BoxSpec(program, SLOW), lambda stream, data: begun.set()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await ran(backend, "print('next')")).stdout.text == "next\n"


# ── The promises ──


@pytest.mark.parametrize(
    "cases",
    [
        (
            "F01",
            "F04",
            "F05",
            "F22",
            "F27",
            "F30",
            "F31",
            "F50",
            "N20",
            "S20",
            "X01",
            "G22",
            "G30",
            "G40",
            "G50",
            "I13",
        ),
        pytest.param(tuple(case.id for case in CATALOGUE), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
async def test_the_promises_are_kept(backend: Backend, cases: tuple[str, ...]) -> None:
    report = await run(backend, Options(tuple(case for case in CATALOGUE if case.id in cases), controls=False))
    broken = {result.case.id: result.got for result in report.results if result.kept is False}
    assert broken == {} and report.kept >= min(15, len(cases))
    assert all(result.reason for result in report.results if result.kept is None)
