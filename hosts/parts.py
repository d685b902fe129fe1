"""What is tried in a guest, by whom, and what must come of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts.guests import Guest
from hosts.places import Trouble
from hosts.project import Who, as_whom

_SCRIPT = "/opt/ringfence/bin/python3 /usr/local/lib/hosts/tries.py"
_BY_KERNEL = {"memory": "cgroup", "pids": "cgroup", "cpu": "cgroup"}
_EVERYBODY: tuple[Who, ...] = ("root", "user")


@dataclass(frozen=True)
class Part:
    """One thing that is tried; `label` tells it from the same thing tried by or in something else."""

    who: Who
    name: str
    words: tuple[str, ...] = ()
    label: str = ""
    container: tuple[str, ...] | None = None  # the options of the container that it is tried in
    limits: dict[str, str] | None = None  # by whom limits must be held

    @property
    def row(self) -> str:
        """Who it is, in the table."""
        return self.label or self.who

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", " ".join((self.row, self.name, *self.words)).lower())

    def alike(self, other: Part) -> bool:
        """Whether both are tried by the same, in the same."""
        return (self.who, self.row, self.container) == (other.who, other.row, other.container)

    @property
    def order(self) -> str:
        return shlex.join((self.name, *self.words))

    def argv(self, *more: Part) -> list[str]:
        """How it is tried, and after it, in the same process, others that are alike."""
        command = f"{_SCRIPT} {shlex.join(part.order for part in (self, *more))}"
        if self.container is None:
            return as_whom(self.who, command)
        user = ["--user", "1000:1000"] if self.who == "user" else []
        # The guest's own root is the image: nothing has to be fetched.
        start = (
            "mkdir -p /srv/root && { mountpoint -q /srv/root || mount --bind / /srv/root; } && "
            "exec podman run --rm --network none --env HOME=/tmp --env PATH=/opt/ringfence/bin:/usr/bin:/bin "
            "-v /opt/ringfence:/opt/ringfence:ro "
        )
        return as_whom("root", start + shlex.join([*user, *self.container, "--rootfs", "/srv/root:O"]) + f" {command}")


def documented(source: Path) -> tuple[str, ...]:
    """The options that the documentation gives to Podman."""
    found = re.search(r"^podman run (.*) IMAGE$", (source / "docs" / "hosts.md").read_text(), re.MULTILINE)
    if found is None:
        raise Trouble("docs/hosts.md does not say how a container of Podman is started")
    return tuple(shlex.split(found[1]))


def parts(guest: Guest, source: Path) -> Iterator[Part]:
    """In the order in which they are tried: one may change the guest for those after it."""
    if guest.container:
        for who in _EVERYBODY:
            yield Part(who, "refused_container", label=f"{who}, defaults", container=())
        for who in _EVERYBODY:
            label, options = f"{who}, documented options", documented(source)
            for name in ("host", "run", "readme", "bombs"):
                yield Part(who, name, label=label, container=options)
            for kind in guest.doctor:
                yield Part(who, "doctor", ("--no-control", "--class", kind), label=label, container=options)
        return
    if not guest.namespaces:
        for who in _EVERYBODY:
            yield Part(who, "refused", label=f"{who}, before")
        yield Part("root", "mend")
        for who in _EVERYBODY:
            yield from _whole(guest, who)
        return
    for who in _EVERYBODY:
        yield from _whole(guest, who)
    if guest.groups != "none":
        yield Part("service", "run", label="root, a service")
        yield Part("plain", "run", label="user, no session")


def _whole(guest: Guest, who: Who) -> Iterator[Part]:
    held = guest.groups == "v2" or (guest.groups == "v1" and who == "root")
    yield Part(who, "host")
    yield Part(who, "run", limits=_BY_KERNEL if held else None)
    for name in ("readme", "sessions", "wrap", "bombs"):
        yield Part(who, name)
    if guest.groups == "v2":
        yield Part(who, "charges")
    if guest.groups == "none" and who == "user":
        yield Part(who, "idle")
    for kind in guest.doctor:  # a part each, since an emulated machine takes an hour for some
        yield Part(who, "doctor", ("--no-control", "--class", kind))
