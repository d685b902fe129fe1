"""Standing approvals in the console: who sees them, how one is made from a question, and how one ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import gateways, tooling
from tests.console import people
from tests.console.people import Browser, call, token, visitor, waiting
from tests.gateways import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    rule = "approvals: {manager: {roles: [manager], standing: {times: 3, seconds: 3600}}}"
    with people.serve(tmp_path_factory.mktemp("standing"), rule=rule) as served:
        yield served


@pytest.fixture(scope="module")
def bob(served: Served) -> Browser:
    return visitor(served, token(served, "person", "bob")["token"])


def question(browser: Browser) -> str:
    tooling.wait_until(browser.questions)
    (found,) = browser.questions()
    return found


def allow(browser: Browser, which: str, **fields: str) -> people.Answer:
    given = {**browser.fields(f"/console/approvals/{which}"), "times": "2", "minutes": "10", **fields}
    return browser.send(f"/console/approvals/{which}/allow", given)


def test_one_is_made_from_an_open_question_counted_and_revoked(served: Served, bob: Browser, tmp_path: Path) -> None:
    assert "No standing approvals" in bob.get("/console/standing").text
    with waiting(served, {"title": "first", "priority": "high"}) as said:
        which = question(bob)
        page = bob.get(f"/console/approvals/{which}").text
        assert 'name="any:title"' in page and "At most 3 times within 60.0 minutes" in page
        assert allow(bob, which, times="4").status == 409  # wider than the rule lets it
        assert allow(bob, which, minutes="soon").status == 400
        assert allow(bob, which, **{"like:title": "("}).status == 409
        assert allow(bob, which, **{"any:body": "1"}).status == 409
        assert allow(bob, which, stamp="another").status == 409
        assert allow(bob, which, csrf="another").status == 403
        assert bob.questions() == [which]
        assert allow(bob, which, **{"any:title": "1"}, reason="all day long").status == 303
    assert said[0]["status"] == "success"
    # Another like it runs at once; one that differs in what was not left open is asked about.
    assert call(served, "create_ticket", {"title": "second", "priority": "high"})["status"] == "success"
    shown = bob.get("/console/standing").text
    assert re.search(r"<b class=\"num\">1</b> of 2 left", shown) and "ANY VALUE" in shown and "always" in shown
    assert "allowed by" in shown and "bob" in shown
    (identity,) = re.findall(r'<article[^>]* id="(std_\w+)"', shown)

    # An auditor reads and ends nothing; another tenant sees nothing; another site can send no form.
    omar = visitor(served, token(served, "person", "omar")["token"])
    csrf = re.search(r'name="csrf" value="([^"]*)"', omar.get("/console/standing").text)
    assert csrf is not None and identity in omar.get("/console/standing").text
    assert "/revoke" not in omar.get("/console/standing").text
    assert omar.send(f"/console/standing/{identity}/revoke", {"csrf": csrf[1]}).status == 403
    eve = visitor(served, token(served, "person", "eve")["token"])
    assert identity not in eve.get("/console/standing").text
    csrf = re.search(r'name="csrf" value="([^"]*)"', eve.get("/console/standing").text)
    assert csrf is not None
    assert eve.send(f"/console/standing/{identity}/revoke", {"csrf": csrf[1]}).status == 404
    assert bob.send(f"/console/standing/{identity}/revoke", {"csrf": "guessed"}).status == 403
    form = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', shown))
    foreign = bob.send(f"/console/standing/{identity}/revoke", form, origin="https://evil.example")
    assert foreign.status == 403
    assert gateways.records(served.state, kind="standing_revoked") == []

    assert bob.send(f"/console/standing/{identity}/revoke", form).status == 303
    shown = bob.get("/console/standing").text
    assert "Revoked: create_ticket" in shown and "No standing approvals" in shown
    (record,) = gateways.records(served.state, kind="standing_revoked")
    assert (record["by"], record["login"]["way"]) == ("bob", "token")
    assert bob.send(f"/console/standing/{identity}/revoke", form).status == 409
    with waiting(served, {"title": "third", "priority": "high"}):
        which = question(bob)
        assert bob.answer(which, "deny").status == 303
    assert gateways.verified(served.state).ok


def test_live_shows_what_waits_and_since_when_others_may_answer(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "seen on live", "priority": "high"}):
        which = question(bob)
        page = bob.get("/console/live").text
        assert "Waiting for people" in page and f"/console/approvals/{which}" in page
        assert bob.answer(which, "deny").status == 303
    assert "Waiting for people" not in bob.get("/console/live").text
