"""`ringfence approvals`: calls that wait for an approval, and the answers. An agent asks; only a person answers."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ringfence import identity
from ringfence.cli import common
from ringfence.cli.terminal import MARGIN, confirm, cut, foreign, json_text, moment, quoted, safe
from ringfence.core import system
from ringfence.core.errors import Refused
from ringfence.core.model import Json, Person
from ringfence.governance.approvals import answer, objection
from ringfence.governance.guard import UNSEEN
from ringfence.secrets.redaction import KNOWN
from ringfence.store import Approval, Reader

_WIDTH = 100
_BESIDE = {"meta": "_meta", "asked": "asked", "inputs": "answers"}
"""What a call carries beside its arguments, and its label here."""
_REQUESTS = {
    "resources/read": "to read it once (",
    "resources/subscribe": "to be told of each change of it from now on (",
    "prompts/get": "to get a prompt (",
    "completion/complete": "to get values that complete an argument (",
}
"""What a call that is none of a tool is for."""
_PREFIX = "apr_"

approvals = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
IdArgument = typer.Argument(..., metavar="ID", help="Its id, the beginning of its id, or `last` for the newest.")


@approvals.callback()
def group() -> None:
    """List the calls that wait for an approval, and answer them.

    \b
    ringfence approvals list                    what waits, and when it expires
    ringfence approvals approve last            approve the newest
    ringfence approvals deny apr_1f             the beginning of an id is enough
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
    with common.reading(common.state_of(config_path, demo)) as reader:
        waiting = reader.approvals()
    if as_json:
        common.dump([_as_json(approval) for approval in waiting])
        return
    if not waiting:
        print("No approvals are pending.")
        return
    for approval in waiting:
        print("\n".join(_summary(approval)), end="\n\n")
    last = waiting[-1].id
    print(f"To approve the newest: ringfence approvals approve {last}{_place(config_path, demo)}   (or deny)")


@approvals.command()
def approve(
    identifier: str = IdArgument, config_path: Path | None = common.ConfigOption, demo: bool = common.DemoOption
) -> None:
    """Approve one call, to run once, after showing exactly what it is.

    It asks on the terminal itself, never on stdin, and takes `y` or `yes`. The call may still be waiting, or be made
    again before the approval expires. The first call that matches uses the approval up.

    \b
    ringfence approvals approve apr_0123456789abcdef0123
    """
    _answer(identifier, config_path, demo, approve=True)


@approvals.command()
def deny(
    identifier: str = IdArgument, config_path: Path | None = common.ConfigOption, demo: bool = common.DemoOption
) -> None:
    """Refuse one call, after showing exactly what it is.

    \b
    ringfence approvals deny last
    """
    _answer(identifier, config_path, demo, approve=False)


# ── Answering ─────────────────────────────────────────────────────────────────────────────────────


def _answer(identifier: str, config_path: Path | None, demo: bool, *, approve: bool) -> None:
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
    reason = objection(approval, person)
    if reason is not None:
        common.fail(f"{person.name} may not answer this: {reason}")
    verb = "Approve" if approve else "Deny"
    if not confirm("\n".join(_in_full(approval)), f"{verb} this call as {safe(person.name)}?"):
        common.fail("Nothing was answered; the approval is still pending.")
    with common.writing(folder) as store:
        try:
            settled = answer(store, approval.id, person, approve=approve, seen=approval)
        except Refused as exc:
            common.fail(exc.message)
    if settled.state == "pending":
        approved = sum(each.approve for each in settled.answers)
        print(f"{settled.id}: {approved} of {settled.people} people approved it; it still waits.")
    else:
        print(f"{settled.id}: {settled.state} by {safe(person.name)}.")


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
    waiting = reader.approvals()
    if identifier == "last":
        if not waiting:
            common.fail("No approvals are pending.")
        return waiting[-1]
    wanted = identifier if identifier.startswith(_PREFIX) else _PREFIX + identifier
    found = [approval for approval in waiting if approval.id.startswith(wanted)]
    if len(found) > 1:
        common.fail(f"{identifier} could be any of: {', '.join(approval.id for approval in found)}")
    if not found:
        common.fail(f"no pending approval {identifier}; see: ringfence approvals list")
    return found[0]


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _summary(approval: Approval) -> Iterator[str]:
    arguments = json_text(approval.summary.get("arguments"), indent=None)
    yield f"{approval.id}  {_what(approval)}"
    yield from _about(approval)
    yield f"  arguments  {cut(arguments, _WIDTH)}"
    for name, word in _BESIDE.items():
        if approval.summary.get(name):
            yield f"  {word:<10} {cut(json_text(approval.summary[name], indent=None), _WIDTH)}"
    yield from _removed(approval)


