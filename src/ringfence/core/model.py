"""The nouns. Plain data that every layer may hold; no behaviour beyond naming itself.

A *call* is what an agent asks for. A *contract* says what one capability may do. A *decision* is what policy says of a
call. A *grant* is permission to run it once. An *outcome* is how it ended; a refusal is an outcome too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any, Literal

from ringfence.core.box import NOBODY_LISTENS, Attached, CommandRules, Listening, Mount, Ran
from ringfence.core.record import dataclass, plain
from ringfence.core.sessions import Within

Json = dict[str, Any]
"""A JSON object as read from the wire."""


class GuardedText(str):
    """Text that may reach a caller or a record: nothing in it is secret or unseen.

    Only the guard makes one of what others had a hand in (`Guard.message`), and `own_words` of what stands in the
    source. A test checks that nothing else does.
    """

    __slots__ = ()


def own_words(sentence: str) -> GuardedText:
    """A sentence of our own, written out in the source where this is called."""
    return GuardedText(sentence)


class Status(StrEnum):
    """How a call ended. `docs/life-of-a-call.md` has the table."""

    SUCCESS = "success"
    FAILED = "failed"
    VALIDATION_FAILURE = "validation_failure"
    DENIED = "denied"
    APPROVAL_REQUIRED = "approval_required"
    TIMEOUT = "timeout"
    KILLED = "killed"
    UNAVAILABLE = "unavailable"
    UNKNOWN = "unknown"


class Effect(StrEnum):
    """Whether something outside may have changed."""

    NONE = "none"
    CONFIRMED = "confirmed"
    UNKNOWN = "unknown"


class Mode(StrEnum):
    """How much harm a capability can do; gives the contract its defaults."""

    READ = "read"
    WRITE = "write"
    HIGH_RISK = "high_risk"


class Action(StrEnum):
    """What a policy rule does with a call that it matches."""

    ALLOW = "allow"
    AUDIT = "audit"
    WARN = "warn"
    SANDBOX = "sandbox"
    ASK = "ask"
    DENY = "deny"


class Transport(StrEnum):
    """The way a capability is carried out; chosen by the contract, never by the model."""

    MCP = "mcp"
    SANDBOXED_EXEC = "sandboxed_exec"
    DIRECT = "direct"


CallKind = Literal["tool", "resource", "prompt", "completion", "listing", "logging", "server"]
"""`listing` asks a server for its resources, `logging` sets the level of its log lines."""
Origin = Literal["mcp-http", "mcp-stdio", "cli", "sdk", "system", "console", "webhook"]


DEFAULT_TENANT = "local"
"""Whose everything is where no tenant is named."""


@plain
class Principal:
    """Who calls: an agent, and the person it acts for where that is known."""

    agent: str
    tenant: str = DEFAULT_TENANT
    person: str | None = None
    roles: frozenset[str] = frozenset()
    kind: Literal["agent", "system"] = "agent"
    scopes: frozenset[str] | None = None
    """What an identity provider granted; None: its credential is not limited so."""

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.agent}"


SYSTEM = Principal(agent="system", kind="system")
"""The gateway itself: starts servers, reads their definitions."""


@plain
class Flow:
    """The labels of one call: see `core/labels.py`."""

    own: tuple[str, ...] = ()
    """What its contract says of it, for these arguments."""
    labels: tuple[str, ...] = ()
    """Those in force: of what its agent read before, of what lies where it reads, and of what it touches itself."""


@plain
class Call:
    """One request to do something, as the front understood it."""

    id: str
    principal: Principal
    tool: str
    """The capability's name; for a resource its URI, for a prompt its name."""
    arguments: Json
    kind: CallKind = "tool"
    origin: Origin = "sdk"
    server: str | None = None
    """Set by the front for kinds other than `tool`; a tool's server comes from its contract."""
    parent: str | None = None
    session: str | None = None
    box: str | None = None
    """The session that the caller wants it in, where a server lives in an agent's own box; once the contract is known:
    only where that is so."""
    idempotency_key: str | None = None
    trace: str | None = None
    deadline: float | None = None
    """On the monotonic clock; the caller's own limit, beside the contract's."""
    wait_seconds: float | None = None
    """How long the caller waits for a person's approval; None: as long as the configuration lets a call wait."""
    fault: str | None = None
    """What was wrong with the bytes of the request; such a call is refused and recorded."""
    method: str = "tools/call"
    meta: Json = field(default_factory=dict)
    """The client's `_meta`, without what MCP or we reserve. Once the contract is known: what it lets through."""
    traced: Mapping[str, str] = field(default_factory=dict)
    """Its trace context, once it was checked; it is sent to the server, and is part of no digest."""
    log_level: str | None = None
    """The level of a server's log lines that the client wants."""
    inputs: Json | None = None
    """Answers that a 2026-07-28 client gave before it was asked: used where a server does ask."""
    attached: Attached | None = None
    """Bytes beside the arguments, from a caller in this process."""
    flow: Flow | None = None
    """Its labels, once its contract is known; None: nothing here has any."""

    @property
    def session_named(self) -> Any:
        """The session that it runs in: of a server that lives in sessions, or of a tool of ours."""
        return self.box if self.box is not None else self.arguments.get("session")


