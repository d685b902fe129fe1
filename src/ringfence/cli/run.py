"""`ringfence run`: a program in a fresh box. Its exit code is the program's.

It starts as fast as it can: what only some runs need is loaded by those.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ringfence.cli import named_paths, program, running
from ringfence.cli.running import EXIT_CODES, TerminalChannel
from ringfence.cli.streams import Sink, StdinPipe
from ringfence.cli.terminal import json_text, safe
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import Runs
from ringfence.config.settings import Config
from ringfence.core.box import Stream
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json, Outcome, Status

_MAX_NAMED = 10
_STREAMS = ("/dev/", "/proc/self/fd/")
"""What the shell and the system name streams by, which are links."""


def perform(
    *,
    words: list[str] | None = None,
    code: str | None = None,
    shell: str | None = None,
    batch: str | None = None,
    workers: int | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    memory: int | None = None,
    disk: int | None = None,
    pids: int | None = None,
    allow: list[str] | None = None,
    listen: bool = False,
    package: list[str] | None = None,
    allow_package: list[str] | None = None,
    inputs: list[Path] | None = None,
    output: Path | None = None,
    env: list[str] | None = None,
    secret: list[str] | None = None,
    facts: str | None = None,
    template: str | None = None,
    image: str | None = None,
    fresh: bool = False,
    tree: list[Path] | None = None,
    config_path: Path | None = None,
) -> NoReturn:
    """What `ringfence run` does with its options; sizes are in bytes. It ends this process."""
    _one_or_many(batch, {"FILE": words, "-c": code, "--shell": shell, "--facts": facts}, workers)
    chosen = (
        program.chosen(list(words or ()), code, shell, in_image=image is not None)
        if batch is None
        else program.RunTarget(code="")
    )
    wanted = RunRequest(
        code=chosen.code,
        command=chosen.command,
        argv=chosen.argv,
        name=chosen.name,
        env=program.environment(env or []),
        limits=_limits(timeout, memory, disk, pids),
        inputs=program.inputs(inputs or [], chosen.script),
        output=None if output is None else named_paths.resolve("--output", output),
        network=program.places(allow or []),
        trees=program.trees(tree or []),
        packages=tuple(package or ()),
        allow_packages=tuple(allow_package or ()),
        secrets=tuple(secret or ()),
        listen="allowed" if listen else None,
        template=template,
        image=None if image is None else program.image(image),
        layout="fresh" if fresh else None,
    )
    settings = running.own_config(config_path, backend)
    if wanted.output is not None:
        program.check_output("--output", wanted.output, settings)
        program.output_folder(wanted.output)
    if batch is not None:
        from ringfence.cli.batch import read_batch, run_batch  # noqa: PLC0415 - most run one program

        raise SystemExit(running.run(run_batch, read_batch(batch, wanted), settings, workers))
    if facts is not None and facts != "-" and wanted.output and Path(facts).resolve().is_relative_to(wanted.output):
        why = "is in the folder of --output, where the program chooses what each file holds"
        running.fail(f"--facts {facts}: {why}", 2)
    report = FactsFile(facts)
    raise SystemExit(running.run(run_program, wanted, settings, report, not chosen.reads_stdin))


def _one_or_many(batch: str | None, of_one: Mapping[str, object], workers: int | None) -> None:
    """A batch has what is said of one program in its lines."""
    if batch is None and workers is not None:
        running.fail("--workers: how many programs of a --batch run at a time; there is none", 2)
    for option, given in of_one.items():
        if batch is not None and given is not None and given != []:
            why = "the facts are in each line of the output" if option == "--facts" else "the programs are in its lines"
            running.fail(f"--batch and {option}: give one of them; with --batch, {why}", 2)


def _limits(timeout: float | None, memory: int | None, disk: int | None, pids: int | None) -> dict[str, float]:
    if timeout is not None and not math.isfinite(timeout):
        running.fail("--timeout: not a number of seconds", 2)
    given = {"memory_bytes": memory, "disk_bytes": disk, "wall_seconds": timeout, "processes": pids}
    return {name: value for name, value in given.items() if value is not None}


# ── The run ───────────────────────────────────────────────────────────────────────────────────────


class FactsFile:
    """The file for --facts. It is opened first: a run whose facts could not be written is not begun."""

    def __init__(self, path: str | None) -> None:
        self._file = None
        if path is not None:
            try:
                descriptor = os.dup(2) if path == "-" else _created(path)
                self._file = os.fdopen(descriptor, "w", encoding="utf-8")
            except (OSError, ValueError) as exc:
                running.fail(f"--facts {path}: {exc.strerror if isinstance(exc, OSError) else exc}", 2)

    def write(self, facts: Json) -> None:
        if self._file is not None:
            with self._file as file:
                file.write(json_text(facts) + "\n")


def _created(path: str) -> int:
    """An empty file in the place of the one that may be there, which may also be another's by a second name. Raises
    OSError, ValueError."""
    from ringfence.sandbox.files.paths import open_without_links  # noqa: PLC0415 - most write no facts

    if os.path.abspath(path).startswith(_STREAMS):
        return os.open(path, os.O_WRONLY)
    real = named_paths.resolve("--facts", Path(path))
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(real.lstat().st_mode):  # a pipe with a reader
            return os.open(real, os.O_WRONLY | os.O_NOFOLLOW)
    folder = open_without_links(str(real.parent), os.O_RDONLY | os.O_DIRECTORY)
    try:
        part = f".ringfence-{secrets.token_hex(8)}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            os.rename(part, real.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(part, dir_fd=folder)
            os.close(descriptor)
            raise
        return descriptor
    finally:
        os.close(folder)


async def run_program(wanted: RunRequest, configured: Config, report: FactsFile, with_stdin: bool) -> int:
    """Run the program in a box of this process, streamed and on record; returns the exit code."""
    sink = Sink()
    source = StdinPipe() if with_stdin and StdinPipe.there() else None
    if source is not None:
        wanted = replace(wanted, stdin=source.descriptor)
    outcome: Outcome | None = None
    terminal = TerminalChannel.under(configured)
    try:
        with running.ended_by_signals() as stop:
            loop = asyncio.get_running_loop()
            sink.on_broken = lambda: loop.call_soon_threadsafe(stop.end, running.BROKEN_PIPE)
            async with Runs.open(configured, keep_ready=0) as runs:
                gc.freeze()
                gc.enable()
                with _installing(wanted, sink) as tell:
                    outcome = await runs.run(wanted, origin="cli", tell=tell, channel=terminal)
    except RingfenceError as exc:
        _say(str(exc))
        return running.NO_BOX
    finally:
        sink.close()
        if source is not None:
            source.close()
    lost = sink.lost
    if outcome is None:
        return lost or (stop.code if stop.code is not None else running.NO_BOX)
    if wanted.output is not None:
        _name_left_out(outcome)
    code = _ended(outcome, sink, report)
    if outcome.status is Status.APPROVAL_REQUIRED and outcome.approval_id is not None:
        terminal.left_open(outcome.approval_id)
    return lost or code


@contextmanager
def _installing(wanted: RunRequest, sink: Sink) -> Iterator[Callable[[Stream, bytes], None]]:
    """While packages are installed, which may take long, a terminal shows that. Yields what is told of the output."""
    if not wanted.packages and wanted.image is None:
        yield sink.tell
        return
    from ringfence.cli.progress import progress  # noqa: PLC0415 - most install nothing

    what = f"installing {' '.join(wanted.packages)}" if wanted.packages else f"getting {wanted.image}"
    with progress(what) as line:

        def tell(stream: Stream, data: bytes) -> None:
            line.end()
            sink.tell(stream, data)

        yield tell


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
    elif outcome.status is Status.FAILED:
        _hint(outcome, sink)
    if outcome.ran is not None and outcome.status in (Status.SUCCESS, Status.FAILED):
        seen = outcome.ran.report
        return 128 + seen.signal if seen.signal is not None else seen.exit_status or 0
    if outcome.status in (Status.SUCCESS, Status.FAILED) and isinstance(outcome.facts.get("exit_status"), int):
        return int(outcome.facts["exit_status"])
    return EXIT_CODES[outcome.status]


def _hint(outcome: Outcome, sink: Sink) -> None:
    """Say what may help a program that failed for want of a package or the network."""
    from ringfence.cli.hints import hint  # noqa: PLC0415 - most do not fail

    said = hint(sink.last_stderr.decode("utf-8", "replace"), outcome.facts)
    if said is not None:
        _say(said)


def _name_left_out(outcome: Outcome) -> None:
    """Say what of /workspace/output was not copied; facts have all of it."""
    skipped = dict(outcome.facts.get("skipped", {}))
    for path in list(skipped)[:_MAX_NAMED]:
        _say(f"not copied: {safe(path)}: {safe(skipped[path])}")
    if len(skipped) > _MAX_NAMED:
        _say(f"not copied: {len(skipped) - _MAX_NAMED} more; --facts names them")


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
