"""Runs the cases against a backend, each in a box of its own, and against their controls."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import asdict, field, replace
from pathlib import Path
from textwrap import dedent

import anyio
from anyio import CapacityLimiter, to_thread

from ringfence.core.box import BoxReport, BoxSpec, Captured, Input, Program, Stream
from ringfence.core.errors import RingfenceError, Unavailable
from ringfence.core.model import Json
from ringfence.core.ports import Backend
from ringfence.core.record import dataclass
from ringfence.doctor import judging
from ringfence.doctor.case import Case, CaseResult, SuiteReport, Trial
from ringfence.doctor.cases import CATALOGUE
from ringfence.doctor.control import ControlBackend, ControlLauncher
from ringfence.doctor.fake_internet import PORT, TOKEN
from ringfence.doctor.props import PROJECT, Props
from ringfence.doctor.stage import Stage

_PRELUDE = Path(__file__).with_name("probe.py").read_text()
_PACKAGE = Path(__file__).parents[1]
_START_SECONDS = 1.5
"""What the first box takes at most, with all that has to be started for it, where nothing is slow."""
_SLOWEST = 40.0
_AGAIN = (4.0, 16.0)
"""So many times as long a case has, alone, when it was not over in time."""
_GONE_SECONDS = 0.05
_GOING_SECONDS = 2.0
"""Who is dead by then needs a moment to be gone."""
_HOST_CANNOT = ("maps_no_ids", "not_supported")
"""Reasons for which a backend rightly refuses a box: what is asked for cannot be had on this host, or of it at all."""


class NotHereError(Exception):
    """What a case needs cannot be set up on this host."""


@dataclass(slots=True)
class Options:
    """How the suite is run."""

    cases: tuple[Case, ...] = CATALOGUE
    controls: bool = True
    parallel: int = field(default_factory=lambda: max(2, min(8, 2 * (os.cpu_count() or 1))))
    progress: Callable[[CaseResult], None] | None = None
    known: dict[str, tuple[bool, str]] = field(default_factory=dict)
    """What controls said already: they do not depend on the backend."""
    given_up: tuple[str, ...] = ()
    """Protections that the operator agreed to do without."""


async def run(backend: Backend, options: Options | None = None) -> SuiteReport:
    """Try every case. Raises Unavailable where the backend makes no boxes here."""
    options = options or Options()
    with Stage() as stage, closing(ControlLauncher()) as launcher:
        began = time.monotonic()
        first = await backend.run(BoxSpec(Program("python", b"pass")))
        pace = min(max(1.0, (time.monotonic() - began) / _START_SECONDS), _SLOWEST)
        if first.ended != "exited":
            raise Unavailable("no_box", "; ".join(("an empty box failed", *first.trouble)))
        results: dict[str, CaseResult] = {}
        late: list[Case] = []
        limiter = CapacityLimiter(options.parallel)
        off = _off(first, options.given_up)

        async def one(case: Case, longer: float = 1.0) -> None:
            async with limiter:
                if case.rests_on in off:
                    reason = f"{case.rests_on} is missing on this host, and accepted to be (sandbox.accept_missing)"
                    result = CaseResult(case, "not tried", "not run", None, reason)
                else:
                    result = await _Tries(backend, stage, launcher, pace * longer).result(case, options)
            if result.kept is False and isinstance(result.got, judging.NeedsMoreTime) and longer < _AGAIN[-1]:
                late.append(case)
                return
            results[case.id] = result
            if options.progress is not None:
                options.progress(result)

        async with anyio.create_task_group() as group:
            for case in options.cases:
                group.start_soon(one, case)
        for longer in _AGAIN:
            again, late = late, []
            for case in again:
                await one(case, longer)
    ordered = tuple(results[case.id] for case in options.cases)
    return SuiteReport(backend.name, _host(), ordered, first.isolation)


@dataclass(frozen=True, slots=True)
class _Tries:
    """Where cases are tried: in the backend's boxes, and as controls."""

    backend: Backend
    stage: Stage
    launcher: ControlLauncher
    pace: float
    """How slow this machine is: so many times as long everything may take."""

    async def result(self, case: Case, options: Options) -> CaseResult:
        could = True
        control = "not run"
        if options.controls:
            if case.id not in options.known:
                options.known[case.id] = await self.control(case)
            could, control = options.known[case.id]
        try:
            kept, got = await self._tried(self.backend, case, judging.verdict)
        except (NotHereError, _CannotError) as exc:
            return CaseResult(case, "not tried", control, None, str(exc))
        except (RingfenceError, ValueError, OSError) as exc:
            if isinstance(exc, Unavailable) and exc.reason_code in _HOST_CANNOT:
                return CaseResult(case, "no box was made, as it should be", control, None, exc.message)
            return CaseResult(case, f"no box was made: {exc}", control, False)
        if could or not kept:
            return CaseResult(case, got, control, kept)
        return CaseResult(case, got, control, None, f"the control could not do it either ({control})")

    async def control(self, case: Case) -> tuple[bool, str]:
        """Could it be done where nothing stands in its way, and what happened there."""
        if case.control.impossible:
            return False, f"not possible here: {case.control.impossible}"
        backend = ControlBackend(self.launcher, case.control)
        try:
            could, said = await self._tried(backend, case, judging.control_says)
            if not could and isinstance(said, judging.NeedsMoreTime):
                longer = replace(self, pace=self.pace * _AGAIN[0])
                could, said = await longer._tried(backend, case, judging.control_says)
            return could, said
        except (RingfenceError, OSError, NotHereError, _CannotError) as exc:
            return False, f"not possible here: {exc}"

    async def _tried(
        self, backend: Backend, case: Case, judge: Callable[[Case, Trial], tuple[bool, str]]
    ) -> tuple[bool, str]:
        """Set up, run, judge while the props still stand."""
        props = self._props(case)
        case = replace(case, limits=replace(case.limits, wall_seconds=case.limits.wall_seconds * self.pace))
        try:
            trial = await _Attempt(backend, case, props, self.pace).made()
            if trial.claim and isinstance(trial.claim.get("cannot"), str):
                raise _CannotError(trial.claim["cannot"])
            return judge(case, trial)
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            props.close()

    def _props(self, case: Case) -> Props:
        """Raises NotHereError."""
        try:
            props = self.stage.props(case.props)
        except OSError as exc:
            raise NotHereError(f"the target of this case cannot be made here: {exc}") from exc
        try:
            if case.network:
                props.play(case.names, self.pace)
        except OSError as exc:
            props.close()
            raise NotHereError(f"no program can listen here: {exc}") from exc
        return props


