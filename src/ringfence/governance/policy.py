"""What policy says of a call: pure, default-deny, and an error denies.

Rules join thus: `deny` beats all; otherwise `ask` and `sandbox` both apply when both match (an approval never
removes the sandbox); `warn` and `audit` allow and mark; `allow` allows; nothing matched leaves the default. A rule in
shadow mode takes no part: what it would have changed is told beside the decision.
`docs/policy.md` has the presets as a table, and a test reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal
from urllib.parse import unquote

import re2

from ringfence.core import canonical
from ringfence.core.expression import VARIABLES, Expression, ExpressionError, variables, while_others_are_served
from ringfence.core.invisible import folded
from ringfence.core.labels import PRIVATE, SINK, UNTRUSTED, flow_of, may_send
from ringfence.core.model import Action, Call, Contract, Decision, Json, Mode, Principal, Rule, Shadow
from ringfence.core.record import dataclass
from ringfence.governance import uris
from ringfence.secrets.redaction import SecretMatcher

ANY_ARGUMENT = "*"
"""As the name in `argument_patterns`: any string in the arguments, at any depth, keys included."""

AS_SENT = "as_sent"
"""The form of text that a pattern is tried on first: a string itself, anything else as its JSON."""
FORMS = (AS_SENT, "string", "joined", "carried", "normalized")
"""Then each string and key inside; lists joined by a space; what comes beside the arguments (answers to a server's
questions, `_meta`, the session that it runs in); and all of these with what looks alike made alike."""
OTHER_NAME = "other_name"
"""In place of `as_sent`, where a rule matched another name of a prompt than the one that it was asked for by."""

LARGE_BYTES = 16_384
"""What a call brings, as JSON, beyond which presets have people asked before it is sent out of our hands."""

SHADOW = "shadow"
"""The mode of rules that decide nothing."""

_MANY = 32
"""From so many texts on, a pattern is first tried on all of them together."""
_MAX_SEARCHES = 2_000_000
"""So many texts may rules have to look at one by one for one call: some seconds of work."""
_CACHED = 4096
_LONGEST_CACHED = 512
"""Calls name resources as they like, so what is remembered by name is bounded, in number and in length."""
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


def _flow_rules(prefix: str, asi: Sequence[str | None]) -> Iterator[Rule]:
    """What people are asked of a call that sends something out of our hands."""
    sends = partial(Rule, action=Action.ASK, priority=0, sink=True)
    name = "ask before private data may follow what others wrote"
    yield sends(f"{prefix}-flow", name=name, taint_all=(UNTRUSTED, PRIVATE), owasp_asi_id=asi[0])
    yield sends(f"{prefix}-export-large", name="ask before much is sent out", exports="large", owasp_asi_id=asi[1])
    name = "ask before what looks like a secret is sent out"
    yield sends(f"{prefix}-export-secret", name=name, exports="secrets", owasp_asi_id=asi[1])


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

_PRIVATE_KEY = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-[0-9]|AGE-SECRET-KEY-1"
"""How a private key begins. What follows may come in another call, so this alone is a secret where it is sent out."""

PRESETS: Mapping[str, tuple[Rule, ...]] = {
    "none": (),
    "permissive": tuple(
        _preset("perm", {Mode.READ: (Action.ALLOW,), Mode.WRITE: (Action.ALLOW,), Mode.HIGH_RISK: (Action.AUDIT,)})
    ),
    "standard": tuple(
        _preset("std", {Mode.READ: (Action.ALLOW,), Mode.WRITE: (Action.AUDIT,), Mode.HIGH_RISK: (Action.WARN,)})
    ),
    "strict": (*_preset("strict", _CAUTIOUS), *_flow_rules("strict", (None, None))),
    "owasp-asi": (
        *_preset("asi", _CAUTIOUS, {Action.AUDIT: "ASI-01", Action.ASK: "ASI-02", Action.SANDBOX: "ASI-05"}),
        *_flow_rules("asi", ("ASI-01", "ASI-02")),
        _no_leak(
            "asi-private-key",
            "No private key to an outside sink",
            _PRIVATE_KEY,
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
    for path in rule.conditions:
        if path.partition(".")[0] not in VARIABLES:
            text = (
                f"nothing is called {path!r}; a condition names what `when` sees, such as contract.mode or agent.name"
            )
            problems.append((("conditions", path), text, 0, 0))
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

    __slots__ = ("arguments", "forms", "prefixes", "rule", "tool_patterns", "when")

    def __init__(self, rule: Rule) -> None:
        problems = rule_problems(rule)
        if problems:
            raise ValueError(f"rule {rule.id!r}: " + "; ".join(text for _, text, _, _ in problems))
        self.rule = rule
        self.prefixes = tuple(_literal_prefix(p).encode() for p in rule.tool_patterns) or (b"",)
        self.tool_patterns = [re2.compile(p, _options) for p in rule.tool_patterns]
        self.arguments = [(n, re2.compile(p, _options), _over_lines(p)) for n, p in rule.argument_patterns.items()]
        self.when = Expression(rule.when) if rule.when is not None else None
        others = len(FORMS) if rule.normalize else len(FORMS) - 1
        self.forms = 1 if rule.action is Action.ALLOW else others
        """How many forms of text its patterns are tried on."""

    @property
    def settled(self) -> bool:
        return not self.arguments and self.when is None and not of_flow(self.rule) and not self.rule.conditions

    def applies(self, tool: bytes, agent: str, server: str | None, mode: Mode, sends: bool) -> bool:
        """Everything but arguments, labels and condition. `sends`: whether such a call can send anything outside."""
        rule = self.rule
        if rule.sink and not sends:
            return False
        if self.tool_patterns and not any(pattern.fullmatch(tool) for pattern in self.tool_patterns):
            return False
        if rule.modes and mode not in rule.modes:
            return False
        if rule.agents and not any(fnmatchcase(agent, glob) for glob in rule.agents):
            return False
        return not rule.servers or (server is not None and any(fnmatchcase(server, glob) for glob in rule.servers))

    def matches(self, seen: _Seen, see: Callable[[], Json]) -> str | None:
        """The rest: None, or the form of text that its patterns were found in. Whatever goes wrong raises, and denies.

        A rule that allows is held to the arguments as they were sent: no other reading of them may allow more.
        """
        rule = self.rule
        if (of_flow(rule) and not _flows(rule, seen)) or (rule.conditions and not _holds(rule.conditions, see())):
            return None
        found = 0
        for name, regex, over_lines in self.arguments:
            form = self._form(name, regex, over_lines, seen)
            if form is None:
                return None
            found = max(found, form)
        return FORMS[found] if self.when is None or self.when.test(see()) else None

    def _form(self, name: str, regex: Any, over_lines: Any, seen: _Seen) -> int | None:
        search = regex.search
        for form, texts in seen.texts(name):
            if form >= self.forms:
                return None
            if len(texts) > _MANY:
                if over_lines is not None and not over_lines.search(seen.lines(texts)):
                    continue
                seen.spend(len(texts))
            for text in texts:
                if search(text):
                    return form
        return None


def of_flow(rule: Rule) -> bool:
    """Whether a rule looks at labels, or at what is sent outside."""
    return bool(rule.taint_labels or rule.taint_all or rule.sink)


def _flows(rule: Rule, seen: _Seen) -> bool:
    flow = seen.flow
    if (rule.sink and SINK not in flow.own) or not {*rule.taint_all}.issubset(flow.labels):
        return False
    if rule.taint_labels and {*rule.taint_labels}.isdisjoint(flow.labels):
        return False
    return not rule.exports or seen.exports(rule.exports)


def _holds(conditions: Mapping[str, Any], see: Json) -> bool:
    """Whether each name stands for its value; where it stands for a list, whether that has it."""
    for path, wanted in conditions.items():
        found: Any = see
        for name in path.split("."):
            if not isinstance(found, Mapping) or name not in found:
                return False
            found = found[name]
        listed = isinstance(found, list | tuple) and not isinstance(wanted, list)
        if type(wanted) is bool or type(found) is bool:
            if found is not wanted:
                return False
        elif wanted not in found if listed else found != wanted:
            return False
    return True


def _over_lines(pattern: str) -> Any:
    """The pattern for many texts at once, each on a line of its own: where it is not found there, it is in none of
    them. None where that cannot be said: the pattern asks for the beginning or the end of the whole."""
    if any(mark in pattern for mark in ("\\A", "\\z", "\\Q", "-m", "-i", "-s", "-U")):
        return None
    return re2.compile(f"(?m){pattern}", _options)


_ONE_LINE = bytes.maketrans(b"\t\n\r", b"   ")
_CONTROLS = bytes(number for number in (*range(0x20), 0x7F) if number not in b"\t\n\r")


class _TooMany(ValueError):
    """The arguments hold more values, or longer ones, than patterns can be tried on."""


_MAX_FOLDED = 4_000_000
"""Characters that the normalized forms of one call's texts may have: one of a caller's can become eighteen."""


class _Seen:
    """The texts of one call that patterns are tried on, made when the first rule wants them."""

    __slots__ = ("_call", "_exports", "_foldable", "_left", "_lines", "_made", "flow")

    def __init__(self, call: Call, contract: Contract) -> None:
        self._call = call
        self.flow = flow_of(call, contract)
        self._exports: tuple[bool, bool] | None = None
        self._made: dict[str, list[tuple[int, list[bytes]]]] = {}
        self._lines: dict[int, bytes] = {}
        self._left = _MAX_SEARCHES
        self._foldable = _MAX_FOLDED

    def lines(self, texts: list[bytes]) -> bytes:
        """Many texts as one, each on lines of its own."""
        found = self._lines.get(id(texts))
        if found is None:
            found = self._lines[id(texts)] = b"\n".join(texts)
        return found

    def exports(self, what: str) -> bool:
        """Whether what it brings is `large`, or has `secrets` by their shape."""
        if self._exports is None:
            call = self._call
            every = canonical.dumps([call.arguments, call.inputs, call.meta, dict(call.traced)])
            texts = (text.encode() for text in (*_strings(call.arguments), *_strings([call.inputs, call.meta])))
            secret = any(_shapes().matches(text) or _begins_key().search(text) is not None for text in texts)
            self._exports = (len(every) > LARGE_BYTES, secret)
        return self._exports[0 if what == "large" else 1]

    def spend(self, searches: int) -> None:
        """Raises _TooMany, which denies the call, where the rules would have to look at too many texts."""
        self._left -= searches
        if self._left < 0:
            raise _TooMany

    def texts(self, name: str) -> list[tuple[int, list[bytes]]]:
        """The texts by the number of their form; forms without text are left out."""
        made = self._made.get(name)
        if made is None:
            # Encoded once for all patterns; what cannot be encoded is no text, and an error denies.
            forms = [[text.encode() for text in texts] for texts in self._forms(name)]
            forms.append([alike for texts in forms for alike in self._all_normalized(texts)])
            made = self._made[name] = [(form, texts) for form, texts in enumerate(forms) if texts]
        return made

    def _all_normalized(self, texts: list[bytes]) -> Iterator[bytes]:
        if len(texts) > _MANY:  # then one look at all of them spares a look at each
            whole = b" ".join(texts)
            if whole.isascii() and whole.translate(_ONE_LINE, _CONTROLS) == whole:
                return
        for text in texts:
            yield from self._normalized(text)

    def _normalized(self, text: bytes) -> Iterator[bytes]:
        """The text with what looks alike made alike, where that makes a difference: with its lines, and as one line."""
        strange = not text.isascii() or _has_controls(text)
        if strange:
            try:
                form = folded(text.decode(), self._foldable)
            except UnicodeError:
                raise
            except ValueError:
                raise _TooMany from None
            self._foldable -= len(form)
            text = form.encode()
            yield text
        line = text.translate(_ONE_LINE)
        if line != text:
            yield line

    def _forms(self, name: str) -> Iterator[Iterable[str]]:
        """The forms in the order of FORMS, all but the last."""
        call = self._call
        arguments = self._call.arguments
        if name == ANY_ARGUMENT:
            yield _strings(arguments)
            yield ()
            yield _joined(arguments)
        elif call.kind in _NAMES_WITHIN:
            yield from self._forms_within(name)
        elif name not in arguments:
            yield from ((), (), ())
        else:
            value = arguments[name]
            yield (_text(value),)
            yield () if isinstance(value, str) else _strings(value)
            yield () if isinstance(value, str) else _joined(value)
        if call.inputs or call.meta or call.traced or call.box:
            beside = list(_carried(call, name))
            yield (*map(_text, beside), *_strings(beside), *_joined(beside))
        else:
            yield ()

    def _forms_within(self, name: str) -> Iterator[Iterable[str]]:
        """Of a prompt or completion, the first three: what is under the name itself, and what the server gets by it."""
        arguments = self._call.arguments
        within = list(_within(self._call, name))
        plain = [arguments[name]] if name in arguments else []
        if not plain and self._call.kind == "prompt":
            plain, within = within, []  # nothing else has this name, so it is an argument as a tool's is
        # A completion has the same name in two places, and what allows one of them must not allow the other.
        yield map(_text, plain)
        values = (*plain, *within)
        yield (*map(_text, within), *_strings([value for value in values if not isinstance(value, str)]))
        yield (text for value in values for text in _joined(value))


_NAMES_WITHIN = ("prompt", "completion")
"""Kinds of calls whose arguments have names of their own, one level further down."""


def _within(call: Call, name: str) -> Iterator[Any]:
    """What a prompt, or a completion for one or for a resource's template, is given under this name."""
    argument = call.arguments.get("argument")
    context = call.arguments.get("context")
    if call.kind == "completion" and isinstance(argument, Mapping) and argument.get("name") == name:
        yield argument.get("value")
    given = call.arguments if call.kind == "prompt" else context
    place = given.get("arguments") if isinstance(given, Mapping) else None
    if isinstance(place, Mapping) and name in place:
        yield place[name]


