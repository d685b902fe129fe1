"""`ringfence policy`: rules tried by cases that are written beside them, and on the calls that are on record."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import typer

from ringfence import config
from ringfence.cli import common, options
from ringfence.cli.terminal import cut, painted, safe
from ringfence.compose.offline import Environments, principal_of
from ringfence.config import Config
from ringfence.core.errors import ConfigError
from ringfence.core.model import Json
from ringfence.governance.case_results import CaseResult, run_case
from ringfence.governance.policy import PRESETS

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


def _failure(result: CaseResult) -> Iterator[str]:
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


def _decisive(result: CaseResult) -> str:
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


def _case_json(result: CaseResult) -> Json:
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
