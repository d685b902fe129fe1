"""The shapes of `ringfence.yaml`: every key, its type and its default. `docs/configuration.md` says what each means.

A shape knows nothing of names that are defined elsewhere in the file; `checks` does.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from ringfence.config import validators
from ringfence.core.labels import WINDOW_SECONDS
from ringfence.core.model import DEFAULT_TENANT


def _idempotent_form(value: Any) -> str:
    return "a mapping" if isinstance(value, dict | IdempotentSection) else "true or false"


def _listen_form(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else "a word"


def _label_form(value: Any) -> str:
    return "a mapping" if isinstance(value, dict | LabelEntry) else "a word"


Text = Annotated[str, Field(min_length=1)]
Condition = Annotated[str, Field(min_length=1, max_length=10_000)]
Word = Annotated[str, AfterValidator(validators.word)]
Glob = Annotated[str, AfterValidator(validators.glob)]
PackagePattern = Annotated[str, AfterValidator(validators.package)]
HostPattern = Annotated[str, AfterValidator(validators.host_pattern)]
Variable = Annotated[str, AfterValidator(validators.variable)]
Method = Annotated[str, AfterValidator(validators.method)]
Range = Annotated[str, AfterValidator(validators.address_range)]
Module = Annotated[str, AfterValidator(validators.module)]
Url = Annotated[str, AfterValidator(validators.url)]
Command = Annotated[list[Text], Field(min_length=1), BeforeValidator(validators.argv)]
SecretNames = Annotated[list[Word], BeforeValidator(validators.secret_names)]
Scope = Annotated[str, AfterValidator(validators.scope)]
ProgramName = Annotated[str, AfterValidator(validators.program)]
MetaKey = Annotated[str, AfterValidator(validators.meta_key)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Mebibytes = BeforeValidator(validators.mebibytes)
"""Also understands text with a unit, as in 2G."""
Verdict = Annotated[
    list[Literal["allow", "ask", "sandbox", "deny", "error"]],
    Field(min_length=1),
    BeforeValidator(validators.one_or_more),
    AfterValidator(validators.expected),
]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


class Shape(BaseModel):
    """Every key is known, and no value is bent to fit."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    placeholders: ClassVar[dict[str, Any]] = {}
    """Stand in for required keys that are missing, so that the rest can be checked all the same."""
    meant: ClassVar[dict[str, str]] = {}
    """What people write from habit, and what it is called here."""


# ── Sections ──────────────────────────────────────────────────────────────────────────────────────


class TlsSection(Shape):
    cert: Text
    key: Text
    placeholders: ClassVar[dict[str, Any]] = {"cert": "_", "key": "_"}


class OidcSection(Shape):
    issuer: Annotated[str, AfterValidator(validators.issuer)]
    audience: Text | None = None
    algorithms: Annotated[
        list[Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]],
        Field(min_length=1),
    ] = ["RS256", "ES256"]
    jwks: Annotated[str, AfterValidator(validators.issuer)] | None = None
    addresses: list[Range] = []
    scopes: list[Scope] = []
    step_up: dict[Scope, list[Glob]] = {}
    roles_claim: Text = "roles"
    roles: list[Word] = []
    placeholders: ClassVar[dict[str, Any]] = {"issuer": "https://_"}
    meant: ClassVar[dict[str, str]] = {"jwks_uri": "jwks", "required_scopes": "scopes"}


class GatewaySection(Shape):
    listen: Annotated[str, AfterValidator(validators.listen)] = "127.0.0.1:8700"
    state: Text | None = None
    approval_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    code_mode: Annotated[Literal["off", "optional", "on"], BeforeValidator(validators.switch)] = "off"
    retention: Annotated[str | int, AfterValidator(validators.retention)] | None = None
    url: Annotated[str, AfterValidator(validators.own_url)] | None = None
    tls: TlsSection | None = None
    trusted_proxy: list[Range] = []
    oidc: OidcSection | None = None
    log: Literal["text", "json"] = "text"


class TelemetrySection(Shape):
    otlp: Annotated[str, AfterValidator(validators.otlp)] | None = None
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    service: Text | None = None
    meant: ClassVar[dict[str, str]] = {"endpoint": "otlp", "url": "otlp", "service_name": "service"}


class WitnessSection(Shape):
    file: Text | None = None
    syslog: Text | bool | None = None
    webhook: Annotated[str, AfterValidator(validators.webhook)] | None = None
    every_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    meant: ClassVar[dict[str, str]] = {"path": "file", "url": "webhook", "interval": "every_seconds"}


