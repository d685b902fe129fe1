"""How a request ends without an answer from outside. None of these leaves this package."""

from __future__ import annotations


class Stopped(Exception):
    """The request goes no further; the client gets the status, the record the rule and the reason."""

    verdict = "denied"

    def __init__(self, status: int, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.status = status
        self.rule = rule
        self.reason = reason
        self.detail = detail


class Denied(Stopped):
    """A rule does not let it through."""

    def __init__(self, rule: str, reason: str, detail: str = "") -> None:
        super().__init__(403, rule, reason, detail)


class Malformed(Stopped):
    """Not the HTTP that we speak: refused whoever it is for."""

    def __init__(self, reason: str, detail: str = "", status: int = 400) -> None:
        super().__init__(status, "protocol", reason, detail)


class Failed(Stopped):
    """It was allowed, and the outside did not answer as it should."""

    verdict = "failed"

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(502, "", reason, detail)