@cache
def _shapes() -> SecretMatcher:
    return SecretMatcher()


@cache
def _begins_key() -> Any:
    return re2.compile(_PRIVATE_KEY.encode(), _options)


def _has_controls(text: bytes) -> bool:
    return len(text.translate(None, _CONTROLS)) < len(text)


def _carried(call: Call, name: str) -> Iterator[Any]:
    """What reaches a server beside the arguments: under this name, or under any."""
    if name == ANY_ARGUMENT:
        yield from filter(None, (call.inputs, call.meta))
        for text in call.traced.values():
            yield from (text, unquote(text))
        if call.box:
            yield call.box
        return
    if call.box and name == "session":
        yield call.box
    if name in call.traced:
        yield from (call.traced[name], unquote(call.traced[name]))
    # An answer's key is the server's own; from there on, blocks, roots and objects are as deep as they like.
    stack: list[tuple[Any, bool]] = [(item, False) for item in (*(call.inputs or {}).values(), call.meta)]
    while stack:
        item, seen = stack.pop()
        if isinstance(item, Mapping):
            for key, value in item.items():
                plain = not isinstance(value, Mapping | list | tuple)
                # What lies within a field of this name was yielded with it; once more only where that costs little.
                if key == name and (plain or not seen):
                    yield value
                if not plain:
                    stack.append((value, seen or key == name))
        elif isinstance(item, list | tuple):
            stack.extend((each, seen) for each in item)


