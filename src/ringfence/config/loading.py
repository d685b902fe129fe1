"""From a file to a Config, or to the list of everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import cast

from ringfence import contract
from ringfence.box import Mount, SetUp
from ringfence.config import draft as drafts
from ringfence.config import names, narrowing, paths, placing, rules, schema, source, unbuilt, words
from ringfence.config.draft import Draft
from ringfence.config.packaged import check as check_images
from ringfence.config.packaged import packaged
from ringfence.config.packaged import warn as warn_of_fetching
from ringfence.config.settings import SANDBOX_NETWORK, Config, GatewaySettings, SandboxSettings, sealed
from ringfence.config.shaping import Shaped
from ringfence.errors import ConfigError
from ringfence.model import ApprovalRule, Contract, NetworkSpec, Person, SecretSpec, ServerSpec, VaultSpec
from ringfence.sandbox.tools import BOX_MAKERS

_LOOPBACK = schema.Gateway().listen
"""Where the gateway is where the command line wants it at an address, and the file at a socket."""


def load(path: Path) -> Config:
    """Read a configuration file. Raises ConfigError with every problem at once, sorted by place."""
    absolute = paths.resolve(str(path), Path())
    text, problems = source.read_file(absolute, str(path))
    if text is None:
        raise ConfigError(problems)
    return _config(text, str(path), absolute, (absolute,))


def loads(text: str, *, file: str, base: Path) -> Config:
    """The same from text: `file` names it in problems, and its relative paths are relative to `base`."""
    return _config(text, file, paths.resolve(file, base), (), base=base)


def _config(text: str, file: str, path: Path, files: tuple[Path, ...], base: Path | None = None) -> Config:
    read = source.parse(text, file)
    if read.value is None and not read.problems:
        read.value = {}
    if not isinstance(read.value, dict):
        if not read.problems:
            found = source.kind(read.value)
            read.problems.append(read.problem((), f"a configuration is a mapping, this is {found}"))
        raise ConfigError(sorted(read.problems))
    draft = drafts.read(read, path.parent if base is None else paths.resolve("", base))
    names.check(draft)
    placing.check(draft)
    unbuilt.check(draft)
    check_images(draft)
    warn_of_fetching(draft)
    policy = rules.read(draft)
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
            name: packaged(_server(draft, name, found.shape), found.shape.packages, _gateway(draft).state)
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
        warnings=tuple(sorted(draft.warnings)),
        files=(*files, *policy.files),
    )
    return sealed(config)


def _contract(draft: Draft, name: str, capability: Shaped[schema.Capability]) -> Contract:
    given = dict(capability.given)
    # Where several servers are declared, which of them has the tool is known only when they have been asked.
    if capability.shape.transport == "mcp" and "server" not in given and len(draft.servers) == 1:
        given["server"] = next(iter(draft.servers))
    if capability.shape.transport == "sandboxed_exec":
        given.setdefault("timeout_seconds", draft.sandbox.shape.default_timeout_seconds)
        if draft.sandbox.shape.network_enabled and (given.get("tool") or name) in BOX_MAKERS:
            given.setdefault("network", SANDBOX_NETWORK)
    mounts = capability.shape.filesystem.mounts if capability.shape.filesystem is not None else []
    if mounts:
        given["filesystem"] = {"mounts": [asdict(mount) for mount in _mounts(draft, mounts)]}
    named = draft.servers.get(given.get("server", ""))
    given |= narrowing.inherited(capability, named)
    if named is not None and named.shape.placement == "session" and capability.shape.transport == "mcp":
        given["result"] = {**(given.get("result") or {}), "trust": "untrusted"}  # it is the agent's own word
    built, problems = contract.build(name, given)
    for where, text in problems:
        # A condition was told by names, at its exact place. And where keys did not fit, those that contradict each
        # other may only seem to; a pattern is bad by itself.
        if where != ("idempotent", "key") and (not capability.broken or where[0] == "redact"):
            draft.problem((*capability.where, *where), text)
    return built


def _mounts(draft: Draft, shapes: list[schema.Mount]) -> Iterator[Mount]:
    for shape in shapes:
        with suppress(ValueError):  # told by placing
            yield placing.mount(draft, shape)


def _gateway(draft: Draft) -> GatewaySettings:
    shape = draft.gateway.shape
    socket = placing.socket(draft)
    host, port = words.listen_address(shape.listen if socket is None else _LOOPBACK)
    state = paths.state_folder() if shape.state is None else paths.resolve(shape.state, draft.base)
    kept = None if shape.retention is None else words.retention_seconds(shape.retention)
    return GatewaySettings(host, port, state, shape.approval_wait_seconds, shape.code_mode, socket, kept)


def _person(name: str, shape: schema.Person) -> Person:
    return Person(name=name, roles=frozenset(shape.roles), os_user=shape.os_user)


def _server(draft: Draft, name: str, shape: schema.Server) -> ServerSpec:
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
        network=shape.network,
        limits=placing.limits(shape.limits),
        listens=shape.listen == "allowed",
    )


def _networks(draft: Draft) -> dict[str, NetworkSpec]:
    networks = {name: _network(name, found.shape) for name, found in draft.networks.items()}
    sandbox = draft.sandbox.shape
    if sandbox.network_enabled:
        networks[SANDBOX_NETWORK] = NetworkSpec(SANDBOX_NETWORK, tuple(sandbox.allowed_egress_domains))
    return networks


def _network(name: str, shape: schema.Network) -> NetworkSpec:
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


def _secret(draft: Draft, name: str, shape: schema.Secret) -> SecretSpec:
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


def _place(draft: Draft, secret: Shaped[schema.Secret]) -> tuple[str, int, int]:
    place = draft.source.place(secret.where, key=True)
    return draft.source.file, place.line, place.column


def _vault(draft: Draft) -> VaultSpec | None:
    shape = draft.vault.shape
    if shape.address is None:
        return None
    file = None if shape.token_file is None else str(paths.resolve(shape.token_file, draft.base))
    return VaultSpec(shape.address, shape.token_env, file, shape.namespace, tuple(shape.addresses))


def _approval(name: str, shape: schema.Approval) -> ApprovalRule:
    return ApprovalRule(
        name=name,
        when=shape.when,
        roles=tuple(shape.roles),
        expires_seconds=shape.expires_seconds,
        self_approval=shape.own,
        people=shape.people,
    )


def _sandbox(shape: schema.Sandbox, base: Path) -> SandboxSettings:
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
    )
