"""An OpenAPI 3 document, read into operations.

The document says what can be called, and no more: where requests go is the operator's `base_url`, never the document's
`servers`, and credentials are the operator's secrets, never its `security`. Nothing that it refers to is fetched. An
operation that cannot be called as it is described is left out, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.core.schema import Schema, Unusable
from ringfence.upstream.openapi.operation import (
    ANSWER,
    BODY,
    Form,
    Operation,
    Parameter,
    RequestBody,
    field_allowed,
    ours,
    settable,
)

MAX_BYTES = 32_000_000
_MAX_OPERATIONS = 1_000
"""As many as one server may have tools."""
_MAX_SCHEMA_BYTES = 48_000
"""Of the input schema of one operation. What is longer has its deeper parts left open: the API itself checks them."""
_DEPTHS = (6, 4, 3, 2, 1)
_MAX_REFERENCES = 50
_METHODS = ("get", "head", "post", "put", "patch", "delete", "options")
_PLACES = ("path", "query", "header")
_STYLES = {"path": "simple", "query": "form", "header": "simple"}
_NAME_LENGTH = 64
_DESCRIPTION_LENGTH = 1_500
_ALIAS = re.compile(r"(?m)(?:^|[\s:\[,{-])\*[A-Za-z0-9_]")
_NO_NAME = re.compile(r"[^A-Za-z0-9_]+")
_KEPT = frozenset(
    {"type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength"}
    | {"minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxProperties", "minProperties", "required"}
    | {"format", "description", "default", "title"}
)
_SCHEMAS = ("items", "additionalProperties", "not", "propertyNames", "contains", "if", "then", "else")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties")


class BadDocument(ValueError):
    """A document that cannot be used at all."""


@plain
class ApiDocument:
    title: str
    operations: tuple[Operation, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """Operations that cannot be called, and why."""


def read(data: bytes) -> ApiDocument:
    """Raises BadDocument."""
    if len(data) > MAX_BYTES:
        raise BadDocument(f"it has more than {MAX_BYTES:,} bytes")
    document = _parsed(data)
    if not isinstance(document, dict):
        raise BadDocument("it is no OpenAPI document")
    version = document.get("openapi")
    if not (isinstance(version, str) and version.startswith("3.")):
        if "swagger" in document:
            raise BadDocument("it is Swagger 2: convert it to OpenAPI 3 first")
        raise BadDocument("it does not begin with openapi: 3.x")
    return _Reader(document, old=version.startswith("3.0")).all()


def read_file(path: Path) -> bytes:
    """Raises OSError."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _parsed(data: bytes) -> Any:
    if data.lstrip()[:1] == b"{":
        try:
            return canonical.loads(data, max_depth=512)
        except canonical.NotCanonical as exc:
            raise BadDocument(f"it cannot be read as JSON: {exc}") from None
    yaml = YAML(typ="safe", pure=False)
    try:
        text = data.decode()
        # An alias may stand for a million others: documents refer by $ref.
        if _ALIAS.search(text) and any(
            isinstance(event, AliasEvent) for event in YAML(typ="safe", pure=False).parse(text)
        ):
            raise BadDocument("it has YAML aliases, which are not taken")
        return _json_keys(yaml.load(text))
    except (YAMLError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        if isinstance(exc, BadDocument):
            raise
        raise BadDocument(f"it cannot be read as YAML: {str(exc).splitlines()[0] if str(exc) else exc!r}") from None


def _json_keys(value: Any) -> Any:
    """YAML has keys and values that JSON has not, such as the status 200 and dates."""
    if isinstance(value, dict):
        return {str(key): _json_keys(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_keys(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


class _LeftOut(Exception):
    """Why an operation cannot be called."""


class _Reader:
    def __init__(self, document: Json, *, old: bool) -> None:
        self._document = document
        self._old = old
        """3.0, whose schemas are not quite JSON Schema."""

    def all(self) -> ApiDocument:
        paths = self._document.get("paths")
        found: list[Operation] = []
        left_out: list[tuple[str, str]] = []
        names: set[str] = set()
        for path, method, shared, body in self._each(paths if isinstance(paths, dict) else {}):
            if len(found) >= _MAX_OPERATIONS:
                left_out.append((f"{method.upper()} {path}", f"only {_MAX_OPERATIONS:,} operations are read"))
                continue
            try:
                operation = self._operation(_unique(_name(body, method, path), names), method, path, shared, body)
            except _LeftOut as exc:
                left_out.append((f"{method.upper()} {path}", str(exc)))
                continue
            names.add(operation.name)
            found.append(operation)
        if not found:
            why = f": {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
            raise BadDocument(f"it has no operation that could be called{why}")
        info = self._document.get("info")
        title = info.get("title") if isinstance(info, dict) else None
        return ApiDocument(str(title or "an API"), tuple(found), tuple(left_out))

    def _each(self, paths: Json) -> Iterator[tuple[str, str, list[Any], Json]]:
        for path, item in paths.items():
            entry = self._followed(item)
            if not path.startswith("/") or not isinstance(entry, dict):
                continue
            shared = entry.get("parameters")
            for method in _METHODS:
                body = entry.get(method)
                if isinstance(body, dict):
                    yield path, method, shared if isinstance(shared, list) else [], body

    # ── One operation ──

    def _operation(self, name: str, method: str, path: str, shared: list[Any], body: Json) -> Operation:
        own = body.get("parameters")
        declared: dict[tuple[str, str], Json] = {}
        for each in (*shared, *(own if isinstance(own, list) else ())):
            entry = self._resolved(each)
            declared[str(entry.get("in")), str(entry.get("name"))] = entry
        parameters: list[Parameter] = []
        schemas: dict[str, Any] = {}
        for entry in declared.values():
            parameter = self._parameter(entry, schemas)
            if parameter is not None:
                parameters.append(parameter)
        named = {each.name for each in parameters if each.place == "path"}
        if lacking := [part for part in re.findall(r"\{([^{}]*)\}", path) if part not in named]:
            raise _LeftOut(f"nothing says what {{{lacking[0]}}} in its path is")
        if re.search(r"[\x00-\x20\x7f?#]", path) or not path.isascii():
            raise _LeftOut("its path has characters that no path has")
        request = self._body(body.get("requestBody"), schemas) if method not in ("get", "head") else None
        required = [each.argument for each in parameters if each.required]
        required += [request.argument] if request is not None and request.required else []
        operation = Operation(name, method.upper(), path, tuple(parameters), request)
        definition: Json = {"name": name, "description": _description(body, operation)}
        definition["inputSchema"] = self._input(schemas, required)
        definition["outputSchema"] = ANSWER
        reads = operation.reads
        definition["annotations"] = {
            "title": str(body.get("summary") or name)[:200],
            "readOnlyHint": reads,
            "destructiveHint": method == "delete",
            "idempotentHint": method in ("get", "head", "put", "delete", "options"),
            "openWorldHint": True,
        }
        return Operation(name, operation.method, path, operation.parameters, request, definition)

    def _parameter(self, entry: Json, schemas: dict[str, Any]) -> Parameter | None:
        name = entry.get("name")
        place = entry.get("in")
        required = entry.get("required") is True or place == "path"
        if not isinstance(name, str) or not name:
            raise _LeftOut("one of its parameters has no name")
        if place not in _PLACES or (place == "header" and not settable(name)):
            # Who is asked and as whom is not up to arguments: the base URL and secrets say that.
            if required and not (place == "header" and ours(name)):
                raise _LeftOut(f"it needs the {place} {name!r}, which no argument may set")
            return None
        if place == "query" and not field_allowed(name):
            if required:
                raise _LeftOut(f"it needs the field {name!r}, which no argument may set")
            return None
        content = entry.get("content")
        as_json = isinstance(content, dict) and bool(content)
        schema = entry.get("schema")
        if isinstance(content, dict) and content:
            first = next(iter(content.values()))
            schema = first.get("schema") if isinstance(first, dict) else None
        argument = name if name not in schemas else f"{name}_in_{place}"
        style = entry.get("style") if isinstance(entry.get("style"), str) else _STYLES[place]
        explode = entry.get("explode") if isinstance(entry.get("explode"), bool) else style == "form"
        described = dict(schema) if isinstance(schema, dict) else {}
        if entry.get("description") and "$ref" not in described:
            described["description"] = entry["description"]
        schemas[argument] = described
        return Parameter(argument, name, place, required, str(style), bool(explode), as_json)

    def _body(self, given: Any, schemas: dict[str, Any]) -> RequestBody | None:
        if given is None:
            return None
        entry = self._resolved(given)
        content = entry.get("content")
        if not isinstance(content, dict) or not content:
            return None
        kind, media = min(content.items(), key=lambda item: _rank(item[0]))
        schema = media.get("schema") if isinstance(media, dict) else None
        form = _form(kind)
        argument = BODY if BODY not in schemas else "request_body"
        if form == "text":
            schema = {"type": "string", "description": f"{kind}, as a text"}
        elif form == "bytes":
            schema = {"type": "string", "description": f"{kind}, in base64"}
        elif form == "multipart":
            schema = {"type": "object", "description": 'fields; a file is {"filename": …, "base64": …}'}
        schemas[argument] = schema if isinstance(schema, dict) else {}
        plain_kind = kind.partition(";")[0].strip().lower()
        plain_kind = "application/json" if form == "json" and "*" in plain_kind else plain_kind
        if "*" in plain_kind or not re.fullmatch(r"[\w.+-]+/[\w.+-]+", plain_kind):
            plain_kind = "application/octet-stream"
        return RequestBody(argument, form, plain_kind, entry.get("required") is True)

    # ── References ──

    def _resolved(self, entry: Any) -> Json:
        found = self._followed(entry)
        if not isinstance(found, dict):
            raise _LeftOut("a part of it refers to nothing in the document")
        return found

    def _followed(self, entry: Any) -> Any:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(entry, dict) or not isinstance(entry.get("$ref"), str):
                return entry
            entry = self._target(entry["$ref"])
        return None

    def _target(self, reference: str) -> Any:
        if not reference.startswith("#/"):
            return None  # elsewhere: nothing is fetched
        value: Any = self._document
        for word in reference[2:].split("/"):
            word = word.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and word in value:
                value = value[word]
            elif isinstance(value, list) and word.isdigit() and int(word) < len(value):
                value = value[int(word)]
            else:
                return None
        return value

    # ── Schemas ──

    def _input(self, schemas: Mapping[str, Any], required: list[str]) -> Json:
        """One schema for all arguments. Recursive parts stay references; where the whole is too long, what lies deeper
        is left open."""
        whole = self._closed(schemas, required, None)
        for depth in _DEPTHS:
            if whole is not None and len(canonical.message(whole, "surrogatepass")) <= _MAX_SCHEMA_BYTES:
                break
            whole = self._closed(schemas, required, depth)
        if whole is not None and _usable(whole):
            return whole
        # Some of it is no JSON Schema: that is left open, and the rest holds.
        usable = {name: schema if self._usable_alone(schema) else {} for name, schema in schemas.items()}
        return self._closed(usable, required, 1) or _whole({name: {} for name in schemas}, required, {})

    def _usable_alone(self, schema: Any) -> bool:
        whole = self._closed({"it": schema}, [], 1)
        return whole is not None and _usable(whole)

    def _closed(self, schemas: Mapping[str, Any], required: list[str], depth: int | None) -> Json | None:
        parts = _Parts(self, depth)
        properties = {name: parts.schema(schema, 0) for name, schema in schemas.items()}
        definitions = parts.definitions()
        return None if definitions is None else _whole(properties, required, definitions)

    def subschema(self, reference: str) -> Any:
        return self._target(reference)

    @property
    def is_old(self) -> bool:
        return self._old


def _usable(whole: Json) -> bool:
    try:
        Schema(whole)
    except Unusable:
        return False
    return True


def _whole(properties: Json, required: list[str], definitions: Json) -> Json:
    whole: Json = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        whole["required"] = required
    if definitions:
        whole["$defs"] = definitions
    return whole


class _Parts:
    """Schemas as JSON Schema has them, and the named ones that they refer to."""

    _MOST = 400
    """Named schemas of one operation."""

    def __init__(self, reader: _Reader, depth: int | None) -> None:
        self._reader = reader
        self._depth = depth
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, int]] = []
        self._nested = 0

    def schema(self, given: Any, depth: int) -> Any:
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict) or self._nested > 60:
            return {}
        if isinstance(given.get("$ref"), str):
            return self._reference(given["$ref"], depth)
        self._nested += 1
        try:
            return self._own(given, depth)
        finally:
            self._nested -= 1

    def _reference(self, reference: str, depth: int) -> Json:
        if self._depth is not None and depth >= self._depth:
            return {}
        if reference not in self._names:
            if not isinstance(self._reader.subschema(reference), dict | bool):
                return {}
            base = _NO_NAME.sub("_", reference.rpartition("/")[2])[:_NAME_LENGTH] or "schema"
            self._names[reference] = _unique(base, set(self._names.values()))
            self._waiting.append((reference, depth))
        return {"$ref": f"#/$defs/{self._names[reference]}"}

    def definitions(self) -> Json | None:
        """Those that were referred to, and that these refer to; None where there are too many."""
        out: Json = {}
        while self._waiting:
            if len(self._names) > self._MOST:
                return None
            reference, depth = self._waiting.pop(0)
            out[self._names[reference]] = self.schema(self._reader.subschema(reference), depth + 1)
        return out

    def _own(self, given: Json, depth: int) -> Json:
        out: Json = {name: value for name, value in given.items() if name in _KEPT and value is not None}
        for name in _SCHEMAS:
            if isinstance(given.get(name), dict | bool):
                out[name] = self.schema(given[name], depth)
        for name in _LISTS:
            if isinstance(given.get(name), list) and given[name]:
                out[name] = [self.schema(each, depth) for each in given[name]]
        for name in _MAPPINGS:
            if isinstance(given.get(name), dict):
                out[name] = {str(key): self.schema(each, depth) for key, each in given[name].items()}
        self._without_answers(given, out)
        if isinstance(out.get("description"), str):
            out["description"] = out["description"][:300]
        _repaired(out)
        if self._reader.is_old:
            _from_3_0(given, out)
        return out

    def _without_answers(self, given: Json, out: Json) -> None:
        """Without properties that only answers have."""
        properties = given.get("properties")
        if not isinstance(properties, dict):
            return
        answers = {name for name, each in properties.items() if isinstance(each, dict) and each.get("readOnly") is True}
        for name in answers:
            out["properties"].pop(str(name), None)
        if answers and isinstance(out.get("required"), list):
            out["required"] = [name for name in out["required"] if name not in answers]


def _repaired(out: Json) -> None:
    """What many documents get wrong, and a validator would stumble over."""
    if not isinstance(out.get("type"), str | list):
        out.pop("type", None)
    elif out["type"] in ("file", "any"):
        del out["type"]
    required = out.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        del out["required"]
    if isinstance(out.get("required"), list):
        out["required"] = list(dict.fromkeys(out["required"]))
        if not out["required"]:
            del out["required"]
    if not isinstance(out.get("enum", []), list) or not out.get("enum", [1]):
        out.pop("enum", None)
    if isinstance(out.get("pattern"), str):
        try:
            re.compile(out["pattern"])
        except re.error:
            del out["pattern"]


def _from_3_0(given: Json, out: Json) -> None:
    """OpenAPI 3.0 has `nullable`, and bounds that are words."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(out.get(exclusive), bool) and out.pop(exclusive) and bound in out:
            out[exclusive] = out.pop(bound)
    if given.get("nullable") is True:
        if isinstance(out.get("type"), str):
            out["type"] = [out["type"], "null"]
            if "enum" in out and None not in out["enum"]:
                out["enum"] = [*out["enum"], None]
        elif any(name in out for name in _LISTS):
            described = {"description": out.pop("description")} if "description" in out else {}
            inner = dict(out)
            out.clear()
            out |= {"anyOf": [inner, {"type": "null"}], **described}


# ── Names and words ───────────────────────────────────────────────────────────────────────────────


def _name(body: Json, method: str, path: str) -> str:
    given = body.get("operationId")
    text = given if isinstance(given, str) and given.strip() else f"{method}_{path}"
    name = re.sub("_+", "_", _NO_NAME.sub("_", text)).strip("_")[:_NAME_LENGTH] or method
    return f"_{name}"[:_NAME_LENGTH] if name[0].isdigit() else name


def _unique(name: str, taken: set[str]) -> str:
    number = 2
    chosen = name
    while chosen in taken:
        ending = f"_{number}"
        chosen = f"{name[: _NAME_LENGTH - len(ending)]}{ending}"
        number += 1
    return chosen


def _description(body: Json, operation: Operation) -> str:
    words = [str(body[key]).strip() for key in ("summary", "description") if body.get(key)]
    if len(words) == 2 and words[1].startswith(words[0]):
        del words[0]
    text = "\n".join(words)[:_DESCRIPTION_LENGTH]
    old = " Deprecated." if body.get("deprecated") is True else ""
    return f"{text}\n{operation.method} {operation.path}{old}".strip()


def _form(kind: str) -> Form:
    name = kind.partition(";")[0].strip().lower()
    if name.endswith(("/json", "+json")) or name == "*/*":
        return "json"
    if name == "application/x-www-form-urlencoded":
        return "form"
    if name.startswith("multipart/"):
        return "multipart"
    if name.startswith("text/") or name.endswith(("/xml", "+xml", "/yaml", "+yaml", "/graphql", "/ndjson", "/csv")):
        return "text"
    return "bytes"


def _rank(kind: str) -> int:
    return ("json", "form", "multipart", "text", "bytes").index(_form(kind))
