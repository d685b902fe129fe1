"""What ran in a box as a result: what was claimed stands apart, pictures are pictures, and all of it fits."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.box import FileFact, Shown
from ringfence.core.model import Json
from ringfence.core.sessions import CellReport, Failure, StepReport
from ringfence.sandbox.tools.results import explain, fitting, of_run, of_step, text
from tests.boxing import captured, report

PICTURE = base64.b64encode(b"\x89PNG" + bytes(300)).decode()


def step(*shown: Shown, error: Failure | None = None, **more: Any) -> StepReport:
    seen = report(exit_status=0 if error is None else 1, **more)
    return StepReport("box_1", 3, CellReport(seen, shown, error), "default")


def result(given: StepReport, most: int = 1_000_000, *, wide: bool = False) -> Json:
    return fitting(of_step(given, wide=wide), most)[1]


def kinds(given: Json) -> list[str]:
    return [block["type"] for block in given["content"]]


def test_a_figure_is_a_picture_in_the_content_and_stands_there_once() -> None:
    told = result(step(Shown({"text/plain": "<Figure>", "image/png": PICTURE}, main=True)))
    assert told["content"] == [
        {"type": "text", "text": "<Figure>"},
        {"type": "image", "data": PICTURE, "mimeType": "image/png"},
    ]
    assert told["structuredContent"]["claimed"]["results"] == [{"data": {"text/plain": "<Figure>"}, "main": True}]
    assert canonical.dumps(told).count(PICTURE.encode()) == 1


def test_a_caller_in_this_process_has_every_form_where_it_is_claimed() -> None:
    told = result(step(Shown({"image/png": PICTURE})), wide=True)
    assert told["structuredContent"]["claimed"]["results"][0]["data"] == {"image/png": PICTURE}


def test_what_came_late_is_marked_and_cut_like_the_rest() -> None:
    told = result(step(stdout=b"mine\n", late_stdout=captured(b"theirs\n"), late_stderr=captured(b"err\n")))
    assert [block["text"] for block in told["content"]] == [
        "mine\n",
        "stdout of what earlier steps left running:\ntheirs\n",
        "stderr of what earlier steps left running:\nerr\n",
    ]
    assert told["structuredContent"]["late"] == {"stdout": "theirs\n", "stderr": "err\n"}
    assert "late" not in result(step(stdout=b"mine\n"))["structuredContent"]
    much = step(late_stdout=captured(b"x" * 60_000))
    assert len(canonical.dumps(result(much, 20_000))) < 20_000


def test_html_is_not_shown_as_text_but_noted() -> None:
    told = result(step(Shown({"text/plain": "a  b", "text/html": "<table><b>x</b></table>"})))
    assert [block["text"] for block in told["content"]] == [
        "a  b",
        "[also as HTML, 23 characters: structuredContent.claimed]",
    ]
    assert told["structuredContent"]["claimed"]["results"][0]["data"]["text/html"].startswith("<table>")


def test_a_result_with_anything_to_say_has_no_empty_text() -> None:
    """Clients hand blocks on to models, whose APIs refuse an empty one."""
    once = fitting(of_run(report(stderr=b"ModuleNotFoundError"), wide=False), 10_000)[1]
    assert [block["text"] for block in once["content"]] == ["stderr:\nModuleNotFoundError"]
    failed: Json = {"content": [text("")], "isError": True}
    explain(failed, {"explanation": "exited with status 1"})
    assert failed["content"] == [text("[exited with status 1]")]


def test_a_drawing_of_lines_is_a_resource() -> None:
    told = result(step(Shown({"image/svg+xml": "<svg/>"})))
    (block,) = told["content"]
    assert (block["type"], block["resource"]["mimeType"], block["resource"]["text"]) == (
        "resource",
        "image/svg+xml",
        "<svg/>",
    )


def test_what_the_interpreter_cut_is_said() -> None:
    told = result(step(Shown({"text/plain": "x"}, cut={"image/png": 9_000_000})))
    assert "too long to be shown: image/png (9000000 bytes)" in told["content"][1]["text"]
    assert told["structuredContent"]["claimed"]["results"][0]["cut"] == {"image/png": 9_000_000}


def test_who_reads_one_form_alone_has_all_that_was_said() -> None:
    failed = Failure("ValueError", "no", "Traceback …\nValueError: no\n")
    more = {"late_stdout": captured(b"theirs\n"), "late_stderr": captured(b"late err\n")}
    told = result(step(Shown({"text/plain": "'value'"}), error=failed, stdout=b"mine\n", stderr=b"err\n", **more))
    own = told["structuredContent"]
    (shown,) = own["claimed"]["results"]
    said = [own["stdout"], own["stderr"], *own["late"].values(), shown["data"]["text/plain"]]
    said.append(own["claimed"]["error"]["traceback"])
    assert said == ["mine\n", "err\n", "theirs\n", "late err\n", "'value'", failed.traceback]
    read = "".join(block["text"] for block in told["content"])
    assert all(each in read for each in said) and len(told["content"]) == len(said)


def test_an_error_is_claimed_and_readable() -> None:
    told = result(step(error=Failure("ValueError", "no", "Traceback …\nValueError: no\n")))
    assert told["isError"] is True
    assert told["content"] == [{"type": "text", "text": "Traceback …\nValueError: no\n"}]
    assert told["structuredContent"]["claimed"]["error"]["name"] == "ValueError"
    bare = result(step(error=Failure("SystemExit", "3")))
    assert bare["content"] == [{"type": "text", "text": "SystemExit: 3"}]


def test_new_files_are_links() -> None:
    files = tuple(FileFact(f"/workspace/output/a b/{n}.png", n, "ab") for n in range(30))
    told = result(step(files=files))
    assert kinds(told) == ["resource_link"] * 20
    assert told["content"][1] == {
        "type": "resource_link",
        "uri": "ringfence://session/box_1/output/a%20b/1.png",
        "name": "1.png",
        "size": 1,
    }
    assert len(told["structuredContent"]["files"]) == 30


def test_a_command_claims_nothing() -> None:
    told = result(replace(step(stdout=b"out"), context=None))["structuredContent"]
    assert (told["step"], "claimed" in told, "interpreter_alive" in told) == (3, False, False)


@pytest.mark.parametrize("letter", ["x", "\n", "\x1b", "é"], ids=ascii)
def test_whatever_is_shown_fits(letter: str) -> None:
    many = [Shown({"text/plain": letter * 3000, "text/html": letter * 2000}) for _ in range(4)]
    given = step(*many, Shown({"image/png": PICTURE * 20}), stdout=(letter * 4000).encode(), stderr=b"e" * 4000)
    told = result(given, 10_000)
    assert len(canonical.dumps(told)) <= 10_000
    assert "too long to be shown" in str(told["content"])
    cut = result(replace(given, cell=replace(given.cell, error=Failure("E", letter * 9000, letter * 9000))), 10_000)
    assert len(canonical.dumps(cut)) <= 10_000


def test_what_was_printed_is_cut_before_what_was_shown() -> None:
    told = result(step(Shown({"image/png": PICTURE}), stdout=b"x" * 50_000), 10_000)
    assert kinds(told).count("image") == 1
    assert "bytes left out" in told["structuredContent"]["stdout"]
    assert "write so much into a file" in str(told["content"])


def test_where_all_of_it_lies_is_said() -> None:
    told = of_step(step(stdout=b""), wide=False)
    long = replace(
        told, report=replace(told.report, stdout=captured(b"x", total=9)), whole={"stdout": "/workspace/tmp/o"}
    )
    shown = fitting(long, 100_000)[1]
    assert "[all of stdout, 9 bytes, is in /workspace/tmp/o; read parts of it with read_file]" in str(shown["content"])
    assert shown["structuredContent"]["whole"] == {"stdout": "/workspace/tmp/o"}
