"""Names of container images, as their clients write them: `HOST/NAME:TAG@sha256:…`."""

from __future__ import annotations

import re
from dataclasses import replace

from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:(?P<host>{_HOST})/)??(?P<name>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_LONGEST = 255
_USUAL_TAG = "latest"


@dataclass(frozen=True, slots=True)
class Reference:
    """An image of a registry."""

    host: str
    """With its port, if that is not the default; empty if the name has no host."""
    name: str
    tag: str = ""
    digest: str = ""
    """Of a manifest; it overrides the tag."""

    @classmethod
    def of(cls, text: str) -> Reference:
        """Raises ValueError."""
        match = _REFERENCE.fullmatch(text) if len(text) <= 2 * _LONGEST else None
        if match is None:
            raise ValueError(f"{quoted(text)} is not the name of an image: [HOST/]NAME[:TAG][@sha256:…]")
        host = match["host"] or ""
        name = match["name"]
        first, slash, rest = name.partition("/")
        if not host and slash and _is_host(first):  # `localhost/x` and `corp.example/x`: parts like any other
            host = first
            name = rest
        elif host and not _is_host(host):
            raise ValueError(f"{quoted(text)} begins with what is neither a host nor a part of a name")
        if len(name) > _LONGEST:
            raise ValueError(f"{quoted(text)} is too long to be the name of an image")
        if host and not 0 < int(_port(host) or "1") < 65_536:
            raise ValueError(f"{quoted(text)} names a port that is none")
        tag = match["tag"] or ("" if match["digest"] else _USUAL_TAG)
        return cls(host.lower(), name, tag, match["digest"] or "")

    @property
    def wanted(self) -> str:
        """What the registry is asked for."""
        return self.digest or self.tag

    def at(self, host: str, name: str | None = None) -> Reference:
        return replace(self, host=host, name=self.name if name is None else name)

    def pinned(self, digest: str) -> Reference:
        return replace(self, digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.host}{'/' if self.host else ''}{self.name}{tag}{digest}"


def _is_host(first: str) -> bool:
    """Whether the first part of a name is a host, by the rule of all clients."""
    return "." in first or ":" in first or first == "localhost"


def _port(host: str) -> str:
    return host.rpartition(":")[2] if ":" in host.rpartition("]")[2] else ""
