"""JSON Schema, used without trusting its author.

A schema comes from a server. Nothing is ever fetched for one, and its size, its depth, its patterns and the work of
checking against it are bounded; what exceeds that is unusable, and the tool behind it with it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

from ringfence.core import canonical, schema_patterns
from ringfence.core.record import dataclass

MAX_SCHEMA_BYTES = 256 * 1024
MAX_VALUE_BYTES = 64_000_000
MAX_COST = schema_patterns.MAX_BYTES

_MAX_STEPS = 200_000
_MAX_STEPS_BY_REFERENCE = 50_000
_MAX_STEPS_TO_EXPLAIN = 4_000
_MAX_WORK_TO_EXPLAIN = 100_000
"""In values that are copied, which takes a third of a microsecond each."""
_WORK_OF_AN_ERROR = 25
_WORK_OF_A_WORD = 6
"""64 bits of a long number that is written out."""
_CHARACTERS_A_VALUE = 1_000
_FEW_REFERENCES = 24
"""There are at most 3^(24/3) ways through so few: they can be followed to the end when the schema is read."""
_FEW_OPTIONS = 100
"""Objects and lists in an `enum` are compared one by one; texts and numbers are looked up."""
_CHEAP = 2_000_000_000
"""Bytes of schema, its references followed, times bytes of value up to which the steps need not be counted first."""
_CHEAP_PATTERNS = 20_000_000
"""States of a pattern, its repetitions written out, times characters: what a second is enough for at the worst."""
_STATES_A_STEP = 100
_MAX_WORK_WITH_NUMBERS = 300_000
"""In microseconds."""
_WORK_OF_A_PAIR = 6
"""Of numbers in a list without repetitions that are one number to a float, by which the validator looks them up."""
_WORK_OF_A_LONG_NUMBER = 40
_SHOWN = 5

_DRAFTS: Mapping[str, Any] = {
    "https://json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "http://json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "http://json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
}
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LITERAL = frozenset({"const", "enum", "default", "examples"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_NAMED = ("dependentSchemas", "dependencies")
_REQUIRED_BY = ("dependentRequired", "dependencies")
_EACH_VALUE = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_EACH_ITEM = ("items", "additionalItems", "unevaluatedItems", "contains")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Unusable(Exception):
    """Why a schema cannot be used."""

    def __init__(self, text: str, cost: int = 0) -> None:
        super().__init__(text)
        self.cost = cost
        """Of `MAX_COST`, what it took to find out."""


class Schema:
    """A compiled schema. Raises Unusable."""

    def __init__(self, root: Any) -> None:
        size = _bounded(root)
        survey = _survey(root)
        self._root = root
        self._references = {text: _target(text, root, survey) for text in set(survey.references)}
        self._reference_count = len(survey.references)
        self._alternatives = survey.alternatives
        self._options = survey.options
        self._numbers = _Numbers(survey.unique, survey.bounds, survey.finest)
        self._weight = size * _repetition(root, self._references, survey)
        compiling = _compiling(root)
        self._patterns = max(map(_states, _patterns(root)), default=0)
        self._validator = _validator(root, survey.draft, compiling)
        self.cost = compiling.bytes
        """Of `MAX_COST`, what its patterns take when they are compiled."""

    def problem(self, value: Any, name: str, most_bytes: int = MAX_VALUE_BYTES) -> str | None:
        """What is wrong with `value`, called `name`: places and rules, never a value. None when it fits.

        It names properties as they are called, in full: half a name could be half a secret, which the guard would not
        know again. The guard cleans and cuts it before it is shown.
        """
        try:
            size = len(canonical.dumps(value))
        except (ValueError, TypeError, RecursionError):
            return f"{name}: not plain JSON"
        if size > most_bytes:
            return f"{name}: larger than {most_bytes} bytes"
        if size > canonical.MAX_DEPTH and canonical.depth(value) > canonical.MAX_DEPTH:
            return f"{name}: nested deeper than {canonical.MAX_DEPTH} levels"
        if not self._affordable(value, size):
            return f"{name}: too much work to check against this schema"
        try:
            return None if self._validator.is_valid(value) else self._explain(value, name)
        except ValueError:  # a value that the validator cannot convert
            return f"{name}: not plain JSON"

    def _affordable(self, value: Any, size: int) -> bool:
        if self._numbers.work(value) > _MAX_WORK_WITH_NUMBERS:
            return False
        if self._patterns * size > _CHEAP_PATTERNS and not self._within(value, _MAX_STEPS):
            return False
        if self._reference_count > _FEW_REFERENCES or self._options > _FEW_OPTIONS:
            return self._within(value, _MAX_STEPS_BY_REFERENCE)
        return self._weight * size <= _CHEAP or self._within(value, _MAX_STEPS)

    def _explain(self, value: Any, name: str) -> str:
        if self._within(value, _MAX_STEPS_TO_EXPLAIN) and self._explainable(value):
            errors = list(islice(self._validator.iter_errors(value), _SHOWN + 1))
        elif self._reference_count or self._alternatives:
            # A yes or no stops at the first branch that fits, and remembers which references it followed. An error of
            # alternatives holds all errors of all branches, and a list of errors takes every way through references.
            return f"{name}: does not fit the schema"
        else:
            errors = [_first(self._validator, value)]
        problems = [f"{_path(name, error.instance_path)}: {error.message}" for error in errors[:_SHOWN]]
        return "; ".join([*problems, "and more"] if len(errors) > _SHOWN else problems)

    def _explainable(self, value: Any) -> bool:
        """Whether all errors may be made: each of them holds a copy of that part of the value which it is about."""
        weights: dict[int, int] = {}
        listed: dict[int, int] = {}
        work = _weigh(value, weights, _MAX_WORK_TO_EXPLAIN)
        for node, item in self._visits(value) if work <= _MAX_WORK_TO_EXPLAIN else ():
            if id(node) not in listed:
                listed[id(node)] = _listed(node)
            work += (weights[id(item)] + _WORK_OF_AN_ERROR) * (1 + _missing(node, item)) + listed[id(node)]
            if work > _MAX_WORK_TO_EXPLAIN:
                break
        return work <= _MAX_WORK_TO_EXPLAIN

    def _within(self, value: Any, limit: int) -> bool:
        """Whether checking takes no more than so many steps, counted without short cuts."""
        steps = 0
        for node, item in self._visits(value):
            steps += 1
            if isinstance(node, dict):
                steps += _options(node) if self._options else 0
                if isinstance(item, str) and isinstance(node.get("pattern"), str):
                    steps += len(item) * _states(node["pattern"]) // _STATES_A_STEP
                if isinstance(item, dict) and "patternProperties" in node:
                    steps += len(node["patternProperties"] or ()) * len(item)
                    for pattern in node["patternProperties"] or ():
                        steps += sum(map(len, item)) * _states(pattern) // _STATES_A_STEP
            if steps > limit:
                return False
        return True

    def _visits(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """Every part of the schema with every part of the value that it is about, as often as it is."""
        stack = [(self._root, value)]
        while stack:
            node, item = stack.pop()
            yield node, item
            if not isinstance(node, dict):
                continue
            for key in _REFERENCES:
                text = node.get(key)
                if isinstance(text, str):
                    stack.append((self._references[text], item))
            stack.extend((sub, item) for key in _IN_PLACE_LISTS for sub in node.get(key) or ())
            stack.extend((node[key], item) for key in _IN_PLACE if key in node)
            stack.extend((sub, item) for key in _IN_PLACE_NAMED for sub in (node.get(key) or {}).values())
            if isinstance(item, dict):
                stack.extend(_members(node, item))
            elif isinstance(item, list):
                stack.extend(_items(node, item))


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a schema asks of numbers that can take the validator long."""

    unique: bool
    """It has lists without repetitions."""
    bounds: int
    """So many keywords compare a number with theirs."""
    finest: float
    """The smallest `multipleOf`."""

    def work(self, value: Any) -> int:
        """In microseconds, at the most."""
        if not (self.unique or self.bounds):
            return 0
        alike: Counter[float] = Counter()
        long = 0
        for number in _numbers(value):
            size = abs(number)
            if isinstance(number, int):
                if size >= 1 << 53:
                    alike[float(number) if size < _TOO_LARGE else float("inf")] += 1
                long += size >= 1 << 64
            else:
                long += size > self.finest * 2**53
        pairs = sum(count * count for count in alike.values()) if self.unique else 0
        return pairs * _WORK_OF_A_PAIR + long * self.bounds * _WORK_OF_A_LONG_NUMBER


