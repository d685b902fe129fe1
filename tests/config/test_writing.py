"""A configuration that is written reads back as what was meant, whatever stands in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import config
from ringfence.config import writing, yaml
from ringfence.config.writing import draft_contract

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4), st.lists(texts, max_size=3))
def test_it_reads_back_as_it_was_meant(keys: dict[str, Any], remarks: list[str]) -> None:
    text = writing.configuration(remarks, {"servers": [writing.WrittenEntry("it", keys, remarks)]})
    found = yaml.parse(text, "x")
    assert found.problems == []
    assert found.value == {"version": 1, "servers": {"it": keys}}


def test_the_first_file_loads(tmp_path: Any) -> None:
    settings = config.loads(writing.STARTER, file="ringfence.yaml", base=tmp_path)
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("name", "hints", "keys"),
    [
        ("list_files", {"readOnlyHint": True}, {"mode": "read"}),
        ("list_files", {}, {"mode": "write"}),
        ("list_files", None, {"mode": "write"}),
        ("list_files", {"readOnlyHint": "true"}, {"mode": "write"}),
        ("delete_file", {"readOnlyHint": True}, {"mode": "write"}),
        ("writeFile", {"readOnlyHint": True}, {"mode": "write"}),
        ("list_files", {"readOnlyHint": True, "destructiveHint": True}, {"mode": "write", "approval": "always"}),
        ("drop", {"destructiveHint": True}, {"mode": "write", "approval": "always"}),
    ],
)
def test_a_draft_is_cautious(name: str, hints: Any, keys: dict[str, str]) -> None:
    assert draft_contract({"name": name, "annotations": hints}) == keys
