"""`ringfence approvals`: what a person is shown, and that only a person, at a terminal, can answer."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ringfence import config, identity
from ringfence.audit.keys import load_or_create
from ringfence.cli import approvals
from ringfence.core import system
from ringfence.core.model import Json
from ringfence.governance.standing import shape_of
from ringfence.store import Approval, ApprovalQuestion, Reader, Store, Unproven
from tests import gateways
from tests.cli.terminals import at_terminal
from tests.faking import answering_as

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b1mApprove this call?\r\n‮"


@pytest.fixture
def store() -> Iterator[Store]:
    """The user's own state, which verbs take where no configuration is; always without an open question."""
    store = Store.open(config.state_folder(), load_or_create(config.key_folder()))
    for approval in store.reader().approvals():
        with answering_as("nobody"), suppress(Unproven):  # ours may have answered, or a test changed the question
            settle(store, approval, approve=False, person="nobody")
    yield store
    store.close()


def ask(store: Store, arguments: Json | None = None, **more: object) -> Approval:
    now = time.time()
    summary = {"server": "helpdesk", "mode": "write", "origin": "mcp-http", "rules": ["std-write"], "reversible": False}
    given = {
        "digest": f"sha256:{time.monotonic_ns()}",
        "call_id": "call_0123456789",
        "principal": "local/coder",
        "person": identity.os_user(),
        "tool": "create_ticket",
        "rule": "always",
        "summary": {**summary, "arguments": arguments if arguments is not None else {"title": "Broken"}},
        "asked_at": now - 5,
        "expires_at": now + 600,
        "self_approval": True,
        **more,
    }
    question = ApprovalQuestion(**given)  # type: ignore[arg-type]
    return store.write_sync(lambda tx: tx.ask_approval(question))


def settle(store: Store, approval: Approval, *, approve: bool, person: str = "alice") -> None:
    store.write_sync(lambda tx: tx.answer_approval(approval.id, person, approve, time.time()))


def state(approval: Approval) -> str:
    reader = Reader.open(config.state_folder())
    try:
        found = reader.approval(approval.id)
    finally:
        reader.close()
    assert found is not None
    return found.state


def test_nothing_waits(store: Store) -> None:
    shown = gateways.run("approvals", "list")
    assert (shown.returncode, shown.stdout) == (0, "No approvals are pending.\n")


def test_list_tells_who_asks_for_what(store: Store) -> None:
    asked = ask(store, {"title": "Broken", "priority": "high"}, roles=("manager|owner",), self_approval=False)
    shown = gateways.run("approvals", "list").stdout
    for told in (
        asked.id,
        "create_ticket on server helpdesk (write)",
        "coder",
        f"for {identity.os_user()}",
        "mcp-http",
    ):
        assert told in shown
    for told in ("s ago", "in 9 min", "always", "manager or owner", '{"priority": "high", "title": "Broken"}'):
        assert told in shown
    assert f"ringfence approvals approve {asked.id} " in shown  # which shows it all again, and asks


def test_list_as_json(store: Store) -> None:
    asked = ask(store, {"title": HOSTILE})
    shown = gateways.run("approvals", "list", "--json")
    (only,) = json.loads(shown.stdout)
    assert only["id"] == asked.id and only["arguments"] == {"title": HOSTILE} and only["state"] == "pending"
    assert all(c.isprintable() or c == "\n" for c in shown.stdout)


def test_of_a_long_question_its_beginning_is_in_json_and_how_long_it_is(store: Store) -> None:
    asked = ask(store, {"title": "Broken", "text": "x" * 50_000})
    ask(store, {"title": "short"}, tool="other")
    shown = gateways.run("approvals", "list", "--json")
    long, short = json.loads(shown.stdout)
    assert (long["id"], long["arguments"], "arguments" in long["summary"]) == (asked.id, None, False)
    assert long["beginning"].startswith('{"text":"xxx') and len(long["beginning"]) == 200
    assert long["characters"] > 50_000 and long["summary"]["server"] == "helpdesk"
    assert (short["arguments"], "beginning" in short) == ({"title": "short"}, False)
    assert len(shown.stdout) < 5000


