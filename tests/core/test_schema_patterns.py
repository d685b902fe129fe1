"""Patterns of a schema from strangers: what all of them may take together, and that ordinary ones are taken."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core import schema, schema_patterns
from ringfence.core.schema import MAX_COST, Schema, Unusable

TOO_MUCH = "its patterns cost too much to compile"


def asked(*patterns: str, **more: Any) -> dict[str, Any]:
    return {"properties": {f"p{number}": {"pattern": text} for number, text in enumerate(patterns)}, **more}


@pytest.mark.parametrize(
    "patterns",
    [
        [rf"^\pL{{{100 + number}}}$" for number in range(2_000)],
        [rf"^\pL{{{100 + number}}}$" for number in range(5)],
        [rf"^\pL\pN{number}$" for number in range(500)],
        [f"^.{{1,1000}}{number}$" for number in range(50)],
        [f"^x{number}[a-z]+$" for number in range(6_000)],
        [rf"(?=\pL{{40}})(?!{number})" * 8 for number in range(4)],
        [r"(?=\pL{40})" * 40],
        [r"\w" * 1_000],
        [r"\s" * 300],
        [r"\cA" * 5_000],
        [r"\pL" * 5_000],
        [r"(?=a)" + r"\w" * 5_000],
        ["(?i)" + r"\p{Any}" * 50],
        ["(?i)" + "[!-\uffdc]" * 50],
        ["(?x)( ?i:" + r"[a\W]" * 50 + ")"],
        ["(?i)" + "[b[^c-e]]" * 50],
        ["(a|)" * 20_000],
        ["a?" * 20_000],
    ],
    ids=lambda patterns: f"{len(patterns)} like {patterns[0][:24]}",
)
def test_patterns_that_take_too_much_to_compile_are_refused(
    patterns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before it is compiled: more of the same takes seconds to minutes, or gigabytes."""
    monkeypatch.setattr(schema, "_validator", lambda *_: pytest.fail("the schema was compiled"))
    with pytest.raises(Unusable, match=TOO_MUCH) as unusable:
        Schema(asked(*patterns))
    assert unusable.value.cost == MAX_COST


@pytest.mark.parametrize(
    "place",
    [
        lambda pattern, sub: {"properties": {pattern: {"pattern": pattern}, "default": sub}},
        lambda pattern, sub: {"patternProperties": {pattern: sub}},
        lambda pattern, sub: {"propertyNames": {"pattern": pattern}, "items": sub},
        lambda pattern, sub: {"pattern": pattern, "allOf": [sub]},
        lambda pattern, sub: {"pattern": pattern, "$defs": {"a": sub}},
        lambda pattern, sub: {"pattern": pattern, "dependentSchemas": {"a": sub}},
        lambda pattern, sub: {"pattern": pattern, "x-own": {"a": [sub]}},
    ],
)
def test_patterns_count_wherever_they_are(place: Any) -> None:
    found: Any = {}
    for number in range(20):
        found = place(rf"^\pL{{{100 + number}}}$", found)
    with pytest.raises(Unusable, match=TOO_MUCH):
        Schema(found)