# ── Contracts ─────────────────────────────────────────────────────────────────────────────────────


@plain
class Retry:
    attempts: int = 0
    on: tuple[str, ...] = ("unavailable",)


@plain
class Rate:
    per_minute: int | None = None
    burst: int | None = None
    concurrent: int | None = None
    per_day: int | None = None


@plain
class CostBudget:
    """How many cost units may be spent within one window. Windows begin at whole multiples of their length, in UTC."""

    units: int
    seconds: float


@plain
class LogPolicy:
    """How much of a payload the audit log may hold: its digest, its field names, or the text redacted."""

    arguments: Literal["digest", "names", "redacted"] = "digest"
    result: Literal["digest", "names", "redacted"] = "digest"


@plain
class ResultPolicy:
    max_bytes: int = 1_000_000
    fields: tuple[str, ...] | None = None
    trust: Literal["trusted", "partial", "untrusted"] = "partial"
    max_chars: int | None = None
    """How many characters of text a model is given; of what is longer, head and tail. None: no such limit."""


@plain
class Effects:
    reversible: bool = False
    compensate: str | None = None
    preview: str | None = None


@plain
class LabelWhen:
    """A label that calls have where a condition holds."""

    label: str
    when: str


@plain
class Contract:
    """What one capability may do. `digest` covers every field but itself."""

    name: str
    transport: Transport = Transport.MCP
    server: str | None = None
    tool: str = ""
    mode: Mode = Mode.WRITE
    description: str | None = None
    network: str = "denied"
    mounts: tuple[Mount, ...] = ()
    secrets: tuple[str, ...] = ()
    environments: tuple[str, ...] | None = None
    isolation: Literal["none", "process", "gvisor", "microvm"] = "none"
    memory_layout: Literal["shared", "fresh"] = "shared"
    template: str = "python"
    listen: Listening = NOBODY_LISTENS
    commands: CommandRules | None = None
    """None: every program of the template."""
    timeout_seconds: float = 30.0
    retry: Retry = Retry()
    idempotent: bool = False
    idempotent_key: str | None = None
    """A CEL expression over `args` that gives the idempotency key."""
    rate: Rate = Rate()
    approval: str = "none"
    """`none`, `always`, or the name of an approval rule."""
    cost: int = 1
    """Units that a call spends of the budgets of its agent and tenant."""
    log: LogPolicy = LogPolicy()
    redact: tuple[str, ...] = ()
    result: ResultPolicy = ResultPolicy()
    effects: Effects = Effects()
    labels: tuple[str, ...] = ()
    labels_when: tuple[LabelWhen, ...] = ()
    """Labels that depend on the arguments."""
    place: str | None = None
    """A CEL expression over `args`: what of its server a call reads or writes, to which labels stick."""
    meta: tuple[str, ...] = ()
    """Keys of a call's `_meta` that may reach the server."""
    record: Literal["facts", "full"] = "facts"
    request: DirectRequest | None = None
    """Where the transport is direct and no server is named."""
    digest: str = ""

    @property
    def is_served(self) -> bool:
        """Whether something outside carries it out: a server, or an HTTP API."""
        return self.transport is not Transport.SANDBOXED_EXEC


@plain
class DirectRequest:
    """The one HTTP request that a capability makes by itself, without any server of ours. `{name}` stands for an
    argument."""

    method: str
    url: str
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    input: Json | None = None
    """The JSON Schema of its arguments; None: every place is a text that must be given."""


@plain
class Definition:
    """A server's own description of one of its tools or prompts, as it was read, with the digest that pins it."""

    server: str
    name: str
    digest: str
    body: Json
    kind: Literal["tool", "prompt"] = "tool"


@plain
class Escalation:
    """Who may answer too when nobody has for so long."""

    after_seconds: float
    roles: tuple[str, ...]


