"""Turns a cell with magic commands (`%time`, `!ls`, `%%bash`, `x = !ls`, `name?`) into Python, line by line, so that a
traceback names the same lines as before.

Only a cell that is no Python by itself comes here, and only where a statement could begin: a `%` or `!` in a string, in
an expression over several lines or in a comment is none of them. What a magic command does is in `notebook`.
"""

from __future__ import annotations

from ringfence.sandbox.process.guest import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

SHELL = "get_ipython"
"""The function that a cell calls for its magic commands, as in IPython."""
AROUND = ("time", "capture")
"""Cell magics that run the rest of the cell as it stands."""
_re: Any = display.standard("re")
_COMMAND = _re.compile(r"(\s*)(%(?!%)|!!?|\?\??)(.*)", _re.DOTALL)
_ASSIGNED = _re.compile(r"(\s*)([A-Za-z_][^=!%()#\"']*?)\s*=\s*([%!])(?!=)(.*)", _re.DOTALL)
_HELP = _re.compile(r"(\s*)([A-Za-z_][\w.]*)(\?\??)\s*")
_NAME = _re.compile(r"([A-Za-z_]\w*)(?:\s+(.*)|\s*)", _re.DOTALL)
_AWAITS = _re.compile(r"\bawait\b")


def python_of(text: str) -> str | None:
    """The cell as Python; None if it has no magic command."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith("%%"):
        return _by_line(lines)
    found = _NAME.fullmatch(lines[first][2:])
    if found is None:
        return None
    name, line = found[1], (found[2] or "").strip()
    before = [""] * first
    if name in AROUND:
        rest = lines[first + 1 :]
        return "\n".join([*before, f"{SHELL}().begin_{name}({line!r})", _by_line(rest) or "\n".join(rest)])
    body = "\n".join(lines[first + 1 :])
    return "\n".join([*before, f"{SHELL}().run_cell_magic({name!r}, {line!r}, {body!r})"])


def _by_line(lines: list[str]) -> str | None:
    done: list[str] = []
    found = False
    statement = _Statement()
    while len(done) < len(lines):
        at = len(done)
        if statement.may_begin and (end := _end_of_command(lines, at)):
            words = [line.removesuffix("\\") for line in lines[at : end - 1]]
            made = _python("".join([*words, lines[end - 1]]))
            if made is not None:
                found = True
                done += [made, *[""] * (end - at - 1)]
                continue
        statement.read(lines[at])
        done.append(lines[at])
    return "\n".join(done) if found else None


def _end_of_command(lines: list[str], at: int) -> int:
    """The line after a command that begins here; a line that ends with a backslash goes on."""
    end = at + 1
    while lines[end - 1].endswith("\\") and end < len(lines):
        end += 1
    return end


def _python(line: str) -> str | None:
    if found := _COMMAND.fullmatch(line):
        indent, sign, rest = found.groups()
        call = _call(sign, rest)
        if sign == "%" and call is not None and _NAME.fullmatch(rest)[1] == "time" and _AWAITS.search(rest):
            return f"{indent}with {SHELL}().timed(): {rest.split(None, 1)[1]}"
        return None if call is None else indent + call
    if found := _ASSIGNED.fullmatch(line):
        indent, target, sign, rest = found.groups()
        call = _call(sign * 2 if sign == "!" else sign, rest)
        return None if call is None else f"{indent}{target} = {call}"
    if found := _HELP.fullmatch(line):
        return f"{found[1]}{SHELL}().help({found[2]!r})"
    return None


def _call(sign: str, rest: str) -> str | None:
    if sign == "!":
        return f"{SHELL}().system({rest.strip()!r})"
    if sign == "!!":
        return f"{SHELL}().getoutput({rest.strip()!r})"
    if sign.startswith("?"):
        return f"{SHELL}().help({rest.strip()!r})"
    found = _NAME.fullmatch(rest)
    return None if found is None else f"{SHELL}().run_line_magic({found[1]!r}, {(found[2] or '').strip()!r})"


class _Statement:
    """Whether a line begins a statement, after all lines that were read: no bracket and no string is open."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._goes_on = False

    @property
    def may_begin(self) -> bool:
        return not (self._depth or self._quote or self._goes_on)

    def read(self, line: str) -> None:
        at = 0
        self._goes_on = False
        while at < len(line):
            at += self._in_string(line, at) if self._quote else self._in_code(line, at)
        if len(self._quote) == 1 and not line.endswith("\\"):
            self._quote = ""  # it ends with its line, and is an error

    def _in_string(self, line: str, at: int) -> int:
        if line[at] == "\\":
            return 2
        if line.startswith(self._quote, at):
            size = len(self._quote)
            self._quote = ""
            return size
        return 1

    def _in_code(self, line: str, at: int) -> int:
        sign = line[at]
        if sign == "#":
            return len(line) - at
        if sign in "\"'":
            self._quote = sign * 3 if line.startswith(sign * 3, at) else sign
            return len(self._quote)
        if sign in "([{":
            self._depth += 1
        elif sign in ")]}":
            self._depth = max(0, self._depth - 1)
        elif sign == "\\" and at == len(line) - 1:
            self._goes_on = True
        return 1
