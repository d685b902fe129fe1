"""A call of one of our own tools as a box to be made. What makes no sense is refused before anything runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ringfence.box import Attached, BoxSpec, Limits, Program
from ringfence.errors import Refused
from ringfence.model import Call, Contract, Json, Status
from ringfence.sandbox.tools import EXECUTE_PYTHON

MAX_SOURCE_BYTES = 10 * 1024 * 1024
_MAX_WORD_BYTES = 131_071
"""The kernel starts no program with a longer word."""
_SHORTEST_SECONDS = 0.001
_NOTHING = Attached()


def spec(call: Call, contract: Contract, defaults: Limits) -> BoxSpec:
    """Whatever the arguments do not say, the contract and the configuration say. Raises Refused."""
    given, attached = call.arguments, call.attached or _NOTHING
    problem = next(_problems(given), None)
    if problem is not None:
        raise Refused(
            Status.VALIDATION_FAILURE, "bad_arguments", f"The arguments of {call.tool!r} do not fit: {problem}."
        )
    fresh = contract.memory_layout == "fresh" or given.get("memory_layout") == "fresh"
    return BoxSpec(
        program=_program(contract, given, attached.stdin),
        limits=_limits(call, contract, defaults),
        env=given.get("env") or {},
        inputs=attached.inputs,
        output=attached.output,
        trees=tuple(map(Path, given.get("trees") or ())),
        template=given.get("template") or contract.template,
        layout="fresh" if fresh else "shared",
        tenant=call.principal.tenant,
    )


def _program(contract: Contract, given: Json, stdin: bytes | int) -> Program:
    words = tuple(given.get("argv") or ())
    if contract.tool == EXECUTE_PYTHON:
        return Program("python", given["code"].encode(), words, given.get("name") or "-c", stdin)
    return Program("command", argv=words if "argv" in given else ("/bin/sh", "-c", given["command"]), stdin=stdin)


def _limits(call: Call, contract: Contract, defaults: Limits) -> Limits:
    given = {"wall_seconds": contract.timeout_seconds, **(call.arguments.get("limits") or {})}
    if call.deadline is not None:
        left = max(call.deadline - time.monotonic(), _SHORTEST_SECONDS)
        given["wall_seconds"] = min(given["wall_seconds"], left)
    return replace(defaults, **given)


def _problems(given: Json) -> Iterator[str]:
    """What no schema says. The values themselves are never repeated: this goes on record."""
    code, command, words = given.get("code", ""), given.get("command", ""), given.get("argv") or ()
    if "\0" in code:
        yield "code: a program has no NUL character"
    if len(code) > MAX_SOURCE_BYTES or len(code.encode()) > MAX_SOURCE_BYTES:
        yield f"code: longer than {MAX_SOURCE_BYTES // 1024 // 1024} MiB"
    if "argv" in given and not words and "code" not in given:
        yield "argv: there is no command in it"
    texts = [("command", command), *(("argv", word) for word in words), ("name", given.get("name") or "")]
    texts += [("trees", tree) for tree in given.get("trees") or ()]
    for name, text in texts:
        if "\0" in text:
            yield f"{name}: no NUL character can stand in it"
        if len(text.encode()) > _MAX_WORD_BYTES:
            yield f"{name}: longer than {_MAX_WORD_BYTES} bytes"
    for name, value in (given.get("env") or {}).items():
        if not name or "=" in name or "\0" in name + value:
            yield "env: a variable has a name without '=', and no NUL character"
        elif len(name.encode()) + len(value.encode()) + 1 > _MAX_WORD_BYTES:
            yield f"env: a variable is longer than {_MAX_WORD_BYTES} bytes"
