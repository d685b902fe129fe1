"""Addresses of files in sessions: there and back, and nothing but results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.sandbox.tools.resources import address, as_text, located, normal_address, type_of

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20)


@given(st.text("abcdef0123456789_", min_size=1), st.lists(NAMES.filter(lambda n: n not in (".", "..")), min_size=1))
def test_an_address_leads_back(session: str, names: list[str]) -> None:
    path = "/workspace/output/" + "/".join(names)
    assert located(address(session, path)) == (session, path)


@pytest.mark.parametrize(
    "rest",
    [
        *(
            "output/secret.txt",
            "output/%73ecret.txt",
            "output/./secret.txt",
            "output//secret.txt",
            "output/%2e/secret.txt",
        ),
        *("outpu%74/secret.txt", "output%2Fsecret.txt", "output/secret.txt/", "output/secret%2etxt"),
    ],
)
def test_every_address_of_a_file_has_one_form(rest: str) -> None:
    assert normal_address(f"ringfence://session/box_1/{rest}") == "ringfence://session/box_1/output/secret.txt"
    assert normal_address(f"ringfence://session/%62ox_1/{rest}") == "ringfence://session/box_1/output/secret.txt"


@pytest.mark.parametrize("rest", ["output/d/../secret.txt", "output/%2e%2e/x", "input/x", "../output/x", ""])
def test_what_is_no_file_of_the_output_has_no_address(rest: str) -> None:
    assert normal_address(f"ringfence://session/box_1/{rest}") is None


@given(st.text(max_size=60))
def test_the_one_form_stays_and_leads_to_the_same_file(text: str) -> None:
    uri = f"ringfence://session/s/output/{text}"
    normal = normal_address(uri)
    if normal not in (None, "ringfence://session/s/output"):  # that is the folder itself, which cannot be read
        assert normal is not None and normal_address(normal) == normal
        there, here = located(uri), located(normal)
        assert there is not None and here is not None
        assert "/" + "/".join(part for part in there[1].split("/") if part not in ("", ".")) == here[1]


@given(st.text(max_size=200))
def test_no_text_leads_out(text: str) -> None:
    for uri in (text, f"ringfence://session/{text}", f"ringfence://session/s/output/{text}"):
        found = located(uri)
        assert found is None or (found[1].startswith("/workspace/output/") and ".." not in found[1].split("/"))


@pytest.mark.parametrize(
    ("path", "data", "mime"),
    [
        ("a.txt", b"x", "text/plain"),
        ("a.csv", b"x,y", "text/csv"),
        ("a.SVG", b"<svg/>", "image/svg+xml"),
        ("a.png", b"text", "text/plain"),
        ("a", b"\x89PNG\r\n\x1a\nrest", "image/png"),
        ("a.txt", b"\xff\xd8\xff\xe0", "image/jpeg"),
        ("a", b"GIF89a", "image/gif"),
        ("a", b"RIFF\0\0\0\0WEBP", "image/webp"),
        ("a.csv", b"\0\1", "application/octet-stream"),
        ("a", b"\xff\xfe", "application/octet-stream"),
        ("a", b"", "text/plain"),
    ],
)
def test_a_type_is_told_from_what_is_in_it(path: str, data: bytes, mime: str) -> None:
    assert type_of(path, data) == mime


def test_text_is_what_can_be_read() -> None:
    assert (as_text("grüß".encode()), as_text(b"a\0b"), as_text(b"\xff")) == ("grüß", None, None)
