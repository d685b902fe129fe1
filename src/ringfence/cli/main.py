"""The program `ringfence`.

Every verb is read, run and explained by Typer, which takes longer to load than a box takes to run. So what has one
meaning needs no Typer: `--version`, `--help`, and `run` with words that are well-formed. All else is for `commands`.
"""

from __future__ import annotations

import gc
import sys

from ringfence import __version__
from ringfence.cli.verbs import VERBS as VERBS
from ringfence.cli.verbs import overview

# Not from typing, which is larger than all that `--version` needs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    import typer

_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
_NO_RE2 = (
    "RE2, which patterns and redaction need, is not installed: pip install google-re2 "
    "(on musl it is built from source: docs/other-systems.md)"
)


def main() -> None:
    words = sys.argv[1:]
    gc.disable()  # while modules are loaded, whatever it looked at would be found to be in use
    try:
        if words == ["--version"]:
            print(f"ringfence {__version__}")
        elif words in (["--help"], ["-h"]) and (text := overview()) is not None:
            print(text, end="")
        elif words[:1] != ["run"] or not _ran(words[1:]):
            command = _gateway(words) if words[:1] == ["serve"] else command_line(words)
            gc.freeze()
            gc.enable()
            command(prog_name="ringfence")
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as exc:  # `_fail` raises again what is no error of ours or of the system
        _fail(exc)


def command_line(words: list[str]) -> typer.Typer:
    """The commands. Only the verb that `words` name is loaded: `audit list` need not load a web server."""
    from ringfence.cli import commands

    return commands.command_line(words)


def _gateway(words: list[str]) -> typer.Typer:
    """The command `serve`: a client that started it on its own pipe waits until it is loaded."""
    # ruff: noqa: PLC0415
    from ringfence.core import deferred

    deferred.enable()
    with deferred.loading():
        return command_line(words)


def _ran(words: list[str]) -> bool:
    """Run a program as these words say, and enable the collector when all is loaded. It does not return, unless they
    are for Typer."""
    from ringfence.core import deferred, system

    if system.no_boxes() is not None:
        return False
    deferred.enable()
    with deferred.loading():
        from ringfence.cli import run_words

        given = run_words.read(words)
        if given is None:
            return False
        from ringfence.cli import logs, run

    logs.log_to_stderr()
    try:
        run.perform(**given)
    except SystemExit as end:
        _leave(end)


def _leave(end: SystemExit) -> NoReturn:
    """End this process at once: to take apart all that was loaded takes longer than a box. What is open by now is for
    the system to close."""
    import atexit
    import os
    import threading

    if not isinstance(end.code, int) or threading.active_count() > 1:
        raise end
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        raise end from None  # the interpreter has its own way to say so
    os._exit(end.code)


def _fail(exc: Exception) -> None:
    """An error that a verb did not expect ends as one sentence. Its text may quote untrusted input."""
    from ringfence.cli.terminal import painted, safe
    from ringfence.core.errors import RingfenceError

    if isinstance(exc, RingfenceError):
        text = str(exc)
    elif isinstance(exc, ModuleNotFoundError) and exc.name == "re2":
        text = _NO_RE2
    elif isinstance(exc, UnicodeEncodeError):
        text = "a name of a file or folder that this needs is not UTF-8 text; rename it, or work elsewhere"
    elif isinstance(exc, OSError):
        text = f"{exc.filename}: {exc.strerror}" if exc.filename and exc.strerror else str(exc)
    else:
        raise exc
    print(painted(safe(text, lines=True), "error", sys.stderr), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
