"""Cell after cell in one interpreter: what stays, what ends a cell, and what cannot end the interpreter."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.process.guest import repl
from tests import tooling
from tests.sandbox.process.celling import Interpreter


@pytest.fixture(scope="module")
def shared() -> Iterator[Interpreter]:
    """For what leaves no traces."""
    with Interpreter() as interpreter:
        yield interpreter


def deepest(text: str) -> int:
    return int(text.split()[-1])


# ── What stays ────────────────────────────────────────────────────────────────────────────────────


def test_variables_imports_and_the_folder_stay(fresh: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert fresh("import math, os\nx = 20\nos.chdir('inner')").ok
    assert fresh("def twice(n):\n    return 2 * n").ok
    assert fresh("twice(x) + math.floor(2.5)").text == "42"
    assert fresh("os.getcwd()").text == repr(str(tmp_path / "inner"))


def test_modules_of_the_working_folder_can_be_imported(fresh: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("answer = 42")
    assert fresh("import helper\nhelper.answer").text == "42"


def test_the_namespace_is_that_of_a_notebook(fresh: Interpreter) -> None:
    assert fresh("__name__, globals().get('__' 'file__')").text == "('__main__', None)"
    assert fresh("import sys\nsys.argv, sys.modules['__main__'].__dict__ is globals()").text == "([''], True)"
    assert fresh("[name for name in sys.modules if 'ringfence' in name]").text == "[]"


def test_functions_of_the_namespace_can_be_pickled_and_run_in_other_processes(fresh: Interpreter) -> None:
    fresh("def square(n):\n    return n * n\nclass Thing:\n    pass")
    assert fresh("import pickle\npickle.loads(pickle.dumps(square))(3)").text == "9"
    assert fresh("type(pickle.loads(pickle.dumps(Thing()))) is Thing").text == "True"
    fresh("import multiprocessing\ncontext = multiprocessing.get_context('fork')")
    assert fresh("with context.Pool(2) as pool:\n    found = pool.map(square, range(4))").ok
    assert fresh("found").text == "[0, 1, 4, 9]"


def test_the_last_value_has_a_name(fresh: Interpreter) -> None:
    fresh("6 * 7")
    assert fresh("_ + 1").text == "43"
    assert fresh("None").results == []
    assert fresh("_").text == "43"
    fresh("_ = 'mine'")
    fresh("1")
    assert fresh("_").text == "'mine'"


def test_variables_of_the_environment_are_for_one_cell(fresh: Interpreter) -> None:
    fresh("import os, time")
    asked = "os.environ.get('COLOUR'), os.environ.get('TZ')"
    assert fresh(asked, env={"COLOUR": "red", "TZ": "UTC-3"}).text == "('red', 'UTC-3')"
    assert fresh(asked).text == "(None, None)"
    assert fresh("time.timezone", env={"TZ": "UTC-3"}).text == "-10800"
    fresh("os.environ['COLOUR'] = 'blue'", env={"COLOUR": "red"})
    assert fresh("os.environ['COLOUR']", env={}).text == "'blue'"


def test_a_long_source_comes_as_a_file(shared: Interpreter) -> None:
    assert shared(f"long = '{'x' * 200_000}'\nlen(long)").text == "200000"


def test_objects_that_nobody_needs_are_collected(fresh: Interpreter) -> None:
    fresh("import gc, weakref\nclass Node: pass\nnode = Node()\nnode.me = node\nalive = weakref.ref(node)\ndel node")
    assert fresh("gc.isenabled()").text == "True"
    assert fresh("gc.collect();\nalive() is None").text == "True"


# ── await ─────────────────────────────────────────────────────────────────────────────────────────


def test_await_works_at_the_top_of_a_cell(fresh: Interpreter) -> None:
    assert fresh("import asyncio\nawait asyncio.sleep(0, 'slept')").text == "'slept'"
    assert fresh("async def later(n):\n    await asyncio.sleep(0)\n    return n\n[await later(n) for n in (1, 2)]").ok
    assert fresh("async with asyncio.timeout(5):\n    x = await later(5)\nx").text == "5"


def test_the_loop_is_kept_for_the_session(fresh: Interpreter) -> None:
    fresh("import asyncio\nevent = asyncio.Event()\ntask = asyncio.create_task(event.wait())\nawait asyncio.sleep(0)")
    assert fresh("event.set()\nawait task").text == "True"
    assert fresh("asyncio.run(asyncio.sleep(0, 'another'))").text == "'another'"
    assert fresh("await asyncio.sleep(0, 'again')").text == "'again'"


def test_an_error_after_await_shows_the_cell_alone(fresh: Interpreter) -> None:
    error = fresh("import asyncio\nawait asyncio.sleep(0)\n1 / 0").error
    assert error.name == "ZeroDivisionError"
    assert "asyncio" not in error.traceback.replace("import asyncio", "")


def test_what_waits_can_be_interrupted(fresh: Interpreter) -> None:
    cell = "import asyncio\ntry:\n    print('go')\n    await asyncio.sleep(60)\nfinally:\n    print('tidied')"
    outcome = fresh(cell, fresh.interrupt_when_it_speaks())
    assert (outcome.error.name, outcome.stdout) == ("KeyboardInterrupt", "go\ntidied\n")
    assert fresh("await asyncio.sleep(0, 'again')").text == "'again'"


# ── The end of a cell ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("code", "value"), [("", "0"), ("0", "0"), ("3", "3"), ("'why'", "why")])
def test_exit_ends_the_cell_and_not_the_interpreter(shared: Interpreter, code: str, value: str) -> None:
    outcome = shared(f"import sys\nprint('before')\nsys.exit({code})")
    assert (outcome.error.name, outcome.error.value, outcome.stdout) == ("SystemExit", value, "before\n")
    assert shared("1").text == "1"


@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_a_death_is_the_end(death: str, fresh: Interpreter) -> None:
    outcome = fresh(f"import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{death}")
    assert outcome.gone
    assert outcome.results == []


@pytest.mark.parametrize(
    "endless", ["while True: pass", "import time\ntime.sleep(60)", "import threading\nthreading.Event().wait()"]
)
def test_a_cell_is_interrupted_and_all_that_was_made_is_kept(fresh: Interpreter, endless: str) -> None:
    fresh("kept = 1")
    outcome = fresh(f"kept += 1\nprint('go')\n{endless}", fresh.interrupt_when_it_speaks())
    assert outcome.error.name == "KeyboardInterrupt"
    assert "<cell 2>" in outcome.error.traceback and "cells.py" not in outcome.error.traceback
    assert fresh("kept").text == "2"


def test_an_interrupt_between_cells_does_nothing(fresh: Interpreter) -> None:
    fresh("0")
    for number in range(20):
        fresh.interrupt()
        assert fresh(f"{number}").text == f"{number}"
        fresh.interrupt()


def test_interrupts_at_any_moment_end_at_most_a_cell(fresh: Interpreter) -> None:
    fresh(
        "import time\ncount = 0\nclass Slow:\n    def __repr__(self):\n        time.sleep(0.002)\n        return 'slow'"
    )
    over, chance = threading.Event(), random.Random(7)

    def shoot() -> None:
        while not over.wait(chance.random() / 500):
            fresh.interrupt()

    shooter = threading.Thread(target=shoot)
    shooter.start()
    try:
        ends = [fresh("count += 1\ntime.sleep(0.001)\ndisplay(count)\nSlow()") for _ in range(300)]
    finally:
        over.set()
        shooter.join()
    failed = {outcome.error.name for outcome in ends if not outcome.ok}
    assert failed <= {"KeyboardInterrupt"}
    time.sleep(0.01)
    assert fresh("count > 0").text == "True"


def test_a_cell_that_ignores_interrupts_does_so_for_itself_alone(fresh: Interpreter) -> None:
    fresh("import signal, time\nsignal.signal(2, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [2])")
    outcome = fresh("print('go')\ntime.sleep(60)", fresh.interrupt_when_it_speaks())
    assert outcome.error.name == "KeyboardInterrupt"


def test_libraries_find_the_usual_handler_of_interrupts(fresh: Interpreter) -> None:
    assert fresh("import signal\nsignal.getsignal(signal.SIGINT) is signal.default_int_handler").text == "True"
    cell = "import asyncio\nasync def wait():\n    print('go')\n    await asyncio.sleep(60)\nasyncio.run(wait())"
    assert fresh(cell, fresh.interrupt_when_it_speaks()).error.name == "KeyboardInterrupt"
    assert fresh("1").text == "1"


def test_an_error_that_comes_between_cells_is_nobodys(fresh: Interpreter, tmp_path: Path) -> None:
    late = "import os, signal\ndef late(*_):\n    os.mkdir('came')\n    raise TimeoutError\n"
    assert fresh(late + "signal.signal(signal.SIGALRM, late)").ok
    fresh.process.send_signal(signal.SIGALRM)
    tooling.wait_until((tmp_path / "came").exists)
    assert fresh("1").text == "1"


def test_it_ends_with_its_supervisor() -> None:
    interpreter = Interpreter()
    assert interpreter("1").text == "1"
    assert interpreter.end() == 0


# ── Children ──────────────────────────────────────────────────────────────────────────────────────


def test_a_child_that_comes_back_from_the_cell_ends_there(fresh: Interpreter) -> None:
    wait = "else:\n    status = os.waitpid(child, 0)[1]"
    outcome = fresh(f"import os\nchild = os.fork()\nif not child:\n    display('mine')\n{wait}\n'shown'")
    assert [result.data["text/plain"] for result in outcome.results] == ["'shown'"]
    assert outcome.stdout == "'mine'\n"
    assert fresh("status").text == "0"


@pytest.mark.parametrize(
    ("end", "status", "said"), [("raise ValueError('no')", 1, "ValueError: no"), ("raise SystemExit(5)", 5, "")]
)
def test_a_child_that_fails_ends_as_it_would_outside(fresh: Interpreter, end: str, status: int, said: str) -> None:
    outcome = fresh(
        f"import os\nchild = os.fork()\nif not child:\n    {end}\nos.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    assert outcome.text == str(status)
    assert said in outcome.stderr and "cells.py" not in outcome.stderr


def test_a_child_that_the_interpreter_did_not_see_begin_ends_too(fresh: Interpreter) -> None:
    outcome = fresh("import ctypes, os\nchild = ctypes.CDLL(None).fork()\n'shown'")
    assert len(outcome.results) == 1
    assert fresh("os.waitpid(child, 0)[1]").text == "0"


DESCRIPTORS = """
import os
def descriptors():
    found = []
    for name in os.listdir('/proc/self/fd'):
        try:
            found.append(os.readlink('/proc/self/fd/' + name).partition(':')[0])
        except OSError:
            continue
    return found
