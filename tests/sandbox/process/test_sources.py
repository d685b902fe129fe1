"""The source of cells: errors in it, how tracebacks quote it, what holds for later cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.process import sources
from tests.sandbox.process.celling import Interpreter


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Interpreter]:
    with Interpreter(tmp_path) as interpreter:
        yield interpreter


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


@pytest.mark.parametrize("magic", ["%matplotlib inline", "!ls", "x = 1\n%time x", "%%bash\nls", "  !pip install x"])
def test_a_magic_command_is_an_error_with_a_hint(run: Interpreter, magic: str) -> None:
    error = run(magic).error
    assert error.name in ("SyntaxError", "IndentationError")
    if not magic.startswith(" "):
        assert "no magic commands" in error.value and "commands.run" in error.traceback


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
    kept = sources.Sources()
    for number in range(10):
        kept.keep(f"<cell {number}>", b"#" * 1_000_000)
    kept.keep("<cell 9>", b"again")
    assert list(kept._kept) == [f"<cell {number}>" for number in (6, 7, 8, 9)]
    assert kept._size == 3_000_005
