"""What comes out of a box: streams, captures, shown values and files, without what must not be seen."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import pytest

from ringfence.core.box import Attached, BoxReport, Captured, FileFact, Shown, Stream
from ringfence.core.secret import Secret
from ringfence.core.sessions import CellReport, Failure, StepReport
from ringfence.sandbox.tools.screening import OutputScreen
from ringfence.secrets.redaction import TenantRedactor

VALUE = "correct-horse-battery-staple"
SHAPE = "AKIA" + "ABCDEFGHIJKLMNOP"
KNOWN = (Secret("horse", VALUE),)


def screen() -> OutputScreen:
    return OutputScreen(TenantRedactor(lambda: KNOWN), TenantRedactor(lambda: KNOWN, shaped=False))


def captured(data: bytes, tail: bytes = b"", total: int | None = None) -> Captured:
    return Captured(data, tail, len(data) + len(tail) if total is None else total, sha256(data + tail).hexdigest())


@pytest.mark.anyio
async def test_streams_are_searched_across_the_borders_of_their_pieces() -> None:
    heard: dict[Stream, bytes] = {"stdout": b"", "stderr": b""}

    def hear(stream: Stream, data: bytes) -> None:
        heard[stream] += data

    here = screen()
    tell = here.attached(Attached(tell=hear)).tell
    assert tell is not None
    for number in range(0, len(VALUE), 3):
        tell("stdout", VALUE[number : number + 3].encode())
        tell("stderr", b".")
    tell("stdout", b" and cor")
    here.finish()
    assert heard == {"stdout": b"[redacted] and cor", "stderr": b"." * 10}


@pytest.mark.anyio
@pytest.mark.parametrize("text", [b"cor", b"xyz"])
async def test_the_last_of_a_stream_waits_for_a_clock_and_not_for_what_it_is(text: bytes) -> None:
    heard: list[bytes] = []
    told = asyncio.Event()

    def hear(_: Stream, data: bytes) -> None:
        heard.append(data)
        told.set()

    tell = screen().attached(Attached(tell=hear)).tell
    assert tell is not None
    tell("stdout", text)
    assert heard == [], "whatever it is"
    await told.wait()
    assert heard == [text]


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


def test_what_came_late_is_searched_like_what_was_captured() -> None:
    here = screen()
    late = {"late_stdout": captured(f"a {VALUE}\n".encode()), "late_stderr": captured(SHAPE.encode())}
    clean = here.report(BoxReport("exited", **late))  # type: ignore[arg-type]
    assert (clean.late_stdout.head, clean.late_stderr.head) == (b"a [redacted]\n", b"[redacted]")
    assert here.rules == {"known_secret": 1, "aws_access_key": 1}


def test_where_nothing_strikes_the_very_same_report_goes_on() -> None:
    report = BoxReport("exited", stdout=captured(b"a\n"), stderr=captured(b"head", b"tail", 10_000))
    assert OutputScreen().report(report) is report
    assert OutputScreen(TenantRedactor(lambda: ())).report(report) is report


def test_half_a_secret_at_either_side_of_a_gap_goes_with_it() -> None:
    half = len(VALUE) // 2
    filler = b"." * 5000
    stream = captured(filler + VALUE[:half].encode(), VALUE[half:].encode() + filler + b" ends", 1_000_000)
    clean = screen().report(BoxReport("exited", stdout=stream)).stdout
    assert clean.head and not clean.head.strip(b".")
    assert clean.tail.endswith(b". ends") and clean.truncated
    assert VALUE[half:].encode() not in clean.tail
    assert clean.total == stream.total


@pytest.mark.parametrize("length", range(0, len(VALUE), 3))
def test_how_much_goes_at_a_gap_does_not_tell_what_stood_there(length: int) -> None:
    def cut(ending: str, beginning: str) -> tuple[int, int]:
        stream = captured(b"." * 5000 + ending.encode(), beginning.encode() + b"." * 5000, 1_000_000)
        clean = screen().report(BoxReport("exited", stdout=stream)).stdout
        return len(clean.head), len(clean.tail)

    rest = len(VALUE) - length
    assert cut(VALUE[:length], VALUE[length:]) == cut("~" * length, "~" * rest)


def test_a_whole_secret_at_a_gap_is_replaced_and_not_cut() -> None:
    filler = b"." * 5000
    reach = TenantRedactor(lambda: KNOWN).values.reach
    for place in range(1, len(VALUE), 5):
        stream = captured(filler + VALUE.encode() + b"." * (reach - 1 - place), b"", 1_000_000)
        clean = screen().report(BoxReport("exited", stdout=stream)).stdout
        assert clean.head == filler + b"[redacted]"


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
    report, problem = await here.artifacts(BoxReport("exited", files=tuple(facts)), tmp_path)
    assert problem == ""
    masked = b"*" * len(VALUE)
    for fact, (name, data) in zip(report.files, contents.items(), strict=True):
        left = (tmp_path / name).read_bytes()
        assert left == data.replace(VALUE.encode(), masked)
        assert (fact.bytes, fact.sha256) == (len(left), sha256(left).hexdigest())
    assert here.secrets == {"horse": 2}
    again = BoxReport("exited", files=tuple(facts))
    idle = OutputScreen(None, TenantRedactor(lambda: (), shaped=False))
    assert await idle.artifacts(again, tmp_path) == (again, "")


@pytest.mark.anyio
async def test_a_file_that_is_gone_does_not_keep_the_others_from_being_searched(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(f"it is {VALUE}\n")
    facts = tuple(FileFact(f"/workspace/output/{name}", 1, "0" * 64) for name in ("a.txt", "b.txt"))
    _, problem = await screen().artifacts(BoxReport("exited", files=facts), tmp_path)
    assert "a.txt cannot be searched" in problem and "b.txt" not in problem
    assert VALUE not in (tmp_path / "b.txt").read_text()


def test_the_bytes_of_one_file_in_pieces() -> None:
    search = screen().file()
    assert search is not None
    data = f"x{VALUE}y".encode()
    out = b"".join(search.feed(data[at : at + 5]) for at in range(0, len(data), 5)) + search.finish()
    assert out == b"x" + b"*" * len(VALUE) + b"y"
    assert OutputScreen().file() is None
