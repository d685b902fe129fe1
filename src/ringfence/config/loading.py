"""From a file to a Config, or to the list of everything that is wrong with it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import cast

from ringfence.config import checks, paths, schema, validators, yaml
from ringfence.config.draft import Draft, Shaped, keys_of, read_draft, shaped
from ringfence.config.settings import (
    SANDBOX_NETWORK,
    AuditSettings,
    Config,
    GatewaySettings,
    PolicySettings,
    SandboxSettings,
    TelemetrySettings,
    TlsFiles,
    WitnessSettings,
    sealed,
)
from ringfence.config.validators import did_you_mean
from ringfence.config.yaml import Where, YamlSource
from ringfence.core.box import Mount, SetUp
from ringfence.core.errors import ConfigError, Problem
from ringfence.core.model import (
    Action,
    AgentSpec,
    ApprovalRule,
    CallKind,
    Contract,
    CostBudget,
    Escalation,
    HookSpec,
    Issuer,
    Mode,
    NetworkSpec,
    PackageSpec,
    Person,
    Rate,
    Rule,
    SecretSpec,
    ServerSpec,
    ServerVolume,
    StandingTerms,
    VaultSpec,
)
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.governance import contract, policy
from ringfence.governance.cases import PolicyCase
from ringfence.packages.cache import AT, folder_of
from ringfence.sandbox.tools.toolkit import PROGRAMS, box_makers, declarable_tools
from ringfence.upstream.openapi.template import DIRECT, base_of

_SYSLOG = "/dev/log"
_LOOPBACK = schema.GatewaySection().listen
"""Where the gateway is where the command line wants it at an address, and the file at a socket."""


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError with every problem at once, sorted by place."""
    absolute = paths.resolve(str(path), Path())
    try:
        str(absolute).encode()
    except UnicodeEncodeError:
        # Paths are part of what is digested, recorded and shown, and are text there.
        why = "lies in a folder whose name is not UTF-8 text; rename it, or move the file"
        raise ConfigError([Problem(str(path), 1, 1, why)]) from None
    text, problems = yaml.read_file(absolute, str(path))
    if text is None:
        raise ConfigError(problems)
    return _config(text, str(path), absolute, (absolute,))


def loads(text: str, *, file: str, base: Path) -> Config:
    """The same from text: `file` names it in problems, and its relative paths are relative to `base`."""
    return _config(text, file, paths.resolve(file, base), (), base=base)


def _config(text: str, file: str, path: Path, files: tuple[Path, ...], base: Path | None = None) -> Config:
    read = yaml.parse(text, file)
    if read.value is None and not read.problems:
        read.value = {}
    if not isinstance(read.value, dict):
        if not read.problems:
            found = yaml.kind(read.value)
            read.problems.append(read.problem((), f"a configuration is a mapping, this is {found}"))
        raise ConfigError(sorted(read.problems))
    draft = read_draft(read, path.parent if base is None else paths.resolve("", base))
    checks.check(draft)
    _check_exposure(draft)
    read_rules = read_policy(draft)
    policy = read_rules.settings
    telemetry = _telemetry(draft)
    audit = _audit(draft)
    contracts = {name: _contract(draft, name, found) for name, found in draft.capabilities.items()}
    state = _gateway(draft).state
    servers: dict[str, ServerSpec] = {}
    if not read.problems:  # documents are read where nothing else is wrong
        servers = {
            name: _api(draft, _packaged(_server(draft, name, found.shape), found.shape.packages, state), found.shape)
            for name, found in draft.servers.items()
        }
        contracts = {**contracts, **_drafted(draft, servers, contracts)}
        servers |= _requests(contracts)
    problems = sorted({*read.problems, *draft.elsewhere})
    if problems:
        raise ConfigError(problems)
    config = Config(
        path=path,
        environment=draft.file.shape.environment,
        gateway=_gateway(draft),
        people={name: _person(name, found.shape) for name, found in draft.people.items()},
        servers=servers,
        contracts=contracts,
        networks=_networks(draft),
        secrets={name: _secret(draft, name, found.shape) for name, found in draft.secrets.items()},
        vault=_vault(draft),
        telemetry=telemetry,
        audit=audit,
        places={name: _place(draft, found) for name, found in draft.secrets.items()},
        hooks={name: _hook(draft, name, found.shape) for name, found in draft.hooks.items()},
        approvals={name: _approval(name, found.shape) for name, found in draft.approvals.items()},
        policy=policy,
        sandbox=_sandbox(draft.sandbox.shape, draft.base),
        agents={name: _agent(name, found.shape) for name, found in draft.agents.items()},
        budgets={
            name: budget for name, found in draft.tenants.items() if (budget := _budget(found.shape.budget)) is not None
        },
        warnings=tuple(sorted(draft.warnings)),
        files=(*files, *policy.files),
        rule_places=read_rules.places,
        cases=read_rules.cases,
    )
    return sealed(config)


