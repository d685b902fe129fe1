"""The shape of the source: layers, what an import costs, and what a fresh clone needs."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ringfence
from tests.tooling import ROOT

SOURCE = ROOT / "src" / "ringfence"
MODULES = sorted(SOURCE.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_catching_everything_says_why(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = []
    for node in ast.walk(ast.parse("\n".join(lines))):
        # Tidying up and raising again swallows nothing.
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        caught = ast.unparse(node.type) if node.type else "BaseException"
        near = lines[node.lineno - 1 : node.body[0].lineno]
        if re.search(r"\b(Base)?Exception\b", caught) and not any("#" in line for line in near):
            bare.append(node.lineno)
    assert bare == []


def called(tree: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]


def test_only_the_guard_makes_guarded_text() -> None:
    """What reaches a caller or a record is guarded by its type; this is what the type checker cannot see."""
    makers, claims = set(), []
    for path in MODULES:
        tree = ast.parse(path.read_text())
        if called(tree, "GuardedText") or "cast(GuardedText" in path.read_text():
            makers.add(path.relative_to(SOURCE).as_posix())
        words = [call.args[0] for call in called(tree, "own_words")]
        claims += [f"{name(path)}:{word.lineno}" for word in words if not isinstance(word, ast.Constant)]
    assert makers == {"core/model.py", "governance/guard.py"}
    assert claims == [], "words of ours are what stands in the source"


def test_no_message_cuts_what_it_quotes() -> None:
    """Half of a secret or of an argument is not recognised when the message is cleaned (`core.quoting`)."""

    def is_cut(node: ast.AST) -> bool:
        return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)

    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            formatted = isinstance(node, ast.FormattedValue) and node.conversion != -1 and is_cut(node.value)
            function = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if formatted or (function in ("repr", "ascii") and any(map(is_cut, node.args))):  # type: ignore[attr-defined]
                found.append(f"{name(path)}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == []


def test_no_library_says_why_it_failed() -> None:
    """It quotes what others sent, and cuts it: an exception of one is told by its kind, as `reason_of` does."""

    def is_foreign(kind: ast.expr | None) -> bool:
        named = [node.value for node in ast.walk(kind) if isinstance(node, ast.Attribute)] if kind is not None else []
        return any(isinstance(node, ast.Name) and node.id in ("aiohttp", "pydantic", "mcp") for node in named)

    def tells(node: ast.AST, caught: str) -> bool:
        if isinstance(node, ast.FormattedValue):
            said = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
            said = node.args
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            said = node.args if isinstance(node.func.value, ast.Name) and node.func.value.id == "log" else []
        else:
            return False
        return any(isinstance(each, ast.Name) and each.id == caught for each in said)

    found = []
    for path in MODULES:
        for handler in ast.walk(ast.parse(path.read_text())):
            if isinstance(handler, ast.ExceptHandler) and handler.name is not None and is_foreign(handler.type):
                told = (node for node in ast.walk(handler) if tells(node, handler.name or ""))
                found += [f"{name(path)}:{node.lineno}" for node in told]  # type: ignore[attr-defined]
    assert found == []


def test_importing_the_package_loads_nothing_else() -> None:
    heavy = ("ringfence.", "mcp", "pydantic", "starlette")
    code = f"import sys, ringfence; print([name for name in sys.modules if name.startswith({heavy})])"
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_public_names() -> None:
    boxes = ["AsyncSandbox", "CommandResult", "Execution", "Limits", "Result", "Sandbox", "VolumeMount"]
    once = ["map_code", "map_code_async", "run_code", "run_code_async"]
    errors = ["Denied", "NotFound", "OutcomeUnknown", "QuotaExceeded", "Refused", "RingfenceError"]
    errors += ["SandboxNotFound", "SandboxStopped", "SetUpFailed", "TimedOut", "Unavailable"]
    assert sorted(ringfence.__all__) == sorted([*boxes, *once, *errors, "Gateway", "__version__"])
    assert ringfence.Gateway.__module__ == "ringfence.sdk.gateway"
    assert set(ringfence.__all__) <= set(dir(ringfence))
    with pytest.raises(AttributeError, match="Gatway"):
        _ = ringfence.Gatway  # type: ignore[attr-defined]
    assert (SOURCE / "py.typed").exists()


def test_every_public_class_name_is_used_once() -> None:
    """Siblings of the process backend may repeat its names; nothing else may."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name(path))
    assert {one: where for one, where in places.items() if len(where) > 1} == {}


