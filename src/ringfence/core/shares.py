"""Who gives way where something that several want is used up."""

from __future__ import annotations

from collections import Counter


def over_their_share(asker: str, holders: Counter[str]) -> set[str] | None:
    """Who has more than an even share of what `holders` have, if the asker has less than that; otherwise None."""
    share = holders.total() // len({*holders, asker})
    return {holder for holder, count in holders.items() if count > share} if holders[asker] < share else None
