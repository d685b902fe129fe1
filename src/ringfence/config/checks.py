"""What the file means as a whole: names that must be defined, keys that contradict each other, placements that cannot
be, and what this version does not do yet.

Each check reports every problem that it finds, at the place of the key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringfence.config import schema, validators
from ringfence.config.draft import Draft, Shaped
from ringfence.config.folders import declared, real_path
from ringfence.config.paths import resolve
from ringfence.config.settings import SANDBOX_NETWORK, GatewaySettings
from ringfence.config.validators import did_you_mean, is_loopback
from ringfence.config.yaml import Where
from ringfence.core import invisible, system
from ringfence.core.box import BACKENDS, CAN_DO_WITHOUT, MIB, NOT_BUILT, TEMPLATES, Mount, within
from ringfence.core.expression import Expression, ExpressionError
from ringfence.core.model import DirectRequest, NetworkSpec
from ringfence.core.schema import Schema, Unusable
from ringfence.egress.names import url as url_parts
from ringfence.egress.rules import pattern
from ringfence.governance.dispatch import network_allows
from ringfence.packages.allowlist import AllowedPackage
from ringfence.packages.images.references import Reference
from ringfence.sandbox.tools.run import RUN_SHELL
from ringfence.sandbox.tools.toolkit import PROGRAMS, box_makers, declarable_tools
from ringfence.upstream.openapi import template

_SECRET_VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
"""Names of variables that nearly always hold a secret: a warning must be worth reading."""
_SECRET_VALUE = re.compile(
    r"gh[pousr]_[A-Za-z0-9]{20}|github_pat_|glpat-|sk-[A-Za-z0-9_-]{16}|xox[abprs]-|(AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_NOT_HEADERS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive"}
    | {"proxy-authorization", "proxy-connection"}
)


def check(draft: Draft) -> None:
    """Everything except the rules of policy, which are checked as they are read."""
    check_names(draft)
    check_placement(draft)
    check_unbuilt(draft)
    check_images(draft)
    warn_of_fetching(draft)


# ── Names and contradictions ──────────────────────────────────────────────────────────────────────


def check_names(draft: Draft) -> None:
    _people(draft)
    _agents(draft)
    known: dict[str, str] = {}
    for name, server in draft.servers.items():
        _server(draft, name, server)
        like = known.setdefault(invisible.alike(name), name)
        if like != name:
            text = f"server {name!r} looks like server {like!r}: people and models tell servers apart by their names"
            draft.warn(server.where, text)
    for capability in draft.capabilities.values():
        _capability(draft, capability)
    for secret in draft.secrets.values():
        _secret(draft, secret)
    if draft.vault.given and draft.vault.shape.address is None and "address" not in draft.vault.broken:
        draft.problem(draft.vault.where, "missing key 'address'", key=True)
    for approval in draft.approvals.values():
        _approval(draft, approval)
    for hook in draft.hooks.values():
        _hook(draft, hook)
    _sandbox(draft)


def expect(draft: Draft, where: Where, what: str, known: Collection[str]) -> None:
    """The name at `where`, the last step of which is the name itself, must be one of `known`."""
    name = str(where[-1])
    if name not in known:
        draft.problem(where, f"no {what} named {name!r}{did_you_mean(name, known)}")


def condition(draft: Draft, where: Where, text: str, *, result: str = "bool") -> None:
    """A condition must compile."""
    try:
        Expression(text, result=result)
    except ExpressionError as exc:
        draft.source.problems.append(
            draft.source.problem_inside(where, f"bad expression: {exc.text}", exc.line - 1, exc.column - 1)
        )


def _people(draft: Draft) -> None:
    accounts: dict[str, str] = {}
    subjects: dict[str, str] = {}
    keys: dict[str, str] = {}
    for name, person in draft.people.items():
        account = person.shape.os_user
        subject = person.shape.oidc_subject
        key = person.shape.answer_key
        if key is not None and keys.setdefault(key, name) != name:
            draft.problem((*person.where, "answer_key"), f"it is the key of {keys[key]!r} already")
        if subject is not None and subjects.setdefault(subject, name) != name:
            draft.problem((*person.where, "oidc_subject"), f"{subject!r} is {subjects[subject]!r} already")
        if account is None:
            continue
        if account in accounts:
            # One account answering as two people would make two approvals of one.
            draft.problem((*person.where, "os_user"), f"{account!r} is {accounts[account]!r} already")
        accounts.setdefault(account, name)


def _agents(draft: Draft) -> None:
    accounts: dict[str, str] = {}
    likes: dict[str, str] = {}
    clients: dict[tuple[str, str | None], str] = {}
    for name, agent in draft.agents.items():
        shape = agent.shape
        where = agent.where
        like = likes.setdefault(invisible.alike(name), name)
        if like != name:
            text = f"agent {name!r} looks like agent {like!r}: people tell agents apart by their names"
            draft.warn(where, text)
        if shape.person is not None:
            expect(draft, (*where, "person", shape.person), "person", draft.people)
            person = draft.people.get(shape.person)
            if person is not None and person.shape.tenant != shape.tenant:
                text = f"{shape.person!r} is of tenant {person.shape.tenant!r}, and the agent of {shape.tenant!r}"
                draft.problem((*where, "person"), f"{text}: an agent cannot act for a person of another tenant")
        if shape.os_user is not None:
            if shape.os_user in accounts:
                text = f"{shape.os_user!r} is {accounts[shape.os_user]!r} already: one account is one agent"
                draft.problem((*where, "os_user"), text)
            accounts.setdefault(shape.os_user, name)
        if shape.oidc_client is not None:
            _oidc_client(draft, agent, clients)
        if shape.quota.burst is not None and shape.quota.per_minute is None:
            draft.problem((*where, "quota", "burst"), "a burst needs per_minute")
        _agent_patterns(draft, agent)


def _oidc_client(draft: Draft, agent: Shaped[schema.AgentEntry], clients: dict[tuple[str, str | None], str]) -> None:
    """A client of the identity provider is one agent for each user that it acts for."""
    shape = agent.shape
    where = (*agent.where, "oidc_client")
    if draft.gateway.shape.oidc is None and "oidc" not in draft.gateway.broken:
        draft.problem(where, "which identity provider? Write gateway: {oidc: {issuer: …}}", key=True)
    person = draft.people.get(shape.person or "")
    if person is not None and person.shape.oidc_subject is None and not person.broken:
        text = f"person {shape.person!r} has no oidc_subject, so no token is for them"
        draft.problem((*agent.where, "person"), text)
    first = clients.setdefault((shape.oidc_client or "", shape.person), str(agent.where[-1]))
    if first != agent.where[-1]:
        draft.problem(where, f"{shape.oidc_client!r} for the same person is {first!r} already")


def _agent_patterns(draft: Draft, agent: Shaped[schema.AgentEntry]) -> None:
    """What an agent names, and does not exist, and what leaves it with nothing to call."""
    shape = agent.shape
    known = [*draft.capabilities, *declarable_tools()]
    for index, named in enumerate(shape.capabilities):
        if not any(fnmatchcase(each, named) for each in known):
            hint = did_you_mean(named, known)
            draft.warn((*agent.where, "capabilities", index), f"no capability is named so{hint}", key=False)
    if not (shape.capabilities or shape.resources or shape.prompts or agent.broken):
        text = f"agent {agent.where[-1]!r} may call nothing: write capabilities: [NAME, …], or ['*'] for all"
        draft.warn(agent.where, text)


def _server(draft: Draft, name: str, server: Shaped[schema.ServerEntry]) -> None:
    shape = server.shape
    where = server.where
    ways = [way for way in ("command", "url", "openapi") if way in server.broken or getattr(shape, way) is not None]
    if not ways:
        draft.problem(where, f"server {name!r} has neither command nor url nor openapi", key=True)
    for way in ways[1:]:
        draft.problem((*where, way), f"server {name!r} has both {ways[0]} and {way}: keep one of them", key=True)
    if shape.base_url is not None and "openapi" not in ways:
        draft.problem((*where, "base_url"), "belongs to openapi", key=True)
    if shape.openapi is not None and "base_url" not in server.broken:
        if shape.base_url is None:
            text = "missing key 'base_url': where requests go; the document's own servers are not used"
            draft.problem(where, text, key=True)
        elif "?" in shape.base_url or "#" in shape.base_url:
            draft.problem((*where, "base_url"), "a base URL has neither query nor fragment")
    for own in ("env", "cwd"):
        if getattr(shape, own) and "command" not in ways:
            draft.problem((*where, own), f"{own} is for a server that is started by a command", key=True)
    if shape.network != "denied":
        expect(draft, (*where, "network", shape.network), "network", draft.networks)
    _secret_names(draft, where, shape.secrets)
    if "command" in ways:
        _box_secrets(draft, where, shape.secrets, shape.network)
    for variable, value in shape.env.items():
        named = _SECRET_VARIABLE.search(variable) and len(value) >= 8 and not value.startswith(("/", "./", "~"))
        if named or _SECRET_VALUE.search(value):
            draft.warn(
                (*where, "env", variable),
                f"{variable} looks like a secret: every reader of this file has it, and so does server {name!r}",
            )


def _hook(draft: Draft, hook: Shaped[schema.HookEntry]) -> None:
    shape = hook.shape
    where = hook.where
    ways = [way for way in ("python", "command", "url") if way in hook.broken or getattr(shape, way) is not None]
    if not ways:
        draft.problem(where, f"hook {where[-1]!r} has none of python, command and url: what is to be told?", key=True)
    for way in ways[1:]:
        draft.problem((*where, way), f"hook {where[-1]!r} has both {ways[0]} and {way}: keep one of them", key=True)
    for key, way in (("secret", "url"), ("addresses", "url"), ("mounts", "command"), ("network", "command")):
        if ways and way not in ways and key in hook.given:
            draft.problem((*where, key), f"{key} belongs to {way}", key=True)
    if shape.tells == "questions" and ways and "url" not in ways:
        draft.problem((*where, "tells"), f"questions are posted to a url, and handed to no {ways[0]}", key=True)
    if shape.tenants is not None and shape.tells != "questions":
        draft.problem((*where, "tenants"), "tenants belongs to tells: questions", key=True)
    if ways == ["url"] and shape.secret is None and "secret" not in hook.broken:
        text = "missing key 'secret': the name of what requests are signed with, under secrets:"
        draft.problem(where, text, key=True)
    if shape.secret is not None:
        expect(draft, (*where, "secret", shape.secret), "secret", draft.secrets)
    if shape.network != "denied":
        expect(draft, (*where, "network", shape.network), "network", draft.networks)
    if shape.python is not None and (file := shape.python.rpartition(":")[0]).endswith(".py"):
        path = resolve(file, draft.base)
        if not path.is_file():
            draft.problem((*where, "python"), f"there is no file {path}")


def _secret_names(draft: Draft, where: Where, names: list[str]) -> None:
    for index, name in enumerate(names):
        # One name stands by itself, several in a list: the place is found either way.
        expect(draft, (*where, "secrets", index, name), "secret", draft.secrets)


def _box_secrets(draft: Draft, where: Where, names: list[str], network: str) -> None:
    """What will be refused, since a secret has no way to where it is wanted."""
    refused = f"every call of {where[-1]!r} will be refused"
    what = f"server {where[-1]!r} will not start" if where[0] == "servers" else refused
    for index, name in enumerate(names):
        secret = draft.secrets.get(name)
        if secret is None or secret.broken:
            continue
        shape = secret.shape
        place = (*where, "secrets", index)
        if shape.hosts and network == "denied":
            text = f"secret {name!r} is for {', '.join(shape.hosts)}, and network is denied: name one that has it"
        elif not shape.hosts and where[0] == "capabilities":
            text = f"secret {name!r} names no hosts that it is for, and its value may not enter a box"
        elif not shape.hosts and shape.env is None:
            text = f"secret {name!r} has neither hosts nor env: in which variable is it expected?"
        else:
            continue
        draft.warn(place, f"{what}: {text}", key=False)


def _server_secrets(draft: Draft, where: Where, names: list[str], servers: list[Shaped[schema.ServerEntry]]) -> None:
    """The same for calls to servers: a remote one must be among the secret's hosts, any other be given it itself."""
    if len(servers) != 1 or servers[0].broken:
        return
    server = servers[0]
    for index, name in enumerate(names):
        secret = draft.secrets.get(name)
        if secret is None or secret.broken:
            continue
        if server.shape.address is None and name not in server.shape.secrets:
            text = f"server {server.where[-1]!r} is not given secret {name!r}: write it under its secrets, too"
        elif server.shape.address is not None and not _covers(secret.shape.hosts, server.shape.address):
            text = f"secret {name!r} is not for the host of {server.shape.address}: name it in its hosts"
        else:
            continue
        draft.warn((*where, "secrets", index), f"every call of {where[-1]!r} will be refused: {text}", key=False)


