"""Answers that people sign elsewhere: whose they are, what they are about, and that none of them counts twice."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence.audit import approvals as evidence
from ringfence.audit.explain import stops_of_call
from ringfence.audit.export import verify_live
from ringfence.audit.keys import load_or_create
from ringfence.core.model import ApprovalRule, Escalation, Json, Login, Person, Principal
from ringfence.governance import approvals, asking
from ringfence.governance.by_webhook import AnswerRefused, WebhookAnswers
from ringfence.governance.guard import Guard
from ringfence.identity.answers import public_key
from ringfence.store import Approval
from tests.faking import Said, Way, answering_as, contract, governed

pytestmark = pytest.mark.anyio

KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode().ljust(32)) for name in ("alice", "bob", "eve", "dora")}


def public(name: str) -> str:
    return "whpk_" + base64.b64encode(KEYS[name].public_key().public_bytes_raw()).decode()


def person(name: str, role: str = "manager", **more: Any) -> Person:
    return Person(name, frozenset({role}), answer_key=public(name), **more)


PEOPLE = {
    "alice": person("alice"),
    "bob": person("bob"),
    "eve": person("eve", tenant="acme"),
    "dora": person("dora", "director"),
    "carl": Person("carl", frozenset({"manager"})),
}
RULE = ApprovalRule("boss", roles=("manager",))
CALLER = Principal("analyst", person="carl")


def said(rule: ApprovalRule = RULE) -> Said:
    one = contract("echo", mode="write", approval="boss")
    return Said(contracts=(one,), approvals={"boss": rule}, people=PEOPLE)


def message(way: Way, asked: str, who: str, answer: str = "approve", **changed: Any) -> tuple[dict[str, str], bytes]:
    """A signed answer; `changed` is what else is to be in it, or of it."""
    record = next(r for r in way.store.reader().approval_records(asked) if r.kind == evidence.ASKED)
    given = {"approval": asked, "asked": record.hash, "answer": answer, "person": who, **changed.pop("said", {})}
    nonce = changed.pop("nonce", base64.urlsafe_b64encode(f"{asked}{who}{answer}".encode()).decode().rstrip("=")[-24:])
    at = str(changed.pop("at", int(time.time())))
    body = json.dumps(given)
    signature = KEYS[changed.pop("key", who)].sign(f"{nonce}.{at}.{body}".encode())
    headers = {"webhook-id": nonce, "webhook-timestamp": at}
    return {**headers, "webhook-signature": f"v1a,{base64.b64encode(signature).decode()}"}, body.encode()


async def take(way: Way, sent: tuple[dict[str, str], bytes], people: dict[str, Person] = PEOPLE) -> Approval:
    guard = Guard(lambda definition, value: None)
    answers = WebhookAnswers(way.store, lambda: people, lambda text, most: guard.message(text, most=most))
    return await anyio.to_thread.run_sync(partial(answers.take, *sent))


async def refused(way: Way, sent: tuple[dict[str, str], bytes]) -> str:
    with pytest.raises(AnswerRefused) as caught:
        await take(way, sent)
    return caught.value.reason


async def ask(way: Way, number: int = 1) -> str:
    waits = await way.call("echo", {"n": number}, principal=CALLER)
    assert waits.status == "approval_required" and waits.approval_id is not None
    return waits.approval_id


def on_record(way: Way) -> list[Json]:
    return [r.body for r in way.store.reader().records(kind=evidence.UNFIT)]


def state(way: Way, asked: str) -> str:
    return approvals.find(way.store, asked).state


@pytest.fixture(autouse=True)
def of_the_gateway() -> Iterator[None]:
    with answering_as("gateway"):
        yield


async def test_a_signed_answer_counts_once_and_the_chain_says_who_and_how(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        assert (await take(way, message(way, asked, "alice", said={"reason": "as agreed"}))).state == "approved"
        ran = await way.call("echo", {"n": 1}, principal=CALLER)
        assert ran.status == "success"
        (record,) = [r.body for r in way.store.reader().records(kind=evidence.ANSWERED)]
        assert (record["person"], record["reason"]) == ("alice", "as agreed")
        assert (record["login"]["way"], record["login"]["credential"]) == ("webhook", public("alice"))
        # Whoever has the record alone can check that alice said so.
        signed = record["login"]["signed"]
        content = ".".join((signed["id"], signed["timestamp"], signed["body"])).encode()
        signature = base64.b64decode(signed["signature"].removeprefix("v1a,"))
        public_key(record["login"]["credential"]).verify(signature, content)
        assert json.loads(signed["body"])["asked"] == record["asked"]
        keys = load_or_create(way.store.folder.parent / "keys")
        assert verify_live(*way.store.reader().evidence(), keys.public, way.store.reader().record).ok
        _, stops = stops_of_call(
            [r.body for r in way.store.reader().story(way.finished()[-1]["call"]["id"])], keys.public
        )
        assert "alice approved it by webhook, signed with a key of their own," in str(stops)


async def test_a_no_is_one_and_its_caller_is_told_why(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        assert (await take(way, message(way, asked, "bob", "deny", said={"reason": "not today"}))).state == "denied"
        assert "not today" in (await way.call("echo", {"n": 1}, principal=CALLER)).message


async def test_what_nobody_signed_who_may_answers_nothing(tmp_path: Path) -> None:
    """Another's key, a changed body, a person without a key: no such message is anybody's, so it is only counted."""
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        headers, body = message(way, asked, "alice", "deny")
        altered = body.replace(b'"deny"', b'"approve"')
        later = {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}
        for sent in (
            message(way, asked, "alice", key="bob"),
            (headers, altered),
            (later, body),
            ({**headers, "webhook-id": "another-nonce"}, body),
            ({**headers, "webhook-signature": ""}, body),
            ({**headers, "webhook-signature": headers["webhook-signature"].replace("v1a,", "v1,")}, body),
            message(way, asked, "alice", said={"person": "carl"}),
            message(way, asked, "alice", said={"person": "nobody"}),
        ):
            assert await refused(way, sent) == "bad_signature"
        assert (state(way, asked), on_record(way)) == ("pending", [])


@pytest.mark.parametrize(
    "changed",
    [
        {"said": {"answer": "yes"}},
        {"said": {"more": "1"}},
        {"said": {"answer": True}},
        {"nonce": "short"},
        {"at": "now"},
    ],
)
async def test_what_is_no_answer_answers_nothing(tmp_path: Path, changed: Json) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        assert await refused(way, message(way, asked, "alice", **changed)) == "bad_answer"
        assert await refused(way, ({}, b"{}")) == "bad_answer"
        assert state(way, asked) == "pending"


@pytest.mark.parametrize("seconds", [-301, 400])
async def test_a_stale_answer_is_refused_on_record_and_never_counts(tmp_path: Path, seconds: int) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        assert await refused(way, message(way, asked, "alice", at=int(time.time()) + seconds)) == "stale"
        (record,) = on_record(way)
        assert (record["why"], record["person"], record["approval"]) == ("stale", "alice", asked)
        assert state(way, asked) == "pending"


async def test_an_answer_to_another_question_is_refused_on_record(tmp_path: Path) -> None:
    """The hash of the one that was read does not open the other."""
    async with governed(tmp_path, said()) as way:
        read, other = await ask(way, 1), await ask(way, 2)
        seen = next(r.hash for r in way.store.reader().approval_records(read) if r.kind == evidence.ASKED)
        assert await refused(way, message(way, other, "alice", said={"asked": seen})) == "conflict"
        assert [each["why"] for each in on_record(way)] == ["conflict"]
        assert state(way, other) == "pending"


async def test_a_replayed_answer_is_refused_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path, said(replace(RULE, people=2))) as way:
        asked = await ask(way)
        sent = message(way, asked, "alice")
        assert (await take(way, sent)).state == "pending"
        assert await refused(way, sent) == "replayed"
        # Nor does another message of the same person count as a second one.
        assert await refused(way, message(way, asked, "alice", nonce="another-nonce")) == "conflict"
        assert state(way, asked) == "pending"
        assert (await take(way, message(way, asked, "bob"))).state == "approved"
        assert [each["why"] for each in on_record(way)] == ["replayed", "conflict"]


async def test_an_early_answer_does_not_count_when_it_is_sent_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A director answers before their time; whoever kept that message cannot use it once the time has come."""
    rule = replace(RULE, escalation=Escalation(3600, ("director",)), expires_seconds=86_400)
    async with governed(tmp_path, said(rule)) as way:
        asked = await ask(way)
        early = message(way, asked, "dora")
        assert await refused(way, early) == "not_entitled"
        now = time.time
        monkeypatch.setattr(approvals, "time", SimpleNamespace(time=lambda: now() + 3600))
        assert await refused(way, early) == "replayed"
        assert [each["why"] for each in on_record(way)] == ["not_entitled", "replayed"]
        assert (await take(way, message(way, asked, "dora", nonce="a-new-message"))).state == "approved"


