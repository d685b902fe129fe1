"""The folder that is handed over, and the one file that verifies it with Python and `cryptography` alone."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.audit import standalone
from ringfence.audit.chain import ALWAYS, Period
from ringfence.audit.export import write_export
from ringfence.audit.handover import PROGRAM, write_folder
from ringfence.audit.keys import PUBLIC, Keys, load_or_create
from ringfence.core.errors import StoreError, TamperError
from ringfence.core.model import Json
from ringfence.store import Reader, Store

ABOUT: Json = {
    "call": {"tool": "=create_ticket", "principal": {"kind": "agent", "agent": "ann", "person": None}, "origin": "mcp"},
    "decision": {"allowed": True, "rules": ["std-write"], "asks": []},
    "contract": {"name": "create_ticket", "digest": "sha256:c", "mode": "write"},
    "arguments": {"digest": "sha256:a"},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return load_or_create(tmp_path_factory.mktemp("keys") / "keys")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    """Two chains of calls."""
    folder = tmp_path_factory.mktemp("state") / "state"
    for process in range(2):
        with Store.open(folder, keys) as store:
            for number in range(4):
                call = f"call_{process}{number}"
                store.write_sync(lambda tx, call=call: tx.append("started", call, ABOUT))  # type: ignore[misc]
                end = {**ABOUT, "status": "success", "reason_code": "ok", "result": {"digest": "sha256:r"}}
                store.write_sync(lambda tx, call=call, end=end: tx.append("finished", call, end))  # type: ignore[misc]
    return folder


def handed_over(state: Path, keys: Keys, to: Path, period: Period = ALWAYS) -> Path:
    reader = Reader.open(state)
    try:
        checkpoints = reader.checkpoints()
        write_folder(
            to,
            keys,
            checkpoints,
            lambda path: write_export(path, reader.period(period), keys, period, checkpoints, reader.record),
        )
    finally:
        reader.close()
    return to


@pytest.fixture
def folder(state: Path, keys: Keys, tmp_path: Path) -> Path:
    return handed_over(state, keys, tmp_path / "export")


def verify(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """By an interpreter that has `cryptography` and what that needs, and nothing of Ringfence."""
    site = Path(pytest.__file__).parents[1]
    bare = folder.parent / "bare"
    if not bare.exists():
        bare.mkdir()
        for name in ("cryptography", "cffi", "pycparser"):
            if (site / name).exists():
                (bare / name).symlink_to(site / name)
        for path in site.glob("_cffi_backend*"):
            (bare / path.name).symlink_to(path)
    program = f"import sys, runpy; sys.path.append({str(bare)!r}); sys.argv[0] = 'verify.py'; "
    program += f"runpy.run_path({str(folder / PROGRAM)!r}, run_name='__main__')"
    command = [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-c", program, folder, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, env={}, check=False)


def test_it_verifies_with_python_and_cryptography_alone(folder: Path, keys: Keys) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["README.txt", "audit-public.pem", "calls.csv", "checkpoints.jsonl", "log.jsonl", "verify.py"]
    )
    shown = verify(folder, "--public-key", keys.folder / PUBLIC)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "8 calls: verified" in shown.stdout and "signed heads of checkpoints.jsonl were compared" in shown.stdout
    assert "the key came with the export" in verify(folder).stdout
    assert not (folder / "__pycache__").exists()
    bare = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), "-I", "-S", "-c", "import ringfence"], capture_output=True
    )
    assert bare.returncode != 0, "such an interpreter has nothing of ours"


def test_it_is_the_file_of_the_package(folder: Path) -> None:
    assert (folder / PROGRAM).read_text() == Path(standalone.__file__).read_text()


def test_it_tells_of_a_call(folder: Path) -> None:
    shown = verify(folder, "--call", "call_12").stdout
    for line in (
        "who      agent ann",
        "what     '=create_ticket",
        "allowed  allowed by rules std-write; contract sha256:c",
    ):
        assert line in shown, shown
    assert "outcome  success (ok)" in shown and "arguments sha256:a (salted digest)" in shown
    assert "There is no call call_99" in verify(folder, "--call", "call_99").stdout


def test_the_table_has_every_call_and_no_formula(folder: Path) -> None:
    with (folder / "calls.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["call_id"] for row in rows) == [
        f"call_{process}{number}" for process in range(2) for number in range(4)
    ]
    assert {row["tool"] for row in rows} == {"'=create_ticket"}
    assert {(row["agent"], row["status"], row["rules"]) for row in rows} == {("ann", "success", "std-write")}


def test_a_period(state: Path, keys: Keys, tmp_path: Path) -> None:
    reader = Reader.open(state)
    times = [record.at for record in reader.records()]
    reader.close()
    folder = handed_over(state, keys, tmp_path / "part", Period(times[3], times[-3]))
    shown = verify(folder)
    assert shown.returncode == 0 and "this is a part of the log" in shown.stdout, shown.stdout


Lines = list[bytes]


def without_last_record(lines: Lines) -> Lines:
    del lines[max(number for number, line in enumerate(lines) if b'"text"' in line)]
    return lines


def edited(lines: Lines) -> Lines:
    return [line.replace(b"success", b"failed!") for line in lines]


def reordered(lines: Lines) -> Lines:
    lines[2], lines[3] = lines[3], lines[2]
    return lines


def rehashed(lines: Lines) -> Lines:
    """An edit by somebody who makes its hash anew."""
    number = next(number for number, line in enumerate(lines) if b"success" in line)
    text = json.loads(lines[number])["text"].replace("success", "failed!")
    lines[number] = standalone.written({"hash": standalone.sha256(text), "text": text}) + b"\n"
    return lines


@pytest.mark.parametrize(
    ("tamper", "fault"),
    [
        (without_last_record, "does not end where its closing was signed"),
        (edited, "was edited: its text does not have its hash"),
        (reordered, "was due here"),
        (rehashed, "does not follow the record before it"),
        (lambda lines: lines[:-1], "there is no closing line that verifies"),
        (lambda lines: [*lines, lines[1]], "was added after the closing line"),
        (lambda lines: [lines[0].replace(b'"from":null', b'"from":1.0'), *lines[1:]], "the header is not the one"),
        (lambda lines: [*lines[:-1], lines[-1][:-20]], "is cut off"),
    ],
)
def test_tampering_is_found(folder: Path, tamper: Callable[[Lines], Lines], fault: str) -> None:
    log = folder / "log.jsonl"
    log.write_bytes(b"".join(tamper(log.read_bytes().splitlines(keepends=True))))
    shown = verify(folder)
    assert shown.returncode == 1 and fault in shown.stdout, shown.stdout


def test_another_table_another_key_and_a_cut_log_are_found(
    folder: Path, state: Path, keys: Keys, tmp_path: Path
) -> None:
    table = folder / "calls.csv"
    kept = table.read_bytes()
    table.write_bytes(kept.replace(b"success", b"failed", 1))
    assert "calls.csv does not say what the log says" in verify(folder).stdout
    table.write_bytes(kept)
    others = load_or_create(tmp_path / "others")
    shown = verify(folder, "--public-key", others.folder / PUBLIC)
    assert shown.returncode == 1 and "the signature is not good with this key" in shown.stdout
    # A log that was cut back before it was exported, and what a witness was told before.
    copy = shutil.copytree(state, tmp_path / "copy")
    with Store.open(copy, keys) as store:
        store.write_sync(lambda tx: tx.append("note", None, {}))
    later = handed_over(copy, keys, tmp_path / "later")
    again = handed_over(state, keys, tmp_path / "again")
    shown = verify(again, "--witness", later / "checkpoints.jsonl")
    assert shown.returncode == 1 and "is missing, and checkpoints.jsonl has it: the log was cut back" in shown.stdout


def test_nothing_is_left_of_one_that_cannot_be_made(state: Path, keys: Keys, tmp_path: Path) -> None:
    def fail(_path: Path) -> None:
        raise TamperError("the log does not verify")

    with pytest.raises(TamperError):
        write_folder(tmp_path / "export", keys, {}, fail)  # type: ignore[arg-type]
    assert not (tmp_path / "export").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        handed_over(state, keys, tmp_path / "there")