def _contract(draft: Draft, name: str, capability: Shaped[schema.CapabilityEntry]) -> Contract:
    given = dict(capability.given)
    # Where several servers are declared, which of them has the tool is known only when they have been asked.
    if capability.shape.transport == "mcp" and "server" not in given and len(draft.servers) == 1:
        given["server"] = next(iter(draft.servers))
    api = draft.servers.get(given.get("server", ""))
    if capability.shape.transport == "mcp" and api is not None and api.shape.openapi is not None:
        given["transport"] = "direct"
    if capability.shape.transport == "direct" and "server" not in given and capability.shape.request is None:
        apis = [each for each, found in draft.servers.items() if found.shape.openapi is not None]
        if len(apis) == 1:
            given["server"] = apis[0]
    if capability.shape.request is not None:
        given |= {"server": f"{DIRECT}{name}", "tool": name}
        given["request"] = checks.direct_request(capability.shape.request, capability.shape.input)
    given.pop("input", None)
    if capability.shape.transport == "sandboxed_exec":
        given.setdefault("timeout_seconds", draft.sandbox.shape.default_timeout_seconds)
        if draft.sandbox.shape.network_enabled and (given.get("tool") or name) in box_makers():
            given.setdefault("network", SANDBOX_NETWORK)
    mounts = capability.shape.filesystem.mounts if capability.shape.filesystem is not None else []
    if mounts:
        given["filesystem"] = {"mounts": [asdict(mount) for mount in _mounts(draft, mounts)]}
    named = draft.servers.get(given.get("server", ""))
    given |= checks.inherited(capability, named)
    if named is not None and named.shape.placement == "session" and capability.shape.transport == "mcp":
        given["result"] = {**(given.get("result") or {}), "trust": "untrusted"}  # it is the agent's own word
    built, problems = contract.build(name, given)
    for where, text in problems:
        # `checks` has reported a condition at its exact place. And where keys did not fit, those that contradict each
        # other may only seem to; a pattern is bad by itself.
        if where != ("idempotent", "key") and (not capability.broken or where[0] == "redact"):
            draft.problem((*capability.where, *where), text)
    return built


def _mounts(draft: Draft, shapes: list[schema.MountEntry]) -> Iterator[Mount]:
    for shape in shapes:
        with suppress(ValueError):  # reported by `checks`
            yield checks.mount(draft, shape)


def _gateway(draft: Draft) -> GatewaySettings:
    shape = draft.gateway.shape
    socket = checks.socket(draft)
    host, port = validators.listen_address(shape.listen if socket is None else _LOOPBACK)
    state = paths.state_folder() if shape.state is None else paths.resolve(shape.state, draft.base)
    kept = None if shape.retention is None else validators.retention_seconds(shape.retention)
    tls = None
    if shape.tls is not None:
        tls = TlsFiles(paths.resolve(shape.tls.cert, draft.base), paths.resolve(shape.tls.key, draft.base))
    return GatewaySettings(
        host,
        port,
        state,
        shape.approval_wait_seconds,
        shape.code_mode,
        socket,
        kept,
        shape.url,
        tls,
        tuple(shape.trusted_proxy),
        None if shape.oidc is None else _issuer(shape.oidc, shape.url),
        {} if shape.oidc is None else {scope: tuple(names) for scope, names in shape.oidc.step_up.items()},
        shape.log,
    )


def _audit(draft: Draft) -> AuditSettings:
    shape = draft.audit.shape
    given = shape.witness
    where = (*draft.audit.where, "witness")
    if given is None or "witness" in draft.audit.broken:
        return AuditSettings(shape.signer, shape.signer_user)
    syslog = _SYSLOG if given.syslog is True else given.syslog or None
    if given.file is None and syslog is None and given.webhook is None:
        draft.problem(where, "a witness needs file: PATH, syslog: true or webhook: URL", key=True)
    file = None if given.file is None else paths.resolve(given.file, draft.base)
    if file is not None and file.is_relative_to(_gateway(draft).state):
        text = f"{file} lies in the state folder, so what cuts the log can cut it as well; name a file elsewhere"
        draft.problem((*where, "file"), text)
    socket = None if syslog is None else paths.resolve(str(syslog), draft.base)
    witness = WitnessSettings(file, socket, given.webhook, given.every_seconds)
    return AuditSettings(shape.signer, shape.signer_user, witness)


