"""Known values are found in every form, whole and in pieces; nothing else is touched."""

from __future__ import annotations

import html
import json
import os
import random
from functools import cache
from urllib.parse import quote

import pytest

from ringfence.redaction import KNOWN, REPLACEMENT, Redacted, Stream, Values
from ringfence.secret import Secret
from tests.redaction import encoders

SECRETS = 10_000 if os.environ.get("RINGFENCE_FULL") else 60
TOGETHER = 20
TEXT = "the box has no network and writes its answer to a file ; done , ok ( see below ) [ 1 2 ] { } < > # % \n"
WORDS = TEXT.split(" ")


def filler(dice: random.Random) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 30)))


def pieces(dice: random.Random, data: bytes) -> list[bytes]:
    most = dice.choices((1, 5, 17, 64, 200), (1, 2, 10, 20, 20))[0]
    out = []
    while data:
        length = dice.randint(1, most)
        out.append(data[:length])
        data = data[length:]
    return out


def streamed(values: Values, chunks: list[bytes]) -> tuple[bytes, Stream]:
    stream = Stream(values)
    return b"".join([*map(stream.feed, chunks), stream.finish()]), stream


@cache
def batches() -> list[list[str]]:
    dice = random.Random(20)
    made = [encoders.value(dice) for _ in range(SECRETS)]
    return [made[at : at + TOGETHER] for at in range(0, SECRETS, TOGETHER)]


@pytest.mark.parametrize("number", range(-(-SECRETS // TOGETHER)))
def test_no_form_of_any_secret_is_missed_however_it_is_cut(number: int) -> None:
    dice = random.Random(number)
    texts = batches()[number]
    values = Values([Secret(f"s{index}", text) for index, text in enumerate(texts)])
    for index, text in enumerate(texts):
        for form, encode in encoders.EXACT.items():
            before, after = filler(dice), filler(dice)
            data = f"{before} {encode(text)} {after}".encode()
            expected = f"{before} {REPLACEMENT} {after}".encode()
            whole = values.redacted(data)
            assert whole.data == expected, (form, text)
            assert whole.rules == {KNOWN: 1} and f"s{index}" in whole.secrets, (form, text)
            parts, stream = streamed(values, pieces(dice, data))
            assert parts == expected and stream.rules == {KNOWN: 1}, (form, text)
        for form, wrap in encoders.WITHIN.items():
            lead, tail = dice.randbytes(dice.randint(0, 80)), dice.randbytes(dice.randint(0, 80))
            data = f"{filler(dice)} {wrap(lead + text.encode() + tail)} {filler(dice)}".encode()
            whole = values.redacted(data)
            assert whole.rules.get(KNOWN), (form, text)
            assert encoders.core(text, len(lead)) not in encoders.unwrapped(whole.data.decode()), (form, text)
            parts, _ = streamed(values, pieces(dice, data))
            assert parts == whole.data, (form, text)


def test_masked_it_is_as_long_as_before_and_without_shapes_they_stay() -> None:
    values = Values([Secret("horse", "correct-horse-battery-staple")], shaped=False)
    key = b"AKIA" + b"ABCDEFGHIJKLMNOP"
    data = b"a correct-horse-battery-staple b " + key
    stream = Stream(values, masked=True)
    assert stream.feed(data) + stream.finish() == b"a " + b"*" * 28 + b" b " + key
    assert values.strikes(data) and not values.strikes(key) and Values().strikes(key)
    assert values.reach >= 28 and Values().reach == 0


@pytest.mark.parametrize("value", ["correct-Horse-battery-Staple", "tökén/Ünd &mehr\nZeilen"])
def test_capitals_and_small_letters_are_one(value: str) -> None:
    values = Values([Secret("horse", value)])
    for text in (value, json.dumps(value)[1:-1], quote(value), html.escape(value)):
        for form in (text.upper(), text.lower(), text.swapcase(), text[::-1].upper() if text == value else text):
            assert values.redact(f"<{form}>") == ("<[redacted]>", {KNOWN: 1}), form


def test_a_cut_is_where_it_was_wanted_and_never_inside_of_a_match() -> None:
    values = Values([Secret("horse", "correct-horse-battery-staple")])
    data = b"0123456789 correct-horse-battery-staple 0123456789"
    assert values.within(data, 3, len(data) - 3).data == b"3456789 [redacted] 0123456"
    assert values.within(data, 0, 20) == Redacted(b"0123456789 [redacted]", {KNOWN: 1}, {"horse": 1})
    assert values.within(data, 20, len(data)).data == b"[redacted] 0123456789"
    assert values.within(data, 0, 11).data == b"0123456789 "
    half = b"0123456789 correct-horse-battery 0123456789"
    assert values.within(half, 0, 20).data == half[:20], "what is no secret moves nothing"