def _covers(hosts: list[str], url: str) -> bool:
    place = url_parts(url).endpoint
    return any(pattern(host).covers(place.host, place.port) for host in hosts)


def _capability(draft: Draft, capability: Shaped[schema.CapabilityEntry]) -> None:
    shape = capability.shape
    where = capability.where
    _direct(draft, capability)
    if shape.server is not None and shape.transport == "sandboxed_exec":
        draft.problem((*where, "server"), f"transport {shape.transport} has no server", key=True)
    elif shape.server is not None:
        expect(draft, (*where, "server", shape.server), "server", draft.servers)
    _box_capability(draft, capability)
    check_narrowing(draft, capability)
    if shape.network != "denied":
        expect(draft, (*where, "network", shape.network), "network", draft.networks)
    if shape.approval is not None:
        expect(draft, (*where, "approval", shape.approval), "approval", [*draft.approvals, "none", "always"])
    _secret_names(draft, where, shape.secrets)
    if shape.transport == "sandboxed_exec":
        _box_secrets(draft, where, shape.secrets, shape.network)
    elif shape.secrets:
        _server_secrets(draft, where, shape.secrets, draft.candidates(capability))
    for effect in ("compensate", "preview"):
        named = getattr(shape.effects, effect)
        if named is not None:
            expect(draft, (*where, "effects", effect, named), "capability", draft.capabilities)
    if isinstance(shape.idempotent, schema.IdempotentSection):
        condition(draft, (*where, "idempotent", "key"), shape.idempotent.key, result="text")


