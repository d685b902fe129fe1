"""Records: everything that a dataclass of the standard library does, they do too."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from ringfence.core.record import dataclass, plain


@dataclass(frozen=True, slots=True)
class Ours:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False)
    d: str = field(default="d", repr=False)


@dataclass(slots=True)
class Changing:
    a: int
    b: int = field(init=False)

    def __post_init__(self) -> None:
        self.b = self.a + 1


@plain
class Plain:
    a: int
    b: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Theirs:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False)
    d: str = field(default="d", repr=False)


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_it_is_as_the_standard_library_makes_it(kind: Any) -> None:
    one = kind(1, c=[3])
    assert (one.a, one.b, one.c, one.d) == (1, "b", [3], "d")
    assert one == kind(1) and one != kind(2) and one != (1, "b", [3], "d")
    assert hash(one) == hash(kind(1)) and len({one, kind(1), kind(2)}) == 2
    assert repr(one) == f"{kind.__name__}(a=1, b='b', c=[3])"
    assert dataclasses.replace(one, a=5) == kind(5)
    assert dataclasses.asdict(one) == {"a": 1, "b": "b", "c": [3], "d": "d"}
    assert [each.name for each in dataclasses.fields(kind)] == ["a", "b", "c", "d"]
    known: bool = dataclasses.is_dataclass(kind)
    assert known and not hasattr(one, "__dict__")
    assert kind(1).c is not kind(1).c
    for another in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert another == one and another.c == [3]
    match one:
        case kind(a, b):
            assert (a, b) == (1, "b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.a = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.a
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'a'"):
        kind()
    with pytest.raises(TypeError, match="unexpected keyword argument 'e'"):
        kind(1, e=2)


def test_one_that_changes() -> None:
    one = Changing(1)
    one.a = 7
    assert (one.a, one.b) == (7, 2) and dataclasses.replace(one).b == 8
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.other = 1  # type: ignore[attr-defined]


def test_one_that_only_the_type_checker_keeps_from_changing() -> None:
    assert hash(Plain(1, (2,))) == hash(Plain(1, (2,)))
    assert repr(Plain(1)) == "Plain(a=1, b=())"


def test_a_default_that_all_would_share_is_refused() -> None:
    with pytest.raises(ValueError, match="default_factory"):

        @dataclass(slots=True)
        class Shared:
            a: list[int] = []  # noqa: RUF012


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_many_are_made_as_the_first_are(kind: Any) -> None:
    made = [kind(number, d=str(number)) for number in range(20)]
    assert [(one.a, one.b, one.c, one.d) for one in made] == [(n, "b", [], str(n)) for n in range(20)]
    with pytest.raises(TypeError, match="multiple values for argument 'a'"):
        kind(1, a=2)
    with pytest.raises(TypeError, match="takes from 2 to 5 positional arguments but 6 were given"):
        kind(1, 2, 3, 4, 5)
