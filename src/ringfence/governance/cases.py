"""Test cases in policy files: a made-up call, and what policy is expected to decide on it."""

from __future__ import annotations

from dataclasses import field

from ringfence.core.model import CallKind, Json, Mode
from ringfence.core.record import dataclass

COMBINABLE = ("ask", "sandbox")
"""Expected verdicts that can both be true of one call."""


@dataclass(frozen=True, slots=True)
class PolicyCase:
    """A made-up call, and the decision that is expected on it."""

    name: str
    place: tuple[str, int, int]
    """File, line and column."""
    tool: str
    """The tool's name; for a resource its URI, for a prompt its name."""
    expect: str
    """The expected verdict, in the words of `policy.verdict`."""
    kind: CallKind = "tool"
    server: str | None = None
    arguments: Json = field(default_factory=dict)
    meta: Json = field(default_factory=dict)
    agent: str = "local"
    roles: tuple[str, ...] = ()
    person: str | None = None
    environment: str | None = None
    """The environment; None: that of the configuration."""
    labels: tuple[str, ...] | None = None
    """The labels of the call itself; None: those of its contract."""
    taint: tuple[str, ...] = ()
    """The labels in force, of what its agent has read before."""
    mode: Mode | None = None
    """The mode of a tool that has no contract."""
    rules: tuple[str, ...] | None = None
    """Rules that must match; an empty tuple: no rule may match; None: any rules may."""
    not_rules: tuple[str, ...] = ()
    """Rules that must not match."""
    approval: str | None = None
    """An approval rule that must ask."""
    would: str | None = None
    """The verdict that is expected if the rules in shadow mode were in force."""
