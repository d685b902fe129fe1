"""Which resources a server's list offers: URIs are compared in one normal form, and what was compared is sent."""

from __future__ import annotations

import ntpath
import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringfence.core.model import Json, ServerSpec, Status
from ringfence.governance.rulebook import allowed_item
from ringfence.governance.uris import normal_uri
from tests.faking import Said, governed
from tests.making import rule

PUBLIC = ServerSpec("files", url="http://x/", resources=("file:///docs/public/*",))

CLIMBS = [
    "file:///docs/public/../private",
    "file:///docs/public/.\t./private",
    "file:///docs/public/.\n./private",
    "file:///docs/public/.\r./private",
    "file:///docs/public/\t../private",
    "file:///docs/public/..\t/private",
    "file:///docs/public/.%09./private",
    "file:///docs/public/%2e%2e/private",
    "file:///docs/public/%2E./private",
    "file:///docs/public/.%2e%2fprivate",
    "file:///docs/public/%252e%252e/private",
    "file:///docs/public/%25252e%25252e/private",
    "file:///docs/public/..%2fprivate",
    "file:///docs/public/..%5cprivate",
    "file:///docs/public/..\\private",
    "file:///docs/public/a\\..\\..\\private",
    "file:///docs/public/..;/private",
    "file:///docs/public/..;x=1/private",
    "file:///docs/public/.. /private",
    "file:///docs/public/. ./private",
    "file:///docs/public/..%20/private",
    "file:///docs/public/.\u200b./private",
    "file:///docs/public/.\u00ad./private",
    "file:///docs/public/\uff0e\uff0e/private",
    "file:///docs/public/\u2025/private",
    "file:///docs/public/..\uff0fprivate",
    "file:///docs/public/%c0%ae%c0%ae/private",
    "file:///docs/public/%e0%80%ae%e0%80%ae/private",
    "file:///docs/public/a%00/../../private",
    "file:///docs/public/a\x00",
    "file:///docs/public/a%00.txt",
    "file:///docs/public/a%0d%0aX: y",
    "file:///docs/public/x?a/../../private",
    "file:///docs/public/x#/../../private",
    "file:///docs/public/%u002e%u002e/private",
    "file:///docs/public//etc/passwd",
    "file:///docs/public/%2fetc/passwd",
    "file:///docs/public/%252Fetc/passwd",
    "file:///docs/public/a//b",
    "file:///docs/public/a%2Fb",
    "file:///docs/public/a%255cb",
    "file://elsewhere/docs/public/a",
    "file:///docs/public/a#b",
    "file:///docs/public/a?b",
    " file:///docs/public/a",
    "file:///docs/public/a ",
    "\tfile:///docs/public/a",
    "file:///docs/public/\ud800",
    "file:///docs/public/" + "a" * 10_000,
]


@pytest.mark.parametrize("uri", CLIMBS)
def test_no_spelling_leaves_a_pattern(uri: str) -> None:
    assert not allowed_item(PUBLIC, "resource", uri)


SAME = {
    "FILE:///docs/public/a": "file:///docs/public/a",
    "file:///docs/public/%61": "file:///docs/public/a",
    "file:///docs/public/a%2db%5f%7E": "file:///docs/public/a-b_~",
    "file:///docs/public/%c3%bc": "file:///docs/public/%C3%BC",
    "file:///docs\\public/a": "file:///docs/public/a",
    "file://LOCALHOST/docs": "file:///docs",
    "file:/docs/public/a": "file:///docs/public/a",
    "https://docs.example:443/a": "https://docs.example/a",
    "http://docs.example:80/a": "http://docs.example/a",
    "https://docs.example:/a": "https://docs.example/a",
    "HTTPS://Docs.Example/Path": "https://docs.example/Path",
    "Memo://Insights/A": "memo://Insights/A",
}


@pytest.mark.parametrize("uri", SAME)
def test_spellings_of_one_resource_are_one(uri: str) -> None:
    assert normal_uri(uri) == SAME[uri]


