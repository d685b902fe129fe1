"""Searches the output of boxes for secrets before it is shown: streams as they come, captured output, files.

Streams and texts are searched for known secrets and for what has the shape of one. Files are searched for known secrets
alone, since a shape may be just what the program was to make, and keep their length.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.core.aio import in_thread
from ringfence.core.box import Attached, BoxReport, Captured, FileFact, Shown, Stream
from ringfence.core.sessions import CellReport, Failure, StepReport
from ringfence.secrets.redaction import MAX_HELD, Redacted, RedactingStream, SearchedText, TenantRedactor, searched

_OUTPUT = "/workspace/output/"
_PIECE = 1 << 20
_MAX_PROBLEMS = 5
_LONG = 100_000
"""A text that is longer is searched beside the loop."""


class OutputScreen:
    """All output of one call passes through it. It counts what it removed, by rule and by secret."""

    patience_seconds = 0.1
    """How long the last bytes of a stream wait for what follows."""

    def __init__(self, shown: TenantRedactor | None = None, kept: TenantRedactor | None = None) -> None:
        """`shown` is for what is read, `kept` for files."""
        self._shown = shown
        self._kept = kept
        self._streams: dict[Stream, RedactingStream] = {}
        self._clocks: dict[Stream, asyncio.TimerHandle] = {}
        self._attached: Attached | None = None
        self.rules: dict[str, int] = {}
        self.secrets: dict[str, int] = {}

    def holds_secret(self, texts: Iterable[str]) -> bool:
        """Whether a known secret stands in what is to be kept as it is."""
        return self._kept is not None and self._kept.knows("\n".join(texts).encode("utf-8", "surrogatepass"))

    # ── As it comes ──

    def attached(self, attached: Attached) -> Attached:
        """The same, with everything for the caller searched first."""
        if self._shown is None or (attached.tell is None and attached.shown is None):
            return attached
        self._attached = attached
        tell = None if attached.tell is None else self._tell
        shown = None if attached.shown is None else self._was_shown
        return replace(attached, tell=tell, shown=shown)

    def _tell(self, stream: Stream, data: bytes) -> None:
        assert self._shown is not None and self._attached is not None and self._attached.tell is not None
        searched = self._streams.get(stream)
        if searched is None:
            searched = self._streams[stream] = self._shown.stream()
        if clean := searched.feed(data):
            self._attached.tell(stream, clean)
        if (clock := self._clocks.pop(stream, None)) is not None:
            clock.cancel()
        if searched.held:
            self._clocks[stream] = asyncio.get_running_loop().call_later(self.patience_seconds, self._rest, stream)

    def _rest(self, stream: Stream) -> None:
        attached = self._attached
        searched = self._streams.get(stream)
        if searched is None or attached is None or attached.tell is None:
            return
        if clean := searched.release():
            attached.tell(stream, clean)

    def _was_shown(self, value: Any) -> None:
        assert self._attached is not None and self._attached.shown is not None
        quiet = OutputScreen(self._shown)  # the report has it again, and is counted
        self._attached.shown(quiet.failure(value) if isinstance(value, Failure) else quiet.value(value))

    def finish(self) -> None:
        """The output has ended: hand on what waited."""
        for clock in self._clocks.values():
            clock.cancel()
        for stream in tuple(self._streams):
            self._rest(stream)
        self._streams.clear()

    # ── Page by page ──
    #
    # A reader chooses where a page begins and ends, and could have a secret shown in pieces that are none. So a page is
    # searched together with what stands before and after it, and what is found there goes as a whole.

    def around(self, patterns: Sequence[str] = ()) -> int:
        """How many bytes before and behind a page are searched with it."""
        if self._shown is None or self._shown.idle:
            return MAX_HELD if patterns else 0
        return max(MAX_HELD, min(self._shown.values.reach, _PIECE))

    @property
    def reach(self) -> int:
        """How many bytes of a known secret may be missing at a place where a text was cut, at most."""
        return 0 if self._shown is None or self._shown.idle else max(0, self._shown.values.reach - 1)

    async def searched(self, data: bytes, patterns: Sequence[str] = ()) -> SearchedText:
        """A text of which pages are to be shown, without what an operator's own patterns find, too."""
        values = None if self._shown is None or self._shown.idle else self._shown.values
        if len(data) <= _LONG:
            return searched(data, values, patterns)
        return await in_thread(lambda: searched(data, values, patterns))

    def masked(self, data: bytes, start: int, stop: int) -> bytes:
        """A page of what is no text: known secrets alone are searched, and it stays as long as it was."""
        values = None if self._kept is None or self._kept.idle else self._kept.values
        return self.counted(searched(data, values).masked(start, stop))

    def went_before(self, stream: Stream, data: bytes) -> None:
        """What the caller has of a stream already."""
        if self._shown is not None and data:
            begun = self._streams[stream] = self._shown.stream()
            begun.went_before(data)

    # ── When it is over ──

    def report(self, report: BoxReport) -> BoxReport:
        if self._shown is None:
            return report
        stdout = self._captured(report.stdout)
        stderr = self._captured(report.stderr)
        if stdout is not report.stdout or stderr is not report.stderr:
            report = replace(report, stdout=stdout, stderr=stderr)
        if report.late_stdout.total or report.late_stderr.total:
            out, err = self._captured(report.late_stdout), self._captured(report.late_stderr)
            report = replace(report, late_stdout=out, late_stderr=err)
        if report.shown:
            report = replace(report, shown=tuple(map(self.value, report.shown)))
        if report.trouble:
            report = replace(report, trouble=tuple(map(self._text, report.trouble)))
        return report

    def step(self, step: StepReport) -> StepReport:
        if self._shown is None:
            return step
        cell = step.cell
        report = self.report(cell.report)
        results = tuple(map(self.value, cell.results))
        error = None if cell.error is None else self.failure(cell.error)
        broken = self._text(cell.broken)
        if (report, results, error, broken) == (cell.report, cell.results, cell.error, cell.broken):
            return step
        return replace(step, cell=CellReport(report, results, error, cell.alive, broken))

    def value(self, shown: Shown) -> Shown:
        data = {mime: self._text(text) for mime, text in shown.data.items()}
        return shown if data == shown.data else replace(shown, data=data)

    def failure(self, failure: Failure) -> Failure:
        clean = Failure(self._text(failure.name), self._text(failure.value), self._text(failure.traceback))
        return failure if clean == failure else clean

    def _text(self, text: str) -> str:
        if self._shown is None or len(text) < 12:
            return text
        clean, struck = self._shown.redact(text)
        if struck:
            self._count(struck, self._shown.secrets(text))
        return clean

    def _count(self, rules: Mapping[str, int], secrets: Mapping[str, int]) -> None:
        for kept, found in ((self.rules, rules), (self.secrets, secrets)):
            for name, count in found.items():
                kept[name] = kept.get(name, 0) + count

    def _captured(self, stream: Captured) -> Captured:
        assert self._shown is not None
        if not stream.head and not stream.tail:
            return stream
        whole = not stream.truncated
        head, tail = (stream.head + stream.tail, b"") if whole else (stream.head, stream.tail)
        values = self._shown.values
        if whole or not values.reach:
            clean_head = self._bytes(head)
            clean_tail = self._bytes(tail)
        else:
            # Half a secret at either side of the gap is still half a secret. The same length is removed in every case:
            # how much is left must not reveal what it was.
            room = values.reach - 1
            end = min(max(0, len(head) - room), values.begun(head, MAX_HELD))
            clean_head = self.counted(values.within(head, 0, end))
            clean_tail = self.counted(values.within(tail, min(len(tail), room), len(tail)))
        if (clean_head, clean_tail) == (stream.head, stream.tail) or (whole and clean_head == head):
            return stream
        kept = len(clean_head) + len(clean_tail)
        total = kept if whole else stream.total
        digest = hashlib.sha256(clean_head + clean_tail).hexdigest()  # the digest of the whole would confirm a guess
        return Captured(clean_head, clean_tail, max(total, kept), digest)

    def _bytes(self, data: bytes) -> bytes:
        assert self._shown is not None
        return self.counted(self._shown.redacted(data)) if self._shown.matches(data) else data

    def counted(self, found: Redacted) -> bytes:
        """What is left; what went is counted."""
        self._count(found.rules, found.secrets)
        return found.data

    # ── Files ──

    @property
    def around_file(self) -> int:
        """How many bytes before and behind a part of a file are searched with it."""
        return 0 if self._kept is None or self._kept.idle else min(max(0, self._kept.values.reach - 1), MAX_HELD)

    def file(self) -> RedactingStream | None:
        """A stream for the bytes of one file; None where there is nothing to search for."""
        return None if self._kept is None or self._kept.idle else self._kept.stream(masked=True)

    def filed(self, searched: RedactingStream) -> None:
        self._count(searched.rules, searched.secrets)

    async def artifacts(self, report: BoxReport, folder: Path | None) -> tuple[BoxReport, str]:
        """Search files that were copied to a folder of the host, and correct their facts. All of them are searched,
        also where one of them cannot be; then the text says which."""
        if folder is None or not report.files or self._kept is None or self._kept.idle:
            return report, ""
        problems: list[str] = []

        def search(fact: FileFact) -> FileFact:
            path = folder / fact.path.removeprefix(_OUTPUT)
            try:
                return self._artifact(fact, path)
            except OSError as exc:
                problems.append(f"{path} cannot be searched for secrets: {exc.strerror}")
                return fact

        files = await asyncio.to_thread(lambda: tuple(map(search, report.files)))
        report = report if files == report.files else replace(report, files=files)
        return report, "; ".join(problems[:_MAX_PROBLEMS])

    def _artifact(self, fact: FileFact, path: Path) -> FileFact:
        """Raises OSError."""
        from ringfence.sandbox.files.paths import open_without_links  # noqa: PLC0415 - other systems do not have it

        # We made it, in a folder of the caller's own; a link put in its place since is not followed.
        handle = open_without_links(str(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            searched, _ = self._search(handle, None)
            if not searched.rules:
                return fact
            os.fchmod(handle, os.fstat(handle).st_mode & 0o777 | 0o200)
            writing = os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                searched, digest = self._search(handle, writing)
            finally:
                os.close(writing)
        finally:
            os.close(handle)
        self.filed(searched)
        return replace(fact, sha256=digest)

    def _search(self, handle: int, writing: int | None) -> tuple[RedactingStream, str]:
        """Search all of a file; secrets are masked in place."""
        searched = self.file()
        assert searched is not None
        digest = hashlib.sha256()
        at = 0
        while True:
            piece = os.pread(handle, _PIECE, at + searched.held)
            clean = searched.feed(piece) if piece else searched.finish()
            if writing is not None:
                os.pwrite(writing, clean, at)
            digest.update(clean)
            at += len(clean)
            if not piece:
                return searched, digest.hexdigest()
