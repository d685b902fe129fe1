"""A hook: appends each call that was refused to a file, once, whatever happens in between.

In ringfence.yaml:    hooks: {refused: {python: "examples/hook.py:record"}}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REFUSED = Path("refused.jsonl")
"""Beside the configuration: there a hook runs."""


def record(each: dict[str, Any]) -> None:
    """Called with each finished record. What it raises has the same record come again later."""
    ended = each["record"]
    if ended["status"] != "denied" or each["id"] in _seen():
        return
    call = ended["call"]
    line = {"id": each["id"], "tool": call["tool"], "agent": call["principal"]["agent"], "why": ended["reason_code"]}
    with REFUSED.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _seen() -> set[str]:
    """A record may come twice, with the same id, if the gateway was killed just after we took it."""
    return {json.loads(line)["id"] for line in REFUSED.open()} if REFUSED.exists() else set()
