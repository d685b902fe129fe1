"""`ringfence doctor`: tests every promise of a box on this host."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import cast

import anyio
import typer

from ringfence.cli import common, options
from ringfence.cli.terminal import cut, safe, table, word
from ringfence.compose import lacking
from ringfence.compose.backends import boxes_stay, make_backend, makers
from ringfence.compose.examined import keep
from ringfence.config.settings import Config, SandboxSettings
from ringfence.core.box import BACKENDS
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.ports import Backend
from ringfence.core.record import dataclass
from ringfence.doctor import CATALOGUE, CLASSES, Case, CaseResult, Options, SuiteReport, placement, run
from ringfence.doctor.placement import NOT_IN_SESSION, InSession, StayingBackend

_BROKEN = 1
_USAGE = 2
_UNAVAILABLE = 125
_CLASSES = ", ".join(f"{letter} {name}" for letter, name in CLASSES.items())
_LINE_EVERY = 50
_WORDS = {True: "kept", False: "BROKEN", None: "n/a"}


def doctor(
    backend: str | None = typer.Option(None, "--backend", metavar="B", help="What makes the boxes."),
    every: bool = typer.Option(False, "--all", help="Every backend, in one table; why one cannot make boxes here."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: an object, or with --all a list of them."),
    classes: str | None = typer.Option(None, "--class", metavar="F,K", help=f"Only these classes: {_CLASSES}."),
    only: list[str] | None = typer.Option(None, "--case", metavar="ID", help="Only this case. May be repeated."),
    session: bool = typer.Option(
        False,
        "--session",
        help="Try each case in a session, after a hostile step that left behind as much as it could.",
    ),
    server: bool = typer.Option(
        False,
        "--server",
        help="Try each case as an MCP server, in a box with folders of the host to read and to write.",
    ),
    control: bool = typer.Option(
        True,
        "--control/--no-control",
        help="Also try each case outside of any box. Without it, the test takes half the time.",
    ),
    config_path: options.SandboxConfig = None,
) -> None:
    """Test every promise of a box on this host, with hostile programs, each in a fresh box.

    A promise is kept if the program could not do what it tries, and if the facts report the attempt where they should.
    It counts only if the control succeeds: the same program outside of any box, as an unprivileged user in namespaces
    of its own. If the control fails too, the case proves nothing and is reported as n/a, with the reason. A slow
    machine breaks no promise: a case that did not end in time is tried again, alone and with more time. Nothing of
    yours is touched: canaries, listeners and victims are the doctor's own.

    The console shows what a whole test saw last: it is kept in the state folder, if there is one.

    Exit code 1 if a promise is broken, 125 if no box can be made here; what is missing is named.

    \b
    ringfence doctor                         all cases, as a table
    ringfence doctor --session               the same, as the second program in a session
    ringfence doctor --server                the same, as MCP servers in their boxes
    ringfence doctor --class K,N             the kernel's surface and the network
    ringfence doctor --case F01 --json       one case, for a program
    ringfence doctor --all --class F,N       two classes on every backend, in one table
    """
    if every and backend is not None:
        common.fail("--all and --backend exclude each other", _USAGE)
    cases = _chosen(classes, only or [])
    settings = common.own_config(config_path, backend)
    wanted = settings.sandbox
    if session and server:
        common.fail("--session and --server exclude each other", _USAGE)
    left_out = NOT_IN_SESSION if session else placement.NOT_IN_SERVER if server else {}
    chosen = tuple(case for case in cases if case.id not in left_out)
    options = Options(chosen, controls=control, given_up=wanted.accept_missing)
    within = InSession if session else placement.InServer if server else None
    reports, missing = common.run(_examine, _named(settings, every), options, within)
    whole = cases == CATALOGUE
    if whole and control:
        place = "session" if session else "server" if server else "box"
        for report in reports:
            keep(settings.gateway.state, report.as_json(), place)
    if as_json and every:
        common.dump([*(report.as_json() for report in reports), *map(_absent, missing)])
    elif as_json and reports:
        common.dump(reports[0].as_json())
    elif every:
        print(compared(reports, missing))
    else:
        for report in reports:
            print(text(report))
    for name, problem in missing if as_json or not every else ():
        print(safe(f"{name}: {problem}"), file=sys.stderr)
    for name, problem in common.run(lacking.of_capabilities, settings).items() if whole else ():
        print(safe(f"every call of {name!r} will be refused: {problem}"), file=sys.stderr)
    if not reports:
        raise typer.Exit(_UNAVAILABLE)
    raise typer.Exit(_BROKEN if any(report.broken for report in reports) else 0)


def _chosen(classes: str | None, ids: list[str]) -> tuple[Case, ...]:
    letters = {word.strip().upper() for word in classes.split(",")} if classes is not None else set()
    known = {case.id for case in CATALOGUE}
    wrong = sorted(letters - CLASSES.keys()) + sorted({word.upper() for word in ids} - known)
    if wrong:
        common.fail(
            f"there is no class or case {', '.join(wrong)}; classes are {', '.join(CLASSES)}, cases e.g. F01", _USAGE
        )
    if not letters and not ids:
        return CATALOGUE
    named = {word.upper() for word in ids}
    return tuple(case for case in CATALOGUE if case.kind in letters or case.id in named)


@dataclass(frozen=True, slots=True)
class _Backend:
    """A backend to examine, its settings, and where its kernels and roots are kept."""

    name: str
    sandbox: SandboxSettings
    state: Path

    def make(self, *, stays: bool) -> Backend:
        """Raises Unavailable."""
        if stays and not boxes_stay(self.sandbox):
            raise Unavailable("not_supported", makers().no_stay(self.name))
        # What it once found out about this host is no answer: it is to find that out now.
        made = make_backend(self.sandbox, None if self.name == "process" else self.state)
        if stays and not isinstance(made, StayingBackend):
            text = f"boxes of backend {self.name} do not stay, and its row says that they do"
            raise Unavailable("not_supported", text)
        return made


def _named(settings: Config, every: bool) -> list[_Backend]:
    sandbox = settings.sandbox
    names = [*BACKENDS] if every else [sandbox.backend]
    return [_Backend(name, replace(sandbox, backend=name), settings.gateway.state) for name in names]


async def _examine(
    backends: Iterable[_Backend], options: Options, within: Callable[[StayingBackend], Backend] | None
) -> tuple[list[SuiteReport], list[tuple[str, str]]]:
    """The reports, and why a backend has none."""
    reports: list[SuiteReport] = []
    missing: list[tuple[str, str]] = []
    for each in backends:
        try:
            backend = each.make(stays=within is not None)
        except Unavailable as exc:
            missing.append((each.name, exc.message))
            continue
        try:
            with _progress(len(options.cases)) as options.progress:
                tried = backend if within is None else within(cast("StayingBackend", backend))
                reports.append(await run(tried, options))
        except Unavailable as exc:
            missing.append((each.name, exc.message))
        finally:
            with anyio.CancelScope(shield=True):
                await backend.close()
    return reports, missing


@dataclass(slots=True)
class _Progress:
    """Progress: on a terminal one line that changes; elsewhere a line now and then, as a sign of life."""

    total: int
    terminal: bool
    done: int = 0
    not_counted: int = 0
    broken: list[str] = field(default_factory=list)

    def __call__(self, result: CaseResult) -> None:
        self.done += 1
        self.not_counted += result.kept is None
        if result.kept is False:
            self.broken.append(result.case.id)
        kept = self.done - self.not_counted - len(self.broken)
        counts = f"{kept} kept, {self.not_counted} not counted, broken: {' '.join(self.broken) or 'none'}"
        shown = cut(f"{self.done}/{self.total}  {counts}", 100)
        if self.terminal:
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)
        elif self.done % _LINE_EVERY == 0 and self.done < self.total:
            print(shown, file=sys.stderr, flush=True)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[CaseResult], None]]:
    progress = _Progress(total, sys.stderr.isatty())
    try:
        yield progress
    finally:
        if progress.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _absent(missing: tuple[str, str]) -> Json:
    """The place in the list of a backend that makes no boxes here."""
    name, why = missing
    return {"backend": name, "level": BACKENDS.get(name), "missing": why}


# ── For people ────────────────────────────────────────────────────────────────────────────────────


def text(report: SuiteReport) -> str:
    """The whole report as a table, what is broken in full, the host's protections, and a last line that counts."""
    host = report.host
    lines = [safe(f"{report.backend} on {host['system']} {host['kernel']} {host['machine']}, as {host['user']}")]
    width = max(80, shutil.get_terminal_size((140, 24)).columns)
    for kind, name in CLASSES.items():
        results = [result for result in report.results if result.case.kind == kind]
        if results:
            lines += ["", f"{kind}  {name}", *(_row(result, width) for result in results)]
    for result in report.results:
        if result.kept is False:
            lines += ["", *_in_full(result)]
    lines += _reasons(report)
    lines += ["", *_protections(report.isolation), "", _summary(report)]
    return "\n".join(lines)