"""


def test_the_channel_is_not_inherited(fresh: Interpreter) -> None:
    fresh(f"source = {DESCRIPTORS!r}\nexec(source)\nimport subprocess, sys")
    assert "'socket'" in str(fresh("descriptors()").text)
    run = "subprocess.run([sys.executable, '-Ic', source + 'print(descriptors())'], close_fds=False, check=True);"
    for cell in (run, "child = os.fork()\nif not child:\n    print(descriptors())\nelse:\n    os.waitpid(child, 0)"):
        outcome = fresh(cell)
        assert outcome.ok and "'pipe'" in outcome.stdout and "'socket'" not in outcome.stdout


# ── What a cell may break ─────────────────────────────────────────────────────────────────────────

REPLACE = """
import builtins, os, sys
for name in ('len', 'isinstance', 'repr', 'compile', 'eval', 'str', 'type', 'list', 'map'):
    setattr(builtins, name, None)
"""
UNLOAD = """
import sys
for name in ('os', 'posix', 'marshal', '_socket', '_signal', 'io', 'linecache', 'traceback', 'json'):
    sys.modules[name] = None
"""
DISARM = """
import os
for name in ('dup2', 'close', 'getpid', '_exit', 'pread', 'fstat'):
    setattr(os, name, None)
"""
VANDALS = {
    "builtins": REPLACE,
    "all builtins": "import builtins\nbuiltins.__dict__.clear()",
    "modules": UNLOAD,
    "no modules": "import sys\nsys.modules.clear()",
    "system calls": DISARM,
    "streams": "import sys\nsys.stdout = sys.stderr = sys.stdin = sys.__stdout__ = None",
    "paths": "import sys\nsys.path.clear()\nsys.meta_path.clear()\nsys.path_hooks.clear()",
    "trace": "import sys\ndef trace(*_):\n    raise ValueError('traced')\nsys.settrace(trace)",
    "profile": "import sys\ndef profile(*_):\n    raise ValueError('profiled')\nsys.setprofile(profile)",
    "linecache": "import linecache\nlinecache.cache = None",
    "environment": "import os\nos.environ = None",
    "recursion": "import sys\nsys.setrecursionlimit(30)",
    "collector": "import gc\ngc.disable()\ngc.freeze()",
    "main": "import sys\nsys.modules['__main__'] = None",
    "names": "globals().clear()",
}


@pytest.mark.parametrize("vandal", VANDALS.values(), ids=VANDALS)
def test_cells_go_on_whatever_one_has_replaced(fresh: Interpreter, vandal: str) -> None:
    fresh("y = 1", env={"A": "b"})
    fresh(vandal, env={"A": "b"})
    assert fresh("x = 20").ok
    assert fresh("x + 22").text == "42"
    assert fresh("x + missing").error.name == "NameError"
    assert fresh("x").text == "20"


def test_closing_all_descriptors_ends_the_interpreter(fresh: Interpreter) -> None:
    assert fresh("import os\nos.closerange(3, 1000)").gone
    assert fresh.process.wait(60) == 1


def test_descriptors_that_are_used_up_can_be_closed_by_the_next_cell(fresh: Interpreter) -> None:
    fresh("import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nfiles = []")
    fresh("while True:\n    files.append(open('/dev/null'))")
    refused = fresh("x = 1")
    assert (refused.error.name, "too many open files" in refused.error.value) == ("OSError", True)
    assert fresh("files.clear()").ok
    assert fresh("'x' in globals()").text == "False"


def test_a_cell_may_recurse_as_deep_as_a_program(fresh: Interpreter, tmp_path: Path) -> None:
    program = "def down(n):\n    global deep\n    deep = n\n    down(n + 1)\n"
    program += "try:\n    down(1)\nexcept RecursionError:\n    print('deep', deep)\n"
    (tmp_path / "program.py").write_text(program)
    outside = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=True)
    assert deepest(fresh(program).stdout) == deepest(outside.stdout)
    assert fresh("down(1)").error.name == "RecursionError"
    assert fresh("1").text == "1"


def test_a_thousand_cells_take_no_memory(fresh: Interpreter) -> None:
    def size() -> int:
        return int(Path(f"/proc/{fresh.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(300):
        fresh("x = 1\nx")
    before = size()
    for _ in range(1000):
        fresh("x = 1\nx")
    assert size() - before < 1_500_000
    assert len(os.listdir(f"/proc/{fresh.process.pid}/fd")) < 12


# ── What cells print and read ──


REFUSAL = "a session has no standard input; pass data as a file or a variable"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Interpreter]:
    with Interpreter(tmp_path) as interpreter:
        yield interpreter


# ── Output ────────────────────────────────────────────────────────────────────────────────────────


def test_each_cell_has_its_own_output(run: Interpreter) -> None:
    first = run("import sys\nprint('one')\nprint('oops', file=sys.stderr)")
    second = run("print('two', end='')")
    assert (first.stdout, first.stderr) == ("one\n", "oops\n")
    assert (second.stdout, second.stderr) == ("two", "")


def test_all_ways_of_writing_are_captured(run: Interpreter) -> None:
    cell = """
