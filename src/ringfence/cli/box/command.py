"""`ringfence box VERB`."""

from __future__ import annotations

from pathlib import Path

import typer

from ringfence.cli import boxed, common
from ringfence.cli.box import execute, files, life, shell
from ringfence.cli.box.way import ConfigOption, IdArgument, done

box = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@box.callback()
def group() -> None:
    """Boxes to live in: what a step leaves, the next one finds, until the box is removed or its lifetime is over.

    \b
    ringfence box create                            prints the box's id
    ringfence box exec ID -c 'x = 6'                a step; variables stay
    ringfence box exec ID -c 'x * 7'
    ringfence box files put ID data.csv data.csv
    ringfence box list
    ringfence box rm ID
    """


box.command("create")(life.create)
box.command("list")(life.list_)
box.command("exec")(execute.exec_)
box.add_typer(files.files, name="files")
box.command("pause")(life.pause)
box.command("resume")(life.resume)
box.command("expose")(life.expose)
box.command("snapshot")(life.snapshot)
box.command("fork")(life.fork)
box.command("rm")(life.rm)
box.command("volume")(life.volume)
box.command("shell")(shell.shell)


@box.command()
def mcp(id: str = IdArgument, config_path: Path | None = ConfigOption) -> None:
    """Serve one box as an MCP server on stdin and stdout: Python, shell, files and processes, in this box alone.

    For the configuration of an MCP client. The tools are those of the gateway, without `session`: another box cannot be
    named. Each call goes the governed way and is on record. The box stays when the client goes.

    \b
    ringfence box mcp ID
    {"mcpServers": {"box": {"command": "ringfence", "args": ["box", "mcp", "ID"]}}}
    """
    settings = boxed.settings(config_path, None)
    try:
        done(lambda: common.loaded("ringfence.cli.box.serving").serve(settings, id))
    except KeyboardInterrupt:
        return
