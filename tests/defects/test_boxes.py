"""Boxes that other gateways promise and do not have: a rule that says *sandbox*, and code that runs confined."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import pytest

from ringfence.compose.backends import make_backend
from ringfence.compose.run_request import RunRequest
from ringfence.compose.runs import Runs
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BACKENDS, BoxSpec, Limits, Program
from ringfence.core.errors import Unavailable
from tests.boxing import need_boxes, settings
from tests.tooling import KERNEL, PATIENCE

pytestmark = pytest.mark.anyio

SANDBOX = """
policy:
  rules:
    - {id: sandbox-exec, name: Sandbox all code execution, action: sandbox, priority: 20,
       tool_patterns: ["execute_.*", "run_.*", "code_.*"], owasp_asi_id: ASI-02}
"""


async def test_defect_4_a_rule_that_says_sandbox_runs_the_code_in_one(tmp_path: Path) -> None:
    """It is neither a refusal in disguise, nor are the arguments taken for the program."""
    need_boxes()
    async with Runs.open(settings(tmp_path, SANDBOX)) as own:
        outcome = await own.run(RunRequest(code="print(6 * 7)"), origin="cli")
    assert (outcome.status, outcome.facts["exit_status"]) == ("success", 0)
    assert "sandbox-exec" in outcome.facts["rules"]
    assert outcome.ran is not None and outcome.ran.report.stdout.head == b"42\n"
    assert outcome.facts["isolation"]["level"] == "process"


# Of the others, machines are emulated in most places where tests run, and engines have to be started.
SOON = ("process", "oci", "wasm", "gvisor")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in BACKENDS]
)
async def test_defect_8_every_backend_runs_the_very_program_that_it_is_given(tmp_path: Path, name: str) -> None:
    """None has a program, an answer or a backend of its own choice."""
    number = secrets.randbelow(10**9)
    source = f"print({number} * 7)\nraise SystemExit(3)\n".encode()
    kernel = str(KERNEL) if KERNEL.is_dir() else None
    try:
        backend = make_backend(SandboxSettings(backend=name, microvm_kernel=kernel), tmp_path, keep_ready=0)
    except Unavailable as exc:
        pytest.skip(str(exc))
    try:
        report = await backend.run(BoxSpec(Program("python", source), Limits(wall_seconds=PATIENCE)))
    except Unavailable as exc:
        pytest.skip(str(exc))
    finally:
        await backend.close()
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 3, f"{number * 7}\n")
    assert (report.isolation["backend"], report.isolation["level"]) == (name, BACKENDS[name])


LOOK = """
import json, os, socket
def tried(act):
    try:
        return act()
    except OSError as exc:
        return None
print(json.dumps({
    "name": tried(lambda: open("/etc/hostname").read().strip()), "host": os.uname().nodename, "uid": os.getuid(),
    "file": tried(lambda: open(%(file)r).read()),
    "loopback": tried(lambda: socket.create_connection(("127.0.0.1", %(port)d), 2) and True),
}))
"""


async def test_defect_7_no_backend_runs_code_on_the_host(tmp_path: Path) -> None:
    """No file of the host's, not its name, not its loopback, nobody's uid, and limits that are in the facts."""
    need_boxes()
    canary = tmp_path / "canary"
    canary.write_text("seen")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = LOOK % {"file": str(canary), "port": listener.getsockname()[1]}
        async with Runs.open(settings(tmp_path)) as own:
            outcome = await own.run(RunRequest(code=source), origin="cli")
    assert outcome.ran is not None
    said = outcome.ran.report.stdout.text
    assert '"file": null' in said and '"loopback": null' in said and '"uid": 1000' in said
    assert os.uname().nodename == "box" or f'"{os.uname().nodename}"' not in said
    assert {"memory", "pids", "cpu"} <= set(outcome.facts["isolation"]["limits"])
    assert all(each["on"] for each in outcome.facts["isolation"]["protections"].values())