import ctypes, os, subprocess, sys
print('a')
sys.stdout.buffer.write(b'b\\n')
sys.__stdout__.write('c\\n')
sys.stdout.flush()
os.write(1, b'd\\n')
subprocess.run(['sh', '-c', 'echo e'])
ctypes.CDLL(None).printf(b'f\\n')
"""
    assert sorted(run(cell).stdout.split()) == list("abcdef")
    assert run("1").stdout == ""


def test_lines_are_seen_while_the_cell_runs(run: Interpreter, tmp_path: Path) -> None:
    def seen(said: str) -> None:
        if said == "first\n":
            (tmp_path / "seen").touch()

    wait = "import os, time\nwhile not os.path.exists('seen'): time.sleep(0.01)"
    assert run(f"print('first')\n{wait}\nprint('second')", seen).stdout == "first\nsecond\n"


def test_much_output_is_whole(run: Interpreter) -> None:
    assert run("for n in range(50_000): print(n)").stdout == "".join(f"{n}\n" for n in range(50_000))


def test_what_utf8_cannot_say_is_shown(run: Interpreter) -> None:
    outcome = run("import sys\nprint('\\ud800 é')\nprint('\\udcff', file=sys.stderr)")
    assert (outcome.stdout, outcome.stderr) == ("\\ud800 é\n", "\\udcff\n")
    assert outcome.ok


def test_what_is_printed_between_cells_never_fails_nor_shows_up_in_another(run: Interpreter) -> None:
    cell = """