@pytest.mark.parametrize(
    "uri",
    ["memo://in\u200bsights", "memo://insights\u2060", "memo://in%E2%80%8Bsights", "memo://in%25E2%2580%258Bsights"],
)
def test_a_uri_with_what_cannot_be_seen_has_no_form(uri: str) -> None:
    assert normal_uri(uri) is None


USUAL = [
    "doc:1", "memo://Insights", "file:///docs/public/a b.txt", "file:///docs/ü/é…", "test://template/{id}/data",
    "screen://localhost/a?b=c&d=%20#e", "postgres://db/table/schema", "file:///docs/.hidden/..x/a..b/x...",
    "urn:isbn:0451450523", "https://docs.example:8443/a//b/", "regex:\\d+", "ui://My-App/panel.html", "note://50%",
    "memo://❤️", "file:///docs/%E2%9D%A4%EF%B8%8F.txt",
]  # fmt: skip


@pytest.mark.parametrize("uri", USUAL)
def test_usual_uris_stay_as_they_are(uri: str) -> None:
    assert normal_uri(uri) == uri


@pytest.mark.parametrize(
    "uri", ["https://docs.example@evil.example/", "https://docs.example%2fevil/", "https://ｄocs.example/"]
)
def test_a_host_that_readers_read_differently_is_none(uri: str) -> None:
    spec = ServerSpec("web", url="http://x/", resources=("https://*",))
    assert not allowed_item(spec, "resource", uri)


@pytest.mark.parametrize(
    "uri",
    [
        "https://evil.example/.corp.example/a",
        "https://evil.example\\.corp.example/a",
        "https://evil.example?.corp.example/a",
        "https://evil.example#.corp.example/a",
        "https://evil.example/x/https://b.corp.example/a",
        "https://[::1].corp.example/a",
        "https://evil.example;.corp.example/a",
        "https://evil.example,b.corp.example/a",
    ],
)
def test_a_wildcard_in_the_place_of_a_host_covers_no_path(uri: str) -> None:
    spec = ServerSpec("web", url="http://x/", resources=("https://*.corp.example/a",))
    assert not allowed_item(spec, "resource", uri)
    assert allowed_item(spec, "resource", "https://b.corp.example/a")
    for pattern in ("https://*", "*", "https://*/a", "http*://b.*"):
        assert allowed_item(replace(spec, resources=(pattern,)), "resource", "https://b.corp.example/a")
    assert allowed_item(replace(spec, resources=("wiki://*.md",)), "resource", "wiki://folder/page.md")


def test_patterns_are_read_in_the_same_form() -> None:
    spec = ServerSpec("web", url="http://x/", resources=("FILE:///docs/%70ublic/*", "HTTPS://Docs.Example/*"))
    assert allowed_item(spec, "resource", "file:///docs/public/a")
    assert allowed_item(spec, "resource", "https://docs.example/a")


# ── whoever reads what we send ──


def _browser(uri: str) -> str:
    """As a URL parser of the WHATWG kind reads a file's path."""
    text = re.sub(r"[\t\n\r]", "", uri.strip("".join(map(chr, range(33)))))
    rest = text.split(":", 1)[1].replace("\\", "/").split("?")[0].split("#")[0]
    parts: list[str] = []
    for part in rest.removeprefix("//").split("/")[1:]:
        plain = part.lower().replace("%2e", ".")
        if plain == "..":
            parts = parts[:-1]
        elif plain != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def _python(uri: str) -> str:
    return posixpath.normpath(unquote(urlsplit(uri).path))


def _twice(uri: str) -> str:
    return posixpath.normpath(unquote(unquote(unquote(urlsplit(uri).path))))


def _windows(uri: str) -> str:
    return ntpath.normpath(unquote(urlsplit(uri).path)).replace("\\", "/")


def _servlet(uri: str) -> str:
    parts = unquote(urlsplit(uri).path).split("/")
    return posixpath.normpath("/".join(part.split(";")[0] for part in parts))


def _to_null(uri: str) -> str:
    return _python(uri).split("\x00")[0]


