"""The source of a cell: the expression at its end, whose value is its answer, and its magic commands."""

from __future__ import annotations

from ringfence.sandbox.process.guest import later, mainfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

__builtins__ = mainfile.BUILTINS  # type: ignore[assignment]

_VALUELESS = (b"print(", b"pass", b"import ", b"from ", b"raise", b"assert ", b"del ")


def python_of(source: bytes) -> bytes | None:
    """A cell that is no Python by itself, as Python: its magic commands become calls. None if it has none."""
    if not may_have_magics(source):
        return None
    try:
        text = source.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    python: str | None = later.load("magics").python_of(text)
    return None if python is None else python.encode("utf-8", "surrogatepass")


def may_have_magics(source: bytes) -> bool:
    return any(sign in source for sign in (b"%", b"!", b"?"))


def may_answer(source: bytes) -> bool:
    """Whether the last line may be an expression that has a value; to find out takes longer than most programs run."""
    return not source.rstrip().rpartition(b"\n")[2].startswith(_VALUELESS)


def codes_of(
    tree: Any, name: str, source: bytes, flags: int, *, shown: bool
) -> tuple[CodeType | None, CodeType | None]:
    """The statements, and the last of them by itself if it is an expression whose value is to be shown."""
    last = tree.body[-1] if tree.body else None
    alone = last if shown and type(last).__name__ == "Expr" and not is_silenced(source, last) else None
    if alone is not None:
        tree.body.pop()
    statements = compile(tree, name, "exec", flags, dont_inherit=True) if tree.body else None
    if alone is None:
        return statements, None
    if statements is not None:
        flags |= statements.co_flags & mainfile.FUTURE
    from _ast import Expression  # noqa: PLC0415 - see `mainfile.ONLY_TREE`

    return statements, compile(Expression(alone.value), name, "eval", flags, dont_inherit=True)


def is_silenced(source: bytes, last: Any) -> bool:
    """Whether a `;` follows the last statement, as in notebooks."""
    if b";" not in source or last.end_lineno is None:
        return False
    lines = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    after: bytes = lines[last.end_lineno - 1][last.end_col_offset :]
    return after.lstrip().startswith(b";")
