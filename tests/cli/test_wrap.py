"""`ringfence wrap`: any command in a box, its streams byte for byte, its exit code and its signals."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gateways
from tests.packages.registry import known_alone, served
from tests.packages.servers import NODE, PYTHON


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "ringfence.cli.main", "wrap", *map(str, words)]


def wrap(folders: dict[str, str], *words: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **folders, "LEAKED": "not for servers"}
    return subprocess.run(command(*words), input=stdin, capture_output=True, timeout=300, env=environment, check=False)


def test_every_byte_passes_both_ways(folders: dict[str, str], tmp_path: Path) -> None:
    data = random.Random(7).randbytes(2_000_000)
    done = wrap(folders, "--", "sh", "-c", "cat; echo told >&2; exit 7", stdin=data)
    assert (done.returncode, done.stdout == data, done.stderr) == (7, True, b"told\n")
    (start,) = gateways.records(tmp_path / "state" / "ringfence", kind="finished")
    assert (start["call"]["method"], start["call"]["server"], start["status"]) == ("server/start", "sh", "success")


def test_a_program_with_a_way_out_is_not_on_record_as_one_without_and_what_it_sent_is(
    folders: dict[str, str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
    ask = f"import urllib.request\ntry: urllib.request.urlopen('http://{place}/')\nexcept OSError: pass"
    done = wrap(folders, "--allow", place, "--", "python3", "-c", ask)
    assert done.returncode == 0, done.stderr
    state = tmp_path / "state" / "ringfence"
    (started,) = gateways.records(state, kind="started")
    (finished,) = gateways.records(state, kind="finished")
    assert (started["effect_possible"], started["durable"]) == (True, True)
    assert finished["effect"] == "confirmed"
    (sent,) = gateways.records(state, kind="server_network")
    assert (sent["server"], sent["effect"]) == ("python3", "unknown")
    assert [f"{entry['host']}:{entry['port']}" for entry in sent["network"]["failed"]] == [place]


def test_it_sees_what_was_named_and_no_more(folders: dict[str, str], tmp_path: Path) -> None:
    share, canary = tmp_path / "share", tmp_path / "canary"
    share.mkdir()
    canary.write_text("canary")
    script = f"cat {canary}; echo $LEAKED $GIVEN $KEPT; echo new > /share/new; cat /share/new; touch /ro/x"
    options = ["--mount", f"{share}:/share:rw", "--mount", f"{share}:/ro", "--env", "GIVEN=given", "--env", "LEAKED"]
    done = wrap(folders, *options, "--", "sh", "-c", script)
    assert done.stdout == b"not for servers given\nnew\n"
    assert (share / "new").read_text() == "new\n"
    assert b"Read-only file system" in done.stderr
    assert f"ringfence wrap: it wanted to see {canary}: --mount {canary}:{canary}:ro".encode() in done.stderr


def test_a_relative_script_is_looked_for_where_the_caller_stands(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "project" / "servers" / "mine.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path / "project")
    done = wrap(folders, "--", "python3", "servers/mine.py", "servers/other")
    assert (done.stdout, done.returncode) == (b"['servers/other']\n", 0), done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing to run"),
        (["--mount", "a:b:c:d", "--", "true"], "write HOST:AT"),
        (["--mount", "/root:/x", "--", "true"], "--unsafe REASON"),
        (["--network", "none-such", "--", "true"], "no such network"),
        (["--env", "NOT_THERE_AT_ALL", "--", "true"], "no such variable"),
        (["--allow", "http://x/", "--", "true"], "--allow"),
        (["--memory", "1X", "--", "true"], "Invalid value for '--memory': '1X' is not a size"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(folders: dict[str, str], words: list[str], why: str) -> None:
    done = wrap(folders, *words)
    assert done.returncode == 2 and why in done.stderr.decode() and not done.stdout


def test_no_link_in_a_folder_that_somebody_filled_leads_a_mount_elsewhere(
    folders: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "cloned").mkdir()
    (tmp_path / "cloned/data").symlink_to("../private")
    done = wrap(folders, "--mount", f"{tmp_path}/cloned/data:/data:rw", "--", "true")
    assert done.returncode == 2 and "cloned/data is a link, which is not followed" in done.stderr.decode()


def test_its_workspace_has_the_size_that_was_asked_for(folders: dict[str, str]) -> None:
    done = wrap(folders, "--disk", "1.5G", "--memory", "256M", "--", "sh", "-c", "df -k . | tail -n 1")
    assert (done.returncode, done.stdout.split()[1]) == (0, b"%d" % (1536 << 10)), done.stderr


def test_a_program_that_is_not_there_is_the_boxs_failure(folders: dict[str, str]) -> None:
    done = wrap(folders, "--", "no-such-server")
    assert done.returncode == 125 and b"there is no program 'no-such-server' on PATH" in done.stderr


def test_signals_are_passed_on_and_nothing_is_left(folders: dict[str, str]) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        command("--", "sh", "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **folders},
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"caught\n"
    assert process.wait(60) == 5
    process.stdin.close()
    process.stdout.close()


def test_when_its_reader_goes_the_server_goes(folders: dict[str, str]) -> None:
    process = subprocess.Popen(
        command("--", "sh", "-c", "while :; do echo line; done"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **folders},
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(60) != 0
    process.stdin.close()


def test_what_uvx_and_npx_would_fetch_is_fetched_once_and_runs_without_a_network(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}\n'
    with served() as registry:
        known_alone(registry, monkeypatch)
        registry.wheel("small", "1.0", {"small.py": PYTHON}, script="small = small:main")
        commands = [["uvx", "small"]]
        if shutil.which("npm") is not None:
            registry.npm("@me/js", "2.1.0", {"cli.js": NODE}, bin={"js": "cli.js"})
            commands.append(["npx", "-y", "@me/js"])
        for words in commands:
            done = wrap(folders, "--", *words, stdin=listing)
            assert (done.returncode, done.stderr) == (0, b""), done.stderr
            assert b'"tools"' in done.stdout
        asked = len(registry.asked)
        assert wrap(folders, "--", *commands[-1], stdin=listing).returncode == 0
        assert len(registry.asked) == asked
        missing = wrap(folders, "--", "uvx", "no-such-package-anywhere")
        assert missing.returncode == 125 and b"no-such-package-anywhere" in missing.stderr


def test_a_volume_is_there_in_the_next_box(folders: dict[str, str]) -> None:
    for expected in (b"", b"kept\n"):
        done = wrap(folders, "--volume", "v:/data", "--", "sh", "-c", "cat /data/a 2>/dev/null; echo kept > /data/a")
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
    assert wrap(folders, "--volume", "v", "--", "true").returncode == 2
