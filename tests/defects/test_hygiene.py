"""Defects that were proven in another gateway, and that this one must not have: dead code, dead switches, hanging ends.

The number in a test's name is the number of the defect.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ringfence import model
from ringfence.config import settings
from tests import gateways, tooling

SOURCE = tooling.ROOT / "src" / "ringfence"
ENTRIES = ("ringfence.cli.main", "ringfence.sdk")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


# ── 11: switches ──────────────────────────────────────────────────────────────────────────────────

NOT_BUILT = "loads only with its default, or every call that would need it is refused"
UNREAD = {
    "SandboxSettings": NOT_BUILT,
    "SecretSpec": NOT_BUILT,
    "Mount": NOT_BUILT,
    "GatewaySettings.code_mode": NOT_BUILT,
    "Contract.isolation": "a server of a command with any but none is refused at load",
    "ServerSpec.placement": "servers run on the host, and the facts say so, whichever it is",
    "Effects.compensate": NOT_BUILT,
    "Effects.preview": NOT_BUILT,
    "Rule.name": "for whoever reads the file",
    "Rule.description": "for whoever reads the file",
    "Rule.owasp_asi_id": "for whoever reads the file",
    "PolicySettings.files": "read through Config.files",
}


def configured() -> Iterator[str]:
    """Every field that a key of the configuration ends up in."""
    kinds = (
        *(settings.GatewaySettings, settings.PolicySettings, settings.SandboxSettings),
        *(model.Contract, model.Retry, model.Rate, model.LogPolicy, model.ResultPolicy, model.Effects, model.Mount),
        *(model.ServerSpec, model.NetworkSpec, model.SecretSpec, model.ApprovalRule, model.Person, model.Rule),
    )
    for kind in kinds:
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}.{field.name}"


def test_defect_11_every_key_of_the_configuration_is_read_by_code() -> None:
    own = ("ringfence.config", "ringfence.model", "ringfence.contract")
    read = {
        node.attr
        for name, tree in trees().items()
        if not name.startswith(own[0]) and name != own[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {place for place in configured() if place.split(".")[1] not in read}
    explained = {place for place in unread if place in UNREAD or place.split(".")[0] in UNREAD}
    assert unread - explained == set()


# ── 16: code that nothing calls ───────────────────────────────────────────────────────────────────

STARTED_AS_PROGRAMS = {"ringfence.cli.demo.server": "`serve --demo` starts it as a server of its own"}


def imports(name: str) -> Iterator[str]:
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_defect_16_every_module_is_on_the_way_of_a_call_or_a_verb() -> None:
    reached: set[str] = set()
    waiting = [*ENTRIES, *STARTED_AS_PROGRAMS]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in trees():
            continue
        reached.add(name)
        waiting += imports(name)
        waiting.append(name.rpartition(".")[0])
    assert set(trees()) - reached == set()


# Called by name from outside of our own source.
CALLED_BY_OTHERS = {
    "Gateway": "the SDK's public surface",
    "PeerProtocol": "uvicorn calls its protocol",
    "Listener": "uvicorn calls its server",
    "Exchange": "the MCP SDK calls its dispatch context",
    "Session": "the MCP SDK calls its connection",
}


def definitions() -> Iterator[tuple[str, str, str]]:
    """(module, owner, name) of every public function, class and method."""
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                yield module, "", node.name
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name[0] != "_":
                        yield module, node.name, inner.name


def used_names() -> Counter[str]:
    used: Counter[str] = Counter()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
    return used


def test_defect_16_every_public_name_is_used() -> None:
    used = used_names()
    programs = {*STARTED_AS_PROGRAMS, "ringfence"}
    dead = [
        f"{module}:{owner}.{name}" if owner else f"{module}:{name}"
        for module, owner, name in definitions()
        if not used[name] and module not in programs and owner not in CALLED_BY_OTHERS
    ]
    assert dead == []