def _joined(value: Any) -> Iterator[str]:
    """Every list of plain values in it, at any depth, as one line: how a command is often written."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(each for each in item if isinstance(each, Mapping | list | tuple))
            if len(item) > 1 and any(isinstance(each, str) for each in item):
                yield " ".join(_text(each) for each in item if not isinstance(each, Mapping | list | tuple))


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
    shadows: tuple[_Compiled, ...] = ()
    """Those in shadow mode, which are no part of the rest."""
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
        enforced = [rule for rule in every if rule.mode != SHADOW]
        self.enforced_digest = self.digest
        """Without the rules in shadow mode: whatever is bound to what is decided goes by this one."""
        if len(enforced) < len(every):
            ruled = [asdict(rule) for rule in enforced]
            self.enforced_digest = canonical.digest(
                {"environment": environment, "default": default, "preset": preset, "rules": ruled}
            )
        self.rules = tuple(every)
        """All of them, those of the preset last."""
        self._default = default
        self._of_labels = frozenset(rule.id for rule in every if of_flow(rule) or "flow" in (rule.when or ""))
        self._actions = {rule.id: rule.action for rule in every}
        usable = [r for r in every if r.enabled and (not r.environments or environment in r.environments)]
        ordered = [_Compiled(r) for r in sorted(usable, key=lambda r: -r.priority)]  # stable: file order within
        self._rules = [compiled for compiled in ordered if compiled.rule.mode != SHADOW]
        self._shadows = [compiled for compiled in ordered if compiled.rule.mode == SHADOW]
        self._cache: dict[tuple[str, str, str | None, Mode, bool], _Candidates] = {}

    def decide(self, call: Call, contract: Contract) -> Decision:
        """What the rules say of this call. Never raises for what a caller sent."""
        if others := _other_names(call, contract):
            return self._decide_by_names(call, contract, others)
        candidates = self._candidates(call, contract)
        shadows = candidates.shadows
        if candidates.settled is not None and not shadows:
            return _with_new_id(candidates.settled)
        matched = 0
        errors: list[str] = []
        forms: dict[str, str] = {}
        known: Json = {}
        seen = _Seen(call, contract)

        def see() -> Json:
            if not known:
                known.update(variables(call, contract, self.environment))
            return known

        for place, compiled in enumerate(candidates.rules):
            form = _matched(compiled, seen, see, errors)
            if form is not None:
                matched |= 1 << place
                if form != AS_SENT:
                    forms[compiled.rule.id] = form
        usual = not errors and not forms
        decision = candidates.settled or (candidates.joined.get(matched) if usual else None)
        rules: list[Rule] = []
        if decision is None or shadows:
            rules = [compiled.rule for place, compiled in enumerate(candidates.rules) if matched >> place & 1]
        if decision is None:
            decision = self._join(rules, errors, contract.mode, forms)
            if usual and len(candidates.joined) < _JOINED:
                candidates.joined[matched] = decision
        if shadows:
            # After all others: nothing that is spent on these can be missing there.
            wrong: list[str] = []
            also = [(each.rule, form) for each in shadows if (form := _matched(each, seen, see, wrong)) is not None]
            decision = self._shadowed(decision, rules, forms, also, (errors, wrong), contract.mode)
        return _with_new_id(decision)

    def _shadowed(
        self,
        decision: Decision,
        rules: Sequence[Rule],
        forms: Mapping[str, str],
        also: Sequence[tuple[Rule, str]],
        errors: tuple[Sequence[str], Sequence[str]],
        mode: Mode,
    ) -> Decision:
        """The decision, with what it would have been had the rules in shadow mode that matched been in force. `errors`
        are those of the others, and theirs."""
        wrong = errors[1]
        if not also and not wrong:
            return decision
        every = sorted([*rules, *(rule for rule, _ in also)], key=lambda rule: -rule.priority)
        would = self._join(
            every, [*errors[0], *wrong], mode, {**forms, **{r.id: form for r, form in also if form != AS_SENT}}
        )
        error = "; ".join(wrong) or None
        shadow = Shadow(tuple(rule.id for rule, _ in also), verdict(would), would.reason, error)
        return replace(decision, shadow=shadow)

    async def decided(self, call: Call, contract: Contract) -> Decision:
        """The same as `decide`, while others are served."""
        return await while_others_are_served(call, partial(self.decide, call, contract))

    def _decide_by_names(self, call: Call, contract: Contract, others: Iterable[str]) -> Decision:
        """The same for what has several names: a rule allows by the one that was used, and restricts by any."""
        found: dict[int, str] = {}
        errors: list[str] = []
        wrong: list[str] = []
        for name in (call.tool, *others):
            named = replace(call, tool=name)
            candidates = self._candidates(named, contract)
            if candidates.settled is not None and candidates.settled.error is not None:
                errors.append(candidates.settled.error)
            seen, see = _Seen(named, contract), partial(variables, named, contract, self.environment)
            for compiled in (*candidates.rules, *candidates.shadows):
                other = name != call.tool
                if id(compiled) in found or (other and compiled.rule.action is Action.ALLOW):
                    continue
                form = _matched(compiled, seen, see, wrong if compiled.rule.mode == SHADOW else errors)
                if form is not None:
                    found[id(compiled)] = OTHER_NAME if other and form == AS_SENT else form
        rules = [compiled.rule for compiled in self._rules if id(compiled) in found]
        matched = [(compiled.rule, found[id(compiled)]) for compiled in self._rules if id(compiled) in found]
        forms = {rule.id: form for rule, form in matched if form != AS_SENT}
        errors, wrong = list(dict.fromkeys(errors)), list(dict.fromkeys(wrong))
        decision = self._join(rules, errors, contract.mode, forms)
        also = [(compiled.rule, found[id(compiled)]) for compiled in self._shadows if id(compiled) in found]
        return _with_new_id(self._shadowed(decision, rules, forms, also, (errors, wrong), contract.mode))

    def decisive(self, decision: Decision) -> tuple[str, ...]:
        """Of the rules that matched, those that made the decision what it is: none where the default or an error
        did."""
        if decision.error is not None:
            return ()
        wanted = ((Action.ASK, Action.SANDBOX), (Action.ALLOW, Action.AUDIT, Action.WARN))
        for actions in wanted if decision.allowed else ((Action.DENY,),):
            if found := tuple(name for name in decision.rules if self._actions.get(name) in actions):
                return found
        return ()

    def weigh(self, call: Call, contract: Contract, known: Known) -> Weighed:
        """What the rules say of a call whose arguments, and what comes beside them, are not known; the call has none.

        `known` may tell of a rule that looks at these whether it matches. The three values are yes, no and not known:
        what comes out are all verdicts that are possible."""
        errors: list[str] = []
        matched: dict[str, tuple[Rule, str]] = {}
        open_: dict[str, Rule] = {}
        for name in (call.tool, *_other_names(call, contract)):
            named = replace(call, tool=name)
            see = partial(variables, named, contract, self.environment)
            for compiled in self._candidates(named, contract).rules:
                rule, other = compiled.rule, name != call.tool
                if rule.id in matched or (other and rule.action is Action.ALLOW):
                    continue
                found = self._weighed(compiled, (named, contract), see, known)
                if found is None:
                    open_[rule.id] = rule
                elif found == FAILS:
                    errors.append(f"rule {rule.id!r} could not be evaluated")
                elif found != MISSES:
                    matched[rule.id] = (rule, OTHER_NAME if other and found == AS_SENT else found)
        for name in matched:
            open_.pop(name, None)
        every = [matched[compiled.rule.id] for compiled in self._rules if compiled.rule.id in matched]
        forms = {rule.id: form for rule, form in every if form != AS_SENT}
        decision = self._join([rule for rule, _ in every], list(dict.fromkeys(errors)), contract.mode, forms)
        certain = self._flags(every, errors, contract.mode)
        one_by_one = [name for name, rule in open_.items() if len(_verdicts(certain, [_may(rule)])) > 1]
        verdicts = _verdicts(certain, map(_may, open_.values()))
        depends = () if len(verdicts) == 1 else tuple(one_by_one or open_)
        return Weighed(verdicts, decision, depends, tuple(open_))

    def _weighed(
        self, compiled: _Compiled, of: tuple[Call, Contract], see: Callable[[], Json], known: Known
    ) -> str | None:
        rule = compiled.rule
        call, contract = of
        if compiled.settled:
            return AS_SENT
        if rule.taint_all and not {*rule.taint_all}.issubset(flow_of(call, contract).labels):
            return MISSES
        if not looks_at_arguments(rule) and not (contract.labels_when and _looks_at_labels(rule)):
            errors: list[str] = []
            form = _matched(compiled, _Seen(replace(_NO_CALL, flow=call.flow), contract), see, errors)
            return FAILS if errors else form or MISSES
        return known(rule)

    def _flags(self, matched: Iterable[tuple[Rule, str]], errors: Sequence[str], mode: Mode) -> frozenset[str]:
        flags = {"error"} if errors else set()
        for rule, form in matched:
            flags |= _does(rule, as_sent=form == AS_SENT)
        if self._default == "allow_read" and mode is Mode.READ:
            flags.add("allow")
        return frozenset(flags)

    def by_labels(self, decision: Decision) -> bool:
        """Whether any rule that matched looks at labels: then the answer to a question is one about these."""
        return not self._of_labels.isdisjoint(decision.rules)

    def never_allows(self, call: Call, contract: Contract) -> bool:
        """Whether calls like this one are denied whatever their arguments are."""
        candidates = self._candidates(call, contract)
        if candidates.settled is not None:
            return not candidates.settled.allowed
        # Whatever the other rules come to, this one denies.
        return any(each.settled and each.rule.action is Action.DENY for each in candidates.rules)

    def _candidates(self, call: Call, contract: Contract) -> _Candidates:
        server = contract.server if contract.server is not None else call.server
        sends = may_send(contract) or (call.flow is not None and SINK in call.flow.own)
        key = (call.tool, call.principal.agent, server, contract.mode, sends)
        found = self._cache.get(key)
        if found is not None:
            return found
        try:
            name = call.tool.encode()  # once for all patterns
        except UnicodeEncodeError:
            return _Candidates((), self._join([], ["the tool's name is not text"], contract.mode))
        rules = tuple([r for r in self._rules if name.startswith(r.prefixes) and r.applies(name, *key[1:])])
        shadows: tuple[_Compiled, ...] = ()
        if self._shadows:
            shadows = tuple([r for r in self._shadows if name.startswith(r.prefixes) and r.applies(name, *key[1:])])
        settled = None
        if all(rule.settled for rule in rules):
            settled = self._join([rule.rule for rule in rules], [], contract.mode)
        found = _Candidates(rules, settled, shadows)
        if len(call.tool) > _LONGEST_CACHED:
            return found
        if len(self._cache) >= _CACHED:
            self._cache.pop(next(iter(self._cache)), None)
        self._cache[key] = found
        return found

    def _join(
        self, matched: Sequence[Rule], errors: Sequence[str], mode: Mode, forms: Mapping[str, str] | None = None
    ) -> Decision:
        forms = forms or {}
        actions = {rule.action for rule in matched}
        asks = tuple(dict.fromkeys(rule.approval or "always" for rule in matched if rule.action is Action.ASK))
        # What a rule demands holds in whatever form it matched; it allows only what it matches as it was sent.
        allows = any(
            not rule.only_restricts and (rule.id not in forms or rule.action is Action.ASK) for rule in matched
        )
        by_default = not allows and self._default == "allow_read" and mode is Mode.READ
        allowed = not errors and Action.DENY not in actions and (allows or by_default)
        return Decision(
            id="",
            allowed=allowed,
            reason=_reason(matched, errors, by_default, forms),
            rules=tuple(rule.id for rule in matched),
            asks=asks if allowed else (),
            sandbox=allowed and Action.SANDBOX in actions,
            marks=tuple(rule.id for rule in matched if rule.action in (Action.WARN, Action.AUDIT)),
            error="; ".join(errors) or None,
            policy_digest=self.digest,
            forms=tuple((rule.id, forms.get(rule.id, AS_SENT)) for rule in matched if rule.argument_patterns),
        )


# ── Deciding where not all is known ───────────────────────────────────────────────────────────────

MISSES = "misses"
FAILS = "fails"
"""What may be known of a rule, beside the form that it matches in: it does not match; it cannot be evaluated."""
Known = Callable[[Rule], str | None]
"""What is known of a rule that looks at what is not: the form that it matches in, MISSES, FAILS, or None."""
_NO_CALL = Call("", Principal(""), "", {})
_FIELDS = re.compile(r"\bcall\b(?!\.(?:tool|kind|origin|server|session|box)\b)|\bargs\b|\bflow\b(?!\.labels\b)")
"""What a condition asks of a call that only the call itself tells."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """What can be said of a call of which not all is known."""

    verdicts: frozenset[str]
    """Every verdict that is possible: one, where it depends on nothing that is not known."""
    decision: Decision
    """By the rules of which it is known that they match."""
    depends: tuple[str, ...]
    """The rules that make the difference, where there is more than one verdict."""
    open: tuple[str, ...]
    """All rules of which it is not known whether they match."""


def looks_at_arguments(rule: Rule) -> bool:
    """Whether a rule looks at a call's arguments or at what comes beside them."""
    if rule.argument_patterns or rule.exports or any(looks_within(path) for path in rule.conditions):
        return True
    return rule.when is not None and looks_within(rule.when)


