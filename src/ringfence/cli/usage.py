"""How wrong usage is told, and how usage is written: in two lines, with the field's own signs.

Typer writes required arguments in braces with the Python types of their values, and errors in four lines.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import Any

from typer.core import TyperArgument

from ringfence.cli.terminal import painted, safe

_SAID = {
    "Input should be a valid number, unable to parse string as a number": "not a number",
    "Input should be a valid integer, unable to parse string as an integer": "not a whole number",
}

_LONGEST = 64


def install() -> None:
    """Have arguments shown as they are typed."""
    TyperArgument._usage_display_name = _typed  # type: ignore[method-assign,assignment]
    TyperArgument.display_type_rich = _untyped  # type: ignore[method-assign,assignment]


def _typed(argument: TyperArgument) -> str:
    name = argument.display_name_raw
    if not argument.required and not name.startswith(("[", "-")):
        name = f"[{name}]"
    return name if argument.nargs == 1 or "…" in name else f"{name}…"


def _untyped(argument: TyperArgument, *_: Any, **__: Any) -> str:
    return ""


def show(problem: Any, file: object = None) -> None:
    """Print an error of usage on stderr: what is wrong, and how it is right."""
    context = problem.ctx
    command = context.command_path if context is not None else "ringfence"
    print(painted(f"{command}: {safe(_sentence(problem), lines=True)}", "error", sys.stderr), file=sys.stderr)
    if context is not None:
        print(f"{context.get_usage()}   (see: {command} --help)", file=sys.stderr)


def _near(given: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant, if any: by its name, since dashes are alike in all of them."""
    names = {option.lstrip("-"): option for option in known if option.startswith("--")}
    name = given.lstrip("-")[:_LONGEST]
    begun = [option for option in names if len(name) > 1 and option.startswith(name)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name, names, 1, cutoff=0.7)
    return names[near[0]] if near else None


def _sentence(problem: Any) -> str:
    possible = getattr(problem, "possibilities", None)
    option = getattr(problem, "option_name", None)
    if possible and isinstance(option, str):
        near = _near(option, possible)
        return f"No such option: {option}" + (f". Did you mean {near}?" if near is not None else "")
    text = str(problem.format_message())
    for theirs, ours in _SAID.items():
        text = text.replace(theirs, ours)
    return text
