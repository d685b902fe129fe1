"""Everything that a configuration decides about calls, as one value that is swapped as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ringfence.core import canonical, invisible
from ringfence.core.labels import WINDOW_SECONDS
from ringfence.core.model import Call, Contract, Definition, Json, Mode, ServerSpec, Transport
from ringfence.core.record import dataclass
from ringfence.governance import uris
from ringfence.governance.approvals import Approvals
from ringfence.governance.contract import Capability, Catalog
from ringfence.governance.permission import EVERYTHING, Permissions
from ringfence.governance.policy import Policy


@dataclass(frozen=True, slots=True)
class Rulebook:
    """The rules in force until the next reload. A call keeps the rulebook that it came under, as long as a later one
    would make the same of it."""

    environment: str
    catalog: Catalog
    policy: Policy
    approvals: Approvals
    servers: Mapping[str, ServerSpec]
    prompts: Mapping[tuple[str, str], Definition]
    """Accepted prompt definitions by (server, name)."""
    implicit: Mapping[str, Contract]
    """The contract of each server's resources, prompts and completions."""
    permissions: Permissions = EVERYTHING
    label_seconds: float = WINDOW_SECONDS
    """How long what an agent read counts."""

    @property
    def labelled(self) -> bool:
        """Whether any call can have a label of its own, so that account is kept of all."""
        return self.catalog.labelled or any(each.labels for each in self.implicit.values())

    def resolve(self, call: Call) -> Capability:
        """The capability that a call means, if its agent may call it. Raises Refused."""
        found = self.catalog.resolve(call, self.environment, self.permissions.of(call.principal))
        self.permissions.require_scope(call.principal, found.contract.name)
        return found


_OURS = invisible.alike("ringfence")


def implicit_contract(spec: ServerSpec) -> Contract:
    """Reading what a server lists needs no contract of its own: being on the server's list is the contract."""
    contract = Contract(
        name=f"{spec.name}:lists",
        transport=Transport.MCP,
        server=spec.name,
        mode=Mode.READ,
        isolation="none",
        labels=spec.labels,
    )
    listed = {"server": spec.name, "resources": list(spec.resources), "prompts": list(spec.prompts)}
    if spec.labels:
        listed["labels"] = list(spec.labels)
    return replace(contract, digest=canonical.digest(listed))


def settled(call: Call) -> Call | None:
    """The call with its URI in the one form that is compared, recorded and sent; None where it has none."""
    if call.kind == "resource":
        uri = uris.normal_uri(call.tool)
        return None if uri is None else replace(call, tool=uri, arguments={**call.arguments, "uri": uri})
    ref = call.arguments.get("ref")
    if call.kind != "completion" or not isinstance(ref, dict) or ref.get("type") == "ref/prompt":
        return call
    uri = uris.normal_uri(str(ref.get("uri")))
    return None if uri is None else replace(call, tool=uri, arguments={**call.arguments, "ref": {**ref, "uri": uri}})


_REFERENCE: Mapping[str, tuple[str, frozenset[str]]] = {
    "ref/prompt": ("name", frozenset({"type", "name", "title"})),
    "ref/resource": ("uri", frozenset({"type", "uri"})),
}
"""By the type of a completion's reference: what it names, and all that it may have."""


def completion_problem(given: Json) -> str | None:
    """Why this is no completion as MCP has it. One that says two things at once is judged by the one, and a server may
    go by the other; so nothing goes on but the fields that are looked at here."""
    ref = given.get("ref")
    argument = given.get("argument")
    context = given.get("context", {})
    kind = ref.get("type") if isinstance(ref, dict) else None
    known = _REFERENCE.get(kind) if isinstance(kind, str) else None
    if not isinstance(ref, dict) or known is None:
        return "ref must be of the type ref/prompt or ref/resource"
    if known[0] not in ref or not known[1].issuperset(ref) or not _all_text(ref):
        return f"ref must have type and {known[0]}, and nothing else"
    if not isinstance(argument, dict) or argument.keys() != {"name", "value"} or not _all_text(argument):
        return "argument must have name and value, and nothing else"
    filled = context.get("arguments", {}) if isinstance(context, dict) else None
    if not isinstance(context, dict) or not {"arguments"}.issuperset(context) or not _all_text(filled):
        return "context must have arguments by name, and nothing else"
    return None if {"ref", "argument", "context"}.issuperset(given) else "there is more in it than a completion has"


def _all_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


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
    if kind != "resource":
        return any(fnmatchcase(name, pattern) for pattern in spec.prompts)
    uri = uris.normal_uri(name)
    if uri is None or invisible.alike(uri.partition(":")[0]) == _OURS:
        return False  # what is in our scheme, or looks like it, is no server's
    return any(uris.fits(uri, pattern) for pattern in spec.resources)
