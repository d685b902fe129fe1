"""Redaction that follows the secrets as they rotate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringfence.redaction.stream import Stream
from ringfence.redaction.values import Redacted, Values
from ringfence.secret import Secret


class Current:
    """The redactor of one tenant."""

    def __init__(self, known: Callable[[], tuple[Secret, ...]], *, shaped: bool = True) -> None:
        """`known` tells the tenant's secrets, and the very same tuple as long as they are the same."""
        self._known = known
        self._shaped = shaped
        self._secrets: tuple[Secret, ...] | None = None
        self._values: Values | None = None

    @property
    def values(self) -> Values:
        """For what is known now."""
        secrets = self._known()
        if self._values is None or secrets is not self._secrets:
            self._values = Values(secrets, shaped=self._shaped)
            self._secrets = secrets
        return self._values

    @property
    def idle(self) -> bool:
        """Whether there is nothing to search for. Costs nothing: the automaton is made when text comes."""
        return not self._shaped and not self._known()

    def strikes(self, data: bytes) -> bool:
        return self.values.strikes(data)

    def redact(self, text: str) -> tuple[str, Mapping[str, int]]:
        return self.values.redact(text)

    def redacted(self, data: bytes) -> Redacted:
        return self.values.redacted(data)

    def secrets(self, text: str) -> Mapping[str, int]:
        """Which secrets are in a text, by name: for the audit log alone."""
        return self.values.redacted(text.encode("utf-8", "surrogatepass")).secrets

    def stream(self, *, masked: bool = False) -> Stream:
        """For one stream, with what is known at its beginning."""
        return Stream(self.values, masked=masked)
