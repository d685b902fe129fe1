"""Our own tools: what they are called, what they take, and what they say of themselves.

An agent sends code or a command, and nothing else. A caller in this process, who could as well edit the
configuration, may also say what the box gets and how much of it: the same tools in their wide form.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ringfence import canonical
from ringfence.box import MIB, Limits
from ringfence.model import Contract, Definition, Json

EXECUTE_PYTHON = "execute_python"
RUN_SHELL = "run_shell"
TOOLS = (EXECUTE_PYTHON, RUN_SHELL)
SERVER = "ringfence"
"""Stands where others name the server of a tool; no server of a configuration can have this name."""

TEMPLATES: Mapping[str, tuple[str, ...]] = {"python": (), "data": ("numpy", "pandas", "matplotlib")}
"""Templates that need no configuration, and the packages that each has ready where they are installed."""

BOUNDS: Mapping[str, tuple[float, float]] = {
    "wall_seconds": (0.001, 86_400),
    "cpu_seconds": (0.001, 86_400),
    "cpu_cores": (0.01, 1024),
    "memory_bytes": (16 * MIB, 2**44),
    "disk_bytes": (MIB, 2**44),
    "inodes": (64, 10**9),
    "processes": (1, 1_000_000),
    "open_files": (16, 1_048_576),
    "file_bytes": (0, 2**44),
    "output_bytes": (0, 2**44),
    "capture_bytes": (0, 64 * MIB),
}
"""What each limit may be. Less makes no box, more is no limit."""
_FRACTIONS = frozenset({"wall_seconds", "cpu_seconds", "cpu_cores"})


def limits_problem(limits: Limits) -> str | None:
    """What is wrong with limits that somebody asks for."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(limits, name)
        if value is None and name in ("cpu_seconds", "file_bytes"):
            continue
        kinds = (int, float) if name in _FRACTIONS else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            return f"{name} must be {_between(name)}, this is {value!r}"
    return None


def _between(name: str) -> str:
    least, most = BOUNDS[name]
    return f"{'a number' if name in _FRACTIONS else 'a whole number'} from {least:g} to {most:g}"


# ── Definitions ───────────────────────────────────────────────────────────────────────────────────


def definition(contract: Contract, limits: Limits, packages: tuple[str, ...], *, wide: bool = False) -> Definition:
    """The definition under which a capability of ours is offered; `packages` are those of its template."""
    python = contract.tool == EXECUTE_PYTHON
    own: Json = {"code": _CODE} if python else {"command": _COMMAND}
    schema: Json = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {**own, "session": _SESSION},
        "required": list(own),
        "additionalProperties": False,
    }
    if wide:
        schema["properties"] |= _WIDE
        if not python:  # a command is a line for the shell, or words
            schema |= {"required": [], "oneOf": [{"required": ["command"]}, {"required": ["argv"]}]}
    body: Json = {
        "name": contract.tool,
        "title": "Run Python in a box" if python else "Run a shell command in a box",
        "description": _description(contract, limits, packages),
        "inputSchema": schema,
        "annotations": {"readOnlyHint": False, "destructiveHint": False, "openWorldHint": False},
    }
    if not wide:  # a caller in this process has the report itself
        body["outputSchema"] = _OUTPUT
    return Definition(SERVER, contract.tool, canonical.definition_digest(body), body)


def _description(contract: Contract, limits: Limits, packages: tuple[str, ...]) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if contract.tool == EXECUTE_PYTHON:
        what = f"Run Python {version} source as a program in a fresh box, and return what it prints."
    else:
        what = f"Run a command line with /bin/sh in a fresh box, and return what it prints. Python {version} is there."
    more = f", and, where they are installed, {', '.join(packages)}" if packages else ""
    return " ".join(
        (
            what,
            "Nothing of an earlier call is there: no variable, no file, no process.",
            f"Limits: {_number(contract.timeout_seconds)} s, {size(limits.memory_bytes)} of memory,"
            f" {size(limits.disk_bytes)} of disk, {limits.processes} processes and threads,"
            f" {_number(limits.cpu_cores)} processor core{'' if limits.cpu_cores == 1 else 's'},"
            f" {size(limits.output_bytes)} of output; past any of them the run is ended.",
            f"Of a long output the head and the tail are returned, {size(limits.capture_bytes)} at most.",
            "Network: none.",
            f"Packages: Python's standard library{more}; nothing can be installed.",
            "Files: the working folder is /workspace; /workspace/output is for files that are a result,"
            " /workspace/tmp for scratch, and nothing else can be written.",
        )
    )


def size(number: int) -> str:
    """Bytes as a person says them."""
    for unit, name in ((1024 * MIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if number >= unit and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number / 1_000_000:g} MB" if number >= 1_000_000 and number % 10_000 == 0 else f"{number} bytes"


def _number(value: float) -> str:
    return f"{value:g}"


# ── Schemas ───────────────────────────────────────────────────────────────────────────────────────

_TEXT: Json = {"type": "string"}
_TEXTS: Json = {"type": "object", "additionalProperties": _TEXT}
_CODE: Json = {"type": "string", "description": "The source. Print what you want to see."}
_COMMAND: Json = {"type": "string", "description": "A command line for /bin/sh."}
_SESSION: Json = {"type": "string", "description": "For sessions, which are not built yet: leave it out."}
_BYTES: Json = {
    "type": "object",
    "properties": {"name": _TEXT, "bytes": {"type": "integer"}, "sha256": _TEXT},
    "required": ["bytes", "sha256"],
}


def _limits_schema() -> Json:
    return {
        name: {"type": "number" if name in _FRACTIONS else "integer", "minimum": least, "maximum": most}
        for name, (least, most) in BOUNDS.items()
    }


_WIDE: Json = {
    "argv": {"type": "array", "items": _TEXT},
    "name": _TEXT,
    "env": _TEXTS,
    "limits": {"type": "object", "properties": _limits_schema(), "additionalProperties": False},
    "inputs": {"type": "array", "items": _BYTES},
    "stdin": {"anyOf": [{"const": "stream"}, _BYTES]},
    "output": _TEXT,
    "trees": {"type": "array", "items": _TEXT},
    "template": _TEXT,
    "memory_layout": {"enum": ["shared", "fresh"]},
    "metadata": _TEXTS,
}

_FILES: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"path": _TEXT, "bytes": {"type": "integer"}, "sha256": _TEXT},
        "required": ["path", "bytes", "sha256"],
    },
}
_OUTPUT: Json = {
    "type": "object",
    "properties": {
        "stdout": _TEXT,
        "stderr": _TEXT,
        "exit_code": {"type": ["integer", "null"], "description": "null where the program did not end by itself."},
        "ended": {"type": "string", "description": "exited, signalled, timeout, oom, pids, disk, output or policy."},
        "files": {**_FILES, "description": "What the program left in /workspace/output."},
        "facts": {"type": "object", "description": "What the supervisor of the box saw."},
    },
    "required": ["stdout", "stderr", "exit_code", "ended", "files", "facts"],
}


def complete(result: Json, facts: Mapping[str, Any]) -> None:
    """Put the facts into a result of ours that has a place for them, and say how it ended where it did not go well."""
    structured = result.get("structuredContent")
    if isinstance(structured, dict) and "facts" in structured:
        structured["facts"] = dict(facts)
    if result.get("isError"):
        result["content"] = [*result["content"], {"type": "text", "text": f"[{facts['explanation']}]"}]
