"""Whatever the file holds, the answer is a Config or a ConfigError with places."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import config
from ringfence.config import draft, schema
from ringfence.core.errors import ConfigError
from tests import tooling

VALID = """\
version: 1
environment: development
gateway: {listen: "127.0.0.1:8700", state: ./state}
people: {alice: {roles: [manager], os_user: alice}}
servers:
  files: {command: [node, server.js], env: {LEVEL: info}, resources: ["file:///*"]}
  helpdesk: {url: "https://helpdesk.corp.example/mcp"}
capabilities:
  read: {server: files, mode: read, rate: {per_minute: 6, burst: 2}}
  create:
    server: helpdesk
    network: inside
    idempotent: {key: 'args.title'}
    approval: managers
    result: {fields: [id]}
networks: {inside: {allow: ["*.corp.example:443"]}}
secrets: {token: {from: env, name: TOKEN, hosts: [h.corp.example], header: Authorization}}
approvals: {managers: {when: 'has(args.p) && args.p == "high"', roles: [manager]}}
policy:
  rules:
    - {id: a, action: ask, tool_patterns: ["x.*"], when: 'environment == "production"', approval: managers}
sandbox: {max_memory_mb: 256}
"""
SHAPES: list[type[schema.Shape]] = [schema.ConfigFileTop, *schema.SECTIONS.values(), *schema.ENTRIES.values()]
WORDS = sorted({key for shape in SHAPES for key in draft.keys_of(shape)})
ODD = ["denied", "none", "always", "mcp", "read", "*", "[", "http://[::1", "a:b", "~/x", "\\", "("]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from([*WORDS, *ODD]),
    st.text(max_size=12),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), inner, max_size=4),
    ),
    max_leaves=12,
)


def survives(text: str) -> config.Config | None:
    """The Config, or None where the answer was a ConfigError with every problem in its place."""
    try:
        return config.loads(text, file="f", base=Path("/nowhere"))
    except ConfigError as exc:
        problems = exc.problems
    last = len(re.split("[\n\r\x85\u2028\u2029]", text)) + 1
    assert problems
    assert problems == sorted(problems)
    assert all(problem.text and 1 <= problem.line <= last and problem.column >= 1 for problem in problems)
    return None


def spelled(value: object) -> str:
    """A value in flow style, with the quoting that makes text stay text about half of the time."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{spelled(key)}: {spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    if isinstance(value, str) and len(value) % 2:
        return "'" + value.replace("'", "''") + "'"
    return "null" if value is None else str(value)


@given(st.text(alphabet=st.characters(), max_size=200))
def test_any_text(text: str) -> None:
    survives(text)


@given(st.text(alphabet="ab: -[]{},&*!|>'\"%#?\n\t\\0~<@`", max_size=60))
def test_any_yaml_like_text(text: str) -> None:
    survives(text)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    survives(data.decode("utf-8", "surrogateescape"))


@settings(max_examples=tooling.examples(3))
@given(st.dictionaries(st.sampled_from(draft.keys_of(schema.ConfigFileTop)), TREES, max_size=4))
def test_any_tree_under_known_keys(tree: dict[str, object]) -> None:
    survives("\n".join(f"{key}: {spelled(value)}" for key, value in tree.items()))


@settings(max_examples=tooling.examples(3))
@given(st.data())
def test_any_value_in_the_place_of_a_right_one(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from([*schema.ENTRIES, *schema.SECTIONS, "rule"]))
    shape = schema.RuleEntry if section == "rule" else {**schema.ENTRIES, **schema.SECTIONS}[section]
    entry = data.draw(st.dictionaries(st.sampled_from(draft.keys_of(shape)), TREES, max_size=4))
    if section == "rule":
        survives(f"policy: {{rules: [{spelled(entry)}]}}")
    elif section in schema.SECTIONS:
        survives(f"{section}: {spelled(entry)}")
    else:
        survives(f"{section}: {{x: {spelled(entry)}}}")


@settings(max_examples=tooling.examples(3))
@given(st.integers(0, len(VALID)), st.integers(0, 20), st.text(max_size=5))
def test_any_change_of_a_valid_file(at: int, length: int, text: str) -> None:
    changed = VALID[:at] + text + VALID[at + length :]
    new = survives(changed)
    if new is not None:
        sentences = config.loosens(config.loads(VALID, file="f", base=Path("/nowhere")), new)
        assert all(sentences)


@given(st.permutations(VALID.splitlines()), st.integers(1, 40))
def test_any_order_of_its_lines(lines: list[str], count: int) -> None:
    survives("\n".join(lines[:count]))
