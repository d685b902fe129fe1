"""The file, section by section, against its shapes; no name in it is looked up yet.

What fits is kept, so that the later checks go on and all problems are reported at once, in plain words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from ringfence.config import schema, validators
from ringfence.config.schema import Shape
from ringfence.config.validators import did_you_mean
from ringfence.config.yaml import Where, YamlSource, kind
from ringfence.core import invisible
from ringfence.core.errors import Problem
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

S = TypeVar("S", bound=Shape)


@dataclass(frozen=True, slots=True)
class Shaped(Generic[S]):
    """What fitted, so that the rest of the checks can go on and all problems come at once."""

    shape: S
    given: dict[str, Any]
    """The keys as they were written, without those that did not fit."""
    broken: frozenset[str]
    """Keys that did not fit or are missing."""
    where: Where


def keys_of(shape: type[Shape]) -> list[str]:
    """The names of a shape's keys as they are written in the file."""
    return [field.alias or name for name, field in shape.model_fields.items()]


def value_at(source: YamlSource, where: Where) -> Any:
    value = source.value
    for step in where:
        value = value[step]
    return value


def shaped(shape: type[S], source: YamlSource, where: Where) -> Shaped[S]:
    """Read the mapping at `where`. What is wrong goes to the source's problems; nothing there reads as empty."""
    given = value_at(source, where)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        source.problems.append(source.problem(where, f"must be a mapping, this is {kind(given)}"))
        return Shaped(shape.model_validate(shape.placeholders), {}, frozenset(keys_of(shape)), where)
    try:
        return Shaped(shape.model_validate(given), given, frozenset(), where)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
    source.problems.extend(_problem(shape, source, where, error) for error in errors)
    broken = frozenset(str(error["loc"][0]) for error in errors)
    kept = {key: value for key, value in given.items() if key not in broken}
    return Shaped(shape.model_validate({**shape.placeholders, **kept}), kept, broken, where)


def _problem(shape: type[Shape], source: YamlSource, where: Where, error: Any) -> Problem:
    where = (*where, *error["loc"])
    category = error["type"]
    if category == "extra_forbidden":
        key = str(where[-1])
        around = _shape_around(shape, error["loc"])
        meant = f" (did you mean {around.meant[key]!r}?)" if key in around.meant else did_you_mean(key, keys_of(around))
        return source.problem(where, f"unknown key {key!r}{meant}", key=True)
    if category == "missing":
        return source.problem(where, f"missing key {str(where[-1])!r}")
    is_key = where[-1] == "[key]"
    return source.problem(where, _sentence(error), key=is_key)


def _shape_around(shape: type[Shape], path: tuple[str | int, ...]) -> type[Shape]:
    """The shape that an unknown key stands in: the one that the path leads into."""
    known = shape
    for step in path[:-1]:
        field = next((f for name, f in known.model_fields.items() if (f.alias or name) == step), None)
        inner = None if field is None else next(shapes_in(field.annotation), None)
        known = inner or known
    return known


