"""Servers in the console: what they may touch, what was accepted of them, and drift, which an admin accepts as seen."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator

import pytest

from ringfence.console.servers import how
from ringfence.core.model import GuardedText, ServerSpec
from ringfence.governance.guard import Guard
from tests import gateways, tooling
from tests.console import people
from tests.console.people import Browser, call, token, visitor
from tests.gateways import Served

MORE = """  greet: {server: moody, mode: read}
  annoy: {server: moody, mode: read}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = [*tooling.fixture_command("moody_server.py"), "--api-key", KEY, SHAPED]
    moody = f"moody: {{command: {json.dumps(command)}, placement: unsafe_host}}"
    with people.serve(tmp_path_factory.mktemp("servers"), MORE, servers=moody) as served:
        yield served


KEY = "correct-horse-battery"
SHAPED = "ghp_" + "a1B2c3D4e5" * 3 + "f6G7h8"


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


def test_a_key_on_a_command_line_is_not_for_all_who_look(served: Served, dora: Browser) -> None:
    for path in ("servers", "servers/moody"):
        page = dora.get(f"/console/{path}").text
        assert "moody_server.py --api-key [redacted] [redacted" in page and KEY not in page and SHAPED not in page


def clean(text: str, most: int) -> GuardedText:
    return Guard(lambda definition, value: None).message(text, most=most)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("run", "--api-key", "hunter2", "--verbose"), "run --api-key [redacted] --verbose"),
        (("run", "--password=hunter2", "x"), "run --password=[redacted] x"),
        (("env", "DB_PASSWORD=hunter2", "run"), "env DB_PASSWORD=[redacted] run"),
        (("run", "--header", "Authorization: Bearer hunter2"), "run --header Authorization:[redacted]"),
        (("run", "--token", "--verbose", "x"), "run --token --verbose x"),
        (("npx", "-y", "@scope/monkey"), "npx -y @scope/monkey"),
    ],
)
def test_a_command_is_shown_without_keys(command: tuple[str, ...], shown: str) -> None:
    assert how(ServerSpec("s", command=command), clean) == shown


def test_an_address_is_shown_without_keys() -> None:
    spec = ServerSpec("s", url="https://me:hunter2@host.example:8443/mcp?key=hunter2#x")
    assert how(spec, clean) == "https://host.example:8443/mcp?[redacted]"


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
