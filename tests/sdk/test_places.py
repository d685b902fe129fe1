"""Where a box has its files, and by which paths they are had from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence import NotFound, Refused, Sandbox, run_code
from ringfence.core.box import Limits
from ringfence.sandbox.process.baseline import Baseline

pytestmark = pytest.mark.usefixtures("state")

LOOK = "import os; sorted(os.listdir('/workspace')), sorted(os.listdir('/tmp')), sorted(os.listdir('/home/user'))"


def test_the_workspace_of_a_session_is_empty_and_the_users() -> None:
    with Sandbox.create() as box:
        assert box.run_code(LOOK).text == "([], [], [])"
        done = box.commands.run("mkdir -p a/b output; touch a/b/c output/d .hidden; rm -rf /workspace/* && ls -A")
        assert (done.exit_code, done.stdout) == (0, ".hidden\n")
        done = box.commands.run("pwd; echo $HOME; cd && pwd -P; cd /tmp && pwd -P; echo x > ~/y && echo z > /var/tmp/w")
        assert done.stdout.split() == ["/workspace", "/home/user", "/home/user", "/tmp"]
        assert box.run_code(LOOK).text == "(['.hidden'], ['w'], ['y'])"


def test_inputs_are_there_where_they_were_given_and_only_to_read() -> None:
    with Sandbox.create(inputs={"a.csv": b"1,2"}) as box:
        assert (
            box.run_code("import os; os.listdir('/workspace'), open('input/a.csv').read()").text == "(['input'], '1,2')"
        )
        with pytest.raises(Refused, match="read-only"):
            box.files.write("input/a.csv", "x")
        assert box.commands.run("echo x > input/a.csv").exit_code != 0


def test_files_in_output_are_results_once_a_program_has_made_it() -> None:
    with Sandbox.create() as box:
        done = box.run_code("import os; os.mkdir('output'); open('output/r.txt', 'w').write('done')")
        assert [file["path"] for file in done.facts["files"]] == ["/workspace/output/r.txt"]


def test_a_program_that_is_run_once_has_three_folders_and_a_home() -> None:
    done = run_code(
        "import os, tempfile, pathlib\n"
        "home = pathlib.Path.home()\n"
        "(home / 'x').write_text('1')\n"
        "print(sorted(os.listdir('/workspace')), home, os.environ['HOME'])\n"
        "print((home / 'x').read_text(), tempfile.gettempdir())"
    )
    assert "".join(done.logs.stdout) == "['input', 'output', 'tmp'] /home/user /home/user\n1 /workspace/tmp\n"


@pytest.mark.parametrize("path", ["/tmp/x", "/home/user/x", "/var/tmp/x", "/dev/shm/x", "../tmp/x", "/workspace/x"])
def test_paths_are_those_that_programs_see(path: str) -> None:
    with Sandbox.create() as box:
        box.files.write(path, "from outside")
        seen = os.path.normpath(os.path.join("/workspace", path))
        assert box.run_code(f"open({seen!r}).read()").text == "'from outside'"
        box.run_code(f"open({seen!r}, 'w').write('from inside');")
        assert box.files.read(path) == "from inside"
        assert "x" in [entry.name for entry in box.files.list(os.path.dirname(seen))]
        box.files.rename(path, f"{path}.old")
        box.files.remove(f"{path}.old")
        assert not box.files.exists(path)


def test_what_the_box_may_read_is_read_and_not_written() -> None:
    with Sandbox.create() as box:
        assert "box:/home/user" in box.files.read("/etc/passwd")
        assert {"etc", "home", "tmp", "usr", "workspace"} <= {entry.name for entry in box.files.list("/")}
        assert box.files.get_info("/usr").kind == "dir" and not box.files.exists("/etc/shadow")
        box.run_code(
            "import os; os.symlink('/etc/passwd', 'link'); os.symlink('/tmp', 't'); open('/tmp/a', 'w').write('a');"
        )
        assert "box:/home/user" in box.files.read("link")
        assert box.files.read("t/a") == "a"
        for path in ("/etc/passwd", "/new", "/usr/x", "/home/x"):
            with pytest.raises(Refused, match="read-only in the box"):
                box.files.write(path, "x")
        for path in ("/proc/1/environ", "/proc/1/root/etc/passwd", "/proc/self/status", "/dev/zero"):
            with pytest.raises((Refused, NotFound)):
                box.files.read(path)
        for path in ("/tmp", "/home/user", "/workspace", "/"):
            with pytest.raises(Refused):
                box.files.remove(path)


def test_permissions_mean_what_they_mean_to_programs() -> None:
    with Sandbox.create() as box:
        box.commands.run(
            "echo 1 > closed; chmod 000 closed; echo 2 > fixed; chmod 444 fixed;"
            " mkdir dark sealed; echo 3 > dark/x; chmod 000 dark; chmod 555 sealed"
        )
        for path in ("closed", "dark/x"):
            with pytest.raises(Refused, match="closed by its permissions"):
                box.files.read(path)
        with pytest.raises(Refused, match="closed by its permissions"):
            box.files.list("dark")
        for path in ("fixed", "closed", "sealed/new", "dark/new"):
            with pytest.raises(Refused, match="closed by its permissions"):
                box.files.write(path, "x")
        assert box.files.read("fixed") == "2\n"
        box.commands.run("chmod 644 closed fixed")
        box.files.write("fixed", "x")
        assert box.files.read("closed") == "1\n"


def test_a_pause_a_snapshot_and_a_fork_keep_all_that_a_box_wrote() -> None:
    with Sandbox.create(inputs={"i": b"in"}) as box:
        box.commands.run("echo w > w; echo t > /tmp/t; mkdir -p ~/.config && echo h > ~/.config/h")
        box.pause()
        box.resume()
        assert box.files.read("/tmp/t") == "t\n"
        snapshot = box.snapshot()
        [fork] = box.fork(1)
        assert isinstance(fork, Sandbox)
        with fork, Sandbox.create(snapshot=snapshot.id) as restored:
            for other in (fork, restored):
                found = other.commands.run("cat w /tmp/t ~/.config/h input/i; touch input/new || echo fixed")
                assert found.stdout == "w\nt\nh\ninfixed\n"
                other.commands.run("rm -rf /workspace/w /tmp/* ~/.config")
        assert box.files.read("/home/user/.config/h") == "h\n"


def test_a_snapshot_keeps_its_environment() -> None:
    with Sandbox.create(envs={"KEPT": "yes"}) as box:
        snapshot = box.snapshot("kept")
    with Sandbox.create(snapshot=snapshot) as again:
        assert again.run_code("import os; os.environ['KEPT']").text == "'yes'"


def test_a_snapshot_keeps_template_and_environment() -> None:
    for package in ("numpy", "pandas", "matplotlib"):
        pytest.importorskip(package, reason=f"the template data has {package}: pip install {package}")
    with Sandbox.create(template="data", envs={"KEPT": "yes"}) as box:
        snapshot = box.snapshot("kept")
    assert (snapshot.template, snapshot.packages) == ("data", ())
    with Sandbox.create(snapshot="kept") as again:
        assert again.info().template == "data"
        assert again.run_code("import os; os.environ['KEPT']").text == "'yes'"
    with Sandbox.create(snapshot=snapshot, template="python") as other:
        assert other.info().template == "python"


def test_facts_say_what_becomes_of_the_memory_of_a_paused_box() -> None:
    with Sandbox.create() as box:
        box.pause()
        assert box.info().isolation["paused_memory"] in ("resident", "given_back")


def test_temporary_files_and_those_of_the_user_count_as_disk() -> None:
    with Sandbox.create(limits=Limits(disk_bytes=16 * 1024 * 1024)) as box:
        done = box.commands.run("head -c 9M /dev/zero > /tmp/a; head -c 9M /dev/zero > ~/b; stat -c %s /tmp/a ~/b")
        sizes = [int(word) for word in done.stdout.split()]
        assert 0 < sum(sizes) <= 16 * 1024 * 1024 and done.facts["limit"] == "disk"
        with pytest.raises(Refused, match="disk limit of 16 MiB"):
            box.files.write("/tmp/c", bytes(9 * 1024 * 1024))


def test_an_interpreter_where_the_home_would_be_is_not_hidden() -> None:
    taken = Baseline(trees=("/home/user/.local/share/python", str(Path("/tmp/venv"))), stays=True)
    assert taken.places == ("/var/tmp", "/home/box")
    assert Baseline(stays=True).places == ("/tmp", "/home/user")
