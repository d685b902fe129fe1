"""`ringfence undo`: take back what calls did, the last first, each by a governed call of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from pathlib import Path

import typer

from ringfence import identity
from ringfence.cli import common, options
from ringfence.cli.call import CallResult, TypedCall, call_there, result_of, token_for
from ringfence.cli.common import EXIT_CODES, TerminalChannel
from ringfence.cli.terminal import confirm, cut, foreign, moment, safe
from ringfence.compose.offline import catalog_of, pins_of
from ringfence.compose.runs import contracts_of
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.errors import StoreError
from ringfence.core.model import Call, Json, Status
from ringfence.governance.undo import TRIED, UndoGroup, UndoStep, calls_of, plan, tried
from ringfence.store import Reader, Store, Transaction

_MAX_CALLS = 1000
"""Calls of one group."""
_LONGEST = 500
"""Characters of what a server says of its failure."""
_NOBODY = UndoGroup()
Maker = Callable[[UndoStep], Awaitable[CallResult]]
"""Makes the call that undoes another."""
Ended = tuple[UndoStep, CallResult]


def undo(
    calls: list[str] = typer.Argument(None, metavar="CALL…", help="Ids of calls, or their beginnings."),
    session: str | None = typer.Option(
        None, "--session", metavar="NAME", help="Calls that were made in this session of a client."
    ),
    agent: str | None = typer.Option(None, "--agent", metavar="NAME", help="Calls that this agent made."),
    since: str | None = typer.Option(None, "--since", metavar="TIME", help="Calls from this time on (ISO 8601, UTC)."),
    until: str | None = typer.Option(None, "--until", metavar="TIME", help="Up to, not including, this time."),
    only_plan: bool = typer.Option(False, "--plan", help="Only tell what would be done, and what cannot be."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask on the terminal first."),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_agent: str | None = typer.Option(
        None, "--as", metavar="NAME", help="The agent, of those under agents:, that undoes them."
    ),
    url: options.GatewayUrl = None,
    token_file: options.TokenFile = None,
    as_json: options.PrintJson = False,
) -> None:
    """Undo calls, the last first, with what their contracts name for it (effects.compensate).

    Calls are named by their ids, or as a group: by session, agent and time, and all of these that are given must fit.
    First it tells what will be called, and what cannot be undone and why; then it asks. Each step is a call like any
    other: policy decides on it, people may have to approve it, and it is on record. It stops at the first that does not
    succeed, so that nothing is taken back out of order; undo again to go on. What is undone already is not undone
    twice.

    Calls are looked up in the state of --config. They are undone in this process, with servers started anew, or by a
    running gateway (--url): where a server keeps what it made in its own memory, only that gateway reaches it.

    Exit code: 0 all was undone, 1 something cannot be or failed, 125 unavailable or unknown, 126 denied or approval
    needed.

    \b
    ringfence undo call_0123456789abcdef0123 --plan
    ringfence undo --agent analyst --since 2026-03-01T08:30
    ringfence undo --session migration-7 --url http://127.0.0.1:8700/mcp
    """
    group = UndoGroup(session, agent, common.read_time(since, "--since"), common.read_time(until, "--until"))
    _check(calls or [], group, url, as_agent, token_file)
    settings = common.demo_config() if demo else common.load(config_path)
    steps = _planned(settings, calls or [], group)
    left_out = [step for step in steps if step.compensate is None and not step.nothing]
    if only_plan:
        if as_json:
            common.dump([_as_json(step) for step in steps])
        else:
            print(_told(steps))
        raise typer.Exit(1 if left_out else 0)
    doable = [step for step in steps if step.compensate is not None]
    if not as_json and (yes or not doable):
        print(_told(steps))
    if not doable and left_out:
        common.fail("Nothing of this can be undone.", 1)
    if doable and not yes and not confirm(_told(steps), f"Undo {len(doable)} of {len(steps)} calls?"):
        common.fail("Nothing was undone.", 1)
    channel = TerminalChannel(" --demo" if demo else f" --config {settings.path}")
    ended: list[Ended] = []
    if doable and url is not None:
        make = partial(_there, url, token_for(url, token_file), channel)
        with common.writing(settings.gateway.state) as store:
            ended = common.run(_one_by_one, doable, store, make)
    elif doable:
        ended = common.run(_here, doable, settings, channel, common.local_agent(settings, as_agent))
    _report(ended, len(doable) - len(ended), as_json)
    last = ended[-1][1] if ended else None
    if last is not None and last.status is Status.APPROVAL_REQUIRED and "approval_id" in last.more:
        channel.left_open(str(last.more["approval_id"]))
    code = EXIT_CODES[last.status] if last is not None else 0
    raise typer.Exit(code or (1 if left_out else 0))


def _check(calls: list[str], group: UndoGroup, url: str | None, as_agent: str | None, token_file: Path | None) -> None:
    if calls and group != _NOBODY:
        text = "calls are named by their ids, or chosen by --session, --agent, --since and --until: give one of them"
        common.fail(f"{text} (--as NAME says which agent undoes them)", 2)
    if not calls and group.session is None and group.agent is None and group.since is None:
        common.fail("name calls, by their ids (ringfence audit list), or by --session, --agent or --since", 2)
    if url is not None and as_agent is not None:
        common.fail("--as is for a gateway in this process; to --url, a token says which agent it is", 2)
    if url is None and token_file is not None:
        common.fail("--token-file is for --url", 2)


# ── Which calls, and how ──────────────────────────────────────────────────────────────────────────


def _planned(settings: Config, calls: list[str], group: UndoGroup) -> list[UndoStep]:
    with common.reading(settings.gateway.state) as reader:
        found = [_identified(reader, each) for each in calls]
        if not calls:
            found = list(islice(calls_of(reader, group), _MAX_CALLS + 1))
            if len(found) > _MAX_CALLS:
                common.fail(f"these are more than {_MAX_CALLS} calls: say which, with --since and --until", 2)
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
        common.fail("no call on record is one of these and may have changed anything", 1)
    return steps


def _identified(reader: Reader, wanted: str) -> str:
    found = reader.call_ids(wanted, 2)
    if len(found) != 1:
        common.fail(f"{'no call' if not found else 'more than one call'} on record begins with {safe(wanted)}", 2)
    return found[0]


# ── Doing it ──────────────────────────────────────────────────────────────────────────────────────


async def _one_by_one(steps: list[UndoStep], store: Store, make: Maker) -> list[Ended]:
    """Each step, with what came of it on record beside the call that it undoes, up to the first that fails."""
    ended: list[Ended] = []
    person = identity.os_user()
    for step in steps:
        result = await make(step)
        ended.append((step, result))
        said = tried(result.more.get("call_id"), result.status, person)
        if said is not None:
            await store.write(partial(_on_record, step.call_id, said), durable=True)
        if result.status is not Status.SUCCESS:
            break
    return ended


def _on_record(call_id: str, said: Json, tx: Transaction) -> None:
    tx.append(TRIED, call_id, said)


async def _here(steps: list[UndoStep], settings: Config, channel: TerminalChannel, agent: str | None) -> list[Ended]:
    from ringfence.compose.gateway import App  # noqa: PLC0415 - neither a plan nor another gateway needs it

    async with App.open(settings, agent=agent) as app:

        async def make(step: UndoStep) -> CallResult:
            made = Call(
                canonical.new_id("call"),
                app.agent,
                str(step.compensate),
                step.arguments or {},
                origin="cli",
                parent=step.call_id,
                idempotency_key=step.key,
            )
            return result_of(await app.handle(made, channel), made.id)

        return await _one_by_one(steps, app.store, make)


async def _there(url: str, token: str | None, channel: TerminalChannel, step: UndoStep) -> CallResult:
    arguments = step.arguments or {}
    text = canonical.dumps(arguments).decode()
    wanted = TypedCall(str(step.compensate), text, arguments, fault=None, timeout=None, key=step.key)
    return await call_there(wanted, url, channel, token)


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _told(steps: list[UndoStep]) -> str:
    lines = []
    for step in steps:
        about = f"{step.call_id} ({step.tool} by {foreign(step.agent)}, {moment(step.began)})"
        if step.compensate is not None:
            given = canonical.dumps(step.arguments).decode()
            lines.append(f"{about}: {step.compensate} {given}")
        else:
            word = "nothing to undo" if step.nothing else "CANNOT BE UNDONE"
            lines.append(f"{about}: {word}: {step.why_not}")
    return "\n".join(safe(line) for line in lines)


def _report(ended: list[tuple[UndoStep, CallResult]], left: int, as_json: bool) -> None:
    if as_json:
        common.dump([{**_as_json(step), **_ending(result)} for step, result in ended])
        return
    for step, result in ended:
        said = f"not undone: {result.status}/{result.reason_code} {_why(result)}"
        print(safe(f"{step.call_id} ({step.tool}): {'undone' if result.status is Status.SUCCESS else said}"))
    if left:
        print(f"{left} before it were left as they are; undo them when it is settled.")


def _why(result: CallResult) -> str:
    texts = [str(each.get("text") or "") for each in result.content if isinstance(each, dict)]
    return cut(" ".join(texts).strip(), _LONGEST)


def _as_json(step: UndoStep) -> Json:
    return {
        "call_id": step.call_id,
        "tool": step.tool,
        "agent": step.agent,
        "began_at": step.began,
        "compensate": step.compensate,
        "arguments": step.arguments,
        "why_not": step.why_not or None,
    }


def _ending(result: CallResult) -> Json:
    told = {"status": str(result.status), "reason_code": result.reason_code}
    return {**told, "call_id_of_undo": result.more.get("call_id"), "approval_id": result.more.get("approval_id")}
