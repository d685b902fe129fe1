"""Tells where a known value may have begun that the end of the data cuts short.

The first few parts of a form are enough to wait for the rest. Searching backwards from the end for every beginning of
every form would take an automaton that is too large; so the last bytes are searched forwards, in three steps.
"""

from __future__ import annotations

from ringfence.redaction.forms import Form
from ringfence.redaction.grammar import compiled, union


class Heads:
    """The beginnings of all forms of all values."""

    def __init__(self, forms: list[Form], texts: set[str]) -> None:
        heads = [form.head for form in forms]
        self.alike = any(text != other and text.startswith(other) for text in texts for other in texts)
        """Whether a whole value may still be the beginning of another."""
        self._farthest = max(form.longest for form in forms)
        self._nearest = max(head.longest for head in heads)
        self._whole = union({head.whole: None for head in heads})
        self._begun = union({head.begun: None for head in heads})
        self._pair = union({form.parts[0].whole + form.parts[1].begun: None for form in forms})
        firsts = {form.parts[0].begun: None for form in forms}
        self._first = compiled(f"(?:{'|'.join(firsts)})\\z")

    def unfinished(self, data: bytes, most: int, settled: set[int]) -> int:
        """The first place where a value may have begun, or the end. At a settled place one is whole already."""
        end = len(data)
        head = self._whole.search(data, max(0, end - min(self._farthest, most)))
        while head is not None and head.start() in settled:
            head = self._whole.search(data, head.start() + 1)
        place: int = end if head is None else head.start()
        near = max(0, end - min(self._nearest, most))
        first = self._first.search(data, near)
        place = place if first is None else min(place, first.start())
        pair = self._pair.search(data, near)
        while pair is not None and pair.start() < place:
            if self._begun.fullmatch(data[pair.start() :]):
                return int(pair.start())
            pair = self._pair.search(data, pair.start() + 1)
        return place
