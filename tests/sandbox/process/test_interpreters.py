from __future__ import annotations

import pytest

from ringfence.sandbox.process.interpreters import runs_code


@pytest.mark.parametrize(
    "name", ["python", "python3", "python3.13", "python3.13t", "perl5.36.0", "node-20", "bash", "gawk", "qemu-x86_64"]
)
def test_an_interpreter_is_known_by_its_name_whatever_its_version(name: str) -> None:
    assert runs_code(name)


@pytest.mark.parametrize("name", ["ls", "cat", "git", "env", "xargs", "find", "md5sum", "b2sum", "x86_64", "2to3"])
def test_what_only_runs_other_programs_or_none_is_no_interpreter(name: str) -> None:
    assert not runs_code(name)
