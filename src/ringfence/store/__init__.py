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
    NotFound,
    Payload,
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
    "NotFound",
    "Payload",
    "Reader",
    "Record",
    "Recovered",
    "Store",
    "Transaction",
    "Unproven",
]
