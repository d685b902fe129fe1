"""What the keys mean together: names that must be defined, and keys that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from typing import Any

from ringfence import system
from ringfence.box import CAN_DO_WITHOUT
from ringfence.config import narrowing, schema
from ringfence.config.draft import Draft
from ringfence.config.nearest import did_you_mean
from ringfence.config.settings import SANDBOX_NETWORK
from ringfence.config.shaping import Shaped
from ringfence.config.source import Where
from ringfence.egress.names import url as url_parts
from ringfence.egress.rules import pattern
from ringfence.expression import Expression, ExpressionError
from ringfence.packages.entries import Entry
from ringfence.sandbox.tools import BOX_MAKERS, DECLARABLE, PROGRAMS, RUN_SHELL, TEMPLATES

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|CREDENTIAL", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"gh[pousr]_[A-Za-z0-9]{20}|github_pat_|glpat-|sk-[A-Za-z0-9_-]{16}|xox[abprs]-|(AKIA|ASIA)[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_-]{30}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_NOT_HEADERS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive"}
    | {"proxy-authorization", "proxy-connection"}
)


def check(draft: Draft) -> None:
    _people(draft)
    for name, server in draft.servers.items():
        _server(draft, name, server)
    for capability in draft.capabilities.values():
        _capability(draft, capability)
    for secret in draft.secrets.values():
        _secret(draft, secret)
    if draft.vault.given and draft.vault.shape.address is None and "address" not in draft.vault.broken:
        draft.problem(draft.vault.where, "missing key 'address'", key=True)
    for approval in draft.approvals.values():
        _approval(draft, approval)
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
    for name, person in draft.people.items():
        account = person.shape.os_user
        if account is None:
            continue
        if account in accounts:
            # One account answering as two people would make two approvals of one.
            draft.problem((*person.where, "os_user"), f"{account!r} is {accounts[account]!r} already")
        accounts.setdefault(account, name)


def _server(draft: Draft, name: str, server: Shaped[schema.Server]) -> None:
    shape, where = server.shape, server.where
    ways = [way for way in ("command", "url", "openapi") if way in server.broken or getattr(shape, way) is not None]
    if not ways:
        draft.problem(where, f"server {name!r} has neither command nor url", key=True)
    for way in ways[1:]:
        draft.problem((*where, way), f"server {name!r} has {ways[0]} already: one of them", key=True)
    if shape.base_url is not None and "openapi" not in ways:
        draft.problem((*where, "base_url"), "belongs to openapi", key=True)
    for own in ("env", "cwd"):
        if getattr(shape, own) and "command" not in ways:
            draft.problem((*where, own), f"{own} is for a server that is started by a command", key=True)
    if shape.network != "denied":
        expect(draft, (*where, "network", shape.network), "network", draft.networks)
    _secret_names(draft, where, shape.secrets)
    if "command" in ways:
        _handed(draft, where, shape.secrets, shape.network)
    for variable, value in shape.env.items():
        named = _SECRET_NAME.search(variable) and len(value) >= 8 and not value.startswith(("/", "./", "~"))
        if named or _SECRET_VALUE.search(value):
            draft.warn(
                (*where, "env", variable),
                f"{variable} looks like a secret: whoever reads this file has it, and so does server {name!r}",
            )


def _secret_names(draft: Draft, where: Where, names: list[str]) -> None:
    for index, name in enumerate(names):
        # One name stands by itself, several in a list: the place is found either way.
        expect(draft, (*where, "secrets", index, name), "secret", draft.secrets)


def _handed(draft: Draft, where: Where, names: list[str], network: str) -> None:
    """What will be refused, since a secret has no way to where it is wanted."""
    refused = f"every call of {where[-1]!r} will be refused"
    what = f"server {where[-1]!r} will not start" if where[0] == "servers" else refused
    for index, name in enumerate(names):
        secret = draft.secrets.get(name)
        if secret is None or secret.broken:
            continue
        shape, place = secret.shape, (*where, "secrets", index)
        if shape.hosts and network == "denied":
            text = f"secret {name!r} is for {', '.join(shape.hosts)}, and network is denied: name one that has it"
        elif not shape.hosts and where[0] == "capabilities":
            text = f"secret {name!r} names no hosts that it is for, and its value may not enter a box"
        elif not shape.hosts and shape.env is None:
            text = f"secret {name!r} has neither hosts nor env: in which variable is it expected?"
        else:
            continue
        draft.warn(place, f"{what}: {text}", key=False)


def _sent(draft: Draft, where: Where, names: list[str], servers: list[Shaped[schema.Server]]) -> None:
    """The same for calls to servers: a remote one must be among the secret's hosts, any other be given it itself."""
    if len(servers) != 1 or servers[0].broken:
        return
    server = servers[0]
    for index, name in enumerate(names):
        secret = draft.secrets.get(name)
        if secret is None or secret.broken:
            continue
        if server.shape.url is None and name not in server.shape.secrets:
            text = f"server {server.where[-1]!r} is not given secret {name!r}: write it under its secrets, too"
        elif server.shape.url is not None and not _covers(secret.shape.hosts, server.shape.url):
            text = f"secret {name!r} is not for the host of {server.shape.url}: name it in its hosts"
        else:
            continue
        draft.warn((*where, "secrets", index), f"every call of {where[-1]!r} will be refused: {text}", key=False)


def _covers(hosts: list[str], url: str) -> bool:
    place = url_parts(url).endpoint
    return any(pattern(host).covers(place.host, place.port) for host in hosts)


