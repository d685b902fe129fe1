"""YAML is read with places, in one meaning, and hostile YAML ends as a problem."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from ringfence.config import yaml
from ringfence.config.yaml import MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_PROBLEMS, Position


def told(text: str) -> list[str]:
    return [str(problem) for problem in yaml.parse(text, "f").problems]


def test_values_by_the_core_schema() -> None:
    text = "[null, ~, , true, False, off, yes, 12, -0x1, 0x1F, 0o17, 1.5, 1e3, .5, '12', 1_000, 2026-01-01, 0777]"
    assert yaml.parse(text.replace(", ,", ", "), "f").value == [
        None, None, True, False, "off", "yes", 12, "-0x1", 31, 15, 1.5, 1000.0, 0.5, "12", "1_000", "2026-01-01", 777,
    ]  # fmt: skip


def test_every_key_and_value_has_its_place() -> None:
    read = yaml.parse("a: 1\nb:\n  - x\n  - {c: 'd', e: \"f\"}\n  -\n    g: |\n      text\n", "f")
    assert read.value == {"a": 1, "b": ["x", {"c": "d", "e": "f"}, {"g": "text\n"}]}
    assert read.place(("a",)) == Position(1, 4)
    assert read.place(("a",), key=True) == Position(1, 1)
    assert read.place(("b", 0)) == Position(3, 5)
    assert read.place(("b", 1)) == Position(4, 5)
    assert read.place(("b", 1, "c"), key=True) == Position(4, 6)
    assert read.place(("b", 1, "c")) == Position(4, 9)
    assert read.place(("b", 1, "e")) == Position(4, 17)
    assert read.place(("b", 2, "g"), key=True) == Position(6, 5)


def test_what_is_not_in_the_file_stands_where_it_is_missing() -> None:
    read = yaml.parse("a:\n  b: 1\n", "f")
    assert read.place(("a", "missing")) == Position(2, 3)
    assert read.place(("a", "a tag", "b")) == Position(2, 6)
    assert read.place(("nothing",)) == Position(1, 1)


def test_a_place_inside_text_is_exact_where_the_text_stands_as_it_reads() -> None:
    read = yaml.parse("a: abc def\nb: 'abc def'\nc: \"abc \\x64ef\"\nd: 'it''s'\ne: é def\n", "f")
    places = [read.problem_inside((key,), "x", 0, 4) for key in "abcd"]
    assert [(p.line, p.column) for p in places] == [(1, 8), (2, 9), (3, 4), (4, 4)]
    assert read.problem_inside(("a",), "x", 1, 0).column == 4


def test_a_byte_order_mark_moves_nothing() -> None:
    read = yaml.parse("\ufeffa: 1\n", "f")
    assert (read.value, read.place(("a",), key=True)) == ({"a": 1}, Position(1, 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "f:2:1: duplicate key 'a' (first at line 1)"),
        ("a: {b: 1, b: {c: [1]}}", "f:1:11: duplicate key 'b' (first at line 1)"),
        ("a: &x 1", "f:1:4: anchors (&name) are not taken: write the value out"),
        ("a: *x", "f:1:4: aliases (*name) are not taken: write the value out"),
        ("a: !!python/object:os.system x", "f:1:4: tags (!name) are not taken"),
        ("a: !!int '3'", "f:1:4: tags (!name) are not taken"),
        ("1: a", "f:1:1: a key must be text, this is a number (quote it)"),
        ("? [a, b]\n: c\nd: 1\n", "f:1:3: a key must be text"),
        ("null: a", "f:1:1: a key must be text, this is nothing (quote it)"),
        ("a: 1\n---\nb: 2\n", "f:2:1: a second document: one file holds one"),
        ("%YAML 1.1\n---\na: on\n", "f:2:1: only YAML 1.2 is read"),
        ("a:\n\tb: 1\n", "f:2:1: not YAML: a tab where spaces are needed"),
        ("a: [1, 2\n", "f:2:1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: \x00\n", "f:1:4: not YAML: the character U+0000 is not allowed"),
        ("a: b\nc: \x1b[2J\n", "f:2:4: not YAML: the character U+001B is not allowed"),
        ('a: "\\0"', "f:1:4: a NUL or a lone surrogate is not text"),
        ('a: "\\ud800"', "f:1:4: a NUL or a lone surrogate is not text"),
        ('"\\0": a', "f:1:1: a NUL or a lone surrogate is not text"),
        ("a: " + "9" * 5000, "f:1:4: a number of more than 100 digits"),
        ("a: 0x" + "f" * 5000, "f:1:4: a number of more than 100 digits"),
        ("- " * (MAX_DEPTH + 1) + "a", f"f:1:{2 * MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"),
        ("x" * (MAX_BYTES + 1), f"f:1:1: larger than {MAX_BYTES} bytes"),
    ],
)
def test_what_is_not_taken(text: str, expected: str) -> None:
    assert told(text)[0] == expected


def test_an_escape_beyond_unicode_is_a_problem_of_the_text() -> None:
    assert told('a: "\\UFFFFFFFF"')[0].startswith("f:1:1: not YAML")


def test_a_bomb_of_aliases_is_refused_at_its_first_use() -> None:
    bomb = "a: &a [x, x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi"))
    assert len(told(bomb)) <= MAX_PROBLEMS
    assert yaml.parse(bomb, "f").value["b"] == [None, None, None]


def test_deep_nesting_ends_early() -> None:
    assert told("[" * 100_000)[-1] == f"f:1:{MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"
    assert "nested deeper" in told("{a: " * 10_000)[-1]


def test_too_many_values_and_problems_end_early() -> None:
    assert told("[" + "a," * (MAX_NODES + 10) + "]") == [f"f:1:{2 * MAX_NODES}: more than {MAX_NODES} values"]
    assert len(told("".join("a: 1\n" for _ in range(1000)))) == MAX_PROBLEMS


def test_after_something_refused_the_rest_is_still_read() -> None:
    read = yaml.parse("a: {1: {deep: [x]}, b: 2}\n? {k: v}\n: [w]\nc: *x\nd: 3\na: {e: 4}\n", "f")
    assert read.value == {"a": {"b": 2}, "c": None, "d": 3}
    assert [(p.line, p.column) for p in read.problems] == [(1, 5), (2, 3), (4, 4), (6, 1)]


def test_only_regular_files_of_a_sane_size_are_read(tmp_path: Path) -> None:
    big, bad, pipe = tmp_path / "big", tmp_path / "bad", tmp_path / "pipe"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    bad.write_bytes("é: 1\nab: é".encode() + b"\xc3(\n")
    os.mkfifo(pipe)
    assert str(yaml.read_file(big, "f")[1][0]) == f"f:1:1: larger than {MAX_BYTES} bytes"
    assert str(yaml.read_file(bad, "f")[1][0]) == "f:2:6: invalid UTF-8 (byte 0xc3)"
    assert str(yaml.read_file(pipe, "f")[1][0]) == "f:1:1: is not a regular file"
    assert str(yaml.read_file(tmp_path / "no", "f")[1][0]) == "f:1:1: cannot be read: No such file or directory"
    assert yaml.read_file(Path("/dev/zero"), "f")[0] is None


def test_refusing_a_file_leaves_it_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        yaml.read_file(tmp_path, "f")
    assert len(os.listdir("/proc/self/fd")) == before
