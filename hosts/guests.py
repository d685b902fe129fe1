"""The guests: which release, machine and kernel each has, how it is started, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Machine = Literal["amd64", "arm64"]
# How control groups are had: v2 and v1 as systemd sets them up, or not at all under an init that mounts none.
Groups = Literal["v2", "v1", "none"]

# The classes of cases that `doctor` has; and those that depend on the host: kernel, security modules, control groups.
ALL_CLASSES = "FPDNSKGAXI"
HOST_CLASSES = "FPDKGI"
# Guests with the kernel of another guest differ from it in the namespaces that boxes are made of, or in their limits.
_NAMESPACES, _LIMITS = "PI", "GI"


@dataclass(frozen=True)
class Guest:
    name: str
    release: str
    machine: Machine
    suite: str  # where its kernel comes from
    says: str
    groups: Groups = "v2"
    words: str = ""  # more words of the kernel's command line
    doctor: str = HOST_CLASSES  # the classes of cases that are tried
    namespaces: bool = True  # whether an ordinary user may make user namespaces
    container: bool = False  # whether it is tried in a container of the guest

    @property
    def init(self) -> str:
        return "/usr/local/lib/hosts/bare.sh" if self.groups == "none" else "/sbin/init"


_V1 = "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1"

GUESTS = (
    Guest("debian12-arm64", "bookworm", "arm64", "bookworm", "Debian 12, systemd"),
    Guest("debian12-amd64", "bookworm", "amd64", "bookworm", "Debian 12, systemd"),
    Guest("debian12-backports-arm64", "bookworm", "arm64", "bookworm-backports", "Debian 12, backports kernel"),
    Guest("debian12-backports-amd64", "bookworm", "amd64", "bookworm-backports", "Debian 12, backports kernel"),
    Guest("debian13-arm64", "trixie", "arm64", "trixie", "Debian 13, systemd"),
    Guest(
        "debian13-backports-arm64",
        "trixie",
        "arm64",
        "trixie-backports",
        "Debian 13, backports kernel",
        doctor=ALL_CLASSES,
    ),
    Guest(
        "debian13-backports-amd64",
        "trixie",
        "amd64",
        "trixie-backports",
        "Debian 13, backports kernel",
        doctor=ALL_CLASSES,
    ),
    Guest(
        "no-userns-arm64",
        "bookworm",
        "arm64",
        "bookworm",
        "Debian 12 without unprivileged user namespaces",
        words="sysctl.kernel.unprivileged_userns_clone=0",
        doctor=_NAMESPACES,
        namespaces=False,
    ),
    Guest(
        "cgroup1-arm64",
        "bookworm",
        "arm64",
        "bookworm",
        "Debian 12, control groups v1",
        groups="v1",
        words=_V1,
        doctor=_LIMITS,
    ),
    Guest(
        "no-cgroup-arm64",
        "bookworm",
        "arm64",
        "bookworm",
        "Debian 12 without control groups",
        groups="none",
        doctor=_LIMITS,
    ),
    Guest("container-arm64", "bookworm", "arm64", "bookworm", "Debian 12, in a container of podman", container=True),
)


def named(name: str) -> Guest:
    for guest in GUESTS:
        if guest.name == name:
            return guest
    raise KeyError(name)
