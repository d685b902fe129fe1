"""What a box may do to the terminal of the person in its shell: show, colour, move the cursor. Nothing that lasts.

Strings for the terminal itself are removed: they set its title and clipboard, and have it answer with what they set,
which would be typed into whatever reads the terminal next.
"""

from __future__ import annotations

import codecs
from typing import Literal

AFTERWARDS = "\x1b[0m\x1b[?25h\x1b[?1l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b>"
"""Colours, cursor, keys, mouse and pasting as they were."""

_STRINGS = frozenset("]PX^_")
"""After ESC they begin a string, which BEL or ESC \\ ends."""
_ENDS = frozenset("\x18\x1a")
"""Give up whatever has begun."""
_ESC, _BEL, _DEL = "\x1b", "\x07", "\x7f"
_State = Literal["text", "escape", "string", "string escape"]


class Screen:
    """Takes what the box writes, in any pieces; gives what the terminal may get."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._state: _State = "text"

    def shown(self, data: bytes) -> bytes:
        # Controls of eight bits mean the same as two characters, so there are none.
        text = (character for character in self._decoder.decode(data) if not "\x80" <= character <= "\x9f")
        return "".join(map(self._take, text)).encode("utf-8", "replace")

    def _take(self, character: str) -> str:
        """What goes on: an ESC only together with what follows it, so that nothing can be put between them."""
        if self._state == "text":
            self._state = "escape" if character == _ESC else "text"
            return "" if character == _ESC else character
        if self._state == "string" or character == _ESC:
            inside = self._state.startswith("string")
            if character == _ESC:
                self._state = "string escape" if inside else "escape"
            elif character == _BEL or character in _ENDS:
                self._state = "text"
            return ""
        if self._state == "string escape" and character == "\\":
            self._state = "text"
            return ""
        return self._escaped(character)

    def _escaped(self, character: str) -> str:
        if character in _STRINGS:
            self._state = "string"
            return ""
        if character == _DEL or (character < " " and character not in _ENDS):
            return character  # terminals obey it at once, and are still after the ESC
        self._state = "text"
        return character if character in _ENDS else _ESC + character
