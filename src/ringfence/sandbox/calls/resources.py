"""What sessions leave in /workspace/output, as MCP resources: of those that live, and for a time of those that did."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from ringfence.errors import Refused, RingfenceError
from ringfence.model import Answer, Json, Principal, Status
from ringfence.sandbox.addresses import OUTPUT, TEMPLATE, address, as_text, located, type_of
from ringfence.sandbox.calls.task import Task, owner_of
from ringfence.sandbox.results import SPARE_BYTES
from ringfence.sandbox.verbs import Keeping
from ringfence.sessions import Within

MOST_LISTED = 1000
_DEEPEST = 8
_MOST_PAST = 32


async def listed(keeper: Keeping, principal: Principal) -> list[Json]:
    """All that a caller may read, and nobody else."""
    owner = owner_of(principal)
    out: list[Json] = []
    past = list(await keeper.past(owner))[-_MOST_PAST:]
    for info in [*await keeper.list(owner), *reversed(past)]:
        if info.state == "starting":
            continue
        try:
            found = await keeper.entries(owner, info.id, OUTPUT, _DEEPEST)
        except RingfenceError:
            continue  # it ended just now, nothing was kept, or the program in it put something else there
        for entry in found:
            if entry.kind == "file" and len(out) < MOST_LISTED:
                about: Json = {"uri": address(info.id, entry.path), "name": entry.path.removeprefix(f"{OUTPUT}/")}
                out.append({**about, "size": entry.bytes, "description": f"left by session {info.id}"})
    return out


def templates() -> Sequence[Json]:
    told: Json = {"uriTemplate": TEMPLATE, "name": "Output of a session"}
    return [{**told, "description": "A file that a session left in /workspace/output."}]


def _unknown(uri: str) -> Refused:
    return Refused(Status.VALIDATION_FAILURE, "unknown_resource", f"no resource {uri!r} is offered")


async def read(task: Task) -> Answer:
    """One file, whole: MCP has no parts of a resource."""
    uri = str(task.given["uri"])
    found = located(uri)
    if found is None:
        raise _unknown(uri)
    session, path = found
    most = (task.most_bytes - SPARE_BYTES) * 3 // 4
    try:
        data = await task.keeper.read(task.owner, session, path, 0, most + 1)
    except Refused as exc:
        if exc.status is not Status.VALIDATION_FAILURE:
            raise
        raise _unknown(uri) from None  # no such session, or not theirs, or no such file: all the same to them
    if len(data) > most:
        text = f"{path} is longer than the {most} bytes that fit; read parts of it with read_file"
        raise Refused(Status.FAILED, "result_too_large", text)
    mime = type_of(path, data)
    told: Json = {"uri": uri, "mimeType": mime}
    words = None if mime.startswith("image/") and mime != "image/svg+xml" else as_text(data)
    if words is not None and len(words) * 6 < task.most_bytes:
        told["text"] = words
    else:
        told["blob"] = base64.b64encode(data).decode()
    return Answer({"contents": [told]}, isolation=task.isolation, within=Within(session))
