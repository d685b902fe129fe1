"""JSON Schema from strangers: what fits, what is said of what does not, and that no schema can hurt."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core import canonical, schema
from ringfence.core.schema import MAX_SCHEMA_BYTES, Schema, Unusable


def problem(schema: Any, value: Any) -> str | None:
    return Schema(schema).problem(value, "arguments")


TICKET = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 10},
        "priority": {"enum": ["low", "high"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title"],
    "additionalProperties": False,
}


def test_what_fits_has_no_problem() -> None:
    assert problem(TICKET, {"title": "x", "priority": "low", "tags": ["a"]}) is None
    assert problem(True, {"anything": [1, None]}) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, 'arguments: "title" is a required property'),
        ({"title": 5}, 'arguments.title: the value is not of type "string"'),
        ({"title": "x", "priority": "urgent"}, 'arguments.priority: the value is not one of "low" or "high"'),
        ({"title": "x", "tags": ["a", 7]}, 'arguments.tags[1]: the value is not of type "string"'),
        ({"title": "x", "extra": 1}, "arguments: Additional properties are not allowed ('extra' was unexpected)"),
        ([], 'arguments: the value is not of type "object"'),
    ],
)
def test_a_problem_names_the_place_and_the_rule(value: Any, said: str) -> None:
    assert problem(TICKET, value) == said


def test_several_problems_are_told_together_and_many_are_cut_short() -> None:
    two = problem(TICKET, {"priority": 1, "title": 2})
    assert two is not None
    assert two.count(";") == 1
    many = problem({"items": {"type": "string"}}, list(range(50)))
    assert many is not None
    assert many.endswith("and more")
    assert many.count("is not of type") == 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"const": 1},
        {"enum": [1, 2]},
        {"pattern": "^x$"},
        {"maxLength": 1},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"oneOf": [{"type": "string"}, {"minLength": 1}]},
        {"not": {"type": "string"}},
        False,
    ],
)
def test_a_problem_never_quotes_the_value(schema: Any) -> None:
    said = problem({"properties": {"password": schema}}, {"password": "hunter2"})
    assert said is not None
    assert "arguments.password" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("draft", "good", "bad"),
    [
        ("https://json-schema.org/draft/2020-12/schema", {"prefixItems": [{"type": "string"}]}, {"items": [{}]}),
        ("http://json-schema.org/draft-07/schema#", {"items": [{"type": "string"}]}, {"items": 5}),
        ("https://json-schema.org/draft/2019-09/schema", {"items": [{"type": "string"}]}, {"items": 5}),
    ],
)
def test_a_schema_is_read_by_its_own_draft(draft: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    assert problem({"$schema": draft, **good}, [1]) is not None
    assert problem({"$schema": draft, **good}, ["a"]) is None
    with pytest.raises(Unusable):
        Schema({"$schema": draft, **bad})


def test_references_inside_the_document_work() -> None:
    schema = {
        "$defs": {"n": {"$anchor": "node", "type": "integer"}, "a/b": {"type": "string"}},
        "properties": {
            "pointer": {"$ref": "#/$defs/n"},
            "anchor": {"$ref": "#node"},
            "escaped": {"$ref": "#/$defs/a~1b"},
            "quoted": {"$ref": "#/%24defs/n"},
            "self": {"$ref": "#"},
        },
    }
    assert problem(schema, {"pointer": 1, "anchor": 1, "escaped": "x", "quoted": 1, "self": {"pointer": 2}}) is None
    for wrong in ({"pointer": "x"}, {"anchor": "x"}, {"escaped": 1}, {"quoted": "x"}, {"self": {"pointer": "x"}}):
        assert problem(schema, wrong) is not None


def test_names_that_look_like_keywords_are_only_names() -> None:
    names = {"$ref": {"type": "string"}, "$schema": {"type": "string"}, "$id": {"type": "integer"}, "default": {}}
    schema = {"properties": names, "default": {"$ref": "http://example.com/"}, "const": {"$ref": "x"}}
    assert problem(schema, {"$ref": "x"}) is None
    nested = {"properties": {"default": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    assert problem(nested, {"default": "x"}) == 'arguments.default: the value is not of type "integer"'


OUTSIDE = [
    {"$ref": "http://127.0.0.1:9/x.json"},
    {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    {"$ref": "file:///etc/passwd"},
    {"$ref": "other.json#/x"},
    {"$dynamicRef": "http://127.0.0.1:9/#x"},
    {"$recursiveRef": "other"},
    {"properties": {"a": {"items": {"allOf": [{"$ref": "//127.0.0.1/x"}]}}}},
    {"$schema": "http://127.0.0.1:9/meta"},
    {"$id": "http://127.0.0.1:9/base/", "properties": {"a": {"$ref": "x"}}},
    {"$defs": {"a": {"$id": "http://127.0.0.1/a", "$ref": "#/$defs/b", "$defs": {"b": {}}}}},
    {"default": {"a": {"$ref": "http://127.0.0.1:9/x"}}, "$ref": "#/default/a"},
]


@pytest.mark.parametrize("schema", OUTSIDE, ids=str)
def test_nothing_outside_of_a_schema_is_ever_fetched(schema: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: touched.append(args))
    with pytest.raises(Unusable):
        Schema(schema)
    assert touched == []


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("object", "no JSON Schema"),
        ([], "no JSON Schema"),
        ({"type": "strng"}, "no valid"),
        ({"pattern": "("}, "no valid"),
        ({"$ref": "#/nowhere"}, "leads to no schema"),
        ({"$ref": "#nowhere"}, "leads to no schema"),
        ({"$ref": "#/allOf/7", "allOf": [{}]}, "leads to no schema"),
        ({"$ref": "#/type", "type": "object"}, "leads to no schema"),
        ({"$ref": "#/allOf/x", "allOf": [{}]}, "leads to no schema"),
        ({"$ref": "#/$defs", "$defs": {"a": {}}}, "leads to no schema"),
        ({"$ref": "#/default/d", "default": {"d": {"type": "string"}}}, "leads to no schema"),
        ({"description": "x" * MAX_SCHEMA_BYTES}, "larger than 256 kB"),
        (nested(70), "nested deeper"),
        (nested(5_000), "nested deeper|not plain JSON"),
        ({"default": float("nan")}, "not plain JSON"),
        ({"description": "\ud800"}, "not plain JSON"),
    ],
)
def test_unusable_schemas_say_why(schema: Any, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        Schema(schema)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": float("nan")}, "not plain JSON"),
        ({"a": "\ud800"}, "not plain JSON"),
        ({"a": object()}, "not plain JSON"),
        ({1: 2}, "not plain JSON"),
        (nested(70), "nested deeper"),
        (nested(5_000), "arguments: n"),
    ],
)
def test_values_that_are_no_plain_json_do_not_fit(value: Any, said: str) -> None:
    found = problem({"type": "object"}, value)
    assert found is not None
    assert said in found


def test_a_value_may_be_too_large() -> None:
    assert Schema(True).problem({"a": "x" * 100}, "arguments", 50) == "arguments: larger than 50 bytes"


# ── Bombs: each of these would take a naive checker ages ──────────────────────────────────────────


def chain(levels: int, keyword: str) -> dict[str, Any]:
    """Each definition refers to the one before it twice."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        defs[f"d{level}"] = {keyword: [{"$ref": f"#/$defs/d{level - 1}"}, {"$ref": f"#/$defs/d{level - 1}"}]}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels - 1}"}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("value", ["x", 5])
