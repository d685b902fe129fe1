"""`ringfence policy`: rules tried by cases that are written beside them, and on the calls that are on record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import cache, partial
from pathlib import Path

import typer

from ringfence import config
from ringfence.cli import common, options
from ringfence.cli.progress import progress
from ringfence.cli.terminal import cut, painted, safe
from ringfence.compose.offline import Environments, foresight_of, principal_of
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.canonical import object_at
from ringfence.core.errors import ConfigError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.governance.case_results import TriedCase, run_case
from ringfence.governance.foresight import Foresight
from ringfence.governance.policy import PRESETS
from ringfence.governance.redecide import Again, Kept, Redecision
from ringfence.store import Reader

_NO_CASES = """there are no cases in {file}. Write some beside the rules, under policy: or at the top of a policy file:
cases:
  - name: Nothing is deleted in production
    tool: delete_ticket
    args: {{id: 7}}
    environment: production
    expect: deny
    rules: [no-deletes]"""

policy = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@policy.callback()
def group() -> None:
    """Test the rules of policy before they are in force.

    \b
    ringfence policy test                    run the cases that are written beside the rules
    ringfence policy diff new.yaml           which recorded calls would end differently under it?
    """


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def _settings(file: Path | None, config_path: Path | None) -> tuple[Config, Path]:
    """The configuration that is meant, with the rules of FILE where that is a policy file; and what was named."""
    try:
        if file is None or not config.is_policy_file(file):
            if file is not None and config_path is not None and file != config_path:
                common.fail("FILE and --config name two configurations: give one", 2)
            named = common.find_config(file or config_path)
            if named is None:
                text = "There is no ringfence.yaml here. Name a configuration or a policy file"
                common.fail(f"{text}: ringfence policy test FILE; or write one: ringfence init", 2)
            return config.load(_shown(named)), _shown(named)
        around = common.find_config(config_path)
        settings = config.load(_shown(around)) if around is not None else _no_configuration(file)
        return config.with_policy_file(settings, file), file
    except ConfigError as exc:
        common.fail(str(exc), 2)


def _shown(path: Path) -> Path:
    """A file in the current folder by its short name, which problems then have."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _no_configuration(file: Path) -> Config:
    """What is in force where there is no configuration."""
    return config.loads("", file="ringfence.yaml", base=file.parent)


# ── policy test ───────────────────────────────────────────────────────────────────────────────────


@policy.command("test", short_help="Run the cases that are written beside the rules.")
def run_cases(
    file: Path | None = typer.Argument(
        None, metavar="[FILE]", help="A ringfence.yaml, or a file with cases: or rules: at its top."
    ),
    config_path: Path | None = common.ConfigOption,
    as_json: options.PrintJson = False,
) -> None:
    """Run the cases that are written beside the rules: under `policy:` in a ringfence.yaml, or in its policy files.

    Nothing is called. A case is a call with the verdict that is expected of it (allow, ask, sandbox, deny, error), and
    the rules that are to match. A FILE with rules of its own is tried as if the configuration had them. Rules that no
    case matched are listed.

    Exit code: 0 all cases passed, 1 one failed, 2 the file is wrong or has no cases.

    \b
    ringfence policy test                            the cases of ./ringfence.yaml and its policy files
    ringfence policy test policies/tickets.yaml      those of one policy file
    ringfence policy test new-rules.yaml --config ringfence.yaml --json
    """
    settings, named = _settings(file, config_path)
    if not settings.cases:
        common.fail(_NO_CASES.format(file=named), 2)
    environments = Environments(settings)
    results = [run_case(case, environments, partial(principal_of, settings)) for case in settings.cases]
    matched = {name for each in results if each.judgement for name in each.judgement.matched}
    unmatched = [rule.id for rule in settings.policy.rules if rule.id not in matched]
    of_preset = [rule.id for rule in PRESETS[settings.policy.preset] if rule.id not in matched]
    failed = [each for each in results if not each.ok]
    if as_json:
        common.dump(
            {
                "ok": not failed,
                "file": str(named),
                "passed": len(results) - len(failed),
                "failed": len(failed),
                "cases": [_case_json(each) for each in results],
                "unmatched": [_unmatched_json(settings, name) for name in unmatched],
                "unmatched_preset": of_preset,
            }
        )
    else:
        for each in failed:
            print("\n".join(map(safe, _failure(each))), end="\n\n")
        for line in _coverage(settings, unmatched, of_preset):
            print(painted(safe(line), "warning" if line.startswith("  ") else ""))
        total = f"{len(results)} case{'' if len(results) == 1 else 's'}"
        verdict = f"{len(failed)} failed" if failed else "ok"
        print(f"{safe(str(named))}: {painted(verdict, 'bad' if failed else 'good')}, {total}")
    if failed:
        raise typer.Exit(1)


