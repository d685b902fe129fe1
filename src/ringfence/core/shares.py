"""Who gives way where something that several want is used up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def over_their_share(asker: str, holders: Counter[str]) -> set[str] | None:
    """Who has more than an even share of what `holders` have, if the asker has less than that; otherwise None."""
    share = holders.total() // len({*holders, asker})
    return {holder for holder, count in holders.items() if count > share} if holders[asker] < share else None


def level(held: Mapping[str, int], most: int) -> int:
    """How much each holder may keep, so that all together have no more than `most`: who has less keeps all of it, and
    the others as much as one another."""
    left = most
    ordered = sorted(held.values())
    for place, size in enumerate(ordered):
        even = left // (len(ordered) - place)
        if size > even:
            return even
        left -= size
    return max(ordered, default=0)
