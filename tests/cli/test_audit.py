"""`ringfence audit`: reading the log, and evidence that it is the one that was written."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from ringfence import config
from ringfence.audit.chain import ALWAYS
from ringfence.audit.export import verify_export
from ringfence.audit.keys import PUBLIC, load_or_create
from ringfence.cli import audit
from ringfence.compose.gateway import App
from ringfence.compose.runs import UNATTENDED
from ringfence.core import system
from ringfence.core.model import Call
from ringfence.store import Reader, Store
from tests import gateways, tooling
from tests.cli.terminals import at_terminal
from tests.gateways import run

CONFIG = """version: 1
gateway: {{state: ./state}}
servers: {{hostile: {{command: {command}, pins: first_use}}}}
capabilities:
  echo: {{mode: read, log: {{arguments: redacted, result: redacted}}, redact: ["hunter[0-9]"]}}
  rug: {{mode: read}}
  error: {{mode: write}}
  forbidden: {{mode: read, tool: echo}}
policy: {{preset: standard, rules: [{{id: never, name: Not this one, action: deny, tool_patterns: [forbidden]}}]}}
"""
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("call_aaa1", "echo", {"text": "hunter2 \x1b[2J likes cheese"}),
    ("call_aaa2", "forbidden", {}),
    ("call_aaa3", "error", {}),
    ("call_bbb1", "ecko", {}),
]


@dataclass(frozen=True, slots=True)
class Log:
    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "ringfence.yaml"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def audit(self, *words: str | Path) -> Any:
        return run("audit", *words, "--config", self.config)

    def edit(self, statement: str) -> None:
        with sqlite3.connect(self.state / "ringfence.db") as database:
            assert database.execute(statement).rowcount > 0
        database.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """A log of four calls by an agent, and what `system` did."""
    log = Log(tmp_path_factory.mktemp("audit"))
    path = gateways.write(log.folder, CONFIG.format(command=gateways.server("hostile_server.py")))

    async def make() -> None:
        async with App.open(config.load(path)) as app:
            for call_id, tool, arguments in CALLS:
                await app.handle(Call(call_id, app.agent, tool, arguments), UNATTENDED)

    anyio.run(make)
    return log


@pytest.fixture
def copy(log: Log, tmp_path: Path) -> Log:
    """The same log, to be tampered with."""
    shutil.copytree(log.folder, tmp_path, dirs_exist_ok=True)
    return Log(tmp_path)


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


def test_list_has_the_newest_first(log: Log) -> None:
    shown = log.audit("list").stdout.splitlines()
    calls = [re.split(r"\s{2,}", line)[1:] for line in shown if "  local  " in line]
    assert calls == [
        ["call_bbb1", "ecko", "local", "validation_failure", "unknown_tool"],
        ["call_aaa3", "error", "local", "failed", "tool_error"],
        ["call_aaa2", "forbidden", "local", "denied", "policy"],
        ["call_aaa1", "echo", "local", "success", "ok"],
    ]
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ", shown[0])
    assert "system" in shown[-1] and "hostile" in shown[-1]  # the start of the server is a call too


def test_list_has_a_header_on_a_terminal_only(log: Log) -> None:
    assert not log.audit("list").stdout.startswith("AT")
    with at_terminal("audit", "list", "--config", log.config) as terminal:
        assert terminal.end() == 0
    assert terminal.shown.splitlines()[0].split() == ["AT", "CALL", "ID", "TOOL", "AGENT", "STATUS", "REASON", "CODE"]


def test_a_limit_that_no_list_can_have_is_named(log: Log) -> None:
    ended = log.audit("list", "--limit", "9" * 20)
    assert ended.returncode == 2 and "'--limit'" in ended.stderr


def test_list_as_json_and_limited(log: Log) -> None:
    rows = json.loads(log.audit("list", "--json", "--limit", "2").stdout)
    assert [(row["call_id"], row["status"], row["agent"]) for row in rows] == [
        ("call_bbb1", "validation_failure", "local"),
        ("call_aaa3", "failed", "local"),
    ]


def test_list_of_everything(log: Log) -> None:
    kinds = {row["kind"] for row in json.loads(log.audit("list", "--all", "--json", "--limit", "500").stdout)}
    assert {"chain_opened", "pin_accepted", "started", "finished", "chain_closed"} <= kinds
    assert "pin_accepted" in log.audit("list", "--all", "--limit", "500").stdout


def test_show_has_every_record_and_what_is_kept(log: Log) -> None:
    told = json.loads(log.audit("show", "call_aaa1", "--json").stdout)
    assert [record["kind"] for record in told["records"]] == ["started", "finished"]
    assert all(record["hash"] for record in told["records"])
    assert told["payloads"]["arguments"] == {"text": "[redacted] \\u{1b}[2J likes cheese"}
    assert told["payloads"]["result"]["content"][0]["text"] == "[redacted]  likes cheese"
    pretty = log.audit("show", "call_aaa1").stdout
    assert "started" in pretty and "likes cheese" in pretty and "Kept of the result" in pretty
    assert all(c.isprintable() or c == "\n" for c in pretty)
    assert "nothing but a digest is kept" in log.audit("show", "call_aaa3").stdout


@pytest.mark.parametrize(
    ("identifier", "said"),
    [
        (
            "call_aaa1",
            ("std-read", "  result     success; ", "isolation process", "on record before anything was sent"),
        ),
        ("aaa2", ("  policy     refused by rules never", "Not this one", "it never ran", "  started    no\n")),
        ("last", ("ecko", "  contract   none applied", "Did you mean 'echo'", "it never ran")),
    ],
)
def test_explain_tells_why(log: Log, identifier: str, said: tuple[str, ...]) -> None:
    shown = log.audit("explain", identifier)
    assert shown.returncode == 0
    assert all(text in shown.stdout for text in said), shown.stdout


def test_an_id_must_mean_one_call(log: Log) -> None:
    ambiguous, unknown = log.audit("explain", "call_aaa"), log.audit("show", "call_zzz")
    assert ambiguous.returncode == unknown.returncode == 1
    assert "call_aaa2, " in ambiguous.stderr or "call_aaa3, " in ambiguous.stderr
    assert unknown.stderr == "there is no call call_zzz on record; see: ringfence audit list\n"


def test_a_call_of_a_server_is_not_replayed(log: Log) -> None:
    shown = log.audit("replay", "call_aaa1")
    assert shown.returncode == 2
    assert "a server carried it out, and could have its effects again" in shown.stderr


def test_a_call_under_way_is_listed(tmp_path: Path) -> None:
    path = gateways.write(tmp_path, CONFIG.format(command=gateways.server("hostile_server.py")))
    path.write_text(path.read_text().replace("  rug:", "  slow: {mode: read}\n  rug:"))
    command = gateways.ringfence("call", "slow", "--args", '{"seconds": 20}', "--config", path)
    with tooling.start_process(command) as started:
        while not (rows := _running(tmp_path)):
            assert started.process.poll() is None, started.output()
            time.sleep(0.02)
        shown = run("audit", "list", "--config", path).stdout
        assert rows[0] in shown.splitlines()[0] and "running" in shown.splitlines()[0]
        refused = run("audit", "erase", rows[0], "--config", path)
        assert refused.returncode == 1 and "still running" in refused.stderr


def _running(folder: Path) -> list[str]:
    if not (folder / "state" / "ringfence.db").exists():
        return []
    try:
        started = gateways.records(folder / "state", kind="started")
    except Exception:  # the database is being made just now
        return []
    return [body["call"]["id"] for body in started if body["call"]["kind"] == "tool"]


# ── Evidence ──────────────────────────────────────────────────────────────────────────────────────


def test_the_live_log_verifies(log: Log) -> None:
    shown = log.audit("verify")
    assert shown.returncode == 0
    assert re.fullmatch(r"\d+ records in \d+ chains?: verified\.\n", shown.stdout)


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("UPDATE records SET text = replace(text, 'denied', 'allowed') WHERE call_id = 'call_aaa2'", "was edited"),
        ("UPDATE shared SET text = replace(text, 'forbidden', 'permitted')", "names a part that was edited"),
        ("DELETE FROM records WHERE call_id = 'call_aaa2'", "missing before it"),
        ("UPDATE records SET seq = CASE seq WHEN 2 THEN -3 ELSE -2 END WHERE seq IN (2, 3)", ""),
        ("DELETE FROM records WHERE seq >= (SELECT max(seq) FROM records)", "cut from the end"),
        ("DELETE FROM records", "is missing; its checkpoint stands at"),
    ],
    ids=["edit", "edit of a shared part", "deletion", "reordering", "cut tail", "everything"],
)
def test_every_tampering_is_found(copy: Log, statement: str, fault: str) -> None:
    copy.edit(statement)
    shown = copy.audit("verify")
    assert shown.returncode == 1
    assert "fault" in shown.stdout and fault in shown.stdout


def test_another_key_verifies_nothing(log: Log, tmp_path: Path) -> None:
    load_or_create(tmp_path / "keys")
    shown = log.audit("verify", "--public-key", tmp_path / "keys" / PUBLIC)
    assert shown.returncode == 1 and "verifies with the given key" in shown.stdout


def test_a_damaged_record_is_one_sentence(copy: Log) -> None:
    copy.edit("UPDATE records SET text = 'no json' WHERE call_id = 'call_bbb1'")
    shown = copy.audit("explain", "call_bbb1")
    assert shown.returncode == 1
    assert "a record cannot be read" in shown.stderr and shown.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def exported(log: Log) -> Path:
    path = log.folder / "all.jsonl"
    shown = log.audit("export", path)
    assert shown.returncode == 0
    assert str(config.key_folder() / PUBLIC) in shown.stdout and f"audit verify {path} --public-key" in shown.stdout
    return path


def test_an_export_verifies_with_nothing_but_the_key(exported: Path, tmp_path: Path, monkeypatch: Any) -> None:
    key = tmp_path / "key.pem"
    shutil.copy(config.key_folder() / PUBLIC, key)
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    shown = run("audit", "verify", exported, "--public-key", key, cwd=tmp_path)
    assert shown.returncode == 0 and "verified." in shown.stdout
    assert not (tmp_path / "elsewhere").exists()  # nothing else was opened, or made
    without = run("audit", "verify", exported, cwd=tmp_path)
    assert without.returncode == 2 and "--public-key" in without.stderr


def test_the_name_of_an_export_is_escaped(log: Log, tmp_path: Path) -> None:
    shown = log.audit("export", tmp_path / "e\x1b[2J\u202e.jsonl")
    assert shown.returncode == 0
    assert "\\x1b" in shown.stdout and "\x1b" not in shown.stdout and "\u202e" not in shown.stdout


def test_a_changed_export_is_found(exported: Path, tmp_path: Path) -> None:
    lines = exported.read_bytes().splitlines(keepends=True)
    key = config.key_folder() / PUBLIC
    for name, changed in (
        ("cut", lines[:-1]),
        ("gap", lines[:3] + lines[4:]),
        ("order", [lines[0], lines[2], lines[1], *lines[3:]]),
    ):
        path = tmp_path / name
        path.write_bytes(b"".join(changed))
        shown = run("audit", "verify", path, "--public-key", key)
        assert shown.returncode == 1 and "fault" in shown.stdout, name


def test_an_export_never_replaces_a_file(log: Log, exported: Path) -> None:
    before = exported.read_bytes()
    shown = log.audit("export", exported)
    assert shown.returncode == 1 and "exists already" in shown.stderr
    assert exported.read_bytes() == before


def test_a_period_of_the_log(log: Log, tmp_path: Path) -> None:
    none = log.audit("export", tmp_path / "none.jsonl", "--until", "2001-01-01")
    assert none.returncode == 0 and ": 0 records" in none.stdout
    some = log.audit("export", tmp_path / "some.jsonl", "--since", "2001-01-01T08:00:00+02:00")
    assert some.returncode == 0 and ": 0 records" not in some.stdout
    for words in (("--since", "yesterday"), ("--since", "2002-01-01", "--until", "2001-01-01")):
        shown = log.audit("export", tmp_path / "bad.jsonl", *words)
        assert shown.returncode == 2 and shown.stderr.count("\n") == 1
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("part", ["arguments", "result"])
def test_a_payload_that_is_not_what_was_recorded_is_told(copy: Log, part: str) -> None:
    """Also where it was redacted, and is another text than the one that was called with."""
    assert copy.audit("verify").returncode == 0
    row = f"call_id = 'call_aaa1' AND part = '{part}'"
    copy.edit(f"UPDATE payloads SET body = CAST(replace(body, 'cheese', 'FORGED') AS BLOB) WHERE {row}")
    said = copy.audit("verify")
    assert said.returncode == 1
    assert f"what is kept of the {part} of call call_aaa1 is not what was recorded" in said.stdout
    assert f"Kept of the {part}, and not what was recorded:" in copy.audit("show", "call_aaa1").stdout
    assert json.loads(copy.audit("show", "call_aaa1", "--json").stdout)["unlike"] == [f"{part}: not what was recorded"]
    copy.edit(f"UPDATE payloads SET body = 'text', salt = 5 WHERE {row}")
    assert copy.audit("verify").returncode == 1 and copy.audit("show", "call_aaa1").returncode == 0


@pytest.mark.parametrize("salt", ["NULL", "X'00'", "'text'"])
def test_a_salt_that_is_gone_without_an_erasure_is_found(copy: Log, salt: str) -> None:
    copy.edit(f"UPDATE records SET salt = {salt} WHERE call_id = 'call_aaa1' AND kind = 'started'")
    said = copy.audit("verify")
    assert said.returncode == 1
    assert "the salt of the digests of call call_aaa1 is gone, and no erasure is on record" in said.stdout


def test_a_payload_of_a_call_that_kept_none_cannot_be_checked(copy: Log) -> None:
    copy.edit("INSERT INTO payloads SELECT 'call_aaa3', part, salt, body FROM payloads WHERE call_id = 'call_aaa1'")
    said = "cannot be checked: its record does not say that anything was kept"
    assert f"what is kept of the arguments of call call_aaa3 {said}" in copy.audit("verify").stdout
    assert f"Kept of the arguments, and {said}:" in copy.audit("show", "call_aaa3").stdout


def test_a_record_that_was_moved_in_the_order_of_lists_is_found(copy: Log) -> None:
    moved = "(SELECT max(id) FROM records) + 1"
    copy.edit(f"UPDATE records SET id = {moved} WHERE call_id = 'call_aaa1' AND kind = 'finished'")
    said = copy.audit("verify")
    assert said.returncode == 1 and "stands before the record that it follows" in said.stdout


def test_an_index_that_hides_a_call_is_found(copy: Log) -> None:
    """Lists read the log by indexes, verify by another: one may be made for fewer rows, and its text put back."""
    right = "CREATE INDEX records_ended ON records (id) WHERE kind = 'finished'"
    with sqlite3.connect(copy.state / "ringfence.db") as database:
        database.execute("DROP INDEX records_ended")
        database.execute(f"{right} AND call_id <> 'call_aaa2'")
        database.execute("PRAGMA writable_schema = 1")
        database.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'records_ended'", (right,))
    database.close()
    assert "call_aaa2" not in copy.audit("list").stdout
    said = copy.audit("verify")
    assert said.returncode == 1 and "the database is damaged" in said.stdout and "records_ended" in said.stdout


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("DROP INDEX records_ended", "index records_ended of the database is missing"),
        (
            "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",
            "trigger t of the database is none",
        ),
    ],
)
def test_a_database_with_other_definitions_is_found(copy: Log, statement: str, told: str) -> None:
    with sqlite3.connect(copy.state / "ringfence.db") as database:
        database.execute(statement)
    database.close()
    said = copy.audit("verify")
    assert said.returncode == 1 and told in said.stdout


def test_a_trigger_with_a_name_like_those_of_sqlite_itself_is_found_and_keeps_every_writer_out(copy: Log) -> None:
    with sqlite3.connect(copy.state / "ringfence.db") as database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM keys; END")
        database.execute("PRAGMA writable_schema = 1")
        text = "UPDATE sqlite_master SET name = ?1, sql = replace(sql, 'TRIGGER t', 'TRIGGER ' || ?1) WHERE name = 't'"
        database.execute(text, ("sqlite_t",))
    database.close()
    said = copy.audit("verify")
    assert said.returncode == 1 and "trigger sqlite_t of the database is none of ours" in said.stdout
    said = copy.audit("erase", "call_aaa1")
    assert said.returncode != 0 and "has the trigger 'sqlite_t'" in said.stderr


def test_statistics_that_sqlite_collected_are_no_fault(copy: Log) -> None:
    with sqlite3.connect(copy.state / "ringfence.db") as database:
        database.execute("ANALYZE")
    database.close()
    assert copy.audit("verify").returncode == 0


def test_a_payload_that_is_gone_without_an_erasure_is_found(copy: Log) -> None:
    copy.edit("DELETE FROM payloads WHERE call_id = 'call_aaa1' AND part = 'arguments'")
    said = copy.audit("verify")
    assert said.returncode == 1
    assert "what was kept of the arguments of call call_aaa1 is gone, and no erasure is on record" in said.stdout
    assert "What was kept of the arguments is gone" in copy.audit("show", "call_aaa1").stdout


def test_a_name_in_the_database_makes_no_line_of_its_own(copy: Log) -> None:
    copy.edit("UPDATE records SET chain = 'a' || char(10) || '9 records in 1 chain: verified.' WHERE seq = 1")
    said = copy.audit("verify")
    assert said.returncode == 1 and "a\\n9 records" in said.stdout and "\n9 records" not in said.stdout


def test_erasing_is_on_record_and_breaks_nothing(copy: Log) -> None:
    assert b"likes cheese" in (copy.state / "ringfence.db").read_bytes()
    erased = copy.audit("erase", "call_aaa1")
    assert (erased.returncode, erased.stdout) == (0, "call_aaa1: what was kept of its payloads is erased.\n")
    reader = Reader.open(copy.state)
    assert reader.payload("call_aaa1", "arguments") is None
    assert [record.kind for record in reader.records(call_id="call_aaa1")] == ["started", "finished", "payload_erased"]
    reader.close()
    again = copy.audit("erase", "call_aaa1")
    assert again.returncode == 0 and "nothing was kept" in again.stdout
    assert copy.audit("verify").returncode == 0
    assert "nothing but a digest is kept" in copy.audit("show", "call_aaa1").stdout


def test_an_erasure_is_not_said_to_be_done_while_another_program_reads(
    copy: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("schema", "writer"):
        monkeypatch.setattr(f"ringfence.store.{module}.BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(copy.state / "ringfence.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM records").fetchone()
        for _ in range(2):
            with pytest.raises(SystemExit) as ended:
                audit.erase("call_aaa1", copy.config, False)
            said = capsys.readouterr()
            assert ended.value.code == 1 and "then repeat: ringfence audit erase call_aaa1" in said.err
            assert "is erased" not in said.out
    audit.erase("call_aaa1", copy.config, False)
    assert b"likes cheese" not in b"".join(path.read_bytes() for path in copy.state.glob("ringfence.db*"))


# ── pruning ──


def test_a_pruned_log_and_its_export_verify_and_the_rest_is_gone(copy: Log, tmp_path: Path) -> None:
    said = copy.audit("prune", "--before", "2001-01-01")
    assert (said.returncode, "Nothing was removed" in said.stdout) == (0, True), said.stdout + said.stderr
    assert copy.audit("prune", "--before", "2999-01-01").returncode == 2
    reader = Reader.open(copy.state)
    newest = max(record.at for record in reader.records())
    reader.close()
    moment = datetime.fromtimestamp(newest + 0.001, UTC).isoformat()
    said = copy.audit("prune", "--before", moment)
    assert (said.returncode, "are removed" in said.stdout) == (0, True), said.stdout + said.stderr
    assert "call_aaa1" not in copy.audit("list").stdout
    assert "were pruned by" in copy.audit("verify").stdout
    export = tmp_path / "pruned.jsonl"
    assert copy.audit("export", export).returncode == 0
    said = run("audit", "verify", export, "--public-key", config.key_folder() / PUBLIC)
    assert (said.returncode, "were pruned by" in said.stdout) == (0, True), said.stdout


def test_a_prune_while_the_log_is_verified_or_exported_is_no_fault(
    copy: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = load_or_create(config.key_folder())
    look, left, changed = Reader.checkpoints, 0, False

    def look_and_prune(reader: Reader) -> dict[str, bytes]:
        nonlocal left
        found, left = look(reader), left - 1
        if left >= 0:
            with Store.open(copy.state, keys) as store:
                assert store.prune(time.time(), "anna").records > 0 or changed
        return found

    monkeypatch.setattr(Reader, "checkpoints", look_and_prune)
    with closing(Reader.open(copy.state)) as reader:
        for _ in range(2):
            left = 1
            report = audit._verified(reader, keys.public)
            assert report.ok and left < 0, str(report)
        left = 1
        audit._exported(reader, tmp_path / "export.jsonl", keys, ALWAYS)
        assert left < 0 and verify_export(tmp_path / "export.jsonl", keys.public).ok
        copy.edit("DELETE FROM records WHERE kind = 'pruned'")
        left, changed = 1, True
        assert not audit._verified(reader, keys.public).ok


@pytest.mark.anyio
async def test_a_gateway_prunes_what_is_older_than_its_retention(copy: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with copy.config.open("a") as file:
        file.write("environment: test\n")
    copy.config.write_text(copy.config.read_text().replace("{state: ./state}", "{state: ./state, retention: 1h}"))
    monkeypatch.setattr("ringfence.compose.gateway.time", SimpleNamespace(time=lambda: time.time() + 7200))
    async with App.open(config.load(copy.config)) as app, anyio.create_task_group() as group:
        group.start_soon(app.retain)
        with anyio.fail_after(60):
            while not list(app.store.reader().records(kind="pruned")):
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("written", [False, True])
async def test_a_clock_that_is_years_ahead_prunes_nothing_until_the_gateway_has_run_for_a_day(
    copy: Log, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Also where another process has written a record by that clock before."""
    with copy.config.open("a") as file:
        file.write("environment: test\n")
    copy.config.write_text(copy.config.read_text().replace("{state: ./state}", "{state: ./state, retention: 90d}"))
    if written:
        copy.edit("UPDATE records SET at = at + 315360000 WHERE id = (SELECT max(id) FROM records)")
    monkeypatch.setattr("ringfence.compose.gateway.time", SimpleNamespace(time=lambda: time.time() + 315360000))
    monkeypatch.setattr("ringfence.compose.gateway._RETAIN_SECONDS", 0.01)
    ahead = 0.0
    uptime = system.uptime
    monkeypatch.setattr(system, "uptime", lambda: uptime() + ahead)
    async with App.open(config.load(copy.config)) as app, anyio.create_task_group() as group:
        group.start_soon(app.retain)
        with anyio.fail_after(60):
            while not list(app.store.reader().records(kind="retention_waits")):
                await anyio.sleep(0.01)
        await anyio.sleep(0.1)
        assert not list(app.store.reader().records(kind="pruned"))
        assert len(list(app.store.reader().records(kind="retention_waits"))) == 1
        ahead = 25 * 3600.0
        with anyio.fail_after(60):
            while not list(app.store.reader().records(kind="pruned")):
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
