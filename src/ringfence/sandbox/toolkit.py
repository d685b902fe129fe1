"""The tools of sessions together, and their definitions as MCP has them.

A description states what is in force: names in braces stand for that.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.model import Json, Mode
from ringfence.sandbox.offers import files, life, processes
from ringfence.sandbox.offers.parts import FACTS, Lives, Tool

KIT: Mapping[str, Tool] = {**life.TOOLS, **files.TOOLS, **processes.TOOLS}


def body(name: str, stated: Mapping[str, str], lives: Lives, *, wide: bool) -> Json:
    """The definition of a tool, as MCP has it."""
    tool = KIT[name]
    taken = {**tool.takes, **(tool.wide if wide else {})}
    schema: Json = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": taken if wide else {key: _bounded(key, value, lives) for key, value in taken.items()},
        "required": list(tool.needs),
        "additionalProperties": False,
    }
    if tool.one_of:
        schema["oneOf"] = [{"required": [key]} for key in tool.one_of if key in taken]
    told: Json = {
        "name": name,
        "title": tool.title,
        "description": tool.text.format_map(stated),
        "inputSchema": schema,
        "annotations": {
            "readOnlyHint": tool.mode is Mode.READ,
            "destructiveHint": tool.destructive,
            "openWorldHint": False,
        },
    }
    if not wide:
        gives = {**tool.gives, "facts": FACTS}
        needed = [key for key in gives if key not in tool.maybe]
        told["outputSchema"] = {"type": "object", "properties": gives, "required": needed}
    return told


def _bounded(key: str, schema: Json, lives: Lives) -> Json:
    """An agent stays within what the operator allows; whoever is in this process could as well edit that."""
    most = {"lifetime_seconds": lives.most_lifetime_seconds, "idle_seconds": lives.most_idle_seconds}
    return {**schema, "maximum": most[key]} if key in most else schema