def _telemetry(draft: Draft) -> TelemetrySettings:
    shape = draft.telemetry.shape
    url = shape.otlp
    if url == validators.FROM_ENVIRONMENT:
        url = paths.otlp_endpoint()
        try:
            if url is None:
                raise ValueError("neither OTEL_EXPORTER_OTLP_TRACES_ENDPOINT nor OTEL_EXPORTER_OTLP_ENDPOINT is set")
            validators.otlp(url)
        except ValueError as exc:
            draft.problem((*draft.telemetry.where, "otlp"), str(exc))
            return TelemetrySettings()
    if url is not None and validators.goes_in_clear(url):
        sent = "spans, and the headers of OTEL_EXPORTER_OTLP_HEADERS," if paths.otlp_headers() else "spans"
        text = f"{sent} are sent to {quoted(url)} in clear, readable by every network between: write https://"
        draft.warn((*draft.telemetry.where, "otlp"), text, key=False)
    return TelemetrySettings(url, shape.sample, shape.service or paths.service_name())


def _issuer(shape: schema.OidcSection, url: str | None) -> Issuer:
    return Issuer(
        issuer=shape.issuer,
        audience=shape.audience or f"{url}/mcp",
        algorithms=tuple(shape.algorithms),
        jwks=shape.jwks,
        scopes=tuple(shape.scopes),
        roles_claim=shape.roles_claim,
        roles=tuple(shape.roles),
        addresses=tuple(shape.addresses),
    )


def _check_exposure(draft: Draft) -> None:
    """An address that others can reach needs callers that show who they are, over TLS."""
    where = draft.gateway.where
    shape = draft.gateway.shape
    if {"listen", "tls", "trusted_proxy", "url", "oidc"} & draft.gateway.broken:
        return
    settings = _gateway(draft)
    if (
        settings.socket is None
        and (problem := checks.exposed(settings.host, settings, agents=bool(draft.agents))) is not None
    ):
        draft.problem((*where, "listen"), problem)
    for key in ("tls", "trusted_proxy"):
        if getattr(shape, key) and settings.socket is not None:
            draft.problem((*where, key), f"{key} is for an address to listen on, and this is a unix socket", key=True)
    if shape.oidc is not None and shape.oidc.audience is None and shape.url is None:
        text = "missing key 'audience': what tokens for this gateway name, unless gateway.url says it"
        draft.problem((*where, "oidc"), text, key=True)
    if shape.oidc is not None and not any(agent.shape.oidc_client for agent in draft.agents.values()):
        text = "no agent has an oidc_client, so no token of the identity provider would be served"
        draft.problem((*where, "oidc"), text, key=True)
    if shape.trusted_proxy and not draft.agents:
        text = "whomever the proxy lets in would be your own agent: declare agents:, so that callers show who they are"
        draft.problem((*where, "trusted_proxy"), text, key=True)


def _person(name: str, shape: schema.PersonEntry) -> Person:
    return Person(
        name=name,
        roles=frozenset(shape.roles),
        os_user=shape.os_user,
        tenant=shape.tenant,
        oidc_subject=shape.oidc_subject,
        answer_key=shape.answer_key,
    )


def _agent(name: str, shape: schema.AgentEntry) -> AgentSpec:
    return AgentSpec(
        name=name,
        tenant=shape.tenant,
        roles=frozenset(shape.roles),
        capabilities=tuple(shape.capabilities),
        resources=tuple(shape.resources),
        prompts=tuple(shape.prompts),
        environments=_patterns(shape.environments),
        quota=Rate(**shape.quota.model_dump()),
        budget=_budget(shape.budget),
        person=shape.person,
        os_user=shape.os_user,
        oidc_client=shape.oidc_client,
        metrics=shape.metrics,
    )


def _budget(shape: schema.BudgetEntry | None) -> CostBudget | None:
    return None if shape is None else CostBudget(shape.units, shape.seconds)


def _server(draft: Draft, name: str, shape: schema.ServerEntry) -> ServerSpec:
    cwd = None
    if shape.command is not None:
        cwd = str(paths.resolve(shape.cwd or "", draft.base))
    return ServerSpec(
        name=name,
        command=tuple(shape.command or ()),
        url=shape.address,
        env=dict(shape.env),
        cwd=cwd,
        resources=tuple(shape.resources),
        prompts=tuple(shape.prompts),
        labels=tuple(shape.labels),
        sampling=shape.sampling,
        elicitation=shape.elicitation,
        pins=shape.pins,
        start_timeout_seconds=shape.start_timeout_seconds,
        secrets=tuple(shape.secrets),
        placement=shape.placement,
        mounts=tuple(_mounts(draft, shape.mounts)),
        volumes=tuple(ServerVolume(each.name, posixpath.normpath(each.at)) for each in shape.volumes),
        network=shape.network,
        limits=checks.server_limits(shape.limits),
    )