def _failure(result: TriedCase) -> Iterator[str]:
    case = result.case
    file, line, column = case.place
    yield f"{file}:{line}:{column}: {cut(case.name, 200)}"
    wanted = [case.expect]
    if case.rules is not None:
        wanted.append(f"by {', '.join(case.rules)}" if case.rules else "by no rule")
    if case.not_rules:
        wanted.append(f"not by {', '.join(case.not_rules)}")
    if case.approval is not None:
        wanted.append(f"asking {case.approval}")
    yield f"  expected  {' '.join(wanted)}"
    yield f"  got       {result.verdict}: {result.reason}"
    yield f"  decisive  {_decisive(result)}"
    for text in result.unlike:
        if not text.startswith("expected"):
            yield f"  because   {text}"


def _decisive(result: TriedCase) -> str:
    """What made the verdict what it is."""
    got = result.judgement
    if got is None:
        return "no rule: policy was not asked"
    named = list(got.decisive)
    own = [name for name in got.asks if name not in got.decision.asks]
    if own:
        named.append(f"the contract of {got.contract.name} (approval {', '.join(own)})")
    if named:
        return ", ".join(named)
    return "an error, which denies" if got.decision.error is not None else "the default: no rule decided"


def _case_json(result: TriedCase) -> Json:
    case, got = result.case, result.judgement
    file, line, column = case.place
    return {
        "name": case.name,
        "file": file,
        "line": line,
        "column": column,
        "ok": result.ok,
        "expected": {
            "verdict": case.expect,
            "rules": None if case.rules is None else list(case.rules),
            "not_rules": list(case.not_rules),
            "approval": case.approval,
            "would": case.would,
        },
        "got": {
            "verdict": result.verdict,
            "reason": result.reason,
            "rules": [] if got is None else list(got.matched),
            "decisive": [] if got is None else list(got.decisive),
            "approvals": [] if got is None else list(got.asks),
            "error": None if got is None else got.decision.error,
            "would": result.verdict if got is None else got.would,
        },
        "unlike": list(result.unlike),
    }


def _unmatched_json(settings: Config, name: str) -> Json:
    file, line, column = settings.rule_places.get(name, ("", 0, 0))
    return {"rule": name, "file": file, "line": line, "column": column}


def _coverage(settings: Config, unmatched: list[str], of_preset: list[str]) -> Iterator[str]:
    """The rules that no case is about."""
    enabled = {rule.id: rule.enabled for rule in settings.policy.rules}
    if unmatched:
        yield f"{len(unmatched)} of {len(enabled)} rules were matched by no case:"
    for name in unmatched:
        file, line, column = settings.rule_places.get(name, ("", 0, 0))
        yield f"  {file}:{line}:{column}: {name}{'' if enabled[name] else ' (enabled: false)'}"
    if of_preset:
        yield f"Of preset {settings.policy.preset}, no case matched {', '.join(of_preset)}."


