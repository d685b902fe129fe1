"""Plain data: what most things are that pass from module to module.

A process loads many more kinds of records than it makes records of. The standard library writes and compiles the
methods of each when its module is loaded, which took a third of the time of a whole `ringfence run`. Here they are
shared by all, except for `__init__`, which is compiled when more than a few records of its kind are made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, field
from functools import cache
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

T = TypeVar("T")
_FEW = 4
"""Records of a kind that are made without an `__init__` of their own: of most kinds a process makes no more."""

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, order=False, unsafe_hash=False):
        """As `dataclasses.dataclass`; so are `fields`, `replace`, `asdict` and the rest of that module."""

        def decorate(cls: type) -> type:
            if order or not slots or not eq or cls.__bases__ != (object,):
                made = dataclasses.dataclass(frozen=frozen, slots=slots, eq=eq, order=order, unsafe_hash=unsafe_hash)
                return made(cls)
            return _record(cls, frozen=frozen, hashed=frozen or unsafe_hash)

        return decorate if cls is None else decorate(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def plain(cls: type[T]) -> type[T]:
    """`dataclass(frozen=True, slots=True)`, except that only the type checker sees to it that nothing is changed.

    At run time that would make each of the dozens that every call needs seven times as slow to make. What is made
    seldom is a frozen dataclass.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


# ── How a record is made ──────────────────────────────────────────────────────────────────────────


def _record(cls: type, *, frozen: bool, hashed: bool) -> type:
    """The class with slots for its fields and with the methods of a record, but for those that it has itself."""
    names = tuple(cls.__annotations__)
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    for name, value in defaults.items():
        if type(value).__hash__ is None:
            raise ValueError(f"mutable default {type(value)} for field {name}: use default_factory")
    body = {name: value for name, value in cls.__dict__.items() if name not in (*names, "__dict__", "__weakref__")}
    own_hash = body.get("__hash__") is not None
    body |= {"__slots__": names, "__match_args__": names, "__qualname__": cls.__qualname__}
    body["__dataclass_fields__"] = _Fields(cls.__annotations__, defaults)
    body.setdefault("__repr__", _repr)
    if "__eq__" not in body:
        body["__eq__"] = _comparison(_compared(names, defaults))
    if not own_hash:
        body["__hash__"] = _hashing(_compared(names, defaults)) if hashed else None
    if frozen:
        body |= {"__setattr__": _refuse_set, "__delattr__": _refuse_delete}
        body |= {"__getstate__": _state, "__setstate__": _restore}
    made: type = type(cls)(cls.__name__, (), body)
    few = 0

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal few
        few += 1
        if few > _FEW or not _filled(self, names, defaults, args, kwargs):
            if made.__init__ is init:  # type: ignore[misc]
                made.__init__ = _init(made, names, defaults, frozen=frozen)  # type: ignore[misc]
            made.__init__(self, *args, **kwargs)  # type: ignore[misc]

    made.__init__ = init  # type: ignore[misc]
    return made


def _filled(self: Any, names: tuple[str, ...], defaults: dict[str, Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Set the fields of one of the first records. Returns False where that is for `__init__`: of what is wrong, say."""
    if len(args) > len(names):
        return False
    values = dict(zip(names, args, strict=False))
    if values.keys() & kwargs.keys():
        return False
    values |= kwargs
    for name in names:
        default = defaults.get(name, MISSING)
        if isinstance(default, Field):
            if not default.init:
                return False
            made = default.default_factory
            default = default.default
            if made is not MISSING and name not in values:
                values[name] = made()
        if default is not MISSING:
            values.setdefault(name, default)
    if len(values) != len(names) or values.keys() != set(names):
        return False
    for name in names:
        object.__setattr__(self, name, values[name])
    if hasattr(self, "__post_init__"):
        self.__post_init__()
    return True


def _init(cls: type, names: tuple[str, ...], defaults: dict[str, Any], *, frozen: bool) -> Callable[..., None]:
    """The `__init__` that a person would write for these fields."""
    parameters: list[str] = []
    lines: list[str] = []
    given: dict[str, Any] = {"_set": object.__setattr__, "_made": object()}
    assign = "_set(self, {0!r}, {1})" if frozen else "self.{0} = {1}"
    for name in names:
        default = defaults.get(name, MISSING)
        made = default.default_factory if isinstance(default, Field) else MISSING
        taken = default.init if isinstance(default, Field) else True
        value = default.default if isinstance(default, Field) else default
        given |= {f"_of_{name}": value if made is MISSING else made}
        if made is not MISSING:
            parameters += [f"{name}=_made"] if taken else []
            said = f"_of_{name}() if {name} is _made else {name}" if taken else f"_of_{name}()"
        elif taken:
            parameters.append(name if value is MISSING else f"{name}=_of_{name}")
            said = name
        elif value is MISSING:
            continue  # `__post_init__` sets it
        else:
            said = f"_of_{name}"
        lines.append(assign.format(name, said))
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    head = ", ".join(("self", *parameters))
    exec(f"def __init__({head}):\n " + ("\n ".join(lines) or "pass"), given)  # noqa: S102 - of names of ours alone
    init: Callable[..., None] = given["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


class _Fields:
    """`__dataclass_fields__`, by which the standard library knows a dataclass: asked for by few, and made for them."""

    def __init__(self, kinds: dict[str, Any], defaults: dict[str, Any]) -> None:
        self._kinds = kinds
        self._defaults = defaults

    def __get__(self, record: object, owner: type) -> dict[str, Field[Any]]:
        fields: dict[str, Field[Any]] = {}
        for name, kind in self._kinds.items():
            default = self._defaults.get(name, MISSING)
            each: Any = default if isinstance(default, Field) else field(default=default)
            fields[name] = each
            each.name = name
            each.type = kind
            each.kw_only = False
            each._field_type = _ordinary()
        owner.__dataclass_fields__ = fields  # type: ignore[attr-defined]
        return fields


@cache
def _ordinary() -> Any:
    """How the standard library marks a field of the usual sort. To make a dataclass, as an example to look at, loads a
    parser of Python."""
    known: Any = getattr(dataclasses, "_FIELD", None)
    if known is not None:
        return known

    @dataclasses.dataclass(init=False, repr=False, eq=False)
    class Example:
        """A dataclass with a field."""

        value: int

    example: Any = dataclasses.fields(Example)[0]
    return example._field_type


def _compared(names: tuple[str, ...], defaults: dict[str, Any]) -> Callable[[Any], Any]:
    """Takes from a record what makes it equal to another."""
    chosen = [n for n in names if not isinstance(value := defaults.get(n), Field) or value.compare]
    if len(chosen) > 1:
        return attrgetter(*chosen)
    return lambda record: tuple(getattr(record, name) for name in chosen)


def _comparison(key: Callable[[Any], Any]) -> Callable[[Any, object], bool]:
    def equal(self: Any, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented  # type: ignore[no-any-return]
        same: bool = key(self) == key(other)
        return same

    return equal


def _hashing(key: Callable[[Any], Any]) -> Callable[[Any], int]:
    return lambda self: hash(key(self))


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (each.name for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def _refuse_set(self: Any, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__slots__]


def _restore(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__slots__, state, strict=True):
        object.__setattr__(self, name, value)
