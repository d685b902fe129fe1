"""Sessions are opened, paused, resumed, forked and closed; snapshots and volumes outlive them."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.box import MIB
from ringfence.errors import Refused
from ringfence.model import Answer, Json, Status
from ringfence.sandbox import order
from ringfence.sandbox.calls.task import Carry, Task, session_json
from ringfence.sandbox.snapshots import Snapshot
from ringfence.sandbox.volumes import Volume
from ringfence.sessions import Problem, SessionInfo

_VOLUME_BYTES = 1024 * MIB
_MOST_PAST = 32


async def open_session(task: Task) -> Answer:
    try:
        wanted = order.session(task.grant, task.provision, task.passage, task.packed)
        info = await task.keeper.create(task.owner, wanted)
        task.learn(info)
    except ValueError as exc:
        raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such session can be opened: {exc}") from None
    text = f"Session {info.id} is {info.state}; it is closed at {info.expires_at}. A pause does not count."
    ports = {name: await task.keeper.show(task.owner, info.id, name) for name, _ in wanted.stay.listening.ports or ()}
    if not ports:
        return task.told(info, text)
    places = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    shown = ", ".join(f"{name} at {place}" for name, place in places.items())
    answer = task.told(info, f"{text} What listens in it is shown on this machine's loopback: {shown}.")
    assert answer.result is not None
    answer.result["structuredContent"]["ports"] = places
    return answer


async def close_session(task: Task) -> Answer:
    info = await task.keeper.end(task.owner, task.session)
    return task.told(info, f"Session {info.id} is {info.state}.")


async def pause_session(task: Task) -> Answer:
    info = await task.keeper.pause(task.owner, task.session)
    return task.told(info, f"Session {info.id} is {info.state}.")


async def resume_session(task: Task) -> Answer:
    info = await task.keeper.resume(task.owner, task.session)
    return task.told(info, f"Session {info.id} is {info.state}; it is closed at {info.expires_at}.")


async def extend_session(task: Task) -> Answer:
    info = await task.keeper.extend(task.owner, task.session, float(task.given["lifetime_seconds"]))
    return task.told(info, f"Session {info.id} is closed at {info.expires_at}.")


async def list_sessions(task: Task) -> Answer:
    if "session" in task.given:
        infos = [await task.keeper.info(task.owner, task.session)]
    else:
        infos = list(await task.keeper.list(task.owner))
        if not task.wide or task.given.get("ended"):
            infos += (await task.keeper.past(task.owner))[-_MOST_PAST:]
    sessions = [session_json(info, wide=task.wide) for info in infos]
    return task.listed({"sessions": sessions}, "\n".join(map(_line, infos)) or "There are no sessions.")


def _line(info: SessionInfo) -> str:
    words = f"{info.id}: {info.state}, template {info.template}, step {info.step}"
    if info.state == "stopped":
        return f"{words}, ended at {info.ended_at} ({info.why})"
    return f"{words}, until {info.expires_at}" if info.expires_at else words


async def interrupt_session(task: Task) -> Answer:
    interrupted = await task.keeper.interrupt(task.owner, task.session, task.given.get("context", "default"))
    return task.done({"interrupted": interrupted}, "It was interrupted." if interrupted else "Nothing was running.")


async def expose_port(task: Task) -> Answer:
    port = await task.keeper.show(task.owner, task.session, task.given["port"])
    told = f"Port {task.given['port']} of session {task.session} is 127.0.0.1:{port} on this machine."
    return task.done({"host": "127.0.0.1", "port": port}, told)


async def fork_session(task: Task) -> Answer:
    """One by one: that one could not be made says nothing of the others."""
    made = await task.keeper.fork(task.owner, task.session, task.given["count"])
    told = [_fork(each, task.wide) for each in made]
    lines = [f"{each.reason_code}: {each.message}" if isinstance(each, Problem) else _line(each) for each in made]
    problems = [each for each in made if isinstance(each, Problem)]
    if problems and len(problems) == len(made):
        raise Refused(Status.FAILED, problems[0].reason_code, f"none could be made: {problems[0].message}")
    return task.done({"sessions": told}, "\n".join(lines))


def _fork(made: SessionInfo | Problem, wide: bool) -> Json:
    if isinstance(made, Problem):
        return {"error": {"reason_code": made.reason_code, "message": made.message}}
    return session_json(made, wide=wide)


# ── Snapshots ─────────────────────────────────────────────────────────────────────────────────────


async def snapshot_session(task: Task) -> Answer:
    kept = await task.keeper.snapshot(task.owner, task.session, task.given.get("name"))
    words = f"Snapshot {kept.name or kept.id}: {kept.files} files, {kept.bytes} bytes. Open others from it with"
    words += f" open_session(snapshot={kept.id!r})."
    return task.done(_snapshot(kept), words)


async def list_snapshots(task: Task) -> Answer:
    found = await task.keeper.snapshots(task.owner)
    return task.listed({"snapshots": [_snapshot(each) for each in found]}, f"{len(found)} snapshots")


async def remove_snapshot(task: Task) -> Answer:
    await task.keeper.remove_snapshot(task.owner, task.given["snapshot"])
    return task.listed({}, "It is removed.")


def _snapshot(kept: Snapshot) -> Json:
    told: Json = {"snapshot": kept.id, "name": kept.name, "bytes": kept.bytes, "files": kept.files}
    return {**told, "created_at": kept.created_at}


# ── Volumes ───────────────────────────────────────────────────────────────────────────────────────


async def create_volume(task: Task) -> Answer:
    given = task.given
    made = await task.keeper.create_volume(
        task.owner, given["name"], given.get("max_bytes", _VOLUME_BYTES), given.get("mode", "ro")
    )
    return task.listed(_volume(made), f"Volume {made.name} is there.")


async def list_volumes(task: Task) -> Answer:
    found = await task.keeper.volumes(task.owner)
    return task.listed({"volumes": [_volume(each) for each in found]}, f"{len(found)} volumes")


async def remove_volume(task: Task) -> Answer:
    await task.keeper.remove_volume(task.owner, task.given["name"])
    return task.listed({}, "It is removed.")


def _volume(volume: Volume) -> Json:
    told: Json = {"name": volume.name, "owner": list(volume.owner), "max_bytes": volume.max_bytes, "mode": volume.mode}
    told |= {"shared_with": list(volume.shared_with), "created_at": volume.created_at, "saved_at": volume.saved_at}
    return {**told, "bytes": volume.bytes, "files": volume.files}


CALLS: Mapping[str, Carry] = {
    call.__name__: call
    for call in (
        *(open_session, close_session, pause_session, resume_session, extend_session, list_sessions),
        *(interrupt_session, expose_port, fork_session, snapshot_session, list_snapshots, remove_snapshot),
        *(create_volume, list_volumes, remove_volume),
    )
}
