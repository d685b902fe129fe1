"""Which packages may be had."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.packages.allowlist import AllowedPackage, Allowlist, normalized

DIGEST = "0" * 64
OTHER = "1" * 64


@pytest.mark.parametrize(
    ("entry", "requirement", "expected"),
    [
        ("six", "six", True),
        ("six", "Six==1.16.0", True),
        ("six", "six[extra]>=1", True),
        ("six", "sixer", False),
        ("Typing.Extensions", "typing_extensions", True),
        ("py*", "pytest", True),
        ("py*", "numpy", False),
        ("*", "anything", True),
        ("six==1.16.0", "six==1.16.0", True),
        ("six==1.16.0", "six", False),
        ("six==1.16.0", "six==1.17.0", False),
        ("six==1.16.0", "six>=1.16.0", False),
        ("six==1.16.0", "six==1.16.0,!=2", False),
        (f"six==1.16.0 --hash=sha256:{DIGEST}", f"six==1.16.0 --hash=sha256:{DIGEST}", True),
        (f"six==1.16.0 --hash=sha256:{DIGEST}", "six==1.16.0", False),
        (
            f"six==1.16.0 --hash=sha256:{DIGEST}",
            f"six==1.16.0 --hash=sha256:{DIGEST} --hash=sha256:{OTHER}",
            False,
        ),
    ],
)
def test_what_an_entry_lets_in(entry: str, requirement: str, expected: bool) -> None:
    assert Allowlist([entry]).let(requirement) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-r x",
        "six>=1",
        "six==",
        "https://x.example/y",
        "six --hash=sha256:00",
        f"six --hash=sha256:{DIGEST}",
        "a b",
    ],
)
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match="name or pattern"):
        AllowedPackage.of(text)


def test_where_pins_are_required_an_entry_without_one_lets_nothing_in() -> None:
    texts = ["six", "rich==1.0", f"idna==2.0 --hash=sha256:{DIGEST}"]
    assert [name for name in ("six", "rich", "idna") if Allowlist(texts).name(name)] == ["six", "rich", "idna"]
    assert [name for name in ("six", "rich", "idna") if Allowlist(texts, "pinned").name(name)] == ["rich", "idna"]
    assert [name for name in ("six", "rich", "idna") if Allowlist(texts, "hashed").name(name)] == ["idna"]


@given(st.text())
def test_a_name_has_one_spelling_or_none(text: str) -> None:
    try:
        name = normalized(text)
    except ValueError:
        return
    assert normalized(name) == name and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert Allowlist([name]).let(text)


@given(st.text(max_size=40), st.text(max_size=40))
def test_nothing_is_let_in_by_accident(entry: str, requirement: str) -> None:
    try:
        entries = Allowlist([entry])
    except ValueError:
        return
    if entries.let(requirement) and not set(entry) & set("*?[]"):
        assert requirement[:1].isascii() and requirement[:1].isalnum()