def _looks_at_labels(rule: Rule) -> bool:
    """Whether a rule looks at the labels of a call itself, which may depend on its arguments."""
    paths = (rule.when or "", *rule.conditions)
    return of_flow(rule) or any(re.search(r"\b(?:contract|flow)\b", each) for each in paths)


def looks_within(condition: str) -> bool:
    """Whether a condition asks for what only the call itself tells."""
    return _FIELDS.search(condition) is not None


def floor(preset: str) -> tuple[Rule, ...]:
    """What a preset restricts, as rules of an organisation."""
    restricting = (Action.DENY, Action.ASK, Action.SANDBOX)
    return tuple(
        replace(rule, id=f"organisation:{rule.id}", only_restricts=True)
        for rule in PRESETS[preset]
        if rule.action in restricting
    )


def _does(rule: Rule, *, as_sent: bool) -> set[str]:
    """What a rule that matches does to a decision."""
    if rule.only_restricts:
        return _does(replace(rule, only_restricts=False), as_sent=as_sent) - {"allow"}
    if rule.action in (Action.DENY, Action.ASK, Action.ALLOW):
        return {"ask", "allow"} if rule.action is Action.ASK else {str(rule.action)}
    own = {"sandbox"} if rule.action is Action.SANDBOX else set()
    return {*own, "allow"} if as_sent else own


