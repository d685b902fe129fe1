"""Nouns as JSON and back, driven by their types. Bytes and long texts travel beside the JSON, as attachments.

Nothing is accepted that is not of its type: what arrives over a socket is validated here, and only here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ringfence.core import canonical
from ringfence.core.quoting import quoted

LONG_TEXT = 65_536
"""Texts from this length on are attached."""

_EMPTY = -1
"""Stands for no bytes, as most output is: an attachment costs a frame."""

Attachments = list[bytes]
Write = Callable[[Any, Attachments], Any]
Read = Callable[[Any, Sequence[bytes]], Any]


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


_encode = canonical.writer(ascii_only=True)
_decode = canonical.reader(parse_constant=_no_number)


class CodecError(ValueError):
    """A value is not of its type."""


def to_json(value: Any) -> bytes:
    try:
        return _encode(value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as exc:
        raise CodecError(f"cannot be sent: {exc}") from None


def from_json(data: bytes) -> Any:
    try:
        return _decode(data.decode("ascii"))
    except (ValueError, RecursionError) as exc:
        raise CodecError(f"is no JSON: {exc}") from None


def pack(kind: Any, value: Any, attachments: Attachments) -> Any:
    """A value of a type as JSON; bytes and long texts are added to the attachments."""
    return _codec(kind)[0](value, attachments)


def unpack(kind: Any, data: Any, attachments: Sequence[bytes]) -> Any:
    """The inverse of `pack`. Raises CodecError."""
    return _codec(kind)[1](data, attachments)


def place(kind: Any, name: str) -> int:
    """The position of a field in the JSON of its record."""
    return [field.name for field in dataclasses.fields(kind)].index(name)


# ── Single values ─────────────────────────────────────────────────────────────────────────────────


def _wrong(data: Any, what: str) -> CodecError:
    return CodecError(f"{quoted(data)} is not {what}")


def _same(value: Any, attachments: Attachments) -> Any:
    return value


def _anything(data: Any, attachments: Sequence[bytes]) -> Any:
    return data


def _plain(kind: type, what: str) -> tuple[Write, Read]:
    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if type(data) is not kind:  # a bool is no int here
            raise _wrong(data, what)
        return data

    return _same, read


def _read_float(data: Any, attachments: Sequence[bytes]) -> Any:
    if type(data) not in (int, float):
        raise _wrong(data, "a number")
    return data


def _attached(data: Any, attachments: Sequence[bytes]) -> bytes:
    if type(data) is not int or not _EMPTY <= data < len(attachments):
        raise _wrong(data, "an attachment")
    return b"" if data == _EMPTY else attachments[data]


def _write_bytes(value: bytes, attachments: Attachments) -> int:
    if not value:
        return _EMPTY
    attachments.append(bytes(value))
    return len(attachments) - 1


def _write_text(value: str, attachments: Attachments) -> Any:
    if len(value) < LONG_TEXT:
        return value
    return [_write_bytes(value.encode("utf-8", "surrogatepass"), attachments)]


def _read_text(data: Any, attachments: Sequence[bytes]) -> str:
    if type(data) is str:
        return data
    if type(data) is not list or len(data) != 1:
        raise _wrong(data, "text")
    try:
        return _attached(data[0], attachments).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _wrong(data, "text") from None


def _read_path(data: Any, attachments: Sequence[bytes]) -> Path:
    return Path(_read_text(data, attachments))


def _read_time(data: Any, attachments: Sequence[bytes]) -> datetime:
    try:
        return datetime.fromisoformat(_read_text(data, attachments))
    except ValueError:
        raise _wrong(data, "a time") from None


_EXACT = {int: "a whole number", bool: "true or false"}
_SINGLE: dict[Any, tuple[Write, Read]] = {
    Any: (_same, _anything),
    str: (_write_text, _read_text),
    **{kind: _plain(kind, what) for kind, what in _EXACT.items()},
    float: (_same, _read_float),
    type(None): _plain(type(None), "null"),
    bytes: (_write_bytes, _attached),
    Path: (lambda value, attachments: _write_text(str(value), attachments), _read_path),
    datetime: (lambda value, attachments: value.isoformat(), _read_time),
}


# ── Compound types ────────────────────────────────────────────────────────────────────────────────


@cache
def _codec(kind: Any) -> tuple[Write, Read]:
    if kind in _SINGLE:
        return _SINGLE[kind]
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return _choice(args)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is tuple and args[1:] == (...,):
        return _sequence(args[0], tuple)
    if origin is tuple:
        return _fixed(args, tuple)
    if origin in (list, Sequence):
        return _sequence(args[0], list)
    if origin in (Mapping, dict):
        return _mapping(args[1])
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _fixed(tuple(get_type_hints(kind).values()), lambda values: kind(*values))
    raise TypeError(f"{kind} cannot be sent")


def _choice(allowed: tuple[Any, ...]) -> tuple[Write, Read]:
    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if type(data) is not str or data not in allowed:
            raise _wrong(data, "one of " + ", ".join(allowed))
        return data

    return _same, read


def _union(members: tuple[Any, ...]) -> tuple[Write, Read]:
    """With several types, the value is tagged with its type's name; null needs no tag."""
    kinds = [kind for kind in members if kind is not type(None)]
    optional = len(kinds) < len(members)
    by_name = {kind.__name__: _codec(kind) for kind in kinds} if len(kinds) > 1 else {"": _codec(kinds[0])}
    named = len(kinds) > 1

    def write(value: Any, attachments: Attachments) -> Any:
        if value is None and optional:
            return None
        if not named:
            return by_name[""][0](value, attachments)
        kind = next(kind for kind in kinds if isinstance(value, kind))
        return {kind.__name__: by_name[kind.__name__][0](value, attachments)}

    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if data is None and optional:
            return None
        if not named:
            return by_name[""][1](data, attachments)
        if type(data) is not dict or len(data) != 1:
            raise _wrong(data, "one of " + ", ".join(by_name))
        ((name, inner),) = data.items()
        if name not in by_name:
            raise _wrong(name, "one of " + ", ".join(by_name))
        return by_name[name][1](inner, attachments)

    return write, read