@plain
class StandingTerms:
    """How far a person may approve calls like one that they were asked about, before they are made."""

    times: int
    seconds: float


@plain
class ApprovalRule:
    """When a person must approve a call, and who may."""

    name: str
    when: str | None = None
    roles: tuple[str, ...] = ()
    expires_seconds: float = 3600.0
    self_approval: bool = False
    people: int = 1
    needs_reason: bool = False
    """An answer must say why."""
    escalation: Escalation | None = None
    standing: StandingTerms | None = None
    """None: every call is asked about."""
    in_client: bool = False
    """The caller's own person may answer in the client that made the call."""


EVERY_ROLE = frozenset({"*"})
ADMIN = "admin"
"""The role of people who may change what runs, in the console."""
AUDITOR = "auditor"
"""Who has this role alone reads, and answers nothing."""


@plain
class Person:
    """A person who may answer."""

    name: str
    roles: frozenset[str] = frozenset()
    os_user: str | None = None
    tenant: str = DEFAULT_TENANT
    oidc_subject: str | None = None
    """Who this is to the identity provider."""
    answer_key: str | None = None
    """The public half of the key that they sign answers with, which come by webhook."""

    def answers_for(self, tenant: str) -> bool:
        """Whether what agents of this tenant ask for concerns this person: who is alone here is of every tenant."""
        return self.roles == EVERY_ROLE or self.tenant == tenant

    def holds(self, roles: tuple[str, ...]) -> bool:
        """Whether every entry of `roles` is satisfied; alternatives within an entry are joined by `|`."""
        return self.roles == EVERY_ROLE or all(self.roles & set(entry.split("|")) for entry in roles)

    def may_answer(self, roles: tuple[str, ...]) -> bool:
        """Whether they may answer what is asked of people with these roles."""
        return self.holds(roles) and self.roles != {AUDITOR}

    @property
    def is_admin(self) -> bool:
        return self.holds((ADMIN,))

    @property
    def is_of_all(self) -> bool:
        """Whether they are of the gateway itself, not of one tenant of several."""
        return self.roles == EVERY_ROLE or self.tenant == DEFAULT_TENANT