def _api(draft: Draft, server: ServerSpec, shape: schema.ServerEntry) -> ServerSpec:
    """The server with its OpenAPI document: a file, or what was fetched of a URL and accepted."""
    if shape.openapi is None:
        return server
    if shape.openapi.startswith(("http://", "https://")):
        return replace(
            server, openapi=str(kept_document(_gateway(draft).state, server.name)), openapi_url=shape.openapi
        )
    pins = shape.pins if "pins" in shape.model_fields_set else "first_use"  # the file is the operator's own
    return replace(server, openapi=str(paths.resolve(shape.openapi, draft.base)), pins=pins)


def kept_document(state: Path, server: str) -> Path:
    """Where a document lies that was fetched."""
    return state / "openapi" / f"{server}.json"


def _drafted(draft: Draft, servers: Mapping[str, ServerSpec], written: Mapping[str, Contract]) -> dict[str, Contract]:
    """A contract for each operation of an HTTP API that none was written for: GET and HEAD read, all others write."""
    out: dict[str, Contract] = {}
    described = {name: spec for name, spec in servers.items() if spec.openapi is not None}
    if described:
        from ringfence.upstream.openapi import document  # noqa: PLC0415 - most configurations have no HTTP API
    for name, spec in described.items():
        assert spec.openapi is not None
        where = (*draft.servers[name].where, "openapi")
        try:
            found = document.read(document.read_file(Path(spec.openapi)))
        except FileNotFoundError:
            if spec.openapi_url is None:
                draft.problem(where, f"there is no file {spec.openapi}")
            else:
                text = f"{spec.openapi_url} was not fetched yet: `ringfence check --accept` fetches it, and shows it"
                draft.warn(where, text, key=False)
            continue
        except (OSError, document.BadDocument) as exc:
            draft.problem(where, f"{spec.openapi} cannot be used: {exc}")
            continue
        meant = {contract.tool for contract in written.values() if contract.server == name}
        for operation in found.operations:
            if operation.name in meant:
                continue
            taken = operation.name in written or operation.name in out or operation.name in declarable_tools()
            called = f"{name}_{operation.name}" if taken else operation.name
            if called in written or called in out:
                draft.warn(where, f"{operation.name} is left out: its name is taken; write a capability for it")
                continue
            given = {"transport": "direct", "server": name, "tool": operation.name, "secrets": list(spec.secrets)}
            out[called], _ = contract.build(called, {**given, "mode": "read" if operation.reads else "write"})
        if found.left_out:
            first = f"{found.left_out[0][0]}: {found.left_out[0][1]}"
            draft.warn(where, f"{len(found.left_out)} of its operations cannot be called; the first is {first}")
    return out


def _requests(contracts: Mapping[str, Contract]) -> dict[str, ServerSpec]:
    """Requests that capabilities declare have no server; what answers them is named after the capability."""
    return {
        each.server: ServerSpec(each.server, url=base_of(each.request), direct=each.request, pins="first_use")
        for each in contracts.values()
        if each.request is not None and each.server is not None
    }


def _packaged(server: ServerSpec, shape: schema.PackagesSection | None, state: Path) -> ServerSpec:
    """The server with its packages in sight. They lie in our own state, which no mount can name."""
    if shape is None:
        return server
    folder = str(folder_of(state, shape.tree))
    spec = PackageSpec(shape.kind, tuple(shape.names), shape.tree, folder)
    if spec.kind == "image":  # which is the root of its box
        return replace(server, packages=spec)
    return replace(server, packages=spec, mounts=(*server.mounts, Mount(folder, AT, "ro")))


def _networks(draft: Draft) -> dict[str, NetworkSpec]:
    networks = {name: _network(name, found.shape) for name, found in draft.networks.items()}
    sandbox = draft.sandbox.shape
    if sandbox.network_enabled:
        networks[SANDBOX_NETWORK] = NetworkSpec(SANDBOX_NETWORK, tuple(sandbox.allowed_egress_domains))
    return networks


def _network(name: str, shape: schema.NetworkEntry) -> NetworkSpec:
    return NetworkSpec(
        name,
        tuple(shape.allow),
        methods=_patterns(shape.methods),
        paths=_patterns(shape.paths),
        addresses=tuple(shape.addresses),
        max_bytes_out=shape.max_bytes_out,
        max_bytes_in=shape.max_bytes_in,
        per_minute=shape.per_minute,
        inspect=shape.inspect,
    )


def _secret(draft: Draft, name: str, shape: schema.SecretEntry) -> SecretSpec:
    options: dict[str, str | tuple[str, ...]] = {}
    for option in schema.SECRET_OPTIONS[shape.source]:
        value = cast("str | list[str]", getattr(shape, option))
        if shape.source == "file" and isinstance(value, str):
            value = str(paths.resolve(value, draft.base))
        options[option] = tuple(value) if isinstance(value, list) else value
    return SecretSpec(
        name,
        shape.source,
        options,
        hosts=tuple(shape.hosts),
        header=shape.header or ("Authorization" if shape.hosts else None),
        format=shape.format,
        methods=tuple(shape.methods),
        env=shape.env,
        lifetime_seconds=shape.lifetime_seconds,
        tenants=_patterns(shape.tenants),
        environments=_patterns(shape.environments),
        capabilities=_patterns(shape.capabilities),
        servers=_patterns(shape.servers),
        agents=_patterns(shape.agents),
    )


