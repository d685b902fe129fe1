"""Tools for the life of sessions, and for what outlives them."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.model import Json, Mode
from ringfence.sandbox.bounds import limits_schema
from ringfence.sandbox.offers.parts import (
    ALLOW_PACKAGES,
    CONTEXT,
    COUNT,
    DIGEST,
    FLAG,
    INFO,
    INFOS,
    LISTEN,
    MAYBE,
    MOUNTS,
    NETWORK,
    NUMBER,
    ONE,
    PACKAGES,
    SESSION,
    TEXT,
    TEXTS,
    Tool,
)

MOST_FORKS = 32
_METADATA: Json = {
    **TEXTS,
    "additionalProperties": {"type": "string", "maxLength": 1000},
    "maxProperties": 32,
    "description": "Words of yours, shown by list_sessions.",
}
_VOLUMES: Json = {
    "type": "array",
    "maxItems": 16,
    "description": "Durable folders, for what must outlive the session.",
    "items": {
        "type": "object",
        "properties": {
            "name": TEXT,
            "at": {"type": "string", "description": "A folder beneath /workspace."},
            "mode": {"enum": ["ro", "rw"]},
        },
        "required": ["name", "at"],
        "additionalProperties": False,
    },
}
_OPENING: Json = {
    "template": {"type": "string", "description": "What is ready in it; left out: the usual one."},
    "lifetime_seconds": {"type": "number", "minimum": 1, "description": "Then it is closed. Pauses do not count."},
    "idle_seconds": {"type": "number", "minimum": 1, "description": "So long without work, and it is paused."},
    "metadata": _METADATA,
    "snapshot": {"type": "string", "description": "Start with the files of this snapshot (snapshot_session)."},
    "volumes": _VOLUMES,
    "setup": {
        "type": "string",
        "description": "Python for each of its interpreters to begin with. Where it fails, no session is opened.",
    },
}
_OPENING_WIDE: Json = {
    "lifetime_seconds": {"type": "number", "exclusiveMinimum": 0},
    "idle_seconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "limits": limits_schema(),
    "env": TEXTS,
    "auto_resume": FLAG,
    "retain": {"enum": ["none", "output"]},
    "trees": {"type": "array", "items": TEXT},
    "mounts": MOUNTS,
    "network": NETWORK,
    "listen": LISTEN,
    "secrets": {"type": "array", "items": TEXT},
    "packages": PACKAGES,
    "allow_packages": ALLOW_PACKAGES,
    "memory_layout": {"enum": ["shared", "fresh"]},
    "inputs": {"type": "array", "items": DIGEST},
}
_PORT: Json = {
    "type": ["integer", "string"],
    "minimum": 1,
    "maximum": 65_535,
    "maxLength": 100,
    "description": "In the box, or its name in the contract.",
}
_STATE: Json = {key: INFO[key] for key in ("session", "state", "step", "expires_at", "why")}
_SNAPSHOT: Json = {"snapshot": TEXT, "name": MAYBE, "bytes": COUNT, "files": COUNT, "created_at": TEXT}

TOOLS: Mapping[str, Tool] = {
    "open_session": Tool(
        "Open a session",
        Mode.WRITE,
        "Open a session: a box of your own that stays, to work in step by step. Give its name as `session` to"
        " execute_python and run_shell, and to the tools for files and processes."
        " Python {python}; packages: {packages}. Network: {network}. Listening: {listening}."
        " Limits of the box, all steps together: {limits}; of one step: {timeout}."
        " It is closed {lifetime} after it was opened ({most_lifetime} at most), and paused after {idle} without work;"
        " a call to it resumes it. What is in /workspace/output when it ends is kept for {retain} more, as resources."
        " Close it when you are done.",
        _OPENING,
        gives={**INFO, "ports": {**TEXTS, "description": "Where ports of it are on this machine, by name."}},
        maybe=("ports",),
        wide=_OPENING_WIDE,
    ),
    "close_session": Tool(
        "Close a session",
        Mode.WRITE,
        "End a session and everything that runs in it. Its files are gone, but for those in /workspace/output.",
        ONE,
        ("session",),
        _STATE,
        destructive=True,
    ),
    "pause_session": Tool(
        "Pause a session",
        Mode.WRITE,
        "Let everything in a session stand still, its clocks included, until it is used or resumed. Nothing is lost.",
        ONE,
        ("session",),
        _STATE,
    ),
    "resume_session": Tool(
        "Resume a session",
        Mode.WRITE,
        "Let a paused session go on. Using it does the same.",
        ONE,
        ("session",),
        _STATE,
    ),
    "list_sessions": Tool(
        "List sessions",
        Mode.READ,
        "Your sessions, with their states: starting, running, paused or stopped; those that were stopped within a day,"
        " with why.",
        {},
        gives={"sessions": INFOS},
        wide={"session": SESSION, "ended": FLAG},
    ),
    "snapshot_session": Tool(
        "Take a snapshot of a session",
        Mode.WRITE,
        "Keep the files of a session as they are, to open others from: open_session(snapshot=…). Variables and"
        " processes are not kept.",
        {**ONE, "name": {"type": "string", "maxLength": 64, "description": "A name of yours for it."}},
        ("session",),
        {"session": TEXT, **_SNAPSHOT},
    ),
    "fork_session": Tool(
        "Fork a session",
        Mode.WRITE,
        "Open several sessions that begin with the files of this one. Variables and processes are not taken over."
        " Each is told for itself: a session, or an error.",
        {**ONE, "count": {"type": "integer", "minimum": 1, "maximum": MOST_FORKS}},
        ("session", "count"),
        {"session": TEXT, "sessions": {"type": "array", "items": {"type": "object"}}},
    ),
    "interrupt_session": Tool(
        "Interrupt a cell",
        Mode.WRITE,
        "Raise KeyboardInterrupt in the Python that runs in a session just now. Its variables stay.",
        {**ONE, "context": CONTEXT},
        ("session",),
        {"session": TEXT, "interrupted": {**FLAG, "description": "false: nothing was running."}},
    ),
    "extend_session": Tool(
        "Let a session live longer",
        Mode.WRITE,
        "Give a session so long to live, from now on.",
        {**ONE, "lifetime_seconds": {"type": "number", "exclusiveMinimum": 0}},
        ("session", "lifetime_seconds"),
        only_wide=True,
    ),
    "expose_port": Tool(
        "Show a port of a session to its owner",
        Mode.WRITE,
        "Let what listens at a port of a session's box be reached on this machine's loopback, by its owner alone, until"
        " the session ends. Nobody else gets in, and nothing gets out by it.",
        {**ONE, "port": _PORT},
        ("session", "port"),
        {"session": TEXT, "host": TEXT, "port": NUMBER},
        if_declared=True,
    ),
    "list_snapshots": Tool("List snapshots", Mode.READ, "Snapshots, newest first.", {}, only_wide=True),
    "remove_snapshot": Tool(
        "Remove a snapshot", Mode.WRITE, "Forget a snapshot.", {"snapshot": TEXT}, ("snapshot",), only_wide=True
    ),
    "create_volume": Tool(
        "Make a volume",
        Mode.WRITE,
        "Make a durable folder that sessions can mount.",
        {"name": TEXT, "max_bytes": {"type": "integer", "minimum": 1}, "mode": {"enum": ["ro", "rw"]}},
        ("name",),
        only_wide=True,
    ),
    "list_volumes": Tool("List volumes", Mode.READ, "Durable folders.", {}, only_wide=True),
    "remove_volume": Tool(
        "Remove a volume",
        Mode.WRITE,
        "Remove a volume with all that is in it.",
        {"name": TEXT},
        ("name",),
        only_wide=True,
    ),
}
