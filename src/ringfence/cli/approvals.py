"""`ringfence approvals`: calls that wait for an approval, and the answers. An agent asks; only a person answers."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from ringfence import identity
from ringfence.cli import common
from ringfence.cli.terminal import MARGIN, confirm, cut, foreign, json_text, moment, quoted, safe
from ringfence.core import invisible, system
from ringfence.core.errors import Refused
from ringfence.core.model import GuardedText, Json, Person
from ringfence.core.sizes import short_time
from ringfence.governance import question
from ringfence.governance.approvals import MAX_REASON, answer, objection
from ringfence.governance.approvals import allow as give
from ringfence.governance.approvals import revoke as withdraw
from ringfence.governance.guard import Guard
from ringfence.governance.standing import Wish, offered, words
from ringfence.store import Approval, Conflict, Offer, Outline, Reader, RowNotFound, StandingApproval

_WIDTH = 100
_LONG = 20_000
"""Characters of a question of which a list reads the beginning alone."""
_PREFIX = "apr_"
_STANDING = "std_"

approvals = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
IdArgument = typer.Argument(..., metavar="ID", help="Its id, the beginning of its id, or `last` for the newest.")

ReasonOption = typer.Option(
    None, "--reason", metavar="TEXT", help="Why. It goes on record; who made a call that is denied is told."
)


@approvals.callback()
def group() -> None:
    """List the calls that wait for an approval, and answer them.

    \b
    ringfence approvals list                    what waits, and when it expires
    ringfence approvals approve last            approve the newest
    ringfence approvals deny apr_1f             the beginning of an id is enough
    ringfence approvals allow last --times 20 --for 28800 --any title
    ringfence approvals standing                what was approved beforehand; revoke ID ends one
    """


@approvals.command("list")
def list_(
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """List pending approvals, the oldest first.

    \b
    ringfence approvals list --demo
    """
    last = None
    with common.reading(common.state_of(config_path, demo)) as reader:
        outlines = _outlines(reader)
        if as_json:
            common.dump([_as_json(outline) for outline in outlines])
            return
        for outline in outlines:
            print("\n".join(_summary(outline)), end="\n\n")
            last = outline.approval.id
    if last is None:
        print("No approvals are pending.")
        return
    print(f"To approve the newest: ringfence approvals approve {last}{_place(config_path, demo)}   (or deny)")


def _outlines(reader: Reader) -> Iterator[Outline]:
    """One after the other, and of what is long its beginning: a question may be a megabyte."""
    for each in reader.pending():
        outline = reader.outline(each, question.LONG, _LONG, 2 * _WIDTH)
        if outline is not None:
            yield outline


@approvals.command()
def approve(
    identifier: str = IdArgument,
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    reason: str | None = ReasonOption,
) -> None:
    """Approve one call, to run once, after showing exactly what it is.

    It asks on the terminal itself, never on stdin, and takes `y` or `yes`. The call may still be waiting, or be made
    again before the approval expires. The first call that matches uses the approval up.

    \b
    ringfence approvals approve apr_0123456789abcdef0123
    """
    _answer(identifier, config_path, demo, reason, approve=True)


@approvals.command()
def deny(
    identifier: str = IdArgument,
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    reason: str | None = ReasonOption,
) -> None:
    """Refuse one call, after showing exactly what it is.

    \b
    ringfence approvals deny last --reason "wait for the release"
    """
    _answer(identifier, config_path, demo, reason, approve=False)


@approvals.command(short_help="Approve one call, and others like it beforehand.")
def allow(
    identifier: str = IdArgument,
    times: int = typer.Option(..., "--times", min=1, help="How many calls, besides the one that waits."),
    seconds: float = typer.Option(..., "--for", metavar="SECONDS", help="For how long."),
    any_: list[str] = typer.Option([], "--any", metavar="ARGUMENT", help="It may have any value. Repeatable."),
    like: list[str] = typer.Option(
        [], "--like", metavar="ARGUMENT=PATTERN", help="It may be any text that this RE2 pattern matches whole."
    ),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    reason: str | None = ReasonOption,
) -> None:
    """Approve one call, and calls like it beforehand: a standing approval.

    Like it are calls of the same tool by the same agent under the same rules, with the same arguments, but for those
    that you leave open. How far it may go, `standing` of the approval rule says; without it every call is asked about.

    \b
    ringfence approvals allow last --times 20 --for 28800 --any title
    ringfence approvals allow last --times 5 --for 3600 --like 'path=docs/[a-z]+[.]md'
    """
    folder = common.state_of(config_path, demo)
    person = _person(config_path, demo)
    _own(folder)
    with common.reading(folder) as reader:
        approval = _find(reader, identifier)
    said = _said(approval, person, reason)
    try:
        offer = offered(approval, Wish(times, seconds, tuple(any_), dict(_like(each) for each in like)))
    except Conflict as exc:
        common.fail(f"{exc}. Nothing was approved.")
    text = "\n".join([*_in_full(approval), "", *_offer(offer)])
    if not confirm(text, f"Approve calls like this beforehand as {safe(person.name)}?"):
        common.fail("Nothing was approved.")
    with common.writing(folder) as store:
        try:
            made = give(store, approval, person, offer, reason=said)
        except (Refused, Conflict) as exc:
            common.fail(str(exc))
    print(f"{made.id}: up to {made.times} calls until {moment(made.expires_at)}.")
    print(f"To take it back: ringfence approvals revoke {made.id}{_place(config_path, demo)}")


@approvals.command("standing", short_help="List what people approved beforehand.")
def standing_(
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """List what people approved beforehand and is not used up or over, the oldest first.

    \b
    ringfence approvals standing
    """
    with common.reading(common.state_of(config_path, demo)) as reader:
        found = reader.standing()
    if as_json:
        common.dump([_standing_json(each) for each in found])
        return
    if not found:
        print("No approvals stand.")
    for each in found:
        print(f"{each.id}  {foreign(each.tool)}")
        print("\n".join(_lines(question.standing(each, lambda value: cut(json_text(value, indent=None), _WIDTH)))))
        print(f"  made       {moment(each.made_at)}")
        print(f"  expires    in {short_time(each.expires_at - time.time(), units=2)}", end="\n\n")


@approvals.command()
def revoke(
    identifier: str = typer.Argument(..., metavar="ID", help="Its id, or the beginning of its id."),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
) -> None:
    """End a standing approval. What it has approved and no call has used is void.

    \b
    ringfence approvals revoke std_1f
    """
    folder = common.state_of(config_path, demo)
    person = _person(config_path, demo)
    _own(folder)
    wanted = identifier if identifier.startswith(_STANDING) else _STANDING + identifier
    with common.reading(folder) as reader:
        found = [each.id for each in reader.standing_by_id(wanted)]
    if len(found) != 1:
        what = f"could be any of: {', '.join(found)}" if found else "is no standing approval"
        common.fail(f"{identifier} {what}; see: ringfence approvals standing")
    with common.writing(folder) as store:
        try:
            withdraw(store, found[0], person)
        except (Conflict, RowNotFound) as exc:
            common.fail(str(exc))
    print(f"{found[0]}: revoked by {safe(person.name)}.")


def _like(given: str) -> tuple[str, str]:
    name, equals, pattern = given.partition("=")
    if not equals or not name:
        common.fail(f"--like takes ARGUMENT=PATTERN, not {given!r}")
    return name, pattern


# ── Answering ─────────────────────────────────────────────────────────────────────────────────────


def _answer(identifier: str, config_path: Path | None, demo: bool, reason: str | None, *, approve: bool) -> None:
    folder = common.state_of(config_path, demo)
    person = _person(config_path, demo)
    _own(folder)
    with common.reading(folder) as reader:
        approval = _find(reader, identifier)
    if approval.state == "expired":
        common.fail(
            f"approval {approval.id} has expired, and can no longer be answered; if the agent makes the call again, it "
            "asks again"
        )
    if approval.state != "pending":
        common.fail(f"approval {approval.id} is {approval.state} already; there is nothing to answer")
    said = _said(approval, person, reason)
    verb = "Approve" if approve else "Deny"
    if not confirm("\n".join(_in_full(approval)), f"{verb} this call as {safe(person.name)}?"):
        common.fail("Nothing was answered; the approval is still pending.")
    with common.writing(folder) as store:
        try:
            settled = answer(store, approval.id, person, approve=approve, seen=approval, reason=said)
        except Refused as exc:
            common.fail(exc.message)
    if settled.state == "pending":
        approved = sum(each.approve for each in settled.answers)
        print(f"{settled.id}: {approved} of {settled.people} people approved it; it still waits.")
    else:
        print(f"{settled.id}: {settled.state} by {safe(person.name)}.")


def _said(approval: Approval, person: Person, reason: str | None) -> GuardedText | None:
    """Why a person answers as they do, if they may answer."""
    problem = objection(approval, person)
    if problem is not None:
        common.fail(f"{person.name} may not answer this: {problem}")
    if not reason and approval.terms.get("reason"):
        common.fail(f"rule {approval.rule} wants a reason; add: --reason TEXT")
    return None if reason is None else Guard(_no_schema).message(reason, most=MAX_REASON)


def _no_schema(definition: object, value: object) -> None:
    """No result of a server is looked at here."""


def _own(folder: Path) -> None:
    """Check first that an answer could be written at all."""
    with contextlib.suppress(OSError):
        info = folder.stat()
        if system.stranger(info):
            common.fail(
                f"the state folder {folder} belongs to another user (uid {info.st_uid}); in this version only the"
                " account that the gateway runs under can answer"
            )


def _person(config_path: Path | None, demo: bool) -> Person:
    user = identity.os_user()
    people = {} if demo or common.find_config(config_path) is None else common.load(config_path).people
    person = identity.person_of(people, user)
    if person is None:
        common.fail(f"account {user} is not one of the people in the configuration, so it may not answer")
    return person


def _find(reader: Reader, identifier: str) -> Approval:
    exact = reader.approval(identifier)
    if exact is not None:
        return exact
    waiting = reader.pending()
    if identifier == "last" and not waiting:
        common.fail("No approvals are pending.")
    wanted = identifier if identifier.startswith(_PREFIX) else _PREFIX + identifier
    found = waiting[-1:] if identifier == "last" else [each for each in waiting if each.startswith(wanted)]
    if len(found) > 1:
        common.fail(f"{identifier} could be any of: {', '.join(found)}")
    whole = reader.approval(found[0]) if found else None
    if whole is None:
        common.fail(f"no pending approval {identifier}; see: ringfence approvals list")
    return whole


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _summary(outline: Outline) -> Iterator[str]:
    approval = outline.approval
    yield f"{approval.id}  {question.subject(approval, foreign)}"
    yield from _about(approval)
    if outline.beginning is not None:
        text = safe(cut(invisible.visible(outline.beginning), _WIDTH))
        yield f"  {question.LONG[0]:<10} {text} ({outline.size:,} characters in all)"
    for label, value in question.sent(approval) if outline.beginning is None else ():
        yield f"  {label:<10} {cut(json_text(value, indent=None), _WIDTH)}"
    yield from _lines(question.unshown(approval))


def _in_full(approval: Approval) -> Iterator[str]:
    yield ""
    yield f"{approval.id}  {question.subject(approval, foreign)}"
    yield from _about(approval)
    yield from _lines(question.consequences(approval))
    for label, value in question.sent(approval):
        yield f"  {label}"
        yield quoted(json_text(value), MARGIN)
    yield from _lines(question.unshown(approval))


def _about(approval: Approval) -> Iterator[str]:
    yield from _lines(question.caller(approval))
    now = time.time()
    ago = f"{short_time(now - approval.asked_at, units=2)} ago"
    yield f"  asked      {moment(approval.asked_at)}, {ago}; call {safe(approval.call_id)}"
    yield f"  expires    in {short_time(approval.expires_at - now, units=2)}"
    yield from _lines(question.terms(approval, foreign))


def _lines(lines: Iterable[question.Line]) -> Iterator[str]:
    for label, text in lines:
        yield safe(f"  {label:<10} {text}")


def _offer(offer: Offer) -> Iterator[str]:
    yield safe(
        f"  STANDING   {offer.times} more calls like it, until {moment(offer.expires_at)}, without asking again:"
    )
    for name, text in words(offer.shape, lambda value: json_text(value, indent=None)):
        yield safe(f"             {name}: {text}")


def _standing_json(found: StandingApproval) -> Json:
    names = ("id", "tool", "principal", "rule", "person", "times", "used", "made_at", "expires_at")
    arguments = dict(words(found.shape, lambda value: json_text(value, indent=None)))
    return {**{name: getattr(found, name) for name in names}, "arguments": arguments}


def _place(config_path: Path | None, demo: bool) -> str:
    if demo:
        return " --demo"
    return f" --config {safe(shlex.quote(str(config_path)))}" if config_path is not None else ""


def _as_json(outline: Outline) -> Json:
    approval = outline.approval
    cut_off: Json = {} if outline.beginning is None else {"beginning": outline.beginning, "characters": outline.size}
    answers: list[Any] = [{"person": a.person, "approve": a.approve, "at": a.at} for a in approval.answers]
    return {
        "id": approval.id,
        "tool": approval.tool,
        "agent": approval.principal,
        "person": approval.person,
        "call_id": approval.call_id,
        "asked_at": approval.asked_at,
        "expires_at": approval.expires_at,
        "rule": approval.rule,
        "roles": list(approval.roles),
        "people": approval.people,
        "self": approval.self_approval,
        "state": approval.state,
        "answers": answers,
        "terms": approval.terms,
        "arguments": approval.summary.get("arguments"),
        "summary": approval.summary,
        **cut_off,
    }
