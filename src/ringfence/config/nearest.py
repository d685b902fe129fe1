"""What somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no known word is near."""
    words = list(known)
    folded = given.casefold().replace("-", "_")
    same = [word for word in words if word.casefold().replace("-", "_") == folded]
    near = same or difflib.get_close_matches(given[:128], words, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