# ── policy diff ───────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Group:
    """Recorded calls of which the same is to be said."""

    again: Again
    count: int = 0
    calls: list[str] = field(default_factory=list)
    """The first of them."""


@dataclass(slots=True)
class _Difference:
    """What a period came to; of many calls, no more is kept than can be shown."""

    most: int
    calls: int = 0
    same: int = 0
    changed: dict[Again, _Group] = field(default_factory=dict)
    unknown: dict[Again, _Group] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    """Why calls were not decided again, and how many."""
    shadow: dict[str, Counter[str]] = field(default_factory=dict)
    """By rule in shadow mode: what it would have made of how many calls, as recorded."""

    def take(self, call_id: str, again: Again | str) -> None:
        self.calls += 1
        if isinstance(again, str):
            self.left_out[again] += 1
        elif again.decided and not again.changed:
            self.same += 1
        else:
            groups = self.changed if again.changed else self.unknown
            group = groups.setdefault(again, _Group(again))
            group.count += 1
            if len(group.calls) < self.most:
                group.calls.append(call_id)


@policy.command("diff", short_help="List recorded calls that would end differently under a new file.")
def diff(
    file: Path = typer.Argument(..., metavar="NEWFILE", help="The new ringfence.yaml, or a policy file with rules."),
    since: str | None = typer.Option(None, "--since", metavar="TIME", help="Calls from this time on (ISO 8601, UTC)."),
    until: str | None = typer.Option(None, "--until", metavar="TIME", help="Up to, not including, this time."),
    config_path: Path | None = common.ConfigOption,
    ids: int = typer.Option(10, "--ids", metavar="N", min=0, max=1_000_000, help="Ids of calls to list in each group."),
    as_json: options.PrintJson = False,
) -> None:
    """Decide every recorded call of a period again under NEWFILE, and list those that would end differently.

    Nothing is called or written. The configuration in force (--config) says where the log is. Rules of a policy file
    come over it: one takes the place of the one with its id, others are added.

    The log has arguments only of capabilities with `log: {arguments: redacted}`. Of others, a rule that looks at
    arguments can be decided again if it was in force then; else the call is listed as one that depends on arguments
    that are not on record, with the rules that make the difference.

    Exit code: 0 none would end differently, 1 some would or may, 2 the file is wrong.

    \b
    ringfence policy diff new.yaml --since 2026-03-01
    ringfence policy diff policies/tickets.yaml --json
    """
    start, end = common.read_time(since, "--since"), common.read_time(until, "--until")
    old, new = _both(file, config_path)
    before, after = foresight_of(old), foresight_of(new)
    redecision = Redecision(before, after, cache(partial(principal_of, new)))
    found = _Difference(ids)
    with common.reading(old.gateway.state) as reader, progress("deciding calls again") as line:
        for record in reader.records(kind="finished", since=start, until=end):
            line.step()
            try:
                body = record.body
            except canonical.NotCanonical as exc:
                common.fail(f"a record cannot be read ({exc}); see: ringfence audit verify")
            if object_at(body, "call", "principal").get("kind") != "system":
                found.take(str(record.call_id), redecision.again(body, _kept(reader, record.call_id, body)))
                _count_shadow(found, body)
    if as_json:
        common.dump(_difference_json(found, before, after))
    else:
        for text in _difference(found):
            print(text)
    if found.changed or found.unknown:
        raise typer.Exit(1)


def _both(file: Path, config_path: Path | None) -> tuple[Config, Config]:
    """The configuration in force, and the new one."""
    named = common.find_config(config_path)
    if named is None:
        common.fail("There is no ringfence.yaml here to compare with. Name the one in force: --config FILE", 2)
    try:
        old = config.load(_shown(named))
        new = config.with_policy_file(old, file) if config.is_policy_file(file) else config.load(_shown(file))
    except ConfigError as exc:
        common.fail(str(exc), 2)
    return old, new


