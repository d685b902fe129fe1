"""`pip install` by programs in boxes: from an index that is ours, of what they may have, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence import Execution, Sandbox, run_code
from ringfence.core.errors import Refused
from tests import gateways
from tests.packages.registry import Registry, known_alone, served

GREETING = {"greeting.py": "import helping\ndef greet():\n    return helping.word\ndef main():\n    print(greet())\n"}
INSTALLED = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *{words!r}], capture_output=True, text=True)
print(done.returncode, done.stderr)
"""
IMPORTED = "import greeting; print(greeting.greet())"


@pytest.fixture(scope="module")
def index(state: Path) -> Iterator[Registry]:
    """The only index that pip knows: two packages, one of which needs the other, and one that nobody may have."""
    with served() as found, pytest.MonkeyPatch.context() as patch:
        known_alone(found, patch)
        found.wheel("greeting", "1.1", GREETING, needs="helping")
        found.wheel("greeting", "1.2", GREETING, needs="helping", script="greet = greeting:main")
        found.wheel("helping", "3.0", {"helping.py": "word = 'hello'\n"})
        found.wheel("private-thing", "1.0", {"private_thing.py": ""})
        yield found


def installed(*words: str, allow: list[str], then: str = "") -> Execution:
    return run_code(INSTALLED.format(words=words) + then, allow_packages=allow, timeout=120)


def names(facts: dict[str, object]) -> list[tuple[str, str]]:
    found = facts.get("packages") or []
    assert isinstance(found, list)
    return [(package["name"], package["version"]) for package in found]


def test_a_program_installs_what_it_may_and_imports_it(index: Registry, state: Path) -> None:
    done = installed("greeting", allow=["greet*"], then=IMPORTED)
    assert done.logs.stdout == ["0 \nhello\n"], done.logs
    assert names(done.facts) == [("greeting", "1.2"), ("helping", "3.0")]
    assert done.facts["packages"] == gateways.finished(state)[-1]["facts"]["packages"]
    assert all(package["integrity"].startswith("sha256:") for package in done.facts["packages"])
    (asked,) = done.facts["network"]["allowed"]
    assert (asked["host"], asked["rule"]) == ("packages.ringfence.internal", "sandbox:allow_packages")
    assert "packages" not in done.facts["network"]
    assert done.facts["effect"] == "none"


def test_what_was_fetched_once_is_not_fetched_again(index: Registry) -> None:
    installed("greeting==1.2", allow=["greeting"])
    before = [path for path in index.asked if path.startswith("/files/")]
    assert installed("greeting==1.2", allow=["greeting"], then=IMPORTED).logs.stdout == ["0 \nhello\n"]
    assert [path for path in index.asked if path.startswith("/files/")] == before


def test_what_it_may_not_have_is_refused_in_words_and_never_asked_for(index: Registry) -> None:
    done = installed("private-thing", allow=["greeting"])
    assert "private-thing may not be installed here: sandbox.allow_packages" in done.logs.stdout[0]
    assert "/simple/private-thing/" not in index.asked
    (denied,) = done.facts["network"]["denied"]
    assert (denied["reason"], denied["rule"]) == ("package_denied", "sandbox:allow_packages")
    assert "packages" not in done.facts
    pinned = installed("private-thing==1.0", allow=["greeting"])
    assert "0+not.in.sandbox.allow.packages" in pinned.logs.stdout[0]


def test_nothing_else_is_reached_by_that_way(index: Registry) -> None:
    asking = f"""
import urllib.request, urllib.error
for url in ("{index.url}/simple/greeting/", "http://packages.ringfence.internal:81/", "http://example.com/"):
    try:
        print(urllib.request.urlopen(url, timeout=25).status)
    except (urllib.error.URLError, OSError) as exc:
        print(getattr(exc, "code", exc))
"""
    before = len(index.asked)
    done = run_code(asking, allow_packages=["*"], envs={"no_proxy": ""})
    assert done.logs.stdout == ["403\n403\n403\n"]
    assert len(index.asked) == before


def test_a_version_is_held_to(index: Registry) -> None:
    done = installed("greeting", allow=["greeting==1.1"], then=IMPORTED)
    assert names(done.facts) == [("greeting", "1.1"), ("helping", "3.0")]
    refused = installed("greeting==1.2", allow=["greeting==1.1"])
    assert "from versions: 1.1" in refused.logs.stdout[0]


def test_a_sandbox_has_it_in_its_next_cell_and_so_has_a_fork(index: Registry) -> None:
    with Sandbox.create(allow_packages=["greeting"]) as sandbox:
        first = sandbox.run_code("import greeting")
        assert first.error is not None and first.error.name == "ModuleNotFoundError"
        done = sandbox.commands.run("pip install -q greeting && greet", timeout=120)
        assert (done.exit_code, done.stdout) == (0, "hello\n"), done.stderr
        assert names(done.facts) == [("greeting", "1.2"), ("helping", "3.0")]
        cell = sandbox.run_code("import greeting; greeting.greet()")
        assert cell.text == "'hello'"
        assert "packages" not in cell.facts
        (fork,) = sandbox.fork(1)
        assert isinstance(fork, Sandbox)
        with fork:
            assert fork.run_code("import greeting; greeting.greet()").text == "'hello'"


def test_nothing_is_installed_inside_by_default() -> None:
    done = run_code(INSTALLED.format(words=("greeting",)), timeout=300)
    assert "sandbox.install_inside" in done.logs.stdout[0] and "sandbox.allow_packages" in done.logs.stdout[0]


def test_what_is_no_name_of_packages_is_refused_before_anything_runs() -> None:
    with pytest.raises(Refused, match="not a name or pattern"):
        run_code("1", allow_packages=["https://example.com/x.whl"])
    with pytest.raises(TypeError, match="a list"):
        run_code("1", allow_packages="greeting")  # type: ignore[arg-type]


def test_an_agent_installs_what_the_operator_allows(index: Registry, tmp_path: Path) -> None:
    text = "gateway: {state: ./state}\nsandbox: {allow_packages: [greeting], install_inside: true}\n"
    path = gateways.write(tmp_path, text)
    given = json.dumps({"code": INSTALLED.format(words=("greeting",)) + IMPORTED})
    done = json.loads(gateways.run("call", "execute_python", "--args", given, "--json", "--config", path).stdout)
    assert done["structured"]["stdout"] == "0 \nhello\n"
    assert names(done["facts"]) == [("greeting", "1.2"), ("helping", "3.0")]


def test_pins_can_be_required(index: Registry, tmp_path: Path) -> None:
    path = gateways.write(tmp_path, "gateway: {state: ./state}\nsandbox: {require_packages: pinned}\n")
    words = ("run", "--shell", "pip install -q greeting && greet", "--timeout", "120", "--config", path)
    refused = gateways.run(*words, "--allow-package", "greeting")
    assert refused.returncode == 126 and "does not name its version" in refused.stderr
    done = gateways.run(*words, "--allow-package", "greeting==1.1")
    assert done.returncode != 126 and "greet: not found" in done.stderr  # 1.1 has no program
