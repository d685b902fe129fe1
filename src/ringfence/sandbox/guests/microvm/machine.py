"""What the engine of virtual machines needs of a program that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import Protocol

from ringfence.core.record import plain
from ringfence.sandbox.process.cgroups.cgroup import Group


@plain
class MachineShape:
    """What a machine is to be. What is saved of one fits another of the same shape alone."""

    kernel: Path
    initrd: Path
    disk: Path
    """Its root, which is never written to."""
    memory_bytes: int
    processors: int


@plain
class Saved:
    """A machine that was stopped, to be gone on with any number of times."""

    folder: Path
    """With what `Machine.save` put there; nothing in it changes."""


class Machine(Protocol):
    """One virtual machine. It has its processors, memory, the disk and one stream, and no network."""

    stream: socket
    """To whatever in it opened the other end."""
    ended: asyncio.Future[str]
    """Why it ended."""
    pid: int
    """Of the program that runs it, on the host."""

    async def pause(self) -> None:
        """Raises Unavailable, as the next two."""
        ...

    async def resume(self) -> None: ...

    async def save(self, folder: Path) -> None:
        """Stop it, and save its memory and its state. It does not go on here."""
        ...

    def kill(self) -> None: ...

    async def remove(self) -> Sequence[str]:
        """End it, and remove all that it had. Returns what could not be removed."""
        ...


class Hypervisor(Protocol):
    """A program that runs virtual machines."""

    @property
    def name(self) -> str: ...

    @property
    def accelerator(self) -> str:
        """`kvm`, or `tcg`: no virtualization, but emulation. Known once it is open."""
        ...

    @property
    def version(self) -> str:
        """All that a saved machine depends on, beside its shape."""
        ...

    async def open(self) -> None:
        """Find out what is here. Raises Unavailable, with what is missing and how to get it."""
        ...

    async def start(self, shape: MachineShape, saved: Saved | None = None, group: Group | None = None) -> Machine:
        """Boot it, or let a saved one go on. It is part of the group from the beginning. Raises Unavailable."""
        ...

    async def close(self) -> None: ...
