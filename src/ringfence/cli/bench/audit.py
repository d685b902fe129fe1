"""How long questions about a long log take, how fast it is verified, and how much a call leaves in it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ringfence.audit.explain import explain
from ringfence.audit.export import verify_live
from ringfence.audit.keys import Keys, load_or_create
from ringfence.cli.bench.measure import Row, row
from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.store import Reader, Store, Transaction

_GROUP = 1000
_ASKED = 50


def run(records: int) -> list[Row]:
    """A log of one chain, as calls of a server in a box leave it, in a folder that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        keys = load_or_create(Path(folder) / "keys")
        call_id = _fill(state, keys, records // 2)
        rows = [_verify(state, keys)]
        reader = Reader.open(state)
        try:
            for name, ask in _questions(reader, call_id).items():
                times = []
                for _ in range(_ASKED):
                    began = time.perf_counter()
                    ask()
                    times.append(time.perf_counter() - began)
                rows.append(row(f"audit {name}, {records} records", times))
        finally:
            reader.close()
    return rows


def _questions(reader: Reader, call_id: str) -> dict[str, Callable[[], object]]:
    newest = partial(reader.records, kind="finished", newest_first=True, limit=20)
    return {
        "list": lambda: [record.body for record in newest()],
        "explain": lambda: explain([record.body for record in reader.story(call_id)]),
        "explain, by the beginning of an id": lambda: reader.call_ids(call_id[:-4], 2),
    }


def _verify(state: Path, keys: Keys) -> Row:
    reader = Reader.open(state)
    try:
        began = time.perf_counter()
        used = time.process_time()
        report = verify_live(*reader.evidence(), keys.public)
        took, used = time.perf_counter() - began, time.process_time() - used
    finally:
        reader.close()
    assert report.ok, str(report)
    size = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
    made = row(f"audit verify, {report.records} records of {2 * size / report.records:.0f} bytes a call", [took])
    # Of processor time, as there is nothing in it to wait for: what else the machine does is not to be measured.
    made.cpu_ms = round(used * 1000, 1)
    made.per_second = round(report.records / used)
    return made


def _fill(state: Path, keys: Keys, calls: int) -> str:
    """Returns the id of a call in the middle."""
    ids: list[str] = []

    def work(tx: Transaction, count: int) -> None:
        for _ in range(count):
            ids.append(_call(tx))

    with Store.open(state, keys) as store:
        for first in range(0, calls, _GROUP):
            store.write_sync(partial(work, count=min(_GROUP, calls - first)), durable=False)
    return ids[len(ids) // 2]


def _call(tx: Transaction) -> str:
    call_id = canonical.new_id("call")
    own: Json = {"call": {"id": call_id}, "decision": {"id": canonical.new_id("dec")}}
    own["arguments"] = {"bytes": 40, "digest": "sha256:" + "a" * 64}
    begun = {**own, "durable": False, "effect_possible": False, "shared": [_ABOUT]}
    seq = tx.append("started", call_id, begun, salt=bytes(16)).seq
    said = "the tool answered after 128 ms; it only reads, so nothing was changed"
    ended: Json = {**own, "facts": {"explanation": said, "started_at": "2026-01-01T00:00:00.000Z", "wall_ms": 128.4}}
    ended |= {"result": {"bytes": 42, "digest": "sha256:" + "b" * 64}, "started_seq": seq, "shared": [_ABOUT, _END]}
    tx.append("finished", call_id, ended)
    return call_id


_PRINCIPAL = {"tenant": "local", "agent": "agent", "person": "anna", "kind": "agent"}
_ABOUT = canonical.Shared(
    {
        "call": {"kind": "tool", "method": "tools/call", "tool": "echo", "server": "echo", "principal": _PRINCIPAL},
        "contract": {"name": "echo", "digest": "sha256:" + "c" * 64, "mode": "read"},
        "decision": {"allowed": True, "reason": "allowed by std-read", "rules": ["std-read"]},
    }
)
_END = canonical.Shared(
    {
        "status": "success",
        "effect": "none",
        "facts": {"isolation": {"level": "process", "protections": {f"p{n}": {"on": True} for n in range(40)}}},
    }
)
