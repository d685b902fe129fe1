"""Carries out what was granted, by the contract's transport, and nothing else.

`run` takes a Grant: there is no other way to reach a server or a box. What cannot be given as the contract or policy
asks (a box, a secret, a confined network) is refused here, never replaced by less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

from ringfence.core.box import NO_OUTSIDE, Mount, Outside
from ringfence.core.errors import OutcomeUnknown, Refused, Unavailable, WorkProgress
from ringfence.core.model import (
    Answer,
    Call,
    Contract,
    Decision,
    Grant,
    Json,
    Mode,
    NetworkSpec,
    ServerSpec,
    Status,
    Transport,
)
from ringfence.core.ports import TURNED_AWAY, Access, Channel, Router, UpstreamRequest, Upstreams
from ringfence.core.record import dataclass
from ringfence.governance import effects
from ringfence.governance.effects import PossibleEffects
from ringfence.sandbox.tools.executor import Executor
from ringfence.sandbox.tools.toolkit import KIT

_RETRY_SECONDS = 0.1
_NEVER_BEGAN = (Status.DENIED, Status.VALIDATION_FAILURE, Status.APPROVAL_REQUIRED, Status.UNAVAILABLE)
"""What ends an attempt before it begins, and so says nothing of an earlier one that may have run."""


@dataclass(frozen=True, slots=True)
class DispatchTargets:
    """What contracts name: the servers and networks of the configuration in force."""

    servers: Mapping[str, ServerSpec]
    networks: Mapping[str, NetworkSpec]
    router: Callable[[], Router] | None = None


class Dispatcher:
    """Sends a granted call to a server, or into a box."""

    def __init__(self, upstreams: Upstreams, targets: DispatchTargets, executor: Executor | None = None) -> None:
        self._upstreams = upstreams
        self.executor = executor
        self.targets = targets

    def check(self, call: Call, contract: Contract, decision: Decision) -> None:
        """Refuse what could not be carried out as asked, before a person is asked for approval."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            self._require_executor(contract).check(call, contract)  # and where policy wants a sandbox, this is one
            return
        spec = self.targets.servers.get(contract.server or "")
        if spec is None:
            raise Unavailable("no_server", f"{contract.name} names no server that is configured")
        if (contract.transport is Transport.DIRECT) is not spec.is_api:
            kind = "is an HTTP API" if spec.is_api else "is a server of MCP"
            raise Unavailable(
                "no_transport", f"{contract.name} has transport {contract.transport}, and {spec.name} {kind}"
            )
        if contract.secrets:
            self._check_secrets(call, contract, spec)
        if spec.placement == "session":
            _check_session_server(call, contract, spec)
        if decision.sandbox:
            self._check_sandbox(contract, spec, "policy wants it in a sandbox")
        if contract.mounts:
            self._check_mounts(contract, spec)
        if contract.network != "denied":
            self._check_network(contract, spec)

    def _check_sandbox(self, contract: Contract, spec: ServerSpec, why: str) -> None:
        """Whether the server can have an instance in a fresh box for this call alone."""
        if spec.url is not None or spec.placement == "session":
            where = "runs elsewhere" if spec.url is not None else "lives in the agent's own box"
            text = f"{contract.name}: {why}, and its server {spec.name} {where}"
            raise Refused(Status.DENIED, "sandbox_impossible", text)
        self._require_executor(contract)

    def _check_mounts(self, contract: Contract, spec: ServerSpec) -> None:
        self._check_sandbox(contract, spec, "its contract names mounts")
        has = {(mount.host, mount.at, mode) for mount in spec.mounts for mode in ("ro", mount.mode)}
        for mount in contract.mounts:
            if (mount.host, mount.at, mount.mode) not in has:
                text = f"{contract.name} is to see {mount.host} at {mount.at} ({mount.mode}), and server {spec.name}"
                raise Refused(Status.DENIED, "mounts", f"{text} does not: write it under its mounts, too")

    def _check_network(self, contract: Contract, spec: ServerSpec) -> None:
        if spec.url is None and spec.placement == "unsafe_host":
            text = f"{contract.name}: the network of a server that runs in no box cannot be confined"
            raise Unavailable("no_network_control", text)
        if spec.url is None:
            if spec.network != contract.network:
                text = f"{contract.name} is for network {contract.network}, and the box of server {spec.name} has"
                raise Refused(Status.DENIED, "network", f"{text} {spec.network}")
            return
        parts = urlsplit(spec.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        network = self.targets.networks.get(contract.network)
        if network is None or not network_allows(network, parts.hostname or "", port):
            raise Refused(
                Status.DENIED,
                "network",
                f"{contract.name}: {parts.hostname}:{port} is not in network {contract.network}",
            )

    def _check_secrets(self, call: Call, contract: Contract, spec: ServerSpec) -> None:
        if spec.url is not None:
            self._router(contract).check(_access(call, contract, spec))
            return
        # A server gets its secrets when it starts; no later call can add one.
        missing = [name for name in contract.secrets if name not in spec.secrets]
        if missing:
            text = f"{contract.name} needs {', '.join(missing)}, which its server is not given"
            raise Unavailable("no_secret", f"{text}: write it under servers: {spec.name}: secrets")

    async def _headers(self, grant: Grant) -> Mapping[str, str]:
        """The secrets of a call to a remote server. Raises Refused, Unavailable."""
        contract = grant.contract
        spec = self.targets.servers[contract.server or ""]
        if spec.url is None:
            return {}
        return await self._router(contract).headers(_access(grant.call, contract, spec))

    def _router(self, contract: Contract) -> Router:
        if self.targets.router is None:
            raise Unavailable("no_secret", f"{contract.name} needs a secret, and there are none here")
        return self.targets.router()

    def environment(self, call: Call, contract: Contract) -> Json:
        """What a box of ours has around its program. Raises Unavailable."""
        return self._require_executor(contract).environment(call, contract)

    def _require_executor(self, contract: Contract) -> Executor:
        if self.executor is None:
            raise Unavailable(
                "no_backend", f"{contract.name} needs a box, and none can be made here: `ringfence host` says why"
            )
        return self.executor

    def isolation(self, call: Call, contract: Contract) -> Json:
        """The `isolation` fact of whatever would carry this out."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            return self._require_executor(contract).isolation(call, contract)
        return self._upstreams.isolation(contract.server or "")

    def lasts(self, contract: Contract, decision: Decision | None) -> Literal["call", "server"] | None:
        """How long what a call of a server changes is there, where that is in the server's box alone."""
        if not contract.is_served or contract.mode is Mode.READ:
            return None
        spec, fresh = self._answering(contract, decision)
        if spec is None or effects.effects_of_server(spec, self.targets.servers.values()):
            return None
        return "call" if fresh else "server"

    def possible_effects(
        self, call: Call, contract: Contract, decision: Decision | None, session: Outside = NO_OUTSIDE
    ) -> PossibleEffects:
        """What the call may change outside; `session` is what the box of its session can reach."""
        spec, _ = self._answering(contract, decision)
        return effects.possible_effects(call, contract, session, spec, self.targets.servers.values())

    def _answering(self, contract: Contract, decision: Decision | None) -> tuple[ServerSpec | None, bool]:
        """The server that answers, placed and with the mounts as for this call, and whether it is started for it
        alone."""
        spec = self.targets.servers.get(contract.server or "")
        if not contract.is_served or spec is None:
            return None, False
        mounts = _mounts(contract, spec)
        fresh = mounts is not None or (decision is not None and decision.sandbox)
        if fresh:
            spec = replace(spec, placement="own")
        return spec if mounts is None else replace(spec, mounts=mounts, volumes=()), fresh

    async def state(self, call: Call, contract: Contract) -> tuple[int, str, bool] | None:
        """The last step of a call's session, and the digest of its files. Raises Refused, Unavailable."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            return await self._require_executor(contract).state_of(call)
        if call.box is None or self.executor is None:
            return None
        return await self.executor.state_of(call)

    async def snapshot(self, call: Call, contract: Contract) -> str | None:
        """The digest of the snapshot that a session is to be opened from. Raises Refused, Unavailable."""
        if contract.transport is not Transport.SANDBOXED_EXEC:
            return None
        return await self._require_executor(contract).snapshot_of(call, contract)

    async def outside(self, call: Call, contract: Contract) -> Outside:
        """What the session of a call has outside, where the call makes anything happen. Raises Refused, Unavailable."""
        tool = KIT.get(contract.tool) if contract.transport is Transport.SANDBOXED_EXEC else None
        if tool is None or not tool.changes.by_session:
            return NO_OUTSIDE
        return await self._require_executor(contract).outside(call)

    async def run(self, grant: Grant, channel: Channel, asked: Callable[[Json | None], None] | None = None) -> Answer:
        """Carry out a grant once; again only where nothing was sent, or where the contract says `idempotent`.

        `asked` gets what the box of a server asked of the network in each attempt, however that ended.
        """
        if time.monotonic() > grant.expires_at:
            with WorkProgress():
                raise Unavailable("grant_expired", "the grant of this call has expired")
        contract = grant.contract
        left = _time_left(grant)
        attempt = 1
        problem: Unavailable | OutcomeUnknown | None = None
        while True:
            try:
                await grant.recheck()
                answer = await self._attempt(grant, channel, left, asked)
                return replace(answer, attempts=attempt) if attempt > 1 else answer
            except (Unavailable, OutcomeUnknown) as exc:
                # Once an attempt may have run, a later one that never started does not undo it.
                if problem is None or problem.nothing_begun or isinstance(exc, OutcomeUnknown):
                    problem = exc
                if attempt > contract.retry.attempts or not _may_repeat(contract, exc):
                    raise problem from None
            except Refused as exc:
                if problem is not None and not problem.nothing_begun and exc.status in _NEVER_BEGAN:
                    raise problem from None
                raise
            pause = _RETRY_SECONDS * 2 ** (attempt - 1)
            left = _time_left(grant) - pause
            if left <= 0:
                raise problem
            await asyncio.sleep(pause)
            attempt += 1

    async def _attempt(
        self, grant: Grant, channel: Channel, timeout: float, asked: Callable[[Json | None], None] | None
    ) -> Answer:
        contract = grant.contract
        call = grant.call
        if contract.transport is Transport.SANDBOXED_EXEC:
            with WorkProgress():
                executor = self._require_executor(contract)
            return await executor.run(grant)
        mounts = _mounts(contract, self.targets.servers.get(contract.server or ""))
        request = UpstreamRequest(
            server=contract.server or "",
            principal=call.principal,
            method=call.method,
            params=_params(grant),
            channel=channel,
            timeout=timeout,
            definition=grant.definition,
            session=call.session,
            log_level=call.log_level,
            box=call.box,
            fresh=grant.decision.sandbox or mounts is not None,
            mounts=mounts,
            changes=contract.mode is not Mode.READ,
            asked=asked,
            recheck=grant.recheck,
        )
        if contract.secrets:
            with WorkProgress():
                request = replace(request, headers=await self._headers(grant))
        try:
            result = await self._upstreams.request(request)
        except Unavailable as exc:
            # So `ports.Upstreams` has it: nothing was sent. A list that cannot be used was asked for.
            exc.nothing_begun = exc.reason_code != "server_listing"
            raise
        except OutcomeUnknown as exc:
            if exc.reason_code not in TURNED_AWAY:
                raise
            if contract.mode is Mode.READ:
                raise Unavailable(exc.reason_code, exc.message) from None
            text = f"{exc.message}; whether it had an effect is not known"
            raise OutcomeUnknown(exc.reason_code, text, answered=exc.answered) from None
        status, code = (Status.FAILED, "tool_error") if result.get("isError") else (Status.SUCCESS, "ok")
        box = (call.principal, call.box) if call.box is not None else None
        isolation = self._upstreams.isolation(request.server, fresh=request.fresh, box=box)
        return Answer(result, status, code, isolation=isolation)


def network_allows(network: NetworkSpec, host: str, port: int) -> bool:
    """Whether an entry (`host`, `*.ending`, an address or a range, each with `:port` or for every port) covers it."""
    from ringfence.egress import names, rules  # noqa: PLC0415 - most calls have no network

    try:
        place = names.Endpoint(names.host(host), port)
    except names.BadName:
        return False
    return any(rules.pattern(entry).covers(place.host, port) for entry in network.allow)


def _mounts(contract: Contract, spec: ServerSpec | None) -> tuple[Mount, ...] | None:
    """What its server is to see for this call alone, with the code of its packages; None: what it always sees."""
    if not contract.mounts or spec is None:
        return None
    code = spec.mounts[-1:] if spec.packages is not None else ()
    wanted = (*contract.mounts, *code)
    same = {(m.host, m.at, m.mode) for m in wanted} == {(m.host, m.at, m.mode) for m in spec.mounts}
    return None if same else wanted


def _access(call: Call, contract: Contract, spec: ServerSpec) -> Access:
    return Access(
        secrets=contract.secrets,
        tenant=call.principal.tenant,
        capability=contract.name,
        server=spec.name,
        agent=call.principal.agent,
        call_id=call.id,
        url=spec.url,
    )


def _may_repeat(contract: Contract, problem: Unavailable | OutcomeUnknown) -> bool:
    # It would ask for the room again that others needed, or a server that is left alone.
    if problem.reason_code in ("gave_way", "circuit_open"):
        return False
    if isinstance(problem, Unavailable) and (problem.nothing_begun or contract.mode is Mode.READ):
        return "unavailable" in contract.retry.on
    return contract.idempotent or contract.idempotent_key is not None


def _check_session_server(call: Call, contract: Contract, spec: ServerSpec) -> None:
    """A server in an agent's own box is under the agent's control, so it may serve read contracts only."""
    if contract.mode is not Mode.READ:
        text = f"server {spec.name} lives in the agent's own box, where only read contracts are served"
        raise Refused(Status.DENIED, "session_placement", text)
    if call.box == "" or (call.box is None and call.kind == "tool"):
        text = f"server {spec.name} lives in your own box: name the session in _meta ringfence/session"
        raise Refused(Status.VALIDATION_FAILURE, "no_session", text)


def _time_left(grant: Grant) -> float:
    limit = grant.contract.timeout_seconds
    if grant.call.deadline is not None:
        limit = min(limit, grant.call.deadline - time.monotonic())
    return limit


def _params(grant: Grant) -> Json:
    """The request as the server gets it: exactly what was validated, matched by rules and recorded."""
    call = grant.call
    if call.method == "tools/call":
        params: Json = {"name": grant.contract.tool, "arguments": call.arguments}
    else:
        params = dict(call.arguments)
    if call.meta or call.traced:
        params["_meta"] = {**call.meta, **call.traced}
    return params
