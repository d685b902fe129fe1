"""Policy as it is written: the rules of the file and of the policy files that it names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ringfence import policy
from ringfence.config import paths, schema, source, unbuilt
from ringfence.config.draft import Draft
from ringfence.config.nearest import did_you_mean
from ringfence.config.settings import PolicySettings
from ringfence.config.shaping import Shaped, shaped
from ringfence.config.source import Source, Where
from ringfence.errors import Problem
from ringfence.model import Action, Rule


@dataclass(slots=True)
class _Rules:
    draft: Draft
    rules: list[Rule] = field(default_factory=list)
    first: dict[str, Problem] = field(default_factory=dict)
    """Where each id was seen first."""


def read(draft: Draft) -> PolicySettings:
    """All rules, in order; their problems go where the draft's do."""
    found = _Rules(draft)
    shape = draft.policy.shape
    _take(found, draft.source, (*draft.policy.where, "rules"), len(shape.rules or ()))
    files = []
    for index, name in enumerate(shape.files):
        path = paths.resolve(name, draft.base)
        files.append(path)
        _take_file(found, path, _shown(draft, name, path), (*draft.policy.where, "files", index))
    return PolicySettings(shape.preset, shape.default, tuple(found.rules), tuple(files))


def _shown(draft: Draft, name: str, path: Path) -> str:
    """The policy file's name as somebody would type it from where they named the configuration."""
    if os.path.isabs(name) or name.startswith("~"):
        return str(path)
    return source.one_line(os.path.normpath(os.path.join(os.path.dirname(draft.source.file), name)))


def _take_file(found: _Rules, path: Path, file: str, named_at: Where) -> None:
    text, problems = source.read_file(path, file)
    if text is None:
        # What is not there has no lines; the place to mend is where it was named.
        unreadable = all(problem.line == 1 and problem.column == 1 for problem in problems)
        if unreadable:
            for problem in problems:
                found.draft.problem(named_at, f"{file} {problem.text}")
        else:
            found.draft.elsewhere.extend(problems)
        return
    read_source = source.parse(text, file)
    if read_source.value is None and not read_source.problems:
        read_source.value = {}
    if isinstance(read_source.value, dict):
        whole = shaped(schema.PolicyFile, read_source, ())
        _take(found, read_source, ("rules",), len(whole.shape.rules or ()))
    elif not read_source.problems:
        read_source.problems.append(read_source.problem((), "a policy file is a mapping with rules: at its top"))
    found.draft.elsewhere.extend(read_source.problems)


def _take(found: _Rules, at: Source, where: Where, count: int) -> None:
    for index in range(count):
        written = shaped(schema.Rule, at, (*where, index))
        rule = _rule(written.shape)
        _check_id(found, at, written)
        for path, text, line, column in policy.rule_problems(rule):
            where_in = (*written.where, *path)
            if path == ("when",):
                at.problems.append(at.problem_inside(where_in, f"bad expression: {text}", line, column))
            elif path != ("approval",) or "action" not in written.broken:
                at.problems.append(at.problem(where_in, text))
        for key, text in unbuilt.rule_problems(written.shape):
            at.problems.append(at.problem((*written.where, key), text, key=True))
        _check_names(found.draft, at, written)
        found.rules.append(rule)


def _check_id(found: _Rules, at: Source, written: Shaped[schema.Rule]) -> None:
    if "id" in written.broken:
        return
    name, where = written.shape.id, (*written.where, "id")
    owner = next((preset for preset, rules in policy.PRESETS.items() if any(rule.id == name for rule in rules)), None)
    if owner is not None:
        at.problems.append(at.problem(where, f"the rule id {name!r} belongs to preset {owner!r}: choose another"))
    if name in found.first:
        first = found.first[name]
        text = f"duplicate rule id {name!r} (first at {first.file}:{first.line}:{first.column})"
        at.problems.append(at.problem(where, text))
    else:
        found.first[name] = at.problem(where, "")


def _check_names(draft: Draft, at: Source, written: Shaped[schema.Rule]) -> None:
    shape, where = written.shape, written.where
    if shape.approval is not None and shape.approval not in (known := [*draft.approvals, "always"]):
        text = f"no approval named {shape.approval!r}{did_you_mean(shape.approval, known)}"
        at.problems.append(at.problem((*where, "approval"), text))
    for index, name in enumerate(shape.servers):
        if not set("*?[") & set(name) and name not in draft.servers:
            text = f"no server named {name!r}{did_you_mean(name, draft.servers)}"
            at.problems.append(at.problem((*where, "servers", index), text))


def _rule(shape: schema.Rule) -> Rule:
    return Rule(
        id=shape.id,
        action=Action(shape.action),
        name=shape.name,
        description=shape.description,
        priority=shape.priority,
        tool_patterns=tuple(shape.tool_patterns),
        argument_patterns=dict(shape.argument_patterns),
        when=shape.when,
        agents=tuple(shape.agents),
        servers=tuple(shape.servers),
        environments=tuple(shape.environments),
        approval=shape.approval,
        owasp_asi_id=shape.owasp_asi_id,
        normalize=shape.normalize,
        enabled=shape.enabled,
    )
