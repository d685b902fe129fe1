"""Sessions in the console: what they use, their files and output, who sees them, and who stops them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfence.console import sessions
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Person
from tests import gateways, tooling
from tests.console import people
from tests.console.people import Browser, call, token, visitor
from tests.gateways import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if "open_session" not in gateways.own_tools():
        pytest.skip("no boxes can be made here")
    with people.serve(tmp_path_factory.mktemp("sessions")) as served:
        yield served


@pytest.fixture(scope="module")
def box(served: Served) -> str:
    """A session in which an agent did something."""
    opened = call(served, "open_session", {})
    session: str = opened["structured"]["session"]
    code = "import os\nos.makedirs('output', exist_ok=True)\nopen('output/<b>.txt', 'w').write('kept')\n"
    code += "print('\\u202e<script>alert(1)</script>')"
    assert call(served, "execute_python", {"code": code, "session": session})["status"] == "success"
    return session


@pytest.fixture(scope="module")
def dora(served: Served) -> Browser:
    """Who may change what runs."""
    return visitor(served, token(served, "person", "dora")["token"])


@pytest.fixture(scope="module")
def omar(served: Served) -> Browser:
    """Who reads only."""
    return visitor(served, token(served, "person", "omar")["token"])


@pytest.fixture(scope="module")
def eve(served: Served) -> Browser:
    """Somebody of another tenant."""
    return visitor(served, token(served, "person", "eve")["token"])


def csrf(browser: Browser) -> str:
    return browser.get("/console/sessions").text.partition('name="csrf" value="')[2].partition('"')[0]


def test_a_session_is_listed_with_what_it_is(box: str, omar: Browser) -> None:
    page = omar.get("/console/sessions").text
    assert box in page and "analyst" in page and "running" in page and "MiB" in page


def test_what_a_step_wrote_is_text_and_nothing_else(box: str, omar: Browser) -> None:
    page = omar.get(f"/console/sessions/{box}").text
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page
    assert "\u202e" not in page and "u{202e}" in page


def test_memory_and_processors_are_drawn_over_time(served: Served, box: str, omar: Browser) -> None:
    def charts() -> list[str]:
        return re.findall(r"<svg.*?</svg>", omar.get(f"/console/sessions/{box}").text, re.DOTALL)

    tooling.wait_until(lambda: len(charts()) == 2)
    processors, memory = charts()
    assert "Processors in use: processors 0." in processors and "polyline" in processors
    assert "Memory: memory " in memory and "MiB at the end" in memory
    assert "style=" not in processors + memory  # the content policy would not let it count


def test_a_file_is_an_attachment_that_no_browser_opens(served: Served, box: str, omar: Browser) -> None:
    listed = omar.get(f"/console/sessions/{box}?path=/workspace/output").text
    assert "&lt;b&gt;.txt" in listed and "<b>.txt" not in listed
    taken = omar.get(f"/console/sessions/{box}/file?path=%2Fworkspace%2Foutput%2F%3Cb%3E.txt")
    assert (taken.status, taken.text) == (200, "kept")
    assert taken.headers["content-disposition"].startswith('attachment; filename="_b_.txt"')
    assert (
        taken.headers["x-content-type-options"] == "nosniff" and "sandbox" in taken.headers["content-security-policy"]
    )
    assert taken.headers["content-type"] == "application/octet-stream"
    (record,) = gateways.records(served.state, kind="session_file_read")
    assert (record["person"], record["session"], record["bytes"]) == ("omar", box, 4)


@pytest.mark.parametrize("path", ["/workspace/none", "/etc/passwd/x", "../../etc/shadow", "", "\x00", "/" + "x" * 9000])
def test_what_is_no_file_is_told_and_not_found(box: str, omar: Browser, path: str) -> None:
    from urllib.parse import quote

    assert omar.get(f"/console/sessions/{box}/file?path={quote(path)}").status == 404
    assert omar.get(f"/console/sessions/{box}?path={quote(path)}").status == 200


def test_another_tenant_sees_none_of_it(box: str, eve: Browser) -> None:
    assert box not in eve.get("/console/sessions").text
    for path in (box, f"{box}/file?path=/workspace/output/x"):
        assert eve.get(f"/console/sessions/{path}").status == 404
    assert eve.send(f"/console/sessions/{box}/stop", {"csrf": csrf(eve)}).status == 404


def test_only_an_admin_stops_it_and_on_record(served: Served, box: str, dora: Browser, omar: Browser) -> None:
    assert "Stop this session" not in omar.get(f"/console/sessions/{box}").text
    refused = omar.send(f"/console/sessions/{box}/stop", {"csrf": csrf(omar)})
    assert refused.status == 403 and "role admin" in refused.text
    assert "Stop this session" in dora.get(f"/console/sessions/{box}").text
    assert dora.send(f"/console/sessions/{box}/stop", {"csrf": "guessed"}).status == 403
    assert dora.send(f"/console/sessions/{box}/stop", {"csrf": csrf(dora), "reason": "it loops"}).status == 303
    page = dora.get(f"/console/sessions/{box}").text
    assert "stopped" in page and "closed" in page and "Stop this session" not in page
    (record,) = gateways.records(served.state, kind="session_stopped")
    assert (record["person"], record["session"], record["reason"]) == ("dora", box, "it loops")
    after = call(served, "execute_python", {"code": "1", "session": box})
    assert after["reason_code"] == "session_stopped"
    kept = omar.get(f"/console/sessions/{box}/file?path=%2Fworkspace%2Foutput%2F%3Cb%3E.txt")
    assert (kept.status, kept.text) == (200, "kept")


def test_an_auditor_answers_nothing(served: Served, omar: Browser, tmp_path: Path) -> None:
    with people.waiting(served, {"title": "for others"}):
        tooling.wait_until(omar.questions)
        assert "omar is an auditor" in omar.get("/console/approvals").text or "does not have the role" in (
            omar.get("/console/approvals").text
        )
        bob = visitor(served, token(served, "person", "bob")["token"])
        (which,) = bob.questions()
        assert bob.answer(which, "deny").status == 303


# ── Without a gateway ─────────────────────────────────────────────────────────────────────────────

SECRET = "s3cr3t-" + "x" * 40


class Gateway:
    def clean(self, text: str, most: int) -> str:
        return text.replace(SECRET, "[redacted]")[:most]

    @asynccontextmanager
    async def sessions(self) -> AsyncIterator[None]:
        raise Unavailable("keeper_settings", f"its keeper has other settings {SECRET}")
        yield


class Visit:
    gateway = Gateway()
    person = Person("omar")

    def page(self, name: str, values: Json) -> Json:
        return values


@pytest.mark.parametrize("size", [3, 99, 100, 101, 120, 199, 200, 201])
def test_output_is_cut_once_it_is_clean(size: int) -> None:
    data = (SECRET + "t" * (size - 10))[-2 * size :] if size > 10 else "abc"
    for written in (data, "a" * 500 + data):
        shown = sessions._text(Visit(), written.encode(), 100)  # type: ignore[arg-type]
        assert SECRET[7:20] not in shown and shown.endswith(written[-3:])


@pytest.mark.anyio
async def test_sessions_that_cannot_be_listed_now_are_no_error_of_the_page() -> None:
    shown: Any = await sessions.every(Visit())  # type: ignore[arg-type]
    assert shown["open"] == [] and "its keeper has other settings [redacted]" in shown["why"]
