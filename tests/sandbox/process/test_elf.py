from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.sandbox.process.elf import is_program, loader_of


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


def made(kind: int, *, loader: bool = False, told: tuple[tuple[int, int], ...] = ()) -> bytes:
    """A file with a table of parts: perhaps one that names a loader, and one of these entries."""
    dynamic = b"".join(struct.pack("<QQ", *each) for each in (*told, (0, 0)))
    parts, rest = ([(2, dynamic)] if told else []) + ([(3, b"/lib/ld.so\0")] if loader else []), b""
    table, at = b"", 64 + 56 * len(parts)
    for number, data in parts:
        table += struct.pack("<IIQQQQQQ", number, 4, at + len(rest), 0, 0, len(data), len(data), 8)
        rest += data
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", kind, 183, 1, 0, 64, 0, 0, 64, 56, len(parts), 0, 0, 0)
    )
    return header + table + rest


@pytest.mark.parametrize(
    ("data", "program"),
    [
        (made(2), True),  # static, at a fixed address
        (made(2, loader=True), True),
        (made(3, told=((0x6FFFFFFB, 0x08000000),)), True),  # static, anywhere in memory
        (made(3, loader=True, told=((0x6FFFFFFB, 0x08000001), (14, 1))), True),
        (made(3, loader=True), True),  # from before programs were marked
        (made(3, told=((14, 1),)), False),
        (made(3), False),
        (made(3, loader=True, told=((14, 1), (0x6FFFFFFB, 1))), False),  # as the C library
        (made(1), False),
        (made(4, loader=True), False),
        (b"#!/bin/sh\n" + bytes(64), False),
    ],
)
def test_a_program_is_told_from_a_library(tmp_path: Path, data: bytes, program: bool) -> None:
    (tmp_path / "file.so.1").write_bytes(data)
    assert is_program(tmp_path / "file.so.1") is program


def test_a_program_is_one_whatever_its_name_and_mode(tmp_path: Path) -> None:
    for path in ("/bin/sh", os.path.realpath(sys.executable)):
        shutil.copyfile(path, tmp_path / "picture.png")
        (tmp_path / "picture.png").chmod(0o400)
        assert is_program(tmp_path / "picture.png")
        (tmp_path / "picture.png").unlink()


def test_libraries_of_this_process_are_none() -> None:
    with open("/proc/self/maps", encoding="utf-8") as file:
        mapped = {line.split()[-1] for line in file if "/" in line}
    libraries = {path for path in mapped if ".so" in os.path.basename(path) and os.path.isfile(path)}
    assert libraries and not [path for path in libraries if is_program(path)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 63), st.binary(min_size=1, max_size=16))
def test_a_broken_one_is_no_program(tmp_path: Path, rest: bytes, at: int, written: bytes) -> None:
    data = bytearray(b"\x7fELF\x02\x01" + bytes(58) + rest)
    data[at : at + len(written)] = written
    (tmp_path / "broken").write_bytes(data)
    found = loader_of(tmp_path / "broken")
    assert found is None or len(found) <= 4096
    assert is_program(tmp_path / "broken") in (True, False)
