"""A cautious draft of the contract of a tool that nobody has written one for.

What a server says of its tool is a hint for the draft and for nothing else: policy never sees it.
"""

from __future__ import annotations

import re
from typing import Any

from ringfence.model import Json

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


def drafted(definition: Json) -> dict[str, Any]:
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
