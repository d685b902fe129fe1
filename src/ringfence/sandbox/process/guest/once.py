"""What a program that runs once shows as a cell would: `display`, figures, the value at its end, magic commands.

Such a program has no channel to its supervisor. What it shows goes into a file of its box, as claims (`claims`), each
after its length; the supervisor reads that when everything in the box has ended, and trusts none of it.
"""

from __future__ import annotations

import os
import sys

from ringfence.sandbox.process.guest import claims, display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

PLACE = "/workspace/tmp/.shown"
_MAX_BYTES = 8 * 1024 * 1024
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Once(display.Notebook):
    def __init__(self, names: dict[str, Any], paths: list[str], process: int) -> None:
        """`paths` are where modules of the standard library are found; `process` is the one that may show something."""
        super().__init__(names)
        self._process = process
        self._left = _MAX_BYTES
        display.remember_paths(paths)

    def answer(self, value: object) -> None:
        """Show the value of the last expression."""
        self._claim(display.forms(value, self._figures), main=True)

    def finish(self) -> None:
        """The program is over."""
        if self._shell is not None:
            self._shell.finish()
        self.show_figures()

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