def _may(rule: Rule) -> list[frozenset[str]]:
    """All that a rule may do of which it is not known whether it matches."""
    ways = {frozenset[str](), frozenset(_does(rule, as_sent=True))}
    if rule.argument_patterns and rule.action is not Action.ALLOW:
        ways.add(frozenset(_does(rule, as_sent=False)))
    if rule.when is not None:
        ways.add(frozenset({"error"}))
    return list(ways)


def _verdicts(certain: frozenset[str], may: Iterable[Iterable[frozenset[str]]]) -> frozenset[str]:
    reached = {certain}
    for ways in may:
        reached = {flags | way for flags in reached for way in ways}
    return frozenset(map(_of_flags, reached))


def _of_flags(flags: frozenset[str]) -> str:
    if "error" in flags:
        return "error"
    if "deny" in flags or "allow" not in flags:
        return "deny"
    return "+".join(word for word in ("ask", "sandbox") if word in flags) or "allow"


def both(one: str, other: str) -> str:
    """The verdict on what needs two of them."""
    words = {*one.split("+"), *other.split("+")}
    stops = next((word for word in ("error", "deny") if word in words), None)
    return stops or "+".join(sorted(words - {"allow"})) or "allow"


def widened(verdicts: Iterable[str]) -> frozenset[str]:
    """These verdicts where it is not known whether the contract asks a person, too."""
    found = frozenset(verdicts)
    return found | {both(each, "ask") for each in found}