def test_references_that_multiply_are_stopped(keyword: str, value: Any) -> None:
    assert problem(chain(60, keyword), value) == "arguments: too much work to check against this schema"


@pytest.mark.parametrize("place", ["default", "const", "examples", "x-own"])
def test_a_bomb_cannot_hide_where_no_schema_is_expected(place: str) -> None:
    bomb = json.loads(json.dumps(chain(60, "allOf")).replace("#/$defs/", f"#/{place}/0/"))
    hidden = {place: [bomb["$defs"]], "$ref": bomb["$ref"]}
    try:
        found = problem(hidden, "x")
    except Unusable as exc:
        found = str(exc)
    assert found in (
        "arguments: too much work to check against this schema",
        "one of its references leads to no schema",
    )


def test_few_references_times_many_items_are_stopped() -> None:
    bomb = chain(13, "allOf")
    found = problem({"$defs": bomb["$defs"], "items": {"$ref": bomb["$ref"]}}, ["x"] * 200_000)
    assert found == "arguments: too much work to check against this schema"


def test_an_ordinary_schema_with_references_takes_large_values() -> None:
    defs = {"name": {"type": "string"}, "row": {"properties": {"a": {"$ref": "#/$defs/name"}}}}
    rows = {"$defs": defs, "items": {"$ref": "#/$defs/row"}}
    assert problem(rows, [{"a": "x"}] * 90_000) is None


def test_every_way_into_a_value_is_counted() -> None:
    ways: list[Any] = [
        {"additionalProperties": {"$ref": "#/$defs/d"}},
        {"patternProperties": {"a": {"$ref": "#/$defs/d"}}},
        {"propertyNames": {"$ref": "#/$defs/d"}},
        {"dependentSchemas": {"a": {"$ref": "#/$defs/d"}}},
        {"if": {"$ref": "#/$defs/d"}},
        {"properties": {"a": {"prefixItems": [{"$ref": "#/$defs/d"}]}}},
        {"properties": {"a": {"items": {"$ref": "#/$defs/d"}}}},
        {"properties": {"a": {"contains": {"$ref": "#/$defs/d"}}}},
    ]
    for way in ways:
        bomb = chain(60, "allOf")
        bomb["$defs"]["d"] = {"$ref": bomb.pop("$ref")}
        found = problem({**bomb, **way}, {"a": ["x"]})
        assert found == "arguments: too much work to check against this schema", way