def _in_full(approval: Approval) -> Iterator[str]:
    yield ""
    yield f"{approval.id}  {_what(approval)}"
    yield from _about(approval)
    rules = approval.summary.get("rules")
    if isinstance(rules, list):
        yield f"  policy     {safe(', '.join(map(str, rules))) or 'no rule matched'}"
    programs = approval.summary.get("programs")
    if isinstance(programs, list):
        yield f"  programs   {safe(', '.join(map(str, programs)))}, which only an approved command has"
    if approval.summary.get("reversible") is False and approval.summary.get("mode") != "read":
        yield "  effect     cannot be undone, by its contract"
    yield "  arguments"
    yield quoted(json_text(approval.summary.get("arguments")), MARGIN)
    for name, word in _BESIDE.items():
        if approval.summary.get(name):
            yield f"  {word}"
            yield quoted(json_text(approval.summary[name]), MARGIN)
    yield from _removed(approval)


def _removed(approval: Approval) -> Iterator[str]:
    """What the caller sends and is not shown: redacted values, and characters meant to deceive the reader."""
    removed = approval.summary.get("removed")
    if not isinstance(removed, dict):
        return
    found = ", ".join(f"{count} × {name}" for name, count in removed.items() if name not in UNSEEN)
    if found:
        yield safe(f"  NOT SHOWN  the arguments hold more than this; removed for display: {found}")
    if any(name not in (*UNSEEN, KNOWN) and not name.startswith("redact[") for name in removed):
        yield "  CARE       what only looks like a secret may be anything, also code: approve it only if you know it"
    if any(name in removed for name in UNSEEN):
        yield r"  HIDDEN     the arguments hold characters that cannot be seen; they are written as \u{…}"


def _what(approval: Approval) -> str:
    server = approval.summary.get("server")
    mode = approval.summary.get("mode")
    on = f" on server {server}" if server else ""
    return f"{foreign(approval.tool)}{safe(f'{on} ({mode})' if mode else on)}"


def _about(approval: Approval) -> Iterator[str]:
    now = time.time()
    agent = approval.principal.removeprefix("local/")
    whose = f" for {approval.person}" if approval.person else ""
    origin = approval.summary.get("origin")
    yield safe(f"  agent      {agent}{whose}{f' over {origin}' if origin else ''}")
    method = approval.summary.get("method")
    if method is not None:
        yield safe(f"  request    {_REQUESTS.get(method, '')}{method}{')' if method in _REQUESTS else ''}")
    ago = f"{_span(now - approval.asked_at)} ago"
    yield f"  asked      {moment(approval.asked_at)}, {ago}; call {safe(approval.call_id)}"
    yield f"  expires    in {_span(approval.expires_at - now)}"
    roles = " and ".join(role.replace("|", " or ") for role in approval.roles) or "any person"
    many = f", {approval.people} people" if approval.people > 1 else ""
    own = "" if approval.self_approval or not approval.person else f", but not {approval.person}"
    yield safe(f"  rule       {approval.rule}; may answer: {roles}{own}{many}")
    session = approval.summary.get("session")
    if isinstance(session, dict):
        yield f"  session    {_session(session)}"
        if session.get("runs_on"):
            yield safe(f"             {session['runs_on']}")
    if snapshot := approval.summary.get("snapshot"):
        yield f"  snapshot   {foreign(str(snapshot))}"
    for given in approval.answers:
        yield safe(f"  answered   {given.person}: {'yes' if given.approve else 'no'}")


def _session(shown: Json) -> str:
    name, step = shown.get("id"), shown.get("after_step")
    if step is None:
        return foreign(str(name))
    after = f"after its step {step}; void where the session goes on before the answer is used"
    return f"{foreign(str(name))}, {after}" if name else after


def _span(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            smaller = {"d": (3600, "h"), "h": (60, "min"), "min": (1, "s")}[name]
            rest = whole % size // smaller[0]
            return f"{whole // size} {name}" + (f" {rest} {smaller[1]}" if rest else "")
    return f"{whole} s"


def _place(config_path: Path | None, demo: bool) -> str:
    if demo:
        return " --demo"
    return f" --config {safe(shlex.quote(str(config_path)))}" if config_path is not None else ""


def _as_json(approval: Approval) -> Json:
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
        "arguments": approval.summary.get("arguments"),
        "summary": approval.summary,
    }
