"""What policy says of a call: pure, default-deny, and an error denies.

Rules join thus: `deny` beats all; otherwise `ask` and `sandbox` both apply when both match (an approval never
removes the sandbox); `warn` and `audit` allow and mark; `allow` allows; nothing matched leaves the default.
`docs/policy.md` has the presets as a table, and a test reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

import re2

from ringfence import canonical
from ringfence.expression import Expression, ExpressionError, variables
from ringfence.model import Action, Call, Contract, Decision, Json, Mode, Rule

ANY_ARGUMENT = "*"
"""As the name in `argument_patterns`: any string in the arguments, at any depth, keys included."""

_CACHED = 4096
"""Calls name tools as they like, so what is remembered per tool is bounded."""
_JOINED = 64
"""Likewise for what their arguments make of its rules."""

RuleProblem = tuple[tuple[str | int, ...], str, int, int]
"""Path of the field inside the rule, what is wrong, and the line and column (from 0) inside the field's text."""


# ── Presets ───────────────────────────────────────────────────────────────────────────────────────


def _preset(prefix: str, table: Mapping[Mode, Sequence[Action]], asi: Mapping[Action, str] | None = None) -> list[Rule]:
    rules = []
    for mode, actions in table.items():
        for action in actions:
            suffix = f"-{action.value}" if len(actions) > 1 else ""
            rules.append(
                Rule(
                    id=f"{prefix}-{mode.value.replace('_', '-')}{suffix}",
                    action=action,
                    name=f"{action.value} {mode.value} capabilities",
                    priority=0,  # an operator's own rules are reported first
                    modes=(mode,),
                    owasp_asi_id=asi[action] if asi else None,
                )
            )
    return rules


def _no_leak(rule_id: str, name: str, pattern: str, asi: str) -> Rule:
    return Rule(
        id=rule_id,
        action=Action.DENY,
        name=name,
        priority=0,
        argument_patterns={ANY_ARGUMENT: pattern},
        when='"external_sink" in contract.labels',
        owasp_asi_id=asi,
    )


_CAUTIOUS = {
    Mode.READ: (Action.AUDIT,),
    Mode.WRITE: (Action.ASK,),
    Mode.HIGH_RISK: (Action.ASK, Action.SANDBOX),
}

PRESETS: Mapping[str, tuple[Rule, ...]] = {
    "none": (),
    "permissive": tuple(
        _preset("perm", {Mode.READ: (Action.ALLOW,), Mode.WRITE: (Action.ALLOW,), Mode.HIGH_RISK: (Action.AUDIT,)})
    ),
    "standard": tuple(
        _preset("std", {Mode.READ: (Action.ALLOW,), Mode.WRITE: (Action.AUDIT,), Mode.HIGH_RISK: (Action.WARN,)})
    ),
    "strict": tuple(_preset("strict", _CAUTIOUS)),
    "owasp-asi": (
        *_preset("asi", _CAUTIOUS, {Action.AUDIT: "ASI-01", Action.ASK: "ASI-02", Action.SANDBOX: "ASI-05"}),
        _no_leak(
            "asi-private-key",
            "No private key to an outside sink",
            r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-[0-9]|AGE-SECRET-KEY-1",
            "ASI-03",
        ),
        _no_leak(
            "asi-cloud-key",
            "No cloud access key to an outside sink",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[0-9A-Za-z_\-]{35}|\bya29\.[0-9A-Za-z_\-]{20,}"
            r"|AccountKey=[A-Za-z0-9+/]{40,}|\bLTAI[A-Za-z0-9]{12,20}\b",
            "ASI-03",
        ),
    ),
}


# ── Reading a rule ────────────────────────────────────────────────────────────────────────────────

_options = re2.Options()
_options.log_errors = False  # the engine would write the pattern to stderr


def rule_problems(rule: Rule) -> list[RuleProblem]:
    """Everything that keeps this rule from being used; empty when it is fine."""
    problems: list[RuleProblem] = []

    def pattern(path: tuple[str | int, ...], text: str) -> None:
        try:
            re2.compile(text, _options)
        except re2.error as exc:
            problems.append((path, f"bad pattern: {_re2_text(exc)}", 0, 0))
        except UnicodeEncodeError:
            problems.append((path, "bad pattern: a lone surrogate is not text", 0, 0))

    for index, text in enumerate(rule.tool_patterns):
        pattern(("tool_patterns", index), text)
    for name, text in rule.argument_patterns.items():
        pattern(("argument_patterns", name), text)
    if rule.when is not None:
        try:
            Expression(rule.when)
        except ExpressionError as exc:
            problems.append((("when",), exc.text, exc.line - 1, exc.column - 1))
    if rule.approval is not None and rule.action is not Action.ASK:
        problems.append((("approval",), f"only a rule with action ask may name one, this one is {rule.action}", 0, 0))
    return problems


