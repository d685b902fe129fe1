"""A real browser that somebody has logged in with, by the link that `serve` prints."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests import tooling

_VIOLATIONS = "window.violations = []; addEventListener('securitypolicyviolation', e => violations.push(e.blockedURI))"


@dataclass
class Screen:
    """A page of the browser, and what went wrong on it."""

    page: Any
    base: str
    problems: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.base}/console/{path}")

    def fits(self) -> bool:
        """Whether nothing on the page is wider than the screen."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@contextmanager
def logged_in(base: str, code: str) -> Iterator[Screen]:
    program = tooling.need("chromium")
    sys.path.append(str(tooling.browser()))
    api = importlib.import_module("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(program), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(tooling.PATIENCE * 1000)
        page.add_init_script(_VIOLATIONS)
        screen = Screen(page, base)
        page.on("pageerror", lambda error: screen.problems.append(str(error)))
        page.goto(f"{base}/console/login#{code}")
        page.wait_for_url("**/console/approvals")
        yield screen
        chromium.close()
