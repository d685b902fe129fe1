"""Whoever has secrets is asked for each request of a session, and nobody else is."""

from __future__ import annotations

import asyncio

import pytest

from ringfence.core.brokering import (
    BrokeredSecret,
    OutboundRequest,
    SessionSecrets,
    SubstitutionDenial,
    SubstitutionReply,
    SubstitutionRequest,
)
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.sessions import Owner
from ringfence.sandbox.sessions import remote_secrets as module
from ringfence.sandbox.sessions.remote_secrets import RemoteSecrets, SecretLenders

pytestmark = pytest.mark.anyio

ASKED = OutboundRequest("https", "api.example", 443, "GET", "/", (("A", "b"),), "rule")
LENDING = SessionSecrets((BrokeredSecret("one", "ONE"), BrokeredSecret("two", "TWO")), "open_session", "call_1")


def borrower(lenders: SecretLenders) -> RemoteSecrets:
    return RemoteSecrets("box-1", Owner("local", "ann"), LENDING, lenders)


class Listener:
    """A lender that gives every wish the same answer."""

    def __init__(
        self, lenders: SecretLenders, name: str, answer: SubstitutionReply | SubstitutionDenial | None = None
    ) -> None:
        self.heard: list[SubstitutionRequest] = []
        self._lenders, self._name, self._answer = lenders, name, answer
        self.begun = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        async for wish in self._lenders.wishes(self._name):
            self.begun.set()
            self.heard.append(wish)
            if self._answer is not None and wish.number:
                self._lenders.settle(self._name, wish.number, self._answer)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def test_the_last_that_lends_is_asked_and_the_one_before_it_when_it_has_left() -> None:
    lenders = SecretLenders()
    first, second = Listener(lenders, "a", SubstitutionReply(("x",))), Listener(lenders, "b", SubstitutionReply(("y",)))
    await first.begun.wait()
    await second.begun.wait()
    one = borrower(lenders)
    for name in "ab":
        one.lent_by(name)
    assert await one.ask(ASKED) == SubstitutionReply(("y",))
    await second.leave()
    assert await one.ask(ASKED) == SubstitutionReply(("x",))
    (wish,) = first.heard[1:]
    assert (wish.session, wish.tenant, wish.agent, wish.lending, wish.asked) == (
        "box-1",
        "local",
        "ann",
        LENDING,
        ASKED,
    )
    assert wish.placeholders == one.placeholders == (one.env["ONE"], one.env["TWO"])
    await one.caught(ASKED, one.placeholders[1])
    assert first.heard[-1].caught == one.placeholders[1]
    await first.leave()
    with pytest.raises(Unavailable, match="no process that has the secrets"):
        await one.ask(ASKED)


async def test_no_two_boxes_have_the_same_placeholder() -> None:
    lenders = SecretLenders()
    assert not {*borrower(lenders).placeholders} & {*borrower(lenders).placeholders}


async def test_a_refusal_is_told_and_so_is_what_failed() -> None:
    lenders = SecretLenders()
    listeners = [
        Listener(lenders, "no", SubstitutionDenial("policy", "not this one")),
        Listener(lenders, "gone", SubstitutionDenial("no_secret", "the vault is away", failed=True)),
    ]
    for listener in listeners:
        await listener.begun.wait()
    one = borrower(lenders)
    one.lent_by("no")
    with pytest.raises(Refused, match="not this one"):
        await one.ask(ASKED)
    one.lent_by("gone")
    with pytest.raises(Unavailable, match="the vault is away"):
        await one.ask(ASKED)
    for listener in listeners:
        await listener.leave()


async def test_nobody_lends_who_does_not_listen_or_twice() -> None:
    lenders = SecretLenders()
    with pytest.raises(Unavailable):
        borrower(lenders).lent_by("a")
    listener = Listener(lenders, "a")
    await listener.begun.wait()
    with pytest.raises(Refused, match="listens already"):
        await anext(lenders.wishes("a"))
    await listener.leave()


async def test_who_leaves_or_is_silent_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    lenders = SecretLenders()
    silent = Listener(lenders, "a")
    await silent.begun.wait()
    one = borrower(lenders)
    one.lent_by("a")
    waiting = asyncio.get_running_loop().create_task(one.ask(ASKED))
    await asyncio.sleep(0.01)
    await silent.leave()
    with pytest.raises(Unavailable, match="no process that has the secrets"):
        await waiting
    silent = Listener(lenders, "a")
    await silent.begun.wait()
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="did not answer"):
        await one.ask(ASKED)
    monkeypatch.setattr(module, "_MOST_WISHES", 0)
    with pytest.raises(Unavailable, match="too many"):
        await one.ask(ASKED)
    await silent.leave()


def test_a_value_is_in_no_repr() -> None:
    assert "hush" not in repr(SubstitutionReply(("a",), {"Authorization": "hush"}, (("name", "hush"),)))
