"""Carries out a grant of one of our own tools: a box is made, its program run, and what was seen of it reported; or
something is done with a session, by whoever keeps it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringfence.box import NO_OUTSIDE, BoxReport, Outside, Ran
from ringfence.errors import Refused, Unavailable, beginning
from ringfence.model import Answer, Call, Contract, Grant, Json, Principal, Status
from ringfence.ports import Access, Backend, Lender, Outward, Packed, Packing, Passage
from ringfence.sandbox import order
from ringfence.sandbox.order import Provision
from ringfence.sandbox.results import Told, fitting, judge
from ringfence.sandbox.screening import Screen
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
        self.screens: Callable[[], Screen] = Screen
        """One for each call: what it comes to passes through it."""
        self.outward: Callable[[], Outward] | None = None
        """Makes ways out of boxes, when one is wanted; None: there are none."""
        self.lender: Callable[[], Lender] | None = None
        """Has the secrets that sessions use; None: there are none."""
        self.packing: Callable[[], Packing] | None = None
        """Installs packages for boxes, when some are wanted; None: nothing can be."""
        self._keeper = keeper
        self._carrying: Carrying | None = None

    @property
    def keeper(self) -> Callable[[], Keeping] | None:
        return self._keeper

    def check(self, call: Call, contract: Contract) -> None:
        """Refuse what could not run as asked. Raises Refused, Unavailable."""
        if self._keeper is None and _wants_session(call, contract):
            raise Unavailable(
                "no_session", "there are no sessions here: leave session out, and each call has its own box"
            )
        if contract.commands is not None and "session" in call.arguments:
            text = f"{contract.name} names the programs that may run, and the box of a session has all of them: leave"
            raise Refused(
                Status.VALIDATION_FAILURE, "commands_in_session", f"{text} session out, and it has its own box"
            )
        access = order.access(call, contract, self.provision)
        if access is not None:
            self._way_out(access).check(access)
            if access.installs is not None:
                self._packing().desk(access.installs)
        packages = order.packages(call, contract, self.provision)
        if packages:
            self._packing().check(packages)
            # An agent has what the operator's patterns name.
            asked = () if call.attached is not None else tuple(call.arguments.get("packages") or ())
            self._packing().check(asked, self.provision.installable)
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
        screen = self.screens()
        try:
            if _wants_session(grant.call, grant.contract):
                answer = await self._sessions().run(grant, self.isolation(), screen)
            else:
                answer = await self._box(grant, screen)
        finally:
            screen.finish()
        return replace(answer, redactions=screen.rules, secrets=screen.secrets) if screen.rules else answer

    async def _box(self, grant: Grant, screen: Screen) -> Answer:
        call, contract = grant.call, grant.contract
        with beginning("the box"):
            packed = await self._packed(grant)
            wanted = order.spec(call, contract, self.provision.limits, await self._passage(grant))
            wanted = wanted if packed is None else replace(wanted, packages=(packed.folder,))
            if contract.commands is not None:
                wanted = replace(wanted, programs=order.programs(grant))
        # What a contract redacts, nobody sees as it comes.
        as_it_comes = call.attached is not None and not contract.redact and contract.result.fields is None
        tell = screen.attached(call.attached).tell if call.attached is not None and as_it_comes else None
        try:
            report = await to_the_end(self.backend.run(wanted, tell))
        except ValueError as exc:
            raise Refused(Status.VALIDATION_FAILURE, "bad_arguments", f"no such box can be made: {exc}") from None
        report = await screen.artifacts(screen.report(report), wanted.output)
        report = report if packed is None else replace(report, packages=packed.packages)
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

    async def _passage(self, grant: Grant) -> Passage:
        access = order.access(grant.call, grant.contract, self.provision)
        return Passage() if access is None else await self._way_out(access).passage(access)

    async def _packed(self, grant: Grant) -> Packed | None:
        packages = order.packages(grant.call, grant.contract, self.provision)
        return await self._packing().packed(packages) if packages else None

    def _packing(self) -> Packing:
        if self.packing is None:
            raise Unavailable("no_packages", "nothing can be installed here")
        return self.packing()

    def _way_out(self, access: Access) -> Outward:
        if self.outward is not None:
            return self.outward()
        if access.secrets:
            raise Unavailable("no_secret", "there are no secrets here")
        raise Unavailable("no_network_control", "boxes have no network here")

    # ── Sessions ──

    def _sessions(self) -> Carrying:
        """Loaded when the first session is wanted: most boxes are for one run."""
        if self._carrying is None:
            if self._keeper is None:
                raise Unavailable("no_session", "there are no sessions here")
            module: Any = importlib.import_module("ringfence.sandbox.calls.carrying")
            self._carrying = module.Carrying(self._keeper(), self.provision, self._passage, self._packed, self._lends)
        return self._carrying

    def _lends(self) -> Lender:
        """Of the configuration that is in force when it is asked for."""
        if self.lender is None:
            raise Unavailable("no_secret", "a session needs a secret, and there are none here")
        return self.lender()

    async def state_of(self, call: Call) -> tuple[int, str] | None:
        """What an approval is bound to besides: the session's last step, and the digest of its files."""
        session = call.arguments.get("session")
        if self._keeper is None or not isinstance(session, str):
            return None
        return await self._sessions().state_of(call.principal, session)

    async def outside(self, call: Call) -> Outside:
        """What the box of the session has that this call is for. Raises Refused, Unavailable."""
        session = call.arguments.get("session")
        if self._keeper is None or not isinstance(session, str):
            return NO_OUTSIDE
        return await self._sessions().outside(call.principal, session)

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
