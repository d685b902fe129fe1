"""strace on a gateway that serves: to see the order of what it does, or to break its disk."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tooling

_LINE = re.compile(r"(?P<task>\d+) +(?P<rest>.*)")
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>.*)")
_RESUMED = re.compile(r"<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")


@contextmanager
def traced(pid: int, arguments: Sequence[str], patience: float = tooling.PATIENCE) -> Iterator[None]:
    """Trace every thread of a process while the block lasts; the test is skipped where that is not allowed.

    `patience`: when it has not let go of the process by then, the tracer is killed, and what it wrote may be cut short.
    """
    command = [str(tooling.need("strace")), "-f", *arguments, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer, _killed_at_last(tracer):
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        while said and "attached" not in said:
            said = tracer.stderr.readline()
        if not said:
            pytest.skip("strace may not attach to a process here")
        try:
            yield
        finally:
            # It lets a living process go on; over a dead one it may wait for ever for the last thread. Over a living
            # one, too, now and then: the kernel lets the process go on when its tracer is killed.
            tracer.send_signal(signal.SIGINT if tooling.alive(pid) else signal.SIGKILL)
            try:
                tracer.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                tracer.kill()


@contextmanager
def _killed_at_last(tracer: subprocess.Popen[str]) -> Iterator[None]:
    """A tracer that got stuck holds its process, and the test would wait for both."""
    clock = threading.Timer(3 * tooling.PATIENCE, tracer.kill)
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
        clock.join()


@contextmanager
def failing(pid: int, paths: Sequence[Path], *faults: str) -> Iterator[None]:
    """Have system calls on these files, or all, fail as each fault says (`pwrite64:error=EIO:when=3`, from here on)."""
    calls = ",".join(fault.partition(":")[0] for fault in faults)
    inject = [word for fault in faults for word in ("-e", f"inject={fault}")]
    where = [word for path in paths for word in ("-P", str(path))]
    with traced(pid, ["-o", "/dev/null", "-e", f"trace={calls}", *inject, *where], patience=15.0):
        yield


@dataclass(frozen=True, slots=True)
class Event:
    """One system call, between two moments of the trace."""

    name: str
    text: str
    begun: int
    ended: int


def events(trace: str) -> list[Event]:
    """The calls of a trace, in the order of their beginning. Moments are lines: strace sees one thing at a time."""
    out: list[Event] = []
    pending: dict[tuple[str, str], tuple[str, int]] = {}
    for moment, line in enumerate(trace.splitlines()):
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        task, rest = found["task"], found["rest"]
        if resumed := _RESUMED.match(rest):
            text, begun = pending.pop((task, resumed["name"]), ("", moment))
            out.append(Event(resumed["name"], text + resumed["rest"], begun, moment))
        elif call := _CALL.match(rest):
            if rest.endswith("<unfinished ...>"):
                pending[task, call["name"]] = (call["arguments"], moment)
            else:
                out.append(Event(call["name"], call["arguments"], moment, moment))
    return sorted(out, key=lambda event: event.begun)