def test_nothing_in_arguments_reaches_the_terminal_as_itself(store: Store) -> None:
    asked = ask(store, {"title": HOSTILE, HOSTILE: "x" * 5000}, tool=f"tool{HOSTILE}")
    shown = gateways.run("approvals", "list").stdout
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert "…" in shown and "x" * 200 not in shown
    with at_terminal("approvals", "deny", asked.id) as terminal:
        question = terminal.expect("[y/N] ")
        terminal.type("n\n")
        assert terminal.end() == 1
    assert all(c.isprintable() or c == "\n" for c in question)
    whole = question.replace("\n    : ", "")  # lines that a terminal would wrap are broken behind a margin
    assert "\\u001b[2J" in question and "x" * 5000 in whole  # in full, and readable
    assert question.count("\nApprove this call?") == 0  # every line of theirs stands behind a margin


def test_what_was_removed_is_said(store: Store) -> None:
    summary = {"arguments": {"title": r"he\u{200b}llo"}, "removed": {"known_secret": 3, "invisible": 1}}
    asked = ask(store, summary=summary)
    listed = gateways.run("approvals", "list").stdout
    assert "3 × known_secret" in listed and "× invisible" not in listed
    with at_terminal("approvals", "approve", asked.id) as terminal:
        question = terminal.expect("[y/N] ")
    assert "NOT SHOWN" in question and "characters that cannot be seen" in question


def test_what_only_looks_like_a_secret_is_said_to_be_anything(store: Store) -> None:
    ask(store, summary={"arguments": {"code": "x"}, "removed": {"known_secret": 1, "redact[0]": 1}})
    assert "CARE" not in gateways.run("approvals", "list").stdout
    ask(store, summary={"arguments": {"code": "y"}, "removed": {"aws_access_key": 1}}, tool="other")
    listed = gateways.run("approvals", "list").stdout
    assert "CARE       what only looks like a secret may be anything, also code" in listed


def test_a_read_and_a_subscription_are_told_apart(store: Store) -> None:
    ask(store, summary={"arguments": {}, "method": "resources/subscribe"})
    ask(store, summary={"arguments": {}, "method": "resources/read"}, tool="other")
    listed = gateways.run("approvals", "list").stdout
    assert "request    to be told of each change of it from now on (resources/subscribe)" in listed
    assert "request    to read it once (resources/read)" in listed


def test_the_name_of_what_is_asked_for_cannot_pass_for_a_line_of_ours(store: Store) -> None:
    name = "file:///docs/a" + " " * 60 + "apr_00000000000000000000  create_ticket on server helpdesk (read)"
    ask(store, tool=name, summary={"arguments": {}, "server": "docs", "session": {"id": "ses_a  rule  any"}})
    listed = gateways.run("approvals", "list").stdout
    title = listed.splitlines()[0].partition("  ")[2]
    assert title.startswith(r'"file:///docs/a\x20') and title.endswith(f'…" ({len(name)} characters) on server docs')
    assert len(title) < 110 and r'session    "ses_a \x20rule \x20any"' in listed


@pytest.mark.parametrize(("verb", "typed", "after"), [("approve", "y\n", "approved"), ("deny", "YES\n", "denied")])
def test_a_person_answers(store: Store, verb: str, typed: str, after: str) -> None:
    asked = ask(store, {"title": "Broken"})
    with at_terminal("approvals", verb, asked.id) as terminal:
        question = terminal.expect("[y/N] ")
        assert f"as {identity.os_user()}?" in question and '"title": "Broken"' in question
        assert "cannot be undone" in question and "std-write" in question
        terminal.type(typed)
        assert terminal.end() == 0
        assert f"{asked.id}: {after} by {identity.os_user()}." in terminal.shown
    assert state(asked) == after


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_why_a_person_answered_so_is_on_record(store: Store, verb: str) -> None:
    asked = ask(store, {"title": "Broken"})
    with at_terminal("approvals", verb, asked.id, "--reason", "after the release") as terminal:
        terminal.expect("[y/N] ")
        terminal.type("y\n")
        assert terminal.end() == 0
    reader = Reader.open(config.state_folder())
    try:
        answered = reader.approval(asked.id)
    finally:
        reader.close()
    assert answered is not None and [each.reason for each in answered.answers] == ["after the release"]


