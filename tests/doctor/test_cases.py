"""The catalogue is complete and well-formed: what it holds is data, and can be checked as such."""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

from ringfence.doctor import CATALOGUE, CLASSES, Case, launcher
from ringfence.doctor.suite import text_of


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


def test_a_case_says_in_one_line_what_is_tried_and_what_is_right() -> None:
    for case in CATALOGUE:
        assert case.id[0] in CLASSES and case.id[1:].isdigit() and len(case.id) == 3
        for text in (case.tried, case.expected):
            assert text == text.strip() and text.isprintable() and not text.endswith("."), case.id


def test_programs_are_python_and_need_only_what_a_control_has_loaded() -> None:
    for case in CATALOGUE:
        for program in programs(case):
            tree = ast.parse(text_of(program, {"limits": {}}), case.id)
            wanted = {node.name for node in imports(tree)}
            assert wanted <= LOADED | set(sys.builtin_module_names) | {"collections.abc", "re"}, case.id


def test_programs_use_no_name_that_nobody_gave() -> None:
    """A program that fails for a slip of its own would pass for one that was prevented."""
    shared = defined(ast.parse(text_of("", {}))) | set(dir(builtins)) | {"__name__"}
    for case in CATALOGUE:
        for program in programs(case):
            tree = ast.parse(dedent(program))
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            assert used - defined(tree) - shared == set(), case.id


def defined(tree: ast.AST) -> set[str]:
    """Every name that is given a meaning anywhere in it."""
    found = {alias.asname or alias.name.split(".")[0] for alias in imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def imports(tree: ast.AST) -> list[ast.alias]:
    found: list[ast.alias] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += node.names
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(ast.alias(node.module))
    return found


LOADED = {node.name for node in imports(ast.parse(Path(launcher.__file__).read_text()))}
LOADED |= {module.__name__ for module in launcher.PRELOADED}


def test_few_shapes_of_limits_are_used_since_boxes_are_kept_ready_by_shape() -> None:
    assert len({repr(case.limits) for case in CATALOGUE}) <= 7


def test_what_is_killed_on_purpose_is_judged_by_more_than_its_silence() -> None:
    for case in CATALOGUE:
        if case.silent:
            assert case.owed or case.hit.__name__ == "judge" or case.control.impossible, case.id
