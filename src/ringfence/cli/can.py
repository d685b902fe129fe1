"""`ringfence can`: what would happen to a call and why, without making it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from pathlib import Path

import typer

from ringfence.cli import common, options
from ringfence.cli.terminal import painted, safe
from ringfence.compose.offline import (
    AcceptedTools,
    catalog_of,
    dispatcher_of,
    foresight_of,
    permissions_of,
    pins_of,
    principal_of,
)
from ringfence.compose.runs import contracts_of
from ringfence.config import Config
from ringfence.core import canonical
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.labels import flow_of, labelled
from ringfence.core.model import Call, Contract, Flow, Json, Principal, ServerSpec, Status, Transport
from ringfence.core.record import dataclass
from ringfence.governance.approvals import Requirement
from ringfence.governance.foresight import Foresight, Judgement
from ringfence.governance.policy import Weighed, widened

_DEPENDS = 1
"""The exit code where it depends on arguments that were not given."""
_NOT_ACCEPTED = "not checked: no definition of the tool is accepted yet; see it and accept it: ringfence check --accept"
_SAID = {
    "allow": "would run",
    "ask": "would wait for a person",
    "sandbox": "would run in a sandbox of its own",
    "ask+sandbox": "would wait for a person, and then run in a sandbox of its own",
    "deny": "would be denied",
    "error": "would be denied, because a rule could not be evaluated",
}


@dataclass(slots=True)
class _Answer:
    """What is known, stop by stop."""

    status: Status
    verdict: str
    headline: str
    stops: list[tuple[str, str]] = field(default_factory=list)
    told: Json = field(default_factory=dict)
    depends: tuple[str, ...] = ()


def can(
    agent: str = typer.Argument(..., metavar="AGENT", help="The agent's name; `local` is the local user's."),
    tool: str = typer.Argument(..., metavar="TOOL", help="The capability's name."),
    args: str | None = typer.Option(
        None, "--args", metavar="JSON", help="Its arguments, a JSON object. Left out: they are taken as not known."
    ),
    labels: str = typer.Option(
        "",
        "--labels",
        metavar="A,B",
        help="Labels in force, of what the agent read before: private,untrusted.",
    ),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Tell what would happen to a call and why, without making it: no server, box, budget or record is touched.

    It says which contract and rules apply, whether the arguments fit the accepted definition, who would have to approve
    it, its budget, where it would run, and what it could change. Without --args it says which rules depend on them.

    Exit code: 0 it would run, 1 that depends on arguments (give --args), 2 wrong usage, unknown tool or arguments that
    do not fit, 125 not available, 126 denied or a person must approve first.

    \b
    ringfence can local create_ticket
    ringfence can local create_ticket --args '{"priority": "high"}'
    ringfence can local send_mail --labels private,untrusted
    """
    arguments = None if args is None else _arguments(args)
    settings = common.demo_config() if demo else common.load(config_path)
    held = tuple(filter(None, (each.strip() for each in labels.split(","))))
    answer = _answer(settings, principal_of(settings, agent), tool, arguments, held)
    if as_json:
        told = {"agent": agent, "tool": tool, "status": str(answer.status), "verdict": answer.verdict}
        common.dump({**told, "depends_on": list(answer.depends), "says": answer.headline, **answer.told})
    else:
        kind = {Status.SUCCESS: "good", Status.APPROVAL_REQUIRED: "warning"}.get(answer.status, "bad")
        print(painted(safe(f"{tool} by {agent} {answer.headline}"), "warning" if answer.depends else kind))
        for label, text in answer.stops:
            print(safe(f"  {label:<11}{text}"))
    code = _DEPENDS if answer.depends and answer.status is Status.UNKNOWN else common.EXIT_CODES[answer.status]
    if code:
        raise typer.Exit(code)


def _arguments(text: str) -> Json:
    try:
        value = canonical.loads(text.encode("utf-8", "surrogateescape"))
    except canonical.NotCanonical as exc:
        common.fail(f"""--args: {exc}; write a JSON object: --args '{{"query": "refunds"}}'""", 2)
    if not isinstance(value, dict):
        common.fail("--args: arguments must be a JSON object", 2)
    return value


# ── The way of the call, as far as it can be known ────────────────────────────────────────────────


