"""One operation of an HTTP API, and the request that a call of it makes.

What goes into the request comes from the caller, so nothing of it may change which request it is: a value stays within
its segment of the path, its field of the query or its header, and the headers that decide who is asked, as whom and by
which method are never taken from arguments.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal
from urllib.parse import quote, unquote

from ringfence.core import canonical
from ringfence.core.model import Json
from ringfence.core.record import plain
from ringfence.egress.rules import overrides_method, overrides_path

Place = Literal["path", "query", "header"]
Form = Literal["json", "form", "multipart", "text", "bytes"]

BODY = "body"
"""The argument that has the body, unless a parameter is called so."""
_OURS = frozenset(
    {"host", "authorization", "cookie", "proxy-authorization", "connection", "transfer-encoding", "upgrade", "te"}
    | {"trailer", "expect", "keep-alive", "forwarded", "via", "accept", "accept-encoding", "user-agent", "set-cookie"}
)
"""Headers that no argument sets: they say who is asked, as whom, and how the connection is used."""
_OURS_BEGIN = ("content-", "x-forwarded-", "proxy-", "sec-", "x-original-", "x-rewrite-")
_METHOD_FIELDS = frozenset({"_method", "_httpmethod", "x-http-method-override", "x-http-method", "x-method-override"})
"""Fields of a query or a form by which frameworks take another method than the one of the request."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_TEMPLATE = re.compile(r"\{([^{}]*)\}")
_DOTS = re.compile(r"(?:\.|%2e){1,2}", re.IGNORECASE)
_RESERVED = "!$'()*,:;@/?"
"""Characters that need no encoding in a query, beside those that never do; `&`, `=`, `+` and `#` do."""


ANSWER: Json = {
    "type": "object",
    "properties": {
        "status": {"type": "integer", "description": "the HTTP status"},
        "body": {"description": "the answer: JSON as it is, or a text"},
        "base64": {"type": "string", "description": "an answer that is neither JSON nor text"},
        "links": {"type": "object", "description": "what its Link header names, such as `next`"},
    },
    "required": ["status"],
}
"""What every operation answers, as structured content."""


class BadArguments(ValueError):
    """Arguments that make no request. Its text names places, never values."""


@plain
class Parameter:
    """One argument that goes into the path, the query or a header."""

    argument: str
    name: str
    place: Place
    required: bool = False
    style: str = "simple"
    explode: bool = False
    as_json: bool = False


@plain
class RequestBody:
    argument: str
    form: Form
    content_type: str
    required: bool = False


@plain
class Operation:
    """One method of one path."""

    name: str
    method: str
    path: str
    parameters: tuple[Parameter, ...] = ()
    body: RequestBody | None = None
    definition: Json | None = None
    """The tool as `tools/list` has it."""

    @property
    def reads(self) -> bool:
        return self.method in ("GET", "HEAD")


@plain
class ApiRequest:
    method: str
    target: str
    """Path and query, encoded; it follows the path of the base URL."""
    headers: Mapping[str, str]
    body: bytes | None = None


def ours(header: str) -> bool:
    """Whether a request has this header by itself, where it needs it."""
    name = header.lower()
    return name in _OURS or name.startswith("content-")


def settable(header: str) -> bool:
    """Whether an argument may set this header."""
    name = header.lower()
    if not _TOKEN.fullmatch(name) or name in _OURS or name.startswith(_OURS_BEGIN):
        return False
    return not (overrides_method([name]) or overrides_path([name]))


def field_allowed(name: str) -> bool:
    """Whether an argument may set this field of a query or a form."""
    return name.lower() not in _METHOD_FIELDS


def request_of(operation: Operation, arguments: Mapping[str, Any]) -> ApiRequest:
    """The request of a call. Raises BadArguments."""
    path: dict[str, str] = {}
    query: list[str] = []
    headers: dict[str, str] = {}
    known = {each.argument for each in operation.parameters}
    if operation.body is not None:
        known.add(operation.body.argument)
    if unknown := sorted(arguments.keys() - known):
        raise BadArguments(f"it takes no argument {unknown[0]!r}")
    for each in operation.parameters:
        value = arguments.get(each.argument)
        if value is None:
            if each.required:
                raise BadArguments(f"the argument {each.argument!r} is missing")
            continue
        if each.place == "path":
            path[each.name] = _in_path(each, value)
        elif each.place == "query":
            others = {other.name for other in operation.parameters if other is not each and other.place == "query"}
            query += _in_query(each, value, others)
        else:
            headers[each.name] = _in_header(each, value)
    target = _filled(operation.path, path)
    if query:
        target += f"?{'&'.join(query)}"
    content, kind = _body(operation.body, arguments)
    if kind is not None:
        headers["content-type"] = kind
    return ApiRequest(operation.method, target, headers, content)


# ── Path, query, headers ──────────────────────────────────────────────────────────────────────────


