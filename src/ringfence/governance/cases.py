"""Cases beside the rules: a call, and what policy is expected to say of it."""

from __future__ import annotations

from dataclasses import field

from ringfence.core.model import CallKind, Json, Mode
from ringfence.core.record import dataclass

TOGETHER = ("ask", "sandbox")
"""Of the words for what is expected, those that may both be."""


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """One call, made up, and what is expected of it."""

    name: str
    place: tuple[str, int, int]
    """File, line and column."""
    tool: str
    """Of a resource its URI, of a prompt its name."""
    expect: str
    """A verdict, as `policy.verdict` says it."""
    kind: CallKind = "tool"
    server: str | None = None
    arguments: Json = field(default_factory=dict)
    meta: Json = field(default_factory=dict)
    agent: str = "local"
    roles: tuple[str, ...] = ()
    person: str | None = None
    environment: str | None = None
    """None: that of the configuration."""
    labels: tuple[str, ...] | None = None
    """None: those of the contract."""
    taint: tuple[str, ...] = ()
    """Labels that are in force: of what its agent read before."""
    mode: Mode | None = None
    """Of a tool that has no contract."""
    rules: tuple[str, ...] | None = None
    """Each of these matches; none at all does where this is empty."""
    not_rules: tuple[str, ...] = ()
    approval: str | None = None
    would: str | None = None
    """The verdict, had the rules in shadow mode been in force."""
