"""Defects that were proven in another gateway, and that this one must not have: dead code, dead switches, hanging ends.

The number in a test's name is the number of the defect.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import pytest

from ringfence.cli import main
from ringfence.config import settings
from ringfence.core import box, model
from tests import gateways, tooling

SOURCE = tooling.ROOT / "src" / "ringfence"
ENTRIES = ("ringfence.sdk", "ringfence.cli.main", "ringfence.__main__")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


# ── 11: switches ──────────────────────────────────────────────────────────────────────────────────

NOT_BUILT = "loads only with its default, or every call that would need it is refused"
UNREAD = {
    "SandboxSettings.network_enabled": NOT_BUILT,
    "SecretSpec": NOT_BUILT,
    "Mount": NOT_BUILT,
    "GatewaySettings.code_mode": NOT_BUILT,
    "ServerSpec.placement": "servers run on the host, and the facts say so, whichever it is",
    "Rule.name": "for whoever reads the file",
    "Rule.description": "for whoever reads the file",
    "Rule.owasp_asi_id": "for whoever reads the file",
    "PolicySettings.files": "read through Config.files",
}


def configured() -> Iterator[str]:
    """Every field that a key of the configuration ends up in."""
    kinds = (
        *(settings.GatewaySettings, settings.PolicySettings, settings.SandboxSettings),
        *(model.Contract, model.Retry, model.Rate, model.LogPolicy, model.ResultPolicy, model.Effects, box.Mount),
        *(model.ServerSpec, model.NetworkSpec, model.SecretSpec, model.ApprovalRule, model.Person, model.Rule),
    )
    for kind in kinds:
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}.{field.name}"


def test_defect_11_every_key_of_the_configuration_is_read_by_code() -> None:
    read = {
        node.attr
        for name, tree in trees().items()
        if not name.startswith("ringfence.config")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {place for place in configured() if place.split(".")[1] not in read}
    explained = {place for place in unread if place in UNREAD or place.split(".")[0] in UNREAD}
    assert unread - explained == set()


# ── 16: code that nothing calls ───────────────────────────────────────────────────────────────────

STARTED_AS_PROGRAMS = {
    "ringfence.cli.demo.server": "`serve --demo` starts it as a server of its own",
    "ringfence.sandbox.process.zygote.start": "the zygote's program, started by file path",
    "ringfence.sandbox.process.host.probe": "tries what boxes need, started by file path",
    "ringfence.doctor.launcher": "makes the namespaces of controls, started by file path",
    "ringfence.sandbox.guests.agent": "sent to a guest, whose first process it is",
    "ringfence.sandbox.guests.agent_staying": "sent to a guest with the agent",
    **{
        f"ringfence.sandbox.guests.{name}": "sent to a guest with the agent"
        for name in ("agent_disk", "agent_files", "agent_watch", "harden")
    },
    "ringfence.sandbox.wasm.inside": "the program in a runtime of WebAssembly; read, not imported",
    "ringfence.sandbox.guests.own_kernel": "sent to a guest with the agent",
    "ringfence.sandbox.guests.passage": "sent to a guest with the agent",
    "ringfence.sandbox.guests.microvm.warden": "started beside virtual machines, by file path",
    "ringfence.sandbox.guests.microvm.inside.first": "the first program of a virtual machine; read, not imported",
    "ringfence.sandbox.guests.microvm.inside.second": "sent to a virtual machine, whose first process it is",
    "ringfence.sandbox.guests.holder": "started beside containers, by file path",
    "ringfence.audit.signing_process": "the signer, a process of its own that imports it by name",
    "ringfence.cli.bench.lines": "a server that is measured, started by file path",
    "ringfence.doctor.probe": "what every hostile program begins with; read, not imported",
    **{
        f"ringfence.sandbox.process.guest.{name}": "kept as source in a box, and compiled when it is wanted"
        for name in ("once", "charts", "notebook", "magics")
    },
}


def imports(name: str) -> Iterator[str]:
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in trees():
            yield node.value  # loaded by name, when its verb is used


def test_defect_16_every_module_is_on_the_way_of_a_call_or_a_verb() -> None:
    reached: set[str] = set()
    waiting = [*ENTRIES, *STARTED_AS_PROGRAMS]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in trees():
            continue
        reached.add(name)
        waiting += imports(name)
        waiting.append(name.rpartition(".")[0])
    assert set(trees()) - reached == set()


# Used from outside of our own source.
CALLED_BY_OTHERS = {
    "engine_backend": "a backend of somebody's own: docs/writing-a-backend.md",
    "Worker": "started in a box of its own, as the source of its program says",
    "verify_records": "an auditor's own: it checks one chain, however that was read",
    **dict.fromkeys(("Gateway", "map_code", "map_code_async"), "the SDK's public surface"),
    **dict.fromkeys(("Sandbox", "AsyncSandbox", "run_code", "Execution"), "the SDK's public surface"),
    **dict.fromkeys(("ExecutionError", "Chart"), "the SDK's public surface"),
    **dict.fromkeys(("AsyncCommands", "AsyncCommandHandle", "AsyncFiles", "AsyncWatch"), "the SDK's public surface"),
    **dict.fromkeys(("Commands", "CommandHandle", "Files", "Watch", "Result"), "the SDK's public surface"),
    "Listener": "uvicorn calls its server",
    "_Sink": "the standard library's HTTP server calls its handler",
    "NoInput": "whoever has a stream calls its methods",
    "FrameConnection": "asyncio calls its protocol",
    "HttpExchange": "the MCP SDK calls its dispatch context",
}


def definitions() -> Iterator[tuple[str, str, str]]:
    """(module, owner, name) of every public function, class and method."""
    for module, tree in trees().items():
        for node in tree.body:
            # A decorator may register a function, as it does each subcommand of a verb.
            registered = bool(getattr(node, "decorator_list", ())) and not isinstance(node, ast.ClassDef)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not registered:
                yield module, "", node.name
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield module, node.name, inner.name


def used_names() -> set[str]:
    used: set[str] = set(main.VERBS)
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.alias) and node.asname is not None:
                used.add(node.name)
    return used


def test_defect_16_every_public_name_is_used() -> None:
    used = used_names()
    programs = {*STARTED_AS_PROGRAMS, "ringfence"}
    dead = [
        f"{module}:{owner}.{name}" if owner else f"{module}:{name}"
        for module, owner, name in definitions()
        if name not in used and name[0] != "_" and module not in programs and not {owner, name} & set(CALLED_BY_OTHERS)
    ]
    assert dead == []


# ── 21: the end ───────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import sys, warnings
import anyio
from ringfence import Gateway
warnings.simplefilter("ignore")

async def main():
    upstream = [{"name": "hostile", "command": sys.argv[1:]}]
    @BODY@

anyio.run(main)
print("returned", flush=True)
"""
ENDS = {
    "a block, and a call that hangs": """async with Gateway(upstream, "permissive") as gateway:
        print((await gateway.call_tool("environ")).text)
        with anyio.move_on_after(0.2):
            await gateway.call_tool("hang")""",
    "start and stop, and a server that stopped reading": """gateway = Gateway(upstream, "permissive")
    await gateway.start()
    print((await gateway.call_tool("environ")).text)
    with anyio.move_on_after(0.2):
        await gateway.call_tool("freeze")
    await gateway.stop()""",
}