def _direct(draft: Draft, capability: Shaped[schema.CapabilityEntry]) -> None:
    """One HTTP request: declared here, or an operation of a server that an OpenAPI document describes."""
    shape = capability.shape
    where = capability.where
    named = draft.servers.get(shape.server or "")
    if shape.transport != "direct":
        for key in ("request", "input"):
            if key in capability.given:
                draft.problem((*where, key), f"{key} is for transport direct", key=True)
        if named is not None and named.shape.openapi is not None and capability.given.get("transport") == "mcp":
            text = f"server {shape.server!r} is an HTTP API, which speaks no MCP: write transport: direct"
            draft.problem((*where, "transport"), text)
    elif shape.request is not None:
        _request(draft, capability, shape.request)
    elif not {"request", "server"} & set(capability.broken):
        _operation(draft, capability, named)


def _operation(
    draft: Draft, capability: Shaped[schema.CapabilityEntry], server: Shaped[schema.ServerEntry] | None
) -> None:
    shape = capability.shape
    where = capability.where
    if shape.input is not None:
        draft.problem((*where, "input"), "input belongs to request", key=True)
    if shape.server is None and not any(each.shape.openapi is not None for each in draft.servers.values()):
        text = "transport direct needs a request: {method, url}, or a server with openapi"
        draft.problem(where, text, key=True)
    if server is not None and server.shape.openapi is None and not server.broken:
        draft.problem((*where, "server"), f"server {shape.server!r} has no openapi: its transport is mcp")


