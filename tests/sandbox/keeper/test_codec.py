"""Every noun that goes over a keeper's socket comes back as it was; whatever is no noun is not taken."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import GenericAlias, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfence.core.box import Captured, Input
from ringfence.core.sessions import Owner, SessionInfo, SessionSpec, StepReport
from ringfence.sandbox.keeper.codec import LONG_TEXT, CodecError, from_json, pack, place, shape_digest, to_json, unpack
from ringfence.sandbox.keeper.protocol import PROTOCOL, VALUE, VERBS

KINDS = {
    str(kind): kind
    for verb in VERBS.values()
    for kind in (*verb.sends.values(), verb.returns, verb.yields)
    if kind is not None
} | {"VALUE": VALUE, "Input": Input}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SINGLE = {
    Any: JSON,
    str: st.text(st.characters(exclude_categories=()), max_size=20),  # half a surrogate pair is a character, too
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
    Path: st.from_regex(r"/[a-z./]{0,20}", fullmatch=True).map(Path),
    datetime: st.datetimes(timezones=st.just(UTC)),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """All that a type allows."""
    if kind in SINGLE:
        return SINGLE[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, args))
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(values, args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin in (list, Sequence):
        return st.lists(values(args[0]), max_size=2)
    if origin in (dict, Mapping):
        return st.dictionaries(values(str), values(args[1]), max_size=2)
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


def carried(kind: Any, value: Any) -> Any:
    """What comes out at the other end."""
    attachments: list[bytes] = []
    data = to_json(pack(kind, value, attachments))
    return unpack(kind, from_json(data), attachments)


@pytest.mark.parametrize("kind", KINDS)
def test_every_noun_survives_the_way(kind: str) -> None:
    @settings(max_examples=40)
    @given(values(KINDS[kind]))
    def survives(value: Any) -> None:
        assert carried(KINDS[kind], value) == value

    survives()


@given(JSON)
def test_what_is_open_may_be_any_json(value: Any) -> None:
    assert carried(Any, value) == value


@given(JSON)
def test_what_is_no_noun_is_not_taken(data: Any) -> None:
    for kind in (SessionSpec, SessionInfo, StepReport, VALUE):
        with pytest.raises(CodecError):
            unpack(kind, data, [])


@given(st.binary())
@example(b"\r1")
@example(b"1 ")
@example(b"1")
def test_what_is_no_json_is_not_taken(data: bytes) -> None:
    try:
        text = data.decode("ascii")
        value = json.loads(text)
        if text != text.strip(" \t\r\n"):
            raise ValueError("something around it, which others take and we do not")
    except ValueError:
        with pytest.raises(CodecError):
            from_json(data)
    else:
        assert from_json(data) == value or value != value


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"[" * 100_000, b"1" * 5000, '"é"'.encode()])
def test_json_that_others_take_and_we_do_not(text: bytes) -> None:
    with pytest.raises(CodecError):
        from_json(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), b""])
def test_what_json_cannot_say_is_not_sent(value: Any) -> None:
    with pytest.raises(CodecError, match="cannot be sent"):
        to_json([value])


def test_bytes_and_long_texts_go_beside_the_json() -> None:
    beside: list[bytes] = []
    head = pack(Captured, Captured(b"\x00" * 1000, b"", 1000), beside)
    assert head[:2] == [0, -1] and beside == [b"\x00" * 1000], "no bytes are no attachment"
    beside = []
    text = "é" * LONG_TEXT
    assert pack(str, text, beside) == [0]
    assert unpack(str, [0], beside) == text


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (bytes, 1),
        (bytes, -2),
        (bytes, -1.0),
        (bytes, None),
        (bytes, True),
        (bytes, "0"),
        (str, [1]),
        (str, [0, 0]),
        (str, None),
        (int, True),
        (int, 1.0),
        (float, "1"),
        (bool, 1),
        (Owner, ["tenant"]),
        (Owner, ["tenant", "agent", "more"]),
        (list[int], {"0": 1}),
        (dict[str, int], [1]),
        (Path | bytes, {"Path": "/", "bytes": 0}),
        (Path | bytes, {"Input": "/"}),
        (Path | bytes, "/"),
    ],
)
def test_values_of_another_type_are_refused(kind: Any, data: Any) -> None:
    with pytest.raises(CodecError):
        unpack(kind, data, [b"\xff"])


@pytest.mark.parametrize(("name", "value"), [("step", "1"), ("state", "asleep"), ("owner", None), ("limits", [])])
def test_a_record_with_another_value_is_refused(name: str, value: Any) -> None:
    info = SessionInfo("box", Owner("a", "b"), "running", "python", "now", SessionSpec().stay.limits)
    data = pack(SessionInfo, info, [])
    assert unpack(SessionInfo, data, []) == info
    data[place(SessionInfo, name)] = value
    with pytest.raises(CodecError):
        unpack(SessionInfo, data, [])


def test_a_record_with_a_field_more_or_less_is_refused() -> None:
    data = pack(Captured, Captured(), [])
    for other in (data[:-1], [*data, 1], [], dict(enumerate(data)), None):
        with pytest.raises(CodecError, match="is not a Captured"):
            unpack(Captured, other, [b"", b""])


def test_another_shape_is_another_protocol() -> None:
    one, other, same = (make_dataclass("One", [("a", kind)]) for kind in (int, int | None, int))
    assert shape_digest([one]) == shape_digest([same]) != shape_digest([other])
    assert shape_digest([GenericAlias(list, one)]) != shape_digest([GenericAlias(list, other)])
    assert PROTOCOL.startswith("4-") and len(PROTOCOL) == 18
