"""A person who is asked in the client that made the call: what they see, what counts, and what does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from ringfence.audit.approvals import UNFIT
from ringfence.audit.export import verify_live
from ringfence.audit.keys import load_or_create
from ringfence.core.model import ApprovalRule, Json, Login, Person, Principal
from ringfence.governance import approvals, in_client
from tests.faking import Said, Way, answering_as, contract, governed

pytestmark = pytest.mark.anyio

RULE = ApprovalRule("notes", roles=("writer",), self_approval=True, in_client=True)
PEOPLE = {"alice": Person("alice", frozenset({"writer"}), "alice"), "bob": Person("bob", frozenset({"writer"}), "bob")}
SAID = Said(contracts=(contract("echo", mode="write", approval="notes"),), approvals={"notes": RULE}, people=PEOPLE)
FORM: Json = {"elicitation": {}}


def answering(way: Way, answer: Any, capabilities: Json = FORM) -> None:
    way.client.capabilities = capabilities
    way.client.answers = {in_client.KEY: answer}


def accepted(answer: str) -> Json:
    return {"action": "accept", "content": {"answer": answer}}


async def test_who_sits_at_the_client_answers_with_all_in_sight_and_it_is_proved(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        answering(way, accepted("approve"))
        assert (await way.call("echo", {"title": "a\u202eb", "n": 1})).status == "success"
        ((question,),) = [list(asked.values()) for asked in way.client.asked]
        message = question["params"]["message"]
        for told in ("echo on server desk (write)", r"u{202e}", '"n": 1', "agent: analyst for alice", "contract: "):
            assert told in message
        (record,) = [r.body for r in way.store.reader().records(kind="approval_answered")]
        assert (record["person"], record["login"]["way"]) == ("alice", "client")
        public = load_or_create(way.store.folder.parent / "keys").public
        assert verify_live(*way.store.reader().evidence(), public, way.store.reader().record).ok


async def test_a_no_is_one_and_who_cancels_leaves_it_to_others(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        answering(way, accepted("deny"))
        assert (await way.call("echo", {"n": 1})).reason_code == "approval_refused"
        for action in ("cancel", "decline"):
            answering(way, {"action": action})
            waits = await way.call("echo", {"n": action})
            assert waits.status == "approval_required"
            assert approvals.find(way.store, waits.approval_id or "").answers == ()


@pytest.mark.parametrize(
    "answer",
    [None, "approve", {}, {"action": "accept"}, accepted("yes"), {"action": "accept", "content": {"answer": True}}],
)
async def test_what_does_not_fit_the_question_answers_nothing_and_is_on_record(tmp_path: Path, answer: Any) -> None:
    async with governed(tmp_path, SAID) as way:
        answering(way, answer)
        assert (await way.call("echo", {"n": 1})).status == "approval_required"
        (record,) = [r.body for r in way.store.reader().records(kind=UNFIT)]
        assert record["why"] == "unfit"
        assert way.servers.requests == []


@pytest.mark.parametrize(
    ("rule", "principal", "capabilities"),
    [
        (replace(RULE, in_client=False), Principal("analyst", person="alice"), FORM),
        (replace(RULE, self_approval=False), Principal("analyst", person="alice"), FORM),
        (replace(RULE, roles=("other",)), Principal("analyst", person="alice"), FORM),
        (replace(RULE, needs_reason=True), Principal("analyst", person="alice"), FORM),
        (RULE, Principal("analyst"), FORM),
        (RULE, Principal("analyst", person="nobody"), FORM),
        (RULE, Principal("analyst", "acme", person="alice"), FORM),
        (RULE, Principal("analyst", person="alice"), {}),
        (RULE, Principal("analyst", person="alice"), {"elicitation": {"url": {}}}),
    ],
)
async def test_nobody_is_asked_there_who_may_not_answer_there(
    tmp_path: Path, rule: ApprovalRule, principal: Principal, capabilities: Json
) -> None:
    async with governed(tmp_path, replace(SAID, approvals={"notes": rule})) as way:
        answering(way, accepted("approve"), capabilities)
        assert (await way.call("echo", {"n": 1}, principal=principal)).status == "approval_required"
        assert way.client.asked == []


async def test_what_is_too_long_for_a_client_is_asked_elsewhere(tmp_path: Path) -> None:
    async with governed(tmp_path, SAID) as way:
        answering(way, accepted("approve"))
        assert (await way.call("echo", {"text": "x" * 9000})).status == "approval_required"
        assert way.client.asked == []


async def test_an_answer_that_only_claims_to_come_from_the_client_is_not_believed(tmp_path: Path) -> None:
    """Bob answers alice's call, and says that it was in her client; the rule does not let him there."""
    async with governed(tmp_path, SAID) as way:
        waits = await way.call("echo", {"n": 1})

        def claim() -> None:
            with answering_as("mallory"):
                identity = waits.approval_id or ""
                approvals.answer(way.store, identity, PEOPLE["bob"], approve=True, login=Login("client", "call_1"))

        await anyio.to_thread.run_sync(claim)
        assert (await way.call("echo", {"n": 1})).reason_code == "approval_unproven"
