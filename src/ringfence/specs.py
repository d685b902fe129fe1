"""What the operator declared: servers, networks and secrets, by name. Plain data; `model` has them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ringfence.box import Mount


@dataclass(frozen=True, slots=True)
class PackageSpec:
    """Packages that a server was fetched as, and the tree in our cache that they came to."""

    kind: Literal["npm", "pypi", "image"]
    names: tuple[str, ...]
    tree: str
    """The digest of everything in it."""
    folder: str
    """Where that tree lies on this host. Of an image, it is the root of the server's box."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """An upstream MCP server as the operator declared it."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    resources: tuple[str, ...] = ()
    """Glob patterns of the URIs that may be read."""
    prompts: tuple[str, ...] = ()
    sampling: Literal["deny", "ask", "allow"] = "deny"
    elicitation: Literal["deny", "ask"] = "ask"
    pins: Literal["accepted", "first_use"] = "accepted"
    start_timeout_seconds: float = 30.0
    placement: str = "own"
    """`own`, `session`, `unsafe_host`, or the name of a box that it shares with the servers of the same placement."""
    mounts: tuple[Mount, ...] = ()
    """What its box sees of the host, beside what its command needs."""
    network: str = "denied"
    limits: Mapping[str, float | int] = field(default_factory=dict)
    """Of its box, by the names of `box.Limits`, where they are not the usual ones."""
    secrets: tuple[str, ...] = ()
    packages: PackageSpec | None = None
    listens: bool = False
    """Whether it may wait for connections, which only programs of its own box can make."""


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """What of the outside a name stands for. None means: not limited by this."""

    name: str
    allow: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    addresses: tuple[str, ...] = ()
    """Addresses and ranges that are not public and that the hosts may nevertheless resolve to."""
    max_bytes_out: int | None = None
    max_bytes_in: int | None = None
    per_minute: int | None = None
    inspect: bool = False
    """TLS ends at the gateway even where neither methods nor paths ask for it."""


@dataclass(frozen=True, slots=True)
class SecretSpec:
    """Where a secret comes from and whom it is for; never its value."""

    name: str
    source: Literal["env", "file", "command", "keyring", "vault"]
    options: Mapping[str, str | tuple[str, ...]]
    hosts: tuple[str, ...] = ()
    """Where the value may go, in `header`; without them it can only be handed to a server, in `env`."""
    header: str | None = None
    format: str | None = None
    """The header's text around `{value}`; None: as the header is usually written."""
    methods: tuple[str, ...] = ("GET", "HEAD")
    env: str | None = None
    """The variable that a box finds the placeholder in, or a server the value."""
    lifetime_seconds: float = 300.0
    tenants: tuple[str, ...] | None = None
    environments: tuple[str, ...] | None = None
    capabilities: tuple[str, ...] | None = None
    servers: tuple[str, ...] | None = None
    agents: tuple[str, ...] | None = None

    @property
    def brokered(self) -> bool:
        """Whether the value is put into requests outside of the box, and never enters it."""
        return bool(self.hosts) and self.header is not None

    @property
    def variable(self) -> str:
        """Where a box finds what stands for it."""
        if self.env is not None:
            return self.env
        if self.source == "env":
            return str(self.options["name"])
        return "".join(c if c.isalnum() and c.isascii() else "_" for c in self.name).upper()


@dataclass(frozen=True, slots=True)
class VaultSpec:
    """A HashiCorp Vault that secrets are read from."""

    address: str
    token_env: str = "VAULT_TOKEN"  # noqa: S105 - the name of a variable
    token_file: str | None = None
    namespace: str | None = None
    addresses: tuple[str, ...] = ()
    """Addresses and ranges that are not public and that its name may resolve to."""
