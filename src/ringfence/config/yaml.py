"""YAML 1.2 read into plain values, with the place of every key and value.

Only what a configuration needs is taken: one document of mappings, lists, text, numbers, true, false and null.
Anchors, aliases, tags, duplicate keys and absurd nesting are problems, never repaired: two readers of one file
must agree on what it says. Words are words (`off` is text): only `true` and `false` are truth values.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from ringfence.core import invisible, system
from ringfence.core.errors import Problem
from ringfence.core.record import dataclass

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 50_000
MAX_DIGITS = 100
MAX_TEXT = 300
MAX_PROBLEMS = 200
"""A file that has more that cannot even be read is no configuration with mistakes; the rest is not listed."""

Where = tuple[str | int, ...]
"""The way to a value: keys and list positions from the top of the file."""


@dataclass(frozen=True, slots=True)
class Position:
    line: int
    column: int


TOP = Position(1, 1)


@dataclass(slots=True)
class YamlSource:
    """One file as it was read."""

    file: str
    value: Any = None
    places: dict[Where, Position] = field(default_factory=dict)
    keys: dict[Where, Position] = field(default_factory=dict)
    inside: dict[Where, Position] = field(default_factory=dict)
    """Where the text of a scalar begins, for those that stand on one line exactly as they read."""
    problems: list[Problem] = field(default_factory=list)

    def known(self, where: Where) -> Where:
        """The part of `where` that the file really has; steps that are not in the file are left out."""
        found: Where = ()
        for step in where:
            if (*found, step) in self.places:
                found = (*found, step)
        return found

    def place(self, where: Where, *, key: bool = False) -> Position:
        """Where the value stands (or its key); for what is not in the file, the nearest thing around it."""
        found = self.known(where)
        if key and found in self.keys:
            return self.keys[found]
        return self.places.get(found, TOP)

    def problem(self, where: Where, text: str, *, key: bool = False) -> Problem:
        place = self.place(where, key=key)
        return Problem(self.file, place.line, place.column, one_line(text))

    def problem_inside(self, where: Where, text: str, line: int, column: int) -> Problem:
        """A problem within the text of a value, line and column counted from 0; at its start where that is unsure."""
        found = self.inside.get(self.known(where))
        if found is None or line != 0:
            return self.problem(where, text)
        return Problem(self.file, found.line, found.column + column, one_line(text))


def read_file(path: Path, file: str) -> tuple[str | None, list[Problem]]:
    """The text of a regular file, at most MAX_BYTES of it."""
    try:
        # Not blocking: a pipe in a configuration's place must not hang the gateway.
        descriptor = os.open(path, os.O_RDONLY | system.UNHURRIED)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None, [Problem(file, 1, 1, "is not a regular file")]
        with open(descriptor, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as exc:
        return None, [Problem(file, 1, 1, f"cannot be read: {exc.strerror or exc}")]
    except ValueError:
        return None, [Problem(file, 1, 1, "cannot be read: its name is not a path")]
    if len(data) > MAX_BYTES:
        return None, [_too_big(file)]
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as exc:
        before = data[: exc.start].decode("utf-8")
        place = _place_of(before, len(before))
        return None, [Problem(file, place.line, place.column, f"invalid UTF-8 (byte 0x{data[exc.start]:02x})")]


def parse(text: str, file: str) -> YamlSource:
    """Read one document. What is wrong with it is in `problems`; what could be read all the same is in `value`."""
    source = YamlSource(file)
    if len(text) > MAX_BYTES:
        source.problems.append(_too_big(file))
        return source
    text = text.removeprefix("\ufeff")
    reader = _Reader(source, text)
    try:
        for event in _events(text):
            reader.take(event)
    except _Enough:
        pass
    except MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = Position(mark.line + 1, mark.column + 1) if mark is not None else TOP
        source.problems.append(Problem(file, place.line, place.column, _syntax(str(exc.problem or exc.context))))
    except ReaderError as exc:
        place = _place_of(text, exc.position)
        number = exc.character if isinstance(exc.character, int) else ord(exc.character)
        source.problems.append(
            Problem(file, place.line, place.column, f"not YAML: the character U+{number:04X} is not allowed")
        )
    except (YAMLError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, AssertionError) as exc:
        # The parser has faults of its own on hostile text (an escape beyond Unicode, for one).
        source.problems.append(Problem(file, reader.last.line, reader.last.column, f"not YAML: {exc}"))
    return source


def _events(text: str) -> Iterator[Event]:
    yield from YAML(typ="safe", pure=True).parse(text)


class _Enough(Exception):
    """Nothing after this can be read sensibly."""


@dataclass(slots=True)
class _Open:
    """A mapping or list that is being read."""

    value: dict[str, Any] | list[Any]
    where: Where
    kept: bool
    """False below something that was refused: it is read past, not remembered."""
    is_key: bool = False
    key: str | None = None
    awaits_key: bool = True


class _Reader:
    def __init__(self, source: YamlSource, text: str) -> None:
        self._source = source
        self._text = text
        self._stack: list[_Open] = []
        self._nodes = 0
        self._documents = 0
        self.last = TOP

    def take(self, event: Event) -> None:
        mark = event.start_mark
        if mark is not None:
            self.last = Position(mark.line + 1, mark.column + 1)
        if isinstance(event, DocumentStartEvent):
            self._document(event)
        elif isinstance(event, MappingStartEvent | SequenceStartEvent):
            self._refuse_marks(event)
            self._open({} if isinstance(event, MappingStartEvent) else [])
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            self._close()
        elif isinstance(event, ScalarEvent):
            self._refuse_marks(event)
            self._scalar(event)
        elif isinstance(event, AliasEvent):
            self._problem("aliases (*name) are not taken: write the value out")
            self._refused()

    def _problem(self, text: str) -> None:
        self._source.problems.append(Problem(self._source.file, self.last.line, self.last.column, text))
        if len(self._source.problems) >= MAX_PROBLEMS:
            raise _Enough

    def _document(self, event: DocumentStartEvent) -> None:
        self._documents += 1
        if self._documents > 1:
            self._problem("a second document: one file holds one")
            raise _Enough
        if event.version not in (None, (1, 2)):
            self._problem("only YAML 1.2 is read")

    def _refuse_marks(self, event: ScalarEvent | MappingStartEvent | SequenceStartEvent) -> None:
        if event.anchor is not None:
            self._problem("anchors (&name) are not taken: write the value out")
        if event.tag is not None:
            self._problem("tags (!name) are not taken")

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._problem(f"more than {MAX_NODES} values")
            raise _Enough

    # ── Where the next value belongs ──

    def _next(self) -> tuple[Where, bool]:
        """Path of the value that comes now, and whether it is remembered."""
        if not self._stack:
            return (), True
        parent = self._stack[-1]
        if isinstance(parent.value, list):
            return (*parent.where, len(parent.value)), parent.kept
        if parent.key is None:
            return parent.where, False
        return (*parent.where, parent.key), parent.kept

    def _put(self, value: Any) -> None:
        if not self._stack:
            self._source.value = value
            return
        parent = self._stack[-1]
        if isinstance(parent.value, list):
            parent.value.append(value)
        else:
            if parent.key is not None:
                parent.value[parent.key] = value
            parent.awaits_key = True

    def _awaits_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1].value, dict) and self._stack[-1].awaits_key

    def _take_key(self, key: str | None) -> None:
        self._stack[-1].key = key
        self._stack[-1].awaits_key = False

    def _refused(self) -> None:
        """Something stands here that is not taken."""
        if self._awaits_key():
            self._take_key(None)
            return
        where, kept = self._next()
        if kept:
            self._source.places[where] = self.last
        self._put(None)

    # ── Events ──

    def _open(self, value: dict[str, Any] | list[Any]) -> None:
        self._count()
        if len(self._stack) >= MAX_DEPTH:
            self._problem(f"nested deeper than {MAX_DEPTH} levels")
            raise _Enough
        if self._awaits_key():
            self._problem("a key must be text")
            self._stack.append(_Open(value, self._stack[-1].where, kept=False, is_key=True))
            return
        where, kept = self._next()
        if kept:
            self._source.places[where] = self.last
        self._stack.append(_Open(value, where, kept))

    def _close(self) -> None:
        done = self._stack.pop()
        if done.is_key:
            self._take_key(None)
        else:
            self._put(done.value)

    def _scalar(self, event: ScalarEvent) -> None:
        self._count()
        text = str(event.value)
        if _NOT_TEXT.search(text):
            self._problem("a NUL or a lone surrogate is not text")
            self._refused()
            return
        plain = event.style in (None, "") and event.implicit[0]
        value = self._resolve(text) if plain else text
        if self._awaits_key():
            self._key(value)
            return
        where, kept = self._next()
        if kept:
            self._source.places[where] = self.last
            raw = self._text[event.start_mark.index : event.end_mark.index]
            if raw == text:
                self._source.inside[where] = self.last
            elif raw[1:-1] == text and raw[:1] in "'\"":
                self._source.inside[where] = Position(self.last.line, self.last.column + 1)
        self._put(value)

    def _key(self, value: Any) -> None:
        parent = self._stack[-1]
        if not isinstance(value, str):
            self._problem(f"a key must be text, this is {kind(value)} (quote it)")
            self._take_key(None)
            return
        where = (*parent.where, value)
        if parent.kept and where in self._source.keys:
            first = self._source.keys[where]
            self._problem(f"duplicate key {value!r} (first at line {first.line})")
            self._take_key(None)
            return
        if parent.kept:
            self._source.keys[where] = self.last
        self._take_key(value)

    def _resolve(self, text: str) -> Any:
        """A plain scalar by YAML 1.2's core schema."""
        if text in _WORDS:
            return _WORDS[text]
        for pattern, convert in _NUMBERS:
            if pattern.fullmatch(text):
                if len(text) > MAX_DIGITS:
                    self._problem(f"a number of more than {MAX_DIGITS} digits")
                    return None
                return convert(text)
        return text


_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
)


def one_line(text: str) -> str:
    """Fit for a list of problems and for a terminal: what engines say may be long, and quotes what the file holds."""
    line = invisible.quotable(text, lambda c: " " if c.isspace() else invisible.escape(c)).strip()
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


def kind(value: Any) -> str:
    """What a value is, in words for a person."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping"


def _syntax(problem: str) -> str:
    if "'\\t'" in problem:
        return "not YAML: a tab where spaces are needed"
    return f"not YAML: {problem}"


def _too_big(file: str) -> Problem:
    return Problem(file, 1, 1, f"larger than {MAX_BYTES} bytes")


def _place_of(text: str, index: int) -> Position:
    before = text[:index]
    return Position(before.count("\n") + 1, index - before.rfind("\n"))
