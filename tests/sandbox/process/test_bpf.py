from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from ringfence.sandbox.process.seccomp.bpf import BpfProgram
from tests.sandbox.process.interpreter import judge

WORDS = st.integers(0, 2**32 - 1)


def answer(program: BpfProgram, word: int) -> int:
    return judge(bytes(program), word, 0, (0,) * 6).value


@given(st.dictionaries(WORDS, st.integers(0, 5), min_size=1, max_size=600), st.lists(WORDS, max_size=50))
def test_a_word_leads_where_its_span_says(starts: dict[int, int], words: list[int]) -> None:
    edges = sorted(({0: 9} | starts).items())
    program = BpfProgram()
    program.load(0, program.choose(edges, program.give))
    for word in {*words, *starts, *(max(start - 1, 0) for start in starts)}:
        wanted = [goal for first, goal in edges if first <= word][-1]
        assert answer(program, word) == wanted


@given(st.lists(st.integers(1, 2**32 - 2), min_size=1, max_size=400, unique=True))
def test_goals_out_of_reach_are_still_reached(values: list[int]) -> None:
    program = BpfProgram()
    # Each goal is a place of its own, all of them written before the first jump.
    goals = {value: program.load(4, program.give(value)) for value in sorted(values)}
    edges = {0: program.give(0)}
    for value in sorted(values):
        edges[value + 1] = edges[0]
    edges |= goals
    program.load(0, program.choose(sorted(edges.items()), lambda place: place))
    assert all(answer(program, value) == value for value in values)
    assert answer(program, 0) == 0


def test_a_choice_among_many_takes_few_steps() -> None:
    program = BpfProgram()
    program.load(0, program.choose([(n * 10, n % 2) for n in range(256)], program.give))
    assert max(judge(bytes(program), n, 0, (0,) * 6).steps for n in range(2600)) <= 11


def test_only_the_bits_that_are_kept_count() -> None:
    program = BpfProgram()
    chosen = program.choose([(0, 1), (16, 2), (17, 1)], program.give)
    program.load(0, program.keep(0xF0, chosen))
    assert [answer(program, word) for word in (0x10, 0x1F, 0x0F, 0x20)] == [2, 2, 1, 1]


def test_the_bytes_are_what_the_kernel_reads() -> None:
    program = BpfProgram()
    program.load(4, program.give(7))
    assert bytes(program) == struct.pack("=HBBI", 0x20, 0, 0, 4) + struct.pack("=HBBI", 0x06, 0, 0, 7)
