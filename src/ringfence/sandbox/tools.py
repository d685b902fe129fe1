"""Our own tools: what they are called, what they take, and what they say of themselves.

An agent sends code or a command, and nothing else. A caller in this process, who could as well edit the
configuration, may also say what the box gets and how much of it: the same tools in their wide form. The tools of
sessions are in `toolkit`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ringfence import canonical
from ringfence.box import MIB, Commands, Limits, Listening
from ringfence.model import Contract, Definition, Json, Mode, NetworkSpec
from ringfence.sandbox import toolkit
from ringfence.sandbox.bounds import limits_schema
from ringfence.sandbox.offers import parts
from ringfence.sandbox.offers.parts import Lives, Ready

EXECUTE_PYTHON = "execute_python"
RUN_SHELL = "run_shell"
PROGRAMS = (EXECUTE_PYTHON, RUN_SHELL)
"""What needs no session."""
BOX_MAKERS = (*PROGRAMS, "open_session")
"""What makes a box; the others are about one that is there."""
RUNS_IN_A_SESSION = (*PROGRAMS, "send_input")
"""What has something run in the box of a session that may use whatever that box has. What goes on when a session is
resumed was begun by an earlier call, and is the effect of that one."""
FORKS_A_SESSION = "fork_session"
WRITES_FILES = ("write_file", "remove_file", "make_folder", "copy_file", "rename_file", "write_folder")
TOOLS = (*PROGRAMS, *(name for name, tool in toolkit.KIT.items() if not tool.only_wide and not tool.if_declared))
DECLARABLE = (*TOOLS, *(name for name, tool in toolkit.KIT.items() if tool.if_declared))
"""Those that a contract can be for; the last ones an agent has only where there is one."""
WIDE_TOOLS = (*PROGRAMS, *toolkit.KIT)
"""Those for callers in this process as well."""
SERVER = "ringfence"
"""Stands where others name the server of a tool; no server of a configuration can have this name."""

TEMPLATES: Mapping[str, tuple[str, ...]] = {"python": (), "data": ("numpy", "pandas", "matplotlib")}
"""Templates that need no configuration, and the packages that each has ready where they are installed."""

# ── Definitions ───────────────────────────────────────────────────────────────────────────────────


def mode(tool: str) -> Mode:
    """How much harm one of our own tools can do, by itself."""
    return Mode.HIGH_RISK if tool in PROGRAMS else toolkit.KIT[tool].mode


def definition(
    contract: Contract, limits: Limits, ready: Ready, lives: Lives | None = None, *, wide: bool = False
) -> Definition:
    """The definition under which a capability of ours is offered.

    `ready` is what its boxes have; `lives` is how long sessions live, None where there are none.
    """
    if contract.tool in PROGRAMS:
        body = _program(contract, limits, ready, lives, wide)
    else:
        stated = _stated(contract, limits, ready, lives or Lives())
        body = toolkit.body(contract.tool, stated, lives or Lives(), wide=wide)
    if ready.installable and contract.tool in BOX_MAKERS:
        body["inputSchema"]["properties"]["packages"] = parts.PACKAGES
    return Definition(SERVER, contract.tool, canonical.definition_digest(body), body)


def _program(contract: Contract, limits: Limits, ready: Ready, lives: Lives | None, wide: bool) -> Json:
    python = contract.tool == EXECUTE_PYTHON
    own: Json = {"code": _CODE} if python else {"command": _COMMAND}
    more: Json = {"context": parts.CONTEXT} if python else {"background": _BACKGROUND}
    schema: Json = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {**own, "session": _SESSION, **(more if lives is not None else {})},
        "required": list(own),
        "additionalProperties": False,
    }
    if lives is not None:
        schema["dependentRequired"] = {key: ["session"] for key in more}
    if wide:
        schema["properties"] |= _WIDE
        if not python:  # a command is a line for the shell, or words
            schema |= {"required": [], "oneOf": [{"required": ["command"]}, {"required": ["argv"]}]}
    body: Json = {
        "name": contract.tool,
        "title": "Run Python in a box" if python else "Run a shell command in a box",
        "description": _description(contract, limits, ready, lives),
        "inputSchema": schema,
        "annotations": {
            "readOnlyHint": False,
            "destructiveHint": False,
            "openWorldHint": ready.network is not None,
        },
    }
    if not wide:  # a caller in this process has the report itself
        body["outputSchema"] = _OUTPUT
    return body


def _description(contract: Contract, limits: Limits, ready: Ready, lives: Lives | None) -> str:
    python = contract.tool == EXECUTE_PYTHON
    if python:
        what = f"Run Python {_version()} source as a program in a fresh box, and return what it prints."
    else:
        what = (
            f"Run a command line with /bin/sh in a fresh box, and return what it prints. Python {_version()} is there."
        )
        if contract.commands is not None:
            what = what.partition(" Python ")[0]
    stated = _stated(contract, limits, ready, lives or Lives())
    if contract.commands is not None:
        lives = None
    return " ".join(
        (
            what,
            "Nothing of an earlier call is there: no variable, no file, no process.",
            *((_PYTHON_SESSION if python else _SHELL_SESSION,) if lives is not None else ()),
            f"Limits: {_number(contract.timeout_seconds)} s, {stated['limits']},"
            f" {size(limits.output_bytes)} of output; past any of them the run is ended.",
            f"Of a long output the head and the tail are returned, {size(limits.capture_bytes)} at most.",
            f"Network: {stated['network']}. Listening: {stated['listening']}.",
            *((f"Programs: {_programs(contract.commands)}.",) if contract.commands is not None else ()),
            f"Packages: {stated['packages']}; {_installing(ready)}.",
            "Files: the working folder is /workspace; /workspace/output is for files that are a result,"
            " /workspace/tmp for scratch, and nothing else can be written.",
        )
    )


def _stated(contract: Contract, limits: Limits, ready: Ready, lives: Lives) -> Mapping[str, str]:
    """What descriptions state of what is in force."""
    more = f", and, where they are installed, {', '.join(ready.packages)}" if ready.packages else ""
    return {
        "timeout": f"{_number(contract.timeout_seconds)} s",
        "limits": f"{size(limits.memory_bytes)} of memory,"
        f" {size(limits.disk_bytes)} of disk, {limits.processes} processes and threads,"
        f" {_number(limits.cpu_cores)} processor core{'' if limits.cpu_cores == 1 else 's'}",
        "packages": f"Python's standard library{more}",
        "network": _reach(ready.network),
        "listening": _listens(contract.listen),
        "python": _version(),
        "lifetime": f"{_number(lives.lifetime_seconds)} s",
        "most_lifetime": f"{_number(lives.most_lifetime_seconds)} s",
        "idle": f"{_number(lives.idle_seconds)} s",
        "retain": f"{_number(lives.retain_seconds)} s",
        "result": size(contract.result.max_bytes),
    }


def _installing(ready: Ready) -> str:
    if not ready.installable:
        return "nothing can be installed"
    fit = f"as far as they fit {', '.join(ready.installable)}"
    return f"`packages` has others installed before it starts{', and pip installs them' if ready.inside else ''}, {fit}"


def _reach(network: NetworkSpec | None) -> str:
    if network is None or not network.allow:
        return "none"
    bounds = [", ".join(network.methods)] if network.methods is not None else []
    bounds += [f"under {', '.join(network.paths)}"] if network.paths is not None else []
    more = f" ({'; '.join(bounds)})" if bounds else ""
    return f"{', '.join(network.allow)}{more}, over HTTP and HTTPS by the proxy that the environment names; else none"


def _programs(commands: Commands) -> str:
    ask = f"; for {', '.join(commands.ask)} a person is asked" if commands.ask else ""
    if commands.allow is not None:
        there = f"beside sh only {', '.join(commands.allow)}" if commands.allow else "sh alone"
    else:
        there = "those of the system" + (f" without {', '.join(commands.deny)}" if commands.deny else "")
    return f"{there}{ask}; what is written in the box cannot be executed, and there are no sessions"


def _listens(listening: Listening) -> str:
    if not listening.allowed:
        return "no program may listen for TCP connections"
    if listening.ports is None:
        return "programs may listen, and only those of the same box can connect"
    named = ", ".join(f"{name} (port {port})" for name, port in listening.ports)
    return f"programs may listen; shown on this machine's loopback, to its owner alone, can be: {named}"


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def size(number: int) -> str:
    """Bytes as a person says them."""
    for unit, name in ((1024 * MIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if number >= unit and number % unit == 0:
            return f"{number // unit} {name}"
    return f"{number / 1_000_000:g} MB" if number >= 1_000_000 and number % 10_000 == 0 else f"{number} bytes"


def _number(value: float) -> str:
    return f"{value:g}"


# ── Schemas ───────────────────────────────────────────────────────────────────────────────────────

_PYTHON_SESSION = (
    "With `session` (see open_session) it runs in that session's box instead, as a cell of a notebook does: variables,"
    " imports, files and the working folder stay for the next call; the value of a last expression, display(…) and"
    " figures of matplotlib are returned, too. A cell that is stopped by its limit of time keeps the variables where it"
    " can; interpreter_alive says so."
)
_SHELL_SESSION = (
    "With `session` (see open_session) it runs in that session's box instead, with the files that are there. With"
    " `background` it returns at once with the number of the process: see process_output, wait_process, send_input and"
    " stop_process."
)
_TEXT: Json = {"type": "string"}
_TEXTS: Json = {"type": "object", "additionalProperties": _TEXT}
_CODE: Json = {"type": "string", "description": "The source. Print what you want to see."}
_COMMAND: Json = {"type": "string", "description": "A command line for /bin/sh."}
_SESSION: Json = {
    **parts.SESSION,
    "description": "A session from open_session, to run in its box. Left out: a fresh box for this call alone.",
}
_BACKGROUND: Json = {
    "type": "boolean",
    "description": "Start it and return; it runs until it ends or its session does. Its stdin is open for send_input.",
}
_BYTES: Json = {
    "type": "object",
    "properties": {"name": _TEXT, "bytes": {"type": "integer"}, "sha256": _TEXT},
    "required": ["bytes", "sha256"],
}
_WIDE: Json = {
    "argv": {"type": "array", "items": _TEXT},
    "name": _TEXT,
    "env": _TEXTS,
    "limits": limits_schema(),
    "inputs": {"type": "array", "items": _BYTES},
    "stdin": {"anyOf": [{"const": "stream"}, _BYTES]},
    "output": _TEXT,
    "trees": {"type": "array", "items": _TEXT},
    "mounts": parts.MOUNTS,
    "network": parts.NETWORK,
    "listen": parts.LISTEN,
    "secrets": {"type": "array", "items": _TEXT},
    "packages": parts.PACKAGES,
    "allow_packages": parts.ALLOW_PACKAGES,
    "template": _TEXT,
    "memory_layout": {"enum": ["shared", "fresh"]},
    "metadata": _TEXTS,
    "cwd": _TEXT,
    "pty": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "minItems": 2,
        "maxItems": 2,
    },
}

_OUTPUT: Json = {
    "type": "object",
    "properties": {
        "stdout": _TEXT,
        "stderr": _TEXT,
        "exit_code": {"type": ["integer", "null"], "description": "null where the program did not end by itself."},
        "ended": {
            "type": "string",
            "description": "exited, signalled, timeout, oom, pids, disk, output or policy; running, in the background.",
        },
        "files": {
            **parts.FILES,
            "description": "What the program left in /workspace/output; in a session, what is new.",
        },
        "facts": parts.FACTS,
        **parts.STEP,
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
