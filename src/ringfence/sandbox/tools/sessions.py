"""Tools for sessions, from creation to end, and for the snapshots and volumes that outlive them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringfence.core import invisible
from ringfence.core.box import MIB
from ringfence.core.errors import Refused, WorkProgress
from ringfence.core.model import Answer, Json, Mode, Status
from ringfence.core.sessions import ForkProblem, SessionInfo
from ringfence.sandbox.tools import request
from ringfence.sandbox.tools.definition import (
    ACCESS,
    DIGEST,
    FLAG,
    INFO,
    ONE,
    STATE,
    TEXT,
    TEXTS,
    CarriedCode,
    Changes,
    Tool,
    named,
)
from ringfence.sandbox.tools.limits import limits_schema
from ringfence.sandbox.tools.task import Task, session_json

if TYPE_CHECKING:
    from ringfence.sandbox.sessions.snapshots import Snapshot
    from ringfence.sandbox.sessions.volumes import Volume

MAX_FORKS_PER_CALL = 32
_SET_UP = CarriedCode("setup", "execute_python", "code")
_VOLUMES: Json = {
    "type": "array",
    "description": "Durable folders.",
    "items": {
        "type": "object",
        "properties": {"name": TEXT, "at": TEXT, "mode": {"enum": ["ro", "rw"]}},
        "required": ["name", "at"],
        "additionalProperties": False,
    },
}
_OPENING: Json = {
    "template": TEXT,
    "lifetime_seconds": {"type": "number", "minimum": 1},
    "idle_seconds": {"type": "number", "minimum": 1},
    "metadata": TEXTS,
    "snapshot": TEXT,
    "volumes": _VOLUMES,
    "setup": {"type": "string", "description": "Python to begin each interpreter with."},
}
_OPENING_WIDE: Json = {
    "lifetime_seconds": {"type": "number", "exclusiveMinimum": 0},
    "idle_seconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
    "limits": limits_schema(),
    "env": TEXTS,
    "auto_resume": FLAG,
    "retain": {"enum": ["none", "output"]},
    **ACCESS,
    "image": TEXT,
    "backend": TEXT,
    "memory_layout": {"enum": ["shared", "fresh"]},
    "inputs": {"type": "array", "items": DIGEST},
}
_PORT: Json = {
    "type": ["integer", "string"],
    "minimum": 1,
    "maximum": 65_535,
    "maxLength": 100,
    "description": "In the box, or its name in the contract.",
}
_VOLUME_BYTES = 1024 * MIB
_MAX_PAST = 32
_MAX_PAST_SHOWN = 10
"""To a model."""


@Tool(
    Mode.WRITE,
    Changes.SET_UP,
    "Open a session: a box that stays, to work in step by step. Give its name as `session` to execute_python,"
    " run_shell and the tools for files and processes. Paths are those of the box; it starts in /workspace, empty."
    " Python {python}; packages: {packages}. Network: {network}. Listening: {listening}."
    " Limits of the box, all steps together: {limits}; of one step: {timeout}."
    " It is closed {lifetime} after it was opened ({most_lifetime} at most), and paused after {idle} without work until"
    " it is used. Files in /workspace/output, a folder that you make, are resources, {retain} longer than it. Close it"
    " when you are done.",
    _OPENING,
    gives={**INFO, **named("ports")},
    wide=_OPENING_WIDE,
    makes_box=True,
    carries=_SET_UP,
)
async def open_session(task: Task) -> Answer:
    metadata: Mapping[str, str] = task.given.get("metadata") or {}
    if task.screen.holds_secret([*metadata, *metadata.values()]):
        with WorkProgress():
            text = "metadata are kept as they are, and these hold a secret: leave it out"
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", text)
    try:
        wanted = request.session(task.grant, task.provision, task.route, task.installed, task.kept, task.image)
        info = await task.keeper.create(task.owner, wanted)
        task.learn(info)
    except ValueError as exc:
        with WorkProgress():
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such session can be opened: {exc}") from None
    text = f"Session {info.id} is {info.state}; it is closed at {info.expires_at}. A pause does not count."
    listening = wanted.stay.listening.ports or ()
    with WorkProgress(begun=True):
        ports = {name: await task.keeper.show(task.owner, info.id, name) for name, _ in listening}
    if not ports:
        return task.session_answer(info, text)
    places = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    shown = ", ".join(f"{name} at {place}" for name, place in places.items())
    answer = task.session_answer(info, f"{text} What listens in it is shown on this machine's loopback: {shown}.")
    assert answer.result is not None
    answer.result["structuredContent"]["ports"] = places
    return answer


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "End a session. Of its files only those in /workspace/output are kept.",
    ONE,
    ("session",),
    {**STATE, **named("not_kept")},
    destructive=True,
)
async def close_session(task: Task) -> Answer:
    info = await task.keeper.end(task.owner, task.session)
    lost = "".join(f"\n{invisible.visible(each)}" for each in info.not_kept)
    return task.session_answer(info, f"Session {info.id} is {info.state}.{lost}")


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "Freeze a session, including its timers, until it is used or resumed.",
    ONE,
    ("session",),
    STATE,
)
async def pause_session(task: Task) -> Answer:
    info = await task.keeper.pause(task.owner, task.session)
    return task.session_answer(info, f"Session {info.id} is {info.state}.")


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "Resume a paused session. Using it also resumes it.",
    ONE,
    ("session",),
    STATE,
)
async def resume_session(task: Task) -> Answer:
    info = await task.keeper.resume(task.owner, task.session)
    return task.session_answer(info, f"Session {info.id} is {info.state}; it is closed at {info.expires_at}.")


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "List your sessions, including recently stopped ones and why they stopped.",
    {},
    gives=named("sessions"),
    wide={"session": TEXT, "ended": FLAG},
)
async def list_sessions(task: Task) -> Answer:
    if "session" in task.given:
        infos = [await task.keeper.info(task.owner, task.session)]
    else:
        infos = list(await task.keeper.list(task.owner))
        if not task.wide or task.given.get("ended"):
            infos += (await task.keeper.past(task.owner))[-(_MAX_PAST if task.wide else _MAX_PAST_SHOWN) :]
        infos = [info for info in infos if task.wide or info.opened_by is not None or task.is_handed_over(info.id)]
    sessions = [session_json(info, wide=task.wide) for info in infos]
    return task.listing({"sessions": sessions}, "\n".join(map(_line, infos)) or "There are no sessions.")


def _line(info: SessionInfo) -> str:
    words = f"{info.id}: {info.state}, template {info.template}, step {info.step}"
    if info.state == "stopped":
        return f"{words}, ended at {info.ended_at} ({info.why})"
    return f"{words}, until {info.expires_at}" if info.expires_at else words


@Tool(
    Mode.WRITE,
    Changes.LASTING,
    "Keep the files, template and packages of a session, not its variables: open_session(snapshot=…).",
    {**ONE, "name": TEXT},
    ("session",),
    named("session", "snapshot", "name", "bytes", "files", "created_at", "template", "packages"),
)
async def snapshot_session(task: Task) -> Answer:
    kept = await task.keeper.snapshot(task.owner, task.session, task.given.get("name"), not task.wide)
    words = f"Snapshot {kept.name or kept.id}: {kept.files} files, {kept.bytes} bytes. Open others from it with"
    words += f" open_session(snapshot={kept.id!r})."
    return task.answer(_snapshot(kept), words)


@Tool(
    Mode.WRITE,
    Changes.SET_UP,
    "Open several sessions that begin with the files of this one, not with its variables.",
    {**ONE, "count": {"type": "integer", "minimum": 1, "maximum": MAX_FORKS_PER_CALL}},
    ("session", "count"),
    named("session", "sessions"),
    carries=_SET_UP,  # that of the session: it runs again in each
)
async def fork_session(task: Task) -> Answer:
    """Fork one by one: each succeeds or fails by itself."""
    made = await task.keeper.fork(task.owner, task.session, task.given["count"])
    forks = [_fork(each, task.wide) for each in made]
    lines = [f"{each.reason_code}: {each.message}" if isinstance(each, ForkProblem) else _line(each) for each in made]
    problems = [each for each in made if isinstance(each, ForkProblem)]
    if problems and len(problems) == len(made):
        raise Refused(Status.FAILED, problems[0].reason_code, f"none could be made: {problems[0].message}")
    return task.answer({"sessions": forks}, "\n".join(lines))


def _fork(made: SessionInfo | ForkProblem, wide: bool) -> Json:
    if isinstance(made, ForkProblem):
        return {"error": {"reason_code": made.reason_code, "message": made.message}}
    return session_json(made, wide=wide)


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "Raise KeyboardInterrupt in the Python that runs in a session. Its variables stay.",
    {**ONE, "context": TEXT},
    ("session",),
    named("session", "interrupted"),
)
async def interrupt_session(task: Task) -> Answer:
    interrupted = await task.keeper.interrupt(task.owner, task.session, task.given.get("context", "default"))
    return task.answer({"interrupted": interrupted}, "It was interrupted." if interrupted else "Nothing was running.")


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "End an interpreter of a session. The next cell of its context has a fresh one.",
    {**ONE, "context": TEXT},
    ("session",),
    only_wide=True,
)
async def restart_context(task: Task) -> Answer:
    return await _end_context(task, remove=False)


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "End an interpreter of a session, and forget its context.",
    {**ONE, "context": TEXT},
    ("session", "context"),
    only_wide=True,
)
async def remove_context(task: Task) -> Answer:
    return await _end_context(task, remove=True)


async def _end_context(task: Task, *, remove: bool) -> Answer:
    ended = await task.keeper.end_context(task.owner, task.session, task.given.get("context", "default"), remove)
    return task.answer({"ended": ended}, "It has ended." if ended else "There was no such interpreter.")


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "Give a session this lifetime, counted from now.",
    {**ONE, "lifetime_seconds": {"type": "number", "exclusiveMinimum": 0}},
    ("session", "lifetime_seconds"),
    only_wide=True,
)
async def extend_session(task: Task) -> Answer:
    info = await task.keeper.extend(task.owner, task.session, float(task.given["lifetime_seconds"]))
    return task.session_answer(info, f"Session {info.id} is closed at {info.expires_at}.")


@Tool(
    Mode.WRITE,
    Changes.SESSION,
    "Let what listens at a port of a session's box be reached on this machine's loopback, by its owner alone, until"
    " the session ends. No other user can connect, and the box reaches nothing by it.",
    {**ONE, "port": _PORT},
    ("session", "port"),
    named("session", "host", "port"),
    if_declared=True,
)
async def expose_port(task: Task) -> Answer:
    port = await task.keeper.show(task.owner, task.session, task.given["port"])
    words = f"Port {task.given['port']} of session {task.session} is 127.0.0.1:{port} on this machine."
    return task.answer({"host": "127.0.0.1", "port": port}, words)


# ── Snapshots ─────────────────────────────────────────────────────────────────────────────────────


@Tool(Mode.READ, Changes.NOTHING, "Snapshots, newest first.", {}, only_wide=True)
async def list_snapshots(task: Task) -> Answer:
    found = await task.keeper.snapshots(task.owner)
    return task.listing({"snapshots": [_snapshot(each) for each in found]}, f"{len(found)} snapshots")


@Tool(Mode.WRITE, Changes.LASTING, "Forget a snapshot.", {"snapshot": TEXT}, ("snapshot",), only_wide=True)
async def remove_snapshot(task: Task) -> Answer:
    await task.keeper.remove_snapshot(task.owner, task.given["snapshot"])
    return task.listing({}, "It is removed.")


def _snapshot(kept: Snapshot) -> Json:
    return {
        "snapshot": kept.id,
        "name": kept.name,
        "bytes": kept.bytes,
        "files": kept.files,
        "created_at": kept.created_at,
        "template": kept.template,
        "packages": list(kept.packages),
    }


# ── Volumes ───────────────────────────────────────────────────────────────────────────────────────


@Tool(
    Mode.WRITE,
    Changes.LASTING,
    "Make a durable folder that sessions can mount.",
    {"name": TEXT, "max_bytes": {"type": "integer", "minimum": 1}, "mode": {"enum": ["ro", "rw"]}},
    ("name",),
    only_wide=True,
)
async def create_volume(task: Task) -> Answer:
    given = task.given
    made = await task.keeper.create_volume(
        task.owner, given["name"], given.get("max_bytes", _VOLUME_BYTES), given.get("mode", "ro")
    )
    return task.listing(_volume(made), f"Volume {made.name} exists.")


@Tool(Mode.READ, Changes.NOTHING, "Durable folders.", {}, only_wide=True)
async def list_volumes(task: Task) -> Answer:
    found = await task.keeper.volumes(task.owner)
    return task.listing({"volumes": [_volume(each) for each in found]}, f"{len(found)} volumes")


@Tool(
    Mode.WRITE,
    Changes.LASTING,
    "Remove a volume with all that is in it.",
    {"name": TEXT},
    ("name",),
    only_wide=True,
)
async def remove_volume(task: Task) -> Answer:
    await task.keeper.remove_volume(task.owner, task.given["name"])
    return task.listing({}, "It is removed.")


def _volume(volume: Volume) -> Json:
    return {
        "name": volume.name,
        "owner": list(volume.owner),
        "max_bytes": volume.max_bytes,
        "mode": volume.mode,
        "shared_with": list(volume.shared_with),
        "created_at": volume.created_at,
        "saved_at": volume.saved_at,
        "bytes": volume.bytes,
        "files": volume.files,
    }
