"""Carries out what was granted, by the contract's transport, and nothing else.

`run` takes a Grant: there is no other way to reach a server. What cannot be given as the contract or policy asks
(a box, a secret, a confined network) is refused here, never replaced by less.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import anyio

from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import (
    Answer,
    Contract,
    Decision,
    Grant,
    Json,
    NetworkSpec,
    ServerSpec,
    Status,
    Transport,
    network_allows,
)
from ringfence.ports import Channel, UpstreamRequest, Upstreams

_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What contracts name: the servers and networks of the configuration in force."""

    servers: Mapping[str, ServerSpec]
    networks: Mapping[str, NetworkSpec]


class Dispatcher:
    """The end of the way inwards."""

    def __init__(self, upstreams: Upstreams, surroundings: Surroundings) -> None:
        self._upstreams = upstreams
        self.surroundings = surroundings

    def check(self, contract: Contract, decision: Decision) -> None:
        """Refuse what could not be carried out as asked, before anybody is bothered for an approval."""
        if contract.transport is Transport.SANDBOXED_EXEC:
            raise Unavailable("no_backend", f"{contract.name} needs a sandbox, and no sandbox backend is available")
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

    def isolation(self, contract: Contract) -> Json:
        """The `isolation` fact of whatever would carry this out."""
        return self._upstreams.isolation(contract.server or "")

    async def run(self, grant: Grant, channel: Channel) -> Answer:
        """Once; again only where nothing was sent, or the contract says that twice is as good as once."""
        if time.monotonic() > grant.expires_at:
            raise Unavailable("grant_expired", "the leave to run this call has expired")
        contract, call = grant.contract, grant.call
        request = UpstreamRequest(
            server=contract.server or "",
            principal=call.principal,
            method=call.method,
            params=_params(grant),
            channel=channel,
            timeout=_time_left(grant),
            definition=grant.definition,
            session=call.session,
        )
        attempt = 1
        problem: Unavailable | OutcomeUnknown | None = None
        while True:
            try:
                result = await self._upstreams.request(request)
                return Answer(result, bool(result.get("isError")), self.isolation(contract), attempt)
            except (Unavailable, OutcomeUnknown) as exc:
                # Once an attempt may have run, a later one that never started does not undo it.
                problem = problem if isinstance(problem, OutcomeUnknown) else exc
                if attempt > contract.retry.attempts or not _may_repeat(contract, exc):
                    raise problem from None
            pause = _RETRY_SECONDS * 2 ** (attempt - 1)
            request = replace(request, timeout=_time_left(grant) - pause)
            if request.timeout <= 0:
                raise problem
            await anyio.sleep(pause)
            attempt += 1


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
