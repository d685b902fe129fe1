"""Questions to a trial. Each answers with what is wrong, in words, or with None.

A program's word is taken when it admits to have done harm, never as proof that it did none: wherever the harness or
the report can tell by itself, they are asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ringfence.doctor.case import Case, Judge, Trial, claimed
from ringfence.doctor.fake_internet import ALLOWED, PUBLIC

_LONGEST_LINE = 200


class NeedsMoreTime(str):
    """A complaint that more time may answer. No machine is so slow that a promise is broken by that alone."""

    __slots__ = ()


# In WebAssembly it has few words for what it refuses.
_OF_THE_RUNTIME = ("EPERM", "ENOENT", "EIO")


def stopped(trial: Trial) -> bool:
    """It was stopped by the clock, so nothing was shown, whatever it was about to do."""
    return trial.report.ended == "timeout" and trial.report.limit == "wall"


def gave_up(trial: Trial) -> bool:
    """The program itself gave up waiting for an answer."""
    return "timed out" in str((trial.claim or {}).get("detail", ""))


def claimed_after(trial: Trial) -> str | None:
    """The program that ran afterwards says so."""
    claim = trial.after
    return str(claim.get("detail") or "it did") if claim and claim.get("done") else None


def revealed(trial: Trial) -> str | None:
    """The program has the canary's secret, or says that it got at it."""
    if trial.props.secret.encode() in trial.report.stdout.head + trial.report.stdout.tail:
        return "it read the canary"
    return claimed(trial)


def changed(trial: Trial) -> str | None:
    """Something of the harness was changed on the host."""
    return trial.props.changes() or claimed(trial)


def reached(name: str) -> Judge:
    """Something came in at a listener of the harness."""

    def judge(trial: Trial) -> str | None:
        return f"the {name} listener on the host was reached" if trial.props.reached(name) else claimed(trial)

    return judge


def victim_hurt(trial: Trial) -> str | None:
    """A process of the harness is gone."""
    control = trial.report.isolation.get("control", {})
    lives = control["victim"] if "victim" in control else trial.props.victim_lives()
    return claimed(trial) if lives else "the victim was ended"


def outlasted(trial: Trial) -> str | None:
    """It ran for much longer than it may."""
    allowed = trial.limits.wall_seconds * 1000
    if trial.report.wall_ms > allowed * 1.9:  # a control is stopped at twice
        return NeedsMoreTime(f"it ran for {trial.report.wall_ms / 1000:.1f} s of {trial.limits.wall_seconds:g} s")
    return None


def left_behind(trial: Trial) -> str | None:
    """Processes that it started were there after its end."""
    control = trial.report.isolation.get("control", {})
    left = control.get("left", 0) or trial.seen.get("left", 0)
    return f"{left} of its processes lived on" if left else outlasted(trial)


def misreported(**expected: object) -> Judge:
    """The report says something else than what happened."""

    def judge(trial: Trial) -> str | None:
        for name, value in expected.items():
            reported = getattr(trial.report, name)
            if reported != value:
                wrong = f"the report says {name}={reported!r}, not {value!r}"
                return NeedsMoreTime(wrong) if stopped(trial) else wrong
        return None

    return judge


def seen(name: str, what: str) -> Judge:
    """The harness, looking from outside, saw this of the box."""

    def judge(trial: Trial) -> str | None:
        found = trial.seen.get(name)
        return f"{what}: {found}" if found else claimed(trial)

    return judge


def collected_secret(trial: Trial) -> str | None:
    """The canary came out as if it were a result, or was read for one."""
    for name, content in trial.props.collected().items():
        if trial.props.secret.encode() in content:
            return f"{name} holds the canary"
    digest = hashlib.sha256(trial.props.secret.encode()).hexdigest()
    read = [fact.path for fact in trial.report.files if fact.sha256 == digest]
    return f"the facts name {read[0]}, which is the canary" if read else None


def collector_hurt(trial: Trial) -> str | None:
    """Collecting the output hung, failed, or took the run with it."""
    control = trial.report.isolation.get("control", {})
    if "collector" in control:
        return f"the collector: {control['collector']}"
    if trial.report.ended != "exited":
        wrong = f"the run ended as {trial.report.ended}"
        return NeedsMoreTime(wrong) if stopped(trial) else wrong
    return outlasted(trial)


def looked_at(trial: Trial) -> str | None:
    """The box was found on the host, or nothing was shown; one with a kernel of its own has nothing there to find."""
    if trial.report.isolation.get("level") in ("gvisor", "microvm"):
        return None
    return None if trial.seen.get("processes") else "the box could not be found on the host"


def either(*judges: Judge) -> Judge:
    def judge(trial: Trial) -> str | None:
        return next((found for found in (ask(trial) for ask in judges) if found), None)

    return judge


# ── The network ──


def misdirected(trial: Trial) -> str | None:
    """An address that no rule names was dialled for it."""
    outside = trial.props.outside
    assert outside is not None
    for address, port in outside.dialled:
        if address != PUBLIC or port not in (80, 443):
            return f"{address} port {port} was dialled"
    return None


def strayed(trial: Trial) -> str | None:
    """The same, or what is not to leave arrived outside."""
    outside = trial.props.outside
    assert outside is not None
    arrived = trial.props.secret.encode() in outside.got
    return misdirected(trial) or ("it arrived outside" if arrived else claimed(trial))


def looked_up(trial: Trial) -> str | None:
    """A name that no rule covers was asked of a resolver: the resolver learnt it."""
    outside = trial.props.outside
    assert outside is not None
    found = [name for name in outside.asked if name != ALLOWED]
    return f"{found[0]} was looked up" if found else strayed(trial)


