"""The verbs that layers ask of each other without knowing who answers. Each is injected by `app`.

A protocol here has at most three methods; whatever needs more is two protocols, or not a port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ringfence.box import BoxReport, BoxSpec, Stream
from ringfence.model import Definition, Json, Principal


class Channel(Protocol):
    """The way back to the client that made a call, while the call is under way."""

    @property
    def capabilities(self) -> Json:
        """The client's declared MCP capabilities; what is absent here may not be asked of it."""
        ...

    async def ask(self, questions: Mapping[str, Json]) -> Mapping[str, Json]:
        """Put `{"method", "params"}` questions to the client and wait for its results, by the same keys."""
        ...

    async def notify(self, method: str, params: Json) -> None:
        """Send a notification that belongs to this call; `notifications/progress` carries no token yet."""
        ...


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One request to a server on behalf of a principal."""

    server: str
    principal: Principal
    method: str
    params: Json
    channel: Channel
    timeout: float
    definition: Definition | None = None
    """The pinned definition that the server must still offer, for a tool."""
    session: str | None = None
    """The client's MCP session, where it has one."""


class Upstreams(Protocol):
    """MCP servers, by name."""

    async def request(self, request: UpstreamRequest) -> Json:
        """Send one request and return the raw result object.

        Raises Unavailable when nothing was sent, OutcomeUnknown when an answer was lost, Refused for an
        error answer of the server's own.
        """
        ...

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        """What the server offers `principal` now. Raises Unavailable."""
        ...

    def isolation(self, server: str) -> Json:
        """The `isolation` fact for whatever runs this server."""
        ...


class Redactor(Protocol):
    """Removes what must not be seen."""

    def redact(self, text: str) -> tuple[str, Mapping[str, int]]:
        """The text without it, and how often each rule struck."""
        ...


class Backend(Protocol):
    """Makes boxes. One that cannot give all that a spec asks refuses, and says what is missing."""

    @property
    def name(self) -> str: ...

    async def run(self, spec: BoxSpec, tell: Callable[[Stream, bytes], None] | None = None) -> BoxReport:
        """Run a program in a fresh box, to the end of the box. `tell` gets output as it comes.

        Raises ValueError for a spec that makes no sense, Unavailable where nothing was run. Cancelling kills the box.
        """
        ...

    async def close(self) -> None:
        """End every box and whatever was kept ready."""
        ...


@runtime_checkable
class Readying(Protocol):
    """A backend that can have boxes ready before they are asked for."""

    async def warm(self, spec: BoxSpec) -> None:
        """For specs like this one. Raises Unavailable where there can be none."""
        ...