READERS: list[Callable[[str], str]] = [_browser, _python, _twice, _windows, _servlet, _to_null]
PIECES = [
    ".", "..", "/", "\\", "%2e", "%2E", "%252e", "%2f", "%5c", "\t", "\n", "\r", " ", ";", "a", "private", "%00", "%09",
    "?", "#", "\u200b", "\u2025", "…", "\uff0e", "%", "%2", "{x}", "%c0%ae", "A", "~", "%7e", "\x01", "@", ":",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example(".\t./private")
@example("..;/private")
def test_whoever_reads_what_is_sent_stays_in_the_folder(tail: str) -> None:
    uri = "file:///docs/public/" + tail
    if not allowed_item(PUBLIC, "resource", uri):
        return
    sent = normal_uri(uri)
    assert sent is not None and normal_uri(sent) == sent
    for read in READERS:
        assert read(sent).startswith("/docs/public"), (read.__name__, sent)


@given(st.text(max_size=60))
def test_the_normal_form_is_one(text: str) -> None:
    form = normal_uri(text)
    assert form is None or normal_uri(form) == form


# ── other spellings ──

DENIED = {
    "memo://notes/my%20secret": "memo://notes/my secret",
    "memo://notes/my secret": "memo://notes/my%20secret",
    "memo://notes/%C3%BC": "memo://notes/ü",
    "memo://notes/ü": "memo://notes/%c3%bc",
    "memo://notes/(a)": "memo://notes/%28a%29",
    "memo://notes/a/b": "memo://notes/a%2fb",
}


@pytest.mark.anyio
@pytest.mark.parametrize("named", DENIED)
async def test_a_rule_about_a_resource_holds_for_every_way_to_write_it(tmp_path: Path, named: str) -> None:
    server = ServerSpec("desk", url="http://127.0.0.1:1/mcp", resources=("memo://*",))
    strict = rule("deny", id="strict", tool_patterns=[re.escape(named)])
    given: dict[str, Any] = {"kind": "resource", "server": "desk", "method": "resources/read"}
    async with governed(tmp_path, Said(server=server, rules=(strict,)), [{"contents": []}]) as way:
        for uri in (named, DENIED[named]):
            assert (await way.call(uri, {"uri": uri}, **given)).reason_code == "policy"
        assert (await way.call("memo://notes/other", {"uri": "memo://notes/other"}, **given)).ok


# ── what was compared is what is sent ──


@pytest.mark.anyio
async def test_what_was_compared_is_sent_and_recorded(tmp_path: Path) -> None:
    said = Said(server=ServerSpec("desk", url="http://127.0.0.1:1/mcp", resources=("file:///docs/public/*",)))
    async with governed(tmp_path, said, [{"contents": []}]) as way:
        odd = "FILE:///docs/public/%61"
        given = {"kind": "resource", "server": "desk", "method": "resources/read"}
        assert (await way.call(odd, {"uri": odd}, **given)).ok
        assert way.servers.requests[-1].params == {"uri": "file:///docs/public/a"}
        assert way.finished()[0]["call"]["tool"] == "file:///docs/public/a"

        ref = {"type": "ref/resource", "uri": odd}
        given = {"kind": "completion", "server": "desk", "method": "completion/complete"}
        assert (await way.call(odd, {"ref": ref, "argument": {"name": "x", "value": ""}}, **given)).ok
        assert way.servers.requests[-1].params["ref"] == {"type": "ref/resource", "uri": "file:///docs/public/a"}

        sent = len(way.servers.requests)
        climbing = "file:///docs/public/.\t./private"
        completion = {"ref": {**ref, "uri": climbing}, "argument": {"name": "x", "value": ""}}
        for kind, arguments in (("resource", {"uri": climbing}), ("completion", completion)):
            refused = await way.call(climbing, arguments, kind=kind, server="desk")
            assert (refused.status, refused.reason_code) == (Status.VALIDATION_FAILURE, f"unknown_{kind}")
        assert len(way.servers.requests) == sent


@pytest.mark.anyio
async def test_what_is_named_and_what_is_sent_are_one(tmp_path: Path) -> None:
    """A call cannot be judged by its name and sent with another URI."""
    async with governed(tmp_path, replies=[{"contents": []}]) as way:
        given = {"kind": "resource", "server": "desk", "method": "resources/read"}
        await way.call("doc:1", {"uri": "file:///etc/shadow"}, **given)
        assert [request.params for request in way.servers.requests] == [{"uri": "doc:1"}]


# ── a completion says one thing ──

PROMPT, TEMPLATE = {"type": "ref/prompt", "name": "greet"}, {"type": "ref/resource", "uri": "doc:1"}
ARGUMENT = {"name": "who", "value": "A"}
WELL_MADE: dict[str, Json] = {
    "a prompt": {"ref": PROMPT, "argument": ARGUMENT},
    "with a title": {"ref": {**PROMPT, "title": "Greet"}, "argument": ARGUMENT},
    "a template": {"ref": TEMPLATE, "argument": ARGUMENT},
    "filled in": {"ref": PROMPT, "argument": ARGUMENT, "context": {"arguments": {"x": "y"}}},
    "an empty context": {"ref": PROMPT, "argument": ARGUMENT, "context": {}},
}
ILL_MADE: dict[str, Json] = {
    "a prompt with a URI": {"ref": {**PROMPT, "uri": "file:///etc/shadow"}, "argument": ARGUMENT},
    "a template with a name": {"ref": {**TEMPLATE, "name": "secret"}, "argument": ARGUMENT},
    "a template with a title": {"ref": {**TEMPLATE, "title": "x"}, "argument": ARGUMENT},
    "another type": {"ref": {**TEMPLATE, "type": "ref/tool"}, "argument": ARGUMENT},
    "a type that is no text": {"ref": {**TEMPLATE, "type": ["ref/resource"]}, "argument": ARGUMENT},
    "no type": {"ref": {"uri": "doc:1"}, "argument": ARGUMENT},
    "no name": {"ref": {"type": "ref/prompt", "title": "greet"}, "argument": ARGUMENT},
    "a name that is no text": {"ref": {**PROMPT, "name": 1}, "argument": ARGUMENT},
    "no reference": {"argument": ARGUMENT},
    "a reference that is a text": {"ref": "greet", "argument": ARGUMENT},
    "no argument": {"ref": PROMPT},
    "an argument without a value": {"ref": PROMPT, "argument": {"name": "who"}},
    "an argument with more": {"ref": PROMPT, "argument": {**ARGUMENT, "path": "x"}},
    "a value that is no text": {"ref": PROMPT, "argument": {"name": "who", "value": ["A"]}},
    "a context with more": {"ref": PROMPT, "argument": ARGUMENT, "context": {"arguments": {}, "uri": "x"}},
    "a context of no text": {"ref": PROMPT, "argument": ARGUMENT, "context": {"arguments": {"x": {}}}},
    "a context of nothing": {"ref": PROMPT, "argument": ARGUMENT, "context": None},
    "more beside": {"ref": PROMPT, "argument": ARGUMENT, "uri": "x"},
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", [*WELL_MADE, *ILL_MADE])
async def test_a_completion_goes_on_with_the_fields_of_its_kind_and_no_others(tmp_path: Path, case: str) -> None:
    given = {"kind": "completion", "server": "desk", "method": "completion/complete"}
    async with governed(tmp_path, replies=[{"completion": {"values": []}}]) as way:
        arguments = WELL_MADE.get(case) or ILL_MADE[case]
        outcome = await way.call("doc:1" if arguments.get("ref") == TEMPLATE else "greet", arguments, **given)
        sent = [request.params for request in way.servers.requests]
        if case in WELL_MADE:
            assert outcome.ok and sent == [arguments]
        else:
            assert (outcome.status, outcome.reason_code) == (Status.VALIDATION_FAILURE, "bad_request")
            assert sent == [] and len(way.finished()) == 1
