"""Labels: words for data that calls read and for where calls send it.

Three words mean something to us; all others are the operator's. What a call is labelled itself is its *own*; what it
and those before it read is *in force* when it is decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringfence.core.model import Call, Contract, Flow, Transport

PRIVATE = "private"
"""What must not get out."""
UNTRUSTED = "untrusted"
"""What anyone may have written, and so may hold orders."""
SINK = "external_sink"
"""What is sent there is out of our hands. It says where a call sends, so nothing that was read has it."""

WINDOW_SECONDS = 86_400.0
"""How long what an agent read counts, where nothing else is configured."""


def of_content(own: Iterable[str]) -> tuple[str, ...]:
    """The labels that the result of a call has by those of the call."""
    return tuple(sorted({label for label in own if label != SINK}))


def in_force(own: Iterable[str], held: Iterable[str]) -> tuple[str, ...]:
    """The labels that a call is decided by: what was read before, and what it touches itself. That its result is going
    to be untrusted says nothing of what it sends."""
    return tuple(sorted({*held, *(label for label in own if label not in (SINK, UNTRUSTED))} - {SINK}))


def flow_of(call: Call, contract: Contract) -> Flow:
    """The labels of a call; where nobody keeps account of them, those of its contract alone."""
    if call.flow is not None:
        return call.flow
    return Flow(contract.labels, in_force(contract.labels, ()))


def labelled(contract: Contract) -> bool:
    """Whether any call under this contract can have a label."""
    return bool(contract.labels or contract.labels_when or contract.result.trust == "untrusted")


def may_send(contract: Contract) -> bool:
    """Whether a call under this contract can send something out of our hands."""
    named = SINK in contract.labels or any(each.label == SINK for each in contract.labels_when)
    return named or contract.transport is Transport.SANDBOXED_EXEC
