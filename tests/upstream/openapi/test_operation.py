"""What a call of an operation becomes: one request, and never another one than was described."""

from __future__ import annotations

import base64
import email
import email.policy
import json
import re
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.egress.rules import only_path, plain_path
from ringfence.upstream.openapi.operation import (
    BadArguments,
    Operation,
    Parameter,
    RequestBody,
    request_of,
    settable,
)

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=30)
ID = Parameter("id", "id", "path", required=True)


def target(*parameters: Parameter, path: str = "/x", **arguments: Any) -> str:
    return request_of(Operation("it", "GET", path, parameters), arguments).target


@given(words)
def test_an_argument_never_leaves_its_segment(value: str) -> None:
    operation = Operation("it", "GET", "/a/{id}/b", (ID,))
    try:
        request = request_of(operation, {"id": value})
    except BadArguments:
        parts = re.split(r"[/\\\\]", unquote(value))
        assert not value or any(set(part.partition(";")[0]) <= {"."} for part in parts)
        return
    segments = request.target.split("/")
    assert len(segments) == 4 and (segments[1], segments[3]) == ("a", "b")
    assert unquote(segments[2]) == value and not set("?#") & set(request.target)


@pytest.mark.parametrize(
    "value", ["", ".", "..", "%2e%2e", "%2E.", "..;x", "../../admin", "a/../b", "..\\x", "..%2fx", "x/..", "./x"]
)
def test_parts_of_dots_are_refused_however_they_are_written(value: str) -> None:
    with pytest.raises(BadArguments):
        target(ID, path="/a/{id}/b", id=value)


def test_a_field_of_an_object_is_never_another_parameter() -> None:
    each = Parameter("a", "a", "query", style="form", explode=True)
    with pytest.raises(BadArguments):
        target(each, Parameter("tenant", "tenant", "query"), a={"tenant": "other"}, tenant="acme")


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b"])
def test_control_characters_are_refused_in_path_and_header(value: str) -> None:
    for each in (ID, Parameter("id", "X-Id", "header")):
        with pytest.raises(BadArguments):
            target(each, path="/a/{id}" if each is ID else "/a", id=value)


def test_what_a_path_says_is_what_egress_rules_read() -> None:
    found = target(ID, path="/groups/{id}/files", id="a/b")
    assert found == "/groups/a%2Fb/files" and only_path(found) == "/groups/a/b/files"
    assert plain_path(target(ID, path="/g/{id}", id="ü x")) == "/g/ü x"


@given(st.dictionaries(words.filter(bool), words, max_size=4))
def test_fields_of_a_query_are_read_as_they_were_given(value: dict[str, str]) -> None:
    each = Parameter("filter", "filter", "query", style="deepObject", explode=True)
    query = urlsplit(f"http://h{target(each, filter=value)}").query
    assert parse_qs(query, keep_blank_values=True) == {f"filter[{key}]": [item] for key, item in value.items()}


STYLES: dict[str, tuple[Parameter, Any, str]] = {
    "a list, exploded": (Parameter("a", "a", "query", style="form", explode=True), [1, "x y"], "/x?a=1&a=x%20y"),
    "a list": (Parameter("a", "a", "query", style="form"), ["b,c", 2], "/x?a=b,c,2"),
    "with spaces": (Parameter("a", "a", "query", style="spaceDelimited"), [1, 2], "/x?a=1%202"),
    "with pipes": (Parameter("a", "a", "query", style="pipeDelimited"), [1, 2], "/x?a=1%7C2"),
    "an object, exploded": (
        Parameter("a", "a", "query", style="form", explode=True),
        {"b": 1, "c&d": 2},
        "/x?b=1&c%26d=2",
    ),
    "an object": (Parameter("a", "a", "query", style="form"), {"b": 1}, "/x?a=b,1"),
    "JSON": (Parameter("a", "a", "query", as_json=True), {"b": [1]}, "/x?a=%7B%22b%22:%5B1%5D%7D"),
    "true": (Parameter("a", "a", "query"), True, "/x?a=true"),
    "none": (Parameter("a", "a", "query"), None, "/x"),
}