def _request(draft: Draft, capability: Shaped[schema.CapabilityEntry], request: schema.RequestSection) -> None:
    shape = capability.shape
    where = capability.where
    for key in ("server", "tool"):
        if key in capability.given:
            draft.problem((*where, key), f"a capability with a request has no {key}", key=True)
    declared = direct_request(request, shape.input)
    if (found := template.problem(declared)) is not None:
        draft.problem((*where, "request"), found)
        return
    if shape.input is not None:
        try:
            Schema(shape.input)
        except Unusable as exc:
            draft.problem((*where, "input"), f"this schema cannot be used: {exc}")
    for index, name in enumerate(shape.secrets):
        secret = draft.secrets.get(name)
        if secret is not None and not secret.broken and not _covers(secret.shape.hosts, template.base_of(declared)):
            text = f"every call of {where[-1]!r} will be refused: secret {name!r} is not for its host: name it in hosts"
            draft.warn((*where, "secrets", index), text, key=False)


def direct_request(shape: schema.RequestSection, given: dict[str, Any] | None) -> DirectRequest:
    return DirectRequest(shape.method, shape.url, dict(shape.query), dict(shape.headers), shape.body, given)


def _box_capability(draft: Draft, capability: Shaped[schema.CapabilityEntry]) -> None:
    shape = capability.shape
    where = capability.where
    if shape.transport == "sandboxed_exec":
        tool = shape.tool or str(where[-1])
        if tool not in declarable_tools() and "tool" not in capability.broken:
            at, text = (("tool",), "") if shape.tool else ((), "; name one with tool:")
            known = f"a box has no tool {tool!r}, only {', '.join(PROGRAMS)} and those of sessions{text}"
            draft.problem((*where, *at), f"{known}{did_you_mean(tool, declarable_tools())}", key=not at)
        elif shape.network != "denied" and tool not in box_makers():
            text = (
                f"network is for what makes a box, {', '.join(box_makers())}; a session keeps what it was opened with"
            )
            draft.problem((*where, "network"), text, key=True)
        for key, tools in (("listen", box_makers()), ("commands", (RUN_SHELL,))):
            if tool not in tools and key in capability.given:
                draft.problem((*where, key), f"{key} is for {', '.join(tools)}, not for {tool}", key=True)
        if shape.commands is not None:
            _commands(draft, (*where, "commands"), shape.commands)
        if shape.template not in (known_templates := [*TEMPLATES, *draft.sandbox.shape.templates]):
            expect(draft, (*where, "template", shape.template), "template", known_templates)
        return
    for key in ("memory_layout", "template", "listen", "commands"):
        if key in capability.given:
            draft.problem((*where, key), f"{key} is for transport sandboxed_exec", key=True)


def _commands(draft: Draft, where: Where, commands: schema.CommandsSection) -> None:
    groups = {"allow": commands.allow or [], "ask": commands.ask, "deny": commands.deny}
    seen: dict[str, str] = {}
    # Only a host that can run boxes knows the programs in them; on any other, the file is meant for another host.
    has_boxes = system.no_boxes() is None
    if has_boxes:
        from ringfence.sandbox.process import named_programs  # noqa: PLC0415 - the file is also checked where no box can run
    for key, names in groups.items():
        for index, name in enumerate(names):
            place = (*where, key, index)
            if name in seen:
                draft.problem(place, f"{name!r} is under {seen[name]} already: one of them")
            elif name in ("sh", "/bin/sh", "/usr/bin/sh") and key != "allow":
                draft.problem(place, "every command is run by /bin/sh, so it is always there")
            elif has_boxes and not named_programs.exists(name):
                text = f"this host has no program {name!r} that boxes see{did_you_mean(name, named_programs.names())}"
                draft.warn(place, text)
            seen.setdefault(name, key)


def _sandbox(draft: Draft) -> None:
    where = draft.sandbox.where
    for index, name in enumerate(draft.sandbox.shape.accept_missing):
        if name not in CAN_DO_WITHOUT:
            known = f"{name!r} cannot be given up; only {', '.join(CAN_DO_WITHOUT)} can"
            draft.problem((*where, "accept_missing", index), f"{known}{did_you_mean(name, CAN_DO_WITHOUT)}")
    for kind in ("lifetime", "idle"):
        usual = f"session_{kind}_seconds"
        most = f"max_session_{kind}_seconds"
        shape = draft.sandbox.shape
        if usual in draft.sandbox.given and getattr(shape, usual) > getattr(shape, most):
            draft.problem((*where, usual), f"more than {most}, which is {getattr(shape, most):g}")
    _sandbox_network(draft)
    _sandbox_packages(draft)
    for name in draft.sandbox.shape.templates:
        if name in TEMPLATES:
            draft.problem((*where, "templates", name), f"the name {name!r} is taken: choose another", key=True)


def _sandbox_packages(draft: Draft) -> None:
    shape = draft.sandbox.shape
    where = draft.sandbox.where
    if not shape.install_inside:
        return
    if not shape.allow_packages and "allow_packages" not in draft.sandbox.broken:
        text = "install_inside without allow_packages would let in nothing: name what may be installed"
        draft.problem((*where, "install_inside"), text, key=True)
    lacking = {"pinned": "version", "hashed": "version and hash"}.get(shape.require_packages)
    for index, entry in enumerate(shape.allow_packages):
        if not AllowedPackage.of(entry).says(shape.require_packages):
            text = f"{entry!r} names no {lacking}, and require_packages asks for it: for install_inside, here"
            draft.problem((*where, "allow_packages", index), text)


