"""`ringfence state`: what lies where; and what `prune` removes of it, asked and unasked, whatever else runs."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringfence.audit.keys import load_or_create
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.model import Json
from ringfence.packages.cache import PackageCache
from ringfence.store import Store
from tests import boxing, gateways, tooling
from tests.cli.terminals import at_terminal

HEADER = "version: 1\ngateway: {state: ./state}\n"
# Trees are made by processes that end: whoever makes one uses it.
MAKE = """
import sys
from pathlib import Path
from ringfence.packages.cache import FOLDER, Package, PackageCache
state, kind, name, size = sys.argv[1:]
cache = PackageCache(Path(state) / FOLDER)
made = cache.staging()
(made / "sub").mkdir()
(made / "sub" / "file").write_bytes(b"x" * int(size))
(made / "sub").chmod(0o500)
tree = cache.put(kind, made, (Package(name, "1.0", "sha256:00"),), {})
cache.remember({"name": name}, tree)
print(tree.digest)
"""
USE = """
import sys
from pathlib import Path
from ringfence.packages.cache import FOLDER, PackageCache
cache = PackageCache(Path(sys.argv[1]) / FOLDER)
for what in sys.argv[2:]:
    print(cache.tree(what).folder if what.startswith("sha256:") else getattr(cache, what)(), flush=True)
print("ready", flush=True)
sys.stdin.read()
"""


def fetched(state: Path, kind: str, name: str, size: int = 1000) -> str:
    words = [sys.executable, "-c", MAKE, str(state), kind, name, str(size)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def using(state: Path, *what: str) -> Iterator[list[str]]:
    """Another process uses these; yields the folders that it got."""
    words = [sys.executable, "-c", USE, str(state), *what]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        got = []
        while (line := process.stdout.readline().strip()) != "ready":
            assert line, "it ended"
            got.append(line)
        yield got


def place(state: Path, digest: str) -> Path:
    return state / "packages" / digest.removeprefix("sha256:")


def wheel(state: Path, name: str) -> Path:
    (state / "packages").mkdir(mode=0o700, exist_ok=True)
    folder = state / "packages" / "wheels" / hashlib.sha256(name.encode()).hexdigest()
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"w" * 500)
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state with a log, and with files where sessions keep theirs."""
    gateways.write(tmp_path, HEADER)
    folder = tmp_path / "state"
    Store.open(folder, load_or_create(tmp_path / "keys")).close()
    for name, size in (("snapshots/o/pieces/p", 70), ("volumes/o/v.volume", 80), ("artifacts/box_1/output/f", 90)):
        path = folder / "sessions" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * size)
    return folder


def told(*words: str | Path, code: int = 0, cwd: Path) -> Json:
    ended = gateways.run("state", *words, "--json", cwd=cwd)
    assert ended.returncode == code, ended.stderr
    found: Json = json.loads(ended.stdout)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def test_every_place_is_shown_with_its_size_and_what_may_become_of_it(state: Path) -> None:
    fetched(state, "pypi", "six", 5000)
    fetched(state, "image", "example/server@sha256:00", 7000)
    wheel(state, "six-1.0-py3-none-any.whl")
    (state / "packages" / ".new-0011").mkdir()
    (state / "notes.txt").write_text("mine")
    found = told(cwd=state.parent)
    places = {each["name"]: each for each in found["places"]}
    assert found["state"] == str(state) and places["log"]["path"] == str(state / "ringfence.db")
    sizes = {name: (places[name]["bytes"], places[name]["files"]) for name in ("snapshots", "volumes", "artifacts")}
    assert sizes == {"snapshots": (70, 1), "volumes": (80, 1), "artifacts": (90, 1)}
    assert (places["wheels"]["bytes"], places["other"]["bytes"], places["leftovers"]["there"]) == (500, 4, True)
    assert places["packages"]["bytes"] > 5000 and 7000 < places["images"]["bytes"] < 8000
    assert {name for name, each in places.items() if each["removable"]} == {"packages", "images", "wheels", "leftovers"}
    assert all(each["purpose"] and each["how"] and not each["problems"] for each in places.values())
    # SQLite makes two files while it is read from.
    every = [path for path in state.rglob("*") if path.is_file() and not path.name.startswith("ringfence.db-")]
    assert found["bytes"] == sum(path.stat().st_size for path in every)
    assert places["configuration"]["path"] == str(state.parent / "ringfence.yaml")
    plain = gateways.run("state", cwd=state.parent)
    assert plain.returncode == 0 and plain.stdout.startswith(f"{state}: ")
    assert "volumes" in plain.stdout and "ringfence box rm --volume NAME" in plain.stdout