def _re2_text(exc: Exception) -> str:
    detail = exc.args[0] if exc.args else ""
    text = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
    if "perl operator" in text:
        return f"{text} (RE2 has no lookaround)"
    if re.search(r"escape sequence: \\[1-9]", text):
        return f"{text} (RE2 has no backreferences)"
    return text


class _Compiled:
    """A rule made ready: what a tool, agent or server settles for good apart from what each call must be asked."""

    __slots__ = ("arguments", "prefixes", "rule", "tool_patterns", "when")

    def __init__(self, rule: Rule) -> None:
        problems = rule_problems(rule)
        if problems:
            raise ValueError(f"rule {rule.id!r}: " + "; ".join(text for _, text, _, _ in problems))
        self.rule = rule
        self.prefixes = tuple(_literal_prefix(p).encode() for p in rule.tool_patterns) or (b"",)
        self.tool_patterns = [re2.compile(p, _options) for p in rule.tool_patterns]
        self.arguments = [(name, re2.compile(p, _options)) for name, p in rule.argument_patterns.items()]
        self.when = Expression(rule.when) if rule.when is not None else None

    @property
    def settled(self) -> bool:
        return not self.arguments and self.when is None

    def applies(self, tool: bytes, agent: str, server: str | None, mode: Mode) -> bool:
        """Everything but arguments and condition."""
        rule = self.rule
        if self.tool_patterns and not any(pattern.fullmatch(tool) for pattern in self.tool_patterns):
            return False
        if rule.modes and mode not in rule.modes:
            return False
        if rule.agents and not any(fnmatchcase(agent, glob) for glob in rule.agents):
            return False
        return not rule.servers or (server is not None and any(fnmatchcase(server, glob) for glob in rule.servers))

    def matches(self, arguments: Json, see: Callable[[], Json]) -> bool:
        """The rest. Whatever goes wrong in here raises, and denies."""
        for name, regex in self.arguments:
            if name == ANY_ARGUMENT:
                if not any(regex.search(text) for text in _strings(arguments)):
                    return False
            elif name not in arguments or not regex.search(_text(arguments[name])):
                return False
        return self.when is None or self.when.test(see())


def _literal_prefix(pattern: str) -> str:
    """Characters that every match must begin with: the index that spares a call most rules about other tools."""
    if "|" in pattern or "(?" in pattern:
        return ""
    run = re.match(r"[A-Za-z0-9_\-]*", pattern)
    prefix = run.group() if run else ""
    return prefix[:-1] if pattern[len(prefix) : len(prefix) + 1] in {"*", "?", "+", "{"} else prefix


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical.dumps(value).decode("utf-8")


def _strings(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)


# ── Deciding ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The rules that can match calls of one tool by one agent, highest priority first."""

    rules: tuple[_Compiled, ...]
    settled: Decision | None
    """The decision itself, but for its id, where no rule looks at the call's arguments or condition."""
    joined: dict[int, Decision] = field(default_factory=dict)
    """Where some do: what those that matched come to, by their places as bits."""


