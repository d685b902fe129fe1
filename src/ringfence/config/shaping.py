"""A part of a file against its shape: what fits is kept, and everything that does not is told in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from ringfence.config.nearest import did_you_mean
from ringfence.config.schema import Shape
from ringfence.config.source import Source, Where, kind
from ringfence.errors import Problem

S = TypeVar("S", bound=Shape)


@dataclass(frozen=True, slots=True)
class Shaped(Generic[S]):
    """What fitted, so that the rest of the checks can go on and all problems come at once."""

    shape: S
    given: dict[str, Any]
    """The keys as they were written, without those that did not fit."""
    broken: frozenset[str]
    """Keys that did not fit or are missing."""
    where: Where


def keys_of(shape: type[Shape]) -> list[str]:
    """The names of a shape's keys as they are written in the file."""
    return [field.alias or name for name, field in shape.model_fields.items()]


def value_at(source: Source, where: Where) -> Any:
    value = source.value
    for step in where:
        value = value[step]
    return value


def shaped(shape: type[S], source: Source, where: Where) -> Shaped[S]:
    """Read the mapping at `where`. What is wrong goes to the source's problems; nothing there reads as empty."""
    given = value_at(source, where)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        source.problems.append(source.problem(where, f"must be a mapping, this is {kind(given)}"))
        return Shaped(shape.model_validate(shape.placeholders), {}, frozenset(keys_of(shape)), where)
    try:
        return Shaped(shape.model_validate(given), given, frozenset(), where)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
    source.problems.extend(_problem(shape, source, where, error) for error in errors)
    broken = frozenset(str(error["loc"][0]) for error in errors)
    kept = {key: value for key, value in given.items() if key not in broken}
    return Shaped(shape.model_validate({**shape.placeholders, **kept}), kept, broken, where)


def _problem(shape: type[Shape], source: Source, where: Where, error: Any) -> Problem:
    where = (*where, *error["loc"])
    category = error["type"]
    if category == "extra_forbidden":
        key = str(where[-1])
        around = _shape_around(shape, error["loc"])
        meant = f" (did you mean {around.meant[key]!r}?)" if key in around.meant else did_you_mean(key, keys_of(around))
        return source.problem(where, f"unknown key {key!r}{meant}", key=True)
    if category == "missing":
        return source.problem(where, f"missing key {str(where[-1])!r}")
    is_key = where[-1] == "[key]"
    return source.problem(where, _sentence(error), key=is_key)


def _shape_around(shape: type[Shape], path: tuple[str | int, ...]) -> type[Shape]:
    """The shape that an unknown key stands in: the one that the path leads into."""
    known = shape
    for step in path[:-1]:
        field = next((f for name, f in known.model_fields.items() if (f.alias or name) == step), None)
        inner = None if field is None else next(shapes_in(field.annotation), None)
        known = inner or known
    return known


def shapes_in(annotation: Any) -> Iterator[type[Shape]]:
    """The shapes that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from shapes_in(part)


_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _sentence(error: Any) -> str:
    category, given, details = error["type"], error["input"], error.get("ctx", {})
    if category in _KINDS:
        hint = " (quote it)" if category == "string_type" and isinstance(given, bool | int | float) else ""
        # What stands in an environment may be secret, and problems are recorded.
        shown = kind(given) if "env" in error["loc"] else _shown(given)
        return f"must be {_KINDS[category]}, this is {shown}{hint}"
    if category in _BOUNDS:
        words, limit = _BOUNDS[category]
        return f"must be {words} {details[limit]:g}, this is {_shown(given)}"
    if category == "literal_error":
        expected = str(details["expected"])
        words_known = [part.strip("'") for part in expected.replace(" or ", ", ").split(", ")]
        hint = did_you_mean(given, words_known) if isinstance(given, str) else ""
        return f"must be {expected}, this is {_shown(given)}{hint}"
    if category in ("too_short", "string_too_short"):
        return "must not be empty"
    if category == "string_too_long":
        return f"longer than {details['max_length']} characters"
    if category == "value_error":
        return str(details["error"])
    return str(error["msg"])


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)[:80]
    return kind(value)
