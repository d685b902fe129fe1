"""What a program that runs once shows as a cell would: `display`, figures, the value at its end, magic commands.

Such a program has no channel to its supervisor. What it shows goes into a file of its box, as claims (`claims`), each
after its length; the supervisor reads that when everything in the box has ended, and trusts none of it.
"""

from __future__ import annotations

import os
import sys

from ringfence.sandbox.process.guest import charts, claims, display, later

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

PLACE = "/workspace/tmp/.shown"
_MOST_BYTES = 8 * 1024 * 1024
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Once:
    def __init__(self, names: dict[str, Any], paths: list[str], process: int) -> None:
        """`paths` are where modules of the standard library are found; `process` is the one that may show something."""
        self._names = names
        self._process = process
        self._left = _MOST_BYTES
        self._figures = display.Figures(self.show_figures)
        self._figures.describe = charts.forms
        display.remember_paths(paths)
        self._shell: Any = None
        self._stand_in: Any = None

    def display(self, *values: object, raw: bool = False, **how: Any) -> Any:
        """Show values as results of the program. `raw`: they are dicts from MIME type to content."""
        for value in values:
            forms = display.bundle(value) if raw else display.forms(value, self._figures)
            if how.get("include") or how.get("exclude"):
                forms = later.load("notebook").chosen(forms, how.get("include"), how.get("exclude"))
            self._claim(forms, main=False)
        if how.get("display_id") is not None:
            return later.load("notebook").handle(how["display_id"], self.display)
        return None

    def answer(self, value: object) -> None:
        """Show the value of the last expression."""
        self._claim(display.forms(value, self._figures), main=True)

    def show_figures(self) -> None:
        for figure in self._figures.take():
            self._claim(self._figures.forms(figure), main=False)

    def finish(self) -> None:
        """The program is over."""
        if self._shell is not None:
            self._shell.finish()
        self.show_figures()

    def shell(self) -> Any:
        if self._shell is None:
            self._shell = later.load("notebook").Shell(self._names, self.display, self._figures)
        return self._shell

    def ipython(self) -> Any:
        if self._stand_in is None:
            self._stand_in = later.load("notebook").StandIn(self.shell(), self.display)
        return self._stand_in

    def _claim(self, forms: dict[str, str], *, main: bool) -> None:
        if os.getpid() != self._process:
            sys.stdout.write(f"{forms.get('text/plain', '')}\n")  # a child's: it is no result of the program
            return
        fit, cut = claims.fitting(forms, self._left) if forms else ({}, {})
        if not fit:
            return
        said = list(claims.messages(f'{{"t":"result","id":1,"main":{"true" if main else "false"}', fit, cut))
        self._left -= claims.cost(said, len(fit) + len(cut))
        try:
            descriptor = os.open(PLACE, _FLAGS, 0o600)
            with open(descriptor, "ab") as file:
                file.writelines(len(message).to_bytes(4, "big") + message for message in said)
        except OSError as exc:
            sys.stderr.write(f"a value could not be shown: {exc.strerror}\n")
