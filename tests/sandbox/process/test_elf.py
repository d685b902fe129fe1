from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.sandbox.process.elf import loader_of


def test_a_program_names_its_loader() -> None:
    loader = loader_of("/bin/sh")
    if loader is None:
        pytest.skip("the shell of this host needs no loader")
    assert os.path.exists(loader)


def test_what_is_no_program_names_none(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")
    (tmp_path / "empty").write_bytes(b"")
    assert {loader_of(path) for path in (tmp_path / "script", tmp_path / "empty", tmp_path / "none", tmp_path)} == {
        None
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 63), st.binary(min_size=1, max_size=16))
def test_a_broken_one_is_no_program(tmp_path: Path, rest: bytes, at: int, written: bytes) -> None:
    data = bytearray(b"\x7fELF\x02\x01" + bytes(58) + rest)
    data[at : at + len(written)] = written
    (tmp_path / "broken").write_bytes(data)
    found = loader_of(tmp_path / "broken")
    assert found is None or len(found) <= 4096
