"""Packages for boxes: installed in a box of their own, from the operator's own index, and ready to import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Sandbox, run_code
from ringfence.core.errors import Refused, Unavailable
from tests import gateways
from tests.packages.registry import Registry, known_alone, served

GREETING = {"greeting.py": "def greet():\n    return 'hello'\n"}
IMPORTED = "import greeting; print(greeting.greet())"


@pytest.fixture(scope="module")
def index(state: Path) -> Iterator[Registry]:
    """The only index that pip knows."""
    with served() as found, pytest.MonkeyPatch.context() as patch:
        known_alone(found, patch)
        yield found


@pytest.fixture(scope="module")
def digest(index: Registry) -> str:
    return index.wheel("greeting", "1.2", GREETING)


def test_a_program_has_its_packages_and_the_facts_name_them(index: Registry, digest: str, state: Path) -> None:
    done = run_code(IMPORTED, packages=["greeting"])
    assert done.logs.stdout == ["hello\n"]
    assert done.facts["packages"] == [{"name": "greeting", "version": "1.2", "integrity": f"sha256:{digest}"}]
    assert gateways.finished(state)[-1]["facts"]["packages"] == done.facts["packages"]
    asked = len(index.asked)
    assert run_code(IMPORTED, packages=["greeting"]).logs.stdout == ["hello\n"]
    assert len(index.asked) == asked


def test_another_box_has_them_not(digest: str) -> None:
    done = run_code(IMPORTED)
    assert done.error is not None and done.error.name == "ModuleNotFoundError"
    assert "packages" not in done.facts


def test_a_box_cannot_change_them(digest: str) -> None:
    done = run_code("import greeting; open(greeting.__file__, 'a').write('x')", packages=["greeting"])
    assert done.error is not None and done.error.name in ("OSError", "PermissionError")


def test_a_sandbox_has_them_in_cells_and_in_commands(digest: str) -> None:
    with Sandbox.create(packages=["greeting"]) as sandbox:
        assert sandbox.run_code("import greeting; greeting.greet()").text == "'hello'"
        assert sandbox.commands.run(f"python3 -c '{IMPORTED}'").stdout == "hello\n"


def test_a_sandbox_from_a_snapshot_has_the_packages_of_the_first(digest: str) -> None:
    with Sandbox.create(packages=["greeting"]) as sandbox:
        snapshot = sandbox.snapshot()
    assert snapshot.packages == ("greeting",)
    with Sandbox.create(snapshot=snapshot) as again:
        assert again.run_code("import greeting; greeting.__name__").text == "'greeting'"
        assert again.snapshot().packages == ("greeting",)


def test_what_is_no_package_is_refused_before_anything_runs(digest: str) -> None:
    with pytest.raises(Refused, match="not a package"):
        run_code("1", packages=["--index-url=http://127.0.0.1:1"])
    with pytest.raises(TypeError, match="a list"):
        run_code("1", packages="greeting")  # type: ignore[typeddict-item]


def test_what_the_index_does_not_have_never_ran(digest: str) -> None:
    with pytest.raises(Unavailable, match="could not be fetched"):
        run_code("1", packages=["nobody-has-this"])


def test_a_hash_is_held_to(digest: str) -> None:
    right = f"greeting==1.2 --hash=sha256:{digest}"
    assert run_code(IMPORTED, packages=[right]).logs.stdout == ["hello\n"]
    with pytest.raises(Unavailable, match="DO NOT MATCH"):
        run_code("1", packages=[f"greeting==1.2 --hash=sha256:{'0' * 64}"])


def test_a_template_brings_packages_and_versions_can_be_required(digest: str, tmp_path: Path) -> None:
    path = gateways.write(
        tmp_path,
        "gateway: {state: ./state}\n"
        "sandbox: {require_packages: pinned, templates: {polite: {install: ['greeting==1.2']}}}\n",
    )
    done = gateways.run("run", "-c", IMPORTED, "--template", "polite", "--config", path)
    assert (done.stdout, done.returncode) == ("hello\n", 0), done.stderr
    refused = gateways.run("run", "-c", IMPORTED, "--package", "greeting", "--config", path)
    assert refused.returncode == 126
    assert "names no version" in refused.stderr


def test_pip_within_a_box_says_at_once_that_nothing_is_installed_there() -> None:
    with Sandbox.create() as sandbox:
        done = sandbox.commands.run("python3 -m pip install greeting", timeout=120)
    assert done.exit_code == 1
    assert "nothing_is_installed_from_within_a_box" in done.stderr


def test_an_agent_has_what_the_operator_allows(digest: str, tmp_path: Path) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\nsandbox: {allow_packages: ['greet*']}\n")
    given = json.dumps({"code": IMPORTED, "packages": ["greeting==1.2"]})
    done = json.loads(gateways.run("call", "execute_python", "--args", given, "--json", "--config", path).stdout)
    assert done["structured"]["stdout"] == "hello\n"
    assert [package["name"] for package in done["facts"]["packages"]] == ["greeting"]
    given = json.dumps({"code": IMPORTED, "packages": ["other"]})
    done = json.loads(gateways.run("call", "execute_python", "--args", given, "--json", "--config", path).stdout)
    assert (done["status"], done["reason_code"]) == ("denied", "package_denied")
    opened = gateways.run("call", "open_session", "--args", '{"packages": ["greeting"]}', "--json", "--config", path)
    told = json.loads(opened.stdout)
    assert [package["version"] for package in told["facts"]["packages"]] == ["1.2"]
    closing = json.dumps({"session": told["structured"]["session"]})
    assert gateways.run("call", "close_session", "--args", closing, "--config", path).returncode == 0


def test_an_agent_has_nothing_installed_by_default(digest: str, tmp_path: Path) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\n")
    given = json.dumps({"code": IMPORTED, "packages": ["greeting"]})
    done = json.loads(gateways.run("call", "execute_python", "--args", given, "--json", "--config", path).stdout)
    assert done["status"] == "validation_failure"
    assert "packages" in done["content"][0]["text"]


def test_what_was_asked_for_goes_before_what_lies_beside_the_interpreter(index: Registry) -> None:
    index.wheel("pip", "0.1", {"pip/__init__.py": "__version__ = 'ours'\n"})
    seen = "import pip; print(pip.__version__)"
    done = run_code(f"{seen}\nimport json; print(json.__name__)", packages=["pip"])
    assert done.logs.stdout == ["ours\njson\n"]
    with Sandbox.create(packages=["pip"]) as sandbox:
        assert sandbox.run_code(seen).logs.stdout == ["ours\n"]
        assert sandbox.commands.run(f"python3 -c '{seen}'").stdout == "ours\n"