def test_where_there_is_nothing_yet_it_says_so_and_makes_nothing(tmp_path: Path, own_home: Path) -> None:
    shown = gateways.run("state", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "") and "there is no state yet" in shown.stdout
    pruned = gateways.run("state", "prune", cwd=tmp_path)
    assert (pruned.returncode, pruned.stdout) == (0, "There is nothing to remove.\n")
    assert list(own_home.iterdir()) == [] and list(tmp_path.iterdir()) == []


def test_payloads_that_are_kept_are_counted(tmp_path: Path) -> None:
    kept = "{server: desk, mode: read, log: {arguments: redacted, result: redacted}}"
    with tooling.serve_fixture("helpdesk_server.py") as url:
        text = f"servers: {{desk: {{url: '{url}', pins: first_use}}}}\ncapabilities: {{search_docs: {kept}}}\n"
        gateways.write(tmp_path, HEADER + text)
        called = gateways.run("call", "search_docs", "--args", '{"query": "some words"}', cwd=tmp_path)
    assert called.returncode == 0, called.stderr
    (found,) = [each for each in told(cwd=tmp_path)["places"] if each["name"] == "payloads"]
    assert (found["files"], found["within"]) == (2, "log") and found["bytes"] > 20


def test_what_cannot_be_read_is_told(state: Path) -> None:
    (state / "sessions" / "volumes").chmod(0o000)
    try:
        if os.access(state / "sessions" / "volumes", os.R_OK):
            pytest.skip("root can read everything")
        shown = gateways.run("state", cwd=state.parent)
    finally:
        (state / "sessions" / "volumes").chmod(0o700)
    assert shown.returncode == 1 and "snapshots" in shown.stdout
    assert f"{state / 'sessions' / 'volumes'}: Permission denied" in shown.stderr and "Traceback" not in shown.stderr


# ── Pruning ───────────────────────────────────────────────────────────────────────────────────────


def test_what_can_be_fetched_again_goes_and_nothing_else(state: Path) -> None:
    before = contents(state)
    one, two = fetched(state, "npm", "left-pad"), fetched(state, "image", "example/server@sha256:00")
    folder = wheel(state, "six-1.0-py3-none-any.whl")
    (state / "packages" / ".new-0011").mkdir()
    (state / "packages" / ".new-0011" / "part").write_bytes(b"p" * 300)
    found = told("prune", "--yes", cwd=state.parent)
    assert {each["kind"] for each in found["removed"]} == {"npm", "image", "wheels", "leftover"}
    assert found["left"] == [] and found["bytes"] > 1000 + 1000 + 500 + 300
    assert ["left-pad 1.0"] in [each["names"] for each in found["removed"]]
    assert not any(path.exists() for path in (place(state, one), place(state, two), folder))
    left = [path.name for path in (state / "packages").rglob("*")]
    assert sorted(left) == [".lock", "asked"], "what was asked for is forgotten, too"
    after = {path: data for path, data in contents(state).items() if "/packages/" not in path}
    beside = ("-wal", "-shm")  # what SQLite itself puts beside a database that is read
    assert {path: data for path, data in after.items() if not path.endswith(beside)} == before
    assert told("prune", "--yes", cwd=state.parent)["removed"] == []
    assert fetched(state, "npm", "left-pad") == one, "it can be fetched again"


