"""The interfaces through which layers call each other without knowing the implementation, which `compose` injects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ringfence.core.box import (
    BoxReport,
    BoxSpec,
    ImageRoot,
    InstallIndex,
    Installs,
    Mount,
    NetworkRule,
    OnOutput,
    Serve,
    Stream,
)
from ringfence.core.brokering import BrokeredSecret, SubstitutionReply, SubstitutionRequest
from ringfence.core.model import Definition, Json, Principal, Recheck, ServerSpec, always
from ringfence.core.record import plain

SAID_IN_CALLS = frozenset({"notifications/progress", "notifications/message"})
"""Notifications that a server may send to the client of a call during it; all others are no part of that call."""

TURNED_AWAY = frozenset({"server_refused", "session_lost"})
"""Reasons of an OutcomeUnknown where the server's answer says that it did nothing: its word alone, which is
enough for what can have no effect anyway."""


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


@plain
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
    log_level: str | None = None
    """The level of the server's log lines that the client wants."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For this request alone, where it goes over HTTP."""
    box: str | None = None
    """The session in whose box the server runs, where its placement is `session`."""
    fresh: bool = False
    """An instance of the server for this request alone, in a box of its own, gone with it."""
    mounts: tuple[Mount, ...] | None = None
    """What that instance sees of the host, where it is not what the server always sees."""
    changes: bool = False
    """Whether it may change something, by its contract."""
    asked: Callable[[Json | None], None] | None = None
    """Called at the end with what the server's box asked of the network meanwhile; None where that is not known."""
    recheck: Recheck = always
    """Awaited right before it is sent: it may have waited for a server to start. What that raises passes."""


class Upstreams(Protocol):
    """MCP servers, by name."""

    async def request(self, request: UpstreamRequest) -> Json:
        """Send one request and return the raw result object.

        Raises Unavailable when nothing was sent, OutcomeUnknown when an answer was lost or is no more than an HTTP
        status, Refused for an error answer of the server's own.
        """
        ...

    async def definitions(self, server: str, principal: Principal) -> list[Definition]:
        """What the server offers `principal` now. Raises Unavailable."""
        ...

    def isolation(self, server: str, *, fresh: bool = False, box: tuple[Principal, str] | None = None) -> Json:
        """The `isolation` fact for whatever runs this server, or ran an instance of it for one request alone, or runs
        it in this session of a principal's."""
        ...


