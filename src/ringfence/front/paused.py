"""Calls of 2026-07-28 clients that wait for an answer between two requests.

The client holds only a handle. It is random, known to one principal, good for the same request alone, once, and for
a limited time; the state itself never leaves the gateway, so there is nothing in it to tamper with.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import anyio
import anyio.abc
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS

from ringfence import canonical
from ringfence.front.inbound import PausableChannel
from ringfence.model import Call, Json, Outcome
from ringfence.pipeline import Pipeline

WAIT_SECONDS = 600.0
MAX_WAITING = 1000


@dataclass(slots=True)
class _Run:
    """One call that may pause."""

    channel: PausableChannel
    scope: anyio.CancelScope
    binding: str
    outcome: Outcome | None = None
    handle: str | None = None
    """What the client holds while the call waits for it."""


class Paused:
    """Runs such calls in tasks of their own and pairs each answer with its call."""

    def __init__(self, pipeline: Pipeline, group: anyio.abc.TaskGroup) -> None:
        self._pipeline = pipeline
        self._group = group
        self._waiting: dict[str, _Run] = {}

    async def begin(self, call: Call, channel: PausableChannel) -> Outcome | Json:
        run = _Run(channel, anyio.CancelScope(), _binding(call))
        self._group.start_soon(self._drive, run, call)
        return await self._next(run)

    async def resume(self, handle: str, call: Call, channel: PausableChannel) -> Outcome | Json:
        run = self._waiting.get(handle)
        if run is None or run.binding != _binding(call):
            raise MCPError(INVALID_PARAMS, "requestState is unknown, expired, or belongs to another request")
        if call.inputs is None:
            raise MCPError(INVALID_PARAMS, "inputResponses must be an object")
        del self._waiting[handle]
        run.handle = None
        run.scope.deadline = float("inf")
        run.channel.outbound, run.channel.log_level = channel.outbound, channel.log_level
        run.channel.answer(call.inputs)
        return await self._next(run)

    async def _drive(self, run: _Run, call: Call) -> None:
        try:
            with run.scope:
                run.outcome = await self._pipeline.handle(call, run.channel)
        finally:
            if run.handle is not None:  # nobody came back in time; what is over cannot be resumed
                self._waiting.pop(run.handle, None)
            run.channel.moved.set()

    async def _next(self, run: _Run) -> Outcome | Json:
        """Wait until the call ends or asks."""
        try:
            await run.channel.moved.wait()
        except anyio.get_cancelled_exc_class():
            run.scope.cancel()  # the client closed the request: that is its way to cancel
            raise
        if run.outcome is not None:
            return run.outcome
        questions = run.channel.questions
        if questions is None:
            raise MCPError(INVALID_PARAMS, "the call was cancelled")
        if len(self._waiting) >= MAX_WAITING:
            run.scope.cancel()
            raise MCPError(-32603, "too many calls wait for an answer")
        run.handle = handle = "rfs_" + secrets.token_urlsafe(24)
        self._waiting[handle] = run
        run.channel.outbound = None
        run.scope.deadline = anyio.current_time() + WAIT_SECONDS
        answer: Json = {"resultType": "input_required", "requestState": handle}
        if questions:
            answer["inputRequests"] = dict(questions)
        return answer


def _binding(call: Call) -> str:
    return canonical.digest([call.principal.key, call.method, call.tool, call.arguments])