class AuditSection(Shape):
    signer: Literal["inline", "process"] = "inline"
    signer_user: Text | None = None
    witness: WitnessSection | None = None


class PersonEntry(Shape):
    roles: list[Word] = []
    os_user: Text | None = None
    tenant: Word = DEFAULT_TENANT
    oidc_subject: Text | None = None
    answer_key: Annotated[str, AfterValidator(validators.answer_key)] | None = None


class QuotaSection(Shape):
    per_minute: Count | None = None
    burst: Count | None = None
    concurrent: Count | None = None
    per_day: Count | None = None


class BudgetEntry(Shape):
    units: Annotated[int, Field(ge=0, le=1_000_000_000)]
    seconds: Annotated[float, Field(ge=60, le=31_536_000)] = 86_400.0


class TenantEntry(Shape):
    budget: BudgetEntry | None = None


class AgentEntry(Shape):
    roles: list[Word] = []
    capabilities: list[Glob] = []
    resources: list[Glob] = []
    prompts: list[Glob] = []
    tenant: Word = DEFAULT_TENANT
    environments: Annotated[list[Word], Field(min_length=1)] | None = None
    quota: QuotaSection = QuotaSection()
    budget: BudgetEntry | None = None
    person: Word | None = None
    os_user: Text | None = None
    oidc_client: Text | None = None
    metrics: bool = False
    meant: ClassVar[dict[str, str]] = {"tools": "capabilities", "rate": "quota", "user": "os_user"}


class MountEntry(Shape):
    host: Text
    at: Annotated[str, AfterValidator(validators.path_inside)]
    mode: Literal["ro", "rw"] = "ro"
    unsafe: Text | None = None


class ServerVolumeEntry(Shape):
    name: Annotated[str, AfterValidator(validators.volume)]
    at: Annotated[str, AfterValidator(validators.path_inside)]


class PackagesSection(Shape):
    kind: Literal["npm", "pypi", "image"] = Field(alias="from")
    names: Annotated[list[Text], Field(min_length=1)]
    tree: Annotated[str, AfterValidator(validators.digest)]
    placeholders: ClassVar[dict[str, Any]] = {"from": "npm", "names": ["_"], "tree": "sha256:" + "0" * 64}


class LimitsSection(Shape):
    memory_mb: Annotated[int, Field(ge=16, le=16_777_216), Mebibytes] | None = None
    disk_mb: Annotated[int, Field(ge=1, le=16_777_216), Mebibytes] | None = None
    processes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    cpu_cores: Annotated[float, Field(gt=0, le=1024)] | None = None
    meant: ClassVar[dict[str, str]] = {"max_memory_mb": "memory_mb", "max_processes": "processes"}


class ServerEntry(Shape):
    command: Command | None = None
    url: Url | None = None
    openapi: Text | None = None
    base_url: Url | None = None
    mounts: list[MountEntry] = []
    volumes: list[ServerVolumeEntry] = []
    network: Word = "denied"
    secrets: SecretNames = []
    placement: Word = "own"
    limits: LimitsSection | None = None
    resources: list[Glob] = []
    prompts: list[Glob] = []
    labels: list[Word] = []
    sampling: Literal["deny", "ask", "allow"] = "deny"
    elicitation: Literal["deny", "ask"] = "ask"
    pins: Literal["accepted", "first_use"] = "accepted"
    env: dict[Variable, str] = {}
    cwd: Text | None = None
    packages: PackagesSection | None = None
    listen: Literal["denied", "allowed"] = "denied"  # taken, and without effect: no port of a server is shown
    start_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    meant: ClassVar[dict[str, str]] = {"args": "command", "timeout_seconds": "start_timeout_seconds"}

    @property
    def address(self) -> str | None:
        """Where requests to it go, if it runs elsewhere."""
        return self.url if self.openapi is None else self.base_url


class RequestSection(Shape):
    method: Method
    url: Annotated[str, AfterValidator(validators.request_url)]
    query: dict[str, str] = {}
    headers: dict[Annotated[str, AfterValidator(validators.header)], str] = {}
    body: Any = None
    placeholders: ClassVar[dict[str, Any]] = {"method": "GET", "url": "http://localhost/"}


class CommandsSection(Shape):
    allow: list[ProgramName] | None = None
    ask: list[ProgramName] = []
    deny: list[ProgramName] = []
    meant: ClassVar[dict[str, str]] = {"allowed": "allow", "denied": "deny", "asked": "ask"}