# ── What a decision says ──────────────────────────────────────────────────────────────────────────


def verdict(decision: Decision, asks: Collection[str] | None = None) -> str:
    """A decision in a word: `allow`, `ask`, `sandbox`, `ask+sandbox`, `deny`, or `error` where one denied it. `asks`
    are all approvals that the call needs, where that is more than the rules ask for."""
    if not decision.allowed:
        return "deny" if decision.error is None else "error"
    asked = decision.asks if asks is None else asks
    return "+".join(word for word, holds in (("ask", asked), ("sandbox", decision.sandbox)) if holds) or "allow"


def joined(decision: Decision, other: Decision, name: str, asks: Sequence[str] = ()) -> Decision:
    """The decision on a call that is also one of the capability `name`: allowed if both are, with all that either
    demands, and with what `asks` for."""
    allowed = decision.allowed and other.allowed
    every = tuple(dict.fromkeys((*decision.asks, *other.asks, *asks)))
    return replace(
        decision,
        allowed=allowed,
        reason=f"{decision.reason}; as {name}: {other.reason}",
        rules=tuple(dict.fromkeys((*decision.rules, *other.rules))),
        asks=every if allowed else (),
        sandbox=allowed and (decision.sandbox or other.sandbox),
        marks=tuple(dict.fromkeys((*decision.marks, *other.marks))),
        error="; ".join(dict.fromkeys(filter(None, (decision.error, other.error)))) or None,
        forms=tuple(dict([*other.forms, *decision.forms]).items()),
        shadow=_joined_shadow(decision, other, name),
    )