def test_zygote_and_guest_import_only_each_other() -> None:
    """What runs there is small and its own: nothing of the supervisor is loaded."""
    process = SOURCE / "sandbox" / "process"
    inside = ("ringfence.sandbox.process.zygote", "ringfence.sandbox.process.guest")
    others = []
    for path in (*process.glob("zygote/*.py"), *process.glob("guest/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            others += [
                f"{name(path)}: {one}" for one in named if one.startswith("ringfence") and not one.startswith(inside)
            ]
    assert others == []


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(tree / "pyproject.toml")]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("core/errors", "from ringfence import governance\n", "ringfence.core.errors -> ringfence.governance"),
        ("store/rows", "from ringfence import egress\n", "ringfence.store.rows -> ringfence.egress"),
        ("misc/__init__", "", "ringfence.misc"),
        ("sandbox/files/paths", "from ringfence.sandbox import process\n", "ringfence.sandbox.process"),
        (
            "sandbox/process/zygote/main",
            "from ringfence.sandbox.process import backend\n",
            "ringfence.sandbox.process.backend",
        ),
        ("core/record", "", "KEPT"),
    ],
    ids=["upwards", "sideways", "without a place", "upwards in sandbox", "the supervisor's", "as it should be"],
)
def test_layers_are_enforced(tmp_path: Path, module: str, source: str, complaint: str) -> None:
    package = tmp_path / "src" / "ringfence"
    process = ("zygote", "guest", "cgroups", "host", "limits", "seccomp")
    for folder in (
        *("", "core", "store", "egress", "governance", "sandbox", "sandbox/files", "sandbox/process"),
        *(f"sandbox/process/{name}" for name in process),
    ):
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").touch()
    for name in ("backend", "box", "zygote_handle"):
        (package / "sandbox" / "process" / f"{name}.py").touch()
    (package / f"{module}.py").parent.mkdir(exist_ok=True)
    (package / f"{module}.py").write_text(source)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run = lint_imports(tmp_path)
    assert (run.returncode == 0) == (complaint == "KEPT"), run.stdout + run.stderr
    assert complaint in run.stdout


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_constraints_pin_everything_that_is_installed() -> None:
    pinned, seen, waiting = pins(), set(), [("ringfence", "dev")]
    while waiting:
        dist, extra = waiting.pop()
        if (dist, extra) in seen:
            continue
        seen.add((dist, extra))
        for text in metadata.requires(dist) or []:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(wanted.name), more) for more in ("", *wanted.extras)]
    installed = {dist: metadata.version(dist) for dist, _ in seen if dist != "ringfence"}
    assert installed == {dist: pinned.get(dist) for dist in installed}
    assert metadata.version("ringfence") == ringfence.__version__


def test_node_tools_have_exact_versions_and_no_addresses() -> None:
    package = json.loads((ROOT / "tests/fixtures/npm/package.json").read_text())
    assert all(re.fullmatch(r"\d+\.\d+\.\d+(-[a-z0-9.]+)?", version) for version in package["dependencies"].values())
    assert not list((ROOT / "tests/fixtures/npm").glob("*lock*"))


def test_checks_start_from_one_command() -> None:
    for script in (".ci/run", "scripts/setup"):
        assert os.access(ROOT / script, os.X_OK)
    check = (ROOT / ".ci/run").read_text().splitlines()
    assert [line.split(" || ")[0] for line in check if line.startswith("make test")] == ["make test", "make test-slow"]
