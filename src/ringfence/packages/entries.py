"""Which packages may be had: entries of the operator's, each a pattern of names, a version, hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

_ENTRY = re.compile(r"([A-Za-z0-9*?\[\]!._-]+)(?:===?([A-Za-z0-9.+!_-]+))?((?: --hash=sha256:[0-9a-f]{64})*)", re.ASCII)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)


def normal(name: str) -> str:
    """The one spelling of a package's name. Raises ValueError for what is none."""
    if not _NAME.fullmatch(name):
        raise ValueError("that is not the name of a package")
    return _spelled(name)


def _spelled(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


@dataclass(frozen=True, slots=True)
class Entry:
    pattern: str
    version: str | None
    hashes: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Entry:
        """Raises ValueError."""
        match = _ENTRY.fullmatch(text)
        if match is None or (match[3] and not match[2]):
            raise ValueError(
                f"{text[:80]!r} is not a name or pattern of packages, with or without ==version and hashes"
            )
        return cls(_spelled(match[1]), match[2], frozenset(_HASH.findall(match[3])))

    def covers(self, name: str, version: str | None, hashes: frozenset[str]) -> bool:
        """Whether this is one of them; what the entry leaves open, anything is."""
        if not fnmatchcase(name, self.pattern) or self.version not in (None, version):
            return False
        return not self.hashes or (bool(hashes) and hashes <= self.hashes)

    def says(self, required: str) -> bool:
        """Whether it says as much as is asked for: `any`, `pinned` or `hashed`."""
        return required == "any" or (self.version is not None and (required == "pinned" or bool(self.hashes)))


class Entries:
    """What may be had, of all entries those that say as much as is required."""

    def __init__(self, texts: Iterable[str], required: str = "any") -> None:
        """Raises ValueError."""
        self._entries = tuple(entry for entry in map(Entry.of, texts) if entry.says(required))

    def name(self, name: str) -> bool:
        """Whether any is of this name."""
        return any(fnmatchcase(name, entry.pattern) for entry in self._entries)

    def cover(self, name: str, version: str | None, hashes: frozenset[str] = frozenset()) -> bool:
        return any(entry.covers(name, version, hashes) for entry in self._entries)

    def let(self, requirement: str) -> bool:
        """Whether a requirement, as pip names it, can come to nothing else."""
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:===?([A-Za-z0-9.+!_-]+)(?= |$))?", requirement)
        if match is None or not _NAME.fullmatch(match[1]):
            return False
        return self.cover(_spelled(match[1]), match[2], frozenset(_HASH.findall(requirement)))