def _sandbox_network(draft: Draft) -> None:
    shape = draft.sandbox.shape
    where = draft.sandbox.where
    named = shape.allowed_egress_domains or "allowed_egress_domains" in draft.sandbox.broken
    if shape.network_enabled and not named:
        text = "network_enabled without allowed_egress_domains would mean everywhere: name the hosts"
        draft.problem((*where, "network_enabled"), text, key=True)
    if shape.network_enabled and SANDBOX_NETWORK in draft.networks:
        text = f"the name {SANDBOX_NETWORK!r} is what network_enabled makes: choose another"
        draft.problem(draft.networks[SANDBOX_NETWORK].where, text, key=True)
    if shape.allowed_egress_domains and not shape.network_enabled:
        text = "allowed_egress_domains mean nothing without network_enabled: true"
        draft.warn((*where, "allowed_egress_domains"), text)


def _secret(draft: Draft, secret: Shaped[schema.SecretEntry]) -> None:
    if "from" in secret.broken:
        return
    needed = schema.SECRET_OPTIONS[secret.shape.source]
    for option in sorted({option for options in schema.SECRET_OPTIONS.values() for option in options}):
        given = option in secret.broken or getattr(secret.shape, option) is not None
        if option in needed and not given:
            draft.problem(secret.where, f"missing key {option!r}: a secret from {secret.shape.source} needs it")
        elif given and option not in needed:
            draft.problem(
                (*secret.where, option), f"{option!r} means nothing for a secret from {secret.shape.source}", key=True
            )
    if secret.shape.source == "vault" and not draft.vault.given:
        draft.problem((*secret.where, "from"), "which vault? Write vault: {address: …} at the top of the file")
    _secret_destination(draft, secret)


def _secret_destination(draft: Draft, secret: Shaped[schema.SecretEntry]) -> None:
    """A secret goes into a header of some hosts, or into a server's environment."""
    shape = secret.shape
    where = secret.where
    if "hosts" in secret.broken or "header" in secret.broken:
        return
    if shape.header is not None and not shape.hosts:
        draft.problem((*where, "header"), "a header without hosts: name those that may get it", key=True)
    if shape.header is not None and shape.header.lower() in _NOT_HEADERS:
        draft.problem((*where, "header"), f"{shape.header} belongs to the proxy itself")
    for key in ("format", "methods"):
        if key in secret.given and not shape.hosts:
            draft.problem((*where, key), f"{key} belongs to hosts", key=True)


def _approval(draft: Draft, approval: Shaped[schema.ApprovalEntry]) -> None:
    shape = approval.shape
    where = approval.where
    if shape.when is not None:
        condition(draft, (*where, "when"), shape.when)
    if shape.escalate is not None and not shape.roles:
        draft.problem((*where, "escalate"), "any person may answer already: name the roles that are asked first")
    if shape.in_client and not shape.own:
        draft.problem((*where, "in_client"), "the person at the client is the agent's own; this needs `self: true`")
    if shape.standing is not None and shape.people > 1:
        draft.problem((*where, "standing"), f"one person would approve what {shape.people} people must agree to")
    if not draft.people:
        if shape.people > 1:
            draft.problem((*where, "people"), f"needs {shape.people} people, and without people: there is one")
        return
    roles = set(shape.roles)
    able = [p for p in draft.people.values() if not roles or roles & set(p.shape.roles) or "roles" in p.broken]
    if len(able) < shape.people:
        having = f" with role {' or '.join(shape.roles)}" if roles else ""
        text = f"needs {shape.people} people{having}, and people: has {len(able)}"
        draft.problem((*where, "people" if "people" in approval.given else "roles"), text)
    if shape.escalate is not None:
        later = set(shape.escalate.roles)
        if not any(later & set(p.shape.roles) or "roles" in p.broken for p in draft.people.values()):
            text = f"no person under people: has role {' or '.join(shape.escalate.roles)}"
            draft.problem((*where, "escalate", "roles"), text)


# ── Contracts against the box of their server ─────────────────────────────────────────────────────
#
# A box is made for its server, not for one call: every call of the server has the network and secrets of its box. So a
# contract says the same, or leaves it out and inherits it; a contract that says less could not be kept.


def check_narrowing(draft: Draft, capability: Shaped[schema.CapabilityEntry]) -> None:
    """Problems where it is sure which box a call runs in; a warning where another server may turn out to have it."""
    servers = draft.candidates(capability)
    objections = [list(_objections(capability, server)) for server in servers]
    for key, text in dict(each for found in objections for each in found).items():
        sure = all(any(key == other for other, _ in found) for found in objections)
        where = (*capability.where, key) if key in capability.given else capability.where
        tell = draft.problem if sure else draft.warn
        tell(where, text if sure else f"name its server, or: {text}", key=key not in capability.given)


def inherited(capability: Shaped[schema.CapabilityEntry], server: Shaped[schema.ServerEntry] | None) -> dict[str, Any]:
    """What a contract has of its server's box, where it does not say so itself."""
    if server is None or not _runs_boxed(server) or capability.shape.transport != "mcp":
        return {}
    has = {"network": server.shape.network, "secrets": list(server.shape.secrets)}
    return {key: value for key, value in has.items() if value not in ("denied", []) and key not in capability.given}


def _objections(
    capability: Shaped[schema.CapabilityEntry], server: Shaped[schema.ServerEntry]
) -> Iterator[tuple[str, str]]:
    if not _runs_boxed(server) or server.broken or capability.broken:
        return
    name = server.where[-1]
    call = f"a call of {capability.where[-1]!r} runs in its box"
    given = capability.given
    shape = capability.shape
    has = server.shape
    strict = shape.mode == "high_risk"
    if has.network != "denied" and shape.network == "denied" and ("network" in given or strict):
        why = "" if "network" in given else ", and high_risk means none"
        yield (
            "network",
            f"server {name!r} has network {has.network!r}, and {call}{why}: write network: {has.network},"
            " or use a server that has none",
        )
    if has.secrets and not shape.secrets and ("secrets" in given or strict):
        why = "" if "secrets" in given else ", and high_risk means none"
        named = ", ".join(has.secrets)
        yield (
            "secrets",
            f"server {name!r} is given {named} for as long as it runs, and {call}{why}: write secrets: [{named}],"
            " or use a server that is given none",
        )


