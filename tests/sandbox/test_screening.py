"""What comes out of a box: streams, captures, shown values and files, without what must not be seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from ringfence.box import Attached, BoxReport, Captured, FileFact, Stream
from ringfence.redaction import Current
from ringfence.sandbox.screening import Screen
from ringfence.secret import Secret
from ringfence.sessions import CellReport, Failure, Shown, StepReport
from tests import tooling

VALUE = "correct-horse-battery-staple"
SHAPE = "AKIA" + "ABCDEFGHIJKLMNOP"
KNOWN = (Secret("horse", VALUE),)


def screen() -> Screen:
    return Screen(Current(lambda: KNOWN), Current(lambda: KNOWN, shaped=False))


def captured(data: bytes, tail: bytes = b"", total: int | None = None) -> Captured:
    return Captured(data, tail, len(data) + len(tail) if total is None else total, sha256(data + tail).hexdigest())


def test_streams_are_searched_across_the_borders_of_their_pieces() -> None:
    heard: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}

    def hear(stream: Stream, data: bytes) -> None:
        heard[stream] += data

    here = screen()
    tell = here.attached(Attached(tell=hear)).tell
    assert tell is not None
    for number in range(0, len(VALUE), 3):
        tell("stdout", VALUE[number : number + 3].encode())
        tell("stderr", b".")
    assert heard == {"stdout": b"", "stderr": b"." * 10}
    tell("stdout", b" and cor")
    here.finish()
    assert heard["stdout"] == b"[redacted] and cor"


@pytest.mark.anyio
async def test_at_a_terminal_a_beginning_does_not_wait_for_long() -> None:
    heard: list[bytes] = []

    async def keys() -> AsyncIterator[bytes | tuple[int, int]]:
        yield b""

    tell = screen().attached(Attached(tell=lambda _, data: heard.append(data), keys=keys())).tell
    assert tell is not None
    tell("stdout", b"cor")
    assert heard == []
    await tooling.until(lambda: heard)
    assert heard == [b"cor"]


def test_what_was_captured_is_searched_and_counted_by_rule_and_by_secret() -> None:
    here = screen()
    report = BoxReport(
        "exited", stdout=captured(f"a {VALUE} {VALUE[::-1]}\n".encode()), stderr=captured(SHAPE.encode())
    )
    clean = here.report(report)
    assert (clean.stdout.head, clean.stderr.head) == (b"a [redacted] [redacted]\n", b"[redacted]")
    assert clean.stdout.total == len(clean.stdout.head) and not clean.stdout.truncated
    assert clean.stdout.sha256 == sha256(clean.stdout.head).hexdigest()
    assert here.rules == {"known_secret": 2, "aws_access_key": 1} and here.secrets == {"horse": 2}


def test_where_nothing_strikes_the_very_same_report_goes_on() -> None:
    report = BoxReport("exited", stdout=captured(b"a\n"), stderr=captured(b"head", b"tail", 10_000))
    assert Screen().report(report) is report
    assert Screen(Current(lambda: ())).report(report) is report


def test_half_a_secret_at_either_side_of_a_gap_goes_with_it() -> None:
    half = len(VALUE) // 2
    stream = captured(b"begins " + VALUE[:half].encode(), VALUE[half:].encode() + b"." * 5000 + b" ends", 1_000_000)
    clean = screen().report(BoxReport("exited", stdout=stream)).stdout
    assert clean.head == b"begins " and clean.tail.endswith(b". ends") and clean.truncated
    assert VALUE[half:].encode() not in clean.tail
    assert clean.total == stream.total


def test_what_a_cell_showed_and_how_it_failed() -> None:
    cell = CellReport(
        BoxReport("exited", stdout=captured(b"fine\n")),
        (Shown({"text/plain": f"'{VALUE}'", "text/html": "<b>fine</b>"}, main=True),),
        Failure("ValueError", VALUE, f"Traceback…\nValueError: {VALUE}"),
    )
    here = screen()
    clean = here.step(StepReport("s", 1, cell)).cell
    assert clean.results[0].data == {"text/plain": "'[redacted]'", "text/html": "<b>fine</b>"}
    assert clean.error == Failure("ValueError", "[redacted]", "Traceback…\nValueError: [redacted]")
    assert here.secrets == {"horse": 3}


@pytest.mark.anyio
async def test_files_keep_their_length_and_shapes_stay(tmp_path: Path) -> None:
    contents = {
        "report.txt": f"it is {VALUE}, {SHAPE}\n".encode(),
        "folder/large.bin": b"\0" * (1 << 20) + VALUE.encode() + b"\xff" * 1000,
        "clean.txt": b"nothing\n",
    }
    facts = []
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o444)
        facts.append(FileFact(f"/workspace/output/{name}", len(data), sha256(data).hexdigest()))
    here = screen()
    report = await here.artifacts(BoxReport("exited", files=tuple(facts)), tmp_path)
    masked = b"*" * len(VALUE)
    for fact, (name, data) in zip(report.files, contents.items(), strict=True):
        left = (tmp_path / name).read_bytes()
        assert left == data.replace(VALUE.encode(), masked)
        assert (fact.bytes, fact.sha256) == (len(left), sha256(left).hexdigest())
    assert here.secrets == {"horse": 2}
    again = BoxReport("exited", files=tuple(facts))
    assert await Screen(None, Current(lambda: (), shaped=False)).artifacts(again, tmp_path) is again


def test_the_bytes_of_one_file_in_pieces() -> None:
    search = screen().file()
    assert search is not None
    data = f"x{VALUE}y".encode()
    out = b"".join(search.feed(data[at : at + 5]) for at in range(0, len(data), 5)) + search.finish()
    assert out == b"x" + b"*" * len(VALUE) + b"y"
    assert Screen().file() is None
