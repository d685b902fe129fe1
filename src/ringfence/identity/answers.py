"""Answers of people that come over the network, each signed with a key of the person's own: reading and checking them.

The form is that of Standard Webhooks with asymmetric keys (`v1a`, Ed25519): who gives the answer proves it, and the
gateway, which has the public half alone, could not have made it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import dataclass

PUBLIC_KEY = "whpk_"
_VERSION = "v1a,"
_NONCE = re.compile(r"[A-Za-z0-9_.-]{8,128}")
_MOMENT = re.compile(r"[0-9]{1,12}")
_FIELDS = frozenset({"approval", "asked", "answer", "person"})
_ANSWERS = {"approve": True, "deny": False}


class BadAnswer(ValueError):
    """It is no answer, or nothing proves whose it is."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SignedAnswer:
    """What one person says of one question. All of it is signed."""

    approval: str
    asked: str
    """The hash of the question in the log, which stands for all that it says."""
    approve: bool
    person: str
    reason: str
    nonce: str
    at: int
    signed: Json
    """The message as it came, by which anybody can check it again."""


def public_key(text: str) -> Ed25519PublicKey:
    """Raises ValueError."""
    if not text.startswith(PUBLIC_KEY):
        raise ValueError(f"a public key begins with {PUBLIC_KEY}")
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text.removeprefix(PUBLIC_KEY), validate=True))
    except binascii.Error as exc:
        raise ValueError("it has no Base64") from exc


def read(headers: Mapping[str, str], body: bytes) -> SignedAnswer:
    """The answer in a request, of which nothing is proved yet. Raises BadAnswer."""
    nonce = headers.get("webhook-id", "")
    moment = headers.get("webhook-timestamp", "")
    if not _NONCE.fullmatch(nonce) or not _MOMENT.fullmatch(moment):
        raise BadAnswer("bad_answer", "webhook-id (8 to 128 letters, digits, _ . -) or webhook-timestamp is missing")
    try:
        text = body.decode()
        said = canonical.loads(text)
    except ValueError as exc:
        raise BadAnswer("bad_answer", f"the body is no JSON: {exc}") from None
    if not isinstance(said, dict) or not said.keys() >= _FIELDS or said.keys() - _FIELDS - {"reason"}:
        raise BadAnswer("bad_answer", "the body has approval, asked, answer, person, may have reason, and nothing else")
    if not all(isinstance(value, str) for value in said.values()) or said["answer"] not in _ANSWERS:
        raise BadAnswer("bad_answer", "all of the body is text, and answer is approve or deny")
    signature = headers.get("webhook-signature", "")
    return SignedAnswer(
        said["approval"],
        said["asked"],
        _ANSWERS[said["answer"]],
        said["person"],
        said.get("reason", ""),
        nonce,
        int(moment),
        {"id": nonce, "timestamp": moment, "body": text, "signature": signature},
    )


def is_signed(signed: Any, key: str) -> bool:
    """Whether a message, as it came or as it is on record, has a signature by the private half of this key."""
    if not isinstance(signed, dict) or not all(isinstance(value, str) for value in signed.values()):
        return False
    try:
        content = ".".join((signed["id"], signed["timestamp"], signed["body"])).encode()
        public = public_key(key)
        # Several, by keys that change, are separated by blanks.
        for each in signed["signature"].split(" ")[:4]:
            if each.startswith(_VERSION):
                try:
                    public.verify(base64.b64decode(each.removeprefix(_VERSION), validate=True), content)
                    return True
                except (InvalidSignature, binascii.Error):
                    continue
    except (KeyError, ValueError):
        return False
    return False


def states(signed: Any, approval: str, asked: str, person: str) -> bool:
    """Whether a message on record says that this person agrees to this question."""
    try:
        said = canonical.loads(signed["body"])
        return bool(
            (said["approval"], said["asked"], said["person"], said["answer"]) == (approval, asked, person, "approve")
        )
    except (KeyError, TypeError, ValueError):
        return False