import sys, threading, time
failures, said = [], 0
def talk():
    global said
    try:
        while not quiet:
            print('late')
            print('late', file=sys.stderr, end='')
            said += 1
            time.sleep(0.001)
    except BaseException as exc:
        failures.append(exc)
quiet = False
thread = threading.Thread(target=talk)
thread.start()
"""
    run(cell)
    time.sleep(0.1)
    during = run("before = said\nwhile said < before + 2: time.sleep(0.001)")
    assert "late\n" in during.stdout
    assert run("quiet = True\nthread.join()\nfailures").text == "[]"
    time.sleep(0.05)
    outcome = run("print('mine')")
    assert (outcome.stdout, outcome.stderr) == ("mine\n", "")


def test_what_was_left_in_a_buffer_belongs_to_its_cell(run: Interpreter, tmp_path: Path) -> None:
    cell = """
import os, sys, threading, time
def write():
    while not os.path.exists('over'): time.sleep(0.01)
    sys.stdout.write('half a line')
    os.mkdir('written')
threading.Thread(target=write).start()
"""
    assert run(cell).ok
    (tmp_path / "over").touch()
    tooling.wait_until((tmp_path / "written").exists)
    assert run("print('whole')").stdout == "whole\n"


def test_a_process_that_is_left_behind_does_not_hold_up_the_cell(run: Interpreter) -> None:
    # For longer than the test waits for the cell.
    assert run("import subprocess\nchild = subprocess.Popen(['sleep', '600'])").ok
    assert run("child.kill()\nchild.wait()").text == "-9"


@pytest.mark.parametrize(
    "close", ["sys.stdout.close()", "os.close(1)", "sys.stdout.detach()", "sys.__stdout__.close()"]
)
def test_a_stream_that_was_closed_is_open_in_the_next_cell(run: Interpreter, close: str) -> None:
    run(f"import os, sys\n{close}")
    assert run("print('heard')").stdout == "heard\n"


def test_a_stream_of_the_users_own_stays(run: Interpreter) -> None:
    run("import io, sys\nsys.stdout = io.StringIO()")
    assert run("print('kept')").stdout == ""
    assert run("sys.stdout.getvalue()").text == "'kept\\n'"


def test_a_stream_that_fails_does_no_harm(run: Interpreter) -> None:
    run("import sys\nclass Broken:\n    write = closed = None\n    def flush(self): raise SystemError")
    run("sys.stdout = Broken()")
    assert run("1").text == "1"


# ── Input ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "asking",
    [
        "input('name? ')",
        "import sys\nsys.stdin.readline()",
        "import sys\nsys.stdin.read(5)",
        "import sys\nfor line in sys.stdin: pass",
        "import sys\nsys.stdin.readlines()",
        "import sys\nsys.stdin.buffer.read()",
        "import sys\nsys.__stdin__.read()",
        "breakpoint()",
    ],
)
def test_a_question_is_refused(run: Interpreter, asking: str) -> None:
    error = run(asking).error
    assert (error.name, error.value) == ("RuntimeError", REFUSAL)
    assert "streams.py" not in error.traceback
    assert run("1").text == "1"


def test_programs_find_an_empty_input(run: Interpreter) -> None:
    assert run("import subprocess\nsubprocess.run(['cat'], capture_output=True).stdout").text == "b''"
    assert run("import os\nos.read(0, 10)").text == "b''"


def test_the_refusal_outlives_an_exit(run: Interpreter) -> None:
    assert run("exit()").error.name == "SystemExit"
    assert run("input()").error.value == REFUSAL


def test_input_of_the_users_own_is_read(run: Interpreter) -> None:
    assert run("import io, sys\nsys.stdin = io.StringIO('Ada\\n')\ninput()").text == "'Ada'"


# ── The source of cells: errors in it, how tracebacks quote it, what holds for later cells ──


def test_a_syntax_error_is_shown_where_it_is(run: Interpreter) -> None:
    error = run("x = 1\ny = = 2").error
    assert (error.name, error.value) == ("SyntaxError", "invalid syntax (<cell 1>, line 2)")
    assert error.traceback.splitlines() == [
        '  File "<cell 1>", line 2',
        "    y = = 2",
        "        ^",
        "SyntaxError: invalid syntax",
    ]
    assert run("'x' in globals()").text == "False"


@pytest.mark.parametrize("source", [b"x = '\xff'", b"\x00", b"# coding: nonsense\n1", b"return 1", b"(" * 500, b"\\"])
def test_a_source_that_is_none_is_an_error_of_the_cell(run: Interpreter, source: bytes) -> None:
    assert run(source).error.name in ("SyntaxError", "ValueError", "MemoryError", "IndentationError")
    assert run("1").text == "1"


def test_a_source_in_another_encoding_is_read(run: Interpreter) -> None:
    assert run("# coding: latin-1\n'é'".encode("latin-1")).text == "'é'"


def test_tracebacks_quote_the_cells_and_nothing_of_ours(run: Interpreter) -> None:
    run("def inner():\n    return outer['missing']")
    attempt = "    try:\n        inner()\n    except KeyError as exc:\n        raise ValueError('no') from exc"
    run(f"outer = {{}}\ndef call():\n{attempt}")
    error = run("call()").error
    assert (error.name, error.value) == ("ValueError", "no")
    for quoted in ('File "<cell 1>", line 2', "return outer['missing']", "direct cause", 'File "<cell 3>", line 1'):
        assert quoted in error.traceback
    assert "ringfence" not in error.traceback
    assert error.traceback.count("call()") == 1


def test_errors_in_groups_and_contexts_are_shown(run: Interpreter) -> None:
    error = run(
        "try:\n    1 / 0\nexcept ArithmeticError:\n    raise ExceptionGroup('several', [ValueError('a')])"
    ).error
    assert "During handling" in error.traceback and "ValueError: a" in error.traceback
    run("error = ValueError('noted')\nerror.add_note('a note')")
    assert "a note" in run("raise error").error.traceback


def test_an_error_that_cannot_be_described_is_told_all_the_same(run: Interpreter) -> None:
    bad = "class Bad(Exception):\n    def __str__(self):\n        print('go')\n        while True: pass\nraise Bad"
    assert run(bad, run.interrupt_when_it_speaks()).error.name == "Bad"
    assert run("class Worse(Exception):\n    __str__ = None\nraise Worse").error.name == "Worse"
    assert run("class Named(Exception): pass\nNamed.__module__ = 5\nraise Named").error.name == "Named"


def test_a_long_error_is_cut(run: Interpreter) -> None:
    error = run("raise ValueError('x' * 10_000_000)").error
    assert "cut: 10,000,000 characters" in error.value
    assert len(error.value) < 100_000 and len(error.traceback) < 300_000
    deep = run("def a(n):\n    return b(n)\ndef b(n):\n    return a(n)\na(1)").error
    assert deep.name == "RecursionError" and len(deep.traceback) < 300_000


def test_the_source_of_functions_is_found(run: Interpreter) -> None:
    run("def f():\n    return 'é'\n")
    assert run("import inspect\ninspect.getsource(f)").text == repr("def f():\n    return 'é'\n")
    run("def g():\n    return 2")
    assert run("inspect.getsource(g)").text == repr("def g():\n    return 2\n")


def test_the_last_error_can_be_looked_at(run: Interpreter) -> None:
    run("where = 5\n1 / 0")
    assert run("import sys\nsys.last_traceback.tb_frame.f_code.co_filename").text == "'<cell 1>'"


def test_what_comes_from_the_future_stays(run: Interpreter) -> None:
    run("from __future__ import annotations\ndef f(a: missing): pass\nf.__annotations__")
    assert run("def g(a: missing): pass\ng.__annotations__").text == "{'a': 'missing'}"


def test_warnings_are_given_once_for_each_cell(run: Interpreter) -> None:
    for number in (1, 2):
        assert run("import warnings; warnings.warn('careful')").stderr.count(f"<cell {number}>:1: UserWarning") == 1
    assert run("x = 1\nx is 1").stderr.count("SyntaxWarning") == 1
    assert run(r"'\d'").stderr.count("Warning") <= 1


def test_old_sources_are_forgotten() -> None:
    kept = repl.Sources()
    for number in range(10):
        kept.keep(f"<cell {number}>", b"#" * 1_000_000)
    kept.keep("<cell 9>", b"again")
    assert list(kept._kept) == [f"<cell {number}>" for number in (6, 7, 8, 9)]
    assert kept._size == 3_000_005