def _filled(template: str, values: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        try:
            return values[found[1]]
        except KeyError:
            raise BadArguments(f"the path needs {found[1]!r}") from None

    path = _TEMPLATE.sub(value, template)
    for written, segment in zip(template.split("/"), path.split("/"), strict=True):
        if written == segment:
            continue
        # Some servers decode first and split then, once or twice: no part that they could find may lead elsewhere.
        meant = unquote(unquote(segment, errors="surrogateescape"), errors="surrogateescape")
        parts = re.split(r"[/\\]", meant)
        if not segment or any(_DOTS.fullmatch(part.partition(";")[0]) for part in (*parts, segment)):
            raise BadArguments(f"what stands for {written} in the path may neither be empty nor have parts of dots")
    return path


def _in_path(each: Parameter, value: Any) -> str:
    if each.as_json:
        return _quoted(_json(value))
    if isinstance(value, dict):
        joint = "=" if each.explode else ","
        text = ",".join(f"{_quoted(key)}{joint}{_quoted(_text(each, item))}" for key, item in value.items())
    elif isinstance(value, list):
        text = ",".join(_quoted(_text(each, item)) for item in value)
    else:
        text = _quoted(_text(each, value))
    if each.style == "label":
        return f".{text}"
    if each.style == "matrix":
        return f";{_quoted(each.name)}={text}"
    return text


def _in_query(each: Parameter, value: Any, taken: AbstractSet[str] = frozenset()) -> Iterator[str]:
    """`taken`: the names of the other parameters, which no field of an object may have."""
    name = _query(each.name)
    if each.as_json:
        yield f"{name}={_query(_json(value))}"
    elif isinstance(value, dict):
        if each.style == "deepObject":
            for key, item in value.items():
                yield f"{name}{_query(f'[{key}]')}={_query(_text(each, item))}"
        elif each.explode:
            for key, item in value.items():
                if not field_allowed(key) or key in taken:
                    raise BadArguments(f"{each.argument!r} may have no field {key!r}")
                yield f"{_query(key)}={_query(_text(each, item))}"
        else:
            flat = (word for pair in value.items() for word in pair)
            yield f"{name}={','.join(_query(_text(each, word)) for word in flat)}"
    elif isinstance(value, list):
        words = [_query(_text(each, item)) for item in value]
        if each.explode:
            yield from (f"{name}={word}" for word in words)
        else:
            between = {"spaceDelimited": "%20", "pipeDelimited": "%7C"}.get(each.style, ",")
            yield f"{name}={between.join(words)}"
    else:
        yield f"{name}={_query(_text(each, value))}"


def _in_header(each: Parameter, value: Any) -> str:
    if each.as_json:
        text = _json(value)
    elif isinstance(value, dict):
        joint = "=" if each.explode else ","
        text = ",".join(f"{key}{joint}{_text(each, item)}" for key, item in value.items())
    elif isinstance(value, list):
        text = ",".join(_text(each, item) for item in value)
    else:
        text = _text(each, value)
    if not text.isascii() or _CONTROL.search(text):
        raise BadArguments(f"{each.argument!r} goes into a header, and may have ASCII characters alone")
    return text.strip()


def _text(each: Parameter, value: Any) -> str:
    if isinstance(value, dict | list):
        raise BadArguments(f"{each.argument!r} is nested deeper than a {each.place} can say")
    if value is None:
        return ""
    text = value if isinstance(value, str) else _json(value)
    if each.place == "path" and _CONTROL.search(text):
        raise BadArguments(f"{each.argument!r} goes into the path, and may have no control characters")
    return text


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def _query(text: str) -> str:
    return quote(text, safe=_RESERVED, errors="surrogatepass")


# ── Bodies ────────────────────────────────────────────────────────────────────────────────────────


def _body(declared: RequestBody | None, arguments: Mapping[str, Any]) -> tuple[bytes | None, str | None]:
    if declared is None:
        return None, None
    value = arguments.get(declared.argument)
    if value is None and (declared.argument not in arguments or declared.form != "json"):
        if declared.required:
            raise BadArguments(f"the argument {declared.argument!r} is missing")
        return None, None
    match declared.form:
        case "json":
            return canonical.message(value), declared.content_type
        case "form":
            return _form(declared, value), declared.content_type
        case "multipart":
            return _multipart(declared, value)
        case "text":
            if not isinstance(value, str):
                raise BadArguments(f"{declared.argument!r} is a text")
            return value.encode(), f"{declared.content_type}; charset=utf-8"
        case "bytes":
            return _bytes(declared.argument, value), declared.content_type


def _form(declared: RequestBody, value: Any) -> bytes:
    pairs = []
    for name, item in _fields(declared, value):
        texts = item if isinstance(item, list) else [item]
        pairs += [f"{_form_word(name)}={_form_word(_plain_text(each))}" for each in texts]
    return "&".join(pairs).encode()


def _form_word(text: str) -> str:
    return quote(text, safe="*", errors="surrogatepass").replace("%20", "+")


def _multipart(declared: RequestBody, value: Any) -> tuple[bytes, str]:
    border = secrets.token_hex(16)
    out = bytearray()
    for name, item in _fields(declared, value):
        for each in item if isinstance(item, list) else [item]:
            about = f'form-data; name="{_part_name(name)}"'
            kind = ""
            if isinstance(each, dict) and "base64" in each:
                about += f'; filename="{_part_name(str(each.get("filename", "file")))}"'
                kind = "content-type: application/octet-stream\r\n"
                content = _bytes(name, each["base64"])
            else:
                content = _plain_text(each).encode()
            out += f"--{border}\r\ncontent-disposition: {about}\r\n{kind}\r\n".encode() + content + b"\r\n"
    out += f"--{border}--\r\n".encode()
    return bytes(out), f"{declared.content_type}; boundary={border}"


def _part_name(text: str) -> str:
    return _CONTROL.sub("_", text).replace("\\", "\\\\").replace('"', "%22")


def _fields(declared: RequestBody, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise BadArguments(f"{declared.argument!r} is an object")
    for name, item in value.items():
        if not field_allowed(name):
            raise BadArguments(f"{declared.argument!r} may have no field {name!r}")
        if item is not None:
            yield name, item


def _json(value: Any) -> str:
    return canonical.message(value).decode()


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _bytes(argument: str, value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadArguments(f"{argument!r} is to be base64") from None
