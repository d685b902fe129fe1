"""JSON as editors write it: with comments and a comma after the last item. Read strictly otherwise.

Comments and such commas become spaces, so that every line and column stays what it was.
"""

from __future__ import annotations

import re
from typing import Any

from ringfence import canonical
from ringfence.errors import Problem

_AT = re.compile(r"line (\d+) column (\d+)")
_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|/\*.*?(?:\*/|\Z)|,', re.DOTALL)
_FILLER = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_DEEPEST = 32


def parse(text: str, file: str) -> tuple[Any, list[Problem]]:
    """One value, or what is wrong with the text: duplicate keys, NaN, lone surrogates and deep nesting are refused."""
    text = text.removeprefix("\ufeff")
    try:
        return canonical.loads(_plain(text), max_depth=_DEEPEST), []
    except canonical.NotCanonical as exc:
        said = str(exc)
        at = _AT.search(said)
        line, column = (int(at[1]), int(at[2])) if at else (1, 1)
        said = _AT.sub("", said).removesuffix(": ").split(":  (char")[0]
        return None, [Problem(file, line, column, said)]


def _plain(text: str) -> str:
    def kept(match: re.Match[str]) -> str:
        piece = match[0]
        if piece.startswith('"'):
            return piece
        if piece == ",":
            after = _FILLER.match(text, match.end())
            assert after is not None  # it may match nothing, and then it is empty
            return " " if text[after.end() : after.end() + 1] in ("}", "]") else ","
        return re.sub(r"[^\n]", " ", piece)

    return _PIECE.sub(kept, text)
