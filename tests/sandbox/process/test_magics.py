"""Magic commands become Python, line by line; what only looks like one stays as it is."""

from __future__ import annotations

import pytest

from ringfence.sandbox.process.guest.magics import python_of


@pytest.mark.parametrize(
    ("cell", "python"),
    [
        ("%matplotlib inline", "get_ipython().run_line_magic('matplotlib', 'inline')"),
        ("!ls -l", "get_ipython().system('ls -l')"),
        ("x = !ls", "x = get_ipython().getoutput('ls')"),
        ("x = %pwd", "x = get_ipython().run_line_magic('pwd', '')"),
        ("!!ls", "get_ipython().getoutput('ls')"),
        ("x.y?", "get_ipython().help('x.y')"),
        ("?x", "get_ipython().help('x')"),
        ("if x:\n    !ls\n", "if x:\n    get_ipython().system('ls')\n"),
        ("!a \\\n  b\n1 / 0", "get_ipython().system('a   b')\n\n1 / 0"),
        ("!echo it's\nx = 'y'\n!z", "get_ipython().system(\"echo it's\")\nx = 'y'\nget_ipython().system('z')"),
        ("%time await f()", "with get_ipython().timed(): await f()"),
        ("%%bash\necho 1\n", "get_ipython().run_cell_magic('bash', '', 'echo 1\\n')"),
        ("\n%%writefile  a b\nx", "\nget_ipython().run_cell_magic('writefile', 'a b', 'x')"),
        ("%%time\nx = 1\n!ls", "get_ipython().begin_time('')\nx = 1\nget_ipython().system('ls')"),
        ("%%capture out\nprint(1)", "get_ipython().begin_capture('out')\nprint(1)"),
        ("!a\r\n!b", "get_ipython().system('a')\nget_ipython().system('b')"),
    ],
)
def test_a_command_becomes_a_call_in_the_same_line(cell: str, python: str) -> None:
    assert python_of(cell) == python


@pytest.mark.parametrize(
    "around",
    [
        "x = '''\n{}\n'''",
        'x = """a \\""" \n{}\n"""',
        "x = (1\n{}\n)",
        "x = [\n    # (\n{}\n]",
        "x = 5 \\\n{}",
        "# {}",
        "f(a,\n  b='(',\n{})",
    ],
)
@pytest.mark.parametrize("text", ["%time x", "!ls", "  %2"])
def test_what_stands_in_a_string_or_an_expression_is_none(around: str, text: str) -> None:
    cell = around.format(text)
    assert python_of(cell) is None
    assert python_of(f"!ls\n{cell}") == f"get_ipython().system('ls')\n{cell}"


@pytest.mark.parametrize("cell", ["", "x = = 1", "a != b", "a == !b", "x %= 2", "a % b", "%", "%%", "% x", "print(?)"])
def test_other_text_has_none(cell: str) -> None:
    assert python_of(cell) is None
