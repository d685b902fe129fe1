"""An answer that comes by webhook: what must hold before it counts, in order.

Whatever is refused once it is known whose it is goes on record beside its call, with its nonce: the same message, sent
again when it would be taken, is a replay. Before that, refusals are counted, so that no stranger makes the log grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from ringfence.core.errors import Refused
from ringfence.core.model import GuardedText, Login, Person
from ringfence.governance.approvals import MAX_REASON, answer, objection, tenant_of
from ringfence.identity import answers
from ringfence.identity.answers import BadAnswer, SignedAnswer
from ringfence.store import Approval, Conflict, Expired, RowNotFound, SentBefore, Store, Transaction

FRESH_SECONDS = 300
"""How old an answer may be, or how far ahead the clock of who signed it: what Standard Webhooks allow."""


class AnswerRefused(Exception):
    """Nothing was answered."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class WebhookAnswers:
    """Takes answers that people signed elsewhere."""

    def __init__(
        self, store: Store, people: Callable[[], Mapping[str, Person]], clean: Callable[[str, int], GuardedText]
    ) -> None:
        """`people`: by the configuration in force; `clean`: what a person wrote, as it may go on record."""
        self._store = store
        self._people = people
        self._clean = clean

    def take(self, headers: Mapping[str, str], body: bytes) -> Approval:
        """The question as it stands with this answer. Waits for the disk. Raises AnswerRefused."""
        # (1) It is an answer, signed with the key that the configuration has of the person whom it names.
        try:
            given = answers.read(headers, body)
        except BadAnswer as exc:
            raise AnswerRefused(400, exc.reason, str(exc)) from None
        person = self._people().get(given.person)
        if person is None or person.answer_key is None or not answers.is_signed(given.signed, person.answer_key):
            text = "it is not signed with the key that people: has for this person as answer_key"
            raise AnswerRefused(401, "bad_signature", text)
        # (2) It is about a question that concerns this person. To others there is none.
        asked = self._store.reader().approval(given.approval)
        if asked is None or not person.answers_for(tenant_of(asked.principal)):
            raise AnswerRefused(404, "unknown_approval", "there is no such approval")
        # (3) It was made just now.
        if abs(time.time() - given.at) > FRESH_SECONDS:
            text = f"it was signed more than {FRESH_SECONDS} s ago, or in the future: sign it anew"
            raise self._refused(asked, given, 401, "stale", text)
        # (4) This person may give it.
        if (problem := objection(asked, person)) is not None:
            raise self._refused(asked, given, 403, "not_entitled", problem)
        reason = self._clean(given.reason, MAX_REASON)
        if reason != given.reason:  # it is kept as it was signed, or not at all
            text = f"the reason is longer than {MAX_REASON} characters, or holds a secret or what cannot be seen"
            raise self._refused(asked, given, 400, "bad_reason", text)
        # (5) It is about this very question, was not sent before, and nothing settled the question meanwhile: in the
        # transaction that writes it.
        login = Login("webhook", person.answer_key, signed=given.signed)
        give = partial(answer, self._store, asked.id, person, approve=given.approve, seen=asked)
        try:
            return give(login=login, reason=reason)
        except SentBefore as exc:
            raise self._refused(asked, given, 409, "replayed", str(exc)) from None
        except Expired as exc:
            raise self._refused(asked, given, 410, "expired", str(exc)) from None
        except (Conflict, RowNotFound) as exc:
            raise self._refused(asked, given, 409, "conflict", str(exc)) from None
        except Refused as exc:
            raise self._refused(asked, given, 403, exc.reason_code, exc.message) from None

    def _refused(self, asked: Approval, given: SignedAnswer, status: int, why: str, text: str) -> AnswerRefused:
        note = partial(
            Transaction.refuse_answer, asked=asked, person=given.person, nonce=given.nonce, said={"why": why}
        )
        self._store.write_sync(note, durable=True)
        return AnswerRefused(status, why, text)