class Policy:
    """Rules in force in one environment."""

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        preset: str = "standard",
        default: Literal["deny", "allow_read"] = "deny",
        environment: str,
    ) -> None:
        """Raises ValueError for a rule or preset that cannot be used; `rule_problems` says which and where."""
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}")
        every = [*rules, *PRESETS[preset]]
        self.environment = environment
        self.digest = canonical.digest(
            {"environment": environment, "default": default, "preset": preset, "rules": [asdict(r) for r in every]}
        )
        self._default = default
        usable = [r for r in every if r.enabled and (not r.environments or environment in r.environments)]
        self._rules = [_Compiled(r) for r in sorted(usable, key=lambda r: -r.priority)]  # stable: file order within
        self._cache: dict[tuple[str, str, str | None, Mode], _Candidates] = {}

    def decide(self, call: Call, contract: Contract) -> Decision:
        """What the rules say of this call. Never raises for what a caller sent."""
        candidates = self._candidates(call, contract)
        if candidates.settled is not None:
            return _with_new_id(candidates.settled)
        matched = 0
        errors: list[str] = []
        seen: Json = {}

        def see() -> Json:
            if not seen:
                seen.update(variables(call, contract, self.environment))
            return seen

        for place, compiled in enumerate(candidates.rules):
            try:
                if compiled.matches(call.arguments, see):
                    matched |= 1 << place
            except (ValueError, TypeError, RecursionError) as exc:
                errors.append(f"rule {compiled.rule.id!r} could not be evaluated: {_harmless(exc, compiled.rule)}")
        decision = None if errors else candidates.joined.get(matched)
        if decision is None:
            rules = [compiled.rule for place, compiled in enumerate(candidates.rules) if matched >> place & 1]
            decision = self._join(rules, errors, contract.mode)
            if not errors and len(candidates.joined) < _JOINED:
                candidates.joined[matched] = decision
        return _with_new_id(decision)

    def never_allows(self, call: Call, contract: Contract) -> bool:
        """Whether calls like this one are denied whatever their arguments are."""
        settled = self._candidates(call, contract).settled
        return settled is not None and not settled.allowed

    def _candidates(self, call: Call, contract: Contract) -> _Candidates:
        server = contract.server if contract.server is not None else call.server
        key = (call.tool, call.principal.agent, server, contract.mode)
        found = self._cache.get(key)
        if found is not None:
            return found
        try:
            name = call.tool.encode()  # once for all patterns
        except UnicodeEncodeError:
            return _Candidates((), self._join([], ["the tool's name is not text"], contract.mode))
        rules = tuple([r for r in self._rules if name.startswith(r.prefixes) and r.applies(name, *key[1:])])
        settled = None
        if all(rule.settled for rule in rules):
            settled = self._join([rule.rule for rule in rules], [], contract.mode)
        found = _Candidates(rules, settled)
        if len(self._cache) >= _CACHED:
            self._cache.pop(next(iter(self._cache)), None)
        self._cache[key] = found
        return found

    def _join(self, matched: Sequence[Rule], errors: Sequence[str], mode: Mode) -> Decision:
        actions = {rule.action for rule in matched}
        asks = tuple(dict.fromkeys(rule.approval or "always" for rule in matched if rule.action is Action.ASK))
        by_default = not matched and self._default == "allow_read" and mode is Mode.READ
        allowed = not errors and Action.DENY not in actions and (bool(matched) or by_default)
        return Decision(
            id="",
            allowed=allowed,
            reason=_reason(matched, errors, by_default),
            rules=tuple(rule.id for rule in matched),
            asks=asks if allowed else (),
            sandbox=allowed and Action.SANDBOX in actions,
            marks=tuple(rule.id for rule in matched if rule.action in (Action.WARN, Action.AUDIT)),
            error="; ".join(errors) or None,
            policy_digest=self.digest,
        )


def _with_new_id(decision: Decision) -> Decision:
    # Spelled out: this is on every call's way, and dataclasses.replace is several times slower.
    return Decision(
        canonical.new_id("dec"),
        decision.allowed,
        decision.reason,
        decision.rules,
        decision.asks,
        decision.sandbox,
        decision.marks,
        decision.error,
        decision.policy_digest,
    )


def _reason(matched: Sequence[Rule], errors: Sequence[str], by_default: bool) -> str:
    if errors:
        return "denied: " + "; ".join(errors)
    if not matched:
        return "allowed: no rule matched and the default allows reads" if by_default else "denied: no rule matched"
    denies = _named(matched, Action.DENY)
    if denies:
        return f"denied by {denies}"
    parts = []
    if asks := _named(matched, Action.ASK):
        parts.append(f"a person must agree ({asks})")
    if boxed := _named(matched, Action.SANDBOX):
        parts.append(f"only in a sandbox ({boxed})")
    if marks := _named(matched, Action.WARN, Action.AUDIT):
        parts.append(f"marked by {marks}")
    if allows := _named(matched, Action.ALLOW):
        parts.append(f"allowed by {allows}")
    return "; ".join(parts)


def _named(matched: Sequence[Rule], *actions: Action) -> str:
    return ", ".join(f"{r.id} ({r.name})" if r.name else r.id for r in matched if r.action in actions)


_MISSING_KEY = re.compile(r'Key not found in map : "(\w+)"$')
_TYPES_ONLY = re.compile(r"(No matching overloads found : [\w+*/%<>=!&|\-]+\([\w, ]*\)|gave \w+, not true or false)$")


def _harmless(exc: Exception, rule: Rule) -> str:
    """What went wrong, without the argument values that the engine's own text may quote: it goes into the record."""
    if not isinstance(exc, ExpressionError):
        return "an argument is not plain JSON"
    missing = _MISSING_KEY.search(exc.text)
    if missing and missing.group(1) in (rule.when or ""):
        return f"no such key: {missing.group(1)}"
    types = _TYPES_ONLY.search(exc.text)
    return types.group(1) if types else "its condition failed on these arguments"
