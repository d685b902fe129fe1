"""Writes a `ringfence.yaml` for a person to read and edit: its text, and a first contract for each tool.

Whatever comes from elsewhere is quoted. What a server says about its tool is a hint for the draft and for nothing else:
policy never sees it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from ringfence.core import invisible
from ringfence.core.model import Json
from ringfence.core.record import dataclass

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_MEANS_SOMETHING = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_WIDTH = 110

STARTER = """\
# Ringfence: what an agent may do, and how. `ringfence check` says what is wrong with this file.
version: 1

# MCP servers. Each runs in a box of its own: no network, no secrets, no files but those named here.
servers: {}
#  files:
#    command: [node, ./server/index.js, /docs]      # `ringfence init --from` writes those of npx and uvx
#    mounts: [{host: ./docs, at: /docs, mode: ro}]

# One contract for each tool that may be called; a tool without one is not offered.
# Ringfence's own tools (execute_python, run_shell, sessions, files, processes) are there without one, in boxes.
capabilities: {}
#  read_text_file: {server: files, mode: read}
#  edit_file: {server: files, mode: write, approval: always}

# Where boxes may go, by name; a server or capability says `network: NAME`.
networks: {}
#  docs_only: {allow: ["docs.example.com:443"]}

# Where secrets come from, never what they are.
secrets: {}
#  helpdesk_token: {from: env, name: HELPDESK_TOKEN, hosts: [helpdesk.example.com], header: Authorization}

policy: {preset: standard}
"""


@dataclass(slots=True)
class WrittenEntry:
    """A server, a capability or a secret, and what a reader should know of it."""

    name: str
    keys: Mapping[str, Any]
    remarks: list[str] = field(default_factory=list)


def configuration(intro: Iterable[str], sections: Mapping[str, Iterable[WrittenEntry]]) -> str:
    """The text of a configuration; sections without entries are left out."""
    lines = [*_comments(intro, ""), "version: 1"]
    for section, entries in sections.items():
        found = list(entries)
        if not found:
            continue
        lines += ["", f"{section}:"]
        for entry in found:
            lines += _comments(entry.remarks, "  ")
            lines += _entry(entry)
    return "\n".join([*lines, ""])


def _entry(entry: WrittenEntry) -> list[str]:
    short = f"  {scalar(entry.name)}: {flow(entry.keys)}"
    if len(short) <= _WIDTH:
        return [short]
    lines = [f"  {scalar(entry.name)}:"]
    for key, value in entry.keys.items():
        one = f"    {scalar(key)}: {flow(value)}"
        if value and len(one) > _WIDTH and isinstance(value, list) and all(isinstance(item, dict) for item in value):
            lines.append(f"    {scalar(key)}:")
            lines += [f"      - {flow(item)}" for item in value]
        else:
            lines.append(one)
    return lines


def flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return scalar(value) if isinstance(value, str) else repr(value)


def scalar(text: str) -> str:
    """Text as YAML 1.2 reads it back and as a person reads it: what cannot be seen is escaped."""
    if _BARE.fullmatch(text) and text.lower() not in _MEANS_SOMETHING:
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{invisible.quotable(quoted, _escaped)}"'


def _escaped(character: str) -> str:
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _comments(remarks: Iterable[str], margin: str) -> list[str]:
    # Each line becomes a comment of its own; characters that some programs take for a line end are made visible.
    return [f"{margin}# {invisible.visible(line)}".rstrip() for remark in remarks for line in remark.split("\n")]


# ── A first contract for a tool ───────────────────────────────────────────────────────────────────


_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_CHANGES = frozenset(
    {
        *("add", "append", "apply", "archive", "assign", "cancel", "clear", "close", "commit", "copy"),
        *("create", "delete", "deploy", "destroy", "disable", "drop", "edit", "enable", "erase", "exec"),
        *("execute", "fill", "import", "insert", "install", "invoke", "kill", "merge", "modify", "move"),
        *("open", "patch", "post", "publish", "purge", "push", "put", "remove", "rename", "replace", "reset"),
        *("restore", "revoke", "run", "save", "schedule", "send", "set", "start", "stop", "submit", "transfer"),
        *("truncate", "type", "update", "upload", "upsert", "write"),
    }
)
"""Verbs of tools that do more than read, whatever the server says."""


def draft_contract(definition: Json) -> dict[str, Any]:
    """The keys of a capability. It reads only where the server says so and its name does not say otherwise; whatever
    the server itself calls destructive, a person is asked about."""
    hints = definition.get("annotations")
    hints = hints if isinstance(hints, dict) else {}
    if hints.get("readOnlyHint") is True and hints.get("destructiveHint") is not True and not _changes(definition):
        return {"mode": "read"}
    if hints.get("destructiveHint") is True:
        return {"mode": "write", "approval": "always"}
    return {"mode": "write"}


def _changes(definition: Json) -> bool:
    return any(word.lower() in _CHANGES for word in _WORD.findall(str(definition.get("name", "")))[:3])
