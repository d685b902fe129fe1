"""How a call made from a shell tells its caller what goes on, and how it ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from ringfence.cli.terminal import safe
from ringfence.model import Json, Status

EXIT = {
    Status.SUCCESS: 0,
    Status.FAILED: 1,
    Status.VALIDATION_FAILURE: 2,
    Status.TIMEOUT: 124,
    Status.UNAVAILABLE: 125,
    Status.UNKNOWN: 125,
    Status.DENIED: 126,
    Status.APPROVAL_REQUIRED: 126,
    Status.KILLED: 137,
}
_WAITING = re.compile(r"waiting for a person to answer (apr_[0-9a-f]+)")


class Told:
    """The channel of a caller at a terminal: it is told things and cannot be asked any."""

    def __init__(self, where: str) -> None:
        self.capabilities: Json = {}
        self._where = where
        self._seen: set[str] = set()

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        return {}

    async def notify(self, method: str, params: Json) -> None:
        if method == "notifications/progress":
            self.progress(params)

    def progress(self, params: Json) -> None:
        message = str(params.get("message") or "")
        waiting = _WAITING.fullmatch(message)
        if waiting is None:
            total = f"/{params['total']}" if params.get("total") is not None else ""
            say(f"progress {params.get('progress')}{total} {message}".rstrip())
        elif waiting[1] not in self._seen:
            self._seen.add(waiting[1])
            say(f"waiting for a person; in another terminal: ringfence approvals approve {waiting[1]}{self._where}")


def say(text: str) -> None:
    print(safe(text), file=sys.stderr, flush=True)
