"""What the definitions of session tools are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringfence.model import Json, Mode, NetworkSpec


@dataclass(frozen=True, slots=True)
class Lives:
    """How long sessions live where nobody says more, and at most."""

    lifetime_seconds: float = 3600.0
    most_lifetime_seconds: float = 86_400.0
    idle_seconds: float = 300.0
    most_idle_seconds: float = 86_400.0
    retain_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Ready:
    """What boxes of a capability have."""

    packages: tuple[str, ...] = ()
    network: NetworkSpec | None = None
    installable: tuple[str, ...] = ()
    """Patterns of what may be installed besides."""
    inside: bool = False
    """By programs in them, too."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool of sessions."""

    title: str
    mode: Mode
    text: str
    takes: Json
    needs: tuple[str, ...] = ()
    gives: Json = field(default_factory=dict)
    """Properties of its structured content; they are always there unless `maybe` names them."""
    maybe: tuple[str, ...] = ()
    wide: Json = field(default_factory=dict)
    """What a caller in this process may say besides."""
    one_of: tuple[str, ...] = ()
    """Of these arguments exactly one."""
    only_wide: bool = False
    """For callers in this process alone."""
    destructive: bool = False
    if_declared: bool = False
    """Offered to an agent only where a contract is for it; to callers in this process always."""


# ── Arguments ─────────────────────────────────────────────────────────────────────────────────────

TEXT: Json = {"type": "string"}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
NUMBER: Json = {"type": "integer"}
COUNT: Json = {"type": "integer", "minimum": 0}
FLAG: Json = {"type": "boolean"}
MAYBE: Json = {"type": ["string", "null"]}
DIGEST: Json = {
    "type": "object",
    "properties": {"name": TEXT, "bytes": COUNT, "sha256": TEXT},
    "required": ["bytes", "sha256"],
}
MOUNTS: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"host": TEXT, "at": TEXT, "mode": {"enum": ["ro", "rw"]}, "unsafe": TEXT},
        "required": ["host", "at"],
        "additionalProperties": False,
    },
}
PACKAGES: Json = {
    "type": "array",
    "items": {"type": "string", "maxLength": 500},
    "maxItems": 100,
    "description": "Python packages to install for it, as pip names them: name, or name==version.",
}
LISTEN: Json = {
    "anyOf": [
        {"enum": ["denied", "allowed"]},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 65_535}},
    ]
}
"""Whether its programs may wait for connections; ports by name: those that its owner can be shown."""
ALLOW_PACKAGES: Json = {**PACKAGES, "description": "What its programs may install by themselves: names or patterns."}
NETWORK: Json = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
"""A name under `networks:`, or places as HOST[:PORT]."""
SESSION: Json = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "description": "The session, as open_session named it.",
}
CONTEXT: Json = {
    "type": "string",
    "minLength": 1,
    "maxLength": 100,
    "description": "One of several interpreters in the session, by a name of yours; each has variables of its own.",
}
PATH: Json = {"type": "string", "minLength": 1, "description": "Beneath /workspace: absolute, or relative to it."}
PROCESS: Json = {"type": "integer", "minimum": 1, "description": "The number that run_shell gave."}

ONE: Json = {"session": SESSION}

# ── Results ───────────────────────────────────────────────────────────────────────────────────────

FACTS: Json = {"type": "object", "description": "What the supervisor of the box saw."}
FILE: Json = {"path": TEXT, "bytes": COUNT, "sha256": TEXT}
FILES: Json = {"type": "array", "items": {"type": "object", "properties": FILE, "required": list(FILE)}}
INFO: Json = {
    "session": TEXT,
    "state": {"enum": ["starting", "running", "paused", "stopped"]},
    "template": TEXT,
    "created_at": TEXT,
    "expires_at": {**MAYBE, "description": "When it is closed; for one that is paused, unless it is resumed before."},
    "ended_at": MAYBE,
    "why": {**MAYBE, "description": "Why it was stopped."},
    "step": {"type": "integer", "description": "How many steps were begun in it."},
    "contexts": {"type": "array", "items": TEXT},
    "metadata": TEXTS,
    "snapshot": MAYBE,
    "memory_bytes": {"type": ["integer", "null"]},
    "limits": {"type": "object"},
    "network": {"type": "array", "items": TEXT, "description": "Whom its box may reach."},
}
INFOS: Json = {"type": "array", "items": {"type": "object", "properties": INFO, "required": list(INFO)}}
RUNNING: Json = {
    "session": TEXT,
    "process": NUMBER,
    "argv": {"type": "array", "items": TEXT},
    "started_at": TEXT,
    "running": FLAG,
    "exit_code": {"type": ["integer", "null"]},
    "ended": {**MAYBE, "description": "How it ended; null while it runs."},
    "signal": {"type": ["integer", "null"]},
}
_CLAIMED: Json = {
    "type": "object",
    "description": "What the program in the box said of itself. It is not trusted.",
    "properties": {
        "results": {
            "type": "array",
            "description": "Values that were shown: MIME type to text. Images stand in the content alone.",
            "items": {"type": "object", "properties": {"data": TEXTS, "main": FLAG}, "required": ["data", "main"]},
        },
        "error": {"type": ["object", "null"], "description": "name, value and traceback."},
    },
    "required": ["results", "error"],
}
STEP: Json = {
    "session": TEXT,
    "step": {"type": "integer", "description": "Which step of its session it was."},
    "state": TEXT,
    "context": MAYBE,
    "interpreter_alive": {**FLAG, "description": "false: its variables are lost; the next call has a fresh one."},
    "fresh_interpreter": {**FLAG, "description": "true: it has no variables of earlier steps."},
    "claimed": _CLAIMED,
    "whole": {**TEXTS, "description": "Where in the session all of a stream lies that was cut."},
    "process": {"type": "integer", "description": "The number of a command in the background."},
}
"""What a result has besides, in a session."""
ENTRY: Json = {
    "type": "object",
    "properties": {"path": TEXT, "kind": TEXT, "bytes": COUNT, "modified": TEXT, "mode": NUMBER, "target": MAYBE},
    "required": ["path", "kind", "bytes"],
}
