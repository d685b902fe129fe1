"""The command line as Typer takes and explains it, verb by verb."""

from __future__ import annotations

# ruff: noqa: PLC0415 - a verb, and what only errors need, is loaded when it is wanted
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from ringfence import __version__
from ringfence.cli import usage
from ringfence.cli.logs import log_to_stderr
from ringfence.cli.verbs import VERBS
from ringfence.core import system

_BOXED = ("run", "box", "host", "doctor", "wrap", "bench", "image")
"""Verbs that need boxes. On a system without them, they are not loaded."""
_NO_BOX = 125
_ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ringfence {__version__}")
        raise typer.Exit()


def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Print more on stderr."),
) -> None:
    """The layer between an AI agent and everything it can do: an MCP gateway with contracts, policy,
    approvals and an audit log that can be verified, and boxes for untrusted code.

    \b
    ringfence run -c 'print(6 * 7)'     run something in a box
    ringfence serve --demo              try it without any configuration
    ringfence check                     check ./ringfence.yaml
    ringfence audit explain last        why was the last call allowed or refused?
    """
    log_to_stderr(verbose=verbose)


class _Commands(TyperGroup):
    """Words of the command line come back in errors: what a terminal would act upon, or hide, is escaped there."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _escaped():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _escaped():
            return super().invoke(ctx)


@contextmanager
def _escaped() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        # Errors of usage; their class has no public name.
        if isinstance(exc, typer.BadParameter.__mro__[1]):
            exc.show = partial(usage.show, exc)  # type: ignore[attr-defined]
        raise


def command_line(words: list[str]) -> typer.Typer:
    """The commands. Only the verb that `words` name is loaded: `audit list` need not load a web server."""
    usage.install()
    app = typer.Typer(
        name="ringfence",
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    # No option before the verb takes a value, so the first word that is not an option is the verb.
    named = next((word for word in words if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        if verb != named:
            app.command(verb, help=summary)(_not_loaded)
            continue
        if verb in _BOXED and (why := system.no_boxes()) is not None:
            app.command(verb, context_settings=_ANY_WORDS)(_needing_linux(summary, why))
            continue
        found = load(verb)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)
    return app


def every_command() -> Any:
    """All commands, loaded, as Typer's own objects."""
    app = command_line([])
    app.registered_commands = []
    for verb in VERBS:
        found = load(verb) if verb not in _BOXED or system.no_boxes() is None else _not_loaded
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=verb)
        else:
            app.command(verb)(found)
    return typer.main.get_command(app)


def load(verb: str) -> Callable[..., None] | typer.Typer:
    """The function or the group of commands of a verb. Each is imported when it is named, and no other."""
    match verb:
        case "run":
            from ringfence.cli.run_command import run

            return run
        case "box":
            from ringfence.cli.box.command import box

            return box
        case "host":
            from ringfence.cli.host import host

            return host
        case "doctor":
            from ringfence.cli.doctor import doctor

            return doctor
        case "init":
            from ringfence.cli.init.command import init

            return init
        case "wrap":
            from ringfence.cli.wrap import wrap

            return wrap
        case "serve":
            from ringfence.cli.serve import serve

            return serve
        case "check":
            from ringfence.cli.check import check

            return check
        case "policy":
            from ringfence.cli.policy import policy

            return policy
        case "can":
            from ringfence.cli.can import can

            return can
        case "call":
            from ringfence.cli.call import call

            return call
        case "undo":
            from ringfence.cli.undo import undo

            return undo
        case "approvals":
            from ringfence.cli.approvals import approvals

            return approvals
        case "audit":
            from ringfence.cli.audit import audit

            return audit
    return _load_other(verb)


def _load_other(verb: str) -> Callable[..., None] | typer.Typer:
    """Verbs of the operator."""
    match verb:
        case "token":
            from ringfence.cli.token import token

            return token
        case "top":
            from ringfence.cli.top import top

            return top
        case "console":
            from ringfence.cli.console import console

            return console
        case "image":
            from ringfence.cli.image import image

            return image
        case "state":
            from ringfence.cli.state import state

            return state
        case "bench":
            from ringfence.cli.bench.command import bench

            return bench
        case "completion":
            from ringfence.cli import completion

            return completion.verb(every_command)
    raise AssertionError(f"no verb {verb}")


def _needing_linux(summary: str, why: str) -> Callable[[], None]:
    """The command of a verb that does not work on this system: it says why."""

    def command() -> None:
        print(f"ringfence: {why}", file=sys.stderr)
        raise typer.Exit(_NO_BOX)

    command.__doc__ = f"{summary}\n\nNot on this system: {why}"
    return command


def _not_loaded() -> None:
    """The placeholder of a verb that was not named, for the list of commands."""
