"""`ringfence box exec`: a step in a box. Its exit code is the program's."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ringfence.cli import common, options, program
from ringfence.cli.box.shared import IdArgument, as_boxes, finish, sandbox
from ringfence.cli.streams import Sink, StdinPipe
from ringfence.cli.terminal import safe
from ringfence.core.box import Attached
from ringfence.sdk.client import given
from ringfence.sdk.execution import CommandResult, Execution, Logs, cell, command_result, value

_CHUNK = 65536
_CODES = {"success": 0, "timeout": 124, "killed": 137}
_Words = typer.Argument(None, metavar="FILE", help="Python source (`-`: from stdin).", show_default=False)
_Context = typer.Option(
    None, "--context", metavar="NAME", help="Another interpreter in the box, by a name that you choose."
)
_Env = typer.Option(None, "--env", metavar="K=V", help="A variable of this step. May be repeated.")
_Cwd = typer.Option(None, "--cwd", metavar="DIR", help="Where a --shell command runs. Default: /workspace.")
_Background = typer.Option(False, "--background", help="Start a --shell command, print its number, and return.")


def exec_(
    id: str = IdArgument,
    file: str | None = _Words,
    code: options.Code = None,
    shell: options.Shell = None,
    context: str | None = _Context,
    timeout: options.ProgramTimeout = None,
    env: list[str] | None = _Env,
    cwd: str | None = _Cwd,
    background: bool = _Background,
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Run Python in a box, with the variables and imports of earlier steps, or a shell command.

    Output is printed as it is written, and then the value of the last expression. What threads, tasks and processes of
    earlier steps wrote since the last step is printed on stderr. A --shell command gets our stdin unless that is a
    terminal. Ctrl-C interrupts the step; the box and its variables stay.

    The exit code is the program's: 1 for an exception. Ringfence's own are: 2 wrong usage or no such box, 124 timeout,
    125 the box itself failed, 126 refused by policy, 137 killed by a limit.

    \b
    ringfence box exec ID -c 'import pandas as pd; t = pd.read_csv("sales.csv")'
    ringfence box exec ID -c 't.describe()'
    ringfence box exec ID analysis.py --context other
    ringfence box exec ID --shell 'ls -l output' --timeout 5
    ringfence box exec ID --shell 'python3 train.py' --background
    """
    if (file is not None) + (code is not None) + (shell is not None) != 1:
        common.fail("give one of these: a FILE, -c CODE or --shell CMD (ringfence box exec --help)", 2)
    if shell is None and (background or cwd is not None):
        common.fail("--background and --cwd are for a --shell command", 2)
    if shell is not None and context is not None:
        common.fail("--context is for Python", 2)
    limits = None if timeout is None else {"wall_seconds": timeout}
    wanted = given(env=program.environment(env or []) or None, limits=limits)
    if shell is None:
        source = program.chosen([] if file is None else [file], code, None).code
        if source is None:
            common.fail(f"{file}: not Python; run it with --shell", 2)
        raise typer.Exit(
            finish(lambda: _python(config_path, id, {**wanted, **given(code=source, context=context)}, as_json))
        )
    wanted |= given(command=shell, cwd=cwd, background=background or None)
    raise typer.Exit(finish(lambda: _command(config_path, id, wanted, as_json)))


async def _python(config_path: Path | None, id: str, wanted: dict[str, Any], as_json: bool) -> int:
    async with sandbox(config_path, id) as box:
        sink = None if as_json else Sink()
        try:
            tell = None if sink is None else sink.tell
            ended = cell(await box.outcome("execute_python", wanted, Attached(tell=tell)))
        finally:
            if sink is not None:
                sink.close()
    if as_json:
        common.dump({**asdict(ended), "text": ended.text})
    else:
        _show(ended)
        _show_late(ended.late)
    return (sink.lost if sink is not None else None) or _code(ended)


def _show(ended: Execution) -> None:
    """Print the results and the error, after the output."""
    for result in ended.results:
        text = str(result)
        print(safe(text, lines=True) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    if ended.error is not None and ended.error.name != "SystemExit":
        error = ended.error
        text = error.traceback.rstrip("\n") or f"{error.name}: {error.value}"
        print(safe(text, lines=True), file=sys.stderr)
    if not ended.alive:
        print("ringfence: the interpreter is gone, with its variables; the next step has a fresh one", file=sys.stderr)


def _show_late(late: Logs) -> None:
    """Print what threads, tasks and processes of earlier steps wrote since the last step. On stderr: on stdout it would
    be taken for output of this step."""
    for name, pieces in (("stdout", late.stdout), ("stderr", late.stderr)):
        if text := "".join(pieces).rstrip("\n"):
            print(f"ringfence: {name} of what earlier steps left running:", file=sys.stderr)
            print(safe(text, lines=True), file=sys.stderr)


def _code(ended: Execution) -> int:
    if ended.status in _CODES:
        return _CODES[ended.status]
    if ended.error is not None and ended.error.name == "SystemExit":
        return _said(ended.error.value)
    status = ended.facts.get("exit_status")
    number = ended.facts.get("signal")
    return int(status) if status else 128 + int(number) if number else 1


def _said(value: str) -> int:
    """The exit code that the argument of SystemExit stands for, as in Python."""
    if value in ("", "None"):
        return 0
    return int(value) & 0xFF if value.removeprefix("-").isdecimal() else 1


async def _command(config_path: Path | None, id: str, wanted: dict[str, Any], as_json: bool) -> int:
    async with sandbox(config_path, id) as box:
        if wanted.get("background"):
            reply = value(await box.outcome("run_shell", wanted, Attached()))
            if as_json:
                common.dump({name: value for name, value in reply.items() if name != "facts"})
            else:
                print(reply["process"])
            return 0
        keys = _stdin() if StdinPipe.there() else None
        sink = None if as_json else Sink()
        try:
            attached = Attached(tell=None if sink is None else sink.tell, keys=keys)
            more = {"stdin": "stream"} if keys is not None else {}
            ended = command_result(await box.outcome("run_shell", {**wanted, **more}, attached))
        finally:
            if sink is not None:
                sink.close()
    if as_json:
        common.dump(asdict(ended))
    else:
        _explain(ended)
        _show_late(ended.late)
    return (sink.lost if sink is not None else None) or ended.exit_code


def _explain(ended: CommandResult) -> None:
    if ended.facts.get("ended") != "exited":
        print(f"ringfence: {safe(as_boxes(str(ended.facts.get('explanation'))))}", file=sys.stderr)


async def _stdin() -> AsyncIterator[bytes | tuple[int, int]]:
    while piece := await asyncio.to_thread(os.read, 0, _CHUNK):
        yield piece
