"""The state on disk. All SQL is in here."""

from ringfence.audit.chain import Record
from ringfence.store.reader import Reader
from ringfence.store.recovery import Recovered
from ringfence.store.rows import (
    Answered,
    Approval,
    ApprovalQuestion,
    ApprovalState,
    Conflict,
    Expired,
    KeyRow,
    Payload,
    RowNotFound,
    Unproven,
)
from ringfence.store.sqlite import Store
from ringfence.store.transaction import Transaction

__all__ = [
    "Answered",
    "Approval",
    "ApprovalQuestion",
    "ApprovalState",
    "Conflict",
    "Expired",
    "KeyRow",
    "Payload",
    "Reader",
    "Record",
    "Recovered",
    "RowNotFound",
    "Store",
    "Transaction",
    "Unproven",
]