class FilesystemSection(Shape):
    mounts: list[MountEntry] = []


class RetrySection(Shape):
    attempts: Annotated[int, Field(ge=0, le=10)] = 0
    on: Annotated[list[Literal["unavailable"]], Field(min_length=1)] = ["unavailable"]


class IdempotentSection(Shape):
    key: Condition


class RateSection(Shape):
    per_minute: Count | None = None
    burst: Count | None = None
    concurrent: Count | None = None
    per_day: Count | None = None


class LogSection(Shape):
    arguments: Literal["digest", "names", "redacted"] = "digest"
    result: Literal["digest", "names", "redacted"] = "digest"


class ResultSection(Shape):
    max_bytes: Annotated[int, Field(ge=1, le=100_000_000)] = 1_000_000
    max_chars: Annotated[int, Field(ge=100, le=100_000_000)] | None = None
    fields: list[Text] | None = None
    trust: Literal["trusted", "partial", "untrusted"] = "partial"


class EffectsSection(Shape):
    reversible: bool = False
    compensate: Word | None = None
    preview: Word | None = None


class LabelEntry(Shape):
    label: Word
    when: Condition
    placeholders: ClassVar[dict[str, Any]] = {"label": "_", "when": "true"}


class CapabilityEntry(Shape):
    transport: Literal["mcp", "sandboxed_exec", "direct"] = "mcp"
    server: Word | None = None
    tool: Text | None = None
    mode: Literal["read", "write", "high_risk"] = "write"
    description: str | None = None
    network: Word = "denied"
    filesystem: Annotated[FilesystemSection | None, BeforeValidator(validators.filesystem)] = None
    secrets: SecretNames = []
    environments: Annotated[list[Word], Field(min_length=1)] | None = None
    isolation: Literal["none", "process", "gvisor", "microvm"] | None = None
    memory_layout: Literal["shared", "fresh"] = "shared"
    template: Word = "python"
    listen: Annotated[
        Annotated[Literal["denied", "allowed"], Tag("a word")] | Annotated[dict[Word, Port], Tag("a mapping")],
        Discriminator(_listen_form),
    ] = "denied"
    commands: CommandsSection | None = None
    timeout_seconds: Seconds = 30.0
    retry: RetrySection = RetrySection()
    idempotent: Annotated[
        Annotated[bool, Tag("true or false")] | Annotated[IdempotentSection, Tag("a mapping")],
        Discriminator(_idempotent_form),
    ] = False
    rate: RateSection = RateSection()
    cost: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    approval: Word | None = None
    log: LogSection = LogSection()
    redact: list[Text] = []
    result: ResultSection = ResultSection()
    effects: EffectsSection = EffectsSection()
    labels: list[
        Annotated[Annotated[Word, Tag("a word")] | Annotated[LabelEntry, Tag("a mapping")], Discriminator(_label_form)]
    ] = []
    place: Condition | None = None
    meta: list[MetaKey] = []
    record: Literal["facts", "full"] = "facts"
    request: RequestSection | None = None
    input: dict[str, Any] | None = None
    meant: ClassVar[dict[str, str]] = {"http": "request", "input_schema": "input"}


class NetworkEntry(Shape):
    allow: list[HostPattern] = []
    methods: Annotated[list[Annotated[str, AfterValidator(validators.method)]], Field(min_length=1)] | None = None
    paths: Annotated[list[Annotated[str, AfterValidator(validators.path_prefix)]], Field(min_length=1)] | None = None
    addresses: list[Annotated[str, AfterValidator(validators.address_range)]] = []
    max_bytes_out: Count | None = None
    max_bytes_in: Count | None = None
    per_minute: Count | None = None
    inspect: bool = False


class SecretEntry(Shape):
    source: Literal["env", "file", "command", "keyring", "vault"] = Field(alias="from")
    name: Text | None = None
    path: Text | None = None
    command: Command | None = None
    service: Text | None = None
    field: Text | None = None
    hosts: list[Annotated[str, AfterValidator(validators.secret_host)]] = []
    header: Annotated[str, AfterValidator(validators.header)] | None = None
    format: Annotated[str, AfterValidator(validators.header_format)] | None = None
    methods: Annotated[list[Method], Field(min_length=1)] = ["GET", "HEAD"]
    env: Variable | None = None
    lifetime_seconds: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    tenants: list[Glob] | None = None
    environments: list[Glob] | None = None
    capabilities: list[Glob] | None = None
    servers: list[Glob] | None = None
    agents: list[Glob] | None = None
    placeholders: ClassVar[dict[str, Any]] = {"from": "env"}
    meant: ClassVar[dict[str, str]] = {"value": "from", "host": "hosts", "prefix": "format"}


