"""The state on disk. All SQL is in here."""

from ringfence.audit.chain import Record
from ringfence.store.reader import Reader
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
    Payload,
    PinRow,
    RowNotFound,
    Unproven,
)
from ringfence.store.sqlite import Store
from ringfence.store.transaction import Transaction

__all__ = [
    "FIRST_USE",
    "Answered",
    "Approval",
    "ApprovalQuestion",
    "ApprovalState",
    "Conflict",
    "Expired",
    "KeyRow",
    "Payload",
    "PinRow",
    "Reader",
    "Record",
    "Recovered",
    "RowNotFound",
    "Store",
    "Transaction",
    "Unproven",
]
