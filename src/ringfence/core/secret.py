"""A secret's handle: it can be passed on, named and compared by identity, and never shows its value by accident.

The value is no attribute of the handle, so that whatever prints, formats, copies, dumps or pickles objects has nothing
to print. `reveal` is the one way to it; a test lists the modules that may call it.
"""

from __future__ import annotations

from typing import NoReturn
from weakref import WeakKeyDictionary

from ringfence.core.errors import Unavailable

MIN_CHARACTERS = 12
"""A shorter value cannot be distinguished from ordinary text when it comes back."""
FEW_CHARACTERS = 20
"""A shorter value can be guessed by trying: whether text holds it shows in what is removed. It is warned of."""
MAX_CHARACTERS = 65_536
REPLACEMENT = "[redacted]"
"""Stands where a value was removed."""


class Secret:
    """A value under its name, until it is revoked."""

    __slots__ = ("__weakref__", "_name")

    def __init__(self, name: str, value: str) -> None:
        """Raises ValueError for a value that cannot be kept secret. The text never holds the value."""
        problem = unusable(value)
        if problem is not None:
            raise ValueError(f"secret {name!r} {problem}")
        self._name = name
        _values[self] = value

    @property
    def name(self) -> str:
        return self._name

    def again(self) -> Secret:
        """Another handle of the same value, with a life of its own. Raises Unavailable for a revoked one."""
        return Secret(self._name, reveal(self))

    def revoke(self) -> None:
        """Forget the value: from now on the handle reveals nothing."""
        _values.pop(self, None)

    def __repr__(self) -> str:
        return f"Secret({self._name!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{self!r} stays in this process")


_values: WeakKeyDictionary[Secret, str] = WeakKeyDictionary()


def reveal(secret: Secret) -> str:
    """The value, to be put where it belongs or to be searched for. Raises Unavailable for a revoked handle."""
    try:
        return _values[secret]
    except KeyError:
        raise Unavailable("no_secret", f"secret {secret.name!r} was revoked") from None


def unusable(value: str) -> str | None:
    """Why this value cannot be kept secret, without a word of it."""
    if len(value) < MIN_CHARACTERS:
        return (
            f"has fewer than {MIN_CHARACTERS} characters: it could not be distinguished from ordinary text, nor removed"
            " from it (what is no secret belongs under env:)"
        )
    if len(value) > MAX_CHARACTERS:
        return f"has more than {MAX_CHARACTERS} characters"
    if value.isspace() or "\0" in value:
        return "is blank or holds a NUL"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "is not proper Unicode"
    return None