SECRET_OPTIONS: dict[str, tuple[str, ...]] = {
    "env": ("name",),
    "file": ("path",),
    "command": ("command",),
    "keyring": ("service", "name"),
    "vault": ("path", "field"),
}
"""The options that each source of a secret needs."""


class VaultSection(Shape):
    address: Url | None = None
    token_env: Variable = "VAULT_TOKEN"  # noqa: S105 - the name of a variable
    token_file: Text | None = None
    namespace: Text | None = None
    addresses: list[Range] = []


class HookEntry(Shape):
    python: Annotated[str, AfterValidator(validators.function)] | None = None
    command: Command | None = None
    url: Annotated[str, AfterValidator(validators.webhook)] | None = None
    secret: Word | None = None
    addresses: list[Range] = []
    mounts: list[MountEntry] = []
    network: Word = "denied"
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 10.0
    tells: Literal["calls", "questions"] = "calls"
    tenants: Annotated[list[Word], Field(min_length=1)] | None = None
    meant: ClassVar[dict[str, str]] = {"webhook": "url", "timeout": "timeout_seconds", "function": "python"}


class EscalateEntry(Shape):
    after_seconds: Annotated[float, Field(gt=0, le=2_592_000)]
    roles: Annotated[list[Word], Field(min_length=1)]


class StandingEntry(Shape):
    times: Annotated[int, Field(ge=1, le=10_000)]
    seconds: Annotated[float, Field(gt=0, le=2_592_000)]


class ApprovalEntry(Shape):
    when: Condition | None = None
    roles: list[Word] = []
    expires_seconds: Annotated[float, Field(gt=0, le=2_592_000)] = 3600.0
    own: bool = Field(default=False, alias="self")
    people: Annotated[int, Field(ge=1, le=100)] = 1
    reason: Literal["optional", "required"] = "optional"
    escalate: EscalateEntry | None = None
    standing: StandingEntry | None = None
    in_client: bool = False


class RuleEntry(Shape):
    id: Word
    name: str = ""
    description: str = ""
    action: Literal["allow", "audit", "warn", "sandbox", "ask", "deny"]
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 100
    tool_patterns: list[str] = []
    argument_patterns: dict[str, str] = {}
    taint_labels: list[Word] = []
    conditions: dict[str, Any] = {}
    when: Condition | None = None
    agents: list[Glob] = []
    servers: list[Glob] = []
    environments: list[Word] = []
    approval: Word | None = None
    owasp_asi_id: str | None = None
    normalize: bool = True
    enabled: bool = True
    mode: Literal["enforce", "shadow"] = "enforce"
    placeholders: ClassVar[dict[str, Any]] = {"id": "_", "action": "deny"}


class CaseEntry(Shape):
    name: Text
    tool: Text | None = None
    resource: Text | None = None
    prompt: Text | None = None
    server: Word | None = None
    args: dict[str, Any] = {}
    call_meta: dict[str, Any] = Field(default={}, alias="meta")
    agent: Word = "local"
    roles: list[Word] = []
    person: Text | None = None
    environment: Word | None = None
    labels: list[Word] | None = None
    taint: list[Word] = []
    mode: Literal["read", "write", "high_risk"] | None = None
    expect: Verdict
    rules: list[Word] | None = None
    not_rules: list[Word] = []
    approval: Word | None = None
    would: Verdict | None = None
    placeholders: ClassVar[dict[str, Any]] = {"name": "_", "expect": ["deny"]}
    meant: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("arguments", "params", "input"), "args"),
        **dict.fromkeys(("verdict", "expected", "decision", "action"), "expect"),
        **dict.fromkeys(("call", "capability"), "tool"),
        **dict.fromkeys(("rule", "matched"), "rules"),
        "_meta": "meta",
        "id": "name",
        "role": "roles",
    }


class PolicySection(Shape):
    preset: Annotated[str, AfterValidator(validators.preset)] = "standard"
    default: Literal["deny", "allow_read"] = "deny"
    label_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = WINDOW_SECONDS
    rules: list[Any] | None = []
    files: list[Text] = []
    organisation: Text | None = None
    cases: list[Any] | None = []


