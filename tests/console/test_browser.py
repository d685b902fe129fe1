"""The console in a browser: by the keyboard alone, live, on a phone, in the dark; what agents write stays text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import gateways, tooling
from tests.console import people, screens
from tests.console.people import call, waiting
from tests.console.screens import Screen
from tests.gateways import Served

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202egnp.exe"
PAGES = ("approvals", "live", "history", "charts", "sessions", "servers", "isolation", "standing")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    rule = "approvals: {manager: {roles: [manager], standing: {times: 3, seconds: 3600}}}"
    with people.serve(tmp_path_factory.mktemp("browser"), rule=rule) as served:
        yield served


@pytest.fixture(scope="module")
def screen(served: Served) -> Iterator[Screen]:
    with screens.logged_in(served.url.removesuffix("/mcp"), people.link(served)) as screen:
        yield screen


def test_the_code_of_a_link_stays_in_no_address(screen: Screen) -> None:
    assert "rft_" not in screen.page.evaluate("location.href + document.referrer + history.length")
    screen.page.go_back()
    assert "rft_" not in screen.page.url
    screen.open("approvals")
    assert screen.page.locator(".empty").is_visible()


def test_a_question_comes_by_itself_and_is_answered_by_the_keyboard_alone(served: Served, screen: Screen) -> None:
    page = screen.page
    with waiting(served, {"title": HOSTILE}) as said:
        card = page.locator("article[data-item]")
        card.wait_for()  # nothing was loaded again by hand
        assert "document.title" in card.inner_text() and "\\u{202e}" in card.inner_text()
        assert page.locator("#waiting").inner_text() == "1"
        page.keyboard.press("j")
        page.keyboard.press("a")
        assert page.evaluate("document.activeElement.value") == "approve"
        page.keyboard.press("Shift+Tab")
        page.keyboard.type("fine, a and d typed here are text")
        page.keyboard.press("Tab")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert "approved" in page.locator(".notice").inner_text()
    assert said[0]["status"] == "success"
    assert page.title().startswith("Approvals") and page.locator("img[src=x]").count() == 0


def test_deny_is_a_key_too_and_the_answered_is_listed(served: Served, screen: Screen) -> None:
    page = screen.page
    with waiting(served, {"title": "not now"}) as said:
        page.locator("article[data-item]").wait_for()
        page.keyboard.press("j")
        page.keyboard.press("d")
        with page.expect_navigation():
            page.keyboard.press("Enter")
    assert said[0]["reason_code"] == "approval_refused"
    page.locator("#settled .state.denied").wait_for()


def test_an_answer_cannot_hit_another_question(served: Served, screen: Screen) -> None:
    page, bob = screen.page, people.visitor(served, people.token(served, "person", "bob")["token"])
    cards = page.locator("article[data-item]")
    with waiting(served, {"title": "harmless"}):
        cards.first.wait_for()
        (first,) = bob.questions()
        with waiting(served, {"title": "dangerous"}):
            cards.nth(1).wait_for()
            page.keyboard.press("j")
            before = page.locator("[data-key-a]").nth(1).bounding_box()
            assert bob.answer(first, "approve").status in (200, 303)
            page.locator(f"article[id={first}].settled").wait_for()
            assert page.locator("[data-key-a]").nth(1).bounding_box() == before, "nothing has moved"
            assert not page.locator("[data-key-a]").first.is_visible()
            page.keyboard.press("a")
            page.keyboard.press("Enter")
            page.wait_for_url(f"**/approvals/{first}")  # what has the focus is opened, and nothing answered
            (second,) = bob.questions()
            assert second != first, "it still waits"
            screen.open("approvals")
            assert page.locator(f"article[id={first}]").count() == 0
            page.keyboard.press("j")
            page.keyboard.press("d")
            with page.expect_navigation():
                page.keyboard.press("Enter")
    assert bob.questions() == []


def test_what_is_being_typed_stays_while_the_page_changes(served: Served, screen: Screen) -> None:
    page = screen.page
    with waiting(served, {"title": "first"}):
        page.locator("article[data-item]").wait_for()
        page.locator('input[name="reason"]').fill("half a sen")
        with waiting(served, {"title": "second"}):
            page.locator("article[data-item]").nth(1).wait_for()
            assert page.locator('input[name="reason"]').first.input_value() == "half a sen"
            assert page.evaluate("document.activeElement.name") == "reason"
            for left in (1, 0):
                with page.expect_navigation():
                    page.locator("button.bad").first.click()
                assert page.locator("article[data-item]").count() == left


def test_history_shows_by_itself_a_call_that_ends(served: Served, screen: Screen) -> None:
    call(served, "search_docs", {"query": "before"})
    screen.open("history")
    there = screen.page.locator("#calls > [data-key]").count()
    call(served, "search_docs", {"query": "after"})
    screen.page.locator("#calls > [data-key]").nth(there).wait_for()


@pytest.fixture(scope="module")
def some_call(served: Served) -> str:
    """A call with much to tell, none of which may make a page wider."""
    called: str = call(served, "search_docs", {"query": "long" * 500})["facts"]["call_id"]
    return called


def test_every_page_is_reached_by_two_keys(screen: Screen) -> None:
    page = screen.page
    screen.open("approvals")
    for keys, path in (("h", "history"), ("c", "charts"), ("i", "isolation"), ("s", "sessions"), ("s", "servers")):
        page.keyboard.press("g")
        with page.expect_navigation():
            page.keyboard.press(keys)
        assert page.url.endswith(f"/console/{path}")
        assert page.locator("nav a[aria-current]").get_attribute("href") == f"/console/{path}"
    page.keyboard.press("j")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.url.endswith("/console/servers/helpdesk")


def test_a_session_is_watched_and_stopped_by_the_keyboard_alone(served: Served, screen: Screen) -> None:
    if "open_session" not in gateways.own_tools():
        pytest.skip("no boxes can be made here")
    page = screen.page
    screen.open("sessions")
    session = call(served, "open_session", {})["structured"]["session"]
    page.locator(f"a[href='/console/sessions/{session}']").wait_for()  # nothing was loaded again by hand
    page.keyboard.press("j")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert call(served, "execute_python", {"code": "print('from the box')", "session": session})["status"] == "success"
    page.get_by_text("from the box").wait_for()
    page.locator("#use svg").first.wait_for()
    page.locator("#why").focus()
    page.keyboard.type("seen enough")
    page.keyboard.press("Tab")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "was stopped" in page.locator(".notice").inner_text()
    page.locator(f"[data-key='ended'] a[href='/console/sessions/{session}']").wait_for()


def test_a_standing_approval_is_made_and_revoked_by_the_keyboard_alone(served: Served, screen: Screen) -> None:
    page = screen.page
    screen.open("approvals")
    with waiting(served, {"title": HOSTILE, "priority": "high"}) as said:
        page.locator("article h2 a").first.wait_for()  # nothing was loaded again by hand
        page.keyboard.press("j")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        page.set_viewport_size({"width": 360, "height": 740})
        assert screen.fits()
        page.locator("input[name='any:title']").focus()
        page.keyboard.press("Space")
        page.locator("input[name='times']").focus()
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert page.url.endswith("/console/standing")
    assert said[0]["status"] == "success"
    assert call(served, "create_ticket", {"title": "another", "priority": "high"})["status"] == "success"
    page.get_by_text("2 of 3 left").wait_for()
    page.locator("button.bad:enabled").wait_for()  # after a change it rests for a moment
    assert screen.fits() and page.title() != "owned"
    page.keyboard.press("j")
    page.keyboard.press("d")
    page.locator("button.bad:focus").wait_for()
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "Revoked" in page.locator(".notice").inner_text()
    page.get_by_text("No standing approvals").wait_for()
    page.set_viewport_size({"width": 1200, "height": 800})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_every_page_fits_and_is_readable(screen: Screen, some_call: str, width: int, scheme: str) -> None:
    page = screen.page
    page.set_viewport_size({"width": width, "height": 740})
    page.emulate_media(color_scheme=scheme)
    for path in (*PAGES, "servers/helpdesk", f"calls/{some_call}", "login", "nothing"):
        screen.open(path)
        assert screen.fits(), path
        assert page.locator("h1").count() == 1, path
        ground, ink = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
        )
        assert (light(ground) > light(ink)) == (scheme == "light")


def light(colour: str) -> int:
    return sum(int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3])


def test_the_policy_of_pages_was_never_broken(screen: Screen, some_call: str) -> None:
    assert screen.problems == []
    for path in (*PAGES, f"calls/{some_call}"):
        screen.open(path)
        assert screen.page.evaluate("violations") == [], path
    screen.open("approvals")
    screen.page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: '1'}))")
    tooling.wait_until(lambda: len(screen.page.evaluate("violations")) == 1)  # a page that breaks it would be seen