def _capability(draft: Draft, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    if shape.server is not None and shape.transport != "mcp":
        draft.problem((*where, "server"), f"transport {shape.transport} has no server", key=True)
    elif shape.server is not None:
        expect(draft, (*where, "server", shape.server), "server", draft.servers)
    _boxed(draft, capability)
    narrowing.check(draft, capability)
    if shape.network != "denied":
        expect(draft, (*where, "network", shape.network), "network", draft.networks)
    if shape.approval is not None:
        expect(draft, (*where, "approval", shape.approval), "approval", [*draft.approvals, "none", "always"])
    _secret_names(draft, where, shape.secrets)
    if shape.transport == "sandboxed_exec":
        _handed(draft, where, shape.secrets, shape.network)
    elif shape.secrets:
        _sent(draft, where, shape.secrets, draft.candidates(capability))
    for effect in ("compensate", "preview"):
        named = getattr(shape.effects, effect)
        if named is not None:
            expect(draft, (*where, "effects", effect, named), "capability", draft.capabilities)
    if isinstance(shape.idempotent, schema.Idempotent):
        condition(draft, (*where, "idempotent", "key"), shape.idempotent.key, result="text")


def _boxed(draft: Draft, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    if shape.transport == "sandboxed_exec":
        tool = shape.tool or str(where[-1])
        if tool not in DECLARABLE and "tool" not in capability.broken:
            at, text = (("tool",), "") if shape.tool else ((), "; name one with tool:")
            known = f"a box has no tool {tool!r}, only {', '.join(PROGRAMS)} and those of sessions{text}"
            draft.problem((*where, *at), f"{known}{did_you_mean(tool, DECLARABLE)}", key=not at)
        elif shape.network != "denied" and tool not in BOX_MAKERS:
            text = f"network is for what makes a box, {', '.join(BOX_MAKERS)}; a session keeps what it was opened with"
            draft.problem((*where, "network"), text, key=True)
        for key, tools in (("listen", BOX_MAKERS), ("commands", (RUN_SHELL,))):
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


def _commands(draft: Draft, where: Where, commands: schema.Commands) -> None:
    groups = {"allow": commands.allow or [], "ask": commands.ask, "deny": commands.deny}
    seen: dict[str, str] = {}
    # Which programs there are is known where boxes are; elsewhere the file is for another host.
    choosing: Any = import_module("ringfence.sandbox.process.choosing") if system.no_boxes() is None else None
    for key, names in groups.items():
        for index, name in enumerate(names):
            place = (*where, key, index)
            if name in seen:
                draft.problem(place, f"{name!r} is under {seen[name]} already: one of them")
            elif name in ("sh", "/bin/sh", "/usr/bin/sh") and key != "allow":
                draft.problem(place, "every command is run by /bin/sh, so it is always there")
            elif choosing is not None and not choosing.exists(name):
                text = f"this host has no program {name!r} that boxes see{did_you_mean(name, choosing.names())}"
                draft.warn(place, text)
            seen.setdefault(name, key)


def _sandbox(draft: Draft) -> None:
    where = draft.sandbox.where
    for index, name in enumerate(draft.sandbox.shape.accept_missing):
        if name not in CAN_DO_WITHOUT:
            known = f"a box can do without {', '.join(CAN_DO_WITHOUT)} at most, not {name!r}"
            draft.problem((*where, "accept_missing", index), f"{known}{did_you_mean(name, CAN_DO_WITHOUT)}")
    for kind in ("lifetime", "idle"):
        usual, most = f"session_{kind}_seconds", f"max_session_{kind}_seconds"
        shape = draft.sandbox.shape
        if usual in draft.sandbox.given and getattr(shape, usual) > getattr(shape, most):
            draft.problem((*where, usual), f"more than {most}, which is {getattr(shape, most):g}")
    _sandbox_network(draft)
    _sandbox_packages(draft)
    for name in draft.sandbox.shape.templates:
        if name in TEMPLATES:
            draft.problem((*where, "templates", name), f"the name {name!r} is taken: choose another", key=True)


def _sandbox_packages(draft: Draft) -> None:
    shape, where = draft.sandbox.shape, draft.sandbox.where
    if not shape.install_inside:
        return
    if not shape.allow_packages and "allow_packages" not in draft.sandbox.broken:
        text = "install_inside without allow_packages would let in nothing: name what may be installed"
        draft.problem((*where, "install_inside"), text, key=True)
    lacking = {"pinned": "version", "hashed": "version and hash"}.get(shape.require_packages)
    for index, entry in enumerate(shape.allow_packages):
        if not Entry.of(entry).says(shape.require_packages):
            text = f"{entry!r} names no {lacking}, and require_packages asks for it: for install_inside, here"
            draft.problem((*where, "allow_packages", index), text)


def _sandbox_network(draft: Draft) -> None:
    shape, where = draft.sandbox.shape, draft.sandbox.where
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


def _secret(draft: Draft, secret: Shaped[schema.Secret]) -> None:
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
    _way_of(draft, secret)


def _way_of(draft: Draft, secret: Shaped[schema.Secret]) -> None:
    """A secret goes into a header of some hosts, or into a server's environment."""
    shape, where = secret.shape, secret.where
    if "hosts" in secret.broken or "header" in secret.broken:
        return
    if shape.header is not None and not shape.hosts:
        draft.problem((*where, "header"), "a header without hosts: name those that may get it", key=True)
    if shape.header is not None and shape.header.lower() in _NOT_HEADERS:
        draft.problem((*where, "header"), f"{shape.header} belongs to the proxy itself")
    for key in ("format", "methods"):
        if key in secret.given and not shape.hosts:
            draft.problem((*where, key), f"{key} belongs to hosts", key=True)


def _approval(draft: Draft, approval: Shaped[schema.Approval]) -> None:
    shape, where = approval.shape, approval.where
    if shape.when is not None:
        condition(draft, (*where, "when"), shape.when)
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