ORDINARY = [
    (r"^[^@\s]+@[^@\s]+\.[^@\s]+$", "a@b.example"),
    (
        r"^[a-zA-Z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$",
        "a@b.example",
    ),
    (r"^\d{4}-\d{2}-\d{2}$", "2024-02-29"),
    (r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})$", "2024-02-29T10:00:00.5Z"),
    (r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$", "6f1c9a52-0e39-4b43-9a57-2f3c1ab0d9e4"),
    (r"^[a-z0-9-]{1,63}$", "a-name"),
    (r"^[\w.-]{1,128}$", "a.name"),
    (r"^.{1,255}$", "anything"),
    (r"^[a-zA-Z0-9]{1,1024}$", "token"),
    (r"^\p{L}+$", "Übung"),
    (r"^([\p{L}\p{Z}\p{N}_.:/=+\-@]*)$", "Größe 5"),
    (r"^[\p{L}\p{N} ]{1,100}$", "Übung 5"),
    (r"(?i)^(get|put|post)$", "Get"),
    (r"(?i)^[a-z][^:]*:\d+-\d+$", "AB:1-2"),
    (r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{8,}$", "Passw0rds"),
    (r"^(?!\s)[\p{L} ]{1,50}(?<!\s)$", "ein Name"),
    (r"^arn:aws[a-zA-Z-]*:[a-z]+:[a-z0-9-]*:\d{12}:[a-zA-Z0-9/_-]{1,512}$", "arn:aws:iam:eu:123456789012:x/y"),
    (r"^(([0-9]{1,3}\.){3}[0-9]{1,3}|[0-9a-f:]+)(/\d{1,3})?$", "10.0.0.0/8"),
    (r"^(https?|wss?)://[^\s/$.?#].[^\s]*$", "https://a.example/x"),
    ("^(" + "|".join(f"option-{number}" for number in range(2_000)) + ")$", "option-7"),
]


@pytest.mark.parametrize(("pattern", "value"), ORDINARY)
def test_ordinary_patterns_are_taken(pattern: str, value: str) -> None:
    usable = Schema(asked(pattern))
    assert usable.problem({"p0": value}, "it") is None
    assert usable.problem({"p0": "\n"}, "it") is not None


def test_a_schema_may_have_many_ordinary_patterns() -> None:
    texts = [text for text, _ in ORDINARY]
    assert Schema(asked(*texts)).problem({f"p{n}": value for n, (_, value) in enumerate(ORDINARY)}, "it") is None
    plain = [text for text in texts if r"\p" not in text and "(?" not in text and len(text) < 60 and text[1] != "."]
    many = [f"{text[:-1]}|{number}$" for number in range(40) for text in plain]
    assert len(many) > 300
    assert Schema(asked(*many)).cost < MAX_COST
    assert Schema(asked(*[rf"^\p{{L}}+{number}$" for number in range(100)])).cost < MAX_COST
    assert Schema(asked(*[f"^.{{1,{255 - number}}}$" for number in range(30)])).cost < MAX_COST


def test_the_same_pattern_counts_once() -> None:
    assert Schema(asked(*[r"^\pL{100}$"] * 1_000)).cost == Schema(asked(r"^\pL{100}$")).cost


def test_what_only_looks_like_a_pattern_does_not_count() -> None:
    data = {"pattern": "*.py", "patternProperties": {"[" * 50_000: 1}}
    names = {"pattern": {"type": "string", "default": "["}}
    usable = Schema({"properties": names, "default": data, "examples": [data], "enum": [data, {"pattern": "("}]})
    assert usable.cost == 0


PIECES = st.sampled_from(
    [
        *(r"\pL", r"\P{Lu}", r"\w", r"\d", ".", "[a-z]", "[^a]", "ab", "é", "^", "$", "-", " ", "[", "]"),
        *("{3}", "{0,40}", "+", "?", "|", "(", ")", "(?i)", "(?x)", "(?=", "(?!", r"\1"),
    ]
)


@given(st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=6))
def test_what_is_compiled_fits_in_what_was_charged(patterns: list[str]) -> None:
    try:
        cost = Schema(asked(*patterns)).cost
    except Unusable:
        return
    assert cost <= MAX_COST
    fancy = any(map(schema_patterns._NOT_LINEAR.search, patterns))
    engine = jsonschema_rs.FancyRegexOptions if fancy else jsonschema_rs.RegexOptions
    for pattern in set(patterns):  # by itself, with no more than all of them were charged
        assert _compiles(pattern, engine(size_limit=cost))


def test_a_pattern_is_tried_with_the_engine_that_compiles_it() -> None:
    """A repetition of a repetition is 120 classes to one engine, and to the other three and a text."""
    repeated = r"^\pL{3}{0,40}$"
    written_out = r"^(?:\pL{3}){0,40}$"
    assert Schema(asked(repeated)).cost == Schema(asked(written_out)).cost
    assert Schema(asked(repeated, "^(?!x)")).cost < Schema(asked(written_out)).cost


# Repeated few times and seldom, so that no pattern is larger than the limit below: the engines do not agree on sizes.
FEW = PIECES.filter(lambda piece: piece != "{0,40}").map(lambda piece: piece.replace("{3}", "{2}"))


@given(st.lists(FEW, max_size=8).map("".join))
def test_a_pattern_needs_the_other_engine_only_where_it_looks_so(pattern: str) -> None:
    if schema_patterns._NOT_LINEAR.search(pattern) is None:
        other = _compiles(pattern, jsonschema_rs.FancyRegexOptions(size_limit=10**8))
        assert not other or _compiles(pattern, jsonschema_rs.RegexOptions(size_limit=10**8))


def _compiles(pattern: str, options: Any) -> bool:
    try:
        jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=options)
    except ValueError:
        return False
    return True


def test_no_text_takes_long_to_estimate() -> None:
    for text in ("[" * 90_000, r"[\]" * 30_000, "?i" * 45_000, "[]" * 45_000, "{" * 90_000, "(" * 90_000):
        assert schema_patterns._reading(text) > 0
        assert schema._states(text) >= 0


def test_repetitions_of_repetitions_multiply() -> None:
    assert schema._states("a{10}{10}{10}") == 1000
