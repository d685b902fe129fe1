"""Servers in the console: what they may touch, what was accepted of them, and drift, which an admin accepts as seen."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest

from tests import gateways, tooling
from tests.console import people
from tests.console.people import Browser, call, token, visitor
from tests.gateways import Served

MORE = """  greet: {server: moody, mode: read}
  annoy: {server: moody, mode: read}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    moody = f"moody: {{command: {gateways.server('moody_server.py')}, placement: unsafe_host}}"
    with people.serve(tmp_path_factory.mktemp("servers"), MORE, servers=moody) as served:
        yield served


def person(served: Served, name: str) -> Browser:
    return visitor(served, token(served, "person", name)["token"])


@pytest.fixture(scope="module")
def dora(served: Served) -> Browser:
    return person(served, "dora")


def forms(browser: Browser) -> list[dict[str, str]]:
    """What the forms for answers on the page of the server hold."""
    page = browser.get("/console/servers/moody").text
    found = re.findall(r'<form class="answer".*?</form>', page, re.DOTALL)
    each = [dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)) for form in found]
    return [{name: html.unescape(value) for name, value in fields.items()} for fields in each]


def accept(browser: Browser, fields: dict[str, str], **changed: str) -> people.Answer:
    return browser.send("/console/servers/moody/accept", {**fields, **changed})


def test_servers_and_contracts_are_listed(served: Served, dora: Browser) -> None:
    tooling.wait_until(lambda: "2 to accept" in dora.get("/console/servers").text)
    page = dora.get("/console/servers").text
    assert "helpdesk" in page and "moody_server.py" in page and "create_ticket" in page and "approval manager" in page
    assert ">not offered<" in page, "its tools are not accepted"


def test_what_is_new_is_offered_once_an_admin_accepted_it(served: Served, dora: Browser) -> None:
    assert call(served, "greet", {})["status"] != "success"
    first, _, every = forms(dora)
    assert every["which"] == "all"
    for stale in ({"stamp": "sha256:0"}, {"which": "tool none"}, {"stamp": first["stamp"]}):
        assert accept(dora, every, **stale).status == 409
    assert accept(dora, every, csrf="guessed").status == 403
    assert gateways.records(served.state, kind="definitions_reviewed") == []
    done = accept(dora, every)
    assert (done.status, done.headers["location"]) == (303, "/console/servers/moody")
    assert forms(dora) == [] and "by dora" in dora.get("/console/servers/moody").text
    assert call(served, "greet", {})["status"] == "success"
    (record,) = gateways.records(served.state, kind="definitions_reviewed")
    assert record["person"] == "dora" and record["login"]["way"] == "token" and len(record["accepted"]) == 2
    by = {(each["name"], each["by"]) for each in gateways.records(served.state, kind="pin_accepted")}
    assert {("greet", "dora"), ("annoy", "dora")} <= by


def test_drift_is_shown_line_by_line_and_hidden_until_it_is_accepted(served: Served, dora: Browser) -> None:
    assert call(served, "annoy", {})["status"] == "success"
    tooling.wait_until(lambda: len(forms(dora)) == 1)
    page = dora.get("/console/servers/moody").text
    assert '<span class="gone">To anybody.</span>' in page and "<span>Says hello.</span>" in page
    assert '<span class="new">&lt;script&gt;alert(1)' in page and "<script>alert" not in page
    assert "\u202e" not in page and "u{202e}" in page
    assert call(served, "greet", {})["reason_code"] == "pin_changed"
    (fields,) = forms(dora)
    assert accept(dora, fields).status == 303
    assert call(served, "greet", {})["status"] == "success"


def test_who_reads_cannot_accept_and_other_tenants_see_nothing(served: Served, dora: Browser) -> None:
    omar, eve = person(served, "omar"), person(served, "eve")
    assert "moody" in omar.get("/console/servers").text and "by dora" in omar.get("/console/servers/moody").text
    for who, status in ((omar, 403), (eve, 404)):
        token_of_form = who.get("/console/history").text.partition('name="csrf" value="')[2].partition('"')[0]
        assert accept(who, {"csrf": token_of_form, "which": "all", "stamp": "x"}).status == status
    for path in ("servers", "servers/moody"):
        assert eve.get(f"/console/{path}").status == 404
    assert "/console/servers" not in eve.get("/console/history").text
    assert dora.get("/console/servers/none").status == 404