_TOO_LARGE = int(sys.float_info.max)


def _numbers(value: Any) -> Iterator[int | float]:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield item


def _weigh(value: Any, weights: dict[int, int], most: int) -> int:
    """How many values there are in this one, long texts counted as several; for all that are in it, too, unless there
    are more than `most`. Its depth is bounded."""
    weight = 1
    if isinstance(value, str):
        weight += len(value) // _CHARACTERS_A_VALUE
    elif isinstance(value, dict | list):
        weight += len(value) if isinstance(value, dict) else 0  # its keys
        for item in value.values() if isinstance(value, dict) else value:
            if weight > most:
                break
            weight += _weigh(item, weights, most - weight)
    weights[id(value)] = weight
    return weight


def _listed(node: Any) -> int:
    """What it takes to write out the options that an error names, long numbers above all."""
    options = node.get("enum") if isinstance(node, dict) else None
    if not isinstance(options, list):
        return 0
    longs = sum(number.bit_length() >> 6 for number in _numbers(options) if isinstance(number, int))
    return len(options) + longs * _WORK_OF_A_WORD


def _missing(node: Any, item: Any) -> int:
    """How many properties may be named as missing, each by an error of its own."""
    if not isinstance(node, dict) or not isinstance(item, dict):
        return 0
    required = node.get("required")
    lists = [required, *(names for key in _REQUIRED_BY for names in (node.get(key) or {}).values())]
    return sum(len(names) for names in lists if isinstance(names, list))


