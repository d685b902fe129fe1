"""The reference is complete and right: every key with its default, and every example loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from ringfence import config
from ringfence.config import draft, schema

DOCS = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
SECTIONS: dict[str, type[schema.Shape]] = {
    "Top level": schema.ConfigFileTop,
    **schema.SECTIONS,
    **schema.ENTRIES,
    "rules": schema.RuleEntry,
    "cases": schema.CaseEntry,
}


def keys(shape: type[schema.Shape], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a shape and of those within, with its default."""
    for name, field in shape.model_fields.items():
        path = prefix + (field.alias or name)
        yield path, field.get_default(call_default_factory=True)
        for inner in draft.shapes_in(field.annotation):
            yield from keys(inner, path + ".")


def table(heading: str) -> dict[str, str]:
    section = DOCS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) ?\| .*\|$", section, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a key stands twice"
    return dict(rows)


def written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return '""' if value == "" else str(value)


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_key_is_documented_and_no_other(heading: str) -> None:
    assert set(table(heading)) == {path for path, _ in keys(SECTIONS[heading])}


@pytest.mark.parametrize("heading", SECTIONS)
def test_every_default_is_documented(heading: str) -> None:
    documented = table(heading)
    by_mode = {"retry.attempts"}
    for path, default in keys(SECTIONS[heading]):
        if default is PydanticUndefined:
            assert documented[path] == "required", path
        elif isinstance(default, schema.Shape):
            assert documented[path] == "", path
        elif default is not None and path not in by_mode:
            assert documented[path].strip("`").replace("1.0", "1") == written(default), path
        else:
            assert documented[path] or heading == "Top level", path


def test_every_example_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    policies = [block for block in blocks if block.startswith("rules:")]
    assert len(policies) == 1
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/sandbox_code.yaml").write_text(policies[0])
    for block in blocks:
        if block not in policies:
            assert config.loads(block, file="f", base=tmp_path).warnings == ()


def test_what_is_not_built_is_marked() -> None:
    rows = [line for line in DOCS.splitlines() if re.search(r"not built yet", line, re.IGNORECASE) and line[0] == "|"]
    named = {match[1] for line in rows if (match := re.match(r"\| `([\w.]+)`", line))}
    assert named == {
        "state", "code_mode",
        "isolation", "backend",
    }  # fmt: skip
