"""What each agent may call at all, as the operator declared it. Lists show what it allows, and calls are held to it.

Where no agents are declared, there is one, and it may call whatever contracts and policy allow. Where some are, an
agent may call what it names, and nobody else may call anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase

from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.model import AgentSpec, Call, CostBudget, Json, Principal, Rate, Status
from ringfence.core.quoting import quoted
from ringfence.governance import uris
from ringfence.sandbox.tools.toolkit import SERVER

_MAX_KNOWN = 4096
_LONGEST_KNOWN = 512
"""Names are what callers write, so what is remembered of them is bounded, in number and in length."""
_LONGEST_SHOWN = 300
_NO_LIMIT = Rate()


class Permission:
    """What one agent may call, read and ask for."""

    def __init__(self, agent: AgentSpec | None = None, refusal: str | None = None) -> None:
        """Without an agent: everything; with a `refusal`: nothing, for this reason."""
        self._agent = agent
        self.refusal = refusal
        self.quota = agent.quota if agent is not None else _NO_LIMIT
        self._known: dict[str, bool] = {}

    @property
    def narrows(self) -> bool:
        return self._agent is not None or self.refusal is not None

    def calls(self, capability: str) -> bool:
        """Whether it may call this capability."""
        if not self.narrows:
            return True
        found = self._known.get(capability)
        if found is None:
            patterns = () if self._agent is None or self.refusal is not None else self._agent.capabilities
            found = any(fnmatchcase(capability, pattern) for pattern in patterns)
            if len(self._known) < _MAX_KNOWN and len(capability) <= _LONGEST_KNOWN:
                self._known[capability] = found
        return found

    def reads(self, uri: str) -> bool:
        """Whether it may read this resource, by its URI in the normal form."""
        return not self.narrows or any(uris.fits(uri, pattern) for pattern in self._resources)

    def uses(self, server: str, prompt: str) -> bool:
        """Whether it may use this prompt of a server, by the server's own name for it."""
        if not self.narrows:
            return True
        patterns = () if self._agent is None or self.refusal is not None else self._agent.prompts
        return any(fnmatchcase(name, pattern) for name in (prompt, f"{server}.{prompt}") for pattern in patterns)

    @property
    def reads_any(self) -> bool:
        """Whether there is a resource of a server that it may read."""
        return not self.narrows or bool(self._resources)

    @property
    def reads_metrics(self) -> bool:
        """Whether it may read what the gateway counts of all agents."""
        return not self.narrows or (self._agent is not None and self.refusal is None and self._agent.metrics)

    @property
    def _resources(self) -> tuple[str, ...]:
        return () if self._agent is None or self.refusal is not None else self._agent.resources

    def require_tool(self, call: Call, known: Iterable[str]) -> None:
        """Raises Refused; `known` are the tools that are offered, to name those that were perhaps meant."""
        if not self.calls(call.tool):
            import difflib  # noqa: PLC0415 - for calls that are refused

            own = [name for name in known if self.calls(name)]
            near = difflib.get_close_matches(call.tool[:128], own, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise self._refused(call, f"call the tool {quoted(call.tool, 128)}", hint)

    def require_item(self, call: Call, server: str) -> None:
        """The same for a resource, prompt or completion. To end a subscription gives nothing, and is always allowed."""
        if not self.narrows or call.method == "resources/unsubscribe":
            return
        ref = call.arguments.get("ref")
        about = ref if call.kind == "completion" and isinstance(ref, dict) else call.arguments
        if "uri" in about:
            if server != SERVER and not self.reads(str(about["uri"])):
                raise self._refused(call, f"read the resource {quoted(str(about['uri']), _LONGEST_SHOWN)}")
        elif not self.uses(server, str(about.get("name"))):
            raise self._refused(call, f"use the prompt {quoted(call.tool, _LONGEST_SHOWN)}")

    def require_list(self, call: Call, server: str) -> None:
        """The same for what a server lists: it is not even asked where nothing of it would be shown."""
        if server != SERVER and call.kind == "listing" and not self.reads_any:
            raise self._refused(call, "read any resource")

    def require_any(self, call: Call) -> None:
        """Raises Refused where it may call nothing at all, whatever it is."""
        if self.refusal is not None:
            raise self._refused(call, "")

    def _refused(self, call: Call, what: str, hint: str = "") -> Refused:
        if self.refusal is not None:
            return Refused(Status.DENIED, "unknown_agent", self.refusal)
        text = f"The agent {call.principal.agent!r} may not {what}: the operator did not declare it for this agent."
        return Refused(Status.DENIED, "not_for_agent", text + hint)


UNLIMITED = Permission()


class Permissions:
    """Those of all agents in one environment. Never changes; a new configuration makes new ones."""

    def __init__(
        self,
        agents: Mapping[str, AgentSpec],
        environment: str,
        step_up: Mapping[str, tuple[str, ...]] | None = None,
        budgets: Mapping[str, CostBudget] | None = None,
    ) -> None:
        """`step_up` are patterns of capabilities, by the scope that a token of an identity provider must have."""
        self._agents = dict(agents)
        self._step_up = dict(step_up or {})
        self._environment = environment
        self._budgets = dict(budgets or {})
        self._made: dict[str, Permission] = {}
        self.digest = canonical.digest([[_said(agent) for agent in self._agents.values()], self._step_up])

    @property
    def declared(self) -> bool:
        """Whether agents are told apart."""
        return bool(self._agents)

    def budgets(self, principal: Principal) -> list[tuple[str, str, CostBudget]]:
        """What its calls are charged to: under which name, in words, and how much that has."""
        found: list[tuple[str, str, CostBudget]] = []
        agent = self._agents.get(principal.agent)
        if agent is not None and agent.budget is not None:
            found.append((f"{principal.key}:cost", f"agent {agent.name}", agent.budget))
        if (shared := self._budgets.get(principal.tenant)) is not None:
            found.append((f"{principal.tenant}:cost", f"tenant {principal.tenant}", shared))
        return found

    def of(self, principal: Principal) -> Permission:
        if not self._agents or principal.kind == "system":
            return UNLIMITED
        agent = self._agents.get(principal.agent)
        if agent is None or agent.tenant != principal.tenant:
            return _UNKNOWN
        made = self._made.get(agent.name)
        if made is None:
            made = self._made[agent.name] = self._permission(agent)
        return made

    def _permission(self, agent: AgentSpec) -> Permission:
        here = self._environment
        if agent.environments is not None and here not in agent.environments:
            return Permission(agent, f"The agent {agent.name!r} may call nothing in the environment {here!r}.")
        return Permission(agent)

    def lacking(self, principal: Principal, capability: str) -> tuple[str, ...]:
        """The scopes that a principal's token lacks for this capability; none where it is not limited by scopes."""
        if principal.scopes is None or not self._step_up:
            return ()
        return tuple(
            scope
            for scope, patterns in self._step_up.items()
            if scope not in principal.scopes and any(fnmatchcase(capability, pattern) for pattern in patterns)
        )

    def require_scope(self, principal: Principal, capability: str) -> None:
        """Raises Refused."""
        if scopes := self.lacking(principal, capability):
            text = (
                f"The token lacks the scope {' '.join(scopes)} for {quoted(capability, 128)}; ask for one that has it."
            )
            raise Refused(Status.DENIED, "insufficient_scope", text)

    def standing(self, tenant: str, agent: str) -> Principal | None:
        """An agent that has something since before, as it is now; None where it is not declared any more."""
        if not self._agents:
            return Principal(agent, tenant)
        found = self._agents.get(agent)
        if found is None or found.tenant != tenant:
            return None
        return Principal(agent, tenant, found.person, found.roles)

    def same(self, other: Permissions, principal: Principal) -> bool:
        """Whether a principal is the same one to both: rules and people go by its roles and by whom it acts for."""
        mine, theirs = self._agents.get(principal.agent), other._agents.get(principal.agent)
        if mine is None or theirs is None:
            return self.declared == other.declared and mine is theirs
        return (mine.tenant, mine.roles, mine.person) == (theirs.tenant, theirs.roles, theirs.person)


_UNKNOWN = Permission(None, "The caller is none of the agents that this gateway was told of, so it may call nothing.")


def _said(agent: AgentSpec) -> Json:
    return {**asdict(agent), "roles": sorted(agent.roles)}


EVERYTHING = Permissions({}, "")
"""Where nobody told agents apart."""