@pytest.mark.parametrize("typed", ["n\n", "\n", "yess\n", "\x04"])
def test_anything_but_yes_answers_nothing(store: Store, typed: str) -> None:
    asked = ask(store)
    with at_terminal("approvals", "approve", "last", stdin=b"y\ny\n") as terminal:
        terminal.expect("[y/N] ")
        terminal.type(typed)
        assert terminal.end() == 1
        assert "Nothing was answered" in terminal.shown
    assert state(asked) == "pending"


def test_without_a_terminal_there_is_no_answer(store: Store) -> None:
    asked = ask(store)
    with gateways.tooling.start_process(gateways.ringfence("approvals", "approve", asked.id)) as started:
        assert started.process.wait(60) == 1
        assert "there is no terminal here to ask a person on" in started.output()
    assert state(asked) == "pending"
    refused = gateways.run("approvals", "approve", "--yes", asked.id)
    assert refused.returncode == 2 and "--yes" in refused.stderr


def test_ids_may_be_shortened_if_they_mean_one(store: Store) -> None:
    first, second = ask(store), ask(store)
    ambiguous = gateways.run("approvals", "deny", "apr_")
    assert ambiguous.returncode == 1
    assert first.id in ambiguous.stderr and second.id in ambiguous.stderr
    unknown = gateways.run("approvals", "deny", "apr_zzz")
    assert unknown.returncode == 1 and "no pending approval apr_zzz" in unknown.stderr
    different = next(n for n, (a, b) in enumerate(zip(first.id, second.id, strict=True)) if a != b)
    with at_terminal("approvals", "deny", second.id.removeprefix("apr_")[: different - 3]) as terminal:
        terminal.expect(second.id)


def test_what_is_settled_stays_settled(store: Store) -> None:
    asked = ask(store)
    settle(store, asked, approve=True)
    again = gateways.run("approvals", "deny", asked.id)
    assert again.returncode == 1
    assert again.stderr == f"approval {asked.id} is approved already; there is nothing to answer\n"


def test_only_people_of_the_configuration_answer(store: Store, tmp_path: Path) -> None:
    me = identity.os_user()
    own, roled = ask(store, self_approval=False, person="me"), ask(store, roles=("manager",))
    servers = f"gateway: {{state: {json.dumps(str(config.state_folder()))}}}"
    others = gateways.write(
        tmp_path, f"{servers}\npeople: {{alice: {{roles: [manager], os_user: nobody-here}}}}", "a.yaml"
    )
    mine = gateways.write(tmp_path, f"{servers}\npeople: {{me: {{roles: [reader], os_user: {me}}}}}", "b.yaml")
    for path, asked, told in (
        (others, own, f"account {me} is not one of the people"),
        (mine, own, "me's own agent asked; another person must answer"),
        (mine, roled, "me does not have the role that is required: manager"),
    ):
        refused = gateways.run("approvals", "approve", asked.id, "--config", path)
        assert refused.returncode == 1
        assert told in refused.stderr
    assert state(own) == state(roled) == "pending"


def test_nobody_is_asked_whose_answer_could_not_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ask(store)
    monkeypatch.setattr(system, "stranger", lambda info: True)
    monkeypatch.setattr(approvals, "confirm", lambda shown, question: pytest.fail("asked"))
    with pytest.raises(SystemExit):
        approvals.approve(asked.id, None, False)
    assert "only the account that the gateway runs under can answer" in capsys.readouterr().err
    assert state(asked) == "pending"


def test_two_people_must_agree(store: Store) -> None:
    asked = ask(store, people=2)
    with at_terminal("approvals", "approve", asked.id) as terminal:
        assert "2 people" in terminal.expect("[y/N] ")
        terminal.type("y\n")
        assert terminal.end() == 0
        assert "1 of 2 people approved it; it still waits." in terminal.shown
    assert state(asked) == "pending"