@pytest.mark.parametrize("name", STYLES)
def test_parameters_are_written_in_their_style(name: str) -> None:
    parameter, value, expected = STYLES[name]
    assert target(parameter, a=value) == expected


def test_styles_of_a_path() -> None:
    assert target(Parameter("id", "id", "path", style="label"), path="/a{id}", id="x") == "/a.x"
    assert target(Parameter("id", "id", "path", style="matrix"), path="/a{id}", id="x") == "/a;id=x"
    assert target(ID, path="/a/{id}", id=["x/y", 2]) == "/a/x%2Fy,2"


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "authorization", "COOKIE", "X-HTTP-Method-Override", "X-Method-Override", "X_HTTP_Method"),
        *("X-Original-URL", "Transfer-Encoding", "Content-Length", "Proxy-Authorization", "X-Forwarded-Host"),
        *("a b", "a:b", "Connection"),
    ],
)
def test_no_argument_sets_a_header_that_decides_who_is_asked_and_how(name: str) -> None:
    assert not settable(name)


def test_no_argument_makes_another_method_of_a_request() -> None:
    form = RequestBody("body", "form", "application/x-www-form-urlencoded")
    with pytest.raises(BadArguments):
        request_of(Operation("it", "POST", "/x", (), form), {"body": {"_method": "DELETE"}})
    with pytest.raises(BadArguments):
        target(Parameter("a", "a", "query", style="form", explode=True), a={"_method": "DELETE"})


def test_arguments_that_were_not_described_are_refused() -> None:
    with pytest.raises(BadArguments):
        target(ID, path="/a/{id}", id="x", other=1)
    with pytest.raises(BadArguments):
        target(ID, path="/a/{id}")


# ── Bodies ──


def body(form: Any, kind: str, value: Any) -> tuple[bytes, str]:
    request = request_of(Operation("it", "POST", "/x", (), RequestBody("body", form, kind)), {"body": value})
    assert request.body is not None
    return request.body, request.headers["content-type"]


def test_bodies() -> None:
    assert json.loads(body("json", "application/json", {"a": [1, None]})[0]) == {"a": [1, None]}
    assert body("json", "application/json", None)[0] == b"null"
    assert body("text", "application/xml", "<a/>") == (b"<a/>", "application/xml; charset=utf-8")
    assert body("bytes", "image/png", base64.b64encode(b"\x89").decode())[0] == b"\x89"
    sent, kind = body("form", "application/x-www-form-urlencoded", {"a": "x&y=z +", "b": [1, 2]})
    assert parse_qs(sent.decode()) == {"a": ["x&y=z +"], "b": ["1", "2"]} and kind.endswith("urlencoded")
    for form, value in (("bytes", "no base64!"), ("text", 1), ("form", [1])):
        with pytest.raises(BadArguments):
            body(form, "application/x", value)


def test_a_body_in_parts_has_them_as_they_were_given() -> None:
    given_parts = {
        "note": 'a "quoted"',
        "f": {"filename": 'x"\r\nX-Evil: 1', "base64": base64.b64encode(b"\0data").decode()},
    }
    sent, kind = body("multipart", "multipart/form-data", given_parts)
    message = email.message_from_bytes(b"content-type: " + kind.encode() + b"\r\n\r\n" + sent, policy=email.policy.HTTP)
    parts = {part.get_param("name", header="content-disposition"): part for part in message.iter_parts()}
    assert parts["note"].get_payload(decode=True) == b'a "quoted"'
    assert parts["f"].get_payload(decode=True) == b"\0data" and "X-Evil" not in parts["f"]


def test_a_body_that_must_be_there() -> None:
    operation = Operation("it", "POST", "/x", (), RequestBody("body", "json", "application/json", required=True))
    with pytest.raises(BadArguments):
        request_of(operation, {})
    assert request_of(operation, {"body": {}}).body == b"{}"
