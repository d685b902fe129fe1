"""`ringfence box mcp`: one box as an MCP server, for its owner alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio

from ringfence import __version__
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.config.settings import Config
from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.model import Call, Definition, Json, Origin, Outcome, Principal, Transport
from ringfence.core.ports import Channel
from ringfence.core.quoting import quoted
from ringfence.front.calls import CallPipeline
from ringfence.front.listing import Listing
from ringfence.front.mcp import McpFront
from ringfence.front.stdio import StdioFront
from ringfence.governance.contract import Catalog
from ringfence.governance.rulebook import Rulebook
from ringfence.sandbox.tools.resources import address
from ringfence.sdk.execution import value
from ringfence.upstream.link import MODERN

TOOLS = (
    *("execute_python", "run_shell", "interrupt_session"),
    *("list_files", "read_file", "write_file", "remove_file", "make_folder", "copy_file"),
    *("list_processes", "process_output", "wait_process", "stop_process", "send_input"),
)
LEFT_OUT = (
    *("open_session", "close_session", "pause_session", "resume_session", "list_sessions"),
    *("snapshot_session", "fork_session", "expose_port"),
)
"""Its owner has commands for these: the client has one box, and neither ends it nor makes others."""
_NOT_TAKEN = ("session", "to_session")


async def serve(settings: Config, id: str) -> None:
    """Serve until the client closes our stdin. Raises an error if there is no such box, or it has ended."""
    async with App.open(replace(settings, servers={})) as app, anyio.create_task_group() as group:
        app.hand_over(id)
        bound = BoxPipeline(app.pipeline, id)
        await bound.check(app)
        front = McpFront(bound, app.pool, group, __version__)
        front.listing = BoxListing(bound, id)
        front.refusals = app.front.refusals
        front.listing.has_sessions = app.front.listing.has_sessions
        try:
            await StdioFront(front, lambda: app.agent).run()
        finally:
            front.close()
        group.cancel_scope.cancel()


class BoxListing(Listing):
    """The listing of one box: of the resources that sessions left, those of this one."""

    def __init__(self, pipeline: CallPipeline, session: str) -> None:
        super().__init__(pipeline)
        self._begin = address(session, "")

    async def resources(
        self, principal: Principal, *, templates: bool, origin: Origin = "system", version: str = MODERN
    ) -> list[Json]:
        found = [] if templates else await super().resources(principal, templates=False, origin=origin, version=version)
        return [item for item in found if str(item["uri"]).startswith(self._begin)]


class BoxPipeline:
    """The pipeline of a gateway, bound to one box: tools take no `session`, and every call is in this box."""

    def __init__(self, whole: CallPipeline, session: str) -> None:
        self._whole = whole
        self._box = session
        self.rules = _bound(whole.rules)

    async def check(self, app: App) -> None:
        """Raises an error if there is no such box, or it has ended."""
        call = Call(canonical.new_id("call"), app.agent, "list_processes", {"session": self._box}, origin="cli")
        value(await self._whole.handle(call, UNATTENDED))

    async def handle(self, call: Call, channel: Channel) -> Outcome:
        return await self._whole.handle(self._in_box(call), channel)

    async def withdrawn(self, call: Call) -> None:
        await self._whole.withdrawn(self._in_box(call))

    @property
    def redaction_basis(self) -> object:
        return self._whole.redaction_basis

    def listed(self, item: Json) -> Json:
        return self._whole.listed(item)

    def _in_box(self, call: Call) -> Call:
        """The call as one in this box; at fault where it is for anything else."""
        if call.kind != "tool":
            if call.kind != "listing" and not call.tool.startswith(address(self._box, "")):
                return replace(call, fault=call.fault or f"this box has no {call.kind} {quoted(call.tool, 128)}")
            return call
        named = [name for name in _NOT_TAKEN if name in call.arguments]
        if call.tool not in self._offered():
            call = replace(call, fault=call.fault or f"this box has no tool {quoted(call.tool, 128)}")
        elif named:
            call = replace(call, fault=call.fault or f"{named[0]} cannot be given: these tools are for one box")
        return replace(call, arguments={**call.arguments, "session": self._box})

    def _offered(self) -> set[str]:
        return {capability.contract.name for capability in self.rules.catalog.offered(self.rules.environment)}


def _bound(rules: Rulebook) -> Rulebook:
    """The rules with only the tools of one box, which cannot name another."""
    found = [
        capability
        for capability in rules.catalog.offered(rules.environment)
        if capability.contract.transport is Transport.SANDBOXED_EXEC and capability.contract.tool in TOOLS
    ]
    own: dict[str, Definition | Refused] = {
        capability.contract.name: _without_session(capability.definition)
        for capability in found
        if capability.definition is not None
    }
    contracts = {capability.contract.name: capability.contract for capability in found}
    return replace(rules, catalog=Catalog(contracts, {}, schemas=rules.catalog.schemas, own=own), prompts={})


def _without_session(definition: Definition) -> Definition:
    schema: Json = dict(definition.body["inputSchema"])
    schema["properties"] = {k: v for k, v in schema["properties"].items() if k not in _NOT_TAKEN}
    schema["required"] = [name for name in schema.get("required", ()) if name not in _NOT_TAKEN]
    body: dict[str, Any] = {**definition.body, "inputSchema": schema}
    return replace(definition, body=body, digest=canonical.definition_digest(body))
