"""From a file to a Config, or to the list of everything that is wrong with it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import cast

from ringfence.config import checks, paths, schema, validators, yaml
from ringfence.config.draft import Draft, Shaped, read_draft, shaped
from ringfence.config.settings import (
    SANDBOX_NETWORK,
    Config,
    GatewaySettings,
    PolicySettings,
    SandboxSettings,
    TlsFiles,
    exposed,
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
    Contract,
    Issuer,
    NetworkSpec,
    PackageSpec,
    Person,
    Rate,
    Rule,
    SecretSpec,
    ServerSpec,
    ServerVolume,
    VaultSpec,
)
from ringfence.core.record import dataclass
from ringfence.governance import contract, policy
from ringfence.packages.cache import AT, folder_of
from ringfence.sandbox.tools.toolkit import box_makers

_LOOPBACK = schema.GatewaySection().listen
"""Where the gateway is where the command line wants it at an address, and the file at a socket."""


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError with every problem at once, sorted by place."""
    absolute = paths.resolve(str(path), Path())
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
    policy = read_policy(draft)
    contracts = {name: _contract(draft, name, found) for name, found in draft.capabilities.items()}
    problems = sorted({*read.problems, *draft.elsewhere})
    if problems:
        raise ConfigError(problems)
    config = Config(
        path=path,
        environment=draft.file.shape.environment,
        gateway=_gateway(draft),
        people={name: _person(name, found.shape) for name, found in draft.people.items()},
        servers={
            name: _packaged(_server(draft, name, found.shape), found.shape.packages, _gateway(draft).state)
            for name, found in draft.servers.items()
        },
        contracts=contracts,
        networks=_networks(draft),
        secrets={name: _secret(draft, name, found.shape) for name, found in draft.secrets.items()},
        vault=_vault(draft),
        places={name: _place(draft, found) for name, found in draft.secrets.items()},
        approvals={name: _approval(name, found.shape) for name, found in draft.approvals.items()},
        policy=policy,
        sandbox=_sandbox(draft.sandbox.shape, draft.base),
        agents={name: _agent(name, found.shape) for name, found in draft.agents.items()},
        warnings=tuple(sorted(draft.warnings)),
        files=(*files, *policy.files),
    )
    return sealed(config)


def _contract(draft: Draft, name: str, capability: Shaped[schema.CapabilityEntry]) -> Contract:
    given = dict(capability.given)
    # Where several servers are declared, which of them has the tool is known only when they have been asked.
    if capability.shape.transport == "mcp" and "server" not in given and len(draft.servers) == 1:
        given["server"] = next(iter(draft.servers))
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
    )


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
    if settings.socket is None and (problem := exposed(settings.host, settings, agents=bool(draft.agents))) is not None:
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
        person=shape.person,
        os_user=shape.os_user,
        oidc_client=shape.oidc_client,
    )


def _server(draft: Draft, name: str, shape: schema.ServerEntry) -> ServerSpec:
    cwd = None
    if shape.command is not None:
        cwd = str(paths.resolve(shape.cwd or "", draft.base))
    return ServerSpec(
        name=name,
        command=tuple(shape.command or ()),
        url=shape.url,
        env=dict(shape.env),
        cwd=cwd,
        resources=tuple(shape.resources),
        prompts=tuple(shape.prompts),
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
    )


def _sandbox(shape: schema.SandboxSection, base: Path) -> SandboxSettings:
    return SandboxSettings(
        backend=shape.backend,
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


# ── Policy: the rules of the file and of the policy files that it names ───────────────────────────


@dataclass(slots=True)
class _Rules:
    draft: Draft
    rules: list[Rule] = field(default_factory=list)
    first: dict[str, Problem] = field(default_factory=dict)
    """Where each id was seen first."""


def read_policy(draft: Draft) -> PolicySettings:
    """All rules, in order; their problems go where the draft's do."""
    found = _Rules(draft)
    shape = draft.policy.shape
    _take(found, draft.source, (*draft.policy.where, "rules"), len(shape.rules or ()))
    files = []
    for index, name in enumerate(shape.files):
        path = paths.resolve(name, draft.base)
        files.append(path)
        _take_file(found, path, _shown(draft, name, path), (*draft.policy.where, "files", index))
    return PolicySettings(shape.preset, shape.default, tuple(found.rules), tuple(files))


def _shown(draft: Draft, name: str, path: Path) -> str:
    """The policy file's name as a person would type it from where they named the configuration."""
    if os.path.isabs(name) or name.startswith("~"):
        return str(path)
    return yaml.one_line(os.path.normpath(os.path.join(os.path.dirname(draft.source.file), name)))


def _take_file(found: _Rules, path: Path, file: str, named_at: Where) -> None:
    text, problems = yaml.read_file(path, file)
    if text is None:
        # What is not there has no lines; the place to change is where it was named.
        unreadable = all(problem.line == 1 and problem.column == 1 for problem in problems)
        if unreadable:
            for problem in problems:
                found.draft.problem(named_at, f"{file} {problem.text}")
        else:
            found.draft.elsewhere.extend(problems)
        return
    read_source = yaml.parse(text, file)
    if read_source.value is None and not read_source.problems:
        read_source.value = {}
    if isinstance(read_source.value, dict):
        whole = shaped(schema.PolicyFileTop, read_source, ())
        _take(found, read_source, ("rules",), len(whole.shape.rules or ()))
    elif not read_source.problems:
        read_source.problems.append(read_source.problem((), "a policy file is a mapping with rules: at its top"))
    found.draft.elsewhere.extend(read_source.problems)


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
        for key, text in checks.unbuilt_rule_keys(written.shape):
            at.problems.append(at.problem((*written.where, key), text, key=True))
        _check_names(found.draft, at, written)
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


def _check_names(draft: Draft, at: YamlSource, written: Shaped[schema.RuleEntry]) -> None:
    shape = written.shape
    where = written.where
    if shape.approval is not None and shape.approval not in (known := [*draft.approvals, "always"]):
        text = f"no approval named {shape.approval!r}{did_you_mean(shape.approval, known)}"
        at.problems.append(at.problem((*where, "approval"), text))
    for index, name in enumerate(shape.servers):
        if not set("*?[") & set(name) and name not in draft.servers:
            text = f"no server named {name!r}{did_you_mean(name, draft.servers)}"
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
    )
