"""Tools for commands in the background."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.model import Json, Mode
from ringfence.sandbox.offers.parts import COUNT, DIGEST, FLAG, NUMBER, ONE, PROCESS, RUNNING, TEXT, Tool

SIGNALS: Mapping[str, int] = {
    **{"HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "USR1": 10, "USR2": 12, "TERM": 15},
    **{"CONT": 18, "STOP": 19},
}
_SIGNAL: Json = {
    "anyOf": [{"enum": list(SIGNALS)}, {"type": "integer", "minimum": 1, "maximum": 64}],
    "description": "Left out: KILL.",
}
_AT: Json = {**COUNT, "description": "Where to begin: what an earlier call gave as the same."}
_ATS: Json = {"stdout_at": _AT, "stderr_at": _AT}

TOOLS: Mapping[str, Tool] = {
    "list_processes": Tool(
        "List commands in the background",
        Mode.READ,
        "Commands that run_shell started with `background` in a session, those that are over included.",
        ONE,
        ("session",),
        {"session": TEXT, "processes": {"type": "array", "items": {"type": "object", "properties": RUNNING}}},
    ),
    "process_output": Tool(
        "Read the output of a command",
        Mode.READ,
        "What a command in the background has written so far. For what is new since the last call, give the stdout_at"
        " and stderr_at that it returned.",
        {**ONE, "process": PROCESS, **_ATS},
        ("session", "process"),
        {"session": TEXT, "process": NUMBER, "stdout": TEXT, "stderr": TEXT, **_ATS, "running": FLAG},
    ),
    "wait_process": Tool(
        "Wait for a command",
        Mode.READ,
        "Wait until a command in the background is over, {timeout} at most; `running` says whether it is.",
        {
            **ONE,
            "process": PROCESS,
            "seconds": {"type": "number", "minimum": 0, "description": "No longer than this."},
        },
        ("session", "process"),
        RUNNING,
        wide=_ATS,
    ),
    "stop_process": Tool(
        "Stop a command",
        Mode.WRITE,
        "Send a signal to a command in the background and all that it started.",
        {**ONE, "process": PROCESS, "signal": _SIGNAL},
        ("session", "process"),
        RUNNING,
        destructive=True,
    ),
    "send_input": Tool(
        "Send input to a command",
        Mode.HIGH_RISK,  # a shell takes it for commands
        "Write to the stdin of a command in the background. With `eof` it is closed after that.",
        {**ONE, "process": PROCESS, "text": TEXT, "eof": FLAG},
        ("session", "process"),
        {"session": TEXT, "process": NUMBER, "bytes": COUNT},
        wide={"data": DIGEST},
    ),
}
