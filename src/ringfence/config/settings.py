"""The configuration as the rest of the program sees it: checked, complete, and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ringfence.core import canonical
from ringfence.core.box import SetUp
from ringfence.core.errors import Problem
from ringfence.core.labels import WINDOW_SECONDS
from ringfence.core.model import (
    AgentSpec,
    ApprovalRule,
    Contract,
    CostBudget,
    HookSpec,
    Issuer,
    NetworkSpec,
    Person,
    Rule,
    SecretSpec,
    ServerSpec,
    VaultSpec,
)
from ringfence.core.record import dataclass

if TYPE_CHECKING:
    from ringfence.governance.cases import PolicyCase

SANDBOX_NETWORK = "sandbox"
"""The network that `sandbox.network_enabled` gives to boxes whose contract names none."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Absolute paths of a certificate with its chain, and of its key."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    host: str
    port: int
    state: Path
    """Absolute."""
    approval_wait_seconds: float = 30.0
    code_mode: Literal["off", "optional", "on"] = "off"
    socket: Path | None = None
    """Absolute; a unix socket to listen on instead of host and port."""
    retention_seconds: float | None = None
    """How long records are kept; None: for ever."""
    url: str | None = None
    """Our address as clients know it, without a path."""
    tls: TlsFiles | None = None
    trusted_proxy: tuple[str, ...] = ()
    """Addresses and ranges of a proxy that ends TLS before us. If there are any, all other peers are refused."""
    oidc: Issuer | None = None
    step_up: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of capabilities, by the scope that a token of the identity provider must have for them."""
    log: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    otlp: str | None = None
    """Where spans are sent, with its path; None: none are made."""
    sample: float = 1.0
    """The share of traces that begin here."""
    service: str = "ringfence"


@dataclass(frozen=True, slots=True)
class WitnessSettings:
    """Who is told where the log is."""

    file: Path | None = None
    """Absolute."""
    syslog: Path | None = None
    """The socket of the system log."""
    webhook: str | None = None
    every_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class AuditSettings:
    signer: Literal["inline", "process"] = "inline"
    """Whether the key that signs the log is given to a process of its own."""
    signer_user: str | None = None
    """Whose process that is, if root starts it."""
    witness: WitnessSettings | None = None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    preset: str = "standard"
    default: Literal["deny", "allow_read"] = "deny"
    rules: tuple[Rule, ...] = ()
    """Those of the file itself, then those of the policy files, in order."""
    files: tuple[Path, ...] = ()
    label_seconds: float = WINDOW_SECONDS
    """How long what an agent read counts for what it does next."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    backend: str = "process"
    default_timeout_seconds: float = 30.0
    max_cpu_cores: float = 1.0
    max_memory_mb: int = 256
    max_disk_mb: int = 512
    max_processes: int = 128
    max_output_mb: int = 64
    capture_bytes: int = 1_000_000
    accept_missing: tuple[str, ...] = ()
    """Protections that the operator knowingly does without."""
    templates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages that are ready in boxes of a template, by its name."""
    network_enabled: bool = False
    max_sessions: int = 32
    """Of one user, all gateways and programs together; 0: there are none."""
    max_sessions_memory_mb: int | None = None
    max_sessions_cpu_cores: float | None = None
    session_queue_seconds: float = 5.0
    """How long a session that has no room yet may wait for some."""
    session_lifetime_seconds: float = 3600.0
    max_session_lifetime_seconds: float = 86_400.0
    session_idle_seconds: float = 300.0
    max_session_idle_seconds: float = 86_400.0
    session_retain_seconds: float = 86_400.0
    """How long what a session left is kept when it has ended; 0: not at all."""
    session_retain_mb: int = 2048
    """What is kept of all of them together."""
    session_paused_seconds: float = 86_400.0
    reclaim_after_seconds: float | None = 60.0
    """How long a session is paused until its memory is given back; None: never."""
    setups: Mapping[str, SetUp] = field(default_factory=dict)
    """What boxes of a template begin with beside its packages."""
    installs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages of an index that are installed for boxes of a template, by its name."""
    allow_packages: tuple[str, ...] = ()
    """Patterns of the packages that an agent may have installed; each may name a version and hashes."""
    packages: Literal["any", "pinned", "hashed"] = "any"
    """What a package must say to be installed: nothing more, its version, or its hash besides."""
    install_inside: bool = False
    """Whether programs in boxes may install what `allow_packages` names by themselves."""
    build_packages: bool = False
    """Whether packages that have only sources are built, in install boxes."""
    docker_image: str | None = None
    """The container image that is the root of boxes whose callers name none."""
    docker_host: str | None = None
    """Where the engine's socket is; None: as DOCKER_HOST says, or where it usually is."""
    docker_runtime: str | None = None
    """One of the engine's runtimes; None: its default."""
    docker_ready: int = 2
    """Containers that wait for a program."""
    max_start_ms: float = 500.0
    """How long a warm start may take of what `auto` chooses."""
    microvm_kernel: str | None = None
    """Absolute; a kernel for virtual machines, or the folder of an unpacked package. None: the one that was fetched, or
    that this host has."""
    firecracker_kernel_path: str | None = None
    """Absolute; the kernel of Firecracker's machines, with all that they need built in."""
    firecracker_rootfs_path: str | None = None
    """Absolute; the disk that is their root. None: one that is made of this host."""


@dataclass(frozen=True, slots=True)
class Config:
    path: Path
    """Absolute; relative paths in the file are relative to its folder."""
    environment: str
    gateway: GatewaySettings
    people: Mapping[str, Person]
    servers: Mapping[str, ServerSpec]
    contracts: Mapping[str, Contract]
    networks: Mapping[str, NetworkSpec]
    secrets: Mapping[str, SecretSpec]
    approvals: Mapping[str, ApprovalRule]
    policy: PolicySettings
    sandbox: SandboxSettings
    vault: VaultSpec | None = None
    telemetry: TelemetrySettings = TelemetrySettings()
    hooks: Mapping[str, HookSpec] = field(default_factory=dict)
    """What is told of calls that ended."""
    audit: AuditSettings = AuditSettings()
    agents: Mapping[str, AgentSpec] = field(default_factory=dict)
    """Who may call; without any, the local user's agent."""
    budgets: Mapping[str, CostBudget] = field(default_factory=dict)
    """What all agents of a tenant may spend together, by its name."""
    own_tools: bool = True
    """Whether tools of our own are offered that no capability declares."""
    warnings: tuple[Problem, ...] = ()
    """What loads, but every call to which will be refused."""
    files: tuple[Path, ...] = ()
    """Every file that was read: the configuration and its policy files."""
    places: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """File, line and column of each secret: that its value cannot be used is known only when it is read."""
    rule_places: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """The same of each rule."""
    cases: tuple[PolicyCase, ...] = ()
    """What rules are tested by. They decide nothing."""
    digest: str = ""
    """Of everything that matters to a call; comments and the order of keys do not."""


def sealed(config: Config) -> Config:
    """The configuration with the digest of what it says."""
    said = {
        name: value
        for name, value in asdict(config).items()
        if name not in ("path", "warnings", "files", "places", "rule_places", "cases", "digest")
    }
    return replace(config, digest=canonical.digest(_plain(said)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value
