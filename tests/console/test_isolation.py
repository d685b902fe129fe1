"""Isolation in the console: what the doctor saw is shown as it was kept, and nothing that was kept steers a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.cli import doctor
from ringfence.cli.main import command_line
from ringfence.compose.examined import FOLDER, keep, kept
from ringfence.core.model import Json
from ringfence.doctor import CATALOGUE
from tests import gateways
from tests.console import people
from tests.console.people import Browser, token, visitor
from tests.gateways import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if "execute_python" not in gateways.own_tools():
        pytest.skip("no boxes can be made here")
    with people.serve(tmp_path_factory.mktemp("isolation")) as served:
        yield served


@pytest.fixture(scope="module")
def omar(served: Served) -> Browser:
    return visitor(served, token(served, "person", "omar")["token"])


def report(**changed: object) -> Json:
    """What one case of the doctor says of this host, by a real run of it."""
    told: Json = json.loads(gateways.run("doctor", "--case", CATALOGUE[0].id, "--json").stdout)
    return {**told, **changed}


def test_before_the_doctor_came_the_page_says_how_to_call_it(omar: Browser) -> None:
    page = omar.get("/console/isolation").text
    assert "backend <b>process</b>" in page and "The doctor was not here yet" in page and "ringfence doctor" in page


def test_a_whole_test_is_kept_where_there_is_a_state_and_shown(
    served: Served, omar: Browser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "CATALOGUE", CATALOGUE[:1])
    for words in (["--case", CATALOGUE[0].id, "--no-control"], []):
        line = ["doctor", "--config", str(served.config), *words]
        with pytest.raises(SystemExit) as ended:
            command_line(line)(line)
        assert ended.value.code == 0
        assert (served.state / FOLDER).exists() is (words == []), "a part of the suite is not the suite"
    page = omar.get("/console/isolation").text
    assert "In fresh boxes" in page and "1 kept" in page and "0 broken" in page and CATALOGUE[0].id in page
    assert "user namespace" in page and "Look again" not in page
    assert keep(tmp_path / "no state", report(), "box") is False and not (tmp_path / "no state").exists()


def test_what_is_broken_or_of_another_host_is_said_and_nothing_steers_the_page(served: Served, omar: Browser) -> None:
    whole = report()
    case = {**whole["cases"][0], "kept": False, "got": "<script>alert(1)</script>\u202e"}
    whole |= {"cases": [case, "no case"], "host": {**whole["host"], "kernel": "1.0-other", "isolation": "none"}}
    assert keep(served.state, whole, "session")
    page = omar.get("/console/isolation").text
    assert "In a session" in page and "1 broken" in page and "made on kernel 1.0-other" in page
    assert "&lt;script&gt;alert(1)" in page and "<script>alert" not in page and "\u202e" not in page


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cases": 1, "host": {}}', "[" * 100_000])
def test_what_is_no_report_is_not_there(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "process-box.json").write_text(text)
    assert kept((tmp_path,), "process") == []


def test_people_of_other_tenants_do_not_see_the_gateways_own(served: Served) -> None:
    eve = visitor(served, token(served, "person", "eve")["token"])
    assert eve.get("/console/isolation").status == 404 and "/console/isolation" not in eve.get("/console/live").text
