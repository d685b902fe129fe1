"""What the front asks of a pipeline: all of it and no more, so that whatever stands in for one has all of it, too."""

from __future__ import annotations

from typing import Protocol

from ringfence.core.model import Call, Json, Outcome
from ringfence.core.ports import Channel
from ringfence.governance.rulebook import Rulebook


class CallPipeline(Protocol):
    """The path of a call, as the front knows it."""

    @property
    def rules(self) -> Rulebook:
        """What is in force now."""

    async def handle(self, call: Call, channel: Channel) -> Outcome: ...

    async def withdrawn(self, call: Call) -> None:
        """Record a call that its caller cancelled, or that the stop of the gateway ended, before it was handled."""

    @property
    def redaction_basis(self) -> object:
        """To be compared by identity: it is another object once `listed` redacts by other secrets or patterns."""

    def listed(self, item: Json) -> Json:
        """An entry of a server's list, as a client may see it."""