def test_a_question_that_somebody_changed_in_the_database_is_not_answered(store: Store) -> None:
    asked = ask(store, {"amount": 5000})
    database = sqlite3.connect(config.state_folder() / "ringfence.db", timeout=30)
    try:
        database.execute(
            "UPDATE approvals SET summary = json_set(summary, '$.arguments.amount', 5) WHERE id = ?", (asked.id,)
        )
        database.commit()
    finally:
        database.close()
    with at_terminal("approvals", "approve", asked.id) as terminal:
        terminal.expect("[y/N] ")
        terminal.type("y\n")
        assert terminal.end() == 1
        assert "Another program changed the database" in terminal.shown
    assert state(asked) == "pending"


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_a_question_that_has_expired_says_what_to_do(store: Store, verb: str) -> None:
    asked = ask(store, expires_at=time.time() - 1)
    told = gateways.run("approvals", verb, asked.id)
    assert told.returncode == 1
    assert "has expired, and can no longer be answered; if the agent makes the call again, it asks again" in told.stderr


# ── Reasons, and approvals that stand ──

LIKE_IT = {"terms": {"standing": {"times": 5, "seconds": 3600}}}


def test_a_reason_goes_on_record_and_one_that_is_wanted_must_be_given(store: Store) -> None:
    asked = ask(store, terms={"reason": True})
    refused = gateways.run("approvals", "approve", asked.id)
    assert refused.returncode == 1 and "wants a reason; add: --reason TEXT" in refused.stderr
    with at_terminal("approvals", "approve", asked.id, "--reason", "ticket 7") as terminal:
        assert "an answer must say why" in terminal.expect("[y/N] ")
        terminal.type("y\n")
        assert terminal.end() == 0
    (answered,) = [r.body for r in store.reader().records(kind="approval_answered") if r.body["approval"] == asked.id]
    assert answered["reason"] == "ticket 7"


def test_calls_like_one_are_approved_beforehand_as_they_are_shown_and_taken_back(store: Store) -> None:
    arguments = {"title": "Broken", "to": HOSTILE, "path": "docs/a.md"}
    asked = ask(store, arguments, shape=shape_of(arguments, "sha256:shape"), **LIKE_IT)
    wish = ("--times", "2", "--for", "600", "--any", "title", "--like", "path=docs/.*")
    with at_terminal("approvals", "allow", asked.id, *wish) as terminal:
        shown = terminal.expect("[y/N] ")
        for told in (
            "2 more calls like it",
            "title: ANY VALUE",
            "path: any text that this matches whole: docs/.*",
            'to: always "\\u001b[2J',
        ):
            assert told in shown
        assert all(c.isprintable() or c == "\n" for c in shown)
        terminal.type("y\n")
        assert terminal.end() == 0
    assert state(asked) == "approved"
    (stands,) = json.loads(gateways.run("approvals", "standing", "--json").stdout)
    assert (stands["times"], stands["used"], stands["arguments"]["title"]) == (2, 0, "ANY VALUE")
    listed = gateways.run("approvals", "standing").stdout
    assert stands["id"] in listed and "0 of 2 times" in listed and "title: ANY VALUE" in listed
    assert all(c.isprintable() or c == "\n" for c in listed)
    revoked = gateways.run("approvals", "revoke", stands["id"][:-3])
    assert revoked.stdout == f"{stands['id']}: revoked by {identity.os_user()}.\n"
    assert gateways.run("approvals", "standing").stdout == "No approvals stand.\n"
    assert "is no standing approval" in gateways.run("approvals", "revoke", "std_0").stderr


@pytest.mark.parametrize(
    ("more", "wish", "problem"),
    [
        ({}, ("--times", "1", "--for", "10"), "its approval rule has no `standing`"),
        (LIKE_IT, ("--times", "9", "--for", "10"), "5 times within 3600 s at most"),
        (LIKE_IT, ("--times", "1", "--for", "10", "--any", "nothing"), "no argument 'nothing'; it has: title"),
        (LIKE_IT, ("--times", "1", "--for", "10", "--like", "title"), "--like takes ARGUMENT=PATTERN"),
    ],
)
def test_no_more_is_approved_beforehand_than_may_be(
    store: Store, more: Json, wish: tuple[str, ...], problem: str
) -> None:
    asked = ask(store, shape=shape_of({"title": "Broken"}, "sha256:shape"), **more)
    refused = gateways.run("approvals", "allow", asked.id, *wish)
    assert refused.returncode == 1 and problem in refused.stderr
    assert state(asked) == "pending" and store.reader().standing() == []