async def test_people_answer_as_elsewhere_their_tenant_their_roles_and_not_their_own(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        assert await refused(way, message(way, asked, "eve")) == "unknown_approval"
        assert await refused(way, message(way, asked, "dora")) == "not_entitled"
        own = await way.call("echo", {"n": 3}, principal=Principal("analyst", person="alice"))
        assert await refused(way, message(way, own.approval_id or "", "alice")) == "not_entitled"
        assert await refused(way, message(way, asked, "alice", said={"approval": "apr_0"})) == "unknown_approval"
        assert state(way, asked) == "pending"


async def test_a_reason_is_kept_as_signed_or_refused(tmp_path: Path) -> None:
    async with governed(tmp_path, said(replace(RULE, needs_reason=True))) as way:
        asked = await ask(way)
        assert await refused(way, message(way, asked, "alice", nonce="no-reason-1")) == "conflict"
        assert await refused(way, message(way, asked, "alice", nonce="too-long-1", said={"reason": "x" * 501}))
        hidden = {"reason": "fine\u202e"}
        assert await refused(way, message(way, asked, "alice", nonce="hidden-12", said=hidden)) == "bad_reason"
        assert (
            await take(way, message(way, asked, "alice", nonce="good-one1", said={"reason": "ok"}))
        ).state == "approved"


async def test_a_flood_of_refused_answers_does_not_make_the_log_grow(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        for number in range(30):
            assert await refused(way, message(way, asked, "dora", nonce=f"nonce-{number:04}")) == "not_entitled"
        assert len(on_record(way)) == 20


@pytest.mark.parametrize("signed", [None, {}, "altered", "by bob"])
async def test_an_answer_that_only_claims_to_be_signed_is_not_believed(tmp_path: Path, signed: Any) -> None:
    """Another program of the gateway's account writes that alice answered."""
    async with governed(tmp_path, said()) as way:
        asked = await ask(way)
        headers, body = message(way, asked, "alice", key="bob" if signed == "by bob" else "alice")
        text = body.decode() if signed != "altered" else body.decode().replace("approve", "deny")
        whole = {
            "id": headers["webhook-id"],
            "timestamp": headers["webhook-timestamp"],
            "body": text,
            "signature": headers["webhook-signature"],
        }
        login = Login("webhook", public("alice"), signed=whole if isinstance(signed, str) else None)
        give = partial(approvals.answer, way.store, asked, PEOPLE["alice"], approve=True, login=login)
        assert (await anyio.to_thread.run_sync(give)).state == "approved"
        assert (await way.call("echo", {"n": 1}, principal=CALLER)).reason_code == "approval_unproven"


async def test_a_key_that_is_no_longer_a_persons_proves_nothing(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        sent = message(way, await ask(way), "alice")
        with pytest.raises(AnswerRefused, match="answer_key"):
            await take(way, sent, {**PEOPLE, "alice": replace(PEOPLE["alice"], answer_key=public("bob"))})


async def test_what_is_posted_is_what_others_see_and_who_may_answer(tmp_path: Path) -> None:
    async with governed(tmp_path, said()) as way:
        waits = await way.call("echo", {"title": "a\u202eb"}, principal=CALLER)
        found = approvals.find(way.store, waits.approval_id or "")
        put = asking.put(lambda: PEOPLE, found, "asked", "the hash")
        assert put["may_answer"] == ["alice", "bob"]
        assert r"u{202e}" in str(put["sent"]) and "\u202e" not in json.dumps(put, ensure_ascii=False)
        assert put["asked"] == "the hash" and put["whole"]
        assert any(label == "contract" for label, _ in put["lines"])
        long = await way.call("echo", {"title": "x" * 300_000}, principal=CALLER)
        told_of = asking.put(lambda: PEOPLE, approvals.find(way.store, long.approval_id or ""), "asked", "the hash")
        assert "asked" not in told_of and told_of["sent"] == [] and not told_of["whole"]