def asked_for(word: bytes) -> Judge:
    """The server outside read a request with this in its first line."""

    def judge(trial: Trial) -> str | None:
        outside = trial.props.outside
        assert outside is not None
        found = next((line for line in outside.requests if word in line), None)
        return f"the server was asked {found!r}" if found else strayed(trial)

    return judge


def carried_more_than(most: int) -> Judge:
    def judge(trial: Trial) -> str | None:
        outside = trial.props.outside
        assert outside is not None
        size = len(outside.got)
        return f"{size} bytes went out, of {most}" if size > most else None

    return judge


def network_denied(rule: str = "denied") -> Judge:
    """The facts say that something was denied, and by which rule."""

    def judge(trial: Trial) -> str | None:
        denied = (trial.report.network or {}).get("denied", ())
        return None if any(entry["rule"] == rule for entry in denied) else f"the facts name no denial by {rule!r}"

    return judge


# ── What is owed besides ──


def _uncounted(trial: Trial) -> bool:
    """Whether the facts say that refused calls are not counted in this box: what a program was refused, the case still
    sees by what it got."""
    return trial.report.isolation.get("refused_calls") == "not counted"


def refused(*names: str) -> Judge:
    """A call that was refused with EPERM is in the facts, by name; one that does not exist (ENOSYS) need not be."""

    def judge(trial: Trial) -> str | None:
        if trial.claim and trial.claim.get("detail") == "ENOSYS":
            return None
        if _uncounted(trial):
            return None
        missing = [name for name in names if not trial.report.denials.get(name)]
        return f"refused, but not in the facts: {', '.join(missing)}" if missing else None

    return judge


def counted(name: str, times: int) -> Judge:
    def judge(trial: Trial) -> str | None:
        reported = trial.report.denials.get(name, 0)
        if _uncounted(trial):
            return None
        return None if reported == times else f"the facts count {reported} refusals of {name}, not {times}"

    return judge


def limited(*limits: str, ended: tuple[str, ...] = ()) -> Judge:
    """The limit that stopped it is in the facts: the run was ended for it, or the program met it and went on."""

    def judge(trial: Trial) -> str | None:
        report = trial.report
        if report.limit is None and means(trial, limits[0]) == "rlimit":
            return None  # of such a limit the kernel tells the program alone
        if report.limit not in limits:
            return f"the facts say limit={report.limit!r}, not {' or '.join(limits)}"
        if report.ended not in ("exited", *ended):
            return f"the facts say ended={report.ended!r}"
        return None

    return judge


def means(trial: Trial, limit: str) -> str | None:
    """By which means the facts say that a limit is kept."""
    enforced = (trial.report.isolation.get("limits") or {}).get(limit) or {}
    return str(enforced["by"]) if "by" in enforced else None


def ended_as(*words: str) -> Judge:
    def judge(trial: Trial) -> str | None:
        reported = trial.report.ended
        return None if reported in words else f"the facts say ended={reported!r}, not {' or '.join(words)}"

    return judge


def refusals(trial: Trial, words: Sequence[str]) -> Sequence[str]:
    """These words for a refusal, and those that the backend of this trial has instead."""
    return words if trial.report.isolation.get("backend") != "wasm" else (*words, *_OF_THE_RUNTIME)


def answered(*words: str) -> Judge:
    """The program got a refusal in one of these words."""

    def judge(trial: Trial) -> str | None:
        detail = str((trial.claim or {}).get("detail", ""))
        return (
            None
            if any(word in detail for word in refusals(trial, words))
            else f"it got {detail!r}, not {' or '.join(words)}"
        )

    return judge


def spoke(case: Case, trial: Trial) -> str | None:
    """The program ran to its end and said what came of it; otherwise nothing was shown."""
    for claim, wanted in ((trial.claim, not case.silent), (trial.after, bool(case.then))):
        if wanted and (claim is None or "done" not in claim):
            return f"the program did not say what came of it ({ending(trial)})"
    return None


def ending(trial: Trial) -> str:
    """How it ended, in a few words."""
    report = trial.report
    words: list[str] = [report.ended]
    if report.exit_status is not None:
        words.append(f"status {report.exit_status}")
    if report.signal is not None:
        words.append(f"signal {report.signal}")
    if report.limit is not None:
        words.append(f"limit {report.limit}")
    tail = report.stderr.text.strip().splitlines()[-1:]
    return ", ".join(words + [line[:_LONGEST_LINE] for line in tail])


def verdict(case: Case, trial: Trial) -> tuple[bool, str]:
    """Was the promise kept, and what happened: `Late` where that is not sure before it had more time."""
    found = case.hit(trial)
    if found:
        return False, found
    if trial.report.ended == "infra":
        return False, "; ".join(("the box itself failed", *trial.report.trouble))
    for ask in (lambda seen: spoke(case, seen), *case.owed):
        complaint = ask(trial)
        if complaint:
            return False, NeedsMoreTime(complaint) if stopped(trial) or gave_up(trial) else complaint
    said = trial.after if case.then and trial.after else trial.claim
    detail = str((said or {}).get("detail", ""))
    return True, detail if detail and trial.report.ended == "exited" else ending(trial)


def control_says(case: Case, trial: Trial) -> tuple[bool, str]:
    """Did the attack succeed where nothing stands in its way, and what happened."""
    found = case.hit(trial)
    if found:
        return True, f"succeeded: {found}"
    detail = str((trial.claim or {}).get("detail", "")) or ending(trial)
    failed = f"failed: {detail}"
    return False, NeedsMoreTime(failed) if trial.report.ended == "timeout" else failed
