"""Everything that a configuration decides about calls, as one value that is swapped as a whole."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from ringfence.core import canonical
from ringfence.core.invisible import folded
from ringfence.core.model import Call, Contract, Definition, Json, Mode, ServerSpec, Transport
from ringfence.governance.approvals import Approvals
from ringfence.governance.contract import Catalog
from ringfence.governance.policy import Policy


@dataclass(frozen=True, slots=True)
class Rulebook:
    """The rules in force until the next reload; a call keeps the rulebook that it began with."""

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


def settled(call: Call) -> Call | None:
    """The call with its URI in the one form that is compared, recorded and sent; None where it has none."""
    if call.kind == "resource":
        uri = normal_uri(call.tool)
        return None if uri is None else replace(call, tool=uri, arguments={**call.arguments, "uri": uri})
    ref = call.arguments.get("ref")
    if call.kind != "completion" or not isinstance(ref, dict) or ref.get("type") == "ref/prompt":
        return call
    uri = normal_uri(str(ref.get("uri")))
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
    uri = normal_uri(name)
    return uri is not None and any(_fits(uri, _normal_pattern(pattern)) for pattern in spec.resources)


def _fits(uri: str, pattern: str) -> bool:
    """Whether a pattern covers a URI. What it has in the place of a host covers a host, and no path that ends alike."""
    if not fnmatchcase(uri, pattern):
        return False
    host = _HOST.match(uri)
    place = _PLACE_OF_HOST.match(pattern)
    return host is None or place is None or fnmatchcase(host[1], place[1])


# ── One form of a URI ─────────────────────────────────────────────────────────────────────────────

_LONGEST = 8192
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(.*)", re.DOTALL)
_LIKE_THE_WEB = frozenset({"http", "https", "ws", "wss", "ftp", "file"})
"""Schemes for which readers take a backslash for a slash, and whose hosts have no case."""
_AUTHORITY = re.compile(r"//([^/?#]*)(.*)", re.DOTALL)
_ENCODED = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_OVERLONG = re.compile(r"%(?:c[01]%[89ab]|e0%[89]|f0%8|u[0-9a-f]{4})", re.IGNORECASE)
"""Bytes that are no UTF-8, and escapes that are none of URIs, which a careless reader takes for a dot or a slash."""
_HOST = re.compile(r"(?:https?|wss?|ftp)://([^/?#]*)")
_PLACE_OF_HOST = re.compile(r"[^/]*://([^/]*)")
_PLAIN_HOST = re.compile(r"(?:[A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]*\])(?::[0-9]*)?")
_PLAIN_FILE = re.compile(r"file:(?://[^/?#]*)?(?:/(?!%(?:25)*(?:2F|5C))[^/?#]+)*/?", re.IGNORECASE)
"""Readers of files drop what follows a mark or hash, and take two slashes for one, or for the beginning of a path."""
_ROUNDS = 8


def normal_uri(uri: str) -> str | None:
    """The URI in the form in which it is compared and sent; None where two readers could take it for different ones.

    Scheme, percent-encoding, and of schemes like those of the web the host and the slashes, are written in one way.
    Whatever steps out of a path, however it is spelled, has no such form, and neither has a control character: readers
    drop it, or end there.
    """
    if len(uri) > _LONGEST or uri != uri.strip() or _CONTROL.search(uri) is not None:
        return None
    form = _written(uri)
    return None if form is None or _climbs(form) or _is_read_in_two_ways(form) else form


def _is_read_in_two_ways(uri: str) -> bool:
    if uri.startswith("file:"):
        return _PLAIN_FILE.fullmatch(uri) is None
    host = _HOST.match(uri)
    return host is not None and _PLAIN_HOST.fullmatch(host[1]) is None


@lru_cache(maxsize=1024)
def _normal_pattern(pattern: str) -> str:
    return _written(pattern) or pattern


def _written(uri: str) -> str | None:
    found = _SCHEME.fullmatch(uri)
    scheme, rest = (found[1].lower(), found[2]) if found is not None else ("", uri)
    for _ in range(_ROUNDS):
        plain = _ENCODED.sub(_decoded, rest)
        if plain == rest:
            break
        rest = plain
    else:
        return None
    if found is None:
        return rest
    if scheme in _LIKE_THE_WEB:
        rest = rest.replace("\\", "/")
        parts = _AUTHORITY.fullmatch(rest)
        if parts is not None:
            host = parts[1]
            if "@" in host or "%" in host or not host.isascii():
                return None
            rest = f"//{host if '[' in host else host.lower()}{parts[2]}"
    return f"{scheme}:{rest}"


def _decoded(match: re.Match[str]) -> str:
    character = chr(int(match[1], 16))
    return character if character in _UNRESERVED else match[0].upper()


def _climbs(uri: str) -> bool:
    """Whether a path steps out of itself, in whatever way that is encoded: a pattern would not see it."""
    for _ in range(_ROUNDS):
        if _CONTROL.search(uri) is not None or _OVERLONG.search(uri) is not None:
            return True
        if any(map(_is_dots, re.split(r"[/\\?#:]", folded(uri)))):
            return True
        decoded = unquote(uri)
        if decoded == uri:
            return False
        uri = decoded
    return True


def _is_dots(segment: str) -> bool:
    """`..`, also with what some readers drop: parameters, and spaces."""
    plain = "".join(segment.partition(";")[0].split())
    return bool(plain) and not plain.strip(".")
