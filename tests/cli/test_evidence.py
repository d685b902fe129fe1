"""Evidence beside the log: a signer, and what it knows when database and checkpoints are put back together."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringfence.audit.keys import PRIVATE, PUBLIC, SIGNER
from tests import gateways
from tests.gateways import run

CONFIG = """version: 1
gateway: {{state: ./state}}
audit: {audit}
capabilities: {{execute_python: {{transport: sandboxed_exec, mode: high_risk, approval: none}}}}
policy: {{preset: standard}}
"""


@dataclass(frozen=True, slots=True)
class Place:
    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "ringfence.yaml"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    def configure(self, audit: str) -> None:
        gateways.write(self.folder, CONFIG.format(audit=audit))

    def __call__(self, *words: str | Path) -> Any:
        return run(*words, "--config", self.config)

    def call(self) -> None:
        """A call of an agent, which is refused: that is on record like any other."""
        assert "unknown_tool" in self("call", "no_such_tool", "--json").stdout

    def put_back(self, copy: Path) -> None:
        shutil.rmtree(self.folder / "state")
        shutil.copytree(copy, self.folder / "state")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path)
    monkeypatch.setenv("RINGFENCE_KEYS", str(found.keys))
    return found


# ── The signer ──


def test_a_gateway_with_a_signer(place: Place) -> None:
    place.configure("{signer: process}")
    place.call()
    assert not (place.keys / PRIVATE).exists() and (place.keys / SIGNER / PRIVATE).exists()
    shown = place("audit", "verify")
    assert shown.returncode == 0 and "the signer's heads of 1 chains were compared" in shown.stdout
    state = json.loads(place("state", "--json").stdout)
    assert [each["path"] for each in state["places"] if each["name"] == "signer"] == [str(place.keys / SIGNER)]
    export = place.folder / "all.jsonl"
    assert place("audit", "export", export).returncode == 0
    assert "verified" in run("audit", "verify", export, "--public-key", place.keys / PUBLIC).stdout


def test_other_programs_use_the_signer_once_there_is_one(place: Place) -> None:
    place.configure("{signer: process}")
    place.call()
    place.configure("{signer: inline}")
    place.call()
    assert "the signer's heads of 2 chains" in place("audit", "verify").stdout
    assert not (place.keys / PRIVATE).exists()


def test_verify_finds_database_and_checkpoints_put_back_together_by_what_the_signer_knows(
    place: Place, tmp_path: Path
) -> None:
    place.configure("{signer: process}")
    place.call()
    shutil.copytree(place.folder / "state", tmp_path / "copy")
    place.call()
    place.put_back(tmp_path / "copy")
    shown = place("audit", "verify")
    assert shown.returncode == 1
    assert "is missing, and the signer has it: the database and its checkpoints were cut back together" in shown.stdout


def test_a_signer_of_a_user_that_is_none(place: Place) -> None:
    place.configure("{signer: process, signer_user: no-such-account}")
    shown = place("call", "no_such_tool")
    assert shown.returncode != 0 and "there is no account no-such-account" in shown.stdout
