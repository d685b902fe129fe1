"""Carries out a grant of one of our own tools: a box is made, its program run, and what was seen of it reported; or
something is done with a session, by whoever keeps it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringfence.box import BoxReport, Ran
from ringfence.errors import Refused, Unavailable
from ringfence.model import Answer, Call, Contract, Grant, Json, Principal, Status
from ringfence.ports import Backend
from ringfence.sandbox import order
from ringfence.sandbox.order import Provision
from ringfence.sandbox.results import Told, fitting, judge
from ringfence.sandbox.tools import PROGRAMS
from ringfence.sandbox.waiting import to_the_end

if TYPE_CHECKING:
    from ringfence.sandbox.calls.carrying import Carrying
    from ringfence.sandbox.verbs import Keeping

_LEVELS = ("none", "process", "gvisor", "microvm")
_INPUT = "/workspace/input/"


class Executor:
    """Our own tools, over one backend, and over whoever keeps sessions of it."""

    def __init__(self, backend: Backend, provision: Provision, keeper: Callable[[], Keeping] | None = None) -> None:
        """`keeper` finds whoever keeps sessions, when one is wanted; None where there are none."""
        self.backend = backend
        self.provision = provision
        self._keeper = keeper
        self._carrying: Carrying | None = None

    def check(self, call: Call, contract: Contract) -> None:
        """Refuse what could not run as asked. Raises Refused, Unavailable."""
        if self._keeper is None and _wants_session(call, contract):
            raise Unavailable(
                "no_session", "there are no sessions here: leave session out, and each call has its own box"
            )
        if contract.secrets:
            raise Unavailable("no_secret", f"{contract.name} needs a secret, and secrets cannot be delivered yet")
        if contract.network != "denied":
            raise Unavailable("no_network_control", f"{contract.name} needs a network, and a box has none yet")
        if contract.mounts:
            raise Unavailable("no_mounts", f"{contract.name} needs folders of the host, and a box has none yet")
        if _LEVELS.index(contract.isolation) > _LEVELS.index(self.provision.level):
            raise Unavailable(
                "no_isolation",
                f"{contract.name} demands isolation {contract.isolation}, and backend {self.backend.name}"
                f" gives {self.provision.level}",
            )
        order.check(call)
        if order.template(call, contract) not in self.provision.templates:
            known = ", ".join(self.provision.templates)
            raise Refused(
                Status.VALIDATION_FAILURE, "unknown_template", f"there is no template of that name; there are: {known}"
            )

    def isolation(self) -> Json:
        """The `isolation` fact of a box that is yet to be made."""
        return {"backend": self.backend.name, "level": self.provision.level}

    async def run(self, grant: Grant) -> Answer:
        """Once. Raises Unavailable where nothing was run."""
        if _wants_session(grant.call, grant.contract):
            return await self._sessions().run(grant, self.isolation())
        call, contract = grant.call, grant.contract
        wanted = order.spec(call, contract, self.provision.limits)
        # What a contract redacts, nobody sees as it comes.
        as_it_comes = call.attached is not None and not contract.redact and contract.result.fields is None
        tell = call.attached.tell if call.attached is not None and as_it_comes else None
        try:
            report = await to_the_end(self.backend.run(wanted, tell))
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such box can be made: {exc}") from None
        status, code = judge(report)
        ran = Ran(wanted.limits, report)
        isolation = report.isolation or self.isolation()
        if report.ended == "infra":
            text = "the box itself failed" + (f": {'; '.join(report.trouble)}" if report.trouble else "")
            return Answer(None, status, code, text, isolation, ran=ran)
        if _inputs_differ(call, report):
            text = "an input changed after it was named, so the program saw another than was agreed to"
            return Answer(None, Status.FAILED, "input_changed", text, isolation, ran=ran)
        fitted, result = fitting(Told(report), contract.result.max_bytes)
        ran = ran if fitted.report is report else Ran(wanted.limits, fitted.report)
        return Answer(result, status, code, isolation=isolation, ran=ran)

    # ── Sessions ──

    def _sessions(self) -> Carrying:
        """Loaded when the first session is wanted: most boxes are for one run."""
        if self._carrying is None:
            if self._keeper is None:
                raise Unavailable("no_session", "there are no sessions here")
            module: Any = importlib.import_module("ringfence.sandbox.calls.carrying")
            self._carrying = module.Carrying(self._keeper(), self.provision)
        return self._carrying

    async def state_of(self, call: Call) -> tuple[int, str] | None:
        """What an approval is bound to besides: the session's last step, and the digest of its files."""
        session = call.arguments.get("session")
        if self._keeper is None or not isinstance(session, str):
            return None
        return await self._sessions().state_of(call.principal, session)

    async def resources(self, principal: Principal, *, templates: bool) -> Sequence[Json]:
        """Files that sessions of this caller left. Raises Unavailable, Refused."""
        return [] if self._keeper is None else await self._sessions().resources(principal, templates=templates)

    async def close(self) -> None:
        """End every box. Sessions stay: they belong to their keeper."""
        await self.backend.close()
        if self._carrying is not None:
            await self._carrying.close()


def _wants_session(call: Call, contract: Contract) -> bool:
    return contract.tool not in PROGRAMS or "session" in call.arguments


def _inputs_differ(call: Call, report: BoxReport) -> bool:
    named = {entry["name"]: entry["sha256"] for entry in call.arguments.get("inputs") or ()}
    return any(named.get(fact.path.removeprefix(_INPUT)) != fact.sha256 for fact in report.inputs)