def _sequence(inner: Any, made: Callable[[Iterator[Any]], Any]) -> tuple[Write, Read]:
    write_one, read_one = _codec(inner)

    def write(value: Any, attachments: Attachments) -> Any:
        return [write_one(each, attachments) for each in value]

    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if type(data) is not list:
            raise _wrong(data, "a list")
        return made(read_one(each, attachments) for each in data)

    return write, read


def _fixed(kinds: tuple[Any, ...], made: Callable[[list[Any]], Any]) -> tuple[Write, Read]:
    codecs = [_codec(kind) for kind in kinds]

    def write(value: Any, attachments: Attachments) -> Any:
        return [codec[0](each, attachments) for codec, each in zip(codecs, value, strict=True)]

    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if type(data) is not list or len(data) != len(codecs):
            raise _wrong(data, f"a list of {len(codecs)}")
        return made([codec[1](each, attachments) for codec, each in zip(codecs, data, strict=True)])

    return write, read


def _mapping(inner: Any) -> tuple[Write, Read]:
    if inner is Any:
        return _plain(dict, "a mapping")
    write_one, read_one = _codec(inner)

    def write(value: Any, attachments: Attachments) -> Any:
        return {key: write_one(each, attachments) for key, each in value.items()}

    def read(data: Any, attachments: Sequence[bytes]) -> Any:
        if type(data) is not dict:
            raise _wrong(data, "a mapping")
        return {key: read_one(each, attachments) for key, each in data.items()}

    return write, read


