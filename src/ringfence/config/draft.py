"""The file taken apart: every section and entry against its shape, none of their names followed yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ringfence.config import schema, words
from ringfence.config.shaping import S, Shaped, shaped
from ringfence.config.source import Source, Where, kind
from ringfence.errors import Problem

RESERVED: dict[str, tuple[str, ...]] = {
    "servers": ("ringfence",),  # its own tools are called by that name
    "networks": ("denied",),
    "secrets": ("none",),
    "approvals": ("none", "always"),
    "people": (),
    "capabilities": (),
}
"""Names that mean something already."""


@dataclass(slots=True)
class Draft:
    """What fitted, and where it stands. Problems gather in `source`, and in those of the policy files."""

    source: Source
    base: Path
    file: Shaped[schema.File]
    gateway: Shaped[schema.Gateway]
    policy: Shaped[schema.Policy]
    sandbox: Shaped[schema.Sandbox]
    vault: Shaped[schema.Vault]
    people: dict[str, Shaped[schema.Person]]
    agents: dict[str, Shaped[schema.Agent]]
    servers: dict[str, Shaped[schema.Server]]
    capabilities: dict[str, Shaped[schema.Capability]]
    networks: dict[str, Shaped[schema.Network]]
    secrets: dict[str, Shaped[schema.Secret]]
    approvals: dict[str, Shaped[schema.Approval]]
    warnings: list[Problem] = field(default_factory=list)
    elsewhere: list[Problem] = field(default_factory=list)
    """Problems of other files."""

    def problem(self, where: Where, text: str, *, key: bool = False) -> None:
        self.source.problems.append(self.source.problem(where, text, key=key))

    def warn(self, where: Where, text: str, *, key: bool = True) -> None:
        self.warnings.append(self.source.problem(where, text, key=key))

    def candidates(self, capability: Shaped[schema.Capability]) -> list[Shaped[schema.Server]]:
        """The servers that may turn out to carry this capability out."""
        if capability.shape.transport != "mcp":
            return []
        named = capability.shape.server
        if named is not None:
            return [self.servers[named]] if named in self.servers else []
        return list(self.servers.values())


def read(source: Source, base: Path) -> Draft:
    """Take the file apart. Its top is a mapping."""
    return Draft(
        source=source,
        base=base,
        file=shaped(schema.File, source, ()),
        gateway=_section(schema.Gateway, source, "gateway"),
        policy=_section(schema.Policy, source, "policy"),
        sandbox=_section(schema.Sandbox, source, "sandbox"),
        vault=_section(schema.Vault, source, "vault"),
        people=_entries(schema.Person, source, "people"),
        agents=_entries(schema.Agent, source, "agents"),
        servers=_entries(schema.Server, source, "servers"),
        capabilities=_entries(schema.Capability, source, "capabilities"),
        networks=_entries(schema.Network, source, "networks"),
        secrets=_entries(schema.Secret, source, "secrets"),
        approvals=_entries(schema.Approval, source, "approvals"),
    )


def _section(shape: type[S], source: Source, name: str) -> Shaped[S]:
    if name not in (source.value or {}):
        return Shaped(shape(), {}, frozenset(), (name,))
    return shaped(shape, source, (name,))


def _entries(shape: type[S], source: Source, name: str) -> dict[str, Shaped[S]]:
    section = (source.value or {}).get(name)
    if section is None:
        return {}
    if not isinstance(section, dict):
        source.problems.append(source.problem((name,), f"must be a mapping of names, this is {kind(section)}"))
        return {}
    return {key: _entry(shape, source, (name, key)) for key in section}


def _entry(shape: type[S], source: Source, where: Where) -> Shaped[S]:
    section, name = str(where[0]), str(where[1])
    try:
        words.word(name)
        if section in ("capabilities", "servers") and "@" in name:
            raise ValueError(f"{name[:80]!r} is not a name of a tool or server: no '@'")
    except ValueError as exc:
        source.problems.append(source.problem(where, str(exc), key=True))
    if name in RESERVED.get(section, ()):
        source.problems.append(source.problem(where, f"the name {name!r} is taken: choose another", key=True))
    return shaped(shape, source, where)