def _joined_shadow(decision: Decision, other: Decision, name: str) -> Shadow | None:
    """What rules in shadow mode would have made of both."""
    found = [each.shadow for each in (decision, other) if each.shadow is not None]
    if not found:
        return None
    would = [each.shadow.verdict if each.shadow is not None else verdict(each) for each in (decision, other)]
    told = [each.shadow.reason if each.shadow is not None else each.reason for each in (decision, other)]
    return Shadow(
        rules=tuple(dict.fromkeys(rule for each in found for rule in each.rules)),
        verdict=both(*would),
        reason=f"{told[0]}; as {name}: {told[1]}",
        error="; ".join(dict.fromkeys(filter(None, (each.error for each in found)))) or None,
    )


def _matched(compiled: _Compiled, seen: _Seen, see: Callable[[], Json], errors: list[str]) -> str | None:
    try:
        return compiled.matches(seen, see)
    except (ValueError, TypeError, RecursionError) as exc:
        errors.append(f"rule {compiled.rule.id!r} could not be evaluated: {_harmless(exc, compiled.rule)}")
        return None


def _other_names(call: Call, contract: Contract) -> tuple[str, ...]:
    """A prompt is offered by its own name, or with its server's before it once another server has one of that name.
    Servers decide by which of them it is asked for, so rules that restrict apply to both; likewise to every spelling of
    a URI."""
    if call.kind == "resource":
        return uris.spellings(call.tool)
    place = call.arguments if call.kind == "prompt" else call.arguments.get("ref")
    if call.kind not in _NAMES_WITHIN or not isinstance(place, Mapping):
        return ()
    if call.kind == "completion" and place.get("type") != "ref/prompt":
        return uris.spellings(call.tool)
    own = place.get("name")
    names = (own, f"{contract.server or call.server}.{own}") if isinstance(own, str) else ()
    return tuple(name for name in names if name != call.tool)


