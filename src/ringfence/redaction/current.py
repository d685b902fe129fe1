"""Redaction that follows the secrets as they rotate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringfence.redaction.stream import Stream
from ringfence.redaction.values import Redacted, Values
from ringfence.secret import Secret


class Current:
    """The redactor of one tenant."""

    def __init__(self, known: Callable[[], tuple[Secret, ...]]) -> None:
        """`known` tells the tenant's secrets, and the very same tuple as long as they are the same."""
        self._known = known
        self._secrets: tuple[Secret, ...] = ()
        self._values = Values()

    @property
    def values(self) -> Values:
        """For what is known now."""
        secrets = self._known()
        if secrets is not self._secrets:
            self._values = Values(secrets)
            self._secrets = secrets
        return self._values

    def redact(self, text: str) -> tuple[str, Mapping[str, int]]:
        return self.values.redact(text)

    def redacted(self, data: bytes) -> Redacted:
        return self.values.redacted(data)

    def stream(self) -> Stream:
        """For one stream, with what is known at its beginning."""
        return Stream(self.values)