class _CannotError(Exception):
    """The program says that this host has nothing to try it with."""


def _off(report: BoxReport, given_up: Collection[str]) -> set[str]:
    """What was given up, and is not there."""
    found = report.isolation.get("protections") or {}
    return {name for name in given_up if not found.get(name, {}).get("on", True)}


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first of several errors at once."""
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


class _Attempt:
    """One case in one place."""

    def __init__(self, backend: Backend, case: Case, props: Props, pace: float) -> None:
        self._backend = backend
        self._case = case
        self._props = props
        self._pace = pace
        self._seen: Json = {}
        self._marker = f"{secrets.randbelow(10**9):09d}"
        if "planted" in case.inputs:
            props.plant(case.inputs["planted"].decode())

    async def made(self) -> Trial:
        case = self._case
        if case.secret and self._props.outside is not None:
            await self._props.outside.lend()
        with ExitStack() as stack:
            async with anyio.create_task_group() as group:
                neighbour: Json = {}
                waiting = _HeldProgram(stack)
                working = _HeldProgram(stack)
                if case.beside:
                    group.start_soon(self._run, self._spec(case.beside, {}, waiting), waiting)
                    neighbour = await waiting.ready()
                if case.observe is not None:
                    group.start_soon(self._look, working)
                try:
                    report, after = await self._reports(working, neighbour)
                finally:
                    waiting.over()
        await self._count_left()
        return Trial(
            report=report,
            limits=case.limits,
            props=self._props,
            claim=claim_of(report.stdout),
            after=claim_of(after.stdout) if after else None,
            after_report=after,
            beside=neighbour or None,
            seen=self._seen,
        )

    async def _reports(self, held: _HeldProgram, neighbour: Json) -> tuple[BoxReport, BoxReport | None]:
        spec = self._spec(self._case.program, neighbour, held)
        if not self._case.then:
            return await self._run(spec, held), None
        following = self._spec(self._case.then, neighbour)
        if isinstance(self._backend, ControlBackend):
            try:
                both = await self._backend.run_all([spec, following], held.hear)
            finally:
                held.over()
            return both[0], both[1]
        return await self._run(spec, held), await self._backend.run(following)

    async def _run(self, spec: BoxSpec, held: _HeldProgram) -> BoxReport:
        try:
            return await self._backend.run(spec, held.hear)
        finally:
            held.over()

    def _spec(self, program: str, neighbour: Json, held: _HeldProgram | None = None) -> BoxSpec:
        case = self._case
        props = self._props
        given = {
            "limits": asdict(case.limits),
            "marker": self._marker,
            "neighbour": neighbour,
            "package": str(_PACKAGE),
            "pace": self._pace,
            "watched": not isinstance(self._backend, ControlBackend),
            **props.given,
        }
        outside = props.outside
        env = dict(case.env)
        if props.mounts and not isinstance(self._backend, ControlBackend):
            given["project"] = PROJECT
        if outside is not None:
            naive = isinstance(self._backend, ControlBackend)
            if case.secret:
                env |= {TOKEN: outside.token} if naive or outside.issued is None else outside.issued.env
            given |= {"proxy": outside.naive_port if naive else PORT, "mark": props.secret}
        inputs = tuple(Input(name, content) for name, content in case.inputs.items() if name != "planted")
        # Only a program that is observed waits for the end of its input.
        stdin = held.stdin if held is not None and (case.observe or program is case.beside) else case.stdin
        what = Program("python", text_of(program, given), stdin=stdin)
        if case.command:
            what = Program("command", argv=case.command, stdin=program.encode())
        return BoxSpec(
            what,
            case.limits,
            env=env,
            inputs=inputs,
            output=props.output,
            output_files=case.output_files,
            trees=props.trees,
            mounts=props.mounts,
            layout=case.layout,
            network=None if outside is None else outside.serve(case.network),
            programs=case.programs,
        )

    async def _look(self, held: _HeldProgram) -> None:
        facts = await held.ready()
        if facts and self._case.observe is not None:
            self._seen |= await to_thread.run_sync(self._case.observe, self._props, facts)
        held.over()

    async def _count_left(self) -> None:
        """Processes of this trial that are there a moment after its end."""
        if "marker" not in self._case.program:
            return
        await anyio.sleep(_GONE_SECONDS)
        until = time.monotonic() + _GOING_SECONDS * self._pace
        while left := await to_thread.run_sync(running, self._marker):
            self._seen["left"] = len(left)
            if isinstance(self._backend, ControlBackend) or time.monotonic() > until:
                return
            await anyio.sleep(_GONE_SECONDS)
        self._seen.pop("left", None)


class _HeldProgram:
    """Hears when a program says that it is ready, and holds its input open until it has been looked at."""

    def __init__(self, stack: ExitStack) -> None:
        self._heard = bytearray()
        self._event = anyio.Event()
        self._facts: Json = {}
        self._stack = ExitStack()
        self.stdin, writer = os.pipe()
        stack.callback(os.close, self.stdin)
        self._stack.callback(os.close, writer)
        stack.callback(self._stack.close)

    def hear(self, stream: Stream, data: bytes) -> None:
        if stream != "stdout" or self._event.is_set():
            return
        self._heard += data
        for line in bytes(self._heard).split(b"\n")[:-1]:
            found = _object(line)
            if found and found.get("ready"):
                self._facts = found
                self._event.set()

    async def ready(self) -> Json:
        """Wait until the program is ready or over: one that never says that it is ready ends all the same."""
        await self._event.wait()
        return self._facts

    def over(self) -> None:
        self._event.set()
        self._stack.close()


def text_of(program: str, given: Json) -> bytes:
    """The whole source that is sent: what all programs share, the values for this one, and its own."""
    assignment = (
        f"given.update(json.loads({json.dumps(json.dumps(given))}))\ngiven.update(globals().get('HERE', {{}}))\n"
    )
    return f"{_PRELUDE}\n{assignment}\n{dedent(program)}\n".encode()


def claim_of(stdout: Captured) -> Json | None:
    """The last thing that a program said of itself."""
    for line in reversed((stdout.head + b"\n" + stdout.tail).split(b"\n")):
        found = _object(line)
        if found is not None and isinstance(found.get("done"), bool):
            return found
    return None


def _object(line: bytes) -> Json | None:
    if not line.startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def running(marker: str) -> list[int]:
    """Processes on this host with this word in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in command:
            found.append(int(name))
    return found


def _host() -> Json:
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary user",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