def _patterns(given: list[str] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


def _place(draft: Draft, secret: Shaped[schema.SecretEntry]) -> tuple[str, int, int]:
    place = draft.source.place(secret.where, key=True)
    return draft.source.file, place.line, place.column


def _vault(draft: Draft) -> VaultSpec | None:
    shape = draft.vault.shape
    if shape.address is None:
        return None
    file = None if shape.token_file is None else str(paths.resolve(shape.token_file, draft.base))
    return VaultSpec(shape.address, shape.token_env, file, shape.namespace, tuple(shape.addresses))


def _approval(name: str, shape: schema.ApprovalEntry) -> ApprovalRule:
    return ApprovalRule(
        name=name,
        when=shape.when,
        roles=tuple(shape.roles),
        expires_seconds=shape.expires_seconds,
        self_approval=shape.own,
        people=shape.people,
        needs_reason=shape.reason == "required",
        escalation=None
        if shape.escalate is None
        else Escalation(shape.escalate.after_seconds, tuple(shape.escalate.roles)),
        in_client=shape.in_client,
        standing=None if shape.standing is None else StandingTerms(shape.standing.times, shape.standing.seconds),
    )


def _hook(draft: Draft, name: str, shape: schema.HookEntry) -> HookSpec:
    python = shape.python
    if python is not None and (file := python.rpartition(":")[0]).endswith(".py"):
        python = f"{paths.resolve(file, draft.base)}:{python.rpartition(':')[2]}"
    return HookSpec(
        name=name,
        python=python,
        command=tuple(shape.command or ()),
        url=shape.url,
        secret=shape.secret,
        mounts=tuple(_mounts(draft, shape.mounts)),
        network=shape.network,
        addresses=tuple(shape.addresses),
        timeout_seconds=shape.timeout_seconds,
        tells=shape.tells,
        tenants=_patterns(shape.tenants),
    )


def _image(name: str | None, base: Path) -> str | None:
    """A path is told from a name of a registry by how it begins."""
    return str(paths.resolve(name, base)) if name is not None and name.startswith(("/", "./", "../")) else name


def _sandbox(shape: schema.SandboxSection, base: Path) -> SandboxSettings:
    return SandboxSettings(
        backend=shape.backend,
        max_start_ms=shape.max_start_ms,
        default_timeout_seconds=shape.default_timeout_seconds,
        max_cpu_cores=shape.max_cpu_cores,
        max_memory_mb=shape.max_memory_mb,
        max_disk_mb=shape.max_disk_mb,
        max_processes=shape.max_processes,
        max_output_mb=shape.max_output_mb,
        capture_bytes=shape.capture_bytes,
        accept_missing=tuple(shape.accept_missing),
        templates={name: tuple(template.packages) for name, template in shape.templates.items()},
        setups={
            name: SetUp(
                template.setup,
                template.env,
                {inside: str(paths.resolve(host, base)) for inside, host in template.files.items()},
            )
            for name, template in shape.templates.items()
        },
        installs={name: tuple(each.install) for name, each in shape.templates.items() if each.install},
        packages=shape.require_packages,
        allow_packages=tuple(shape.allow_packages),
        install_inside=shape.install_inside,
        build_packages=shape.build_packages,
        docker_image=_image(shape.docker_image, base),
        docker_host=shape.docker_host,
        docker_runtime=shape.docker_runtime,
        docker_ready=shape.docker_ready,
        **{
            key: None if (named := getattr(shape, key)) is None else str(paths.resolve(named, base))
            for key in ("microvm_kernel", "firecracker_kernel_path", "firecracker_rootfs_path")
        },
        network_enabled=shape.network_enabled,
        max_sessions=shape.max_sessions,
        max_sessions_memory_mb=shape.max_sessions_memory_mb,
        max_sessions_cpu_cores=shape.max_sessions_cpu_cores,
        session_queue_seconds=shape.session_queue_seconds,
        session_lifetime_seconds=min(shape.session_lifetime_seconds, shape.max_session_lifetime_seconds),
        max_session_lifetime_seconds=shape.max_session_lifetime_seconds,
        session_idle_seconds=min(shape.session_idle_seconds, shape.max_session_idle_seconds),
        max_session_idle_seconds=shape.max_session_idle_seconds,
        session_retain_seconds=shape.session_retain_seconds,
        session_retain_mb=shape.session_retain_mb,
        session_paused_seconds=shape.session_paused_seconds,
        reclaim_after_seconds=shape.reclaim_after_seconds,
    )


# ── Policy: the rules and cases of the file and of the policy files that it names ─────────────────


@dataclass(frozen=True, slots=True)
class _Names:
    """What rules and cases may name."""

    approvals: Collection[str]
    servers: Collection[str]
    capabilities: Collection[str]
    rules: Collection[str] = ()
    """Those of a configuration that this file is read for."""


@dataclass(slots=True)
class _Rules:
    names: _Names
    elsewhere: list[Problem]
    """Problems of policy files."""
    rules: list[Rule] = field(default_factory=list)
    first: dict[str, Problem] = field(default_factory=dict)
    """Where each id was seen first."""
    cases: list[tuple[YamlSource, Where]] = field(default_factory=list)
    """Where cases stand. They are read when all rules are known."""
    sources: list[YamlSource] = field(default_factory=list)
    """The policy files."""


@dataclass(frozen=True, slots=True)
class _Policy:
    settings: PolicySettings
    places: dict[str, tuple[str, int, int]]
    cases: tuple[PolicyCase, ...]


def read_policy(draft: Draft) -> _Policy:
    """All rules, in order, and all cases; their problems go where the draft's do."""
    own = () if draft.sandbox.shape.max_sessions == 0 else declarable_tools()
    capabilities = [*draft.capabilities, *PROGRAMS, *(tool for tool in own if tool not in PROGRAMS)]
    found = _Rules(_Names([*draft.approvals, "always"], draft.servers, capabilities), draft.elsewhere)
    shape = draft.policy.shape
    where = draft.policy.where
    _take(found, draft.source, (*where, "rules"), len(shape.rules or ()))
    found.cases += [(draft.source, (*where, "cases", index)) for index in range(len(shape.cases or ()))]
    files = []
    for index, name in enumerate(shape.files):
        path = paths.resolve(name, draft.base)
        files.append(path)
        file = _shown(draft, name, path)
        text, problems = yaml.read_file(path, file)
        if text is not None:
            _take_file(found, yaml.parse(text, file))
        elif all(problem.line == 1 and problem.column == 1 for problem in problems):
            # What is not there has no lines; the place to change is where it was named.
            for problem in problems:
                draft.problem((*where, "files", index), f"{file} {problem.text}")
        else:
            draft.elsewhere.extend(problems)
    if shape.organisation is not None:
        path = paths.resolve(shape.organisation, draft.base)
        files.append(path)
        _take_organisation(found, draft, path, (*where, "organisation"))
    if paths.is_organised():
        files.append(paths.ORGANISATION)
        _take_organisation(found, draft, paths.ORGANISATION, None)
    settings = PolicySettings(shape.preset, shape.default, files=tuple(files), label_seconds=shape.label_seconds)
    return _read(found, settings)


def _read(found: _Rules, settings: PolicySettings) -> _Policy:
    told: dict[str, Problem] = {}
    cases = [_case(found, at, where, told) for at, where in found.cases]
    places = {name: (at.file, at.line, at.column) for name, at in found.first.items()}
    found.elsewhere += [problem for at in found.sources for problem in at.problems]
    return _Policy(replace(settings, rules=tuple(found.rules)), places, tuple(cases))


def is_policy_file(path: Path) -> bool:
    """Whether a file has rules or cases at its top, and is no configuration."""
    text, _ = yaml.read_file(paths.resolve(str(path), Path()), str(path))
    value = None if text is None else yaml.parse(text, str(path)).value
    known = set(keys_of(schema.PolicyFileTop))
    return isinstance(value, dict) and bool(known & value.keys()) and not value.keys() & set(schema.ENTRIES)


def with_policy_file(settings: Config, path: Path) -> Config:
    """The configuration with the rules of a policy file: one of an id that there is takes its place, others are added.
    The cases are those of the file alone. Raises ConfigError with every problem of the file."""
    absolute = paths.resolve(str(path), Path())
    text, problems = yaml.read_file(absolute, str(path))
    if text is None:
        raise ConfigError(problems)
    names = _Names(
        approvals=[*settings.approvals, "always"],
        servers=settings.servers,
        capabilities=[*settings.contracts, *declarable_tools()],
        rules=[rule.id for rule in settings.policy.rules],
    )
    found = _Rules(names, [])
    _take_file(found, yaml.parse(text, str(path)))
    read = _read(found, settings.policy)
    if found.elsewhere:
        raise ConfigError(sorted(set(found.elsewhere)))
    new = {rule.id: rule for rule in read.settings.rules}
    kept = [new.pop(rule.id, rule) for rule in settings.policy.rules]
    return sealed(
        replace(
            settings,
            policy=replace(settings.policy, rules=(*kept, *new.values())),
            rule_places={**settings.rule_places, **read.places},
            cases=read.cases,
        )
    )


def _shown(draft: Draft, name: str, path: Path) -> str:
    """The policy file's name as a person would type it from where they named the configuration."""
    if os.path.isabs(name) or name.startswith("~"):
        return str(path)
    return yaml.one_line(os.path.normpath(os.path.join(os.path.dirname(draft.source.file), name)))


def _take_file(found: _Rules, at: YamlSource) -> None:
    """The rules and cases of a policy file."""
    if at.value is None and not at.problems:
        at.value = {}
    if isinstance(at.value, dict):
        whole = shaped(schema.PolicyFileTop, at, ())
        _take(found, at, ("rules",), len(whole.shape.rules or ()))
        found.cases += [(at, ("cases", index)) for index in range(len(whole.shape.cases or ()))]
    elif not at.problems:
        at.problems.append(at.problem((), "a policy file is a mapping with rules: at its top"))
    found.sources.append(at)


def _take_organisation(found: _Rules, draft: Draft, path: Path, named: Where | None) -> None:
    """The rules of an organisation, which only restrict. One that cannot be read is a problem, never nothing."""
    text, problems = yaml.read_file(path, str(path))
    if text is None:
        if named is not None and all(problem.line == 1 and problem.column == 1 for problem in problems):
            for problem in problems:
                draft.problem(named, f"{path} {problem.text}")
        else:
            draft.elsewhere.extend(problems)
        return
    at = yaml.parse(text, str(path))
    if not isinstance(at.value, dict):
        at.problems.append(at.problem((), "an organisation's policy is a mapping with rules: or preset: at its top"))
        found.sources.append(at)
        return
    top = shaped(schema.OrganisationTop, at, ())
    count = len(top.shape.rules or ())
    before = len(found.rules)
    _take(found, at, ("rules",), count)
    ours = found.rules[before:]
    for index, rule in enumerate(ours):
        if rule.action is Action.ALLOW:
            text = "an organisation's rules only restrict: teams allow, each what it needs"
            at.problems.append(at.problem(("rules", index, "action"), text))
        elif rule.approval not in (None, "always"):
            text = "an organisation's rule asks by `always`: what another name means, each team says itself"
            at.problems.append(at.problem(("rules", index, "approval"), text))
    found.rules[before:] = [replace(rule, only_restricts=True) for rule in ours]
    if top.shape.preset is not None:
        known = {rule.id for rule in found.rules}
        found.rules += [rule for rule in policy.floor(top.shape.preset) if rule.id not in known]
    if top.shape.default == "deny" and draft.policy.shape.default != "deny":
        draft.problem((*draft.policy.where, "default"), f"{path} says default: deny, which no team loosens")
    found.sources.append(at)


def _take(found: _Rules, at: YamlSource, where: Where, count: int) -> None:
    for index in range(count):
        written = shaped(schema.RuleEntry, at, (*where, index))
        rule = _rule(written.shape)
        _check_id(found, at, written)
        for path, text, line, column in policy.rule_problems(rule):
            where_in = (*written.where, *path)
            if path == ("when",):
                at.problems.append(at.problem_inside(where_in, f"bad expression: {text}", line, column))
            elif path != ("approval",) or "action" not in written.broken:
                at.problems.append(at.problem(where_in, text))
        _check_names(found.names, at, written)
        found.rules.append(rule)


def _check_id(found: _Rules, at: YamlSource, written: Shaped[schema.RuleEntry]) -> None:
    if "id" in written.broken:
        return
    name = written.shape.id
    where = (*written.where, "id")
    owner = next((preset for preset, rules in policy.PRESETS.items() if any(rule.id == name for rule in rules)), None)
    if owner is not None:
        at.problems.append(at.problem(where, f"the rule id {name!r} belongs to preset {owner!r}: choose another"))
    if name in found.first:
        first = found.first[name]
        text = f"duplicate rule id {name!r} (first at {first.file}:{first.line}:{first.column})"
        at.problems.append(at.problem(where, text))
    else:
        found.first[name] = at.problem(where, "")


def _check_names(names: _Names, at: YamlSource, written: Shaped[schema.RuleEntry]) -> None:
    shape = written.shape
    where = written.where
    if shape.approval is not None and shape.approval not in names.approvals:
        text = f"no approval named {shape.approval!r}{did_you_mean(shape.approval, names.approvals)}"
        at.problems.append(at.problem((*where, "approval"), text))
    for index, name in enumerate(shape.servers):
        if not set("*?[") & set(name) and name not in names.servers:
            text = f"no server named {name!r}{did_you_mean(name, names.servers)}"
            at.problems.append(at.problem((*where, "servers", index), text))


def _rule(shape: schema.RuleEntry) -> Rule:
    return Rule(
        id=shape.id,
        action=Action(shape.action),
        name=shape.name,
        description=shape.description,
        priority=shape.priority,
        tool_patterns=tuple(shape.tool_patterns),
        argument_patterns=dict(shape.argument_patterns),
        when=shape.when,
        agents=tuple(shape.agents),
        servers=tuple(shape.servers),
        environments=tuple(shape.environments),
        approval=shape.approval,
        owasp_asi_id=shape.owasp_asi_id,
        normalize=shape.normalize,
        enabled=shape.enabled,
        mode=shape.mode,
        taint_labels=tuple(shape.taint_labels),
        conditions=dict(shape.conditions),
    )


_KINDS: tuple[CallKind, ...] = ("tool", "resource", "prompt")


def _case(found: _Rules, at: YamlSource, where: Where, told: dict[str, Problem]) -> PolicyCase:
    """One case. `told` has the names of those before it."""
    written = shaped(schema.CaseEntry, at, where)
    shape = written.shape

    def problem(path: Where, text: str, *, key: bool = False) -> None:
        at.problems.append(at.problem((*where, *path), text, key=key))

    if "name" not in written.broken:
        if shape.name in told:
            first = told[shape.name]
            problem(("name",), f"duplicate case {shape.name!r} (first at {first.file}:{first.line}:{first.column})")
        told.setdefault(shape.name, at.problem((*where, "name"), ""))
    named = [kind for kind in _KINDS if kind in written.broken or getattr(shape, kind) is not None]
    if not named and "expect" not in written.broken:
        problem((), "missing key 'tool': what is called? (or resource, or prompt)")
    for kind in named[1:]:
        problem((kind,), f"a case is one call: {named[0]} or {kind}", key=True)
    kind = named[0] if named else "tool"
    if not written.broken & {"tool", "resource", "prompt", "mode", "server"}:
        _check_called(found.names, shape, kind, problem)
    known = [*found.first, *found.names.rules, *(rule.id for rules in policy.PRESETS.values() for rule in rules)]
    for key in ("rules", "not_rules"):
        for index, name in enumerate(getattr(shape, key) or ()):
            if name not in known:
                problem((key, index), f"no rule has the id {name!r}{did_you_mean(name, known)}")
    if shape.approval is not None and shape.approval not in found.names.approvals:
        text = f"no approval named {shape.approval!r}{did_you_mean(shape.approval, found.names.approvals)}"
        problem(("approval",), text)
    place = at.place(where)
    called = getattr(shape, kind) or "_"
    arguments = {"uri": called} if kind == "resource" else shape.args
    server = shape.server
    if kind != "tool" and server is None and len(found.names.servers) == 1:
        server = next(iter(found.names.servers))
    return PolicyCase(
        name=shape.name,
        place=(at.file, place.line, place.column),
        tool=called,
        expect="+".join(sorted(shape.expect)),
        kind=kind,
        server=server,
        arguments={"name": called, "arguments": arguments} if kind == "prompt" else arguments,
        meta=shape.call_meta,
        agent=shape.agent,
        roles=tuple(shape.roles),
        person=shape.person,
        environment=shape.environment,
        labels=None if shape.labels is None else tuple(shape.labels),
        taint=tuple(shape.taint),
        mode=None if shape.mode is None else Mode(shape.mode),
        rules=None if shape.rules is None else tuple(shape.rules),
        not_rules=tuple(shape.not_rules),
        approval=shape.approval,
        would=None if shape.would is None else "+".join(sorted(shape.would)),
    )


def _check_called(names: _Names, shape: schema.CaseEntry, kind: CallKind, problem: Callable[..., None]) -> None:
    """What a case calls has to be there, or to be described."""
    if kind != "tool":
        if shape.mode is not None:
            problem(("mode",), f"a {kind} has the mode read", key=True)
        if kind == "resource" and shape.args:
            problem(("args",), "a resource has no arguments but its URI", key=True)
        if shape.server is None and len(names.servers) != 1:
            problem((kind,), f"whose {kind} is it? Name its server with server:", key=True)
        elif shape.server is not None and shape.server not in names.servers:
            problem(("server",), f"no server named {shape.server!r}{did_you_mean(shape.server, names.servers)}")
        return
    if shape.tool is None:
        return
    if shape.tool in names.capabilities:
        for key in ("mode", "server"):
            if getattr(shape, key) is not None:
                problem((key,), f"{shape.tool!r} has a contract, which says that: leave it out", key=True)
    elif shape.mode is None:
        hint = did_you_mean(shape.tool, names.capabilities) or "; of a tool without a contract, say its mode:"
        problem(("tool",), f"no capability named {shape.tool!r}{hint}")
