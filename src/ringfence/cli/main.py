"""The command line, verb by verb."""

from __future__ import annotations

import logging
import sys

import typer

from ringfence import __version__
from ringfence.cli.bench.command import bench
from ringfence.cli.serve import serve

app = typer.Typer(
    name="ringfence",
    help="The layer between an AI agent and everything it can do: an MCP gateway with contracts, policy, "
    "approvals and an audit log that can be checked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(bench)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ringfence {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more on stderr."),
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