@plain
class AgentSpec:
    """An agent that the operator declared. What it does not name, it may not call."""

    name: str
    tenant: str = DEFAULT_TENANT
    roles: frozenset[str] = frozenset()
    capabilities: tuple[str, ...] = ()
    """Patterns of the capabilities that it may call."""
    resources: tuple[str, ...] = ()
    """Patterns of the URIs that it may read."""
    prompts: tuple[str, ...] = ()
    environments: tuple[str, ...] | None = None
    """None: all."""
    quota: Rate = Rate()
    """Of all its calls together, beside the rate of each capability."""
    person: str | None = None
    """Whom it acts for."""
    os_user: str | None = None
    """Programs of this account on this machine are this agent."""
    oidc_client: str | None = None
    """The client of the identity provider that is this agent, when it acts for its person."""
    budget: CostBudget | None = None
    metrics: bool = False
    """Whether it may read `/metrics`, which counts what all agents did."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """What is kept of a bearer token: whose it is, and the digest of its secret."""

    id: str
    digest: str
    kind: Literal["agent", "person", "link", "login"]
    """A `link` lets the person of this account log in to the console, once; a `login` stands for what it began."""
    name: str
    tenant: str
    made_by: str
    made_at: float
    expires_at: float
    revoked_at: float | None = None
    proven: bool = True
    """Whether the signed log has that it was made so."""

    def state(self, now: float) -> Literal["valid", "expired", "revoked", "unproven"]:
        if self.revoked_at is not None:
            return "revoked"
        if now >= self.expires_at:
            return "expired"
        return "valid" if self.proven else "unproven"


@plain
class Login:
    """How a person proved who they are to a gateway, which then gave their answers for them."""

    way: Literal["link", "token", "oidc", "client", "webhook"]
    credential: str
    """The id of the link or token, or the subject; or of the call on whose own way back the answer came; or the public
    key by which the answer was signed."""
    issuer: str | None = None
    signed: Json | None = None
    """An answer with its signature, as it came by webhook."""

    def as_fact(self) -> Json:
        signed = {} if self.signed is None else {"signed": self.signed}
        return {"way": self.way, "credential": self.credential, "issuer": self.issuer, **signed}


@dataclass(frozen=True, slots=True)
class Issuer:
    """An identity provider, as the operator declared it."""

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    jwks: str | None = None
    """Where its keys are; None: where its own document says."""
    scopes: tuple[str, ...] = ()
    """What every token must have."""
    roles_claim: str = "roles"
    roles: tuple[str, ...] = ()
    """The roles that a token may give."""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """What a token that was verified says, as far as it matters here."""

    client: str
    subject: str | None
    """The user behind the client; None where the client acts for itself."""
    scopes: frozenset[str]
    roles: frozenset[str]


@plain
class Rule:
    """One line of policy. Empty patterns match every call; every given condition must hold."""

    id: str
    action: Action
    name: str = ""
    description: str = ""
    priority: int = 100
    tool_patterns: tuple[str, ...] = ()
    argument_patterns: Mapping[str, str] = field(default_factory=dict)
    when: str | None = None
    agents: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    approval: str | None = None
    owasp_asi_id: str | None = None
    modes: tuple[Mode, ...] = ()
    """Only presets set this: their rules match the mode of a contract, not a name."""
    normalize: bool = True
    """Whether its argument patterns are also tried on text with look-alikes made alike."""
    enabled: bool = True
    mode: Literal["enforce", "shadow"] = "enforce"
    """In shadow mode it decides nothing; what it would have done is told."""
    only_restricts: bool = False
    """An organisation's rule: whatever it does, it never allows what no rule of the team does."""
    taint_labels: tuple[str, ...] = ()
    """It matches where any of these is in force."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """What a condition could see, by dotted name, and the value that it must have."""
    taint_all: tuple[str, ...] = ()
    """Only presets set this and the next two: all of these are in force."""
    sink: bool = False
    """Only calls that send something out of our hands."""
    exports: Literal["", "large", "secrets"] = ""
    """Only what is long, or what looks like a secret."""


# ── What happens to a call ────────────────────────────────────────────────────────────────────────


@plain
class Shadow:
    """What rules in shadow mode would have made of one call."""

    rules: tuple[str, ...]
    """Ids of those that matched, highest priority first."""
    verdict: str
    """The whole decision, had they been in force, in a word: see `policy.verdict`."""
    reason: str
    error: str | None = None
    """What could not be evaluated, which would have denied the call."""


@plain
class Decision:
    """What policy says of one call. `deny` beats all; `ask` and `sandbox` may both apply."""

    id: str
    allowed: bool
    reason: str
    rules: tuple[str, ...] = ()
    """Ids of every rule that matched, highest priority first."""
    asks: tuple[str, ...] = ()
    """Names of the approval rules that a matching `ask` named (`always` where it named none)."""
    sandbox: bool = False
    marks: tuple[str, ...] = ()
    """`warn` and `audit` rules that matched."""
    error: str | None = None
    policy_digest: str = ""
    forms: tuple[tuple[str, str], ...] = ()
    """The rules that matched by their argument patterns, each with the form of the text that the match is in."""
    shadow: Shadow | None = None
    """None: no rule in shadow mode had anything to say."""


@plain
class Receipt:
    """Where a record stands in the audit log."""

    chain: str
    seq: int
    head: str


Recheck = Callable[[], Awaitable[None]]


async def always() -> None:
    """As a `recheck`: it may begin, whenever that is."""


@plain
class Grant:
    """Permission to run one call once, until a time, for exactly these digests. Only the pipeline makes one."""

    call: Call
    contract: Contract
    decision: Decision
    definition: Definition | None
    arguments_digest: str
    approval_id: str | None
    expires_at: float
    """On the monotonic clock."""
    after_step: int | None = None  # in a session: only where this is still its last step
    snapshot: str | None = None  # the one that a person agreed to, by its digest, whatever its name means by now
    recheck: Recheck = always
    """To be awaited after every wait, right before something begins. Raises Refused where it may not begin any more."""


@plain
class Answer:
    """What came back from where a grant was dispatched to, before the guard saw it."""

    result: Json | None
    """The raw result object, unknown fields and all; None where there is none to give."""
    status: Status = Status.SUCCESS
    reason_code: str = "ok"
    message: str = ""
    isolation: Json = field(default_factory=dict)
    attempts: int = 1
    ran: Ran | None = None
    """What the supervisor saw of a program in a box."""
    within: Within | None = None
    redactions: Mapping[str, int] = field(default_factory=dict)
    """What was removed already, by rule."""
    secrets: Mapping[str, int] = field(default_factory=dict)
    """The same by secret, for the audit log alone."""


@plain
class Outcome:
    """How a call ended, for its caller."""

    status: Status
    reason_code: str
    message: GuardedText = GuardedText("")
    """For refusals and failures of ours: one readable sentence."""
    result: Json | None = None
    """The guarded result as it goes to the client, unknown fields kept; None for a refusal."""
    trust: str = "trusted"
    facts: Json = field(default_factory=dict)
    approval_id: str | None = None
    receipt: Receipt | None = None
    error: Json | None = None
    """The JSON-RPC error (code, message, data) that a server answered with, where that was it."""
    ran: Ran | None = None
    """What ran in a box, its output as it came, for a caller in this process."""
    within: Within | None = None

    @property
    def ok(self) -> bool:
        return self.status is Status.SUCCESS

    @property
    def content(self) -> list[Json]:
        """MCP content blocks: the result's own, or the refusal as text."""
        if self.result is not None and isinstance(self.result.get("content"), list):
            return list(self.result["content"])
        return [{"type": "text", "text": self.message}] if self.message else []

    @property
    def structured(self) -> Any:
        return None if self.result is None else self.result.get("structuredContent")

    @property
    def text(self) -> str:
        """All text blocks, joined."""
        return "\n".join(str(b.get("text", "")) for b in self.content if b.get("type") == "text")


