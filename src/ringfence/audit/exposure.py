"""Which calls could have used a secret: what to look at when it has leaked, or is to be withdrawn.

A call could use it if its contract names it, or if its server was given it. Whether it did is on record for each
request that it was put into; and what was removed from a result was there to be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringfence.audit.chain import Record
from ringfence.core.canonical import object_at
from ringfence.core.model import Json


def exposure(records: Iterable[Record], secret: str) -> list[Json]:
    """A row for each such call, in the order in which they began. `records` are in the order of the log."""
    servers: set[str] = set()
    rows: dict[str, Json] = {}
    for record in records:
        if record.call_id is None or record.kind not in ("started", "finished", "brokered"):
            continue
        body = record.body
        if record.kind == "brokered":
            if body.get("secret") == secret:
                row = _row(rows, record, body, "used")
                row["used" if body.get("allowed") is True else "refused"] += 1
            continue
        call, named = object_at(body, "call"), secret in (object_at(body, "contract").get("secrets") or ())
        server = str(call.get("server") or "")
        if named and call.get("kind") == "server":
            servers.add(server)
        seen = object_at(body, "secrets").get(secret) or 0
        if named or seen or server in servers or record.call_id in rows:
            row = _row(rows, record, body, "contract" if named else "server" if server in servers else "result")
            row["seen"] = max(row["seen"], seen if isinstance(seen, int) else 0)
    return list(rows.values())


def _row(rows: dict[str, Json], record: Record, body: Json, by: str) -> Json:
    row = rows.setdefault(
        str(record.call_id),
        {"at": record.at, "call_id": record.call_id, "tool": None, "agent": None, "tenant": None}
        | {"by": by, "used": 0, "refused": 0, "seen": 0, "status": None},
    )
    call = object_at(body, "call")
    principal = object_at(call, "principal")
    told = {"tool": call.get("tool"), "agent": principal.get("agent"), "tenant": principal.get("tenant")}
    row.update({name: value for name, value in told.items() if value is not None and record.kind != "brokered"})
    if record.kind == "finished":
        row["status"] = body.get("status")
    if row["by"] == "used" and by != "used":
        row["by"] = by
    return row