def shapes_in(annotation: Any) -> Iterator[type[Shape]]:
    """The shapes that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from shapes_in(part)


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _sentence(error: Any) -> str:
    category = error["type"]
    given = error["input"]
    details = error.get("ctx", {})
    if category in _KINDS:
        hint = " (quote it)" if category == "string_type" and isinstance(given, bool | int | float) else ""
        # What stands in an environment may be secret, and problems are recorded.
        shown = kind(given) if "env" in error["loc"] else _shown(given)
        return f"must be {_KINDS[category]}, this is {shown}{hint}"
    if category in _BOUNDS:
        words, limit = _BOUNDS[category]
        return f"must be {words} {details[limit]:.12g}, this is {_shown(given)}"
    if category == "literal_error":
        expected = str(details["expected"])
        words_known = [part.strip("'") for part in expected.replace(" or ", ", ").split(", ")]
        hint = did_you_mean(given, words_known) if isinstance(given, str) else ""
        return f"must be {expected}, this is {_shown(given)}{hint}"
    if category in ("too_short", "string_too_short"):
        return "must not be empty"
    if category == "string_too_long":
        return f"longer than {details['max_length']} characters"
    if category == "value_error":
        return str(details["error"])
    return str(error["msg"])


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)[:80]
    return kind(value)


# ── The whole file ────────────────────────────────────────────────────────────────────────────────


RESERVED: dict[str, tuple[str, ...]] = {
    "servers": ("ringfence",),  # its own tools are called by that name
    "networks": ("denied",),
    "secrets": ("none",),
    "approvals": ("none", "always"),
    "people": (),
    "agents": ("local", "system"),  # the user's own programs, and the gateway itself
    "capabilities": (),
    "hooks": (),
}
"""Names that mean something already."""


@dataclass(slots=True)
class Draft:
    """What fitted, and where it stands. Problems gather in `source`, and in those of the policy files."""

    source: YamlSource
    base: Path
    file: Shaped[schema.ConfigFileTop]
    gateway: Shaped[schema.GatewaySection]
    telemetry: Shaped[schema.TelemetrySection]
    audit: Shaped[schema.AuditSection]
    policy: Shaped[schema.PolicySection]
    sandbox: Shaped[schema.SandboxSection]
    vault: Shaped[schema.VaultSection]
    people: dict[str, Shaped[schema.PersonEntry]]
    agents: dict[str, Shaped[schema.AgentEntry]]
    tenants: dict[str, Shaped[schema.TenantEntry]]
    servers: dict[str, Shaped[schema.ServerEntry]]
    capabilities: dict[str, Shaped[schema.CapabilityEntry]]
    networks: dict[str, Shaped[schema.NetworkEntry]]
    secrets: dict[str, Shaped[schema.SecretEntry]]
    approvals: dict[str, Shaped[schema.ApprovalEntry]]
    hooks: dict[str, Shaped[schema.HookEntry]]
    warnings: list[Problem] = field(default_factory=list)
    elsewhere: list[Problem] = field(default_factory=list)
    """Problems of other files."""

    def problem(self, where: Where, text: str, *, key: bool = False) -> None:
        self.source.problems.append(self.source.problem(where, text, key=key))

    def warn(self, where: Where, text: str, *, key: bool = True) -> None:
        self.warnings.append(self.source.problem(where, text, key=key))

    def candidates(self, capability: Shaped[schema.CapabilityEntry]) -> list[Shaped[schema.ServerEntry]]:
        """The servers that may turn out to carry this capability out."""
        if capability.shape.transport == "sandboxed_exec" or capability.shape.request is not None:
            return []
        named = capability.shape.server
        if named is not None:
            return [self.servers[named]] if named in self.servers else []
        direct = capability.shape.transport == "direct"
        return [server for server in self.servers.values() if (server.shape.openapi is not None) is direct]


def read_draft(source: YamlSource, base: Path) -> Draft:
    """Take the file apart. Its top is a mapping."""
    return Draft(
        source=source,
        base=base,
        file=shaped(schema.ConfigFileTop, source, ()),
        gateway=_section(schema.GatewaySection, source, "gateway"),
        telemetry=_section(schema.TelemetrySection, source, "telemetry"),
        audit=_section(schema.AuditSection, source, "audit"),
        policy=_section(schema.PolicySection, source, "policy"),
        sandbox=_section(schema.SandboxSection, source, "sandbox"),
        vault=_section(schema.VaultSection, source, "vault"),
        people=_entries(schema.PersonEntry, source, "people"),
        agents=_entries(schema.AgentEntry, source, "agents"),
        tenants=_entries(schema.TenantEntry, source, "tenants"),
        servers=_entries(schema.ServerEntry, source, "servers"),
        capabilities=_entries(schema.CapabilityEntry, source, "capabilities"),
        networks=_entries(schema.NetworkEntry, source, "networks"),
        secrets=_entries(schema.SecretEntry, source, "secrets"),
        approvals=_entries(schema.ApprovalEntry, source, "approvals"),
        hooks=_entries(schema.HookEntry, source, "hooks"),
    )


def _section(shape: type[S], source: YamlSource, name: str) -> Shaped[S]:
    if name not in (source.value or {}):
        return Shaped(shape(), {}, frozenset(), (name,))
    return shaped(shape, source, (name,))


def _entries(shape: type[S], source: YamlSource, name: str) -> dict[str, Shaped[S]]:
    section = (source.value or {}).get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        source.problems.append(source.problem((name,), f"must be a mapping of names, this is {kind(section)}"))
        return {}
    return {key: _entry(shape, source, (name, key)) for key in section}


def _entry(shape: type[S], source: YamlSource, where: Where) -> Shaped[S]:
    section = str(where[0])
    name = str(where[1])
    try:
        validators.word(name)
        if section in ("capabilities", "servers") and "@" in name:
            raise ValueError(f"{quoted(name)} is not a name of a tool or server: no '@'")
    except ValueError as exc:
        source.problems.append(source.problem(where, str(exc), key=True))
    taken = RESERVED.get(section, ())
    if name in taken or (section == "servers" and invisible.alike(name) in map(invisible.alike, taken)):
        source.problems.append(source.problem(where, f"the name {name!r} is taken: choose another", key=True))
    return shaped(shape, source, where)
