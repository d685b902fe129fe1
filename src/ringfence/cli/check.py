"""`ringfence check`: is the file right, what does it come to, and which definitions of tools are accepted."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from ruamel.yaml import YAML

from ringfence import config
from ringfence.cli import common
from ringfence.cli.terminal import safe
from ringfence.config import Config
from ringfence.errors import ConfigError
from ringfence.model import Contract, Json
from ringfence.policy import Policy


def check(
    file: Path | None = typer.Argument(None, metavar="[FILE]", help="The ringfence.yaml. Left out: ./ringfence.yaml."),
    config_path: Path | None = typer.Option(None, "--config", help="The same as FILE."),
    print_: bool = typer.Option(False, "--print", help="Show every contract as it takes effect, with digests."),
    accept: bool = typer.Option(
        False, "--accept", help="Start the servers, show what is new or changed in their definitions, and accept it."
    ),
    yes: bool = typer.Option(False, "--yes", help="With --accept: do not ask on the terminal."),
) -> None:
    """Read a ringfence.yaml and say everything that is wrong with it, as file:line:col: problem.

    Exit code 1 where there is any problem: in the file, in its policy files, or where configuration, policy, state or
    keys lie under a folder that a server or box may write. Warnings are told and pass.

    \b
    ringfence check                          is ./ringfence.yaml right?
    ringfence check --print                  what each contract comes to
    ringfence check --accept                 look at what the servers say of their tools, and accept it
    """
    if file is not None and config_path is not None and file != config_path:
        common.fail("FILE and --config name two files: give one", 2)
    if yes and not accept:
        common.fail("--yes goes with --accept", 2)
    path = file or config_path or _found()
    settings = _read(path)
    if print_:
        print(safe(effective(settings), lines=True), end="")
    if accept and not common.run(common.loaded("ringfence.cli.accept").accept, settings, yes):
        raise typer.Exit(1)
    counted = (
        _count(len(settings.contracts), "capability", "capabilities"),
        _count(len(settings.policy.rules), "rule", "rules"),
        _count(len(settings.servers), "server", "servers"),
    )
    # With --print the output is YAML, and stays it.
    print(safe(f"{'# ' if print_ else ''}{path}: ok, {', '.join(counted)}"))


def _found() -> Path:
    """The file that `serve` would take, by the name that a person here would give it."""
    path = common.find_config(None)
    if path is None:
        common.fail("There is no ringfence.yaml here. Name one: ringfence check FILE", 2)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _read(path: Path) -> Config:
    try:
        settings = config.load(path)
    except ConfigError as exc:
        print(safe(str(exc), lines=True))
        raise typer.Exit(1) from None
    for warning in settings.warnings:
        print(safe(f"{warning.file}:{warning.line}:{warning.column}: warning: {warning.text}"))
    problems = config.overlaps(settings)
    for problem in problems:
        print(safe(str(problem)))
    if problems:
        raise typer.Exit(1)
    return settings


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# ── What it comes to ──────────────────────────────────────────────────────────────────────────────


def effective(settings: Config) -> str:
    """The contracts and the policy as they take effect, as YAML in the words of the file."""
    policy = Policy(
        settings.policy.rules,
        preset=settings.policy.preset,
        default=settings.policy.default,
        environment=settings.environment,
    )
    told: Json = {
        "environment": settings.environment,
        "digest": settings.digest,
        "policy": {
            "digest": policy.digest,
            "preset": settings.policy.preset,
            "default": settings.policy.default,
            "rules": [rule.id for rule in settings.policy.rules],
        },
        "capabilities": {name: _contract(contract) for name, contract in settings.contracts.items()},
    }
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 4096
    out = io.StringIO()
    writer.dump(told, out)
    return out.getvalue()


def _contract(contract: Contract) -> Json:
    """Every key that a capability can have, with the value that counts."""
    fields = _plain(asdict(contract))
    mounts, key = fields.pop("mounts"), fields.pop("idempotent_key")
    shown = {"digest": fields.pop("digest"), **fields}
    del shown["name"]
    shown["secrets"] = shown["secrets"] or "none"
    shown["environments"] = shown["environments"] if contract.environments is not None else "all"
    shown["idempotent"] = {"key": key} if key is not None else contract.idempotent
    filesystem = {"mounts": mounts} if mounts else "workspace_only"
    at = list(shown).index("network") + 1
    items = list(shown.items())
    return dict([*items[:at], ("filesystem", filesystem), *items[at:]])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