def _runs_boxed(server: Shaped[schema.ServerEntry]) -> bool:
    return server.shape.command is not None and server.shape.placement != "unsafe_host"


# ── Where servers run, and what they see of the host ──────────────────────────────────────────────


PLACES = ("own", "session", "remote", "unsafe_host")
"""What a placement may be beside the name of a box that several servers share."""
_LONGEST_SOCKET = 107
"""In bytes; the kernel takes no more."""
_BOXED = ("mounts", "volumes", "limits", "network", "listen")
"""What is said of a box, and of nothing else."""


def check_placement(draft: Draft) -> None:
    """Every problem with servers' placements, and with what is mounted for them and for capabilities."""
    groups: dict[str, list[Shaped[schema.ServerEntry]]] = {}
    for server in draft.servers.values():
        if "placement" not in server.broken:
            _placement(draft, server)
            if server.shape.placement not in PLACES:
                groups.setdefault(server.shape.placement, []).append(server)
    for name, group in groups.items():
        _group(draft, name, group)
    for where, shape in _every_mount(draft):
        try:
            mount(draft, shape)
        except ValueError as exc:
            draft.problem((*where, "host"), str(exc))
    _socket(draft)
    for capability in draft.capabilities.values():
        if capability.shape.transport == "mcp" and capability.shape.filesystem is not None:
            _check_mounts_narrow(draft, capability, capability.shape.filesystem.mounts)


def socket(draft: Draft) -> Path | None:
    """The unix socket that the gateway listens on, if it is to."""
    path = validators.socket_path(draft.gateway.shape.listen)
    return None if path is None else resolve(path, draft.base)


def _socket(draft: Draft) -> None:
    """A box that sees the socket could call the gateway as the user who runs it."""
    path = socket(draft)
    where = (*draft.gateway.where, "listen")
    if path is None:
        return
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        draft.problem(where, f"{path} is too long for a socket: {_LONGEST_SOCKET} bytes are the most")
    real = Path(os.path.realpath(path))
    for place, shape in _every_mount(draft):
        with suppress(ValueError):  # reported at its own place
            if real.is_relative_to(mount(draft, shape).host):
                what = ".".join(map(str, place))
                draft.problem(where, f"{path} lies in a folder that boxes see ({what}): name another place for it")


def _placement(draft: Draft, server: Shaped[schema.ServerEntry]) -> None:
    shape = server.shape
    where = server.where
    placement = shape.placement
    remote = shape.url is not None or shape.openapi is not None
    if remote and (placement not in ("own", "remote") or (placement == "own" and "placement" in server.given)):
        draft.problem((*where, "placement"), "a server with a url runs elsewhere: its placement is remote")
    if not remote and placement == "remote" and shape.command is not None:
        draft.problem((*where, "placement"), "a server that is started by a command is not remote: it needs a url")
    if placement not in PLACES and (hint := did_you_mean(placement, PLACES)):
        known = ", ".join(PLACES)
        draft.problem((*where, "placement"), f"{placement!r} is too much like one of {known} to name a box{hint}")
    for key in _BOXED:
        if key in server.given and (remote or placement in ("session", "unsafe_host")) and getattr(shape, key):
            if key == "network" and (remote or shape.network == "denied"):
                continue
            if key == "listen" and shape.listen == "denied":
                continue
            what = "runs elsewhere" if remote else f"has no box of its own (placement {placement})"
            draft.problem((*where, key), f"{key} is for a server in a box, and this one {what}", key=True)
    _volumes(draft, server)
    if placement == "session":
        if shape.secrets:
            draft.problem((*where, "secrets"), "a server in an agent's own box can have no secret", key=True)
        _only_reads(draft, server)


def _volumes(draft: Draft, server: Shaped[schema.ServerEntry]) -> None:
    """A volume has a place of its own: what lies in a folder that the box may write to could be moved away."""
    taken = [each.at for each in server.shape.mounts]
    for index, each in enumerate(server.shape.volumes):
        where = (*server.where, "volumes", index, "at")
        for other in taken:
            if within(each.at, other) or within(other, each.at):
                draft.problem(where, f"{each.at} and {other} are in each other: give the volume a folder of its own")
        if each.at == "/" or within("/workspace", each.at):
            draft.problem(where, f"a volume cannot be at {each.at}: use a folder of its own, such as /data")
        taken.append(each.at)


def _only_reads(draft: Draft, server: Shaped[schema.ServerEntry]) -> None:
    name = str(server.where[-1])
    for capability in draft.capabilities.values():
        if capability.shape.transport == "mcp" and capability.shape.server == name and capability.shape.mode != "read":
            text = f"server {name!r} lives in an agent's own box, where only read contracts are served"
            draft.problem((*capability.where, "mode"), text)


