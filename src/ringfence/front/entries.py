"""Entries of lists as the protocol has them: a client reads a list as a whole, and one bad entry costs it all others.

What an entry may be, the types of the protocol's own package say, for the revision that a client speaks. They are taken
strictly, since clients in other languages are strict. Where only a null stands for something that may be missing, it is
taken away; whatever else does not fit makes the entry unfit for the list.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

from mcp_types.methods import SERVER_RESULTS
from pydantic import AnyUrl, BaseModel, TypeAdapter, ValidationError

from ringfence.core.model import Json
from ringfence.upstream.link import HANDSHAKE, MODERN

Kind = Literal["tool", "prompt", "resource", "template"]
REVISIONS = (HANDSHAKE, MODERN)
"""All of the handshake era have the types of its last one."""

_LISTS: dict[Kind, tuple[str, str]] = {
    "tool": ("tools/list", "tools"),
    "prompt": ("prompts/list", "prompts"),
    "resource": ("resources/list", "resources"),
    "template": ("resources/templates/list", "resource_templates"),
}
LONGEST_NAME = 256
"""Characters: more than a file's name can have."""
_MAX_PLACES = 4
"""Of what leads to a fault in an entry: what lies deeper is named by its server."""


class MalformedEntry(Exception):
    """An entry is not what the protocol says. Names in the text may be the server's."""


def as_listed(kind: Kind, body: Json, version: str) -> Json:
    """The entry for a client of this revision, the very same where nothing is wrong with it. Raises MalformedEntry."""
    model = _model(kind, MODERN if version == MODERN else HANDSHAKE)
    body = _without_nulls(model, body)
    if kind == "tool" and version != MODERN and _is_later_output(body.get("outputSchema")):
        # Before 2026-07-28 results were objects, and a tool need not say what they are.
        body = {name: value for name, value in body.items() if name != "outputSchema"}
    try:
        model.model_validate(body, strict=True)
        if kind == "resource":
            _address().validate_python(body["uri"])
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"][:_MAX_PLACES]) or "uri"
        raise MalformedEntry(f"{place}: {fault['msg']}") from None
    if not 0 < len(body["name"]) <= LONGEST_NAME:
        raise MalformedEntry(f"name: it has {len(body['name'])} characters, and may have 1 to {LONGEST_NAME}")
    return body


def problem(kind: Kind, body: Json) -> str | None:
    """Why no client could be shown this entry; None where those of some revision can."""
    why: str | None = None
    for version in REVISIONS:
        try:
            as_listed(kind, body, version)
        except MalformedEntry as exc:
            why = str(exc)
        else:
            return None
    return why


@cache
def _model(kind: Kind, version: str) -> type[BaseModel]:
    method, field = _LISTS[kind]
    result = SERVER_RESULTS[method, version]
    assert isinstance(result, type)
    return _models_in(result.model_fields[field].annotation)[0]


@cache
def _address() -> TypeAdapter[AnyUrl]:
    """Clients of the SDK's first line read a resource's URI as one."""
    return TypeAdapter(AnyUrl)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type speaks of: itself, those of its items, and those of its alternatives."""
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _without_nulls(model: type[BaseModel], body: Json) -> Json:
    """Without nulls in the place of what may be missing. Keys that the protocol does not know stay as they are."""
    out: Json = {}
    changed = False
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for name, value in body.items():
        field = fields.get(name)
        if field is not None and value is None and not field.is_required():
            changed = True
            continue
        new = value
        if field is not None and isinstance(value, dict | list):
            for inner in _models_in(field.annotation):
                if isinstance(new, dict):
                    new = _without_nulls(inner, new)
                else:
                    items = [_without_nulls(inner, item) if isinstance(item, dict) else item for item in new]
                    new = items if any(one is not other for one, other in zip(items, new, strict=True)) else new
        changed = changed or new is not value
        out[name] = new
    return out if changed else body


def _is_later_output(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") != "object"