@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("leaf", [{}, 5])
def test_references_that_multiply_with_the_value_are_stopped(keyword: str, leaf: Any) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: [{"$ref": "#"}, {"$ref": "#"}]}}}
    value = leaf
    for _ in range(50):
        value = {"a": value}
    assert problem(schema, value) in (None, "arguments: does not fit the schema")


def test_a_dynamic_reference_multiplies_no_better() -> None:
    schema = {
        "$dynamicAnchor": "n",
        "type": "object",
        "properties": {"a": {"anyOf": [{"$dynamicRef": "#n"}, {"$dynamicRef": "#n"}]}},
    }
    value: Any = 5
    for _ in range(50):
        value = {"a": value}
    assert problem(schema, value) == "arguments: does not fit the schema"


@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(?=a)(a+)+$", r"^(a|a)*\1$"])
def test_patterns_take_bounded_time(pattern: str) -> None:
    assert problem({"pattern": pattern}, "a" * 50_000 + "!") is not None


def test_patterns_with_lookarounds_still_work() -> None:
    schema = {"pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
    assert problem(schema, "a@b.c") is None
    assert problem(schema, ".a@b.c") is not None


@pytest.mark.parametrize("sub", [True, {}])
def test_many_patterns_are_stopped_whatever_they_lead_to(sub: Any) -> None:
    schema = {"patternProperties": {f"^x{number}z": sub for number in range(3_000)}}
    found = problem(schema, {f"x{number}": 1 for number in range(6_000)})
    assert found == "arguments: too much work to check against this schema"


def test_many_options_that_are_objects_times_many_items_are_stopped() -> None:
    schema = {"items": {"enum": [{"a": number} for number in range(5000)]}}
    found = problem(schema, [{"a": 4999}] * 2000)
    assert found == "arguments: too much work to check against this schema"
    assert problem(schema, [{"a": 4999}] * 3) is None


def test_a_large_right_value_fits() -> None:
    row = {"type": "object", "properties": {name: {"type": "integer"} for name in "abcde"}, "required": ["a"]}
    assert problem({"type": "array", "items": row}, [dict.fromkeys("abcde", 1)] * 20_000) is None


def test_a_large_wrong_value_is_explained_by_its_first_problem() -> None:
    found = problem({"items": {"type": "string"}}, list(range(100_000)))
    assert found == 'arguments[0]: the value is not of type "string"'


BRANCHES = [{"type": "string", "minLength": number} for number in range(50)]
OPTIONAL = {"properties": {"a": {"anyOf": [{"type": "array", "items": {"anyOf": BRANCHES}}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (OPTIONAL, {"a": [1] * 2_000}),
        ({"oneOf": [{"items": {"oneOf": BRANCHES}}]}, [1] * 2_000),
        ({"anyOf": [{"type": "string"}] * 100}, [1] * 20_000),
        ({"anyOf": [{"required": [f"a{number}" for number in range(1_000)]}]}, {str(n): n for n in range(1_000)}),
        ({"anyOf": [{"dependentRequired": {"0": [f"a{n}" for n in range(1_000)]}}]}, {str(n): n for n in range(1_000)}),
    ],
    ids=["items of alternatives", "one of them", "a large value", "required", "required by another"],
)
def test_errors_that_multiply_with_the_value_are_not_made(schema: Any, value: Any) -> None:
    """Each holds a copy of what it is about: 6 kB took a second and 180 MB, and a megabyte was taken."""
    assert problem(schema, value) == "arguments: does not fit the schema"


def test_of_many_that_are_missing_in_a_large_value_the_first_is_named() -> None:
    schema = {"required": [f"a{number}" for number in range(1_000)]}
    assert problem(schema, {str(number): 1 for number in range(5_000)}) == 'arguments: "a0" is a required property'


def test_an_ordinary_list_of_alternatives_is_explained() -> None:
    row = {"type": "object", "properties": {name: {"anyOf": [{"type": "integer"}, {"type": "null"}]} for name in "abc"}}
    rows = [dict.fromkeys("abc", 1) for _ in range(100)]
    rows[57]["b"] = "x"  # type: ignore[assignment]
    schema = {"properties": {"text": {"type": "string"}, "rows": {"type": "array", "items": row}}}
    found = problem(schema, {"text": "word, " * 100_000, "rows": rows})
    assert found is not None and found.startswith("arguments.rows[57].b: the value is not valid under any of")


def test_an_ordinary_recursive_schema_is_explained() -> None:
    tree = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "left": {"$ref": "#"}, "right": {"$ref": "#"}},
    }
    value = {"value": 1, "left": {"value": 2, "right": {"value": "x"}}}
    assert problem(tree, value) == 'arguments.left.right.value: the value is not of type "integer"'


# ── Whatever comes ────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "allOf", "anyOf", "not", "$ref", "$id", "$schema", "$defs", "enum", "required"]
)
SCHEMAS = st.recursive(
    st.booleans() | st.sampled_from(["object", "string", "#", "#/$defs/a", "x", 5, None]),
    lambda inner: st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=10,
)