def _group(draft: Draft, name: str, group: list[Shaped[schema.ServerEntry]]) -> None:
    """Servers in one box must see the same, reach the same, and hold the same secrets."""
    if len(group) == 1:
        text = f"no other server is in the box {name!r}, so nothing is shared; own would do"
        draft.warn((*group[0].where, "placement"), text, key=False)
    for server in group[1:]:
        for key in ("network", "secrets"):
            if getattr(server.shape, key) != getattr(group[0].shape, key):
                first = str(group[0].where[-1])
                text = f"it shares the box {name!r} with {first!r}, so its {key} must be the same"
                draft.problem((*server.where, key) if key in server.given else server.where, text, key=True)


def _every_mount(draft: Draft) -> Iterator[tuple[Where, schema.MountEntry]]:
    for server in draft.servers.values():
        for index, shape in enumerate(server.shape.mounts):
            yield (*server.where, "mounts", index), shape
    for capability in draft.capabilities.values():
        filesystem = capability.shape.filesystem
        for index, shape in enumerate(filesystem.mounts if filesystem is not None else ()):
            yield (*capability.where, "filesystem", "mounts", index), shape
    for hook in draft.hooks.values():
        for index, shape in enumerate(hook.shape.mounts):
            yield (*hook.where, "mounts", index), shape


def mount(draft: Draft, shape: schema.MountEntry) -> Mount:
    """The mount, with the real path of its folder. Raises ValueError."""
    written = [
        real_path(str(resolve(each.host, draft.base)))
        for _, each in _every_mount(draft)
        if each.mode == "rw" and each is not shape
    ]
    state = draft.gateway.shape.state
    own: dict[Path, str] = {}
    # Of a mount that may be written, `overlaps` says more.
    if state is not None and "://" not in state and shape.mode != "rw":
        own[resolve(state, draft.base)] = "Ringfence's own state"
    for secret in draft.secrets.values():
        if secret.shape.source == "file" and secret.shape.path is not None:
            own[resolve(secret.shape.path, draft.base)] = f"secret {secret.where[-1]!r}"
    tls = draft.gateway.shape.tls
    if tls is not None:
        own[resolve(tls.key, draft.base)] = "the key of gateway.tls"
    if draft.vault.shape.token_file is not None:
        own[resolve(draft.vault.shape.token_file, draft.base)] = "the token of the vault"
    return declared(Mount(shape.host, shape.at, shape.mode, shape.unsafe or ""), draft.base, written, own)


def _check_mounts_narrow(
    draft: Draft, capability: Shaped[schema.CapabilityEntry], wanted: list[schema.MountEntry]
) -> None:
    """A call of a server has what that server has, or less of it: then in an instance of its own."""
    servers = draft.candidates(capability)
    for index, shape in enumerate(wanted):
        objections = [text for server in servers if (text := _not_there(draft, shape, server))]
        where: Where = (*capability.where, "filesystem", "mounts", index)
        if objections and len(objections) == len(servers):
            draft.problem(where, objections[0], key=False)
        elif objections:
            draft.warn(where, f"name its server, or: {objections[0]}", key=False)


def _not_there(draft: Draft, wanted: schema.MountEntry, server: Shaped[schema.ServerEntry]) -> str | None:
    name = server.where[-1]
    shape = server.shape
    if shape.command is None:
        return f"server {name!r} runs elsewhere, where nothing is mounted: leave filesystem out"
    if shape.placement in ("session", "unsafe_host"):
        return f"server {name!r} has no box of its own (placement {shape.placement}): leave filesystem out"
    try:
        given = mount(draft, wanted)
        has = [mount(draft, each) for each in shape.mounts]
    except ValueError:
        return None  # reported at its own place
    if any(each.host == given.host and each.at == given.at and given.mode in ("ro", each.mode) for each in has):
        return None
    entry = f"{{host: {wanted.host}, at: {wanted.at}, mode: {wanted.mode}}}"
    return f"server {name!r} does not see this: write it under servers: {name}: mounts: [{entry}], too"


def server_limits(shape: schema.LimitsSection | None) -> Mapping[str, float | int]:
    """The limits of a server, by the names of `box.Limits`."""
    if shape is None:
        return {}
    given: dict[str, float | int | None] = {
        "memory_bytes": None if shape.memory_mb is None else shape.memory_mb * MIB,
        "disk_bytes": None if shape.disk_mb is None else shape.disk_mb * MIB,
        "processes": shape.processes,
        "cpu_cores": shape.cpu_cores,
    }
    return {name: value for name, value in given.items() if value is not None}


# ── Servers from packages and images ──────────────────────────────────────────────────────────────


_FETCHERS = ("npx", "bunx", "uvx", "pipx", "docker", "podman", "nerdctl")


def check_images(draft: Draft) -> None:
    """An image is named as it was pinned, and is the root of a box that is its own."""
    for server in draft.servers.values():
        shape = server.shape.packages
        if shape is None or shape.kind != "image":
            continue
        where = (*server.where, "packages", "names")
        try:
            pinned = [Reference.of(name) for name in shape.names]
        except ValueError as exc:
            draft.problem(where, str(exc))
            continue
        if len(pinned) != 1 or not pinned[0].digest or not pinned[0].host:
            draft.problem(where, "an image is one, with its registry and digest: [HOST/NAME:TAG@sha256:…]")
        if server.shape.placement != "own" and "placement" not in server.broken:
            text = "an image is the root of its server's box, so that box is its own"
            draft.problem((*server.where, "placement"), text)


