"""The catalogue is complete and well-formed: what it holds is data, and can be checked as such."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest

from ringfence.promises import CATALOGUE, CLASSES, Case, launcher
from ringfence.promises.suite import text_of


def by_id(case: Case) -> str:
    return case.id


def programs(case: Case) -> list[str]:
    return [text for text in (case.program, case.then, case.beside) if text and not case.command]


def test_there_are_enough_cases_of_every_class() -> None:
    count = Counter(case.kind for case in CATALOGUE)
    assert len(CATALOGUE) >= 130
    assert set(count) == set(CLASSES)
    assert min(count.values()) >= 8


def test_most_cases_have_a_control() -> None:
    assert sum(not case.control.impossible for case in CATALOGUE) >= 130


def test_every_case_has_a_name_of_its_own() -> None:
    assert [name for name, times in Counter(case.id for case in CATALOGUE).items() if times > 1] == []


@pytest.mark.parametrize("case", CATALOGUE, ids=by_id)
def test_a_case_says_in_one_line_what_is_tried_and_what_is_right(case: Case) -> None:
    assert case.id[0] in CLASSES and case.id[1:].isdigit() and len(case.id) == 3
    for text in (case.tried, case.expected):
        assert text == text.strip() and text.isprintable() and not text.endswith(".")
    assert case.hit is not None


@pytest.mark.parametrize("case", CATALOGUE, ids=by_id)
def test_a_program_is_python(case: Case) -> None:
    for program in programs(case):
        compile(text_of(program, {"limits": {}}), case.id, "exec")


@pytest.mark.parametrize("case", CATALOGUE, ids=by_id)
def test_a_program_needs_only_what_a_control_has_loaded(case: Case) -> None:
    for program in programs(case):
        wanted = {node.name for node in imports(ast.parse(text_of(program, {})))}
        assert wanted <= LOADED | set(sys.builtin_module_names) | {"collections.abc", "re"}


def imports(tree: ast.AST) -> list[ast.alias]:
    found: list[ast.alias] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += node.names
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(ast.alias(node.module))
    return found


LOADED = {node.name for node in imports(ast.parse(Path(launcher.__file__).read_text()))}


def test_few_shapes_of_limits_are_used_since_boxes_are_kept_ready_by_shape() -> None:
    assert len({repr(case.limits) for case in CATALOGUE}) <= 6


def test_what_is_killed_on_purpose_is_judged_by_more_than_its_silence() -> None:
    for case in CATALOGUE:
        if case.silent:
            assert case.owed or case.hit.__name__ == "judge" or case.control.impossible, case.id