def _answer(
    settings: Config, principal: Principal, tool: str, arguments: Json | None, held: tuple[str, ...] = ()
) -> _Answer:
    name = tool.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    call = Call("call_none", principal, name, arguments or {}, origin="mcp-http", flow=Flow((), held))
    ahead = foresight_of(settings)
    pins = pins_of(settings)
    try:
        contract, schema = _resolved(settings, ahead, pins, call, known=arguments is not None)
        if arguments is None:
            answer = _weighed(ahead, call, contract)
            decided: Judgement | None = None
        else:
            decided = ahead.judge(call, contract)
            answer = _judged(ahead, decided)
        answer.stops.insert(0, ("contract", _contract(contract)))
        answer.stops.insert(1, ("arguments", schema))
        if held or labelled(contract):
            own = contract.labels if decided is None else flow_of(decided.call, contract).own
            answer.stops.insert(2, ("labels", _labels(contract, own, held, known=decided is not None)))
            answer.told |= {"labels": {"call": list(own), "in_force": list(held)}}
        answer.told |= {"contract": _contract_json(contract), "arguments": schema}
        if schema == _NOT_ACCEPTED and answer.status is not Status.DENIED:
            answer.headline += ", but it is not available before its definition is accepted (not_pinned)"
            answer.status, answer.told["reason_code"] = Status.UNAVAILABLE, "not_pinned"
        if answer.status not in (Status.DENIED, Status.VALIDATION_FAILURE):
            _check_carried_out(settings, call, contract, decided)
        _place(settings, call, contract, decided, answer)
    except (Refused, Unavailable) as exc:
        status = exc.status if isinstance(exc, Refused) else Status.UNAVAILABLE
        headline = "would be refused" if isinstance(exc, Refused) else "could not run"
        told = {"reason_code": exc.reason_code, "reason": exc.message}
        verdict = "deny" if isinstance(exc, Refused) else "unavailable"
        return _Answer(status, verdict, f"{headline} ({exc.reason_code}): {exc.message}", told=told)
    return answer


def _labels(contract: Contract, own: tuple[str, ...], held: tuple[str, ...], *, known: bool) -> str:
    may = [] if known else [f"perhaps {each.label}" for each in contract.labels_when if each.label not in own]
    said = ", ".join((*own, *may)) or "none of its own"
    return f"{said}; in force: {', '.join(held) or 'none (--labels says which are)'}"


def _resolved(
    settings: Config, ahead: Foresight, pins: AcceptedTools, call: Call, *, known: bool
) -> tuple[Contract, str]:
    """The contract, and what can be said of the arguments. Raises Refused."""
    _, contract = ahead.contract(call)
    permissions_of(settings).of(call.principal).require_tool(call, contracts_of(settings))
    if contract.is_served and not pins.of(contract):
        server = settings.servers.get(contract.server or "")
        if server is not None and server.pins == "first_use":
            return contract, "not checked: the tool's definition is accepted when it is first seen"
        return contract, _NOT_ACCEPTED
    if not known:
        return contract, "not given: --args"
    found = catalog_of(settings, pins).resolve(call, settings.environment)
    assert found.definition is not None
    whose = "accepted" if contract.is_served else "own"
    return found.contract, f"fit the tool's {whose} definition ({found.definition.digest[:19]}…)"


def _judged(ahead: Foresight, got: Judgement) -> _Answer:
    status = Status.SUCCESS
    if got.verdict in ("deny", "error"):
        status = Status.DENIED
    elif got.asks:
        status = Status.APPROVAL_REQUIRED
    answer = _Answer(status, got.verdict, _SAID[got.verdict])
    answer.stops.append(("policy", got.decision.reason))
    answer.told["policy"] = {
        "reason": got.decision.reason,
        "rules": list(got.decision.rules),
        "decisive": list(got.decisive),
        "error": got.decision.error,
    }
    if shadow := got.decision.shadow:
        answer.stops.append(("shadow", f"with {', '.join(shadow.rules)} in force: {shadow.verdict} ({shadow.reason})"))
        answer.told["shadow"] = {"rules": list(shadow.rules), "verdict": shadow.verdict, "reason": shadow.reason}
    if got.requirement is not None:
        _approval(ahead, got.requirement, answer)
    return answer


def _weighed(ahead: Foresight, call: Call, contract: Contract) -> _Answer:
    """Where the arguments are not known."""
    got = ahead.weigh(call, contract)
    verdicts, depends = _with_approval(ahead, call, contract, got)
    if len(verdicts) == 1:
        (verdict,) = verdicts
        status = Status.DENIED if verdict in ("deny", "error") else Status.SUCCESS
        status = Status.APPROVAL_REQUIRED if "ask" in verdict else status
        answer = _Answer(status, verdict, f"{_SAID[verdict]}, whatever its arguments are")
    else:
        words = " or ".join(sorted(verdicts))
        answer = _Answer(Status.UNKNOWN, "depends", f"depends on its arguments: {words}", depends=depends)
        answer.stops.append(("depends on", f"{', '.join(depends)}; to know, give --args"))
        answer.told["possible"] = sorted(verdicts)
    if got.decision.rules:
        answer.stops.append(("policy", f"in any case {', '.join(got.decision.rules)}"))
    answer.told["policy"] = {"rules": list(got.decision.rules), "open": list(got.open)}
    return answer


