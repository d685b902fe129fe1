"""A reader of what hostile interpreters say: it takes what was agreed, and nothing else does it any harm."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.box import Shown
from ringfence.core.sessions import Failure
from ringfence.sandbox.process.untrusted_reply import Claims

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
mimes = st.sampled_from(["text/plain", "text/html", "image/png", "image/svg+xml", "application/json", "nothing", ""])
nearly = st.fixed_dictionaries(
    {"t": st.sampled_from(["result", "error", "done", "part"]) | anything, "id": st.integers(4, 6) | anything},
    optional={
        "main": st.booleans() | anything,
        "ok": st.booleans() | anything,
        "left_out": st.integers() | anything,
        "data": st.dictionaries(mimes | st.sampled_from(["name", "value", "traceback"]), st.text() | anything)
        | anything,
        "cut": st.dictionaries(mimes, st.integers() | anything) | anything,
        "parts": st.lists(st.tuples(mimes, st.integers(-1, 20)) | anything) | anything,
    },
)
said = st.binary(max_size=50) | st.binary(max_size=50).map(lambda data: b"+" + data)
messages = st.lists(said | nearly.map(lambda claim: json.dumps(claim).encode()), max_size=12)


def text(**claim: Any) -> bytes:
    return json.dumps({"id": 5, **claim}).encode()


def fed(*each: bytes) -> Claims:
    claims = Claims(5)
    for message in each:
        claims.feed(message)
    return claims


RESULT = text(t="result", main=True, data={"text/plain": "2"})
ERROR = text(t="error", data={"name": "E", "value": "v", "traceback": "t"})
DONE = text(t="done", ok=True)
FAILED = text(t="done", ok=False)
PARTS = text(t="result", main=False, data={"text/plain": "x"}, parts=[["text/html", 4], ["a/b", 2]])


def test_an_honest_cell_is_understood() -> None:
    claims = fed(PARTS, b"+<b", b"+>!", b"+ok", RESULT, text(t="done", ok=True, left_out=3))
    assert claims.results == [
        Shown({"text/plain": "x", "text/html": "<b>!", "a/b": "ok"}),
        Shown({"text/plain": "2"}, main=True),
    ]
    assert (claims.error, claims.done, claims.left_out, claims.broken) == (None, True, 3, None)


def test_an_honest_failure_is_understood() -> None:
    claims = fed(ERROR, RESULT, FAILED)
    assert (claims.error, claims.done, claims.broken) == (Failure("E", "v", "t"), True, None)


@pytest.mark.parametrize(
    "mime", ["text/plain", "application/vnd.vegalite.v5+json", "text/plain; charset=utf-8", "x/1", "image/x-icon.v-1"]
)
def test_names_of_forms_as_they_are_registered_are_taken(mime: str) -> None:
    form = "" if mime.startswith("image/") else "x"
    assert fed(text(t="result", data={mime: form})).results == [Shown({mime: form})]


def test_what_is_complete_is_returned_at_once() -> None:
    claims = Claims(5)
    assert claims.feed(PARTS) == []
    assert claims.feed(b"+<b>!") == []
    assert claims.feed(b"+ok") == [Shown({"text/plain": "x", "text/html": "<b>!", "a/b": "ok"})]
    assert claims.feed(ERROR + b"\n" + FAILED) == [Failure("E", "v", "t")]


def test_what_comes_too_late_is_left_alone() -> None:
    claims = fed(json.dumps({"t": "done", "id": 4, "ok": True}).encode(), RESULT, DONE, b"whatever", ERROR)
    assert (len(claims.results), claims.error, claims.done, claims.broken) == (1, None, True, None)


@given(messages)
def test_nothing_that_is_said_does_harm(each: list[bytes]) -> None:
    claims = fed(*each)
    assert not (claims.done and claims.broken)
    for result in claims.results:
        for mime, form in result.data.items():
            (mime + form).encode()
            assert "/" in mime
    if claims.error is not None:
        "".join((claims.error.name, claims.error.value, claims.error.traceback)).encode()


@given(messages, st.integers(0, 12))
def test_nothing_is_taken_after_nonsense(each: list[bytes], place: int) -> None:
    before = fed(*each[:place], b"nonsense")
    after = fed(*each[:place], b"nonsense", *each[place:])
    if not before.done:
        assert before.broken is not None
    assert (before.results, before.error, before.broken) == (after.results, after.error, after.broken)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\xff\xfe",
        b"+data that nobody announced",
        b"[]",
        b"null",
        b"[" * 60_000,
        b'{"id":5,"t":"done","ok":true',
        b'{"id":' + b"9" * 5_000 + b"}",
        RESULT.decode().encode("utf-16"),
        b" " * 65_537,
        PARTS + b"\n" + DONE,
        text(t="result", id=6, data={"text/plain": ""}),
        text(t="result", id=5.0, data={"text/plain": ""}),
        text(t="result", id=True, data={"text/plain": ""}),
        text(t="else", data={}),
        text(t=["result"], data={}),
        text(t="result"),
        text(t="result", data={}),
        text(t="result", data=[]),
        text(t="result", data={"text/plain": 5}),
        text(t="result", data={"plain": "x"}),
        text(t="result", data={"text/\x00": "x"}),
        text(t="result", data={"../../etc": "x"}),
        text(t="result", data={"text/../../etc": "x"}),
        text(t="result", data={"/etc/passwd": "x"}),
        text(t="result", data={"text/": "x"}),
        text(t="result", data={"text/.plain": "x"}),
        text(t="result", data={"text/a b": "x"}),
        text(t="result", data={"text/plain;../x": "x"}),
        text(t="result", data={}, parts=[["../../etc", 1]]) + b"\n+x",
        text(t="result", data={"text/plain": ""}, cut={"../../etc": 1}),
        b'{"t":"result","id":5,"data":{"text/plain":"1","text/plain":"2"}}',
        b'{"t":"result","id":5,"id":5,"data":{"text/plain":"1"}}',
        b'{"t":"done","t":"done","id":5,"ok":true}',
        b'{"t":"done","id":5,"ok":true,"left_out":NaN}',
        b'{"t":"done","id":5,"ok":true,"more":1e999}',
        text(t="result", data={"image/png": "no base64!"}),
        text(t="result", data={"image/png": "é"}),
        text(t="result", data={"text/plain": ""}, main="yes"),
        text(t="result", data={"text/plain": ""}, cut={"text/html": -1}),
        text(t="result", data={"text/plain": ""}, cut=["text/html"]),
        text(t="result", data={f"a/{number}": "" for number in range(65)}),
        text(t="result", data={}, parts=[["a/b", 0]]),
        text(t="result", data={}, parts=[["a/b", True]]),
        text(t="result", data={}, parts=[["a/b", 2**40]]),
        text(t="result", data={}, parts=[["a/b"]]),
        text(t="result", data={}, parts=[["a/b", 1], ["a/b", 1]]),
        text(t="result", data={"a/b": ""}, parts=[["a/b", 1]]),
        text(t="error", data={"name": "E"}),
        text(t="error", data={"name": "E", "value": "", "traceback": "", "more": ""}),
        text(t="done"),
        text(t="done", ok=False),
        text(t="done", ok=1),
        text(t="done", ok=True, left_out=-1),
        text(t="done", ok=True, left_out=10**30),
    ],
)
def test_nonsense_is_named(nonsense: bytes) -> None:
    claims = fed(nonsense, DONE)
    assert claims.broken
    assert (claims.results, claims.error, claims.done) == ([], None, False)


@pytest.mark.parametrize(
    "conversation",
    [
        (ERROR, ERROR),
        (ERROR, DONE),
        (PARTS, DONE),
        (PARTS, b"+<b>! and more"),
        (PARTS, b"+"),
        (PARTS, b"+\xff\xff\xff\xff"),
    ],
)
def test_what_contradicts_itself_is_nonsense(conversation: tuple[bytes, ...]) -> None:
    assert fed(*conversation).broken


@pytest.mark.parametrize(
    "message",
    [
        b"\n".join([b'{"id":0}'] * 7000),
        b"\n".join([b'{"t":"done","id":0,"ok":true}'] * 2000),
        text(t="done", id=0, ok=[0] * 20_000),
        text(t="result", id=4, data={"text/plain": "x"}, main=[0] * 20_000),
        text(t="result", data={"text/plain": "x"}, more=[0] * 20_000),
        text(t="done", ok=True, more=[{}] * 15_000),
    ],
)
def test_whatever_is_said_is_charged_for_so_that_the_work_of_reading_it_is_bounded(message: bytes) -> None:
    """Claims of a cell that is over, too, and fields that nobody reads."""
    claims = Claims(5)
    said = 0
    while claims.broken is None and not claims.done and said < 10 * 1024 * 1024:
        claims.feed(message)
        said += len(message)
    assert claims.broken
    assert said <= 1024 * 1024


def test_a_text_that_comes_byte_by_byte_is_charged_for_its_pieces() -> None:
    claims = fed(text(t="result", data={}, parts=[["a/b", 4_000_000]]))
    pieces = 0
    while claims.broken is None and pieces < 200_000:
        claims.feed(b"+x")
        pieces += 1
    assert claims.broken
    assert pieces < 100_000


def test_memory_stays_bounded_whatever_is_said() -> None:
    small = text(t="result", data={f"a/{number}": "" for number in range(60)})
    tall = text(t="result", data={"a/b": "x" * 30_000 + "\U0001f600"})
    nested = b'{"t":' + b"[" * 900 + b"]" * 900 + b"}"
    for message in (small, tall, RESULT, nested, text(t="result", data={}, parts=[["a/b", 9_000_000]])):
        tracemalloc.start()
        try:
            claims = Claims(5)
            for _ in range(50_000):
                claims.feed(message)
                claims.feed(b"+" + b"x" * 60_000) if b"parts" in message else None
                if claims.broken:
                    break
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert claims.broken
        assert peak < 60_000_000
