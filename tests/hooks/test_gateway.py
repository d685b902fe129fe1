"""Hooks of a gateway that people use: a function, a command in a box and an address, also after `kill -9`."""

from __future__ import annotations

import http.client
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from ringfence.core.errors import ConfigError
from tests import boxing, gateways
from tests.hooks.receiver import receiving
from tests.tooling import wait_until, wait_until_gone

DESK = gateways.server("hostile_server.py")
TOP = f"""
version: 1
gateway: {{state: ./state}}
servers: {{desk: {{command: {DESK}, pins: first_use, placement: unsafe_host}}}}
capabilities: {{echo: {{mode: read}}}}
"""
PYTHON = """
import json, os, time
def record(each):
    while os.path.exists("hold"):
        time.sleep(0.01)
    with open("told", "a") as file:
        file.write(json.dumps(each) + "\\n")
"""
COMMAND = """
import json, sys
with open("/data/lines", "a") as file:
    for line in sys.stdin:
        record = json.loads(line)
        file.write(record["id"] + " " + record["record"]["status"] + "\\n")
"""

POST = """
import contextlib, urllib.error, urllib.request
with contextlib.suppress(urllib.error.HTTPError):
    urllib.request.urlopen("http://elsewhere.example/")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hook.py").write_text(PYTHON)
    return tmp_path


def told(folder: Path) -> list[dict[str, Any]]:
    path = folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tools(folder: Path) -> list[str]:
    return [each["record"]["call"]["tool"] for each in told(folder) if each["record"]["call"]["kind"] == "tool"]


def call(served: gateways.Served, tool: str = "echo") -> None:
    done = gateways.run("call", tool, "--args", '{"text": "refunds"}', "--url", served.url, "--json")
    assert json.loads(done.stdout)["status"] in ("success", "validation_failure"), done.stdout + done.stderr


def test_each_call_that_ends_is_told_once_with_what_is_on_record(folder: Path) -> None:
    path = gateways.write(folder, TOP + 'hooks: {tally: {python: "./hook.py:record"}}\n')
    with gateways.serve(path) as served:
        call(served)
        call(served, "no_such_tool")
        wait_until(lambda: tools(folder) == ["echo", "no_such_tool"])
        connection = http.client.HTTPConnection("127.0.0.1", int(served.url.split(":")[2].split("/")[0]))
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        connection.close()
    assert 'ringfence_hook_behind{hook="tally"} 0' in metrics
    recorded = {(body["chain"], body["seq"]): body for body in gateways.records(folder / "state", kind="finished")}
    for each in told(folder):
        body = each["record"]
        assert each["id"] == f"{body['chain']}:{body['seq']}"
        assert recorded[body["chain"], body["seq"]] == body
    assert "refunds" not in (folder / "told").read_text()
    assert gateways.verified(folder / "state").ok


def test_after_a_kill_it_goes_on_where_it_was(folder: Path) -> None:
    path = gateways.write(folder, TOP + 'hooks: {tally: {python: "./hook.py:record"}}\n')
    with gateways.serve(path) as served:
        call(served)
        wait_until(lambda: tools(folder) == ["echo"])
        (folder / "hold").touch()
        for _ in range(3):  # they end, although the hook stands still
            call(served)
        os.kill(served.pid, signal.SIGKILL)
        wait_until_gone(served.pid)
    assert len(tools(folder)) == 1
    (folder / "hold").unlink()

    def given() -> list[str]:
        return [each["record"]["call_id"] for each in told(folder) if each["record"]["call"]["kind"] == "tool"]

    with gateways.serve(path):
        wait_until(lambda: len(set(given())) >= 4)
    assert set(given()) == {body["call_id"] for body in gateways.finished(folder / "state")}
    # One that was under way at the kill may have been taken just then: it comes again, under the same id.
    assert len(given()) <= 5


def test_a_command_in_a_box_gets_them_on_its_stdin(folder: Path) -> None:
    boxing.need_boxes()
    (folder / "data").mkdir()
    (folder / "code").mkdir()
    (folder / "code" / "tally.py").write_text(COMMAND)
    hook = (
        "{command: [python3, /code/tally.py], mounts: [{host: ./code, at: /code}, {host: ./data, at: /data, mode: rw}]}"
    )
    path = gateways.write(folder, f"{TOP}hooks: {{tally: {hook}}}\n")
    lines = folder / "data" / "lines"
    with gateways.serve(path) as served:
        call(served)
        last = gateways.finished(folder / "state")[-1]
        wanted = f"{last['chain']}:{last['seq']} success"
        wait_until(lambda: lines.exists() and wanted in lines.read_text().splitlines())


def test_what_a_hook_in_a_box_asks_of_the_network_is_on_record(folder: Path) -> None:
    boxing.need_boxes()
    (folder / "code").mkdir()
    (folder / "code" / "post.py").write_text(POST)
    hook = "{command: [python3, /code/post.py], mounts: [{host: ./code, at: /code}], network: out}"
    text = f'{TOP}networks: {{out: {{allow: ["collector.example:443"]}}}}\nhooks: {{post: {hook}}}\n'
    with gateways.serve(gateways.write(folder, text)) as served:
        call(served)
        wait_until(lambda: gateways.records(folder / "state", kind="hook_network"))
    found = gateways.records(folder / "state", kind="hook_network")[0]
    (denied,) = found["network"]["denied"]
    assert (found["hook"], denied["host"], denied["port"]) == ("post", "elsewhere.example", 80)


def test_a_webhook_that_was_down_gets_all_of_them_when_it_is_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_KEY", "a-long-enough-signing-key")
    with receiving(503, 503) as server:
        hooks = f"hooks: {{siem: {{url: '{server.url}', secret: key}}}}\n"
        text = f"{TOP}secrets: {{key: {{from: env, name: HOOK_KEY}}}}\n{hooks}"
        with gateways.serve(gateways.write(folder, text)) as served:
            call(served)
            wait_until(lambda: len(server.got) >= 3)
            wait_until(lambda: any(body["kind"] == "hook_recovered" for body in gateways.records(folder / "state")))
        first, second, third = (headers["webhook-id"].split("+")[0] for _, headers, _ in server.got[:3])
        assert first == second == third
        assert b"refunds" not in server.got[2][2]


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("{}", "hook 'it' has none of python, command and url"),
        ("{python: 'hook.py:record', url: 'https://a.example'}", "has both python and url: keep one"),
        ("{url: 'https://a.example'}", "missing key 'secret'"),
        ("{url: 'http://a.example', secret: key}", "would have records sent in clear: write https://"),
        ("{url: 'https://a.example', secret: kex}", "no secret named 'kex' (did you mean 'key'?)"),
        ("{python: 'gone.py:record'}", "there is no file"),
        ("{python: 'hook.py'}", "is none of FILE.py:FUNCTION"),
        ("{python: 'json:loads', network: inner}", "network belongs to command"),
        ("{command: [cat], network: inner}", "no network named 'inner'"),
        ("{command: [cat], webhook: 1}", "unknown key 'webhook' (did you mean 'url'?)"),
    ],
)
def test_what_makes_no_sense_is_said_before_it_runs(folder: Path, hook: str, says: str) -> None:
    text = f"version: 1\nsecrets: {{key: {{from: env, name: KEY}}}}\nhooks: {{it: {hook}}}\n"
    with pytest.raises(ConfigError) as found:
        config.load(gateways.write(folder, text))
    assert says in str(found.value)


def test_a_function_that_a_box_could_write_is_refused(folder: Path) -> None:
    hooks = "hooks: {a: {python: 'hook.py:record'}, b: {command: [cat], mounts: [{host: ., at: /data, mode: rw}]}}"
    settings = config.load(gateways.write(folder, f"version: 1\n{hooks}\n"))
    said = "\n".join(map(str, config.overlaps(settings)))
    assert f"the function of hook 'a' ({folder / 'hook.py'}) lies under {folder}, which hook 'b' may write" in said


def test_another_hook_waits_for_a_person(folder: Path) -> None:
    old = config.load(gateways.write(folder, "version: 1\nhooks: {a: {python: 'hook.py:record'}}\n"))
    new = config.load(gateways.write(folder, "version: 1\nhooks: {b: {python: 'hook.py:record'}}\n"))
    assert [each.split(":")[0] for each in config.loosens(old, new)] == ["hook 'a' is gone", "hook 'b' is new"]
    assert config.loosens(old, old) == []