def test_a_link_in_the_cache_goes_and_what_it_leads_to_stays_as_it_is(state: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "shared").mkdir(parents=True)
    (elsewhere / "shared" / "six-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (elsewhere / "shared").chmod(0o2775)
    (state / "packages").mkdir(mode=0o700, exist_ok=True)
    (state / "packages" / "wheels").symlink_to(elsewhere)
    told("prune", "--yes", cwd=state.parent)
    assert not (state / "packages" / "wheels").is_symlink()
    assert (elsewhere / "shared").stat().st_mode & 0o7777 == 0o2775
    assert (elsewhere / "shared" / "six-1.0-py3-none-any.whl").read_bytes() == b"wheel"
    assert told("prune", "--yes", cwd=state.parent)["removed"] == []


def test_a_folder_that_is_no_state_keeps_what_has_the_names_of_a_cache(tmp_path: Path) -> None:
    gateways.write(tmp_path, "version: 1\ngateway: {state: .}\n")
    own = tmp_path / "packages" / "wheels" / "main.py"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    shown = gateways.run("state", "prune", "--yes", cwd=tmp_path)
    assert shown.returncode == 1 and "is no state folder" in shown.stderr
    assert own.read_text() == "mine"


def test_a_cache_that_is_a_link_to_what_is_the_users_own_keeps_it(state: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    for name in ("0" * 64, "wheels", ".new-thing"):
        (own / name).mkdir(parents=True)
        (own / name / "data").write_text("mine")
    own.chmod(0o700)
    (state / "packages").symlink_to(own)
    shown = gateways.run("state", "prune", "--yes", cwd=state.parent)
    assert shown.returncode == 1 and "not a folder of its own" in shown.stderr
    assert gateways.run("state", cwd=state.parent).returncode == 1
    with pytest.raises(StoreError, match="not a folder of its own"):
        PackageCache(state / "packages").staging()
    assert sorted(path.name for path in own.iterdir()) == [".new-thing", "0" * 64, "wheels"]


def test_a_link_that_takes_the_place_of_the_cache_meanwhile_leads_to_nothing(state: Path, tmp_path: Path) -> None:
    fetched(state, "npm", "left-pad")
    cache, own = PackageCache(state / "packages"), tmp_path / "own"
    (entry,) = cache.entries()

    def swapped() -> None:
        (own / entry.path.name).mkdir(parents=True)
        (state / "packages").rename(state / "moved")
        (state / "packages").symlink_to(own)

    assert cache.discard(entry, swapped) is None
    assert (own / entry.path.name).exists() and not (state / "moved" / entry.path.name).exists()
    with pytest.raises(OSError, match="not a folder of its own"):
        cache.discard(entry, lambda: None)


@pytest.mark.parametrize("what", ["an empty database", "reachable by others"])
def test_a_folder_that_a_configuration_passes_off_as_a_state_is_not_pruned(state: Path, what: str) -> None:
    digest = fetched(state, "npm", "left-pad")
    if what == "reachable by others":
        state.chmod(0o755)
    else:
        for each in state.glob("ringfence.db*"):
            each.write_bytes(b"")
    shown = gateways.run("state", "prune", "--yes", cwd=state.parent)
    assert shown.returncode == 1 and "is no state folder" in shown.stderr
    assert place(state, digest).exists()


def test_what_a_configuration_wants_stays(state: Path) -> None:
    pinned, other = fetched(state, "npm", "left-pad"), fetched(state, "npm", "right-pad")
    installed = fetched(state, "pypi", "Typing_Extensions")
    text = f"servers: {{pad: {{command: [node, x], packages: {{from: npm, names: [left-pad], tree: '{pinned}'}}}}}}\n"
    text += "sandbox: {templates: {mine: {install: [typing-extensions>=1]}}}\n"
    path = gateways.write(state.parent, HEADER + text, "named.yaml")
    found = told("prune", "--yes", "--config", path, cwd=state.parent)
    assert [each["digest"] for each in found["removed"]] == [other]
    why = {each["digest"]: each["why"] for each in found["left"]}
    assert why == {
        pinned: f"server pad of {path} pins it",
        installed: f"template mine of {path} installs it",
    }
    shown = gateways.run("state", "prune", "--yes", "--config", path, cwd=state.parent)
    assert "left npm (" in shown.stdout and "There is nothing to remove." in shown.stdout


def test_what_a_configuration_elsewhere_pins_stays_once_its_server_was_to_start(state: Path) -> None:
    pinned, other = fetched(state, "npm", "left-pad"), fetched(state, "npm", "right-pad")
    text = f"servers: {{pad: {{command: [node, x], packages: {{from: npm, names: [left-pad], tree: '{pinned}'}}}}}}\n"
    path = gateways.write(state.parent, HEADER + text + "capabilities: {pad: {mode: read}}\n", "named.yaml")
    assert "pad" in gateways.run("call", "pad", "--config", path, cwd=state.parent).stderr
    found = told("prune", "--yes", cwd=state.parent)
    assert [each["digest"] for each in found["removed"]] == [other]
    assert [each["why"] for each in found["left"]] == [f"server pad of {path} pins it"]
    path.unlink()
    assert [each["digest"] for each in told("prune", "--yes", cwd=state.parent)["removed"]] == [pinned]


def test_what_a_broken_configuration_pins_is_not_known(state: Path) -> None:
    digest, folder = fetched(state, "npm", "left-pad"), wheel(state, "six-1.0-py3-none-any.whl")
    path = gateways.write(state.parent, HEADER, "named.yaml")
    gateways.write(state.parent, "servers: [\n")
    found = told("prune", "--yes", "--config", path, cwd=state.parent)
    assert [each["kind"] for each in found["removed"]] == ["wheels"] and not folder.exists()
    assert [each["digest"] for each in found["left"]] == [digest] and "not known what it pins" in found["left"][0][
        "why"
    ]


def test_a_person_is_asked_on_the_terminal(state: Path) -> None:
    digest = fetched(state, "npm", "left-\x1b[2Jpad")
    with at_terminal("state", "prune", stdin=b"y\n", cwd=state.parent) as terminal:
        shown = terminal.expect("Remove these, 1.")
        assert "left-\\x1b[2Jpad 1.0" in shown and "ringfence init --fetch" in shown and "\x1b" not in shown
        terminal.type("n\n")
        assert terminal.end() == 1
    assert place(state, digest).exists()
    with at_terminal("state", "prune", cwd=state.parent) as terminal:
        terminal.expect("[y/N] ")
        terminal.type("y\n")
        assert terminal.end() == 0
    assert not place(state, digest).exists()


def test_without_a_terminal_nothing_goes_unless_it_is_told_to(state: Path) -> None:
    digest = fetched(state, "npm", "left-pad")
    words = gateways.ringfence("state", "prune")
    with tooling.start_process(words, cwd=state.parent) as started:
        assert started.process.wait(60) == 1
        assert "there is no terminal here" in started.output() and "with --yes" in started.output()
    assert place(state, digest).exists()


def test_what_another_process_uses_stays_until_it_ends(state: Path) -> None:
    used, unused = fetched(state, "npm", "used"), fetched(state, "npm", "unused")
    with using(state, used, "wheels", "staging") as (folder, _, staging):
        kept = wheel(state, "six-1.0-py3-none-any.whl")
        found = told("prune", "--yes", cwd=state.parent)
        assert [each["digest"] for each in found["removed"]] == [unused]
        assert {each["kind"] for each in found["left"]} == {"npm", "wheels", "leftover"}
        assert {each["why"] for each in found["left"]} == {"a process uses it"}
        assert Path(folder, "sub", "file").stat().st_size == 1000 and kept.exists() and Path(staging).exists()
    found = told("prune", "--yes", cwd=state.parent)
    assert len(found["removed"]) == 3 and not found["left"]
    assert not (Path(folder).exists() or kept.exists() or Path(staging).exists())


def test_while_a_keeper_runs_trees_stay(state: Path) -> None:
    digest, folder = fetched(state, "npm", "left-pad"), wheel(state, "six-1.0-py3-none-any.whl")
    (state / "keeper").mkdir()
    held = os.open(state / "keeper" / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    assert system.lock(held)
    try:
        found = told("prune", "--yes", cwd=state.parent)
    finally:
        os.close(held)
    assert [each["digest"] for each in found["left"]] == [digest] and "keeper runs" in found["left"][0]["why"]
    assert place(state, digest).exists() and not folder.exists()
    assert len(told("prune", "--yes", cwd=state.parent)["removed"]) == 1


def test_a_session_goes_on_while_its_state_is_pruned(tmp_path: Path) -> None:
    boxing.need_boxes()
    path = gateways.write(tmp_path, HEADER)
    made = gateways.run("box", "create", "--config", path)
    assert made.returncode == 0, made.stderr
    box = made.stdout.strip()
    digest = fetched(tmp_path / "state", "npm", "left-pad")
    wheel(tmp_path / "state", "six-1.0-py3-none-any.whl")
    found = told("prune", "--yes", "--config", path, cwd=tmp_path)
    assert [each["kind"] for each in found["removed"]] == ["wheels"]
    assert [each["digest"] for each in found["left"]] == [digest]
    ran = gateways.run("box", "exec", box, "-c", "6 * 7", "--config", path)
    assert ran.stdout == "42\n", ran.stderr
    assert gateways.run("box", "rm", box, "--config", path).returncode == 0
    assert gateways.run("audit", "verify", "--config", path).returncode == 0


def test_a_state_of_another_user_is_not_pruned(state: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    digest = fetched(state, "npm", "left-pad")
    os.chown(state, 65534, 65534)
    shown = gateways.run("state", "prune", "--yes", cwd=state.parent)
    assert (shown.returncode, shown.stdout) == (1, "") and "belongs to another user (uid 65534)" in shown.stderr
    assert place(state, digest).exists()


@pytest.mark.parametrize("words", [("--json", "prune"), ("prune", "x"), ("--config", "x.yaml", "prune")])
def test_wrong_usage_removes_nothing(state: Path, words: tuple[str, ...]) -> None:
    digest = fetched(state, "npm", "left-pad")
    shown = gateways.run("state", *words, cwd=state.parent)
    assert shown.returncode == 2 and "Traceback" not in shown.stderr
    assert place(state, digest).exists()
