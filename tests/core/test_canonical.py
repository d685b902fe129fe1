"""JSON read strictly: what two readers could read differently is refused, and the rest has one form and one digest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core import canonical
from ringfence.core.canonical import NotCanonical

texts = st.text(st.characters(codec="utf-8"), max_size=20)
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4))


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    form = canonical.dumps(value)
    assert canonical.loads(form) == value
    assert canonical.dumps(canonical.loads(form)) == form
    assert canonical.loads(json.dumps(value)) == value, "however it was written"


@given(st.dictionaries(texts, leaves, min_size=2), st.randoms())
def test_the_order_of_keys_does_not_count(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical.digest(dict(items)) == canonical.digest(value)


@given(values, values)
def test_two_values_with_one_form_are_one_value(first: Any, second: Any) -> None:
    same = canonical.dumps(first) == canonical.dumps(second)
    assert same == (json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True))
    assert (canonical.digest(first) == canonical.digest(second)) == same


@given(st.binary(max_size=60) | texts.map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        value = canonical.loads(data)
    except NotCanonical:
        return
    assert canonical.loads(canonical.dumps(value)) == value


@pytest.mark.parametrize(
    ("data", "problem", "guess"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key 'a'", {"a": 2}),
        (b'{"x": {"a": 1, "a": 1}}', "duplicate key 'a'", {"x": {"a": 1}}),
        (b'{"a": 1, "\\u0061": 2}', "duplicate key 'a'", {"a": 2}),
        (b"[1e999]", "a number is out of range", [float("inf")]),
        (b"[-1e999]", "a number is out of range", [float("-inf")]),
        (b'["\\ud800"]', "a lone surrogate is not text", ["\ud800"]),
        (b'{"\\udfff": 1}', "a lone surrogate is not text", {"\udfff": 1}),
        (b'"\xff"', "invalid UTF-8 at byte 1", "\ufffd"),
        (b'"\xed\xa0\x80"', "invalid UTF-8 at byte 1", "\ufffd" * 3),
        (b"", "not JSON: ", None),
        (b"{", "not JSON: ", None),
        (b"1 2", "not JSON: ", None),
        (b"\xef\xbb\xbf{}", "not JSON: ", None),
        (b"{'a': 1}", "not JSON: ", None),
        (b"[1,]", "not JSON: ", None),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(data: bytes, problem: str, guess: Any) -> None:
    with pytest.raises(NotCanonical, match=problem.replace("(", r"\(")) as refused:
        canonical.loads(data)
    assert refused.value.value == guess


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused(word: str) -> None:
    for data in (word, f"[{word}]", f'{{"a": {word}}}'):
        with pytest.raises(NotCanonical, match=f"{word} is not JSON"):
            canonical.loads(data)
    with pytest.raises(ValueError, match="JSON"):
        canonical.dumps(float(word))


@pytest.mark.parametrize("shape", ["[{}]", '{{"a": {}}}'], ids=["lists", "objects"])
def test_depth_is_bounded(shape: str) -> None:
    def nested(levels: int) -> str:
        text = "1"
        for _ in range(levels):
            text = shape.format(text)
        return text

    assert canonical.depth(canonical.loads(nested(canonical.MAX_DEPTH))) == canonical.MAX_DEPTH
    for levels in (canonical.MAX_DEPTH + 1, 900, 200_000):
        with pytest.raises(NotCanonical, match="nested deeper than 64 levels"):
            canonical.loads(nested(levels) if levels < 1000 else "[" * levels)
    assert canonical.loads("[" + "[]," * 500 + "[]]") == [[]] * 501, "many brackets are not deep by themselves"


def test_one_form() -> None:
    assert canonical.dumps({"b": [1, 2.5, None, True], "a": "ü\n"}) == '{"a":"ü\\n","b":[1,2.5,null,true]}'.encode()
    assert canonical.digest({}) == "sha256:" + hashlib.sha256(b"{}").hexdigest()


def test_a_definition_is_pinned_by_every_field_it_has() -> None:
    body = {"name": "a", "description": "d", "inputSchema": {"type": "object", "x": None}}
    pin = canonical.definition_digest(body)
    assert canonical.definition_digest(dict(reversed(body.items()))) == pin
    assert canonical.definition_digest({**body, "title": None}) == pin
    changes: list[dict[str, Any]] = [
        {"name": "b"}, {"description": "e"}, {"title": ""}, {"annotations": {}}, {"x-vendor": 1}, {"_meta": {"a": 1}},
        {"inputSchema": {"type": "object"}}, {"icons": []},
    ]  # fmt: skip
    assert len({pin, *(canonical.definition_digest({**body, **change}) for change in changes)}) == len(changes) + 1
    assert canonical.definition_digest(["no object"]) == canonical.digest(["no object"])


@given(st.binary(), st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_salted_digest_depends_on_its_salt(text: bytes, first: bytes, second: bytes) -> None:
    same = canonical.salted_bytes(text, first) == canonical.salted_bytes(text, second)
    assert same == (first == second)


def test_ids_are_fresh_and_tell_what_they_name() -> None:
    made = [canonical.new_id("call") for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(one.startswith("call_") for one in made)
    assert sorted(one[:16] for one in made) == [one[:16] for one in made], "they grow with time"


@st.composite
def partly_written(draw: st.DrawFn) -> tuple[Any, Any]:
    """A value, and the same with some of its parts written beforehand."""

    def wrapped(value: Any) -> Any:
        if draw(st.integers(0, 3)) == 0:
            return canonical.Written(inside(value))
        return inside(value)

    def inside(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: wrapped(each) for key, each in value.items()}
        return [wrapped(each) for each in value] if isinstance(value, list) else value

    plain = draw(values)
    return plain, wrapped(plain)


@given(partly_written())
def test_what_was_written_beforehand_has_the_same_form(pair: tuple[Any, Any]) -> None:
    plain, written = pair
    assert canonical.dumps(written) == canonical.dumps(plain)
    assert canonical.digest({"a": written, "b": [written]}) == canonical.digest({"a": plain, "b": [plain]})


@given(values, values)
def test_an_error_in_the_middle_leaves_nothing(first: Any, second: Any) -> None:
    for broken in (object(), float("nan"), {1, 2}):
        with pytest.raises((TypeError, ValueError)):
            canonical.dumps([canonical.Written(first), {"deep": [canonical.Written(first), broken]}])
    assert (
        canonical.dumps(second)
        == json.dumps(second, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )
    assert canonical.dumps([canonical.Written(second)]) == b"[" + canonical.dumps(second) + b"]"


@pytest.mark.parametrize(
    ("value", "light"),
    [
        ({}, True),
        ({"a": "b"}, True),
        ("x" * 83, True),
        ("x" * 84, False),
        ({"k": "x" * 84}, False),
        ([0] * 5, False),
        ({str(number): {} for number in range(5)}, False),
        ([[[[[[]]]]]], False),
    ],
)
def test_what_is_light_is_known_without_looking_at_all_of_it(value: object, light: bool) -> None:
    assert canonical.is_light(value, 100) is light
