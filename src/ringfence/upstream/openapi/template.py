"""The one request that a `direct` capability declares, with places for arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ringfence.core import canonical
from ringfence.core.model import DirectRequest, Json
from ringfence.upstream.openapi.operation import (
    ANSWER,
    ApiRequest,
    BadArguments,
    Operation,
    Parameter,
    request_of,
    settable,
)

DIRECT = "direct:"
"""How the name of what answers a declared request begins; no server of a configuration can be called so."""
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class BadTemplate(ValueError):
    """A request that cannot be meant."""


def base_of(declared: DirectRequest) -> str:
    """Where it goes, whatever the arguments are. Raises BadTemplate."""
    parts = urlsplit(declared.url)
    if "{" in parts.netloc or "{" in parts.scheme or not parts.hostname:
        raise BadTemplate("the host of a request is fixed: arguments may stand in its path alone")
    return f"{parts.scheme}://{parts.netloc}"


def places(declared: DirectRequest) -> list[str]:
    """The arguments that it takes."""
    texts: list[Any] = [declared.url, *declared.query.values(), *declared.headers.values(), declared.body]
    return list(dict.fromkeys(name for text in texts for name in _named(text)))


def problem(declared: DirectRequest) -> str | None:
    """What is wrong with it, if anything is."""
    try:
        base_of(declared)
    except BadTemplate as exc:
        return str(exc)
    parts = urlsplit(declared.url)
    if parts.query or parts.fragment:
        return "write the query under request: query"
    for name in declared.headers:
        if not settable(name) and name.lower() not in ("accept", "content-type"):
            return f"the header {name} is not set by a request: secrets and the address say who is asked, and as whom"
    if declared.body is not None and declared.method in ("GET", "HEAD"):
        return f"a {declared.method} has no body"
    known = declared.input.get("properties") if declared.input is not None else None
    if isinstance(known, dict) and (lacking := [each for each in places(declared) if each not in known]):
        return f"the request has a place for {lacking[0]!r}, and input has no such property"
    return None


def operation_of(name: str, declared: DirectRequest, description: str | None) -> Operation:
    """The operation without what its templates become; `request_by` makes the request."""
    schema = declared.input
    if schema is None:
        named = places(declared)
        schema = {"type": "object", "properties": {each: {"type": "string"} for each in named}, "required": named}
        schema["additionalProperties"] = False
    where = urlsplit(declared.url)
    words = f"{declared.method} {where.scheme}://{where.netloc}{where.path}"
    reads = declared.method in ("GET", "HEAD")
    definition: Json = {
        "name": name,
        "description": f"{description}\n{words}" if description else words,
        "inputSchema": schema,
        "outputSchema": ANSWER,
        "annotations": {"readOnlyHint": reads, "destructiveHint": declared.method == "DELETE", "openWorldHint": True},
    }
    return Operation(name, declared.method, where.path or "/", definition=definition)


def request_by(declared: DirectRequest, arguments: Mapping[str, Any]) -> ApiRequest:
    """Raises BadArguments."""
    path = urlsplit(declared.url).path or "/"
    inside = [Parameter(name, name, "path", required=True) for name in _named(path)]
    query = [Parameter(f"?{name}", name, "query", style="form", explode=True) for name in declared.query]
    headers = [Parameter(f":{name}", name, "header") for name in declared.headers if name.lower() != "content-type"]
    values: dict[str, Any] = {each.argument: arguments.get(each.argument) for each in inside}
    values |= {f"?{name}": _filled(text, arguments) for name, text in declared.query.items()}
    values |= {f":{name}": _filled(text, arguments) for name, text in declared.headers.items()}
    values = {name: value for name, value in values.items() if value is not None and name != ":content-type"}
    shape = Operation("", declared.method, path, (*inside, *query, *headers))
    wanted = {each.argument for each in shape.parameters}
    made = request_of(shape, {name: value for name, value in values.items() if name in wanted})
    if declared.body is None:
        return made
    body = _filled(declared.body, arguments)
    kind = next((text for name, text in declared.headers.items() if name.lower() == "content-type"), None)
    if isinstance(body, str) and kind is not None and not kind.lower().endswith("json"):
        content = body.encode()
    else:
        content = canonical.message(body)
    return ApiRequest(made.method, made.target, {**made.headers, "content-type": kind or "application/json"}, content)


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from _PLACE.findall(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _named(each)
    elif isinstance(value, list):
        for each in value:
            yield from _named(each)


def _filled(value: Any, arguments: Mapping[str, Any]) -> Any:
    """The value with arguments in their places. One that is nothing but a place becomes the argument itself, and is
    left out where there is none."""
    if isinstance(value, str):
        whole = _PLACE.fullmatch(value)
        return arguments.get(whole[1]) if whole is not None else _PLACE.sub(lambda at: _text(at[1], arguments), value)
    if isinstance(value, dict):
        made = {name: (each, _filled(each, arguments)) for name, each in value.items()}
        return {name: new for name, (old, new) in made.items() if new is not None or old is None}
    if isinstance(value, list):
        return [_filled(each, arguments) for each in value]
    return value


def _text(name: str, arguments: Mapping[str, Any]) -> str:
    value = arguments.get(name)
    if value is None:
        raise BadArguments(f"the argument {name!r} is missing")
    return value if isinstance(value, str) else canonical.message(value).decode()