def _record(kind: Any) -> tuple[Write, Read]:
    """A list of its fields in their order, which both sides know.

    Two functions are generated, with the code for each field inline: every step of a session passes here, and a call
    for each field cost a tenth of the step.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    known: dict[str, Any] = {"kind": kind, "wrong": _wrong, "no": _no, "LONG_TEXT": LONG_TEXT}
    writing = []
    reading = []
    for number, name in enumerate(names):
        known[f"write_{number}"], known[f"read_{number}"] = _codec(hints[name])
        write, read = _inlined(hints[name], number)
        writing.append(write.replace("@", f"value.{name}"))
        reading.append(read.replace("@", f"data[{number}]"))
    source = f"""
def write(value, attachments):
    return [{", ".join(writing)}]
def read(data, attachments):
    if type(data) is not list or len(data) != {len(names)}:
        raise wrong(data, "a {kind.__name__}")
    return kind({", ".join(reading)})
"""
    exec(source, known)  # noqa: S102 - the names in it are those of our own fields
    return known["write"], known["read"]


def _inlined(hint: Any, number: int) -> tuple[str, str]:
    """Code that writes and reads a field, `@`: a value that is its own JSON, or empty, needs no call."""
    write = f"write_{number}(@, attachments)"
    read = f"read_{number}(@, attachments)"
    written = write.replace("@", "x")
    was_read = read.replace("@", "x")
    origin = get_origin(hint)
    args = get_args(hint)
    if hint in _EXACT:
        return "@", f"(x if type(x := @) is {hint.__name__} else no(x, '{_EXACT[hint]}'))"
    if hint is Any:
        return "@", "@"
    if hint is float:
        return "@", f"(x if type(x := @) is float else {was_read})"
    if hint is str:
        return f"(x if len(x := @) < LONG_TEXT else {written})", f"(x if type(x := @) is str else {was_read})"
    if hint is bytes:
        empty = f"type(x := @) is int and x == {_EMPTY}"
        return f"({written} if (x := @) else {_EMPTY})", f"(b'' if {empty} else {was_read})"
    if origin is Literal:
        return "@", f"(x if type(x := @) is str and x in {args!r} else {was_read})"
    if origin in (Union, types.UnionType) and type(None) in args:
        # The other type is inlined in turn, unless it has to be tagged.
        write, read = _inlined(args[0], number) if args[1:] == (type(None),) else (write, read)
        written = write.replace("@", "x")
        was_read = read.replace("@", "x")
        return f"(None if (x := @) is None else {written})", f"(None if (x := @) is None else {was_read})"
    if origin is tuple and args[1:] == (...,):
        return f"({written} if (x := @) else [])", f"(() if (x := @) == [] else {was_read})"
    if origin is Mapping:
        return f"({written} if (x := @) else {{}})", f"({{}} if (x := @) == {{}} else {was_read})"
    return write, read


def _no(data: Any, what: str) -> NoReturn:
    raise _wrong(data, what)


# ── Versions ──────────────────────────────────────────────────────────────────────────────────────


def shape_digest(kinds: Sequence[Any]) -> str:
    """Changes if the encoding of any of these types, or of those in them, changes; the same on every Python."""
    seen: dict[str, Any] = {}

    def name(kind: Any) -> str:
        if isinstance(kind, type) and not get_args(kind):
            is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
            if is_record and kind.__qualname__ not in seen:
                seen[kind.__qualname__] = ()  # for a type that contains itself
                seen[kind.__qualname__] = [(field, name(hint)) for field, hint in get_type_hints(kind).items()]
            return kind.__qualname__
        origin = get_origin(kind)
        if origin is None:
            return str(kind)
        shown = "Union" if origin in (Union, types.UnionType) else getattr(origin, "__name__", str(origin))
        return f"{shown}[{', '.join(map(name, get_args(kind)))}]"

    names = [name(kind) for kind in kinds]
    return hashlib.sha256(to_json([names, sorted(seen.items())])).hexdigest()[:16]