@pytest.fixture
def marked(hostile_command: list[str]) -> list[str]:
    """The command of a server that can be told from any other on this host: in its box it has another number."""
    return [*hostile_command, "--rug-file", f"/nowhere/{uuid4().hex}"]


@pytest.mark.parametrize("case", ENDS)
def test_defect_21_a_program_that_used_the_gateway_ends_by_itself(case: str, marked: list[str]) -> None:
    code = SCRIPT.replace("@BODY@", ENDS[case])
    with subprocess.Popen(
        [sys.executable, "-c", code, *marked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        try:
            out, err = script.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            script.kill()
            raise
    assert script.returncode == 0, err
    told, last = out.splitlines()
    assert last == "returned"
    assert json.loads(told)["pid"]
    tooling.wait_until_none(marked[-1])


def test_defect_21_a_program_that_forgot_to_stop_ends_too(marked: list[str]) -> None:
    body = """gateway = Gateway(upstream, "permissive")
    await gateway.start()
    print((await gateway.call_tool("environ")).text)"""
    command = [sys.executable, "-c", SCRIPT.replace("@BODY@", body), *marked]
    script = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(script.stdout.splitlines()[0])["pid"]
    tooling.wait_until_none(marked[-1])


def test_defect_21_call_and_serve_end(marked: list[str], tmp_path: Path) -> None:
    text = f"""
        version: 1
        gateway: {{state: ./state}}
        servers: {{hostile: {{command: {json.dumps(marked)}, pins: first_use}}}}
        capabilities: {{environ: {{mode: read}}, hang: {{mode: read, timeout_seconds: 0.5}}}}
    """
    path = gateways.write(tmp_path, text)
    called = gateways.run("call", "environ", "--config", path, "--json")
    assert called.returncode == 0, called.stderr
    assert json.loads(json.loads(called.stdout)["content"][0]["text"])["pid"]
    tooling.wait_until_none(marked[-1])
    assert gateways.run("call", "hang", "--config", path).returncode == 124
    with gateways.serve(path) as served:
        served.started.process.terminate()
        assert served.started.process.wait(60) == 0
    assert gateways.verified(tmp_path / "state").ok
