"""`ringfence audit replay`: what a recorded program does when it is run again."""

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
    "secret": "its arguments held what is a secret, or looks like one, so they were not kept",
    "inputs": "files or input were given beside its arguments, and those are not kept",
}


def replay_call(
    settings: Config, call: tuple[str, list[Json]], kept: tuple[Payload | None, bool | None], *, as_json: bool
) -> None:
    """Run it again and tell. Exits with 1 where it differs, with 2 where it cannot be run again."""
    call_id, bodies = call
    program = _program(call_id, bodies, *kept)
    done: Replayed = common.run(partial(replay, settings, program, call_id))
    if as_json:
        told = [_told(each) for each in done.differences]
        around = [_told(each) for each in done.environment]
        common.dump(
            {"call_id": call_id, "same": done.same, "runs": done.runs, "differences": told, "environment": around}
        )
    else:
        _print(call_id, program, done)
    if not done.same:
        raise typer.Exit(1)


def _told(each: Difference) -> Json:
    return {"what": each.what, "kinds": list(each.kinds), "then": each.then, "now": each.now}


def _program(call_id: str, bodies: list[Json], kept: Payload | None, right: bool | None) -> Json:
    """What was kept of the program, or an end that says why it is not there."""
    if kept is None:
        common.fail(f"{call_id} cannot be run again: {_why(bodies)}", 2)
    if not right:
        common.fail(f"{call_id} is not run again: what is kept of it is not what was recorded; see: audit verify", 2)
    program: Json = canonical.loads(kept.body)
    if program["arguments"] is None:
        common.fail(f"{call_id} cannot be run again: {_WITHHELD[program['withheld']]}", 2)
    return program


def _why(bodies: list[Json]) -> str:
    if any(body["kind"] == "payload_erased" for body in bodies):
        return "what was kept of it was erased"
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
        return "a server carried it out, and may do so again; only programs in boxes of their own are run again"
    return "nothing is kept of it; write `record: full` under its capability, for calls from then on"


def _print(call_id: str, program: Json, done: Replayed) -> None:
    times = "once" if done.runs == 1 else f"{done.runs} times"
    print(f"{safe(call_id)} ran again {times}, in fresh boxes without a network; each run is on record.")
    if program["programs"]:
        print("Its contract limits the programs in its box; here all of them were there.")
    if done.same:
        print(painted("Nothing differs: how it ended, what it wrote and showed, and its files are the same.", "good"))
    else:
        rows = [[safe(each.what), " and ".join(each.kinds)] for each in done.differences]
        print(table(["DIFFERS", "BY"], rows))
        for each in done.differences:
            for when, text in (("then", each.then), ("now", each.now)):
                print(f"\n{safe(each.what)}, {when}:\n{quoted(text, '  ')}")
    if done.environment:
        print("\nAround it is now another:")
        print(table(None, [[safe(each.what), safe(each.then), "->", safe(each.now)] for each in done.environment]))
