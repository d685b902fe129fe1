"""Evidence beside the log: a signer, and what it knows when database and checkpoints are put back together."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
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


# ── Witnesses ──


def test_a_witness_file_finds_database_and_checkpoints_cut_back_together(place: Place, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.touch()
    place.configure(f"{{witness: {{file: {heads}}}}}")
    place.call()
    copied = shutil.copytree(place.folder / "state", tmp_path / "copy")
    place.call()
    before = place("audit", "verify", "--witness", heads)
    assert before.returncode == 0 and "heads of the witness" in before.stdout
    export = tmp_path / "before.jsonl"
    assert place("audit", "export", export).returncode == 0
    key = place.keys / PUBLIC
    assert run("audit", "verify", export, "--public-key", key, "--witness", heads).returncode == 0

    place.put_back(copied)
    assert place("audit", "verify").returncode == 0, "by itself, it looks like a log that stopped there"
    shown = place("audit", "verify", "--witness", heads)
    assert shown.returncode == 1
    assert f"is missing, and the witness {heads} has it: the database and its checkpoints" in shown.stdout
    export = tmp_path / "after.jsonl"
    assert place("audit", "export", export).returncode == 0
    assert run("audit", "verify", export, "--public-key", key).returncode == 0
    shown = run("audit", "verify", export, "--public-key", key, "--witness", heads)
    assert shown.returncode == 1 and "the log was cut back before it was exported" in shown.stdout

    place.call()
    shown = place("audit", "verify", "--witness", heads)
    assert shown.returncode == 1, "that the log goes on from there heals nothing"


def test_a_witness_says_that_there_was_a_log_where_there_is_none(place: Place, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.touch()
    place.configure(f"{{witness: {{file: {heads}}}}}")
    place.call()
    shutil.rmtree(place.folder / "state")
    assert "no gateway has kept its state there" in place("audit", "verify").stderr
    shown = place("audit", "verify", "--witness", heads)
    assert shown.returncode == 1 and "the log was removed or lies elsewhere" in shown.stderr
    assert "--config" in shown.stderr


def test_a_witness_of_another_log_witnesses_nothing(place: Place, tmp_path: Path) -> None:
    place.configure("{}")
    place.call()
    heads = tmp_path / "heads"
    heads.write_text("Nov 19 01:00:00 host cron[1]: something else\n")
    shown = place("audit", "verify", "--witness", heads)
    assert shown.returncode == 1 and "witnesses nothing" in shown.stderr


def test_what_pruning_removes_a_witness_does_not_miss(place: Place, tmp_path: Path) -> None:
    heads = tmp_path / "heads"
    heads.touch()
    place.configure(f"{{witness: {{file: {heads}}}}}")
    place.call()
    place.call()
    now = datetime.now(UTC).isoformat()
    place.call()
    assert "are removed" in place("audit", "prune", "--before", now).stdout
    shown = place("audit", "verify", "--witness", heads)
    assert shown.returncode == 0, shown.stdout


def test_the_configuration_says_what_a_witness_needs(place: Place) -> None:
    for audit, problem in (
        ("{witness: {}}", "a witness needs file: PATH, syslog: true or webhook: URL"),
        ("{witness: {file: state/heads}}", "lies in the state folder"),
        ("{witness: {webhook: 'http://example.com/heads'}}", "sent in clear: write https://"),
    ):
        place.configure(audit)
        shown = place("call", "no_such_tool")
        assert shown.returncode != 0 and problem in shown.stderr


# ── Secrets ──


def test_the_calls_that_could_have_used_a_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIDENCE_TOKEN", "s3cr3t-value-of-a-token")
    gateways.write(
        place.folder,
        """version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
secrets: {token: {from: env, name: EVIDENCE_TOKEN, hosts: [api.example.com], header: Authorization}}
networks: {api: {allow: ["api.example.com:443"]}}
capabilities:
  run_shell: {transport: sandboxed_exec, mode: high_risk, approval: always, network: api, secrets: token}
  execute_python: {transport: sandboxed_exec, mode: high_risk, approval: always}
""",
    )
    place("call", "run_shell", "--args", '{"command": "true"}')
    place("call", "execute_python", "--args", '{"code": "1"}')
    rows = json.loads(place("audit", "exposure", "token", "--json").stdout)
    assert [(row["tool"], row["by"], row["used"], row["status"]) for row in rows] == [
        ("run_shell", "contract", 0, "approval_required")
    ]
    assert place("audit", "exposure", "token", "--until", "2020-01-01").stdout.startswith("No call on record")
