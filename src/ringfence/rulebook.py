"""Everything that a configuration decides about calls, as one value that is swapped as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from urllib.parse import unquote

from ringfence import canonical
from ringfence.approval import Approvals
from ringfence.contract import Catalog
from ringfence.model import Call, Contract, Definition, Mode, ServerSpec, Transport
from ringfence.policy import Policy


@dataclass(frozen=True, slots=True)
class Rulebook:
    """In force until the next reload; a call keeps the one that it began with."""

    environment: str
    catalog: Catalog
    policy: Policy
    approvals: Approvals
    servers: Mapping[str, ServerSpec]
    prompts: Mapping[tuple[str, str], Definition]
    """Accepted prompt definitions by (server, name)."""
    implicit: Mapping[str, Contract]
    """The contract of each server's resources, prompts and completions."""


def implicit_contract(spec: ServerSpec) -> Contract:
    """Reading what a server lists needs no contract of its own: being on the server's list is the contract."""
    contract = Contract(
        name=f"{spec.name}:lists", transport=Transport.MCP, server=spec.name, mode=Mode.READ, isolation="none"
    )
    listed = {"server": spec.name, "resources": list(spec.resources), "prompts": list(spec.prompts)}
    return replace(contract, digest=canonical.digest(listed))


def is_listed(spec: ServerSpec, call: Call) -> bool:
    """Whether the server's own list offers what this call wants to read."""
    if call.kind == "resource":
        return allowed_item(spec, "resource", call.tool)
    if call.kind == "prompt":
        return allowed_item(spec, "prompt", str(call.arguments.get("name")))
    ref = call.arguments.get("ref")
    ref = ref if isinstance(ref, dict) else {}
    kind = "prompt" if ref.get("type") == "ref/prompt" else "resource"
    return allowed_item(spec, kind, str(ref.get("name" if kind == "prompt" else "uri")))


def allowed_item(spec: ServerSpec, kind: str, name: str) -> bool:
    """Whether a server's list offers this resource or prompt."""
    if kind == "resource" and _climbs(name):
        return False
    patterns = spec.resources if kind == "resource" else spec.prompts
    return any(fnmatchcase(name, p) for p in patterns)


def _climbs(uri: str) -> bool:
    """Whether a path steps out of itself, however often it is percent-encoded: a pattern would not see it."""
    for _ in range(4):
        if any(part in (".", "..") for part in uri.replace("\\", "/").replace("?", "/").replace("#", "/").split("/")):
            return True
        decoded = unquote(uri)
        if decoded == uri:
            return False
        uri = decoded
    return True