def compared(reports: Sequence[SuiteReport], missing: Sequence[tuple[str, str]]) -> str:
    """One table: the classes of promises by backend, what is broken in full, and why the rest is not there."""
    lines = []
    if reports:
        host = reports[0].host
        lines = [safe(f"on {host['system']} {host['kernel']} {host['machine']}, as {host['user']}"), ""]
    tried = {result.case.kind for report in reports for result in report.results}
    kinds = [kind for kind in CLASSES if kind in tried]
    rows = [
        [report.backend, BACKENDS.get(report.backend, ""), *(_counts(report, kind) for kind in kinds), _counts(report)]
        for report in reports
    ]
    rows += [[name, BACKENDS.get(name, ""), *("-" for _ in kinds), "not here"] for name, _ in missing]
    lines += [table(["backend", "level", *kinds, "all"], rows), ""]
    lines.append("kept, or kept/BROKEN/not counted; " + ", ".join(f"{kind} {CLASSES[kind]}" for kind in kinds))
    for report in reports:
        for result in report.results:
            if result.kept is False:
                lines += ["", safe(report.backend), *_in_full(result)]
        if reasons := _reasons(report):
            lines += ["", safe(f"{report.backend}: {reasons[1]}"), *reasons[2:]]
    if missing:
        lines += ["", "not here", *(safe(f"  {name}: {why}") for name, why in missing)]
    return "\n".join(lines)


