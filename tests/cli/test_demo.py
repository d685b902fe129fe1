"""The first five minutes: `serve --demo`, the three calls that it tells one to try, and why each went as it did."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ringfence import identity
from tests import tooling
from tests.cli.terminals import at_terminal
from tests.gateways import ringfence, run


@dataclass(frozen=True, slots=True)
class Demo:
    shown: str
    started: tooling.Started

    def commands(self, verb: str) -> list[list[str]]:
        """The commands that a person is told to type, as their arguments."""
        lines = re.findall(rf"^ {{5}}\S*(?: -m \S+)? ({verb} \S.*?)(?:\s+\(.*\))?$", self.shown, re.MULTILINE)
        return [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with tooling.start_process(ringfence("serve", "--demo", "--port", "0")) as started:
        yield Demo(started.wait_for("Stop with Ctrl-C"), started)


def explained() -> str:
    shown = run("audit", "explain", "last", "--demo")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_three_commands_are_told(demo: Demo) -> None:
    assert [words[1] for words in demo.commands("call")] == ["search_docs", "create_ticket", "delete_all_tickets"]
    assert "audit explain last --demo" in demo.shown


def test_the_first_is_allowed(demo: Demo) -> None:
    shown = run(*demo.commands("call")[0])
    assert shown.returncode == 0
    assert "Refunds are paid within 14 days" in shown.stdout
    assert shown.stderr.startswith("success (ok), call call_")
    said = explained()
    assert said.startswith("search_docs, call_") and "  policy     allowed by rule std-read" in said
    assert "  result     success; nothing outside was changed; " in said and "isolation process" in said


def test_the_second_waits_for_a_person_and_gets_it(demo: Demo) -> None:
    with tooling.start_process(ringfence(*demo.commands("call")[1])) as caller:
        told = caller.wait_for("ringfence approvals approve apr_")
        approval = re.findall(r"apr_[0-9a-f]+", told)[0]
        listed = run("approvals", "list", "--demo").stdout
        assert approval in listed and "create_ticket on server helpdesk (write)" in listed
        assert '"priority": "high"' in listed and "person_for_high_priority" in listed
        with at_terminal("approvals", "approve", approval, "--demo") as terminal:
            terminal.expect("[y/N] ")
            assert caller.process.poll() is None  # it still waits
            terminal.type("y\n")
            assert terminal.end() == 0
        assert caller.process.wait(60) == 0
        assert '"title": "Broken"' in caller.output() and "success (ok)" in caller.output()
    said = explained()
    assert f"{identity.os_user()} approved it at " in said and approval in said
    assert "requested under person_for_high_priority" in said
    assert "on record before anything was sent, and synced to disk" in said
    assert "  result     success; what it changed is in the server's box alone, and lasts until that ends; " in said


def test_the_same_call_needs_another_answer_and_may_be_refused(demo: Demo) -> None:
    with tooling.start_process(ringfence(*demo.commands("call")[1])) as caller:
        caller.wait_for("ringfence approvals approve apr_")
        with at_terminal("approvals", "deny", "last", "--demo") as terminal:
            terminal.expect("[y/N] ")
            terminal.type("yes\n")
            assert terminal.end() == 0
        assert caller.process.wait(60) == 126
        assert "denied (approval_refused)" in caller.output()
    said = explained()
    assert f"{identity.os_user()} refused it" in said and "; it never ran" in said


def test_the_third_is_refused(demo: Demo) -> None:
    shown = run(*demo.commands("call")[2])
    assert shown.returncode == 126
    assert "Nothing deletes everything at once" in shown.stdout
    assert shown.stderr.startswith("denied (policy), call call_")
    said = explained()
    assert "  policy     refused by rule no-bulk-delete" in said
    assert "  started    no\n" in said and "; it never ran" in said
    # The demo itself has told it too, as it ended, in one line.
    demo.started.wait_for("; policy refused by rule no-bulk-delete; denied (policy): ")


def test_all_of_it_is_on_record_and_verifies(demo: Demo) -> None:
    listed = run("audit", "list", "--demo").stdout
    assert [word for word in ("success", "approval_refused", "policy") if word not in listed] == []
    shown = run("audit", "verify", "--demo")
    assert shown.returncode == 0 and "verified." in shown.stdout
