"""`ringfence check`: problems of a ringfence.yaml, the contracts that it results in, and accepted tool definitions."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import typer
from ruamel.yaml import YAML

from ringfence import config, identity
from ringfence.cli import common, options
from ringfence.cli.definitions import Change
from ringfence.cli.terminal import confirm, painted, safe
from ringfence.config import Config
from ringfence.core import labels
from ringfence.core.errors import ConfigError, Problem, RingfenceError, StoreError, Unavailable
from ringfence.core.model import Contract, Definition, Json, ServerSpec
from ringfence.governance import flow
from ringfence.governance.policy import Policy

if TYPE_CHECKING:
    from ringfence.compose.gateway import App


def check(
    file: Path | None = typer.Argument(None, metavar="[FILE]", help="The ringfence.yaml. Default: ./ringfence.yaml."),
    config_path: Path | None = typer.Option(None, "--config", metavar="FILE", help="The same as FILE."),
    print_: bool = typer.Option(False, "--print", help="Show every contract as it takes effect, with digests."),
    accept: bool = typer.Option(
        False, "--accept", help="Start the servers, show new and changed definitions of their tools, and accept them."
    ),
    yes: bool = typer.Option(False, "--yes", help="With --accept: do not ask on the terminal."),
    as_json: options.PrintJson = False,
) -> None:
    """Check a ringfence.yaml and report every problem, as file:line:col: problem.

    The exit code is 1 if there is any problem: in the file, in its policy files, or if configuration, policy, state,
    keys or the code of a server lie in a folder that a server or box may write to. Warnings are printed, and do not
    count: among them is what this host lacks for the boxes that calls will need, which is tried.

    \b
    ringfence check                          check ./ringfence.yaml
    ringfence check --print                  show every contract as it takes effect
    ringfence check --accept                 review the definitions of the servers' tools, and accept them
    ringfence check --json                   the same for a program: ok, problems, and what the file has
    """
    if file is not None and config_path is not None and file != config_path:
        common.fail("FILE and --config name two files: give one", 2)
    if yes and not accept:
        common.fail("--yes goes with --accept", 2)
    named = file or config_path
    path = _found() if named is None else common.named_config(named)
    settings, problems = _read(path)
    if named is None and settings is not None:
        common.require_trusted(path, *settings.policy.files)
    told: Json = {"ok": settings is not None, "file": str(path), "problems": problems}
    if not as_json:
        for each in problems:
            mark = "warning: " if each["severity"] == "warning" else ""
            text = safe(f"{each['file']}:{each['line']}:{each['column']}: {mark}{each['problem']}")
            print(painted(text, "warning" if mark else "error"))
    if settings is not None:
        told |= _contents(settings)
        if print_:
            told["effective"] = effective(settings)
        if print_ and not as_json:
            print(safe(_yaml(told["effective"]), lines=True), end="")
        if accept:
            settings = _with_documents(settings, path)
            told["ok"] = _accepted(settings, yes, told if as_json else None)
    if as_json:
        common.dump(told)
    if settings is None or not told["ok"]:
        raise typer.Exit(1)
    if not as_json:
        counted = (
            _count(len(settings.contracts), "capability", "capabilities"),
            _count(len(settings.policy.rules), "rule", "rules"),
            _count(len(settings.servers), "server", "servers"),
        )
        # With --print the output is YAML, and stays it.
        shown = safe(f"{'# ' if print_ else ''}{path}")
        print(f"{shown}: {painted('ok', 'good')}, {', '.join(counted)}")


def _found() -> Path:
    """The file that `serve` would take, relative to the current folder if it is in it."""
    path = common.find_config(None)
    if path is None:
        common.fail("There is no ringfence.yaml here. Name one: ringfence check FILE; or write one: ringfence init", 2)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _read(path: Path) -> tuple[Config | None, list[Json]]:
    """The configuration if it can be used, and everything that is to be said of it, at its place."""
    try:
        settings = config.load(path)
    except ConfigError as exc:
        return None, [_problem(each, "error") for each in exc.problems]
    overlaps = config.overlaps(settings)
    warnings = (*settings.warnings, *config.doubts(settings), *_ways_out(settings), *_lacking(settings))
    said = [_problem(each, "warning") for each in warnings] + [_problem(each, "error") for each in overlaps]
    return None if overlaps else settings, said


def _ways_out(settings: Config) -> list[Problem]:
    """Tools whose accepted definitions say that they take an address, and that the operator declared as no way out."""
    if not any(map(labels.labelled, settings.contracts.values())):
        return []
    from ringfence.compose.offline import catalog_of, pins_of  # noqa: PLC0415 - most files have no labels

    try:
        catalog = catalog_of(settings, pins_of(settings))
    except StoreError:  # `audit verify` says what is wrong with the state
        return []
    offered = catalog.offered(settings.environment)
    return [Problem(str(settings.path), 1, 1, text) for text in flow.unlabelled_ways_out(offered)]


def _lacking(settings: Config) -> list[Problem]:
    """What this host lacks for the boxes that calls of it will need."""
    from ringfence.compose import lacking  # noqa: PLC0415 - a file with a problem needs none of it
    from ringfence.compose.runs import own_contracts  # noqa: PLC0415 - likewise

    if not own_contracts(settings):
        return []
    texts = []
    missing = common.run(lacking.of_backend, settings)
    if missing is not None:
        texts.append(f"no box can be made here: sandbox.backend {settings.sandbox.backend}: {missing}")
    refused = common.run(lacking.of_capabilities, settings)
    texts += [f"every call of {name!r} will be refused: {why}" for name, why in refused.items()]
    return [Problem(str(settings.path), 1, 1, text) for text in texts]


def _problem(problem: Problem, severity: str) -> Json:
    place = {"file": problem.file, "line": problem.line, "column": problem.column}
    return {**place, "problem": problem.text, "severity": severity}


def _contents(settings: Config) -> Json:
    """What the file has, by name."""
    return {
        "environment": settings.environment,
        "digest": settings.digest,
        "state": str(settings.gateway.state),
        "capabilities": list(settings.contracts),
        "rules": [rule.id for rule in settings.policy.rules],
        "servers": list(settings.servers),
    }


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# ── As it takes effect ────────────────────────────────────────────────────────────────────────────


def effective(settings: Config) -> Json:
    """The contracts and the policy as they take effect, with the keys of the file."""
    policy = Policy(
        settings.policy.rules,
        preset=settings.policy.preset,
        default=settings.policy.default,
        environment=settings.environment,
    )
    return {
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


def _yaml(shown: Json) -> str:
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.width = 4096
    out = io.StringIO()
    writer.dump(shown, out)
    return out.getvalue()


def _contract(contract: Contract) -> Json:
    """Every key that a capability can have, with its effective value."""
    fields = _plain(asdict(contract))
    mounts = fields.pop("mounts")
    key = fields.pop("idempotent_key")
    fields["labels"] = [*fields["labels"], *fields.pop("labels_when")]
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


# ── Accepting definitions ─────────────────────────────────────────────────────────────────────────


def _with_documents(settings: Config, path: Path) -> Config:
    """The configuration with the OpenAPI documents behind its URLs as they are now."""
    if all(each.openapi_url is None for each in settings.servers.values()):
        return settings
    from ringfence.compose.apis import fetch_documents  # noqa: PLC0415 - few configurations name such a URL

    for problem in common.run(fetch_documents, settings):
        common.say(problem)
    return config.load(path)


def _accepted(settings: Config, yes: bool, told: Json | None) -> bool:
    """Have definitions accepted; whether all is well afterwards. With `told`, what happened goes there."""
    if told is None:
        return common.run(accept_definitions, settings, yes, None)
    told |= {"definitions": [], "unreachable": [], "left_out": []}
    try:
        return common.run(accept_definitions, settings, yes, told)
    except RingfenceError as exc:
        common.say(str(exc))
        return False


async def accept_definitions(settings: Config, yes: bool, told: Json | None) -> bool:
    """Show what is new or changed and pin it if a person agrees; whether all is well afterwards.

    With `told`, nothing is printed but questions and errors, and what happened goes there."""
    from ringfence.compose.gateway import App  # noqa: PLC0415 - only --accept starts servers

    async with App.open(settings) as app:
        changes: list[Change] = []
        down = 0
        for server in settings.servers.values():
            try:
                shown = await app.pool.definitions(server.name, app.agent)
            except RingfenceError as exc:
                print(safe(f"server {server.name} cannot be asked: {exc}"), file=sys.stderr)
                down += 1
                if told is not None:
                    told["unreachable"].append({"server": server.name, "problem": str(exc)})
                continue
            offered, wrong = await app.pins.offerable(server.name, shown)
            changes.extend(_changes(app, server, offered))
            if told is not None:
                told["left_out"] += [{"server": server.name, "problem": each} for each in wrong]
        if told is not None:
            told["definitions"] = [_entry(change) for change in changes]
        agreed = await _settle(app, settings, changes, yes, told) if changes else True
    if not changes and not down and told is None:
        print("Nothing to accept: every definition that the configuration uses is accepted.")
    return agreed and not down


def _entry(change: Change) -> Json:
    new = change.new
    named = {"server": new.server, "kind": new.kind, "name": new.name, "digest": new.digest}
    return {**named, "before": change.old.digest if change.old else None, "body": dict(new.body), "accepted": False}


async def _settle(app: App, settings: Config, changes: list[Change], yes: bool, told: Json | None) -> bool:
    shown = "\n".join(line for change in changes for line in change.shown())
    many = "this definition" if len(changes) == 1 else f"these {len(changes)} definitions"
    if yes:
        if told is None:
            print(shown)
    elif not await _agreed(shown, f"Accept {many}?", told):
        print("Nothing was accepted.", file=sys.stderr)
        return False
    user = identity.os_user()
    person = identity.person_of(settings.people, user)
    await app.pins.accept([change.new for change in changes], person.name if person is not None else user)
    if told is not None:
        for entry in told["definitions"]:
            entry["accepted"] = True
    if told is None:
        print(f"Accepted {many}. A gateway that is running notices by itself.")
    return True


async def _agreed(shown: str, question: str, told: Json | None) -> bool:
    try:
        return await anyio.to_thread.run_sync(confirm, shown, question)
    except Unavailable as exc:
        if told is None:
            print(shown)
        raise Unavailable(exc.reason_code, f"{exc}, or read the above and accept it with --yes") from None


def _changes(app: App, server: ServerSpec, offered: list[Definition]) -> Iterator[Change]:
    """Definitions that the configuration uses and that are not accepted yet. A tool without a contract is not used."""
    rows = app.store.reader().accepted({server.name: server})
    pins = {(row.definition.kind, row.definition.name): row.definition for row in rows}
    used = app.pins.uses(server.name)
    for definition in offered:
        old = pins.get((definition.kind, definition.name))
        if used(definition) and (old is None or old.digest != definition.digest):
            yield Change(definition, old)
