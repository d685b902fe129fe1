"""What people do in notebooks, done in a cell: commands, magics, IPython's display; without IPython and with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.process.celling import Interpreter


@pytest.fixture(scope="module")
def run() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────


def test_a_command_writes_where_the_cell_writes(run: Interpreter) -> None:
    outcome = run("print('a')\n!echo b; echo c >&2\nprint('d')")
    assert (outcome.ok, outcome.stdout, outcome.stderr) == (True, "a\nb\nd\n", "c\n")
    assert run("!exit 3").ok
    assert run("_exit_code").text == "3"


def test_its_lines_can_be_had(run: Interpreter) -> None:
    assert run("lines = !printf 'a\\nb\\n'\nlines, lines.n, lines.s").text == "(['a', 'b'], 'a\\nb', 'a b')"


def test_it_has_the_values_of_the_cell(run: Interpreter) -> None:
    run("name, many = 'x y', [1, 2]")
    assert run("!echo {many[1] + 1} $many '$name' $$HOME_ {print $1} ${HOME:+set}").stdout == (
        "3 [1, 2] x y {print } set\n"
    )
    assert run("def inner(word):\n    !echo {word}\ninner('local')").stdout == "local\n"


def test_an_interrupted_command_ends(fresh: Interpreter) -> None:
    outcome = fresh("!echo $$ > pid; echo go; sleep 600", fresh.interrupt_when_it_speaks())
    assert outcome.error.name == "KeyboardInterrupt"
    assert fresh("!kill -0 $(cat pid) 2>/dev/null || echo gone\nimport os; os.remove('pid')").stdout == "gone\n"


def test_a_traceback_names_the_line_of_the_cell_and_nothing_of_ours(run: Interpreter) -> None:
    error = run("!true\nx = 1\n1 / 0").error
    assert "line 3, in <module>\n    1 / 0\n" in error.traceback
    error = run("x = 2\n%nonsense 1").error
    assert error.name == "UsageError" and "%timeit" in error.value
    assert error.traceback.splitlines()[1:3] == [
        f'  File "<cell {run._cells}>", line 2, in <module>',
        "    %nonsense 1",
    ]
    assert "notebook" not in error.traceback
    assert run("!true\ny = = 1").error.name == "SyntaxError"


# ── Magics ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cell",
    [
        "%matplotlib inline\n1",
        "%config InlineBackend.figure_format = 'retina'\n1",
        "%load_ext autoreload\n%autoreload 2\n1",
        "get_ipython().run_line_magic('matplotlib', 'inline')\n1",
        "import IPython\nIPython.get_ipython().run_line_magic('matplotlib', 'inline')\n1",
    ],
)
def test_what_only_a_notebook_needs_does_nothing(run: Interpreter, cell: str) -> None:
    outcome = run(cell)
    assert (outcome.text, outcome.stdout, outcome.stderr) == ("1", "", "")


def test_scripts_of_a_shell(run: Interpreter) -> None:
    assert run("%%bash\nfor n in 1 2; do echo $n; done").stdout == "1\n2\n"
    assert run("%%sh\necho $0").stdout == "sh\n"
    assert run("%%bash\nexit 4").error.name == "CalledProcessError"
    assert "nosuchprogram" in run("%%script nosuchprogram\n1").error.value


def test_time_is_told_and_the_value_is_the_cells(run: Interpreter) -> None:
    outcome = run("%time 6 * 7")
    assert outcome.text == "42" and "CPU times: user" in outcome.stdout and "Wall time: " in outcome.stdout
    assert run("%time timed = 5").ok and run("timed").text == "5"
    outcome = run("%%time\nbegun = 1\nbegun + 1")
    assert outcome.text == "2" and outcome.stdout.count("Wall time") == 1
    assert run("begun").text == "1"
    outcome = run("%%time\n1 / 0")
    assert outcome.error.name == "ZeroDivisionError" and "line 2" in outcome.error.traceback
    assert "Wall time" in outcome.stdout
    assert "Wall time" in run("import asyncio\n%time await asyncio.sleep(0)").stdout
    assert "7 runs, 2 loops each" in run("%timeit -n 2 sum(range(3))").stdout
    assert "1 loop each" in run("%%timeit -n 1 -r 3\nx = 1\nx + 1").stdout


def test_folders_files_and_variables(fresh: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert fresh(f"%cd {tmp_path}").stdout == f"{tmp_path}\n"
    assert fresh("%cd below\n%pwd").text == repr(str(tmp_path / "below"))
    assert fresh("%cd -").stdout == f"{tmp_path}\n"
    assert fresh("%cd nowhere").error.name == "FileNotFoundError"
    assert fresh("%%writefile x.py\nmade = 6\n").stdout == "Writing x.py\n"
    assert fresh("%run x.py\nmade").text == "6"
    assert fresh("%cat x.py\n%ls").stdout == "made = 6\nbelow\nx.py\n"
    assert fresh("%env AN=other\n%env AN").text == "'other'"
    assert fresh("%%capture taken\nprint('kept')\n!echo from a command").stdout == ""
    assert fresh("taken.stdout").text == "'kept\\nfrom a command\\n'"
    assert "made" in fresh("%who").stdout
    assert fresh("len?").stdout.startswith("Signature: len(obj, /)")


def test_what_cannot_be_done_says_what_to_do(run: Interpreter) -> None:
    for cell in ("%pip install requests", "%conda install requests"):
        error = run(cell).error
        assert error.name == "UsageError" and "packages=[" in error.value


def test_definitions_beside_a_command_reach_other_processes(fresh: Interpreter, tmp_path: Path) -> None:
    fresh(f"import os\nos.environ['TMPDIR'] = {str(tmp_path)!r}\n!true\ndef double(x): return 2 * x")
    spawn = "import multiprocessing as m\nwith m.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))"
    assert fresh(spawn).stdout == "[2, 4]\n"


# ── IPython ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "mime", "text"),
    [
        ("HTML('<b>x</b>')", "text/html", "<b>x</b>"),
        ("Markdown('**x**')", "text/markdown", "**x**"),
        ("Latex('$x$')", "text/latex", "$x$"),
        ("Math('x')", "text/latex", "$\\displaystyle x$"),
        ("SVG('<svg/>')", "image/svg+xml", "<svg/>"),
        ("JSON({'a': 1})", "application/json", '{"a": 1}'),
        ("Javascript('1')", "application/javascript", "1"),
        ("Image(b'\\x89PNG')", "image/png", "iVBORw=="),
        ("Image(data=b'\\xff\\xd8')", "image/jpeg", "/9g="),
        ("Image(url='https://a.example/b.png')", "text/html", '<img src="https://a.example/b.png"/>'),
    ],
)
def test_what_is_displayed_has_its_form(run: Interpreter, value: str, mime: str, text: str) -> None:
    (result,) = run(f"from IPython.display import *\nfrom IPython.display import display\ndisplay({value})").results
    assert result.data[mime] == text
    (again,) = run(value).results
    assert again.main and again.data == result.data


def test_a_picture_from_a_file(fresh: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    (result,) = fresh(f"from IPython.display import Image\nImage(filename={str(tmp_path / 'a.png')!r})").results
    assert result.data["image/png"] == "iVBORw=="


def test_display_as_it_is_called_in_notebooks(run: Interpreter) -> None:
    outcome = run(
        "from IPython.display import display, clear_output, HTML, update_display\nimport IPython.core.display\n"
        "handle = display('a', display_id=True)\nhandle.update('b')\nclear_output(wait=True)\n"
        "display(HTML('<p>'), exclude=['text/html'])\ndisplay({'text/plain': 'raw'}, raw=True)\n"
        "from IPython import get_ipython\nget_ipython() is not None"
    )
    assert [result.data["text/plain"] for result in outcome.results] == [
        *("'a'", "'b'", "<IPython.core.display.HTML object>", "raw", "True"),
    ]
    assert "text/html" not in outcome.results[2].data


def test_what_ours_has_not_is_not_there(run: Interpreter) -> None:
    assert run("import IPython.nosuch").error.name == "ModuleNotFoundError"
    assert run("from IPython.display import nosuch").error.name == "ImportError"
    assert run("try:\n    get_ipython\nexcept NameError:\n    print('none')\nimport rich_is_not_here").error


def test_an_ipython_that_is_installed_is_used_and_shows_as_ours(fresh: Interpreter, tmp_path: Path) -> None:
    core = tmp_path / "IPython" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (tmp_path / "IPython" / "__init__.py").write_text("real = True\n")
    (tmp_path / "IPython" / "display.py").write_text("from IPython.core.display_functions import display\n")
    (core / "display_functions.py").write_text("def display(*values):\n    print('nobody sees this')\n")
    fresh(f"import sys\nsys.path.append({str(tmp_path)!r})")
    outcome = fresh("import IPython\nfrom IPython.display import display\ndisplay(5)\nIPython.real")
    assert ([result.data["text/plain"] for result in outcome.results], outcome.stdout) == (["5", "True"], "")
    assert fresh("import IPython.lib").error.name == "ModuleNotFoundError"


def test_modules_of_the_users_own_do_not_get_in_the_way(fresh: Interpreter, tmp_path: Path) -> None:
    for name in ("re", "subprocess", "json", "shlex"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    fresh(f"import os\nos.chdir({str(tmp_path)!r})")
    assert fresh("!echo fine").stdout == "fine\n"
    assert json.loads(fresh("from IPython.display import JSON\nJSON('[1]')").results[0].data["application/json"]) == [1]
