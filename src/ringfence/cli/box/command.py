"""`ringfence box VERB`."""

from __future__ import annotations

import typer

from ringfence.cli import common, options
from ringfence.cli.box import execute, files, lifecycle, shell
from ringfence.cli.box.shared import IdArgument, finish

box = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@box.callback()
def group() -> None:
    """Boxes that stay (sessions): what one step leaves, the next one finds, until the box is removed or its time is up.

    \b
    ringfence box create                            prints the box's id
    ringfence box exec ID -c 'x = 6'                a step; variables stay
    ringfence box exec ID -c 'x * 7'
    ringfence box files put ID data.csv data.csv
    ringfence box list
    ringfence box rm ID
    """


box.command("create")(lifecycle.create)
box.command("list", short_help="List your boxes and their states.")(lifecycle.list_)
box.command("exec", short_help="Run Python or a shell command in a box.")(execute.exec_)
box.add_typer(files.files, name="files")
box.command("pause", short_help="Freeze a box until it is used or resumed.")(lifecycle.pause)
box.command("resume")(lifecycle.resume)
box.command("expose", short_help="Forward a port of a box to this machine's loopback.")(lifecycle.expose)
box.command("snapshot", short_help="Save the files of a box to start others from.")(lifecycle.snapshot)
box.command("fork", short_help="Copy a box's files into new boxes.")(lifecycle.fork)
box.command("rm", short_help="Remove boxes, snapshots or volumes.")(lifecycle.rm)
box.command("volume", short_help="Create a volume, a folder that outlives boxes.")(lifecycle.volume)
box.command("shell", short_help="Open a shell in a box.")(shell.shell)


@box.command(short_help="Serve one box as an MCP server on stdio.")
def mcp(id: str = IdArgument, config_path: options.OwnConfig = None) -> None:
    """Serve one box as an MCP server on stdin and stdout: Python, shell, files and processes, in this box alone.

    For the configuration of an MCP client. The tools are those of the gateway, without `session`: no other box can be
    named. Each call is governed and on record. The box stays when the client ends.

    \b
    ringfence box mcp ID
    {"mcpServers": {"box": {"command": "ringfence", "args": ["box", "mcp", "ID"]}}}
    """
    from ringfence.cli.box import mcp_server  # noqa: PLC0415 - loads the whole gateway

    settings = common.own_config(config_path)
    try:
        finish(lambda: mcp_server.serve(settings, id))
    except KeyboardInterrupt:
        return
