"""Names of images: what is one, whose it is, and that it is written as it was read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.packages.images.references import Reference

DIGEST = "sha256:" + "0a" * 32
PARTS = st.from_regex(r"[a-z0-9]+([._-][a-z0-9]+){0,2}", fullmatch=True).filter(lambda part: len(part) < 40)
HOSTS = st.from_regex(r"[a-z0-9]{1,8}\.[a-z]{2,4}(:[1-9][0-9]{0,3})?|localhost(:5000)?|\[::1\]:80", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "host", "name", "tag", "digest"),
    [
        ("fetch", "", "fetch", "latest", ""),
        ("mcp/fetch:1.2", "", "mcp/fetch", "1.2", ""),
        ("corp.example/fetch", "corp.example", "fetch", "latest", ""),
        ("CORP.example:443/a/b:t", "corp.example:443", "a/b", "t", ""),
        ("localhost/x", "localhost", "x", "latest", ""),
        ("me/x", "", "me/x", "latest", ""),
        (f"127.0.0.1:5000/x@{DIGEST}", "127.0.0.1:5000", "x", "", DIGEST),
        (f"[::1]:5000/x:t@{DIGEST}", "[::1]:5000", "x", "t", DIGEST),
        ("x:5000", "", "x", "5000", ""),
    ],
)
def test_read(text: str, host: str, name: str, tag: str, digest: str) -> None:
    assert Reference.of(text) == Reference(host, name, tag, digest)


@pytest.mark.parametrize(
    "text",
    [
        *("", "-x", "X", "x/", "/x", "x//y", "x:", "x@", "../x", "a..b", "x y", "x\n", "http://h.example/x", "h:0/x"),
        *("h:70000/x", "me@h.example/x", "*.example/x", "x@sha256:0", "x@md5:" + "0" * 32, "Reg/x", "a/" * 200 + "a"),
        "é",
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"image|host|port"):
        Reference.of(text)


@given(
    host=st.just("") | HOSTS,
    parts=st.lists(PARTS, min_size=1, max_size=3),
    tag=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    digest=st.sampled_from(["", DIGEST]),
)
def test_what_is_written_is_read_as_it_was(host: str, parts: list[str], tag: str, digest: str) -> None:
    reference = Reference(host, "/".join(parts), tag, digest)
    if not host and len(parts) > 1 and "." in parts[0]:
        assert Reference.of(str(reference)).host == parts[0]
    else:
        assert Reference.of(str(reference)) == reference


@given(st.text(max_size=600))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        found = Reference.of(text)
    except ValueError:
        return
    assert Reference.of(str(found)) == found
    assert not set(str(found)) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/@[]")
