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
from ringfence.sandbox.sessions.remote_secrets import RemoteSecrets, SecretBrokers

pytestmark = pytest.mark.anyio

ASKED = OutboundRequest("https", "api.example", 443, "GET", "/", (("A", "b"),), "rule")
SECRETS = SessionSecrets((BrokeredSecret("one", "ONE"), BrokeredSecret("two", "TWO")), "open_session", "call_1")


def remote(brokers: SecretBrokers) -> RemoteSecrets:
    return RemoteSecrets("box-1", Owner("local", "ann"), SECRETS, brokers)


class Listener:
    """A broker that gives every request the same answer."""

    def __init__(
        self, brokers: SecretBrokers, name: str, answer: SubstitutionReply | SubstitutionDenial | None = None
    ) -> None:
        self.heard: list[SubstitutionRequest] = []
        self._brokers, self._name, self._answer = brokers, name, answer
        self.begun = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        async for request in self._brokers.substitution_requests(self._name):
            self.begun.set()
            self.heard.append(request)
            if self._answer is not None and request.number:
                self._brokers.answer_substitution(self._name, request.number, self._answer)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def test_the_last_that_lends_is_asked_and_the_one_before_it_when_it_has_left() -> None:
    brokers = SecretBrokers()
    first, second = Listener(brokers, "a", SubstitutionReply(("x",))), Listener(brokers, "b", SubstitutionReply(("y",)))
    await first.begun.wait()
    await second.begun.wait()
    one = remote(brokers)
    for name in "ab":
        one.use_broker(name)
    assert await one.ask(ASKED) == SubstitutionReply(("y",))
    await second.leave()
    assert await one.ask(ASKED) == SubstitutionReply(("x",))
    (request,) = first.heard[1:]
    assert (request.session, request.tenant, request.agent, request.secrets, request.asked) == (
        "box-1",
        "local",
        "ann",
        SECRETS,
        ASKED,
    )
    assert request.placeholders == one.placeholders == (one.env["ONE"], one.env["TWO"])
    await one.caught(ASKED, one.placeholders[1])
    assert first.heard[-1].caught == one.placeholders[1]
    await first.leave()
    with pytest.raises(Unavailable, match="no process that has the secrets"):
        await one.ask(ASKED)


async def test_no_two_boxes_have_the_same_placeholder() -> None:
    brokers = SecretBrokers()
    assert not {*remote(brokers).placeholders} & {*remote(brokers).placeholders}


async def test_a_refusal_is_told_and_so_is_what_failed() -> None:
    brokers = SecretBrokers()
    listeners = [
        Listener(brokers, "no", SubstitutionDenial("policy", "not this one")),
        Listener(brokers, "gone", SubstitutionDenial("no_secret", "the vault is away", failed=True)),
    ]
    for listener in listeners:
        await listener.begun.wait()
    one = remote(brokers)
    one.use_broker("no")
    with pytest.raises(Refused, match="not this one"):
        await one.ask(ASKED)
    one.use_broker("gone")
    with pytest.raises(Unavailable, match="the vault is away"):
        await one.ask(ASKED)
    for listener in listeners:
        await listener.leave()


async def test_nobody_lends_who_does_not_listen_or_twice() -> None:
    brokers = SecretBrokers()
    with pytest.raises(Unavailable):
        remote(brokers).use_broker("a")
    listener = Listener(brokers, "a")
    await listener.begun.wait()
    with pytest.raises(Refused, match="listens already"):
        await anext(brokers.substitution_requests("a"))
    await listener.leave()


async def test_who_leaves_or_is_silent_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = SecretBrokers()
    silent = Listener(brokers, "a")
    await silent.begun.wait()
    one = remote(brokers)
    one.use_broker("a")
    waiting = asyncio.get_running_loop().create_task(one.ask(ASKED))
    await asyncio.sleep(0.01)
    await silent.leave()
    with pytest.raises(Unavailable, match="no process that has the secrets"):
        await waiting
    silent = Listener(brokers, "a")
    await silent.begun.wait()
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(Unavailable, match="did not answer"):
        await one.ask(ASKED)
    monkeypatch.setattr(module, "_MAX_WAITING", 0)
    with pytest.raises(Unavailable, match="too many"):
        await one.ask(ASKED)
    await silent.leave()


def test_a_value_is_in_no_repr() -> None:
    assert "hush" not in repr(SubstitutionReply(("a",), {"Authorization": "hush"}, (("name", "hush"),)))


async def test_a_request_under_way_when_the_secrets_are_revoked_goes_without_and_keeps_no_value() -> None:
    brokers = SecretBrokers()
    listener = Listener(brokers, "a")
    await listener.begun.wait()
    one = remote(brokers)
    one.use_broker("a")
    asking = asyncio.get_running_loop().create_task(one.substitute(ASKED))
    while len(listener.heard) < 2:
        await asyncio.sleep(0)
    one.revoke()
    known = (("one", "hush-hush-hush-hush"),)
    brokers.answer_substitution("a", listener.heard[1].number, SubstitutionReply((), {"A": known[0][1]}, known))
    with pytest.raises(Refused, match="revoked"):
        await asking
    assert (one._known, one._values) == ((), None)
    await listener.leave()
