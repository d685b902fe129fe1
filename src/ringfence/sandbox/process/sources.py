"""The source of a session's cells: how it becomes code, and how tracebacks quote it."""

from __future__ import annotations

import _ast

from ringfence.sandbox.process import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

_MOST = 4 * 1024 * 1024
"""Bytes that are kept to be quoted; the oldest cells are forgotten first."""
_FUTURE = 0x1FE0000
"""The flags of code that `from __future__ import` sets: they hold for later cells, too."""


class Sources:
    """Of all cells of an interpreter."""

    def __init__(self) -> None:
        self._flags = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._kept: dict[str, bytes] = {}
        self._size = 0
        self._linecache: Any = None
        """Once it is loaded; for most sessions it never is."""

    def compile(self, name: str, source: bytes, *, shown: bool) -> list[CodeType]:
        """The statements; the last of them by itself if it is an expression whose value is to be shown."""
        try:
            tree = compile(source, name, "exec", self._flags | _ast.PyCF_ONLY_AST, dont_inherit=True)
        except SyntaxError as exc:
            _hint(exc)
            raise
        codes: list[CodeType] = []
        last = tree.body[-1] if tree.body else None
        alone = last if shown and isinstance(last, _ast.Expr) and not is_silenced(source, last) else None
        if alone is not None:
            tree.body.pop()
        if tree.body:
            codes.append(compile(tree, name, "exec", self._flags, dont_inherit=True))
            self._flags |= codes[0].co_flags & _FUTURE
        if alone is not None:
            codes.append(compile(_ast.Expression(alone.value), name, "eval", self._flags, dont_inherit=True))
        return codes

    def keep(self, name: str, source: bytes) -> None:
        """So that it can be quoted."""
        self._size += len(source) - len(self._kept.pop(name, b""))
        self._kept[name] = source
        self._put(name, source)
        while self._size > _MOST and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            self._size -= len(self._kept.pop(oldest))
            self._put(oldest, b"")

    def quote(self, linecache: Any) -> None:
        """From now on somebody may ask for lines."""
        self._linecache = linecache
        for name, source in self._kept.items():
            self._put(name, source)

    def _put(self, name: str, source: bytes) -> None:
        if self._linecache is None:
            return
        text = source.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        try:
            self._linecache.cache[name] = (len(source), None, [f"{line}\n" for line in text.split("\n")], name)
        except Exception:  # whatever a cell has made of it
            self._linecache = None


def is_silenced(source: bytes, last: _ast.stmt) -> bool:
    """Whether a `;` follows the last statement, as in notebooks."""
    if b";" not in source or last.end_lineno is None:
        return False
    lines = source.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return lines[last.end_lineno - 1][last.end_col_offset :].lstrip().startswith(b";")


def _hint(exc: SyntaxError) -> None:
    if exc.text and exc.text.lstrip().startswith(("%", "!")):
        exc.msg += " (there are no magic commands here; `commands.run` runs a shell command)"
