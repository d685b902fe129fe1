"""Conditions in CEL, checked for names and types when the configuration is read.

One language for `rules[].when`, `approvals.when` and `idempotent.key`. The engine returns a run-time error as a
value instead of raising it; here it is always raised, so that no caller can take an error for a yes. There is no engine
for systems with musl instead of glibc: there a condition is refused when it is read, and everything else works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from ringfence.core import canonical
from ringfence.core.aio import in_thread
from ringfence.core.labels import flow_of
from ringfence.core.model import Call, Contract, Json

T = TypeVar("T")

VARIABLES = ("call", "args", "agent", "contract", "environment", "flow")
_FROM_CALLERS = ("args", "call")
_LISTS = (list, tuple)  # written out at each use, a union costs more than the look
_MISSING = (
    "conditions are written in CEL, and its engine is not installed: pip install cel-expr-python "
    "(there is none for musl: docs/other-systems.md)"
)
_LONG = 65_536
"""Characters of what a call carries, each value counted as 16 more, from which on it is judged in a thread."""
_MAX_READ = 50_000
"""Values of a call that one condition reads: the engine converts each, and lets nothing else run meanwhile."""
_TOO_MUCH = f"conditions read at most {_MAX_READ:,} values of a call"
_MEMBER = re.compile(r"""\s*(?:\.\s*([A-Za-z_]\w*)\b(?!\s*(?:\(|//))|\[\s*(?:"([^"\\\n]*)"|'([^'\\\n]*)')\s*\])""")
"""A field that is named in full. Before `(` it would be a method, and after a comment it can be one."""
_PLACE = re.compile(r"^.*?<input>:(\d+):(\d+): (.*)$", re.MULTILINE)


_Fields = dict[str, "_Fields | None"]
"""Fields by name, each with those of its own that are looked at; None: all of them."""


class ExpressionError(ValueError):
    """A condition that does not compile (with its place) or failed when it was evaluated."""

    def __init__(self, text: str, line: int = 1, column: int = 1) -> None:
        super().__init__(text)
        self.text = text
        self.line = line
        self.column = column


class Expression:
    """A compiled condition or key."""

    def __init__(self, source: str, *, result: str = "bool") -> None:
        self.source = source
        cel, environment = _engine()
        self._error = cel.Type.ERROR
        # Converting what a condition does not mention would cost more than evaluating it.
        self._mentioned = tuple(
            (name, _fields_named(name, source)) for name in VARIABLES if re.search(rf"\b{name}\b", source)
        )
        try:
            self._program = environment.compile(source)
        except Exception as exc:  # the binding raises plain RuntimeError and friends for every compile error
            raise _compile_error(exc) from None
        kind = self._program.return_type()
        if result == "bool" and kind not in (cel.Type.BOOL, cel.Type.DYN):
            raise ExpressionError(f"a condition must be true or false, this is {kind.name().lower()}")

    def test(self, variables: Mapping[str, Any]) -> bool:
        """True or False; anything else, an error included, raises ExpressionError."""
        value = self._evaluate(variables)
        if value is True or value is False:
            return value
        raise ExpressionError(f"{self.source!r} gave {type(value).__name__}, not true or false")

    def text(self, variables: Mapping[str, Any]) -> str:
        """The value as text, for a key."""
        value = self._evaluate(variables)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and value != "":
            return str(value)
        raise ExpressionError(f"{self.source!r} gave no usable key")

    def _evaluate(self, variables: Mapping[str, Any]) -> Any:
        try:
            seen = {name: _only(variables[name], fields) for name, fields in self._mentioned if name in variables}
            for name in _FROM_CALLERS:
                if name in seen and (problem := _unreadable(seen[name])) is not None:
                    raise ExpressionError(f"{self.source!r} failed: {problem}")
            value = self._program.eval(data=seen)
            found = value.value()
            # What is true or false is no error, and nearly everything is; its type is the dearest thing to ask for.
            if found is not True and found is not False and value.type() == self._error:
                raise ExpressionError(f"{self.source!r} failed: {found}")
            return found
        except ExpressionError:
            raise
        except Exception as exc:  # a value that the binding cannot convert is an error of the condition too
            raise ExpressionError(f"{self.source!r} failed: {exc}") from None


def _fields_named(variable: str, source: str) -> _Fields | None:
    """The fields of a variable that a condition names, or None where it may look at all of them.

    Found in the text, so that a mistake can only add to them: whatever is not plainly a field, within a literal as
    well, means the whole.
    """
    found: _Fields = {}
    for place in re.finditer(rf"\b{variable}\b", source):
        end, within = place.end(), found
        path: list[str] = []
        while (member := _MEMBER.match(source, end)) is not None:
            path.append(next(name for name in member.groups() if name is not None))
            end = member.end()
        if not path:
            return None
        for name in path[:-1]:
            known = within.setdefault(name, {})
            if known is None:
                break
            within = known
        else:
            within[path[-1]] = None
    return found


def _only(value: Any, fields: _Fields | None) -> Any:
    """The part of a value that consists of these fields. What is no object has none, and stays as it is."""
    if fields is None or not isinstance(value, dict):
        return value
    return {name: _only(value[name], inner) for name, inner in fields.items() if name in value}


def _unreadable(value: Any) -> str | None:
    """Why a condition cannot be tried on what a caller sent; None if it can. At a NUL the engine reads no further, and
    would judge half of what a server gets."""
    stack = [value]
    count = 1
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "\0" in item:
                return "conditions cannot read text with a NUL character"
        elif isinstance(item, dict):
            count += 2 * len(item)
            if count > _MAX_READ:
                return _TOO_MUCH
            stack += item
            stack += item.values()
        elif isinstance(item, _LISTS):
            count += len(item)
            if count > _MAX_READ:
                return _TOO_MUCH
            stack += item
    return None


@cache
def _engine() -> tuple[Any, Any]:
    """The module of the engine, and what conditions can name there. Raises ExpressionError where it is missing."""
    try:
        cel: Any = import_module("cel_expr_python.cel")
    except ImportError:
        raise ExpressionError(_MISSING) from None
    any_map = cel.Type.Map(cel.Type.STRING, cel.Type.DYN)
    named = dict.fromkeys(VARIABLES, any_map) | {"environment": cel.Type.STRING}
    return cel, cel.NewEnv(variables=named)


def _compile_error(exc: Exception) -> ExpressionError:
    match = _PLACE.search(str(exc))
    if match is None:
        return ExpressionError(str(exc).strip() or type(exc).__name__)
    text = re.sub(r" \(in container ''\)", "", match.group(3))
    return ExpressionError(text, int(match.group(1)), int(match.group(2)))


async def while_others_are_served(call: Call, judge: Callable[[], T]) -> T:
    """What a rule or a condition says of a call: in a thread where the call carries much."""
    if canonical.is_light((call.arguments, call.inputs, call.meta), _LONG):
        return judge()
    return await in_thread(judge)


def variables(call: Call, contract: Contract, environment: str) -> Json:
    """What a condition can see of a call."""
    principal = call.principal
    flow = flow_of(call, contract)
    return {
        "call": {
            "tool": call.tool,
            "kind": call.kind,
            "origin": call.origin,
            "server": contract.server or "",
            "session": call.session or "",
            "box": call.box or "",
            "idempotent": call.idempotency_key is not None,
            "meta": call.meta,
            "inputs": call.inputs or {},
        },
        "args": call.arguments,
        "agent": {
            "name": principal.agent,
            "tenant": principal.tenant,
            "person": principal.person or "",
            "roles": sorted(principal.roles),
        },
        "contract": {
            "name": contract.name,
            "server": contract.server or "",
            "tool": contract.tool,
            "mode": str(contract.mode),
            "transport": str(contract.transport),
            "network": contract.network,
            "labels": list(flow.own),
            "secrets": list(contract.secrets),
            "reversible": contract.effects.reversible,
        },
        "environment": environment,
        "flow": {"labels": list(flow.labels), "bytes": len(canonical.dumps(call.arguments))},
    }