def _with_approval(
    ahead: Foresight, call: Call, contract: Contract, got: Weighed
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The verdicts with what the contract itself asks, and what they depend on."""
    asks = ahead.contract_asks(call, contract)
    if asks is False:
        return got.verdicts, got.depends
    wide = widened(got.verdicts)
    if asks:
        wide = frozenset(each for each in wide if "ask" in each or each in ("deny", "error"))
        return wide, got.depends if len(wide) > 1 else ()
    named = f"approval {contract.approval}" if contract.approval != "none" else "programs that people are asked for"
    return wide, (*got.depends, named) if wide != got.verdicts else got.depends


def _approval(ahead: Foresight, requirement: Requirement, answer: _Answer) -> None:
    able = ahead.approvals.able(requirement)
    people = "the local user" if able is None else ", ".join(able) or "no person has these roles"
    many = "" if requirement.people == 1 else f"{requirement.people} people, "
    roles = f" with {' and '.join(requirement.roles)}" if requirement.roles else ""
    own = "" if requirement.self_approval or able is None else "; not the agent's own person"
    text = f"{', '.join(requirement.names)}: {many}{people}{roles}, within {requirement.expires_seconds:g} s{own}"
    answer.stops.append(("approval", text))
    answer.told["approval"] = {
        "rules": list(requirement.names),
        "roles": list(requirement.roles),
        "people": able,
        "needed": requirement.people,
        "expires_seconds": requirement.expires_seconds,
        "self": requirement.self_approval,
    }


# ── Where it would run, and what it could do ──────────────────────────────────────────────────────


def _check_carried_out(settings: Config, call: Call, contract: Contract, decided: Judgement | None) -> None:
    """What the configuration itself makes impossible. Raises Refused, Unavailable."""
    if not contract.is_served or decided is None or contract.server is None:
        return
    try:
        dispatcher_of(settings).check(call, replace(contract, secrets=()), decided.decision)
    except Unavailable as exc:
        # Whether boxes can be made, and secrets be had, is known only where that is tried.
        if exc.reason_code != "no_backend":
            raise


def _place(settings: Config, call: Call, contract: Contract, decided: Judgement | None, answer: _Answer) -> None:
    spec = settings.servers.get(contract.server or "")
    decision = decided.decision if decided is not None else None
    effects = dispatcher_of(settings).possible_effects(call, contract, decision)
    sandbox = decided is not None and decided.decision.sandbox
    runs = "; ".join(_runs(settings, contract, spec, sandbox=sandbox))
    budget = _budget(contract)
    changes = "nothing outside can change"
    if effects:
        can_do = {
            "acts": "whatever its server does",
            "sends": "it may send to the network",
            "writes": "it may write to folders of the host",
            "copies": "what it leaves is copied to a folder of the host",
        }
        changes = ", ".join(text for name, text in can_do.items() if getattr(effects, name))
        if effects.declared_read:
            changes = f"declared a read, which changes nothing; its server could: {changes}"
        lasts = dispatcher_of(settings).lasts(contract, decision)
        if lasts is not None:
            until = "gone with the call" if lasts == "call" else "until that ends"
            changes += f"; in its server's box alone, {until}"
    for label, text in (("budget", budget), ("runs", runs), ("effect", changes)):
        answer.stops.append((label, text))
    answer.told |= {"budget": _rate(contract), "runs": runs, "effect": changes, "effect_possible": bool(effects)}


def _runs(settings: Config, contract: Contract, spec: ServerSpec | None, *, sandbox: bool) -> Iterator[str]:
    network = contract.network
    if contract.transport is Transport.SANDBOXED_EXEC:
        yield f"in a box ({settings.sandbox.backend})"
    elif spec is None:
        yield "on a server that is known when its tools are: the contract names none"
    elif spec.url is not None:
        yield f"on server {spec.name}, elsewhere: {spec.url}"
    elif spec.placement == "unsafe_host":
        yield f"on server {spec.name}, in no box (unsafe_host)"
        network = ""
    else:
        own = "a fresh box for this call alone" if sandbox or contract.mounts else "its box"
        yield f"on server {spec.name} in {own} ({settings.sandbox.backend})"
        network = spec.network
    if network == "denied" and (spec is None or spec.url is None):
        yield "without network"
    elif network in settings.networks:
        yield f"network {network}: {', '.join(settings.networks[network].allow) or 'nothing'}"
    if contract.secrets:
        yield f"secrets {', '.join(contract.secrets)}"
    yield f"at most {contract.timeout_seconds:g} s"


def _contract(contract: Contract) -> str:
    labels = f", labels {', '.join(contract.labels)}" if contract.labels else ""
    return f"{contract.name}, mode {contract.mode}, {contract.transport}{labels}"


def _contract_json(contract: Contract) -> Json:
    return {"name": contract.name, "digest": contract.digest, "mode": str(contract.mode), "server": contract.server}


def _rate(contract: Contract) -> Json:
    rate = contract.rate
    return {"per_minute": rate.per_minute, "burst": rate.burst, "concurrent": rate.concurrent, "per_day": rate.per_day}


def _budget(contract: Contract) -> str:
    words = {"per_minute": "{} a minute", "burst": "{} at once", "concurrent": "{} at a time", "per_day": "{} a day"}
    said = [words[name].format(value) for name, value in _rate(contract).items() if value is not None]
    return f"{', '.join(said)}, as configured; what is left of it is not looked at" if said else "no limits"
