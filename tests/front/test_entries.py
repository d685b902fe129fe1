"""Entries of lists: fit for clients of a revision, without nulls that only some clients take, or unfit."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.front import entries
from ringfence.front.entries import Kind, MalformedEntry
from ringfence.upstream.link import HANDSHAKE, MODERN

TOOL = {"name": "t", "inputSchema": {"type": "object", "properties": {"a": {"type": "string", "default": None}}}}


@pytest.mark.parametrize("version", [HANDSHAKE, MODERN, "2024-11-05"])
def test_what_fits_stays_the_very_same(version: str) -> None:
    body = {**TOOL, "x-unknown": {"n": None}, "icons": [], "_meta": {"a": None}, "outputSchema": {"type": "object"}}
    assert entries.as_listed("tool", body, version) is body


def test_a_null_for_what_may_be_missing_is_taken_away_and_nothing_else_is() -> None:
    body = {**TOOL, "title": None, "annotations": {"title": None, "x": None}, "icons": [{"src": "a", "sizes": None}]}
    shown = {**TOOL, "annotations": {"x": None}, "icons": [{"src": "a"}]}
    assert entries.as_listed("tool", {**body, "y": None}, MODERN) == {**shown, "y": None}
    assert body["title"] is None, "what was read stays as it is: it is pinned"


@pytest.mark.parametrize(
    ("kind", "body", "place"),
    [
        ("tool", {"name": "t"}, "inputSchema"),
        ("tool", {**TOOL, "inputSchema": {"type": "string"}}, "inputSchema.type"),
        ("tool", {**TOOL, "inputSchema": {}}, "inputSchema.type"),
        ("tool", {**TOOL, "title": 5}, "title"),
        ("tool", {**TOOL, "annotations": []}, "annotations"),
        ("tool", {**TOOL, "annotations": {"readOnlyHint": 1}}, "annotations.readOnlyHint"),
        ("tool", {**TOOL, "icons": [{}]}, "icons.0.src"),
        ("tool", {**TOOL, "name": ""}, "name"),
        ("tool", {**TOOL, "name": "n" * 257}, "name"),
        ("tool", {**TOOL, "name": None}, "name"),
        ("tool", {**TOOL, "_meta": "x"}, "_meta"),
        ("prompt", {"name": "p", "arguments": {}}, "arguments"),
        ("prompt", {"name": "p", "arguments": [{"name": "a", "required": "no"}]}, "arguments.0.required"),
        ("resource", {"name": "r"}, "uri"),
        ("resource", {"name": "r", "uri": "nowhere"}, "uri"),
        ("resource", {"name": "r", "uri": "a:b", "size": 1.5}, "size"),
        ("resource", {"uri": "a:b"}, "name"),
        ("resource", {"name": "r", "uri": "a:b", "annotations": {"audience": ["machine"]}}, "annotations.audience.0"),
        ("template", {"name": "r", "uri": "a:{b}"}, "uriTemplate"),
    ],
    ids=str,
)
def test_what_clients_would_refuse_a_whole_list_for_is_malformed(kind: Kind, body: Any, place: str) -> None:
    for version in entries.REVISIONS:
        with pytest.raises(MalformedEntry, match=f"^{place}: "):
            entries.as_listed(kind, body, version)
    assert entries.problem(kind, body) is not None


def test_a_client_of_the_handshake_era_is_not_told_of_an_output_that_it_does_not_know() -> None:
    body = {**TOOL, "outputSchema": {"type": "array"}}
    assert entries.as_listed("tool", body, HANDSHAKE) == TOOL
    assert entries.as_listed("tool", body, MODERN) is body


def test_what_only_some_clients_can_read_is_a_matter_of_the_revision() -> None:
    odd = {**TOOL, "inputSchema": {"type": "object", "properties": {"a": 5}}}
    assert entries.problem("tool", odd) is None
    with pytest.raises(MalformedEntry, match=r"inputSchema\.properties\.a"):
        entries.as_listed("tool", odd, HANDSHAKE)
    assert entries.as_listed("tool", odd, MODERN) is odd
