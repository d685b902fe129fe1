"""Telling an address of questions: each once, again when others may answer, and without anybody waiting for it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core.model import HookSpec, Json, Person
from ringfence.governance import approvals, asking
from ringfence.hooks.delivery import HookFailed
from ringfence.hooks.questions import QuestionDelivery
from ringfence.store import Approval, ApprovalQuestion, Store
from tests import gateways
from tests.hooks.receiver import receiving
from tests.tooling import PATIENCE, ROOT, until, wait_until

pytestmark = pytest.mark.anyio
PEOPLE = {
    "alice": Person("alice", frozenset({"manager"})),
    "dora": Person("dora", frozenset({"director"})),
    "eve": Person("eve", frozenset({"manager"}), tenant="acme"),
}


class Address:
    """An address that remembers what it was told, and does what a test wants."""

    def __init__(self, *wanted: Any) -> None:
        self.got: list[tuple[str, Json]] = []
        self.tried: list[str] = []
        self.wanted = list(wanted)

    async def post(self, ident: str, message: Json) -> None:
        self.tried.append(ident)
        wish = self.wanted.pop(0) if self.wanted else None
        if wish == "hang":
            await anyio.sleep_forever()
        if wish is not None:
            raise wish
        self.got.append((ident, message))

    async def close(self) -> None:
        return None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "state", load_or_create(tmp_path / "keys"))
    yield opened
    opened.close()


async def ask(store: Store, number: int = 1, tenant: str = "local", expires: float = 600, **more: Any) -> Approval:
    now = time.time()
    question = ApprovalQuestion(
        f"sha256:{number}", f"call_{number}", f"{tenant}/analyst", "echo", "boss", now, now + expires, **more
    )
    return await store.write(lambda tx: tx.ask_approval(question), durable=True)


@asynccontextmanager
async def telling(store: Store, address: Address, **more: Any) -> Any:
    spec = HookSpec("desk", url="https://desk.example/", secret="key", tells="questions", **more)
    delivery = QuestionDelivery(spec, address, store, partial(asking.put, lambda: PEOPLE), (0.01, 0.01))
    async with anyio.create_task_group() as group:
        group.start_soon(delivery.run)
        group.start_soon(asking.Escalations(store).run)
        yield delivery
        group.cancel_scope.cancel()


def records(store: Store, kind: str) -> list[Json]:
    return [record.body for record in store.reader().records(kind=kind)]


async def test_each_question_is_told_once_also_over_a_restart(store: Store) -> None:
    address = Address()
    first = await ask(store, 1)
    async with telling(store, address):
        await until(lambda: len(records(store, "approval_told")) == 1)
        second = await ask(store, 2)
        await until(lambda: len(records(store, "approval_told")) == 2)
    async with telling(store, address):
        third = await ask(store, 3)
        await until(lambda: len(records(store, "approval_told")) == 3)
    assert [ident for ident, _ in address.got] == [f"{each.id}.asked" for each in (first, second, third)]
    assert [body["asked_of"] for body in records(store, "approval_told")] == [["alice", "dora"]] * 3
    (question, *_) = records(store, "approval_asked")
    assert address.got[0][1]["asked"] == next(store.reader().records(kind="approval_asked")).hash
    assert question["approval"] == address.got[0][1]["approval"]


async def test_one_that_hangs_or_fails_holds_up_no_other(store: Store) -> None:
    failing = [HookFailed("it answered 500")] * 3
    address = Address("hang", *failing)
    hanging = await ask(store, 1)
    async with telling(store, address) as delivery:
        await until(lambda: address.tried == [f"{hanging.id}.asked"])
        given_up = await ask(store, 2)
        await until(lambda: len(records(store, "approval_untold")) == 1)
        taken = await ask(store, 3)
        await until(lambda: len(records(store, "approval_told")) == 1)
        assert delivery.behind() == 1
    (untold,) = records(store, "approval_untold")
    assert (untold["approval"], untold["why"], untold["attempts"]) == (given_up.id, "it answered 500", 3)
    assert [ident for ident, _ in address.got] == [f"{taken.id}.asked"]


async def test_what_was_answered_meanwhile_is_not_told_any_more(store: Store) -> None:
    address = Address(HookFailed("it answered 500"))
    asked = await ask(store)
    answered = threading.Event()

    async def fails_once(ident: str, message: Json) -> None:
        address.tried.append(ident)
        await store.write(lambda tx: tx.answer_approval(asked.id, "alice", False, time.time()), durable=True)
        answered.set()
        raise HookFailed("it answered 500")

    address.post = fails_once  # type: ignore[method-assign]
    async with telling(store, address) as delivery:
        await until(answered.is_set)
        await until(lambda: delivery.behind() == 0)
    assert len(address.tried) == 1
    assert records(store, "approval_told") == records(store, "approval_untold") == []


async def test_a_tenants_address_is_told_of_its_questions_alone(store: Store) -> None:
    address = Address()
    await ask(store, 1)
    foreign = await ask(store, 2, "acme")
    async with telling(store, address, tenants=("acme",)):
        await until(lambda: records(store, "approval_told"))
    assert [(ident, message["may_answer"]) for ident, message in address.got] == [(f"{foreign.id}.asked", ["eve"])]


async def test_when_its_time_has_come_a_question_is_told_to_those_who_may_answer_then(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = {"escalate": [["manager", 3600.0, "director"]]}
    address = Address()
    asked = await ask(store, 1, roles=("manager",), terms=terms, expires=86_400)
    async with telling(store, address):
        await until(lambda: len(records(store, "approval_told")) == 1)
        assert records(store, "approval_escalated") == []
        later = SimpleNamespace(time=lambda now=time.time: now() + 3600)
        monkeypatch.setattr(asking, "time", later)
        monkeypatch.setattr(approvals, "time", later)
        await until(lambda: len(records(store, "approval_told")) == 2)
    assert [(ident, message["type"], message["may_answer"]) for ident, message in address.got] == [
        (f"{asked.id}.asked", "ringfence.approval_asked", ["alice"]),
        (f"{asked.id}.escalated", "ringfence.approval_escalated", ["alice", "dora"]),
    ]
    (record,) = records(store, "approval_escalated")
    assert (record["roles"], record["after_seconds"]) == ("director", 3600.0)
    # Nobody says it twice.
    again = await store.write(lambda tx: tx.escalate_approval(asked.id, "director", 3600.0))
    assert again is False and len(records(store, "approval_escalated")) == 1


# ── a whole gateway, and the example as the one who answers ───────────────────────────────────────


def key() -> tuple[str, str]:
    made = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "approver.py"), "key"], capture_output=True, text=True, check=True
    )
    private, public = made.stdout.split()
    return private, public


@contextmanager
def approver(**environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", str(ROOT / "examples" / "approver.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def heard(running: subprocess.Popen[str], wanted: str) -> str:
    """What it prints, up to a line with this."""
    assert running.stdout is not None
    said = ""
    for line in running.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(said)


def post(url: str, headers: dict[str, str], body: bytes, method: str = "POST") -> tuple[int, Json]:
    place = url.removeprefix("http://").partition("/")[0]
    connection = http.client.HTTPConnection(place, timeout=PATIENCE)
    try:
        connection.request(method, "/approvals/answer", body, headers)
        got = connection.getresponse()
        return got.status, json.loads(got.read())
    finally:
        connection.close()


def configured(folder: Path, url: str, public: str) -> Path:
    (folder / "shared").write_text("a-long-enough-signing-key")
    return gateways.write(
        folder,
        f"""
