"""The command line, verb by verb."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import import_module

import typer

from ringfence import __version__, system
from ringfence.cli.terminal import safe
from ringfence.errors import RingfenceError

VERBS = {
    "run": "Run a program in a fresh box.",
    "box": "Boxes to live in: make, use, pause, fork and remove them.",
    "host": "Say what this host gives to boxes, and mend what is missing.",
    "doctor": "Try on this host what boxes promise.",
    "init": "Write a first ringfence.yaml, also from the servers that an MCP client has.",
    "wrap": "Run any stdio MCP server in a box, as a drop-in command.",
    "serve": "Serve the gateway that a ringfence.yaml describes.",
    "check": "Read a ringfence.yaml and say everything that is wrong with it.",
    "call": "Call one tool, through a running gateway or in this process.",
    "approvals": "See what waits for a person, and answer it.",
    "audit": "Read, explain, verify and export the audit log.",
    "bench": "Measure what calls and boxes cost on this machine.",
}
_BOXED = ("run", "box", "host", "doctor", "wrap", "bench")
"""Verbs that are about boxes alone. Where there can be none, nothing of them is loaded."""
_NO_BOX = 125
_MODULES = {"bench": "bench.command", "box": "box.command", "init": "init.command"}


_NO_RE2 = (
    "RE2, which patterns and redaction need, is not installed: pip install google-re2 "
    "(on musl it is built from source: docs/other-systems.md)"
)
_ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ringfence {__version__}")
        raise typer.Exit()


def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more on stderr."),
) -> None:
    """The layer between an AI agent and everything it can do: an MCP gateway with contracts, policy,
    approvals and an audit log that can be checked, and boxes for whatever code comes along.

    \b
    ringfence run -c 'print(6 * 7)'     run something in a box
    ringfence serve --demo              try it without any configuration
    ringfence check                     is ./ringfence.yaml right?
    ringfence audit explain last        why was the last call allowed or refused?
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def command_line(words: list[str]) -> typer.Typer:
    """The commands. Only the verb that `words` name is loaded: to list the log one need not load a web server."""
    app = typer.Typer(
        name="ringfence",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    # No option before the verb takes a value, so the first word that is no option is the verb.
    named = next((word for word in words if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb != named:
            app.command(verb, help=summary)(_not_loaded)
            continue
        if verb in _BOXED and (why := system.no_boxes()) is not None:
            app.command(verb, context_settings=_ANY_WORDS)(_needing_linux(summary, why))
            continue
        found = getattr(import_module(f"ringfence.cli.{_MODULES.get(verb, verb)}"), verb)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)
    return app


def _needing_linux(summary: str, why: str) -> Callable[[], None]:
    """A verb that can only say what it would do elsewhere."""

    def command() -> None:
        print(f"ringfence: {why}", file=sys.stderr)
        raise typer.Exit(_NO_BOX)

    command.__doc__ = f"{summary}\n\nNot on this system: {why}"
    return command


def _not_loaded() -> None:
    """Stands in the list of commands for a verb that was not named."""


def main() -> None:
    try:
        command_line(sys.argv[1:])()
    except RingfenceError as exc:
        _fail(str(exc))
    except ModuleNotFoundError as exc:
        if exc.name != "re2":
            raise
        _fail(_NO_RE2)
    except OSError as exc:
        _fail(f"{exc.filename}: {exc.strerror}" if exc.filename and exc.strerror else str(exc))


def _fail(text: str) -> None:
    """Whatever a verb did not expect ends as one sentence; its text may quote anybody."""
    print(safe(text, lines=True), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
