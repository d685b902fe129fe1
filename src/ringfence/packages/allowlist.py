"""Which packages may be installed: the operator's entries, each a pattern of names, a version, hashes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

_ENTRY = re.compile(r"([A-Za-z0-9*?\[\]!._-]+)(?:===?([A-Za-z0-9.+!_-]+))?((?: --hash=sha256:[0-9a-f]{64})*)", re.ASCII)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", re.ASCII)


def normalized(name: str) -> str:
    """The normalized name of a package. Raises ValueError if it is malformed."""
    if not _NAME.fullmatch(name):
        raise ValueError("that is not the name of a package")
    return _normalize(name)


def _normalize(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


@dataclass(frozen=True, slots=True)
class AllowedPackage:
    """One entry."""

    pattern: str
    version: str | None
    hashes: frozenset[str]

    @classmethod
    def of(cls, text: str) -> AllowedPackage:
        """Raises ValueError."""
        match = _ENTRY.fullmatch(text)
        if match is None or (match[3] and not match[2]):
            raise ValueError(
                f"{quoted(text)} is not a name or pattern of packages, with or without ==version and hashes"
            )
        return cls(_normalize(match[1]), match[2], frozenset(_HASH.findall(match[3])))

    def covers(self, name: str, version: str | None, hashes: frozenset[str]) -> bool:
        """Whether the entry allows this package; an entry without version or hashes allows any."""
        if not fnmatchcase(name, self.pattern) or self.version not in (None, version):
            return False
        return not self.hashes or (bool(hashes) and hashes <= self.hashes)

    def says(self, required: str) -> bool:
        """Whether the entry is as specific as required: `any`, `pinned` or `hashed`."""
        return required == "any" or (self.version is not None and (required == "pinned" or bool(self.hashes)))


class Allowlist:
    """All entries that are as specific as required."""

    def __init__(self, texts: Iterable[str], required: str = "any") -> None:
        """Raises ValueError."""
        self._entries = tuple(entry for entry in map(AllowedPackage.of, texts) if entry.says(required))

    def name(self, name: str) -> bool:
        """Whether an entry allows any version of this name."""
        return any(fnmatchcase(name, entry.pattern) for entry in self._entries)

    def cover(self, name: str, version: str | None, hashes: frozenset[str] = frozenset()) -> bool:
        return any(entry.covers(name, version, hashes) for entry in self._entries)

    def let(self, requirement: str) -> bool:
        """Whether everything that a requirement of pip can resolve to is allowed."""
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?:===?([A-Za-z0-9.+!_-]+)(?= |$))?", requirement)
        if match is None or not _NAME.fullmatch(match[1]):
            return False
        return self.cover(_normalize(match[1]), match[2], frozenset(_HASH.findall(requirement)))
