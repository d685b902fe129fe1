"""The four commands of the README, as they stand there, followed in the console by the link that is printed."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator

import pytest

from tests import tooling
from tests.console import screens
from tests.console.screens import Screen
from tests.gateways import ringfence, run

URL = "http://127.0.0.1:8700/mcp"


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    text = (tooling.ROOT / "README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^\$ ringfence (.+)$", text, re.MULTILINE)[:4]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `make run` ends with: it starts this very command."""
    assert ".venv/bin/ringfence serve --demo" in (tooling.ROOT / "Makefile").read_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("readme-home")))
        with tooling.start_process(ringfence("serve", "--demo", "--port", "0")) as started:
            yield started.wait_for("/console/login#")


@pytest.fixture(scope="module")
def screen(shown: str) -> Iterator[Screen]:
    found = re.search(r"(http://\S+)/console/login#(\S+)", shown)
    assert found is not None, "no link was printed"
    with screens.logged_in(found[1], found[2]) as screen:
        yield screen


def test_the_four_commands_are_followed_in_the_console(shown: str, screen: Screen, commands: list[list[str]]) -> None:
    page = screen.page
    search, ticket, delete, explain = (
        [word.replace(URL, f"{screen.base}/mcp") for word in words] for words in commands
    )

    screen.open("live")
    assert run(*search).returncode == 0
    page.locator("#ended .state.success").wait_for()  # it came by itself

    screen.open("approvals")
    ended: list[int] = []
    caller = threading.Thread(target=lambda: ended.append(run(*ticket).returncode))
    caller.start()
    page.locator("article[data-item]").wait_for()
    with page.expect_navigation():
        page.get_by_role("button", name="Approve once").click()
    caller.join(tooling.PATIENCE)
    assert ended == [0] and "approved" in page.locator(".notice").inner_text()

    assert run(*delete).returncode != 0
    screen.open("history?status=denied")
    with page.expect_navigation():
        page.locator("#calls a[data-item]").first.click()
    assert page.locator("h1").inner_text().startswith("delete_all_tickets") or "delete_all_tickets" in page.title()
    assert page.get_by_text("no-bulk-delete").count() > 0

    explained = run(*explain).stdout
    assert "no-bulk-delete" in explained
    told = page.locator(".way").inner_text()
    assert all(line.split("  ")[-1].strip() in told for line in explained.splitlines() if "no-bulk-delete" in line)