# ── specs: What the operator declared: servers, networks and secrets, by name. Plain data; `model` ha


@dataclass(frozen=True, slots=True)
class PackageSpec:
    """The packages of a server, and the tree in our cache that holds them."""

    kind: Literal["npm", "pypi", "image"]
    names: tuple[str, ...]
    tree: str
    """The digest of everything in it."""
    folder: str
    """Where that tree lies on this host. The tree of an image is the root of the server's box."""


@dataclass(frozen=True, slots=True)
class ServerVolume:
    """A durable folder of a server, which each agent has for itself."""

    name: str
    at: str
    """Where the server's box sees it."""


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
    labels: tuple[str, ...] = ()
    """Of its resources, prompts and completions, which have no contract that could say so."""
    sampling: Literal["deny", "ask", "allow"] = "deny"
    elicitation: Literal["deny", "ask"] = "ask"
    pins: Literal["accepted", "first_use"] = "accepted"
    start_timeout_seconds: float = 30.0
    placement: str = "own"
    """`own`, `session`, `unsafe_host`, or the name of a box that it shares with the servers of the same placement."""
    mounts: tuple[Mount, ...] = ()
    """What its box sees of the host, beside what its command needs."""
    volumes: tuple[ServerVolume, ...] = ()
    """What it writes there outlives its box."""
    network: str = "denied"
    limits: Mapping[str, float | int] = field(default_factory=dict)
    """The limits of its box that are not the usual ones, by the names of `box.Limits`."""
    secrets: tuple[str, ...] = ()
    packages: PackageSpec | None = None
    openapi: str | None = None
    """The file with the OpenAPI document of an HTTP API, whose base URL is `url`."""
    openapi_url: str | None = None
    """Where that file is fetched from, by `ringfence check --accept`."""
    direct: DirectRequest | None = None
    """The one request of a capability that needs no server; its origin is `url`."""

    @property
    def is_api(self) -> bool:
        """Whether it is an HTTP API, which speaks no MCP."""
        return self.openapi is not None or self.direct is not None

    @property
    def keeps_nothing(self) -> bool:
        """Whether all that it can change is in its own box, and gone with it: no volume, no folder of the host to write
        to, and no way out."""
        elsewhere = self.url is not None or self.placement == "unsafe_host" or self.placement.startswith("session")
        reaches = self.network != "denied" or bool(self.secrets)
        return not (elsewhere or reaches or self.volumes or any(mount.mode == "rw" for mount in self.mounts))


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The places outside that a network's name stands for. None means: not limited by this."""

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
class HookSpec:
    """What is told of calls that ended, or of questions to people: a function, a command in a box, or an address.
    Exactly one of these is set."""

    name: str
    python: str | None = None
    """`FILE.py:FUNCTION` with an absolute path, `MODULE:FUNCTION`, or the name of an entry point."""
    command: tuple[str, ...] = ()
    url: str | None = None
    secret: str | None = None
    """By which requests to the address are signed."""
    mounts: tuple[Mount, ...] = ()
    """What the box of the command sees."""
    network: str = "denied"
    """Of that box."""
    addresses: tuple[str, ...] = ()
    """Non-public addresses and ranges that the name in the URL may stand for."""
    timeout_seconds: float = 10.0
    """For what is handed over at once; for a function, for each record."""
    tells: Literal["calls", "questions"] = "calls"
    tenants: tuple[str, ...] | None = None
    """Whose questions it is told of; None: those of all."""


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
        """The variable in which a box finds the placeholder."""
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
