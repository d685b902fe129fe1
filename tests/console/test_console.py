"""The console without a browser: who gets in, what they see, and that only they answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import gateways, tooling
from tests.cli.terminals import at_terminal
from tests.console import people
from tests.console.people import Browser, call, token, visitor, waiting
from tests.gateways import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with people.serve(tmp_path_factory.mktemp("console")) as served:
        yield served


@pytest.fixture(scope="module")
def bob(served: Served) -> Browser:
    return visitor(served, token(served, "person", "bob")["token"])


def the_question(browser: Browser) -> str:
    tooling.wait_until(browser.questions)
    (found,) = browser.questions()
    return found


# ── Logging in ────────────────────────────────────────────────────────────────────────────────────


def test_the_link_that_serve_prints_lets_one_person_in_once(served: Served) -> None:
    code = people.link(served)
    alice = visitor(served, code)
    assert "alice" in alice.get("/console/approvals").text
    again = Browser(served.url).log_in(code)
    assert again.status == 401 and ("used already" in again.text or "revoked" in again.text)
    (record,) = [r for r in gateways.records(served.state, kind="console_login") if r["person"] == "alice"]
    assert record["login"]["way"] == "link" and code not in str(record)


def new_link(served: Served) -> str:
    base = served.url.removesuffix("/mcp")
    with at_terminal("console", "--config", served.config, "--url", base) as person:
        shown = person.expect("It logs")
        assert person.end() == 0
    return shown.partition(f"{base}/console/login#")[2].split()[0]


def test_console_shows_a_link_on_the_terminal_alone(served: Served) -> None:
    base = served.url.removesuffix("/mcp")
    nowhere = gateways.run("console", "--config", served.config, "--url", base)
    assert nowhere.returncode != 0 and "there is no terminal" in nowhere.stderr and "rft_" not in nowhere.stdout
    assert visitor(served, new_link(served)).get("/console/approvals").status == 200
    silent = gateways.run("console", "--config", served.config, "--url", f"http://127.0.0.1:{tooling.free_port()}")
    assert silent.returncode == 1 and "no gateway listens" in silent.stderr


def test_no_link_is_made_for_a_port_of_another_account(served: Served) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another account as well")
    listens = (
        "import os, socket; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "with socket.create_server(('127.0.0.1', 0)) as place:\n"
        "    print(place.getsockname()[1], flush=True)\n"
        "    way, _ = place.accept(); way.recv(4096); way.sendall(b'HTTP/1.1 200 OK\\r\\n\\r\\n'); way.recv(4096)\n"
    )
    with subprocess.Popen([sys.executable, "-I", "-c", listens], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        url = f"http://127.0.0.1:{int(other.stdout.readline())}"
        refused = gateways.run("console", "--config", served.config, "--url", url)
        assert refused.returncode == 1 and "no gateway of this account" in refused.stderr
    wrong = gateways.run("console", "--config", served.config, "--url", "http://127.0.0.1:99999")
    assert wrong.returncode == 1 and "no gateway listens" in wrong.stderr


def test_a_link_logs_in_no_other_account(served: Served) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another account as well")
    code = new_link(served)
    posted = (
        "import encodings.idna, http.client, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "place, origin, code = sys.argv[1:]\n"
        "way = http.client.HTTPConnection(place)\n"
        "kind = 'application/x-www-form-urlencoded'\n"
        "way.request('POST', '/console/login', 'credential=' + code, {'origin': origin, 'content-type': kind})\n"
        "got = way.getresponse(); print(got.status, got.getheader('set-cookie'))"
    )
    origin = served.url.removesuffix("/mcp")
    words = [sys.executable, "-I", "-c", posted, origin.removeprefix("http://"), origin, code]
    other = subprocess.run(words, capture_output=True, text=True, check=True, timeout=tooling.PATIENCE)
    assert other.stdout == "403 None\n"
    assert visitor(served, code).get("/console/approvals").status == 200, "it is still good, for its own account"


def test_a_token_in_an_address_is_refused(served: Served) -> None:
    made = token(served, "person", "carl")["token"]
    assert Browser(served.url).get(f"/console/login?credential={made}").status == 400


def test_who_is_not_logged_in_sees_nothing_but_the_door(served: Served) -> None:
    stranger = Browser(served.url)
    for path in ("/console", "/console/approvals", "/console/approvals/apr_1"):
        answer = stranger.get(path)
        assert (answer.status, answer.headers["location"]) == (303, "/console/login")
    assert stranger.get("/console/events").status == 401
    assert stranger.get("/console/login").status == 200
    stranger.cookies["ringfence_1"] = "x" * 43
    assert stranger.get("/console/approvals").status == 303


@pytest.mark.parametrize("credential", ["", "rft_", "x" * 300, "rft_" + "0" * 20 + "_" + "A" * 43])
def test_what_is_no_credential_lets_nobody_in(served: Served, credential: str) -> None:
    answer = Browser(served.url).log_in(credential)
    assert answer.status == 401 and "set-cookie" not in answer.headers


def test_an_agent_does_not_get_in_by_its_token(served: Served) -> None:
    answer = Browser(served.url).log_in(token(served, "agent", "analyst")["token"])
    assert answer.status == 403 and "people log in" in answer.text and "set-cookie" not in answer.headers


def test_a_person_whose_token_is_revoked_is_out(served: Served) -> None:
    made = token(served, "person", "carl")
    carl = visitor(served, made["token"])
    assert carl.get("/console/approvals").status == 200
    assert gateways.run("token", "revoke", made["id"], "--config", served.config).returncode == 0
    tooling.wait_until(lambda: carl.get("/console/approvals").status == 303)


def log_out(browser: Browser) -> None:
    csrf = browser.get("/console/approvals").text.partition('name="csrf" value="')[2].partition('"')[0]
    assert browser.send("/console/logout", {"csrf": csrf}).status == 303


def test_logging_out_ends_it_for_the_cookie_too_and_is_on_record(served: Served) -> None:
    made = token(served, "person", "carl")
    carl = visitor(served, made["token"])
    kept = dict(carl.cookies)
    log_out(carl)
    carl.cookies = kept
    assert carl.get("/console/approvals").status == 303
    ends = gateways.records(served.state, kind="console_logout")
    assert [(each["person"], each["login"]["credential"]) for each in ends] == [("carl", made["id"])]


def tokens_of_logins(served: Served) -> dict[str, str]:
    """The tokens that stand for logins by link, and how each stands."""
    shown = gateways.run("token", "list", "--json", "--config", served.config)
    return {each["id"]: each["state"] for each in json.loads(shown.stdout) if each.get("login") == "alice"}


def test_the_operator_ends_a_login_that_began_with_a_link(served: Served) -> None:
    before = tokens_of_logins(served)
    alice = visitor(served, new_link(served))
    (mine,) = tokens_of_logins(served).keys() - before.keys()
    record = gateways.records(served.state, kind="console_login")[-1]
    assert (record["person"], record["token"]) == ("alice", mine)
    assert alice.get("/console/approvals").status == 200
    assert gateways.run("token", "revoke", mine, "--config", served.config).returncode == 0
    tooling.wait_until(lambda: alice.get("/console/approvals").status == 303)
    again = visitor(served, new_link(served))
    log_out(again)
    assert set((tokens_of_logins(served).keys() - before.keys()) - {mine}) and all(
        state == "revoked" for ident, state in tokens_of_logins(served).items() if ident not in before
    )


def test_a_second_login_in_a_browser_ends_the_first_and_is_of_the_same_person(served: Served, bob: Browser) -> None:
    alice = visitor(served, new_link(served))
    first = dict(alice.cookies)
    assert alice.log_in(new_link(served)).status == 303 and alice.cookies != first
    assert Browser(served.url, first).get("/console/approvals").status == 303
    theirs = token(served, "person", "bob")["token"]
    refused = alice.log_in(theirs)
    assert refused.status == 409 and "alice is logged in here" in refused.text and "set-cookie" not in refused.headers
    assert "alice" in alice.get("/console/approvals").text
    log_out(alice)
    assert alice.log_in(theirs).status == 303, "a credential that was refused so is not used up"


# ── Answers of ours ───────────────────────────────────────────────────────────────────────────────


def test_every_answer_says_what_a_browser_may_do_with_it(served: Served, bob: Browser) -> None:
    for path in ("/console/login", "/console/approvals", "/console/nothing", "/console/static/console.js"):
        headers = bob.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "same-origin"
    fresh = Browser(served.url)
    cookie = fresh.log_in(token(served, "person", "bob")["token"]).headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/console" in cookie


@pytest.mark.parametrize("path", ["/console/static/../app.py", "/console/static/..%2fapp.py", "/console/static/x.py"])
def test_nothing_but_what_pages_need_is_served(bob: Browser, path: str) -> None:
    assert bob.get(path).status == 404


def test_a_form_of_another_page_does_nothing(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "cross"}) as said:
        which = the_question(bob)
        fields = {**bob.fields("/console/approvals"), "answer": "approve", "reason": ""}
        for origin in ("http://evil.example", "null", "", bob.origin.replace("127.0.0.1", "127.0.0.2")):
            assert bob.send(f"/console/approvals/{which}", fields, origin=origin).status == 403
        assert bob.answer(which, "approve", csrf="guessed").status == 403
        assert bob.questions() == [which]
        assert bob.answer(which, "deny").status == 303
    assert said[0]["status"] == "denied"


# ── Answering ─────────────────────────────────────────────────────────────────────────────────────


def test_a_person_approves_exactly_what_they_have_seen(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "Broken\u202egnp", "priority": "<b>high</b>"}) as said:
        which = the_question(bob)
        page = bob.get(f"/console/approvals/{which}").text
        assert "\u202e" not in page and "u{202e}gnp" in page and "&lt;b&gt;high" in page and "<b>high" not in page
        for shown in ("create_ticket on server helpdesk", "analyst for carl", "network denied", "cannot be undone"):
            assert shown in page
        assert bob.answer(which, "approve", stamp="sha256:other").status == 409
        done = bob.answer(which, "approve", "looks <i>right</i>")
        assert (done.status, done.headers["location"]) == (303, "/console/approvals")
        assert f"approved. ({which})" in bob.get("/console/approvals").text
    assert said[0]["status"] == "success"
    (answered,) = [r for r in gateways.records(served.state, kind="approval_answered") if r["approval"] == which]
    assert (answered["person"], answered["reason"], answered["approve"]) == ("bob", "looks <i>right</i>", True)
    assert answered["login"]["way"] == "token" and answered["login"]["credential"].startswith("tok_")
    told = gateways.run("audit", "explain", said[0]["facts"]["call_id"], "--config", served.config).stdout
    assert "bob approved it in the console, logged in by token" in told
    page = bob.get(f"/console/approvals/{which}").text
    assert 'class="answer"' not in page and "looks &lt;i&gt;right" in page


def test_an_open_page_that_refreshes_takes_no_notice_from_the_next_one(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "noticed"}):
        which = the_question(bob)
        assert bob.answer(which, "deny").status == 303
    assert f"({which})" not in bob.ask("GET", "/console/approvals", ringfence_refresh="1").text
    assert f"({which})" in bob.get("/console/approvals").text


def test_an_agent_is_told_why_it_was_denied(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "later"}) as said:
        assert bob.answer(the_question(bob), "deny", "not before the release").status == 303
    assert said[0]["reason_code"] == "approval_refused"
    assert "not before the release" in said[0]["content"][0]["text"]


def test_who_may_not_answer_is_told_why_and_cannot(served: Served, bob: Browser) -> None:
    carl = visitor(served, token(served, "person", "carl")["token"])
    with waiting(served, {"title": "mine"}):
        which = the_question(bob)
        page = carl.get("/console/approvals").text
        assert which in page and "You cannot answer this" in page and 'class="answer"' not in page
        seen = bob.fields(f"/console/approvals/{which}")
        csrf = page.partition('name="csrf" value="')[2].partition('"')[0]
        refused = carl.send(f"/console/approvals/{which}", {**seen, "csrf": csrf, "answer": "approve"})
        assert refused.status == 403 and "Nothing was answered" in refused.text
        bob.answer(which, "deny")


def test_people_see_and_answer_what_their_tenant_asks_and_nothing_else(
    served: Served, bob: Browser, tmp_path: Path
) -> None:
    theirs = tmp_path / "token"
    theirs.touch(mode=0o600)
    theirs.write_text(token(served, "agent", "visitor")["token"])
    eve = visitor(served, token(served, "person", "eve")["token"])
    with waiting(served, {"title": "acme's"}, theirs) as said:
        which = the_question(eve)
        assert bob.questions() == [] and which not in bob.get("/console/approvals").text
        assert bob.get(f"/console/approvals/{which}").status == 404
        seen = eve.fields(f"/console/approvals/{which}")
        csrf = bob.get("/console/approvals").text.partition('name="csrf" value="')[2].partition('"')[0]
        fields = {**seen, "csrf": csrf, "answer": "approve"}
        assert bob.send(f"/console/approvals/{which}", fields).status == 404
        assert eve.answer(which, "approve").status == 303
    assert said[0]["status"] == "success"
    assert call(served, "search_docs", {"query": "x"})["status"] == "success"


def test_a_long_question_is_answered_on_its_own_page_alone(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "x" * 20_000}):
        which = the_question(bob)
        listed = bob.get("/console/approvals").text
        assert "of 20," in listed and 'class="answer"' not in listed
        page = bob.get(f"/console/approvals/{which}").text
        assert "x" * 20_000 in page and 'class="answer"' in page
        bob.answer(which, "deny")


def test_a_very_long_question_is_listed_by_its_beginning(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "y" * 100_000}):
        which = the_question(bob)
        listed = bob.get("/console/approvals").text
        assert "y" * 5_000 in listed and "y" * 6_001 not in listed and 'class="answer"' not in listed
        assert "first 6,000 of 100," in listed and "create_ticket on server helpdesk" in listed
        assert "y" * 100_000 in bob.get(f"/console/approvals/{which}").text
        assert bob.answer(which, "deny").status == 303


def test_what_was_answered_is_proved_by_the_log(served: Served) -> None:
    assert gateways.verified(served.state).ok


# ── Calls ─────────────────────────────────────────────────────────────────────────────────────────


def test_history_shows_what_was_called_and_finds_it_again(served: Served, bob: Browser) -> None:
    said = call(served, "search_docs", {"query": "<script>nothing</script>"})
    call(served, "no_such_tool", {})
    which = said["facts"]["call_id"]
    whole = bob.get("/console/history").text
    assert which in whole and "no_such_tool" in whole and "unknown_tool" in whole
    refused = bob.get("/console/history?status=validation_failure").text
    assert which not in refused and "no_such_tool" in refused
    assert which in bob.get(f"/console/history?q={which}&tool=search_docs&agent=analyst").text
    assert "No call matches" in bob.get("/console/history?q=nothing+has+this").text
    for odd in ("since=yesterday", "before=-1", "before=99999999999999999999", "after=x", "tool=%00%ff", "q=%25_'\""):
        assert bob.get(f"/console/history?{odd}").status == 200


def test_the_page_of_a_call_tells_its_life(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "told"}) as said:
        bob.answer(the_question(bob), "approve", "as agreed")
    which = said[0]["facts"]["call_id"]
    page = bob.get(f"/console/calls/{which}").text
    for shown in ("bob approved it in the console", "as agreed", "std-write", "approval asked", "approval answered"):
        assert shown in page
    assert "started" in page and "finished" in page and "nothing outside was changed" not in page
    assert bob.get("/console/calls/call_0").status == 404


def test_calls_of_another_tenant_are_nowhere(served: Served, bob: Browser) -> None:
    which = call(served, "search_docs", {"query": "ours"})["facts"]["call_id"]
    eve = visitor(served, token(served, "person", "eve")["token"])
    assert eve.get(f"/console/calls/{which}").status == 404
    for path in ("history", f"history?q={which}", "history?agent=analyst", "live"):
        page = eve.get(f"/console/{path}").text
        assert f"calls/{which}" not in page and '<option value="analyst"' not in page


def test_live_shows_a_call_that_runs(served: Served, bob: Browser) -> None:
    with waiting(served, {"title": "in between"}):
        which = the_question(bob)
        assert "No call is running" in bob.get("/console/live").text, "it waits, and has not begun"
        bob.answer(which, "deny")
    tooling.wait_until(lambda: "approval_refused" in bob.get("/console/live").text)
