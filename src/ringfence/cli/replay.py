"""`ringfence audit replay`: run a recorded program again and compare."""

from __future__ import annotations

from functools import partial

import typer

from ringfence.cli import common
from ringfence.cli.terminal import painted, quoted, safe, table
from ringfence.compose.replay import Replayed, replay
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.governance.replaying import Difference
from ringfence.store.rows import Payload

_WITHHELD = {
    "secret": "its arguments contained a secret, or text that looks like one, so they were not kept",
    "inputs": "it had input files or standard input besides its arguments, and those are not kept",
}
"""Why the arguments of a program were not kept, by `withheld` of `remembered.run_to_keep`."""


def replay_call(
    settings: Config, call: tuple[str, list[Json]], kept: tuple[Payload | None, bool | None], *, as_json: bool
) -> None:
    """Run the call's program again and print the differences. `call` is its id and records, `kept` what is kept of the
    program and whether that is what was recorded. Exits with 1 where something differs, with 2 where it cannot be run
    again."""
    call_id, bodies = call
    program = _program(call_id, bodies, *kept)
    done: Replayed = common.run(partial(replay, settings, program, call_id))
    if as_json:
        common.dump(
            {
                "call_id": call_id,
                "same": done.same,
                "runs": done.runs,
                "differences": [_as_json(each) for each in done.differences],
                "environment": [_as_json(each) for each in done.environment],
            }
        )
    else:
        _print(call_id, program, done)
    if not done.same:
        raise typer.Exit(1)


def _as_json(each: Difference) -> Json:
    return {"what": each.what, "kinds": list(each.kinds), "then": each.then, "now": each.now}


def _program(call_id: str, bodies: list[Json], kept: Payload | None, confirmed: bool | None) -> Json:
    """The program as it was kept. Exits where it was not kept, or where its record does not confirm it."""
    if kept is None:
        common.fail(f"{call_id} cannot be run again: {_why_not_kept(bodies)}", 2)
    if not confirmed:
        text = f"{call_id} is not run again: the kept program is not the one on record"
        common.fail(f"{text}; check the log with: ringfence audit verify", 2)
    program: Json = canonical.loads(kept.body)
    if program["arguments"] is None:
        common.fail(f"{call_id} cannot be run again: {_WITHHELD[program['withheld']]}", 2)
    return program


def _why_not_kept(bodies: list[Json]) -> str:
    if any(body["kind"] == "payload_erased" for body in bodies):
        return "the kept program was erased"
    ended = next((body for body in bodies if body["kind"] == "finished"), None)
    if ended is None:
        return "it has not ended"
    of_session = ended.get("facts", {}).get("session") or {}
    of_session = of_session.get("session", of_session)
    if of_session.get("id"):
        step = f"step {of_session['step']} of" if of_session.get("step") else "made in"
        return (
            f"it was {step} session {of_session['id']}, and went by what was in there: what earlier steps, other"
            " contexts and background commands had left is not kept. What was kept of this call itself:"
            f" ringfence audit show {ended.get('call_id')}"
        )
    if ended.get("started_seq") is None:
        return "it never ran"
    if ended.get("call", {}).get("server"):
        return "a server carried it out, and could have its effects again; only programs in boxes are run again"
    return "its program was not kept; write `record: full` under its capability to keep those of later calls"


def _print(call_id: str, program: Json, done: Replayed) -> None:
    times = "once" if done.runs == 1 else f"{done.runs} times"
    print(f"{safe(call_id)} ran again {times}, in fresh boxes without a network; each run is on record.")
    if program["programs"]:
        print("Its contract limits the programs in its box; in these runs there was no such limit.")
    if done.same:
        print(painted("Nothing differs: how it ended, what it wrote and showed, and its files are the same.", "good"))
    else:
        rows = [[safe(each.what), " and ".join(each.kinds)] for each in done.differences]
        print(table(["DIFFERS", "BY"], rows))
        for each in done.differences:
            for when, text in (("then", each.then), ("now", each.now)):
                print(f"\n{safe(each.what)}, {when}:\n{quoted(text, '  ')}")
    if done.environment:
        print("\nIts environment has changed:")
        print(table(None, [[safe(each.what), safe(each.then), "->", safe(each.now)] for each in done.environment]))
