"""Addresses of registries, and who is to be let in there."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.packages.registries import _in_addresses, _without

TEXT = st.text(alphabet="abcXYZ019-._~", min_size=1, max_size=20)


@given(TEXT, TEXT)
def test_who_is_let_in_is_taken_out_of_the_address(user: str, password: str) -> None:
    url = f"https://{user}:{password}@index.example:8443/simple/"
    (found,) = _in_addresses([url])
    assert (found.host, found.port) == ("index.example", 8443)
    assert base64.b64decode(found.header.removeprefix("Basic ")).decode() == f"{user}:{password}"
    assert _without(url) == "https://index.example:8443/simple/"
    assert found.header not in repr(found)


@pytest.mark.parametrize("url", ["https://index.example/simple", "file:///srv/simple", "/srv/wheels", "wheels@2"])
def test_other_places_stay_as_they_are(url: str) -> None:
    assert _without(url) == url and list(_in_addresses([url])) == []


def test_what_is_escaped_in_an_address_is_not_in_the_header() -> None:
    (found,) = _in_addresses(["https://me%40home:p%2Fq@index.example/"])
    assert base64.b64decode(found.header.removeprefix("Basic ")) == b"me@home:p/q"
    assert _without("https://me%40home:p%2Fq@index.example/") == "https://index.example/"


def test_over_plain_http_there_is_none() -> None:
    with pytest.raises(Unavailable, match="plain HTTP"):
        list(_in_addresses(["http://me:password@index.example/"]))
