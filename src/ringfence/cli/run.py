"""`ringfence run`: a program in a fresh box. Its exit code is the program's."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ringfence.cli import common, options, program
from ringfence.cli.common import EXIT_CODES, TerminalChannel
from ringfence.cli.streams import Sink, StdinPipe
from ringfence.cli.terminal import json_text, safe
from ringfence.config.settings import Config
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json, Outcome, Status

if TYPE_CHECKING:
    from ringfence.compose.run_request import RunRequest

_MOST_NAMED = 10

_Words = typer.Argument(
    None, metavar="[FILE] [-- ARGS…]", help="A program (`-`: from stdin), and its arguments.", show_default=False
)
_Output = typer.Option(None, "--output", metavar="DIR", help="The folder to copy the files of /workspace/output to.")
_Env = typer.Option(None, "--env", metavar="K=V", help="A variable of the program. May be repeated.")
_Secrets = typer.Option(
    None,
    "--secret",
    metavar="NAME",
    help="A secret of the configuration: the program finds a placeholder for it in its environment. May be repeated.",
)
_Facts = typer.Option(None, "--facts", metavar="FILE", help="Write the facts as JSON; `-`: to stderr.")
_Batch = typer.Option(
    None,
    "--batch",
    metavar="FILE",
    help="Programs, one JSON value a line: Python source, or `{code, id, timeout, env}` (`-`: from stdin).",
)
_Workers = typer.Option(
    None, "--workers", min=1, metavar="N", help="How many of a batch run at a time. Default: 2 for each processor."
)
_Fresh = typer.Option(False, "--fresh", help="Give it an address layout and hash seed that no other box has.")
_Trees = typer.Option(
    None, "--tree", metavar="DIR", help="A folder that is readable in the box, at the same path. May be repeated."
)


def run(
    words: list[str] | None = _Words,
    code: options.Code = None,
    shell: options.Shell = None,
    batch: str | None = _Batch,
    workers: int | None = _Workers,
    backend: options.Backend = None,
    timeout: options.ProgramTimeout = None,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    allow: options.Allow = None,
    listen: options.Listen = False,
    package: options.Packages = None,
    allow_package: options.AllowPackages = None,
    inputs: options.Inputs = None,
    output: Path | None = _Output,
    env: list[str] | None = _Env,
    secret: list[str] | None = _Secrets,
    facts: str | None = _Facts,
    template: options.Template = None,
    fresh: bool = _Fresh,
    tree: list[Path] | None = _Trees,
    config_path: options.OwnConfig = None,
) -> None:
    """Run a program in a fresh box: without network, with only the files that you name, and with limits.

    FILE is Python source. A file that ends in .js or .sh, or names another interpreter in its first line, is run by
    that. Stdin is passed on unless it is a terminal. The working folder is /workspace, with input/, output/ and tmp/.

    The exit code is the program's, or 128+n if signal n killed it. Ringfence's own are: 2 wrong usage, 124 timeout,
    125 the box itself failed, 126 refused by policy, 137 killed by a limit.

    With --batch, each program has a box of its own, the options hold for all of them, and a line of JSON is printed
    for each, in their order: {"id", "status", "exit_status", "stdout", "stderr", "error", "ended", "facts"}, and
    "truncated": true where not all of the output is in it. The exit code is 0 if every program exited with status 0,
    else 1, or 125 if no box could be made.

    \b
    ringfence run script.py -- --verbose data.csv     a file, with arguments
    ringfence run -c 'print(6 * 7)'                   a line of Python
    ringfence run --shell 'wc -l input/*' --input data.csv
    ringfence run train.py --timeout 300 --memory 2G --output results/
    echo 1 2 3 | ringfence run -c 'print(sum(map(int, input().split())))'
    ringfence run fetch.py --allow api.example.com:443 --allow '*.cdn.example.com'
    ringfence run untrusted.js --facts facts.json     what it did, as the supervisor saw it
    ringfence run --batch programs.jsonl --workers 8 --timeout 10 > results.jsonl
    """
    from ringfence.compose.run_request import RunRequest  # noqa: PLC0415 - `--help` need not load it

    _one_or_many(batch, {"FILE": words, "-c": code, "--shell": shell, "--facts": facts}, workers)
    chosen = program.chosen(list(words or ()), code, shell) if batch is None else program.RunTarget(code="")
    wanted = RunRequest(
        code=chosen.code,
        command=chosen.command,
        argv=chosen.argv,
        name=chosen.name,
        env=program.environment(env or []),
        limits=_limits(timeout, memory, disk, pids),
        inputs=program.inputs(inputs or [], chosen.script),
        output=program.output_folder(output),
        network=program.places(allow or []),
        trees=program.trees(tree or []),
        packages=tuple(package or ()),
        allow_packages=tuple(allow_package or ()),
        secrets=tuple(secret or ()),
        listen="allowed" if listen else None,
        template=template,
        layout="fresh" if fresh else None,
    )
    if batch is not None:
        from ringfence.cli.batch import read_batch, run_batch  # noqa: PLC0415 - most run one program

        programs = read_batch(batch, wanted)
        raise typer.Exit(common.run(run_batch, programs, common.own_config(config_path, backend), workers))
    settings = common.own_config(config_path, backend)
    if facts is not None and facts != "-" and wanted.output and Path(facts).resolve().is_relative_to(wanted.output):
        common.fail(f"--facts {facts}: is in the folder of --output, where the program chooses what each file holds", 2)
    report = FactsFile(facts)
    raise typer.Exit(common.run(run_program, wanted, settings, report, not chosen.reads_stdin))


def _one_or_many(batch: str | None, of_one: Mapping[str, object], workers: int | None) -> None:
    """A batch has what is said of one program in its lines."""
    if batch is None and workers is not None:
        common.fail("--workers: how many programs of a --batch run at a time; there is none", 2)
    for option, given in of_one.items():
        if batch is not None and given is not None and given != []:
            why = "the facts are in each line of the output" if option == "--facts" else "the programs are in its lines"
            common.fail(f"--batch and {option}: give one of them; with --batch, {why}", 2)


def _limits(timeout: float | None, memory: int | None, disk: int | None, pids: int | None) -> dict[str, float]:
    if timeout is not None and not math.isfinite(timeout):
        common.fail("--timeout: not a number of seconds", 2)
    given = {"memory_bytes": memory, "disk_bytes": disk, "wall_seconds": timeout, "processes": pids}
    return {name: value for name, value in given.items() if value is not None}


# ── The run ───────────────────────────────────────────────────────────────────────────────────────


class FactsFile:
    """The file for --facts. It is opened first: a run whose facts could not be written is not begun."""

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            try:
                descriptor = os.dup(2) if path == "-" else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                self._file = os.fdopen(descriptor, "w", encoding="utf-8")
            except OSError as exc:
                common.fail(f"--facts {path}: {exc.strerror}", 2)

    def write(self, facts: Json) -> None:
        if self._file is not None:
            with self._file as file:
                file.write(json_text(facts) + "\n")


async def run_program(wanted: RunRequest, configured: Config, report: FactsFile, with_stdin: bool) -> int:
    """Run the program in a box of this process, streamed and on record; returns the exit code."""
    from ringfence.compose.runs import Runs  # noqa: PLC0415 - as above

    sink = Sink()
    source = StdinPipe() if with_stdin and StdinPipe.there() else None
    if source is not None:
        wanted = replace(wanted, stdin=source.descriptor)
    outcome: Outcome | None = None
    terminal = TerminalChannel.under(configured)
    try:
        with common.ended_by_signals() as stop:
            loop = asyncio.get_running_loop()
            sink.on_broken = lambda: loop.call_soon_threadsafe(stop.end, common.BROKEN_PIPE)
            async with Runs.open(configured) as runs:
                outcome = await runs.run(wanted, origin="cli", tell=sink.tell, channel=terminal)
    except RingfenceError as exc:
        _say(str(exc))
        return common.NO_BOX
    finally:
        sink.close()
        if source is not None:
            source.close()
    lost = sink.lost
    if outcome is None:
        return lost or (stop.code if stop.code is not None else common.NO_BOX)
    if wanted.output is not None:
        _name_left_out(outcome)
    code = _ended(outcome, sink, report)
    if outcome.status is Status.APPROVAL_REQUIRED and outcome.approval_id is not None:
        terminal.left_open(outcome.approval_id)
    return lost or code


def _ended(outcome: Outcome, sink: Sink, report: FactsFile) -> int:
    report.write(outcome.facts)
    if outcome.result is not None and outcome.ran is None:
        _show(outcome.structured)  # output that a contract redacts is not streamed
    plain = outcome.ran is not None and outcome.ran.report.ended == "exited"
    if not plain:
        text = outcome.facts.get("explanation") or str(outcome.status)
        if outcome.message:
            refused = outcome.status in (Status.VALIDATION_FAILURE, Status.DENIED, Status.UNAVAILABLE)
            text = f"{outcome.message}; nothing was run" if refused else f"{outcome.message} ({text})"
        _say(text)
    if outcome.ran is not None and outcome.status in (Status.SUCCESS, Status.FAILED):
        seen = outcome.ran.report
        return 128 + seen.signal if seen.signal is not None else seen.exit_status or 0
    if outcome.status in (Status.SUCCESS, Status.FAILED) and isinstance(outcome.facts.get("exit_status"), int):
        return int(outcome.facts["exit_status"])
    return EXIT_CODES[outcome.status]


def _name_left_out(outcome: Outcome) -> None:
    """Say what of /workspace/output was not copied; facts have all of it."""
    skipped = dict(outcome.facts.get("skipped", {}))
    for path in list(skipped)[:_MOST_NAMED]:
        _say(f"not copied: {safe(path)}: {safe(skipped[path])}")
    if len(skipped) > _MOST_NAMED:
        _say(f"not copied: {len(skipped) - _MOST_NAMED} more; --facts names them")


def _show(structured: object) -> None:
    if not isinstance(structured, dict):
        return
    for name, file in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        text = structured.get(name)
        if isinstance(text, str):
            file.write(safe(text, lines=True) if file.isatty() else text)
            file.flush()


def _say(text: str) -> None:
    print(f"ringfence: {safe(text, lines=True)}", file=sys.stderr, flush=True)