class Launched(Protocol):
    """A server that was started, and its standard streams."""

    @property
    def isolation(self) -> Json: ...

    def network_meter(self) -> Callable[[], Json | None]:
        """From now on: what its box asks of the network, as a `network` fact; None where that is not known."""
        ...

    def network_since_start(self) -> Json | None:
        """The same for all of its time, from before its program began."""
        ...

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises OSError where its reader is gone."""
        ...

    async def receive(self, stream: Stream) -> bytes:
        """What it writes next; nothing once it writes no more."""
        ...

    @property
    def last_stderr(self) -> str:
        """The last of what it wrote to its standard error."""
        ...

    async def stop(self) -> str:
        """End it, with everything that it started. Where it ended by itself: what it may have lacked, in a sentence for
        those who called it."""
        ...

    @property
    def hint(self) -> str:
        """The same for the operator alone, once it is over: which files of the host it may have lacked, too."""
        ...


class Launcher(Protocol):
    """Starts servers."""

    def isolation(self, spec: ServerSpec) -> Json:
        """The `isolation` fact of a server that is yet to be started."""
        ...

    async def launch(self, spec: ServerSpec, principal: Principal) -> Launched:
        """Start a server. Raises Unavailable where nothing was started."""
        ...


class Redactor(Protocol):
    """Removes what must not be seen."""

    @property
    def basis(self) -> object:
        """The very same object as long as the same is removed."""
        ...

    def matches(self, data: bytes) -> bool:
        """Whether `redact` would remove anything."""
        ...

    def knows(self, data: bytes) -> bool:
        """Whether a known secret stands in it, whatever else has the shape of one."""
        ...

    def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
        """The text without secrets, and how often each rule matched. One with more than `most` pieces to remove goes
        whole: each takes time."""
        ...

    def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
        """The same for a person who must judge the text: in the place of what only has the shape of a secret stands
        which shape that is, and how much of the text it was."""
        ...

    def secrets(self, text: str) -> Mapping[str, int]:
        """Which secrets are in it, by name: for the audit log alone, since a caller who knew could guess and try."""
        ...


@plain
class Access:
    """What a box may reach outside, and for whom. The start of a server is for no capability and no agent."""

    network: str = "denied"
    """`denied`, or a name under `networks:`."""
    places: tuple[str, ...] = ()
    """What the caller itself named besides, as HOST[:PORT]."""
    secrets: tuple[str, ...] = ()
    tenant: str = "local"
    capability: str | None = None
    server: str | None = None
    agent: str | None = None
    call_id: str | None = None
    url: str | None = None
    """Where a request of our own goes; then there is no box."""
    session: str | None = None
    """The session whose box it is."""
    installs: Installs | None = None
    """What its programs may install by themselves."""


@plain
class Route:
    """How one box will reach the outside, before there is a box."""

    serve: Serve | None = None
    """For `BoxSpec.network`; None: no way out."""
    rules: tuple[NetworkRule, ...] = ()
    """The same as plain data, for a process that serves it elsewhere; secrets are not in it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What the box finds in its environment: placeholders of secrets."""
    brokered: tuple[BrokeredSecret, ...] = ()
    """The same secrets by name, for a process that makes placeholders elsewhere."""


class Router(Protocol):
    """Makes routes from networks and secrets, which it is given by name."""

    def check(self, access: Access) -> None:
        """Whether there could be such a route, before a person is asked to approve it. Raises Refused, Unavailable."""
        ...

    def check_open(self, rules: Sequence[NetworkRule], network: str | None) -> None:
        """Whether a box that is open with these rules could still have them. `network`: what its contract names now;
        None where no contract chose it. Raises Refused."""
        ...

    async def route(self, access: Access) -> Route:
        """For one box. Raises Refused, Unavailable: then nothing may run."""
        ...

    async def headers(self, access: Access) -> Mapping[str, str]:
        """What a request of our own carries of these secrets. Raises Refused, Unavailable."""
        ...


class SecretBroker(Protocol):
    """Puts secrets into requests of boxes that another process keeps."""

    async def ready(self, access: Access) -> None:
        """Check that each of these secrets can be read now. Raises Refused, Unavailable: then nothing may run."""
        ...

    async def substitute(self, request: SubstitutionRequest) -> SubstitutionReply:
        """What changes in one request, decided and on record. Raises Refused, Unavailable."""
        ...


@plain
class InstalledPackages:
    """Packages as a box can see them."""

    folder: Path
    packages: tuple[Mapping[str, str], ...]
    """Names, versions, and what the index says of their bytes."""


class PackageInstaller(Protocol):
    """Installs packages for boxes, in a box."""

    def check(self, names: tuple[str, ...], within: tuple[str, ...] | None = None) -> None:
        """Whether these could be installed and may be, before a person is asked for them. Raises Refused."""
        ...

    async def install(self, names: tuple[str, ...]) -> InstalledPackages:
        """These and all that they need. Raises Refused, Unavailable."""
        ...

    def index(self, installs: Installs) -> InstallIndex:
        """An index of these, for programs of one box. Raises Refused."""
        ...


class Images(Protocol):
    """Finds images by what callers call them."""

    def check(self, name: str) -> None:
        """Whether there could be such an image, before anything is fetched. Raises Unavailable, with the remedy."""
        ...

    async def find(self, name: str) -> ImageRoot:
        """The image, fetched or taken over if it is not here yet. Raises Unavailable: then nothing may run."""
        ...


class Backend(Protocol):
    """Makes boxes. A backend that cannot give all that a spec asks for refuses, and says what is missing."""

    @property
    def name(self) -> str: ...

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        """Run a program in a fresh box, to the end of the box. `tell` gets output as it comes. `recheck` is awaited
        when the box is there, right before the program begins, and what it raises passes.

        Raises ValueError for a spec that makes no sense, Unavailable where nothing was run. Cancelling kills the box;
        a backend that saw something of it leaves its report with the CancelledError (`aio.leave`).
        """
        ...

    async def close(self) -> None:
        """End every box and whatever was kept ready."""
        ...


class ChoosingBackend(Backend, Protocol):
    """Makes boxes by any backend of this host, as specs name one or the weakest level that may serve."""

    def check(self, level: str, asked: str | None) -> None:
        """Raises Unavailable where it is known already that there can be no such box."""
        ...


@runtime_checkable
class WarmableBackend(Protocol):
    """A backend that can have boxes ready before they are asked for."""

    async def warm(self, spec: BoxSpec) -> None:
        """Make boxes ready for specs like this one. Raises Unavailable where there can be none."""
        ...

    def weaker(self) -> tuple[str, ...]:
        """Protections that are weaker on this host than they could be, each with what to do about it."""
        ...