def _with_new_id(decision: Decision) -> Decision:
    # Spelled out: every call passes here, and dataclasses.replace is several times slower.
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
        decision.forms,
        decision.shadow,
    )


def _reason(matched: Sequence[Rule], errors: Sequence[str], by_default: bool, forms: Mapping[str, str]) -> str:
    if errors:
        return "denied: " + "; ".join(errors)
    if not matched:
        return "allowed: no rule matched and the default allows reads" if by_default else "denied: no rule matched"
    named = partial(_named, matched, forms)
    if denies := named(Action.DENY):
        return f"denied by {denies}"
    parts = []
    if asks := named(Action.ASK):
        parts.append(f"a person must agree ({asks})")
    if boxed := named(Action.SANDBOX):
        parts.append(f"only in a sandbox ({boxed})")
    if marks := named(Action.WARN, Action.AUDIT):
        parts.append(f"marked by {marks}")
    if allows := named(Action.ALLOW):
        parts.append(f"allowed by {allows}")
    if by_default:
        parts.append("allowed: no rule matched it as it was sent and the default allows reads")
    elif not asks and all(rule.id in forms for rule in matched):
        parts.insert(0, "denied: no rule matched it as it was sent")
    return "; ".join(parts)


def _named(matched: Sequence[Rule], forms: Mapping[str, str], *actions: Action) -> str:
    return ", ".join(_with_form(rule, forms.get(rule.id)) for rule in matched if rule.action in actions)


def _with_form(rule: Rule, form: str | None) -> str:
    about = ", ".join(text for text in (rule.name, form and f"matched {form}") if text)
    return f"{rule.id} ({about})" if about else rule.id


_MISSING_KEY = re.compile(r'Key not found in map : "(\w+)"$')
_TYPES_ONLY = re.compile(r"(No matching overloads found : [\w+*/%<>=!&|\-]+\([\w, ]*\)|gave \w+, not true or false)$")


def _harmless(exc: Exception, rule: Rule) -> str:
    """What went wrong, without the argument values that the engine's own text may quote: it goes into the record."""
    if isinstance(exc, _TooMany):
        return "its patterns would have to be tried on too many values, or on too long ones"
    if not isinstance(exc, ExpressionError):
        return "an argument is not plain JSON"
    missing = _MISSING_KEY.search(exc.text)
    if missing and missing.group(1) in (rule.when or ""):
        return f"no such key: {missing.group(1)}"
    types = _TYPES_ONLY.search(exc.text)
    return types.group(1) if types else "its condition failed on these arguments"
