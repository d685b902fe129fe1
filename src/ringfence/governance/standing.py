"""Approvals that stand: a person who was asked about one call approves, beforehand, others like it.

Alike is what has everything that an answer is bound to (agent, tool and its definition, contract, policy, server, who
may answer), and the same arguments, but for those that the person leaves open. Each use answers one question, for one
call, exactly as the person would have; so all that holds for answers holds for these.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import re2

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.store import Approval, Conflict, Offer

ANY = "any"
_options = re2.Options()
_options.log_errors = False


@dataclass(frozen=True, slots=True)
class Wish:
    """How far a person wants their answer to stand."""

    times: int
    seconds: float
    any: tuple[str, ...] = ()
    """Arguments that may have any value."""
    like: Mapping[str, str] | None = None
    """Arguments that may be any text which a pattern matches whole."""


def shape_of(arguments: Json, digest: str) -> Json:
    """Exactly these arguments. Of their values there are salted digests only."""
    salt = os.urandom(16)
    return {
        "digest": digest,
        "salt": salt.hex(),
        "arguments": {name: {"same": _digest(value, salt)} for name, value in arguments.items()},
    }


def covers(shape: Json, arguments: Json) -> bool:
    """Whether these arguments are of that shape: no more and no fewer, each as it says. What cannot be read says no."""
    fields = shape.get("arguments")
    if not isinstance(fields, dict) or fields.keys() != arguments.keys():
        return False
    try:
        salt = bytes.fromhex(str(shape.get("salt")))
        return all(_fits(fields[name], value, salt) for name, value in arguments.items())
    except (ValueError, TypeError, RecursionError, re2.error):
        return False


def _fits(field: Any, value: Any, salt: bytes) -> bool:
    if field == ANY:
        return True
    if not isinstance(field, dict) or len(field) != 1:
        return False
    if "like" in field:
        return isinstance(value, str) and re2.compile(field["like"], _options).fullmatch(value) is not None
    return field.get("same") == _digest(value, salt)


def _digest(value: Any, salt: bytes) -> str:
    return canonical.salted_bytes(canonical.dumps(value), salt)


def offered(approval: Approval, wish: Wish) -> Offer:
    """What a person approves beforehand by this wish. Raises Conflict, which says why they cannot."""
    limits = approval.terms.get("standing")
    shape = approval.shape
    if not isinstance(limits, dict) or shape is None:
        text = "its approval rule has no `standing`" if not isinstance(limits, dict) else "what it is about changes"
        raise Conflict(f"no answer to {approval.id} can stand for other calls: {text}")
    if not 1 <= wish.times <= limits["times"] or not 0 < wish.seconds <= limits["seconds"]:
        text = f"{limits['times']} times within {limits['seconds']:g} s at most"
        raise Conflict(f"an answer to {approval.id} may stand for calls like it {text}")
    fields = dict(shape["arguments"])
    like = dict(wish.like or {})
    for name in (*wish.any, *like):
        if name not in fields:
            raise Conflict(f"the call has no argument {name!r}; it has: {', '.join(fields) or 'none'}")
    fields.update(dict.fromkeys(wish.any, ANY))
    for name, pattern in like.items():
        try:
            re2.compile(pattern, _options)
        except re2.error:
            raise Conflict(f"the pattern of {name!r} is not one that RE2 reads: {pattern}") from None
        fields[name] = {"like": pattern}
    shown = approval.summary.get("arguments")
    kept = {name: value for name, value in shown.items() if isinstance(fields.get(name), dict)} if shown else {}
    return Offer({**shape, "arguments": fields, "shown": kept}, wish.times, time.time() + wish.seconds)


def words(shape: Json, value: Any) -> Iterator[tuple[str, str]]:
    """Each argument, and what it may be; `value` is how one is written."""
    shown = shape.get("shown")
    shown = shown if isinstance(shown, dict) else {}
    fields = shape.get("arguments")
    for name, field in sorted(fields.items()) if isinstance(fields, dict) else ():
        if field == ANY:
            yield name, "ANY VALUE"
        elif "like" in field:
            yield name, f"any text that this matches whole: {field['like']}"
        else:
            yield name, f"always {value(shown[name]) if name in shown else 'as in that call'}"