version: 1
gateway: {{state: ./state, listen: "127.0.0.1:0", approval_wait_seconds: 120}}
people: {{alice: {{roles: [manager], answer_key: "{public}"}}}}
servers: {{desk: {{command: {gateways.server("hostile_server.py")}, pins: first_use, placement: unsafe_host}}}}
capabilities: {{echo: {{mode: write, approval: boss}}}}
approvals: {{boss: {{roles: [manager]}}}}
secrets: {{shared: {{from: file, path: ./shared}}}}
hooks: {{desk: {{url: "{url}", secret: shared, tells: questions}}}}
""",
    )


def test_a_person_answers_by_webhook_with_the_example(tmp_path: Path) -> None:
    private, public = key()
    secret = "a-long-enough-signing-key"
    with receiving() as relay, gateways.serve(configured(tmp_path, relay.url, public)) as served:
        base = served.url.removesuffix("/mcp")
        with approver(QUESTIONS_KEY=secret, ANSWER_KEY=private, PERSON="alice", GATEWAY=base) as running:
            place = heard(running, "http://").split("http://")[1].split("/")[0]
            said: list[Json] = []
            words = ("call", "echo", "--args", '{"text": "refunds"}', "--url", served.url, "--json")
            caller = threading.Thread(target=lambda: said.append(json.loads(gateways.run(*words).stdout)))
            caller.start()
            wait_until(lambda: relay.got)
            _, headers, body = relay.got[0]
            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            wanted = base64.b64encode(hmac.digest(secret.encode(), signed, hashlib.sha256)).decode()
            assert headers["webhook-signature"] == f"v1,{wanted}"
            # What the operator's address passes on to alice's terminal.
            passed = http.client.HTTPConnection(place, timeout=PATIENCE)
            passed.request("POST", "/", body, headers)
            assert passed.getresponse().status == 204
            passed.close()
            assert '"text": "refunds"' in heard(running, "refunds")
            assert running.stdin is not None
            running.stdin.write("approve\n")
            running.stdin.flush()
            heard(running, "approved")
            caller.join(PATIENCE)
        assert said[0]["status"] == "success"
        (record,) = gateways.records(served.state, kind="approval_answered")
        assert (record["person"], record["login"]["way"]) == ("alice", "webhook")
        # The very same message again, by whoever overheard it.
        message = record["login"]["signed"]
        replay = {f"webhook-{name}": message[name] for name in ("id", "timestamp", "signature")}
        status, answer = post(base, replay, message["body"].encode())
        assert (status, answer["reason_code"]) == (409, "replayed")
        for number, (method, headers, body, reason) in enumerate(
            [
                ("POST", {**replay, "webhook-id": "another-nonce"}, message["body"].encode(), "bad_signature"),
                ("POST", replay, message["body"].replace("approve", "deny").encode(), "bad_signature"),
                ("POST", {}, b"{}", "bad_answer"),
                ("POST", replay, b"x" * 9000, "too_large"),
                ("GET", {}, b"", "bad_method"),
                ("POST", {**replay, "origin": "https://evil.example"}, b"{}", "foreign_origin"),
            ]
        ):
            status, answer = post(base, headers, body, method)
            assert answer["reason_code"] == reason and 400 <= status < 500, number
    counted = {
        body["reason_code"]: body["count"]
        for body in gateways.records(served.state, kind="request_refused")
        if body["origin"] == "webhook"
    }
    assert counted == {
        "replayed": 1,
        "bad_signature": 2,
        "bad_answer": 1,
        "too_large": 1,
        "bad_method": 1,
        "foreign_origin": 1,
    }
    assert gateways.verified(served.state).ok