_REPEATED = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[]", re.DOTALL)


@lru_cache(maxsize=256)
def _states(pattern: str) -> int:
    """About how many states a pattern has with its counted repetitions written out: each character of a text may have
    to be compared with all of them."""
    sizes, last, place = [0], 0, 0  # of each open group so far, and of what a repetition would repeat
    unclosed = False  # a class without an end: it is looked for once
    while place < len(pattern):
        if found := _REPEATED.match(pattern, place):
            times = max(int(found[1]), int(found[2] or 0), 1)
            sizes[-1] += last * (times - 1)
            last = min(last * times, 10**12)
        elif found := None if unclosed and pattern[place] == "[" else _ATOM.match(pattern, place):
            if found[0] == "(":
                sizes.append(0)
            elif found[0] == ")" and len(sizes) > 1:
                last = sizes.pop()
                sizes[-1] += last
            else:
                last = 1
                sizes[-1] += 1
        unclosed = unclosed or (found is None and pattern[place] == "[")
        place = found.end() if found else place + 1
    return min(sum(sizes), 10**12)


def _members(node: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    properties = node.get("properties") or {}
    yield from ((properties[key], value) for key, value in item.items() if key in properties)
    for sub in (node.get("patternProperties") or {}).values():
        yield from ((sub, value) for value in item.values())
    for key in _EACH_VALUE:
        if isinstance(node.get(key), dict):
            yield from ((node[key], value) for value in item.values())


def _items(node: Mapping[str, Any], item: list[Any]) -> Iterator[tuple[Any, Any]]:
    for key in ("prefixItems", "items"):
        if isinstance(node.get(key), list):
            yield from zip(node[key], item, strict=False)
    for key in _EACH_ITEM:
        if isinstance(node.get(key), dict):
            yield from ((node[key], value) for value in item)


def _first(validator: Any, value: Any) -> Any:
    try:
        validator.validate(value)
    except jsonschema_rs.ValidationError as error:
        return error
    raise ValueError("two readings of one value")


def _path(name: str, parts: list[str | int]) -> str:
    return name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


# ── Reading a schema ──────────────────────────────────────────────────────────────────────────────


def _bounded(root: Any) -> int:
    """The schema's size."""
    if not isinstance(root, dict | bool):
        raise Unusable("it is no JSON Schema")
    try:
        size = len(canonical.dumps(root))
    except (ValueError, TypeError, RecursionError):
        raise Unusable("it is not plain JSON") from None
    if size > MAX_SCHEMA_BYTES:
        raise Unusable(f"it is larger than {MAX_SCHEMA_BYTES // 1024} kB")
    if canonical.depth(root) > canonical.MAX_DEPTH:
        raise Unusable(f"it is nested deeper than {canonical.MAX_DEPTH} levels")
    return size


def _options(node: Mapping[str, Any]) -> int:
    options = node.get("enum")
    return sum(isinstance(option, dict | list) for option in options) if isinstance(options, list) else 0


def _fineness(multiple: Any) -> float:
    return float(multiple) if isinstance(multiple, int | float) and 0 < multiple < 1 else 1.0


@dataclass(slots=True)
class _Survey:
    draft: Any
    anchors: dict[str, Any]
    references: list[str]
    nodes: set[int]
    """Which objects were looked at, by their identity."""
    options: int = 0
    alternatives: bool = False
    unique: bool = False
    bounds: int = 0
    finest: float = 1.0


def _survey(root: Any) -> _Survey:
    found = _Survey(jsonschema_rs.Draft202012Validator, {"": root}, [], set())
    embedded = False
    for node in _nodes(root):
        found.nodes.add(id(node))
        found.options += _options(node)
        found.alternatives = found.alternatives or "anyOf" in node or "oneOf" in node
        found.unique = found.unique or node.get("uniqueItems") is True
        found.bounds += sum(name in node for name in _BOUNDS)
        found.finest = min(found.finest, _fineness(node.get("multipleOf")))
        draft = node.get("$schema")
        if isinstance(draft, str):
            if draft.rstrip("#") not in _DRAFTS:
                raise Unusable("its $schema is not a known draft")
            if node is root:
                found.draft = _DRAFTS[draft.rstrip("#")]
        identity = node.get("$id")
        if isinstance(identity, str) and node is not root:
            embedded = embedded or not identity.startswith("#")
            found.anchors[identity.partition("#")[2]] = node
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                found.anchors[node[key]] = node
        found.references.extend(node[key] for key in _REFERENCES if isinstance(node.get(key), str))
    found.anchors[""] = root
    if embedded and found.references:
        # What `#` means would depend on where it stands; hardly any tool does this, and it can hide a bomb.
        raise Unusable("it embeds other schemas by $id and refers to them")
    return found


def _nodes(root: Any) -> Iterator[dict[str, Any]]:
    """Every object of the document that can be a schema."""
    stack = [(root, False)]
    while stack:
        item, named = stack.pop()
        if isinstance(item, list):
            stack.extend((value, False) for value in item)
        elif isinstance(item, dict) and named:
            stack.extend((value, False) for value in item.values())
        elif isinstance(item, dict):
            yield item
            stack.extend((value, key in _NAMED) for key, value in item.items() if key not in _LITERAL)


def _target(reference: str, root: Any, survey: _Survey) -> Any:
    if not reference.startswith("#"):
        raise Unusable("it refers to something outside of itself (a reference must start with #)")
    pointer = unquote(reference[1:])
    if not pointer.startswith("/"):
        found = survey.anchors.get(pointer)
    else:
        found = root
        for part in pointer[1:].split("/"):
            found = _step(found, part.replace("~1", "/").replace("~0", "~"))
    # Into a default or an example too: references there were not counted, so a bomb could hide in it.
    if not isinstance(found, bool) and id(found) not in survey.nodes:
        raise Unusable("one of its references leads to no schema")
    return found


def _repetition(root: Any, references: Mapping[str, Any], survey: _Survey) -> float:
    """How many times larger the schema is with its references written out, recursion cut."""
    if not 0 < len(survey.references) <= _FEW_REFERENCES:
        return 1.0
    count = 0
    stack = [(root, frozenset({id(root)}))]
    while stack:
        start, path = stack.pop()
        for node in _nodes(start):
            count += 1
            targets = (references[node[key]] for key in _REFERENCES if isinstance(node.get(key), str))
            stack.extend((target, path | {id(target)}) for target in targets if id(target) not in path)
    return max(1.0, count / len(survey.nodes))


def _step(item: Any, part: str) -> Any:
    if isinstance(item, dict):
        return item.get(part)
    if isinstance(item, list) and part.isascii() and part.isdigit() and len(part) < 7 and int(part) < len(item):
        return item[int(part)]
    return None


def _never(uri: str) -> Any:
    raise LookupError("nothing is fetched for a schema")


def _compiling(root: Any) -> schema_patterns.Compiling:
    try:
        return schema_patterns.bounded(_patterns(root))
    except schema_patterns.TooCostly:
        raise Unusable("its patterns cost too much to compile", MAX_COST) from None


def _patterns(root: Any) -> Iterator[str]:
    """Every pattern that is compiled: what is no part of a schema that is used is not."""
    for node in _nodes(root):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        if isinstance(node.get("patternProperties"), dict):
            yield from node["patternProperties"]


def _validator(root: Any, draft: Any, compiling: schema_patterns.Compiling) -> Any:
    try:
        return draft(root, retriever=_never, mask="the value", pattern_options=compiling.options)
    except (ValueError, jsonschema_rs.ReferencingError):
        raise Unusable("it is no valid JSON Schema", compiling.bytes) from None
