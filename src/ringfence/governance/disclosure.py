"""Every fact: whether a program can have chosen what stands in it, and what of it goes on record.

The guard cleans what others chose before a client gets it, the journal writes what is listed here. So a fact that is
not listed is cleaned like one that a program chose, and does not go on record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import dataclass

_MAX_FILES = 100


class OnRecord(Enum):
    """What of a fact goes on record. Plain digests do not, since they could be tried against guesses."""

    WHOLE = "whole"
    FIGURES = "figures"
    """Without its texts, which are digests."""
    FILES = "files"
    """Of each file its size and a salted digest, not its path."""
    NUMBER = "number"
    """How many there are."""
    PARTS = "parts"
    """Those parts of it that are listed, each as it says."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Both are said of each fact: there is no default."""

    chosen: Callable[[Any], bool]
    """Whether this value holds what a program, or whoever called it, chose."""
    on_record: OnRecord
    parts: Mapping[str, Fact] | None = None


def _ours(_: Any) -> bool:
    return False


_theirs = bool


def _theirs_beside(*ours: str) -> Callable[[Any], bool]:
    """Only these parts of it are ours."""
    return lambda value: any(part and name not in ours for name, part in (value or {}).items())


def _names_context(session: Json | None) -> bool:
    """Every session has a context of the name `default`."""
    rest = {name: part for name, part in (session or {}).items() if part != "default" or name != "context"}
    return _theirs_beside("id", "step", "state")(rest)


_WHOLE = OnRecord.WHOLE
_OF_OUTPUT = ("stdout_bytes", "stderr_bytes", "sha256", "stdout_sha256", "stderr_sha256")
_OURS = Fact(_ours, _WHOLE)
_FILES = Fact(_theirs, OnRecord.FILES)
_NETWORK = Fact(_theirs_beside("bytes_in", "bytes_out"), _WHOLE)
"""The hosts that it asked for."""
_LATE: Mapping[str, Fact] = {
    **dict.fromkeys(("cpu_ms", "tasks", "limit", "denials", "refused_connections"), _OURS),
    **dict.fromkeys(("stdout_bytes", "stderr_bytes"), _OURS),
    "files": _FILES,
    "files_left_out": _OURS,
    "network": _NETWORK,
}
FACTS: Mapping[str, Fact] = {
    **dict.fromkeys(("call_id", "decision_id", "rules", "shadow", "contract_digest", "started_at", "wall_ms"), _OURS),
    **dict.fromkeys(("ended", "exit_status", "signal", "timed_out", "limit", "effect"), _OURS),
    "usage": Fact(_theirs_beside("cpu_ms", "peak_memory_bytes", "io_bytes", "processes"), _WHOLE),
    "isolation": _OURS,
    "network": _NETWORK,
    "inputs": _FILES,
    "files": _FILES,
    "files_left_out": _OURS,
    "output": Fact(_theirs_beside("truncated", *_OF_OUTPUT), OnRecord.FIGURES),
    "redactions": _OURS,
    "denials": _OURS,
    "explanation": _OURS,  # hosts that are named in it are in `network` too
    "session": Fact(_names_context, _WHOLE),
    "effect_basis": _OURS,
    "lasts": _OURS,
    "labels": _OURS,
    "late": Fact(_theirs, OnRecord.PARTS, _LATE),
    "left": _OURS,
    "claimed": _OURS,
    "packages": Fact(_theirs, _WHOLE),
    "not_kept": Fact(_theirs, _WHOLE),
    "planted": Fact(_theirs, _WHOLE),  # whoever reads the record must find these files
    "commands": _OURS,
    "forged": _OURS,
    "skipped": Fact(_theirs, OnRecord.NUMBER),
    "trouble": Fact(_theirs, _WHOLE),
}


def chosen_by_others(name: str, value: Any) -> bool:
    """Whether a fact holds what a program, or whoever called it, chose. Of one that is not listed nobody knows."""
    fact = FACTS.get(name)
    return bool(value) if fact is None else fact.chosen(value)


def for_record(facts: Json, salt: bytes, known: Mapping[str, Fact] = FACTS) -> Json:
    """Facts as they go on record."""
    out: Json = {}
    left_out: Json = {}
    for name, value in facts.items():
        fact = known.get(name)
        if fact is None:
            continue
        if fact.on_record is _WHOLE or not value:
            out[name] = value
        elif fact.on_record is OnRecord.FIGURES:
            out[name] = {part: None if isinstance(figure, str) else figure for part, figure in value.items()}
        elif fact.on_record is OnRecord.FILES:
            out[name] = [_file(entry, salt) for entry in value[:_MAX_FILES]]
            if more := len(value) - len(out[name]):
                left_out[f"{name}_left_out"] = more + facts.get(f"{name}_left_out", 0)
        elif fact.on_record is OnRecord.NUMBER:
            out[name] = len(value)
        elif fact.parts is not None:
            out[name] = for_record(value, salt, fact.parts)
    return out | left_out


def _file(entry: Json, salt: bytes) -> Json:
    return {"bytes": entry["bytes"], "digest": canonical.salted_bytes(entry["sha256"].encode(), salt)}
