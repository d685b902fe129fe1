"""The secrets of a configuration in force: read at the start, read anew, and in no log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from ringfence.compose.gateway import App
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import UNATTENDED, Runs
from ringfence.compose.secrets import ConfiguredSecrets, redacted_logs
from ringfence.core import canonical
from ringfence.core.box import Attached
from ringfence.core.errors import ConfigError
from ringfence.core.model import Call, Outcome
from tests import gateways
from tests.egress.outside import serving
from tests.governance.test_broker import outside

pytestmark = pytest.mark.anyio

VALUE = "correct-horse-battery-staple"
CONFIG = """
version: 1
gateway: {state: ./state, approval_wait_seconds: 0}
secrets:
  token: {from: file, path: token}
policy: {preset: permissive}
"""


def written(folder: Path, value: str, text: str = CONFIG) -> Path:
    (folder / "token").write_text(value)
    return gateways.write(folder, text)


async def printed(app: App, value: str) -> Outcome:
    half = len(value) // 2
    code = f"print({value[:half]!r} + {value[half:]!r})"
    return await app.handle(Call(canonical.new_id("call"), app.agent, "execute_python", {"code": code}), UNATTENDED)


async def test_a_value_that_cannot_be_kept_is_a_problem_of_the_configuration(tmp_path: Path) -> None:
    path = written(tmp_path, "elevenchars")
    with pytest.raises(ConfigError) as caught:
        async with App.open(config.load(path)):
            pass
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (5, 3) and problem.file.endswith("ringfence.yaml")
    assert "fewer than 12 characters" in problem.text and "elevenchars" not in problem.text


async def test_a_value_that_is_not_there_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, VALUE)
    (tmp_path / "token").unlink()
    async with App.open(config.load(path)):
        assert "secret 'token'" in caplog.text and "calls that need it are refused" in caplog.text


async def test_a_rotated_value_and_the_one_before_it_are_removed(tmp_path: Path) -> None:
    async with App.open(config.load(written(tmp_path, VALUE))) as app:
        assert (await printed(app, VALUE)).text == "[redacted]\n"
        (tmp_path / "token").write_text("another-value-altogether")
        await app.secrets.vault.load()
        for value in ("another-value-altogether", VALUE):
            assert (await printed(app, value)).text == "[redacted]\n"


async def test_a_reload_brings_secrets_or_is_refused_as_a_whole(tmp_path: Path) -> None:
    path = written(tmp_path, VALUE)
    async with App.open(config.load(path)) as app:
        (tmp_path / "short").write_text("short")
        path.write_text(CONFIG.replace("path: token}", "path: token}\n  bad: {from: file, path: short}"))
        await app.reload(asked=True)
        assert list(app.config.secrets) == ["token"]
        refused = [r.body for r in app.store.reader().records() if r.kind == "reload_refused"]
        assert "fewer than 12 characters" in refused[0]["problems"][0]
        path.write_text(CONFIG.replace("token: {from: file, path: token}", "other: {from: file, path: token2}"))
        (tmp_path / "token2").write_text("another-value-altogether")
        await app.reload(asked=True)
        # What is declared no more may still stand somewhere.
        for value in ("another-value-altogether", VALUE):
            assert (await printed(app, value)).text == "[redacted]\n"


async def test_no_log_holds_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    safe = ConfiguredSecrets(config.load(written(tmp_path, VALUE)))
    await safe.load()
    async with redacted_logs(lambda: safe):
        log = logging.getLogger("anything.at.all")
        log.warning("a value: %s", VALUE)
        log.warning("a dictionary: %s", {"key": VALUE})
        log.warning("nothing %d", 7)
        try:
            raise ValueError(VALUE)
        except ValueError:
            log.exception("it failed")
    assert VALUE not in caplog.text and caplog.text.count("[redacted]") == 3
    assert "nothing 7" in caplog.text
    log.warning("%s", VALUE)
    assert VALUE in caplog.text


async def test_a_line_break_begins_no_record_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    safe = ConfiguredSecrets(config.load(written(tmp_path, VALUE)))
    await safe.load()
    forged = "ERROR ringfence.audit: all is well"
    async with redacted_logs(lambda: safe):
        log = logging.getLogger("anything.at.all")
        log.warning("a subscription to %s", f"file:///x\n{forged}\r\n{forged}")
        try:
            raise ValueError(f"x\n{forged}")
        except ValueError:
            log.exception("it failed")
    assert caplog.text.count(forged) == 3
    assert not any(line.startswith(("ERROR ringfence", "Traceback")) for line in caplog.text.splitlines())
    assert "    | Traceback" in caplog.text and "    |     | " not in caplog.text


async def test_what_others_say_in_a_log_steers_no_terminal_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    safe = ConfiguredSecrets(config.load(written(tmp_path, VALUE)))
    await safe.load()
    async with redacted_logs(lambda: safe):
        log = logging.getLogger("anything.at.all")
        log.warning("server: %s", "\x1b]0;owned\x07 pay\u200b\u202e now\nsecond line")
        log.warning("split: %s", f"{VALUE[:9]}\u200b{VALUE[9:15]}\x00{VALUE[15:]}")
    assert "\\x1b]0;owned\\x07 pay\\u{200b}\\u{202e} now\n    | second line" in caplog.text
    assert "split: [redacted]" in caplog.text


async def test_what_an_agent_makes_up_is_not_written_down_either(tmp_path: Path) -> None:
    async with App.open(config.load(written(tmp_path, VALUE))) as app:
        call = Call(canonical.new_id("call"), app.agent, f"tool-{VALUE}", {}, trace=VALUE)
        outcome = await app.handle(call, UNATTENDED)
        assert VALUE not in outcome.message and "[redacted]" in outcome.message
        assert VALUE not in json.dumps([record.body for record in app.store.reader().records()])


async def test_runs_of_ones_own_have_the_same(tmp_path: Path) -> None:
    heard: list[bytes] = []
    async with Runs.open(config.load(written(tmp_path, VALUE))) as runs:
        out = tmp_path / "out"
        out.mkdir()
        code = f"value = {VALUE[:9]!r} + {VALUE[9:]!r}\nfor letter in value:\n    print(letter, end='', flush=True)\n"
        code += "open('/workspace/output/it', 'w').write(value)"
        wanted = RunRequest(code=code, output=out)
        outcome = await runs.run(wanted, origin="cli", tell=lambda _, data: heard.append(data))
        assert outcome.ok and b"".join(heard) == b"[redacted]"
        assert outcome.ran is not None and outcome.ran.report.stdout.text == "[redacted]"
        assert (out / "it").read_text() == "*" * len(VALUE)
        assert outcome.facts["redactions"] == {"known_secret": 2}


async def test_the_example_of_the_documents_does_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/secrets.md").read_text()
    declared, rules = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    program, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    async with outside(tmp_path, monkeypatch) as (api,):
        monkeypatch.setenv("HELPDESK_TOKEN", VALUE)
        place = f"127.0.0.1:{api.port}"
        declared = declared.replace("helpdesk.corp.example:443", place).replace("helpdesk.corp.example", f'"{place}"')
        path = gateways.write(tmp_path, f"gateway: {{state: ./state}}\n{declared}{rules}")
        async with App.open(config.load(path)) as app:
            for where, status in (("/tickets", "success"), ("/admin", "failed")):
                code = program.replace("helpdesk.corp.example/tickets", place + where)
                call = Call(canonical.new_id("call"), app.agent, "execute_python", {"code": code})
                outcome = await app.handle(call, UNATTENDED)
                assert outcome.status == status, outcome.text
                assert VALUE not in outcome.text
        assert [(p, h["authorization"]) for _, p, h, _ in api.seen] == [("/tickets", f"Bearer {VALUE}")]


async def test_sessions_have_the_same(tmp_path: Path) -> None:
    async with Runs.open(config.load(written(tmp_path, VALUE))) as runs:
        opened = await runs.call("open_session", {}, Attached(), origin="sdk")
        session = opened.structured["session"]
        for metadata in ({"for": f"it is {VALUE}"}, {VALUE: "x"}):
            refused = await runs.call("open_session", {"metadata": metadata}, Attached(), origin="sdk")
            assert (refused.status, refused.facts["effect"]) == ("validation_failure", "none")
            assert "these hold a secret" in refused.text and VALUE not in refused.text
        heard: list[bytes] = []
        shown: list[Any] = []
        code = f"value = {VALUE[:9]!r} + {VALUE[9:]!r}\nprint(value)\nopen('/workspace/it', 'w').write(value)\nvalue"
        attached = Attached(tell=lambda _, data: heard.append(data), shown=shown.append)
        outcome = await runs.call("execute_python", {"code": code, "session": session}, attached, origin="sdk")
        assert outcome.ok and b"".join(heard) == b"[redacted]\n"
        assert shown[0].data["text/plain"] == "'[redacted]'" and VALUE not in json.dumps(outcome.result)
        assert outcome.within is not None and outcome.within.report is not None
        assert VALUE not in str(outcome.within.report)
        read: list[bytes] = []

        async def sink(piece: bytes) -> None:
            read.append(piece)

        given = {"session": session, "path": "/workspace/it"}
        told = await runs.call("read_file", given, Attached(sink=sink), origin="sdk")
        assert b"".join(read) == b"*" * len(VALUE)
        assert told.structured["sha256"] == sha256(b"".join(read)).hexdigest()
        assert (await runs.call("read_file", given, Attached(), origin="sdk")).text == "[redacted]"
        await runs.call("close_session", {"session": session}, Attached(), origin="sdk")


async def test_a_vault_is_asked_with_the_token_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head)
        good = "X-Vault-Token: token-of-the-moment" in head and head.startswith("GET /v1/secret/cloud ")
        body = json.dumps({"data": {"key": VALUE}} if good else {"errors": []}).encode()
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (200 if good else 403, len(body), body))

    monkeypatch.setenv("MY_TOKEN", "token-of-the-moment")
    async with serving(answer) as port:
        text = CONFIG.replace("{from: file, path: token}", "{from: vault, path: secret/cloud, field: key}")
        text += f'vault: {{address: "http://127.0.0.1:{port}", token_env: MY_TOKEN}}\n'
        safe = ConfiguredSecrets(config.load(gateways.write(tmp_path, text)))
        assert await safe.vault.load() == {}
        assert safe.shown.redact(f"it is {VALUE}") == ("it is [redacted]", {"known_secret": 1})
        # Its name would be checked as everybody's: only the address that is written down may be private.
        named = text.replace("127.0.0.1", "localhost")
        unnamed = ConfiguredSecrets(config.load(gateways.write(tmp_path, named)))
        assert list(await unnamed.vault.load()) == ["token"] and len(asked) == 1
