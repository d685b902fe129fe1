"""Folders of the host that are named to be mounted: where they really are, and whether credentials lie there.

A link on the way is followed once, when the configuration is read, and only where no box could have put it: one that
lies in a folder which the same configuration lets a box write to is refused. From then on the real path counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ringfence.box import Mount
from ringfence.config import paths

_IN_A_HOME = {
    ".ssh": "keys of SSH",
    ".gnupg": "keys of GnuPG",
    ".aws": "credentials of AWS",
    ".azure": "credentials of Azure",
    ".config/gcloud": "credentials of Google Cloud",
    ".oci": "credentials of Oracle Cloud",
    ".kube": "credentials of Kubernetes",
    ".docker": "credentials of Docker",
    ".config/containers": "credentials of Podman",
    ".netrc": "passwords",
    ".npmrc": "tokens of npm",
    ".pypirc": "tokens of PyPI",
    ".config/pip": "tokens of pip",
    ".cargo/credentials.toml": "tokens of Cargo",
    ".gem/credentials": "tokens of RubyGems",
    ".git-credentials": "passwords of Git",
    ".config/git/credentials": "passwords of Git",
    ".config/gh": "tokens of GitHub",
    ".config/hub": "tokens of GitHub",
    ".terraform.d": "tokens of Terraform",
    ".vault-token": "a token of Vault",
    ".pgpass": "passwords of PostgreSQL",
    ".my.cnf": "passwords of MySQL",
    ".password-store": "passwords",
    ".local/share/keyrings": "the keyring",
    ".mozilla": "a browser's profile",
    ".config/google-chrome": "a browser's profile",
    ".config/chromium": "a browser's profile",
    ".config/BraveSoftware": "a browser's profile",
    ".config/microsoft-edge": "a browser's profile",
    ".claude": "tokens of an agent",
    ".claude.json": "tokens of an agent",
    ".codex": "tokens of an agent",
    ".cursor": "tokens of an agent",
    ".gemini": "tokens of an agent",
    ".config/ringfence": "Ringfence's own configuration and keys",
    ".local/state/ringfence": "Ringfence's own state",
}
"""By where it lies below somebody's home folder."""
_SYSTEM = {
    "/etc/shadow": "passwords of the system",
    "/etc/ssh": "keys of SSH",
    "/etc/ssl/private": "keys of the system",
    "/etc/kubernetes": "credentials of Kubernetes",
    "/run": "sockets and secrets of services",
    "/var/run": "sockets and secrets of services",
    "/proc": "the insides of processes",
    "/sys": "the insides of the kernel",
    "/dev": "devices",
}
_HOMES = ("/home", "/Users")


def declared(mount: Mount, base: Path, writable: Sequence[str] = ()) -> Mount:
    """The mount with the real path of its folder. Raises ValueError where it may not be."""
    host = real_path(str(paths.resolve(mount.host, base)), writable)
    why = touches_credentials(host)
    if why is not None and not mount.unsafe:
        raise ValueError(f"{host} holds {why}; mount a folder without it, or say why it is right: unsafe: REASON")
    return replace(mount, host=host)


def real_path(path: str, writable: Iterable[str] = ()) -> str:
    """Where a path leads, link by link. Raises ValueError for a link that a box may have put there, and for a loop."""
    writable = list(writable)
    rest, found, links = [part for part in path.split("/") if part], "", 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            found = os.path.dirname(found) if found else ""
            continue
        if part == "." or not part:
            continue
        step = f"{found}/{part}"
        if not os.path.islink(step):
            found = step
            continue
        links += 1
        if links > 40:
            raise ValueError(f"{path} leads round in a circle of links")
        if any(_within(step, folder) for folder in writable):
            raise ValueError(f"{step} is a link in a folder that a box may write to; it is not followed")
        target = os.readlink(step)
        found = "" if target.startswith("/") else found
        rest = [*(each for each in target.split("/") if each), *rest]
    return found or "/"


def touches_credentials(path: str) -> str | None:
    """What would be handed over with this folder or file, by lying at it, in it or around it; None: nothing known."""
    homes = _homes()
    if any(_within(home, path) for home in (*homes, *_HOMES)):
        return "a home folder, and with it all credentials there"
    places = {f"{home}/{name}": what for home in homes for name, what in _IN_A_HOME.items()}
    places |= {str(paths.state_folder()): "Ringfence's own state", str(paths.key_folder()): "Ringfence's own keys"}
    for place, what in (places | _SYSTEM).items():
        if _within(path, place) or (_within(place, path) and os.path.lexists(place)):
            return what
    return None


def _homes() -> list[str]:
    """Of whoever runs this, and whatever looks like one."""
    homes = [os.path.realpath(paths.home()), "/root"]
    for folder in _HOMES:
        try:
            homes += [f"{folder}/{name}" for name in os.listdir(folder)]
        except OSError:
            continue
    return homes


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
