"""What a backend of guests needs of an engine: something that starts a root with our agent in it, and ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from socket import socket
from typing import Literal, Protocol

from ringfence.core.box import Limit, Limits, Mount
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.core.sessions import Folder
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.process.cgroups.cgroup import Counted
from ringfence.sandbox.process.mounting import Placed

USER = 1000
"""The user of programs in a guest."""
LINK = 3
"""The descriptor of the stream, where an engine passes descriptors on."""


def boot(reads: int = LINK, writes: int = LINK) -> str:
    """What the first process of a guest is started with: it says that it is there, and reads the agent from the stream,
    so that no root has to have it."""
    return f"""\
import marshal, os, sys
def read(many):
    data = b""
    while len(data) < many:
        piece = os.read({reads}, many - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data
os.write({writes}, b"+")
for name, code in marshal.loads(read(int.from_bytes(read(4), "big"))):
    module = sys.modules[name] = type(sys)(name)
    exec(compile(code, "<" + name + ">", "exec") if isinstance(code, bytes) else code, module.__dict__)
sys.modules["ringfence.sandbox.guests.agent"].serve({reads}, {writes})
"""


BOOT = boot()


Ability = Literal[
    "staying",
    "pause",
    "memory_snapshot",
    "network",
    "mounts",
    "writable_mounts",
    "folders",
    "images",
    "denials",
]
_MEANS: Mapping[Ability, str] = {
    "staying": "that stay",
    "pause": "that can be paused",
    "memory_snapshot": "with snapshots of their memory",
    "network": "with a network",
    "mounts": "with folders of the host",
    "writable_mounts": "with folders of the host to write to",
    "folders": "with file systems of their own for volumes",
    "images": "whose root is an image",
    "denials": "whose refused system calls are counted",
}


@plain
class Abilities:
    """What an engine can give to its guests. What is not named, it cannot: that is refused, with the reason."""

    given: frozenset[Ability]
    lacking: Mapping[Ability, str] = field(default_factory=dict)
    """Why it cannot give one of the others, or what to do about it; a clause that follows a colon."""

    def require(self, backend: str, wanted: Ability) -> None:
        """Raises Unavailable."""
        if wanted in self.given:
            return
        why = f": {self.lacking[wanted]}" if wanted in self.lacking else "; backend process can"
        raise Unavailable("not_supported", f"backend {backend} cannot give boxes {_MEANS[wanted]}{why}")


@plain
class GuestRoot:
    """The root of a guest: a folder that is readable by all, with an interpreter of ours in it.

    Of an image, too: that folder has the image, and, beside it, all that a guest needs. Engines need not know.
    """

    folder: Path
    digest: str
    agent: tuple[str, ...]
    """The words that start an interpreter of our own version in it, for the agent; its arguments follow."""
    python: str
    """The interpreter for programs, by its path in it; empty: it has none that they could run with."""
    version: tuple[int, int]
    """Of that interpreter: only one of our own version reads what we compiled."""


@plain
class GuestShape:
    """What a guest is to be."""

    root: GuestRoot
    limits: Limits
    input: Path | None = None
    """A folder that it sees, read-only, as /workspace/input."""
    mounts: tuple[Mount, ...] = ()
    placed: tuple[Placed, ...] = ()
    """Those of them whose owner on the host and the user of programs are to be one, with what is held read-only in
    them: as they were when they were checked, so that another in their place is noticed."""
    folders: tuple[Folder, ...] = ()
    """File systems of their own, which programs may write to as they say, beneath /workspace."""
    stays: bool = False
    """Whether it may stay for long, and be paused; else one program runs in it."""


class Guest(Protocol):
    """One guest, from its start to its end."""

    stream: socket
    """To its first process, which waits for the agent."""
    link: Link | None
    """Over that stream, once the agent is there."""
    hardens: Json | None
    """What the agent is to do to the guest; None: its engine does all of it."""
    hands_over: bool
    """Whether its agent can pass descriptors over the stream; where it cannot, refused calls are not told of, and
    connections to the way out are carried over the stream."""
    ended: asyncio.Future[str]
    """Why it ended."""
    trouble: list[str]

    def settle(self) -> None:
        """Do what is left to do from outside, once its first process is there and before it has the agent."""
        ...

    def look(self) -> None:
        """Read back what can be seen of it, once its agent is ready."""
        ...

    @property
    def isolation(self) -> Json:
        """What of the `isolation` fact the engine knows."""
        ...

    def usage(self) -> GuestUsage | None:
        """What it uses now; None where it is gone."""
        ...

    def counted(self) -> Counted:
        """What the kernel counted of it."""
        ...

    async def pause(self) -> None:
        """Stop everything in it, its agent included, until `resume`; an engine without that ability is not asked to.
        Raises OSError, Unavailable."""
        ...

    async def resume(self) -> None:
        """Raises OSError, Unavailable."""
        ...

    def kill(self) -> None: ...

    async def remove(self) -> Sequence[str]:
        """End it, and remove everything that was made for it. Returns what could not be removed."""
        ...


@plain
class GuestUsage:
    memory_bytes: int
    """Without the files of the workspace, which are disk."""
    cpu_ms: float
    full: Limit | None = None
    oom_kills: int = 0
    """How many processes the kernel has killed for its memory; and how many it has refused, below."""
    processes_refused: int = 0


class GuestEngine(Protocol):
    """Starts guests."""

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> str: ...

    @property
    def abilities(self) -> Abilities:
        """Complete once it is open: some depend on the host."""
        ...

    async def open(self) -> None:
        """Try it, once. Raises Unavailable, with what is missing and how to get it."""
        ...

    async def start(self, shape: GuestShape) -> Guest:
        """Raises Unavailable: then nothing runs."""
        ...

    async def close(self) -> None: ...