@given(SCHEMAS, JSON)
def test_any_schema_is_usable_or_says_why_not(schema: Any, value: Any) -> None:
    try:
        found = Schema(schema).problem(value, "arguments")
    except Unusable as exc:
        found = f"arguments {exc}"
    assert found is None or found.startswith("arguments")


@given(JSON)
def test_every_json_value_fits_its_own_constant(value: Any) -> None:
    again = canonical.loads(canonical.dumps(value))
    assert problem({"const": again}, again) is None


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("abc", 3),
        ("^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$", 38),
        ("(a{1,100}){1,100}", 10_000),
        ("((a{1,100}){1,100}){1,10}$", 100_001),
        (r"\p{L}{1,200}\{2\}", 203),
        (r"[\]{9}]{5}", 5),
        ("((((", 0),
    ],
)
def test_how_much_a_pattern_is_with_its_repetitions_written_out(pattern: str, states: int) -> None:
    assert schema._states(pattern) == states


def test_a_pattern_that_is_more_than_its_text_allows_is_not_tried() -> None:
    bomb = Schema({"type": "object", "properties": {"x": {"type": "string", "pattern": "((a{1,100}){1,100}){1,10}$"}}})
    assert bomb.problem({"x": "a" * 20}, "it") is None
    assert bomb.problem({"x": "a" * 200_000}, "it") == "it: too much work to check against this schema"
    assert bomb.problem({"x": "a" * 20, "y": "b" * 500_000}, "it") is None, "only what is compared counts"
    keys = Schema({"type": "object", "patternProperties": {"(a{1,100}){1,100}$": {}}})
    assert keys.problem({"a" * 100_000: 1}, "it") == "it: too much work to check against this schema"
    plain = Schema({"type": "object", "properties": {"x": {"pattern": "^.{1,1000}$"}, "y": {"pattern": "^[a-z ]*$"}}})
    assert plain.problem({"x": "b" * 1000, "y": "word " * 100_000}, "it") is None


LONG = 10**300
UNIQUE = {"type": "array", "uniqueItems": True}
NUMBERS_THAT_TAKE_LONG = {
    "alike to a float": (UNIQUE, [2**63 + count for count in range(1000)]),
    "long, and alike": (UNIQUE, [LONG + count for count in range(1000)]),
    "beyond floats": (UNIQUE, [LONG * LONG + count for count in range(1000)]),
    "in objects": (UNIQUE, [{"a": LONG + count % 30, "b": LONG + count // 30} for count in range(900)]),
    "of a wrong type": ({**UNIQUE, "items": {"type": "string"}}, [LONG + count for count in range(1000)]),
    "multiples of little": ({"items": {"multipleOf": 0.01}}, [1e308 / 3] * 30_000),
    "multiples of nothing": ({"items": {"multipleOf": 1e-300}}, [5.5] * 30_000),
    "compared": ({"items": {"minimum": 7, "maximum": 8}}, [LONG] * 30_000),
}


@pytest.mark.parametrize(("schema", "value"), NUMBERS_THAT_TAKE_LONG.values(), ids=NUMBERS_THAT_TAKE_LONG)
def test_numbers_that_the_validator_is_slow_with_are_bounded(schema: Any, value: Any) -> None:
    assert Schema(schema).problem(value, "list") == "list: too much work to check against this schema"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (UNIQUE, [(1 << 60) + count * 4_096_000 for count in range(20_000)]),
        (UNIQUE, [count / 7 for count in range(20_000)]),
        (UNIQUE, [f"id-{count}" for count in range(20_000)]),
        ({"items": {"minimum": 0}}, [(1 << 62) + count for count in range(20_000)]),
        ({"items": {"multipleOf": 0.01}}, [0.25 * count for count in range(20_000)]),
    ],
)
def test_many_ordinary_numbers_are_checked(schema: Any, value: Any) -> None:
    assert Schema(schema).problem(value, "list") is None


def test_errors_that_name_long_options_are_few() -> None:
    schema = Schema({"items": {"enum": [10**600 - count for count in range(90)]}})
    problem = schema.problem([10**600 + 1 + count for count in range(3000)], "list")
    assert problem is not None and problem.startswith("list[0]: ") and "; " not in problem