def _kept(reader: Reader, call_id: str | None, body: Json) -> Kept | None:
    """The arguments of a call, where its record says that they were kept, and they still are."""
    if call_id is None or "kept" not in object_at(body, "arguments"):
        return None
    payload = reader.payload(call_id, "arguments")
    if payload is None or not isinstance(payload.body, bytes):
        return None
    try:
        whole = canonical.loads(payload.body)
    except canonical.NotCanonical:
        return None
    return Kept(payload.salt, whole) if isinstance(whole, dict) else None


def _count_shadow(found: _Difference, body: Json) -> None:
    shadow = object_at(body, "decision", "shadow")
    rules = shadow.get("rules")
    for rule in rules if isinstance(rules, list) else ():
        found.shadow.setdefault(str(rule), Counter())[str(shadow.get("verdict"))] += 1


def _sorted(groups: Iterable[_Group]) -> list[_Group]:
    return sorted(groups, key=lambda group: -group.count)


def _difference(found: _Difference) -> Iterator[str]:
    changed, unknown = _sorted(found.changed.values()), _sorted(found.unknown.values())
    for group in changed:
        yield from _group(group, ", ".join(sorted(group.again.new)))
    if unknown:
        yield "These depend on arguments that are not on record, so they cannot be decided again:"
    for group in unknown:
        yield from _group(group, " or ".join(sorted(group.again.new)))
    if unknown:
        yield painted("From now on, `log: {arguments: redacted}` of a capability keeps them.", "aside")
    for why, count in found.left_out.most_common():
        yield safe(f"not decided again: {_calls(count)}: {why}")
    for rule, verdicts in sorted(found.shadow.items()):
        told = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
        yield safe(
            f"in shadow mode, on record: {rule} matched {_calls(verdicts.total())}, which would have been: {told}"
        )
    differ = sum(group.count for group in changed)
    maybe = sum(group.count for group in unknown)
    said = [painted(f"{differ} would end differently", "warning" if differ else "good"), f"{found.same} the same"]
    said += [painted(f"{maybe} depend on what is not on record", "warning")] if maybe else []
    yield f"{_calls(found.calls)} on record: {', '.join(said)}"


def _group(group: _Group, new: str) -> Iterator[str]:
    again = group.again
    yield safe(f"{cut(again.tool, 100)}: {again.old} -> {new}, {_calls(group.count)}")
    yield safe(f"  rules then  {', '.join(again.old_rules) or 'none'}")
    now = f"none: refused before policy ({again.why})" if again.why else ", ".join(again.new_rules) or "none"
    yield safe(f"  rules now   {now}{' in any case' if again.depends else ''}")
    if again.depends:
        yield safe(f"  depends on  {', '.join(again.depends)}")
    more = f" and {group.count - len(group.calls)} more" if group.count > len(group.calls) else ""
    yield safe(f"  calls       {', '.join(group.calls)}{more}")
    yield ""


def _calls(count: int) -> str:
    return f"{count} call{'' if count == 1 else 's'}"


def _difference_json(found: _Difference, old: Foresight, new: Foresight) -> Json:
    return {
        "old": old.policy.digest,
        "new": new.policy.digest,
        "calls": found.calls,
        "same": found.same,
        "changed": [_group_json(group) for group in _sorted(found.changed.values())],
        "unknown": [_group_json(group) for group in _sorted(found.unknown.values())],
        "not_decided": dict(found.left_out),
        "shadow": {rule: dict(verdicts) for rule, verdicts in found.shadow.items()},
    }


def _group_json(group: _Group) -> Json:
    again = group.again
    return {
        "tool": again.tool,
        "count": group.count,
        "old": {"verdict": again.old, "rules": list(again.old_rules)},
        "new": {"verdicts": sorted(again.new), "rules": list(again.new_rules), "reason_code": again.why or None},
        "depends_on": list(again.depends),
        "calls": group.calls,
    }
