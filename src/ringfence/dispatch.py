"""Carries out what was granted, by the contract's transport, and nothing else.

`run` takes a Grant: there is no other way to reach a server or a box. What cannot be given as the contract or policy
asks (a box, a secret, a confined network) is refused here, never replaced by less.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import anyio

from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import (
    Answer,
    Call,
    Contract,
    Decision,
    Grant,
    Json,
    NetworkSpec,
    ServerSpec,
    Status,
    Transport,
)
from ringfence.ports import Channel, UpstreamRequest, Upstreams
from ringfence.sandbox.executor import Executor

_RETRY_SECONDS = 0.1
_ALLOWED = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What contracts name: the servers and networks of the configuration in force."""

    servers: Mapping[str, ServerSpec]
    networks: Mapping[str, NetworkSpec]


class Dispatcher:
    """The end of the way inwards."""

    def __init__(self, upstreams: Upstreams, surroundings: Surroundings, executor: Executor | None = None) -> None:
        self._upstreams = upstreams
        self.executor = executor
        self.surroundings = surroundings

    def check(self, call: Call, contract: Contract, decision: Decision) -> None:
        """Refuse what could not be carried out as asked, before anybody is bothered for an approval."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            self._boxes(contract).check(call, contract)  # and where policy wants a sandbox, this is one
            return
        if contract.transport is not Transport.MCP:
            raise Unavailable("no_transport", f"transport {contract.transport} is not available")
        spec = self.surroundings.servers.get(contract.server or "")
        if spec is None:
            raise Unavailable("no_server", f"{contract.name} names no server that is configured")
        if contract.secrets:
            raise Unavailable("no_secret", f"{contract.name} needs a secret, and secrets cannot be delivered yet")
        if decision.sandbox:
            _refuse_sandbox(contract, spec)
        if contract.network != "denied":
            self._check_network(contract, spec)

    def _check_network(self, contract: Contract, spec: ServerSpec) -> None:
        if spec.url is None:
            raise Unavailable(
                "no_network_control", f"{contract.name}: the network of a server on this host cannot be confined yet"
            )
        parts = urlsplit(spec.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        network = self.surroundings.networks.get(contract.network)
        if network is None or not network_allows(network, parts.hostname or "", port):
            raise Refused(
                Status.DENIED,
                "network",
                f"{contract.name}: {parts.hostname}:{port} is not in network {contract.network}",
            )

    def _boxes(self, contract: Contract) -> Executor:
        if self.executor is None:
            raise Unavailable("no_backend", f"{contract.name} needs a sandbox, and no sandbox backend is available")
        return self.executor

    def isolation(self, contract: Contract) -> Json:
        """The `isolation` fact of whatever would carry this out."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            return self._boxes(contract).isolation()
        return self._upstreams.isolation(contract.server or "")

    async def state(self, call: Call, contract: Contract) -> tuple[int, str] | None:
        """The last step of a call's session, and the digest of its files. Raises Refused, Unavailable."""
        if contract.transport is not Transport.SANDBOXED_EXEC:
            return None
        return await self._boxes(contract).state_of(call)

    async def run(self, grant: Grant, channel: Channel) -> Answer:
        """Once; again only where nothing was sent, or the contract says that twice is as good as once."""
        if time.monotonic() > grant.expires_at:
            raise Unavailable("grant_expired", "the leave to run this call has expired")
        contract, left = grant.contract, _time_left(grant)
        attempt = 1
        problem: Unavailable | OutcomeUnknown | None = None
        while True:
            try:
                answer = await self._attempt(grant, channel, left)
                return replace(answer, attempts=attempt) if attempt > 1 else answer
            except (Unavailable, OutcomeUnknown) as exc:
                # Once an attempt may have run, a later one that never started does not undo it.
                problem = problem if isinstance(problem, OutcomeUnknown) else exc
                if attempt > contract.retry.attempts or not _may_repeat(contract, exc):
                    raise problem from None
            pause = _RETRY_SECONDS * 2 ** (attempt - 1)
            left = _time_left(grant) - pause
            if left <= 0:
                raise problem
            await anyio.sleep(pause)
            attempt += 1

    async def _attempt(self, grant: Grant, channel: Channel, timeout: float) -> Answer:
        contract, call = grant.contract, grant.call
        if contract.transport is Transport.SANDBOXED_EXEC:
            return await self._boxes(contract).run(grant)
        request = UpstreamRequest(
            server=contract.server or "",
            principal=call.principal,
            method=call.method,
            params=_params(grant),
            channel=channel,
            timeout=timeout,
            definition=grant.definition,
            session=call.session,
        )
        result = await self._upstreams.request(request)
        status, code = (Status.FAILED, "tool_error") if result.get("isError") else (Status.SUCCESS, "ok")
        return Answer(result, status, code, isolation=self.isolation(contract))


def network_allows(network: NetworkSpec, host: str, port: int) -> bool:
    """Whether an entry (`host`, `*.ending` or `[address]`, each with `:port` or for every port) covers this one."""
    wanted = host.strip("[]").removesuffix(".").lower()
    for entry in filter(None, map(_ALLOWED.fullmatch, network.allow)):
        name = entry[1].strip("[]").removesuffix(".").lower()
        under = len(name) > 2 and name.startswith("*.") and wanted.endswith(name[1:]) and wanted != name[1:]
        if wanted and (under or wanted == name) and entry[2] in (None, str(port)):
            return True
    return False


def _may_repeat(contract: Contract, problem: Unavailable | OutcomeUnknown) -> bool:
    if isinstance(problem, Unavailable):
        return "unavailable" in contract.retry.on
    return contract.idempotent or contract.idempotent_key is not None


def _refuse_sandbox(contract: Contract, spec: ServerSpec) -> None:
    if spec.url is not None:
        raise Refused(
            Status.DENIED,
            "sandbox_impossible",
            f"policy wants {contract.name} in a sandbox, and its server {spec.name} runs elsewhere",
        )
    raise Unavailable("no_backend", f"policy wants {contract.name} in a sandbox, and no sandbox backend is available")


def _time_left(grant: Grant) -> float:
    limit = grant.contract.timeout_seconds
    if grant.call.deadline is not None:
        limit = min(limit, grant.call.deadline - time.monotonic())
    return limit


def _params(grant: Grant) -> Json:
    """The request as the server gets it: exactly the arguments that were validated and digested."""
    call = grant.call
    if call.method == "tools/call":
        params: Json = {"name": grant.contract.tool, "arguments": call.arguments}
    else:
        params = dict(call.arguments)
    if call.inputs is not None:
        params["inputResponses"] = call.inputs
    if call.meta:
        params["_meta"] = dict(call.meta)
    return params
