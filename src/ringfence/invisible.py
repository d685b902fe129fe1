"""Characters that nobody sees, and text as a reader takes it.

The list is Unicode's Default_Ignorable_Code_Point, reserved places included: what a display leaves out by default.
"""

from __future__ import annotations

import re
import unicodedata

IGNORABLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""As the inside of a character class."""

_IGNORABLE = re.compile(f"[{IGNORABLE}]+")
_ELLIPSIS = "\u2026"


def without_ignorable(text: str) -> str:
    """The text without characters that a display leaves out."""
    return text if text.isascii() else _IGNORABLE.sub("", text)


def folded(text: str) -> str:
    """The text in Unicode's form NFKC, without ignorable characters: what looks alike is alike.

    An ellipsis stays one character: as three dots, every shortened sentence would look like a path that climbs.
    """
    if text.isascii():
        return text
    parts = [unicodedata.normalize("NFKC", part) for part in without_ignorable(text).split(_ELLIPSIS)]
    return without_ignorable(_ELLIPSIS.join(parts))  # the form of a filler is another filler
