"""Bearer tokens: what they look like, what is kept of them, and when they are good for nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ringfence.core.errors import StoreError
from ringfence.core.model import AgentSpec, IssuedToken, Person, Principal
from ringfence.identity import Directory, NotAdmitted, TokenCheck, new_token, tokens
from ringfence.secrets.redaction import SecretMatcher

AGENTS = {"analyst": AgentSpec("analyst", "acme", frozenset({"reader"}), person="alice")}
PEOPLE = {"alice": Person("alice", tenant="acme")}


class Kept:
    """What a store would know."""

    def __init__(self) -> None:
        self.rows: dict[str, IssuedToken] = {}
        self.asked = 0
        self.least = 0.0
        self.fails = False

    def make(self, **more: object) -> tuple[IssuedToken, str]:
        ident, text, digest = new_token()
        given = {"kind": "agent", "name": "analyst", "tenant": "acme", "made_by": "me", "made_at": time.time(), **more}
        made = IssuedToken(ident, digest, **{"expires_at": time.time() + 60, **given})  # type: ignore[arg-type]
        self.rows[ident] = made
        return made, text

    def find(self, ident: str) -> tuple[IssuedToken | None, float]:
        self.asked += 1
        if self.fails:
            raise StoreError("no")
        return self.rows.get(ident), max(time.time(), self.least)


def refused(check: TokenCheck, text: str) -> tuple[int, str]:
    with pytest.raises(NotAdmitted) as caught:
        check(text)
    assert not text or text not in caught.value.message
    return caught.value.status, caught.value.reason_code


def test_a_token_is_random_and_its_secret_is_not_kept() -> None:
    made = [new_token() for _ in range(50)]
    assert len({text for _, text, _ in made}) == len({digest for _, _, digest in made}) == 50
    for ident, text, digest in made:
        secret = text.rpartition(ident.removeprefix("tok_"))[2][1:]
        assert len(secret) == 43, "256 bits"
        assert secret not in digest and tokens.digest_of(secret) == digest


def test_a_token_is_taken_out_of_any_text() -> None:
    _, text, _ = new_token()
    shown, found = SecretMatcher().redact(f"the token is {text}, keep it")
    assert text[4:] not in shown and text[-43:] not in shown and found == {"ringfence_token": 1}


def test_a_good_token_says_whose_it_is() -> None:
    kept = Kept()
    made, text = kept.make()
    check = TokenCheck(kept.find)
    assert check(text) == made == check(text)
    assert kept.asked == 1, "what was found good is kept for a moment"


@pytest.mark.parametrize(
    "wrong",
    ["", "rft_", "rft_x", "eyJhbGciOiJub25lIn0.e30.", lambda t: t[:-1], lambda t: t + "A", lambda t: t.swapcase(),
     lambda t: t[:25] + "A" * 43, lambda t: "rft_" + "0" * 20 + t[24:], lambda t: t + "\n", lambda t: t.upper()],
)  # fmt: skip
def test_any_other_text_is_none(wrong: object) -> None:
    kept = Kept()
    _, text = kept.make()
    check = TokenCheck(kept.find)
    check(text)
    assert refused(check, wrong(text) if callable(wrong) else str(wrong)) == (401, "bad_token")


def test_a_token_of_which_another_has_the_id_is_none() -> None:
    kept = Kept()
    (_, one), (_, other) = kept.make(), kept.make()
    check = TokenCheck(kept.find)
    assert refused(check, one[:24] + other[24:]) == (401, "bad_token")


def test_a_revoked_token_is_refused_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    made, text = kept.make()
    check = TokenCheck(kept.find)
    check(text)
    kept.rows[made.id] = replace(made, revoked_at=time.time())
    assert tokens.KEPT_SECONDS <= 0.5
    now = time.monotonic() + tokens.KEPT_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert refused(check, text) == (401, "token_revoked")
    kept.rows[made.id] = made
    assert check(text) == made, "a refusal is not kept"


def test_an_expired_token_is_refused_at_once_also_while_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    made, text = kept.make()
    check = TokenCheck(kept.find)
    check(text)
    monkeypatch.setattr(time, "time", lambda: made.expires_at)
    assert refused(check, text) == (401, "token_expired")


def test_a_clock_that_was_set_back_revives_no_token() -> None:
    kept = Kept()
    made, text = kept.make()
    kept.least = made.expires_at + 1
    assert refused(TokenCheck(kept.find), text) == (401, "token_expired")


def test_without_its_state_no_token_is_believed() -> None:
    kept = Kept()
    _, text = kept.make()
    kept.fails = True
    assert refused(TokenCheck(kept.find), text) == (503, "store")


def test_what_is_kept_is_bounded() -> None:
    kept = Kept()
    check = TokenCheck(kept.find)
    for _ in range(1100):
        check(kept.make()[1])
    assert len(check._kept) <= 1000


def test_a_token_is_for_its_agent_in_its_tenant_and_a_persons_makes_no_calls() -> None:
    directory = Directory(AGENTS, PEOPLE)
    made, _ = Kept().make()
    assert directory.holder(made) == Principal("analyst", "acme", "alice", frozenset({"reader"}))
    gone = [replace(made, name="robot"), replace(made, tenant="local"), replace(made, kind="person", name="alice")]
    for each, code in zip(gone, ("unknown_agent", "unknown_agent", "person_token"), strict=True):
        with pytest.raises(NotAdmitted) as caught:
            directory.holder(each)
        assert (caught.value.status, caught.value.reason_code) == (403, code)
