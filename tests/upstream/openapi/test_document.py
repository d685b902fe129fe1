"""Which operations a document has, what their tools look like, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from ringfence.core.schema import Schema
from ringfence.upstream.openapi import document
from ringfence.upstream.openapi.document import ApiDocument, BadDocument
from ringfence.upstream.openapi.operation import Operation
from tests import tooling
from tests.upstream.openapi import generated

PACKAGES = tooling.ROOT / ".tools" / "npm" / "node_modules"
PUBLISHED = {
    "@github/openapi": ("dist/api.github.com.json", 600),
    "@figma/rest-api-spec": ("openapi/openapi.yaml", 50),
    "@gitbook/api": ("spec/openapi.json", 300),
}


def read(paths: Any = None, **more: Any) -> ApiDocument:
    return document.read(json.dumps({"openapi": "3.1.0", "info": {"title": "T"}, "paths": paths, **more}).encode())


def one(operation: Any, path: str = "/x", method: str = "get", **more: Any) -> Operation:
    return read({path: {method: operation}}, **more).operations[0]


def schema_of(operation: Operation) -> Any:
    assert operation.definition is not None
    return operation.definition["inputSchema"]


def query(name: str, schema: Any, **more: Any) -> Any:
    return {"parameters": [{"name": name, "in": "query", "schema": schema, **more}]}


# ── Large ones ──


def test_hundreds_of_operations_are_read() -> None:
    found = document.read(json.dumps(generated.document()).encode())
    assert len(found.operations) == 600 and not found.left_out
    assert len({each.name for each in found.operations}) == 600
    for each in found.operations:
        Schema(schema_of(each))
    assert {each.method for each in found.operations if each.reads} == {"GET"}


def test_recursive_schemas_check_what_is_nested_in_arguments() -> None:
    found = {each.name: each for each in document.read(json.dumps(generated.document(3)).encode()).operations}
    schema = Schema(schema_of(found["create_things0"]))
    child = {"name": "b", "shape": {"kind": "circle", "radius": 1}}
    assert schema.problem({"body": {"name": "a", "children": [child], "next": {"name": "c"}}}, "arguments") is None
    assert schema.problem({"body": {"name": "a", "children": [{"name": 5}]}}, "arguments") is not None
    assert schema.problem({"body": {"name": "a", "shape": {"kind": "circle", "radius": -1}}}, "arguments") is not None
    assert schema.problem({"body": {"name": "a"}, "other": 1}, "arguments") is not None


def test_more_operations_than_a_server_may_have_are_left_out_and_named() -> None:
    found = document.read(json.dumps(generated.document(170)).encode())
    assert len(found.operations) == 1000 and len(found.left_out) == 20


@pytest.mark.parametrize("package", PUBLISHED)
def test_published_documents_are_read(package: str) -> None:
    file, least = PUBLISHED[package]
    place = PACKAGES / package / file
    if not place.exists():
        pytest.skip(f"{package} is not installed: scripts/setup --tests")
    found = document.read(document.read_file(place))
    assert len(found.operations) >= least and not found.left_out
    for each in found.operations:
        Schema(schema_of(each))


# ── Details ──


def test_a_document_may_be_yaml(tmp_path: Path) -> None:
    place = tmp_path / "api.yaml"
    with place.open("w") as file:
        writer = YAML(typ="safe")
        writer.representer.ignore_aliases = lambda *data: True
        writer.dump(generated.document(2), file)
    as_yaml = document.read(document.read_file(place))
    assert as_yaml == document.read(json.dumps(generated.document(2)).encode())


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"",
            b"[]",
            b"{",
            b"openapi: 2.0",
            b'{"swagger": "2.0"}',
            b'{"openapi": "3.0.0", "paths": {}}',
            b"a: &x 1\nb: *x",
        ),
        *(b"\xff\xfe", b"openapi: [", b'{"openapi": "3.0.0", "paths": {"/x": {"get": 5}}}', b"{" * 100_000),
    ],
)
def test_what_is_no_document_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(BadDocument) as refused:
        document.read(data)
    assert str(refused.value)


def test_names_are_those_of_the_document_or_of_method_and_path() -> None:
    both = {"/a/{b}": {"get": {"parameters": [{"name": "b", "in": "path"}]}, "post": {"operationId": "do it! now"}}}
    both["/a/{b}"]["parameters"] = [{"name": "b", "in": "path"}]
    again = {"/c": {"get": {"operationId": "do_it_now"}}, "/1": {"get": {"operationId": "1st"}}}
    assert [each.name for each in read({**both, **again}).operations] == ["get_a_b", "do_it_now", "do_it_now_2", "_1st"]


def test_3_0_says_null_and_bounds_in_its_own_way() -> None:
    given = {"type": "integer", "nullable": True, "minimum": 0, "exclusiveMinimum": True}
    found = one(query("a", given), openapi="3.0.0")
    assert schema_of(found)["properties"]["a"] == {"type": ["integer", "null"], "exclusiveMinimum": 0}
    either = {"oneOf": [{"type": "string"}], "nullable": True}
    schema = Schema(schema_of(one(query("a", either), openapi="3.0.0")))
    assert schema.problem({"a": None}, "arguments") is None and schema.problem({"a": 5}, "arguments") is not None


def test_headers_that_no_argument_sets_are_no_arguments() -> None:
    names = ("Authorization", "Accept", "Content-Type", "Host", "X-Own")
    found = one({"parameters": [{"name": name, "in": "header", "required": True} for name in names]})
    assert list(schema_of(found)["properties"]) == ["X-Own"]
    for name, place in (("X-HTTP-Method-Override", "header"), ("session", "cookie"), ("_method", "query")):
        with pytest.raises(BadDocument, match=name):
            one({"parameters": [{"name": name, "in": place, "required": True}]})
        optional = one({"parameters": [{"name": name, "in": place}]})
        assert optional.parameters == () and schema_of(optional)["properties"] == {}


def test_references_that_lead_nowhere() -> None:
    found = one(query("a", {"$ref": "http://elsewhere.example/schema.json"}))
    assert schema_of(found)["properties"]["a"] == {}
    circle = {"parameters": {"A": {"$ref": "#/components/parameters/A"}}}
    with pytest.raises(BadDocument):
        one({"parameters": [{"$ref": "#/components/parameters/A"}]}, components=circle)
    with pytest.raises(BadDocument):
        one({}, path="/x/{id}")


def test_what_is_no_schema_is_left_open_and_the_rest_holds() -> None:
    parameters = [{"name": "bad", "in": "query", "schema": {"type": "strnig", "maximum": "x"}}]
    found = one({"parameters": [*parameters, {"name": "good", "in": "query", "schema": {"type": "integer"}}]})
    assert schema_of(found)["properties"] == {"bad": {}, "good": {"type": "integer"}}


def test_a_huge_schema_is_left_open_deeper_down() -> None:
    wide = {
        f"S{n}": {
            "type": "object",
            "properties": {f"p{m}": {"$ref": f"#/components/schemas/S{(n + m + 1) % 300}"} for m in range(40)},
        }
        for n in range(300)
    }
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S0"}}}}
    found = one({"requestBody": body}, method="post", components={"schemas": wide})
    assert len(json.dumps(schema_of(found))) < 60_000
    Schema(schema_of(found))


@pytest.mark.parametrize(
    ("kinds", "form", "sent"),
    [
        (["text/plain", "application/json"], "json", "application/json"),
        (["application/vnd.x+json"], "json", "application/vnd.x+json"),
        (["application/x-www-form-urlencoded"], "form", "application/x-www-form-urlencoded"),
        (["multipart/form-data"], "multipart", "multipart/form-data"),
        (["application/xml"], "text", "application/xml"),
        (["image/*"], "bytes", "application/octet-stream"),
        (["*/*"], "json", "application/json"),
        (["odd kind"], "bytes", "application/octet-stream"),
    ],
)
def test_kinds_of_bodies(kinds: list[str], form: str, sent: str) -> None:
    body = one({"requestBody": {"content": {kind: {} for kind in kinds}}}, method="post").body
    assert body is not None and (body.form, body.content_type) == (form, sent)
