"""Which calls could have used a secret."""

from __future__ import annotations

from ringfence.audit.chain import Head, Record, seal
from ringfence.audit.exposure import exposure
from ringfence.core.model import Json


def log(*entries: tuple[str, str, Json]) -> list[Record]:
    head, found = Head("20260101T000000Z-aaaaaaaaaa"), []
    for number, (kind, call_id, body) in enumerate(entries):
        found.append(seal(head, float(number), kind, call_id, body))
        head = found[-1].head
    return found


def of(
    tool: str, server: str | None = None, secrets: list[str] | None = None, kind: str = "tool", **more: object
) -> Json:
    call = {"tool": tool, "kind": kind, "server": server, "principal": {"agent": "ann", "tenant": "local"}}
    return {"call": call, "contract": {"name": tool, **({"secrets": secrets} if secrets else {})}, **more}


def test_a_call_could_use_what_its_contract_names() -> None:
    rows = exposure(
        log(
            ("started", "call_1", of("post", secrets=["token", "other"])),
            ("brokered", "call_1", {"secret": "token", "allowed": True}),
            ("brokered", "call_1", {"secret": "token", "allowed": False}),
            ("brokered", "call_1", {"secret": "other", "allowed": True}),
            ("finished", "call_1", of("post", secrets=["token", "other"], status="success")),
            ("started", "call_2", of("read", secrets=["other"])),
            ("finished", "call_2", of("read", secrets=["other"], status="success")),
        ),
        "token",
    )
    assert rows == [
        {"at": 0.0, "call_id": "call_1", "tool": "post", "agent": "ann", "tenant": "local", "by": "contract"}
        | {"used": 1, "refused": 1, "seen": 0, "status": "success"}
    ]


def test_calls_of_a_server_that_was_given_it_could_use_it() -> None:
    rows = exposure(
        log(
            ("started", "call_0", of("list", "helpdesk")),
            ("started", "call_1", of("helpdesk", "helpdesk", ["token"], "server")),
            ("finished", "call_1", of("helpdesk", "helpdesk", ["token"], "server", status="success")),
            ("started", "call_2", of("list", "helpdesk")),
            ("started", "call_3", of("list", "files")),
        ),
        "token",
    )
    assert [(row["call_id"], row["by"], row["status"]) for row in rows] == [
        ("call_1", "contract", "success"),
        ("call_2", "server", None),
    ]


def test_what_was_in_a_result_was_seen_and_a_use_without_more_is_one() -> None:
    rows = exposure(
        log(
            ("finished", "call_1", of("fetch", status="success") | {"secrets": {"token": 2}}),
            ("brokered", "call_2", {"secret": "token", "allowed": True}),
        ),
        "token",
    )
    assert [(row["call_id"], row["by"], row["used"], row["seen"]) for row in rows] == [
        ("call_1", "result", 0, 2),
        ("call_2", "used", 1, 0),
    ]
    assert exposure(log(("started", "call_1", of("fetch"))), "token") == []