class OrganisationTop(Shape):
    preset: Annotated[str, AfterValidator(validators.preset)] | None = None
    default: Literal["deny"] | None = None
    rules: list[Any] | None = []


class PolicyFileTop(Shape):
    rules: list[Any] | None = []
    cases: list[Any] | None = []


class TemplateEntry(Shape):
    packages: list[Module] = []
    install: list[Text] = []
    setup: str = ""
    env: dict[str, str] = {}
    files: dict[str, str] = {}


class SandboxSection(Shape):
    backend: Word = "process"
    max_start_ms: Annotated[float, Field(ge=1, le=600_000)] = 500.0
    default_timeout_seconds: Annotated[float, Field(ge=1, le=86_400)] = 30.0
    max_cpu_cores: Annotated[float, Field(gt=0, le=1024)] = 1.0
    max_memory_mb: Annotated[int, Field(ge=64, le=16_777_216), Mebibytes] = 256
    max_disk_mb: Annotated[int, Field(ge=64, le=16_777_216), Mebibytes] = 512
    max_processes: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    max_output_mb: Annotated[int, Field(ge=1, le=1_000_000), Mebibytes] = 64
    capture_bytes: Annotated[int, Field(ge=0, le=64 * 1024 * 1024)] = 1_000_000
    accept_missing: list[Word] = []
    templates: dict[Word, TemplateEntry] = {}
    allow_packages: list[PackagePattern] = []
    require_packages: Literal["any", "pinned", "hashed"] = "any"
    install_inside: bool = False
    build_packages: bool = False
    max_sessions: Annotated[int, Field(ge=0, le=10_000)] = 32
    max_sessions_memory_mb: Annotated[int, Field(ge=64, le=16_777_216), Mebibytes] | None = None
    max_sessions_cpu_cores: Annotated[float, Field(gt=0, le=1024)] | None = None
    session_queue_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    session_lifetime_seconds: Annotated[float, Field(ge=1, le=2_592_000)] = 3600.0
    max_session_lifetime_seconds: Annotated[float, Field(ge=1, le=2_592_000)] = 86_400.0
    session_idle_seconds: Annotated[float, Field(ge=1, le=2_592_000)] = 300.0
    max_session_idle_seconds: Annotated[float, Field(ge=1, le=2_592_000)] = 86_400.0
    session_retain_seconds: Annotated[float, Field(ge=0, le=31_536_000)] = 86_400.0
    session_retain_mb: Annotated[int, Field(ge=1, le=16_777_216), Mebibytes] = 2048
    session_paused_seconds: Annotated[float, Field(gt=0, le=31_536_000)] = 86_400.0
    reclaim_after_seconds: Annotated[float, Field(ge=0, le=31_536_000)] | None = 60.0
    network_enabled: bool = False
    allowed_egress_domains: list[HostPattern] = []
    docker_image: Text | None = None
    docker_host: Text | None = None
    docker_runtime: Word | None = None
    docker_ready: Annotated[int, Field(ge=0, le=64)] = 2
    firecracker_kernel_path: Text | None = None
    firecracker_rootfs_path: Text | None = None
    microvm_kernel: Text | None = None


class ConfigFileTop(Shape):
    """The whole file; each entry of the mappings is read by itself, see ENTRIES."""

    version: Annotated[int, AfterValidator(validators.version)] = 1
    environment: Word = "development"
    gateway: Any = None
    people: Any = None
    agents: Any = None
    tenants: Any = None
    servers: Any = None
    capabilities: Any = None
    networks: Any = None
    secrets: Any = None
    vault: Any = None
    telemetry: Any = None
    hooks: Any = None
    audit: Any = None
    approvals: Any = None
    policy: Any = None
    sandbox: Any = None
    meant: ClassVar[dict[str, str]] = {"rules": "policy.rules", "mcpServers": "servers", "tools": "capabilities"}


SECTIONS: dict[str, type[Shape]] = {
    "gateway": GatewaySection,
    "policy": PolicySection,
    "sandbox": SandboxSection,
    "vault": VaultSection,
    "telemetry": TelemetrySection,
    "audit": AuditSection,
}
ENTRIES: dict[str, type[Shape]] = {
    "people": PersonEntry,
    "agents": AgentEntry,
    "tenants": TenantEntry,
    "servers": ServerEntry,
    "capabilities": CapabilityEntry,
    "networks": NetworkEntry,
    "secrets": SecretEntry,
    "approvals": ApprovalEntry,
    "hooks": HookEntry,
}
