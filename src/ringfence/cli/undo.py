"""`ringfence undo`: take back what calls did, the last first, each by a governed call of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer

from ringfence.cli import common, options
from ringfence.cli.common import EXIT_CODES, TerminalChannel
from ringfence.cli.terminal import confirm, safe
from ringfence.compose.offline import catalog_of, pins_of
from ringfence.compose.runs import contracts_of
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Call, Json, Outcome, Status
from ringfence.governance.undo import UndoStep, plan
from ringfence.store import Reader

_MAX_CALLS = 1000
"""Calls of one session."""


def undo(
    calls: list[str] = typer.Argument(None, metavar="CALL…", help="Ids of calls, or their beginnings."),
    session: str | None = typer.Option(
        None, "--session", metavar="NAME", help="All calls that were made in this session of a client."
    ),
    only_plan: bool = typer.Option(False, "--plan", help="Only tell what would be done, and what cannot be."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask on the terminal first."),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    agent: str | None = common.AgentOption,
    as_json: options.PrintJson = False,
) -> None:
    """Undo calls, the last first, with what their contracts name for it (effects.compensate).

    First it tells what will be called, and what cannot be undone and why; then it asks. Each step is a call like any
    other: policy decides on it, people may have to approve it, and it is on record, with the call that it undoes. It
    stops at the first that does not succeed, so that nothing is taken back out of order; undo again to go on. What is
    undone already is not undone twice.

    Exit code: 0 all was undone, 1 something cannot be or failed, 125 unavailable or unknown, 126 denied or approval
    needed.

    \b
    ringfence undo call_0123456789abcdef0123 --plan
    ringfence undo --session migration-7
    """
    settings = common.demo_config() if demo else common.load(config_path)
    steps = _planned(settings, calls or [], session)
    left_out = [step for step in steps if step.compensate is None and not step.nothing]
    if only_plan:
        if as_json:
            common.dump([_as_json(step) for step in steps])
        else:
            print(_told(steps))
        raise typer.Exit(1 if left_out else 0)
    doable = [step for step in steps if step.compensate is not None]
    if not as_json:
        print(_told(steps))
    if not doable:
        common.fail("Nothing of this can be undone.", 1)
    if not yes and not confirm(_told(steps), f"Undo {len(doable)} of {len(steps)} calls?"):
        common.fail("Nothing was undone.", 1)
    channel = TerminalChannel(" --demo" if demo else f" --config {settings.path}")
    ended = common.run(_carried_out, doable, settings, channel, common.local_agent(settings, agent))
    if as_json:
        common.dump([{**_as_json(step), **_ending(outcome)} for step, outcome in ended])
    else:
        for step, outcome in ended:
            said = "undone" if outcome.ok else f"not undone: {outcome.status}/{outcome.reason_code} {outcome.message}"
            print(safe(f"{step.call_id} ({step.tool}): {said}"))
        if len(ended) < len(doable):
            print(f"{len(doable) - len(ended)} before it were left as they are; undo them when it is settled.")
    last = ended[-1][1]
    raise typer.Exit(EXIT_CODES[last.status] if not last.ok else 1 if left_out else 0)


def _planned(settings: Config, calls: list[str], session: str | None) -> list[UndoStep]:
    if not calls and session is None:
        common.fail("name calls, by their ids (ringfence audit list), or --session NAME", 2)
    with common.reading(settings.gateway.state) as reader:
        found = [_identified(reader, each) for each in calls]
        if session is not None:
            found += list(_of_session(reader, session))
        try:
            catalog = catalog_of(settings, pins_of(settings))
        except StoreError as exc:
            common.fail(str(exc), 1)

        offered = {each.contract.name: each.definition for each in catalog.offered(settings.environment)}

        def schema(name: str) -> Json | None:
            definition = offered.get(name)
            body = None if definition is None else definition.body.get("inputSchema")
            return body if isinstance(body, dict) else None

        steps = plan(reader, contracts_of(settings), schema, found)
    if not steps:
        common.fail(f"no call on record was made in session {session}", 1)
    return steps


def _identified(reader: Reader, wanted: str) -> str:
    found = reader.call_ids(wanted, 2)
    if len(found) != 1:
        common.fail(f"{'no call' if not found else 'more than one call'} on record begins with {safe(wanted)}", 2)
    return found[0]


def _of_session(reader: Reader, session: str) -> Iterable[str]:
    """The calls of a client's session that changed something or may have, the newest first."""
    seen = 0
    for record in reader.records(kind="finished", newest_first=True):
        if (record.body.get("call") or {}).get("session") == session and record.body.get("effect") != "none":
            seen += 1
            if seen > _MAX_CALLS:
                common.fail(f"the session has more than {_MAX_CALLS} calls: name them", 2)
            yield str(record.call_id)


def _told(steps: list[UndoStep]) -> str:
    lines = []
    for step in steps:
        if step.compensate is not None:
            given = canonical.dumps(step.arguments).decode()
            lines.append(f"{step.call_id} ({step.tool}): {step.compensate} {given}")
        else:
            word = "nothing to undo" if step.nothing else "CANNOT BE UNDONE"
            lines.append(f"{step.call_id} ({step.tool}): {word}: {step.why_not}")
    return "\n".join(safe(line) for line in lines)


async def _carried_out(
    steps: list[UndoStep], settings: Config, channel: TerminalChannel, agent: str | None
) -> list[tuple[UndoStep, Outcome]]:
    from ringfence.compose.gateway import App  # noqa: PLC0415 - a plan needs none

    ended: list[tuple[UndoStep, Outcome]] = []
    async with App.open(settings, agent=agent) as app:
        for step in steps:
            made = Call(
                canonical.new_id("call"),
                app.agent,
                str(step.compensate),
                step.arguments or {},
                origin="cli",
                parent=step.call_id,
                idempotency_key=f"undo:{step.call_id}",
            )
            outcome = await app.handle(made, channel)
            ended.append((step, outcome))
            if outcome.status is not Status.SUCCESS:
                break
    return ended


def _as_json(step: UndoStep) -> Json:
    return {
        "call_id": step.call_id,
        "tool": step.tool,
        "compensate": step.compensate,
        "arguments": step.arguments,
        "why_not": step.why_not or None,
    }


def _ending(outcome: Outcome) -> Json:
    told = {"status": str(outcome.status), "reason_code": outcome.reason_code, "call_id_of_undo": None}
    return {**told, "call_id_of_undo": outcome.facts.get("call_id"), "approval_id": outcome.approval_id}
