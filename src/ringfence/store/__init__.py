"""The state on disk. All SQL is in here."""

from typing import TYPE_CHECKING

from ringfence.audit.chain import Record
from ringfence.store.labels import Held, Scopes
from ringfence.store.recovery import Recovered
from ringfence.store.rows import (
    FIRST_USE,
    Answered,
    Approval,
    ApprovalQuestion,
    ApprovalState,
    Conflict,
    Expired,
    KeyRow,
    Offer,
    Outline,
    Payload,
    PinRow,
    RowNotFound,
    SentBefore,
    StandingApproval,
    Unproven,
)
from ringfence.store.sqlite import Store
from ringfence.store.transaction import Transaction

if TYPE_CHECKING:
    from ringfence.store.reader import Reader

__all__ = [
    "FIRST_USE",
    "Answered",
    "Approval",
    "ApprovalQuestion",
    "ApprovalState",
    "Conflict",
    "Expired",
    "Held",
    "KeyRow",
    "Offer",
    "Outline",
    "Payload",
    "PinRow",
    "Reader",
    "Record",
    "Recovered",
    "RowNotFound",
    "Scopes",
    "SentBefore",
    "StandingApproval",
    "Store",
    "Transaction",
    "Unproven",
]


if not TYPE_CHECKING:  # a run that asks nobody writes its records, and reads none

    def __getattr__(name: str) -> type:
        if name != "Reader":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ringfence.store.reader import Reader  # noqa: PLC0415 - see above

        return Reader
