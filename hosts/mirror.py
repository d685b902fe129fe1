"""The distribution's packages, of any of its releases and machines, without touching this machine's own apt."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hosts.places import CACHE, Trouble, run, say

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@cache
def mirror() -> str:
    """Where this machine's own apt gets Debian's packages."""
    form = "$(ORIGIN)\t$(LABEL)\t$(COMPONENT)\t$(REPO_URI)"
    for line in run(["apt-get", "indextargets", "--format", form, "Identifier: Packages"]).splitlines():
        origin, label, component, address = line.split("\t")
        if (origin, label, component) == ("Debian", "Debian", "main"):
            return address
    # Before the first `apt-get update` nothing tells one source from another but its address.
    for line in run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages"]).splitlines():
        if line.rstrip("/").endswith("/debian"):
            return line
    raise Trouble("apt has no source of Debian's packages here: guests are made from those")


class Packages:
    """A private apt for one release of one machine, with nothing installed."""

    def __init__(self, release: str, machine: str) -> None:
        self._base = CACHE / "apt" / f"{release}-{machine}"
        self._release, self._machine = release, machine
        lists = self._base / "state" / "lists"
        if not (self._base / "updated").exists():
            for folder in (lists / "partial", self._base / "cache" / "archives" / "partial", self._base / "etc"):
                folder.mkdir(parents=True, exist_ok=True)
            (self._base / "state" / "status").touch()
            signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
            (self._base / "etc" / "sources.list").write_text(f"deb {signed}{mirror()} {release} main\n")
            say(f"reading which packages {release} has for {machine}")
            self._apt("apt-get", "update", "-qq")
            (self._base / "updated").touch()

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        base = self._base
        options = {
            "Dir::Etc": base / "etc",
            "Dir::State": base / "state",
            "Dir::State::status": base / "state" / "status",
            "Dir::Cache": base / "cache",
            "APT::Architecture": self._machine,
            "APT::Architectures": self._machine,
            # Fetched as whoever asks: apt's own user may not see this folder.
            "APT::Sandbox::User": "",
            "Acquire::Retries": 3,
        }
        settings = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
        return run([program, *settings, *arguments], cwd=cwd)

    def depends(self, package: str) -> list[str]:
        """What a package names first in each of its dependencies."""
        shown = self._apt("apt-cache", "show", "--no-all-versions", package)
        found = re.search(r"^Depends: (.*)$", shown, re.MULTILINE)
        return [re.split(r"[ :|(]", part.strip())[0] for part in found[1].split(",")] if found else []

    def fetch(self, package: str, into: Path) -> None:
        """Unpack a package into a folder; nothing of it is run."""
        archives = self._base / "cache" / "archives"
        before = set(archives.glob(f"{package}_*.deb"))
        if not before:
            say(f"fetching {package} ({self._machine})")
            self._apt("apt-get", "download", "-qq", package, cwd=archives)
        (archive,) = archives.glob(f"{package}_*.deb")
        run(["dpkg-deb", "-x", archive, into])