def warn_of_fetching(draft: Draft) -> None:
    """Warn of commands that fetch what they run: a box without a network cannot fetch it."""
    for server in draft.servers.values():
        shape = server.shape
        name = os.path.basename(shape.command[0]) if shape.command else ""
        if name in _FETCHERS and shape.network == "denied" and shape.placement != "unsafe_host":
            draft.warn(
                (*server.where, "command"),
                f"{name} fetches what it runs when it starts, which a box without a network cannot;"
                " `ringfence init --from` writes such a server fetched and pinned",
            )


# ── What this version cannot do yet ───────────────────────────────────────────────────────────────
#
# What would leave something unprotected, or do nothing, is a problem and never accepted. What only means that calls are
# refused is a warning. When a part is built, its line here goes.


_NOT_BUILT = "is not built yet"


def check_unbuilt(draft: Draft) -> None:
    _unbuilt_gateway(draft)
    for name, capability in draft.capabilities.items():
        _unbuilt_capability(draft, capability)
        _check_effects(draft, name, capability)
        _refused_calls(draft, name, capability)
    _unbuilt_sandbox(draft)


def _refuse(draft: Draft, where: Where, what: str) -> None:
    draft.problem(where, f"{what} {_NOT_BUILT}", key=True)


def _unbuilt_gateway(draft: Draft) -> None:
    gateway = draft.gateway.shape
    where = draft.gateway.where
    if gateway.state is not None and "://" in gateway.state:
        draft.problem((*where, "state"), f"a database as state {_NOT_BUILT}; name a folder")
    if gateway.code_mode != "off":
        _refuse(draft, (*where, "code_mode"), f"code_mode {gateway.code_mode}")


def _unbuilt_capability(draft: Draft, capability: Shaped[schema.CapabilityEntry]) -> None:
    shape = capability.shape
    where = capability.where
    if shape.isolation in (None, "none"):
        return
    servers = draft.candidates(capability)
    if servers and shape.isolation != "process":
        draft.problem((*where, "isolation"), f"isolation {shape.isolation} for a server {_NOT_BUILT}")
    elif any(server.shape.placement == "unsafe_host" for server in servers):
        draft.problem((*where, "isolation"), "its server runs in no box (placement unsafe_host): write none")


def _check_effects(draft: Draft, name: str, capability: Shaped[schema.CapabilityEntry]) -> None:
    """What undoes a call and what shows it beforehand are capabilities, too."""
    shape = capability.shape
    for key in ("compensate", "preview"):
        named = getattr(shape.effects, key)
        where = (*capability.where, "effects", key)
        if named is None:
            continue
        if named == name:
            draft.problem(where, f"no other capability named {named!r}")
        elif key == "preview" and named in draft.capabilities and draft.capabilities[named].shape.mode != "read":
            draft.problem(where, f"{named!r} is no read, and a preview must change nothing")
    if shape.effects.compensate is not None and shape.record != "full":
        text = "what undoes a call is made from its arguments and its result: write record: full beside effects"
        draft.problem((*capability.where, "effects", "compensate"), text)


def _refused_calls(draft: Draft, name: str, capability: Shaped[schema.CapabilityEntry]) -> None:
    shape = capability.shape
    where = capability.where
    refused = f"every call of {name!r} will be refused"
    if shape.transport == "sandboxed_exec":
        return
    servers = draft.candidates(capability)
    if shape.transport == "mcp" and not draft.servers:
        draft.warn(where, f"{refused}: no server is declared")
    if shape.network == "denied":
        return
    commanded = [server.shape for server in servers if server.shape.address is None]
    if commanded:
        if not any(each.network == shape.network and each.placement != "unsafe_host" for each in commanded):
            text = f"{refused}: the box of its server does not have network {shape.network!r}"
            draft.warn((*where, "network"), text)
    elif shape.network in draft.networks:
        network = NetworkSpec(shape.network, tuple(draft.networks[shape.network].shape.allow))
        if servers and not any(_reaches(network, server.shape.address or "") for server in servers):
            draft.warn((*where, "network"), f"{refused}: network {shape.network!r} does not allow its server's address")


def _reaches(network: NetworkSpec, url: str) -> bool:
    parts = urlsplit(url)
    return network_allows(network, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def _brought(backend: str) -> bool:
    """Whether an installed package brings it."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - few name one

    return bool(entry_points(group="ringfence.backends", name=backend))


def _unbuilt_sandbox(draft: Draft) -> None:
    sandbox = draft.sandbox.shape
    where = draft.sandbox.where
    known = (*BACKENDS, "auto")
    if sandbox.backend not in known and not _brought(sandbox.backend):
        hint = did_you_mean(sandbox.backend, known)
        draft.problem((*where, "backend"), f"no backend named {sandbox.backend!r}{hint}; there are {', '.join(known)}")
    if sandbox.backend in NOT_BUILT:
        _refuse(draft, (*where, "backend"), f"sandbox backend {sandbox.backend}")


def exposed(host: str, gateway: GatewaySettings, *, agents: bool) -> str | None:
    """Why we do not listen at an address that others can reach, and what to write; None where nothing is missing."""
    if is_loopback(host):
        return None
    lacking = []
    if not agents:
        lacking.append("agents: {NAME: {capabilities: [...]}}, so that callers show who they are")
    if gateway.tls is None and not gateway.trusted_proxy:
        lacking.append("gateway.tls: {cert: FILE, key: FILE}, or gateway.trusted_proxy: [ADDRESS] of what ends TLS")
    if gateway.url is None:
        lacking.append("gateway.url: https://NAME, the address that clients use")
    if not lacking:
        return None
    return f"others can reach {host}; to listen there, write {'; and '.join(lacking)}; or use 127.0.0.1"
