"""What a 2026-07-28 client holds of a call that waits for it: sealed with our key, for one caller and one request.

To the client it is a random text. Nothing in it can be read or changed, and it opens for the same principal, method,
tool and arguments alone. Of a question to the client's own person it says which approval that is, so that the answer
counts also where the gateway was started anew meanwhile.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from ringfence.core import canonical
from ringfence.core.record import dataclass
from ringfence.store.sealing import Sealing

_PREFIX = "rfs_"
_PART = "request_state"


@dataclass(frozen=True, slots=True)
class RequestState:
    """What is in one."""

    handle: str
    """Of the call that waits in this process, or waited in another."""
    until: float
    """By the time of day."""
    approval: str | None = None
    """The question that its person was asked; None: a server asks."""


class RequestStates:
    """Makes and reads them."""

    def __init__(self, sealing: Callable[[], Sealing] | None = None) -> None:
        """`sealing` may make its key, on disk. Without one, what is made is good in this process alone."""
        self._sealing = sealing or _once(Sealing.for_now)

    def made(self, bound: str, state: RequestState) -> str:
        """Raises StoreError."""
        body = canonical.dumps({"handle": state.handle, "until": state.until, "approval": state.approval})
        return _PREFIX + base64.urlsafe_b64encode(self._sealing().seal(bound, _PART, body)).decode().rstrip("=")

    def read(self, bound: str, text: str) -> RequestState | None:
        """None for what we did not make for this caller and this request. Raises StoreError."""
        try:
            encoded = text.removeprefix(_PREFIX)
            sealed = base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        body = self._sealing().open(bound, _PART, sealed) if text.startswith(_PREFIX) else None
        return None if body is None else RequestState(**canonical.loads(body))


def _once(make: Callable[[], Sealing]) -> Callable[[], Sealing]:
    made = make()
    return lambda: made