def _counts(report: SuiteReport, kind: str | None = None) -> str:
    """Of one class, or of all: how many were kept; where others were not, also how many were broken and not counted."""
    found = [result.kept for result in report.results if kind in (None, result.case.kind)]
    kept, broken, left = (sum(each is value for each in found) for value in (True, False, None))
    return str(kept) if kept == len(found) else f"{kept}/{f'{broken}!' if broken else 0}/{left}"


def _row(result: CaseResult, width: int) -> str:
    tried = max(40, (width - 16) * 3 // 5)
    how = f"{_WORDS[result.kept]:7}"
    head = f"{result.case.id:5} {how} {cut(result.case.tried, tried):{tried}}  "
    return head.replace(how, word(how), 1) + cut(result.got, max(20, width - len(head)))


def _in_full(result: CaseResult) -> list[str]:
    case = result.case
    return [
        f"{word('BROKEN')} {safe(f'{case.id}: {case.tried}')}",
        safe(f"  expected  {case.expected}"),
        safe(f"  got       {result.got}"),
        safe(f"  control   {result.control}"),
    ]


def _reasons(report: SuiteReport) -> list[str]:
    """Why cases were not counted, grouped by reason."""
    by: dict[str, list[str]] = {}
    for result in report.results:
        if result.kept is None:
            by.setdefault(result.reason, []).append(result.case.id)
    if not by:
        return []
    return ["", "not counted", *(safe(f"  {' '.join(ids)}: {reason}") for reason, ids in by.items())]


def _protections(isolation: Json) -> list[str]:
    found: Json = isolation.get("protections") or {}
    lines = ["protections"]
    for name, how in found.items():
        verified = f"verified: {how.get('verified')}" if how.get("verified") else "not verified"
        lines.append(safe(f"  {name:20} {'on' if how.get('on') else 'OFF':4} {verified}"))
    for name, how in (isolation.get("limits") or {}).items():
        why = f": {how['why']}" if how.get("why") else ""
        lines.append(safe(f"  limit of {name:11} by {how.get('by')}{why}"))
    return lines


def _summary(report: SuiteReport) -> str:
    parts = [f"{report.kept} kept", f"{report.broken} broken"]
    if report.not_counted:
        parts.append(f"{report.not_counted} not counted")
    return ", ".join(parts)
