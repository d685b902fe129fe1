"""A box works in a folder of the host, and what the host's other programs go by in it stays as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Mount, Program
from ringfence.sandbox.files import acted_upon, guarded
from ringfence.sandbox.process import mounting
from ringfence.sandbox.process.backend import ProcessBackend

pytestmark = pytest.mark.anyio

HERE = "/project"
ATTACKS = """
import os, shutil
def tried(name, do):
    try:
        do()
        print(name, "done")
    except OSError as exc:
        print(name, exc.strerror)
os.chdir("/project")
def write(path, text="evil"):
    with open(path, "w") as file:
        file.write(text)
def swapped(path):
    write("new")
    os.rename("new", path)
tried("hook", lambda: write(".git/hooks/pre-commit"))
tried("hooks", lambda: os.rename(".git/hooks", ".git/old"))
tried("config", lambda: write(".git/config"))
tried("config swapped", lambda: swapped(".git/config"))
tried("config removed", lambda: os.remove(".git/config"))
tried("git moved", lambda: os.rename(".git", "git2"))
tried("git removed", lambda: shutil.rmtree(".git/hooks"))
tried("git exchanged", lambda: os.replace("other", ".git"))
tried("envrc", lambda: write(".envrc"))
tried("envrc cut", lambda: os.truncate(".envrc", 0))
tried("envrc mode", lambda: os.chmod(".envrc", 0o777))
tried("envrc linked", lambda: os.link(".envrc", "same"))
tried("vscode", lambda: write(".vscode/tasks.json"))
tried("vscode new", lambda: write(".vscode/settings.json"))
tried("vscode moved", lambda: os.rename(".vscode", "code"))
"""
WORK = """
tried("work", lambda: write("main.py", "print(1)"))
tried("index", lambda: write(".git/index"))
tried("object", lambda: os.mkdir(".git/objects"))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    for folder in (".git/hooks", ".vscode", "other"):
        (project / folder).mkdir(parents=True)
    (project / ".git/hooks/pre-commit").write_text("good")
    (project / ".git/config").write_text("good")
    (project / ".envrc").write_text("good")
    (project / ".vscode/tasks.json").write_text("good")
    return project


async def run(backend: ProcessBackend, source: str, *mounts: Mount) -> tuple[dict[str, str], BoxReport]:
    report = await backend.run(BoxSpec(Program("python", source.encode()), mounts=mounts))
    assert report.ended == "exited" and not report.stderr.total, report.stderr.text
    return dict(_apart(line) for line in report.stdout.text.splitlines()), report


def _apart(line: str) -> tuple[str, str]:
    name = next(each for each in sorted(_names(), key=len, reverse=True) if line.startswith(f"{each} "))
    return name, line.removeprefix(f"{name} ")


def _names() -> list[str]:
    return [part.split('"')[1] for part in (ATTACKS + WORK).splitlines() if part.startswith("tried(")]


async def test_what_the_host_goes_by_cannot_be_changed_and_the_rest_can(backend: ProcessBackend, project: Path) -> None:
    told, report = await run(backend, ATTACKS + WORK, Mount(str(project), HERE, "rw"))
    assert {name: text for name, text in told.items() if text == "done"} == dict.fromkeys(
        ("work", "index", "object"), "done"
    )
    assert set(told) == set(_names()) and report.planted == ()
    for path in (".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json"):
        assert (project / path).read_text() == "good", path
    assert sorted(os.listdir(project / ".vscode")) == ["tasks.json"] and sorted(os.listdir(project / ".git")) == [
        "config",
        "hooks",
        "index",
        "objects",
    ]


async def test_the_control_a_mount_that_is_said_to_be_unsafe(backend: ProcessBackend, project: Path) -> None:
    told, report = await run(backend, ATTACKS, Mount(str(project), HERE, "rw", unsafe="a test of it"))
    assert {told[name] for name in ("hook", "hooks", "config", "envrc", "vscode", "git moved")} == {"done"}
    assert (project / ".envrc").read_text() == "" and report.planted == ()


async def test_what_was_not_there_is_told_of(backend: ProcessBackend, tmp_path: Path) -> None:
    project = tmp_path / "bare"
    (project / ".idea").mkdir(parents=True)
    os.symlink("/nowhere", project / ".profile")
    source = """
import os
os.makedirs("/project/.git/hooks")
open("/project/.git/hooks/pre-commit", "w").close()
open("/project/.envrc", "w").close()
os.remove("/project/.profile")
open("/project/.profile", "w").close()
open("/project/harmless", "w").close()
"""
    _, report = await run(backend, source, Mount(str(project), HERE, "rw"))
    assert report.planted == (f"{HERE}/.git", f"{HERE}/.envrc", f"{HERE}/.profile")
    # The next box cannot change what is there by now.
    told, report = await run(backend, ATTACKS.split('tried("hooks"')[0], Mount(str(project), HERE, "rw"))
    assert told == {"hook": "Read-only file system"} and report.planted == ()


async def test_in_a_read_only_mount_there_is_nothing_to_guard(project: Path) -> None:
    assert [each.at for each in mounting.place([Mount(str(project), HERE)])] == [HERE]
    placed = mounting.place([Mount(str(project), HERE, "rw")])
    assert [(each.at.removeprefix(HERE), each.writable) for each in placed] == [
        ("", True),
        ("/.envrc", False),
        ("/.git", True),
        ("/.git/config", False),
        ("/.git/hooks", False),
        ("/.vscode", False),
    ]
    (project / ".envrc").unlink()
    os.symlink("/etc/passwd", project / ".envrc")
    assert f"{HERE}/.envrc" not in [each.at for each in mounting.place([Mount(str(project), HERE, "rw")])]
    assert guarded.look([Mount(str(project), HERE)], {}).states == {}


# ── Behind links ──


def made(project: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    for name, target in (links or {}).items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, project / name)
    return project


async def shell(backend: ProcessBackend, script: str, *mounts: Mount) -> BoxReport:
    return await backend.run(BoxSpec(Program("command", argv=("/bin/sh", "-c", script)), mounts=mounts))


LINKED = {
    "the repository": (
        {"store/git/hooks/pre-commit": "good", "store/git/config": "good", "store/git/HEAD": "good"},
        {".git": "store/git"},
    ),
    "the repository, by a file": (
        {"store/git/hooks/pre-commit": "good", "store/git/config": "good", ".git": "gitdir: store/git\n"},
        {},
    ),
    "the editor's folder": ({"conf/vscode/tasks.json": "good"}, {".vscode": "conf/vscode"}),
    "the folder of hooks": ({"scripts/pre-commit": "good", ".git/config": "good"}, {".git/hooks": "../scripts"}),
    "a hook": ({"tools/pc": "good", ".git/config": "good"}, {".git/hooks/pre-commit": "../../tools/pc"}),
    "a link to a link": ({"a/b/envrc": "good"}, {".envrc": "one", "one": "a/../two", "two": "a/b/envrc"}),
    "far in a folder": ({"skills/x/run.py": "good", ".claude/a.json": "good"}, {".claude/skills/x": "../../skills/x"}),
}


@pytest.mark.parametrize("kind", LINKED)
async def test_what_a_link_leads_to_is_held(backend: ProcessBackend, tmp_path: Path, kind: str) -> None:
    files, links = LINKED[kind]
    project = made(tmp_path / "project", files, links)
    kept = [name for name in files if not name.endswith("HEAD")]
    script = "cd /project; echo mine > own.txt;" + ";".join(
        f"echo evil > {name}; echo evil > new; mv -f new {name}; rm -f {name}; mv {name.split('/')[0]} moved"
        for name in kept
    )
    report = await shell(backend, script, Mount(str(project), HERE, "rw"))
    assert {name: (project / name).read_text() for name in files} == files and report.planted == ()
    assert {name: os.readlink(project / name) for name in links} == links
    assert (project / "own.txt").read_text() == "mine\n" and not (project / "moved").exists()


async def test_an_absolute_link_and_one_to_another_mount(backend: ProcessBackend, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made(two, {"hooks/pre-commit": "good", "other": ""})
    made(one, {"conf/envrc": "good"}, {".envrc": str(one / "conf/envrc"), ".git/hooks": "../../two/hooks"})
    script = "echo evil > /a/conf/envrc; echo evil > /b/hooks/pre-commit; echo mine > /b/other"
    report = await shell(backend, script, Mount(str(one), "/a", "rw"), Mount(str(two), "/b", "rw"))
    assert report.stderr.text.count("Read-only") == 2 and report.planted == ()
    assert (two / "other").read_text() == "mine\n" and (one / "conf/envrc").read_text() == "good"
    # Mounted by itself, and writable, it is not taken away: that it changed is told.
    mounts = (Mount(str(one), "/a", "rw"), Mount(str(two / "hooks"), "/b", "rw"))
    assert (await shell(backend, "echo evil > /b/pre-commit", *mounts)).planted == ("/a/.git/hooks",)


async def test_a_link_that_is_replaced_or_led_nowhere_is_told_of(backend: ProcessBackend, tmp_path: Path) -> None:
    links = {".vscode": "conf/vscode", ".envrc": "missing/envrc", ".npmrc": "conf/npmrc", ".idea": "conf/idea"}
    project = made(tmp_path / "project", {"conf/vscode/tasks.json": "good", "conf/npmrc": "good"}, links)
    script = """cd /project; rm .vscode; mkdir .vscode; echo evil > .vscode/tasks.json
mkdir missing; echo evil > missing/envrc; mkdir other; echo evil > other/npmrc; ln -sfn other/npmrc .npmrc; rm .idea"""
    report = await shell(backend, script, Mount(str(project), HERE, "rw"))
    assert report.stderr.text == ""
    assert sorted(report.planted) == [f"{HERE}/.envrc", f"{HERE}/.npmrc", f"{HERE}/.vscode"]
    assert (project / "conf/vscode/tasks.json").read_text() == "good"


async def test_a_link_that_leads_out_is_not_followed(backend: ProcessBackend, tmp_path: Path) -> None:
    made(tmp_path, {"outside/secret/hooks/x": "", "outside/secret/config": ""})
    project = made(tmp_path / "project", {"a": ""}, {".git": "../outside/secret", ".vscode": "..", ".idea": ".idea"})
    mount = Mount(str(project), HERE, "rw")
    assert [each.at for each in mounting.place([mount])] == [HERE]
    states = guarded.look([mount], {}).states
    assert all(there is None for _, there in states.values()) and f"{HERE}/.git/hooks" in states
    assert (await shell(backend, "echo mine > /project/a; rm /project/.idea", mount)).planted == ()
    assert (await shell(backend, "cd /project; ln -sfn /elsewhere .git", mount)).planted == (f"{HERE}/.git",)


async def test_a_link_to_the_whole_project_does_not_make_it_read_only(backend: ProcessBackend, tmp_path: Path) -> None:
    links = {".claude": ".", ".vscode/root": "..", ".git/hooks/top": "../.."}
    project = made(tmp_path / "project", {"main.py": "", ".vscode/tasks.json": "good"}, links)
    script = "cd /project; echo mine > main.py; mkdir new; echo evil > .vscode/tasks.json"
    report = await shell(backend, script, Mount(str(project), HERE, "rw"))
    assert report.stderr.text.count("Read-only") == 1 and report.planted == ()
    assert (project / "main.py").read_text() == "mine\n"


async def test_there_are_not_more_than_a_box_can_have_and_the_rest_is_told_of(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    files = {f"scripts/{number:03}": "good" for number in range(400)}
    links = {f".git/hooks/{number:03}": f"../../scripts/{number:03}" for number in range(400)}
    # Far from the root: paths and descriptors of so many mounts are more than a socket holds at a time.
    project = made(tmp_path.joinpath(*["long" * 50] * 8, "project"), files, links)
    report = await shell(
        backend, "cd /project/scripts; for f in *; do echo evil > $f; done", Mount(str(project), HERE, "rw")
    )
    spoilt = [name for name in files if (project / name).read_text() != "good"]
    assert report.planted == tuple(f"{HERE}/.git/hooks/{name.partition('/')[2]}" for name in spoilt)
    assert 0 < len(spoilt) < 80


async def test_what_an_earlier_box_may_have_left_to_lead_us_astray(backend: ProcessBackend, tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff\n")
    links = {".vscode/a": f"../{odd}", f".vscode/{odd}": f"../{odd}", ".envrc": "x/../.." * 50, ".idea": f"{odd}/idea"}
    project = made(tmp_path / "project", {odd: "good", ".git": "gitdir: a\0b\n"}, links)
    mount = Mount(str(project), HERE, "rw")
    report = await shell(backend, "cd /project; echo evil > .vscode/a", mount)
    assert report.planted == (f"{HERE}/.vscode/a", f"{HERE}/.vscode/\ufffd\n"), "told, since a box cannot be told of it"
    for text in ("gitdir: .git\n", "gitdir:\n", "gitdir: " + "../" * 2000, "gitdir: /\n"):
        (project / ".git").write_text(text)
        assert f"{HERE}/.git" in [each.at for each in mounting.place([mount])], text


# ── What is mounted by itself ──


@pytest.mark.parametrize("kind", ["a repository's folder", "a bare repository"])
async def test_a_repository_mounted_by_itself(backend: ProcessBackend, tmp_path: Path, kind: str) -> None:
    own = tmp_path / (".git" if kind == "a repository's folder" else "bare")
    made(own, {"hooks/pre-commit": "good", "config": "good", "HEAD": "good", "objects/x": "", "refs/y": ""})
    script = "cd /g; echo evil > hooks/pre-commit; echo evil > config; mv hooks h; mkdir modules; echo mine > HEAD"
    report = await shell(backend, script, Mount(f"{own}/", "/g", "rw"))
    assert report.planted == ("/g/modules",) and (own / "HEAD").read_text() == "mine\n"
    assert [(own / name).read_text() for name in ("hooks/pre-commit", "config")] == ["good", "good"]


async def test_a_folder_that_becomes_a_repository_is_told_of(backend: ProcessBackend, tmp_path: Path) -> None:
    script = "cd /project; mkdir objects refs; echo 'ref: refs/heads/x' > HEAD; echo evil > config"
    report = await shell(backend, script, Mount(str(tmp_path), HERE, "rw"))
    assert report.planted == (f"{HERE}/config", f"{HERE}/HEAD")
    assert (await shell(backend, "true", Mount(str(tmp_path), HERE, "rw"))).planted == ()


def as_on_the_host(folder: Path, *words: str) -> int:
    """Git, told to find the repository by itself; who owns it is left aside."""
    trusted = ("-c", "safe.directory=*", "-c", "safe.bareRepository=all")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(["git", *trusted, *words], cwd=folder, env=env, capture_output=True, check=False).returncode


BECOMES = {
    "objects and refs elsewhere": (
        "mkdir -p data/objects data/refs; echo 'ref: refs/heads/x' > HEAD; echo data > commondir",
        {"commondir", "HEAD", "data/config"},
        True,
    ),
    "a link as HEAD, and another folder's objects": (
        "mkdir -p data/objects data/refs; ln -s refs/heads/x HEAD; ln -s data/where commondir; echo data > data/where",
        {"commondir", "HEAD", "data/config"},
        True,
    ),
    "a commit as HEAD": ("mkdir objects refs; printf %040d 1 > HEAD", {"HEAD"}, True),
    "a setting beside a HEAD": ("printf 'ref:\\n\\trefs/heads/x' > HEAD; echo > config", {"config", "HEAD"}, False),
    "a word as HEAD": ("echo overview > HEAD; echo > config", set(), False),
    "a folder as HEAD": ("mkdir HEAD objects refs; echo > config", set(), False),
}


@pytest.mark.parametrize("kind", BECOMES)
async def test_every_folder_that_git_takes_for_a_repository_is_told_of(
    backend: ProcessBackend, tmp_path: Path, kind: str
) -> None:
    script, told, at_once = BECOMES[kind]
    settings = "printf '[core]\\n\\tbare = false\\n\\tworktree = /x\\n' > data/config"
    script = f"cd /project; {script}; if [ -d data ]; then {settings}; fi"
    report = await shell(backend, script, Mount(str(tmp_path), HERE, "rw"))
    assert report.stderr.text == "" and set(report.planted) == {f"{HERE}/{name}" for name in told}
    if at_once and shutil.which("git") is not None:
        assert as_on_the_host(tmp_path, "rev-parse", "--git-dir") == 0, "git does take it for one"


UNMADE = ("rm .git/HEAD", "echo > .git/HEAD", "chmod 0 .git/HEAD", "mv .git/objects o", "mv .git/refs .git/r")


@pytest.mark.parametrize("script", [*UNMADE, "rm -r .git/refs; ln -s /nowhere .git/refs"])
async def test_a_repository_that_git_no_longer_finds_is_told_of(
    backend: ProcessBackend, tmp_path: Path, script: str
) -> None:
    files = {".git/config": "good", ".git/HEAD": "ref: refs/heads/x\n", ".git/objects/x": "", ".git/refs/y": ""}
    made(tmp_path, files)
    mount = Mount(str(tmp_path), HERE, "rw")
    switched = "cd /project; echo ref: refs/heads/y > .git/new; mv .git/new .git/HEAD"
    assert (await shell(backend, switched, mount)).planted == ()
    part = next(name for name in ("HEAD", "objects", "refs") if f".git/{name}" in script)
    report = await shell(backend, f"cd /project; {script}", mount)
    assert (report.planted, report.stderr.text) == ((f"{HERE}/.git/{part}",), "")
    assert (await shell(backend, "echo 1 > /project/main.py", mount)).planted == (), "it was so before"


async def test_what_git_reads_where_commondir_says_is_held(backend: ProcessBackend, tmp_path: Path) -> None:
    store = {"store/config": "good", "store/hooks/pre-commit": "good", "store/objects/x": "", "store/refs/y": ""}
    made(tmp_path, {".git/HEAD": "ref: refs/heads/x\n", ".git/commondir": "../store\n", **store})
    script = """cd /project; echo evil > store/config; rm -r store/hooks; mv store s; echo evil > .git/commondir
echo mine > store/refs/y; mkdir store/modules"""
    report = await shell(backend, script, Mount(str(tmp_path), HERE, "rw"))
    assert report.planted == (f"{HERE}/store/modules",) and (tmp_path / "store/refs/y").read_text() == "mine\n"
    assert {(tmp_path / name).read_text() for name in ("store/config", "store/hooks/pre-commit")} == {"good"}
    (tmp_path / ".git/commondir").write_text(f"{tmp_path}/store\n")
    assert f"{HERE}/store/config" in [each.at for each in mounting.place([Mount(str(tmp_path), HERE, "rw")])]


async def test_what_a_box_puts_in_the_place_of_a_repository_and_git_would_run_is_told_of(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    project = tmp_path / "project"
    subprocess.run([git, "init", "-q", project], check=True)
    script = f"""cd /project; rm .git/HEAD; mkdir -p data/objects data/refs; echo ref: refs/heads/main > HEAD
echo data > commondir
printf '[core]\\n\\trepositoryformatversion=1\\n[extensions]\\n\\tworktreeConfig=true\\n' > data/config
printf '[core]\\n\\tbare=false\\n\\tworktree=..\\n\\tfsmonitor="touch {tmp_path}/ran;false"\\n' > config.worktree"""
    report = await shell(backend, script, Mount(str(project), HERE, "rw"))
    assert report.stderr.text == ""
    told = {"config.worktree", "commondir", "data/config", "HEAD", ".git/HEAD"}
    assert set(report.planted) == {f"{HERE}/{name}" for name in told}
    as_on_the_host(project, "status")
    assert (tmp_path / "ran").exists(), "the control: this is what is told of"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
@pytest.mark.parametrize("folder", ["", "/.git", "/.cargo"])
async def test_a_folder_that_was_closed_to_us_is_told_of(backend: ProcessBackend, tmp_path: Path, folder: str) -> None:
    made(tmp_path, {".git/config": "", ".cargo/x": ""})
    script = f"cd /project; echo . > .git/commondir; echo x > .cargo/config; chmod 0 {HERE}{folder}"
    try:
        planted = (await shell(backend, script, Mount(str(tmp_path), HERE, "rw"))).planted
    finally:
        for closed in (tmp_path, tmp_path / ".git", tmp_path / ".cargo"):
            closed.chmod(0o700)
    assert f"{HERE}{folder}" in planted


async def test_what_programs_go_by_cannot_itself_be_mounted_writable(backend: ProcessBackend, tmp_path: Path) -> None:
    made(
        tmp_path, {".vscode/tasks.json": "", ".git/hooks/x": "", ".claude/worktrees/w/main.py": "", ".cargo/config": ""}
    )
    for name in (".vscode", ".vscode/tasks.json", ".git/hooks", ".git/hooks/x", ".claude", ".cargo/config"):
        with pytest.raises(ValueError, match=r"programs on this host act on \(\.[a-z/]+\).*unsafe: REASON"):
            await shell(backend, "true", Mount(str(tmp_path / name), "/x", "rw"))
        for mount in (Mount(str(tmp_path / name), "/x"), Mount(str(tmp_path / name), "/x", "rw", unsafe="a test")):
            mounting.check([mount], ())
    report = await shell(backend, "echo 1 > /x/main.py", Mount(str(tmp_path / ".claude/worktrees/w"), "/x", "rw"))
    assert (report.exit_status, report.planted) == (0, ())


async def test_only_what_is_gone_by_is_held_of_folders_that_programs_keep_their_things_in(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    made(tmp_path, {".cargo/config.toml": "good", ".yarn/releases/yarn.cjs": "good", ".config/other/x": ""})
    made(tmp_path, {".local/bin/ls": "good", ".local/share/notes/x": "", ".julia/config/startup.jl": "good"})
    script = """cd /project; mkdir -p .cargo/registry .yarn/cache .local/state .julia/packages; echo 1 > .config/other/x
echo evil > .local/bin/ls; mkdir .local/lib; echo 1 > .local/share/notes/x; echo evil > .julia/config/startup.jl
echo evil > .cargo/config.toml; echo evil > .yarn/releases/yarn.cjs; mv .cargo c; mv .config c; mkdir .config/fish"""
    report = await shell(backend, script, Mount(str(tmp_path), HERE, "rw"))
    assert report.planted == (f"{HERE}/.config/fish", f"{HERE}/.local/lib")
    assert report.stderr.text.count("Read-only") == 4 and report.stderr.text.count("busy") == 2
    assert (tmp_path / ".cargo/registry").is_dir() and (tmp_path / ".yarn/cache").is_dir()


async def test_every_name_of_the_list_is_held(backend: ProcessBackend, tmp_path: Path) -> None:
    names = [name for name in acted_upon.NAMES if name not in acted_upon.PINNED]
    assert {".hg", ".netrc", ".pypirc", ".gnupg", ".svn", ".pre-commit-config.yaml"} <= set(names)
    assert {".mise.local.toml", "mise.local.toml", ".mise", ".lvimrc", ".pdbrc.py", "bunfig.toml"} <= set(names)
    assert {".agents", ".factory", ".junie", ".augment", ".fleet", ".vs", ".ipython", ".perldb"} <= set(names)
    project = tmp_path / "project"
    for name in names:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("good")
    helpers = ATTACKS.partition('tried("hook')[0]
    source = f"{helpers}\nfor name in {names!r}:\n    tried(name, lambda: write(name))\n"
    mount = Mount(str(project), HERE, "rw")
    report = await backend.run(BoxSpec(Program("python", source.encode()), mounts=(mount,)))
    seen = dict(line.split(" ", 1) for line in report.stdout.text.splitlines())
    assert seen == dict.fromkeys(names, "Read-only file system"), report.stderr.text
    assert report.planted == ()
    assert {(project / name).read_text() for name in names} == {"good"}


async def test_git_works_in_a_box(backend: ProcessBackend, tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    for words in (["init", "-q"], ["config", "user.name", "Test"], ["config", "user.email", "t@example.org"]):
        subprocess.run([git, "-C", tmp_path, *words], check=True)
    (tmp_path / "a.txt").write_text("one\n")
    script = "cd /project && git add . && git commit -qm first && git switch -qc other && git log --oneline | wc -l"
    script += " && git pack-refs --all && git gc -q && git switch -q --detach"
    command = Program("command", argv=("/bin/sh", "-c", script))
    report = await backend.run(BoxSpec(command, mounts=(Mount(str(tmp_path), HERE, "rw"),), env={"HOME": "/workspace"}))
    assert (report.stdout.text.strip(), report.stderr.text, report.planted) == ("1", "", ())


def test_a_look_has_an_end_and_what_it_leaves_out_counts_as_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    facts = guarded._facts

    def facts_of(path: str) -> tuple[int, ...]:
        looked.append(path)
        return facts(path)

    monkeypatch.setattr(guarded, "_facts", facts_of)
    mounts = [Mount(str(tmp_path), HERE, "rw")]
    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode/tasks.json").touch()
    before = guarded.look(mounts, {})
    assert guarded.planted(before, guarded.look(mounts, {})) == ()
    few = len(looked)
    for folder in (".idea", ".cursor", ".vscode/inner"):
        (tmp_path / folder).mkdir()
        for number in range(guarded._MAX_LOOKED_AT):
            (tmp_path / folder / f"{number}").touch()
    looked.clear()
    many = guarded.look(mounts, {})
    assert len(looked) <= guarded._MAX_LOOKED_AT + 2 * few + 10
    planted = {f"{HERE}/{name}" for name in (".idea", ".cursor", ".vscode")}
    assert set(guarded.planted(before, many)) == planted
    assert set(guarded.planted(many, guarded.look(mounts, {}))) == planted, "a file in there may have changed"


def test_what_lies_deep_in_a_guarded_folder_is_looked_at_too(tmp_path: Path) -> None:
    mounts = [Mount(str(tmp_path), HERE, "rw")]
    deep = tmp_path / ".claude/skills/name/scripts/more"
    deep.mkdir(parents=True)
    (deep / "run.sh").write_text("true")
    before = guarded.look(mounts, {})
    assert guarded.planted(before, guarded.look(mounts, {})) == ()
    (deep / "run.sh").write_text("false; true")
    changed = guarded.look(mounts, {})
    assert guarded.planted(before, changed) == (f"{HERE}/.claude",)
    (deep / "new.sh").touch()
    assert guarded.planted(changed, guarded.look(mounts, {})) == (f"{HERE}/.claude",)
    deeper = deep.joinpath(*["d"] * guarded._DEEPEST)
    deeper.mkdir(parents=True)
    deepest = guarded.look(mounts, {})
    assert guarded.planted(deepest, guarded.look(mounts, {})) == (f"{HERE}/.claude",), "it is not looked at"


def test_links_are_followed_as_far_as_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[str] = []
    walk = guarded._walk

    def walk_to(roots: Sequence[str], start: str, name: str) -> guarded._Way:
        walked.append(name)
        return walk(roots, start, name)

    monkeypatch.setattr(guarded, "_walk", walk_to)
    monkeypatch.setattr(guarded, "_MAX_ENTRIES", 100)
    mounts = [Mount(str(tmp_path), HERE, "rw")]
    (tmp_path / ".vscode").mkdir()
    guarded.look(mounts, {})
    without = len(walked)
    for number in range(1, 39):
        (tmp_path / f"{number}").symlink_to(f"{number + 1}")
    (tmp_path / "39").touch()
    for number in range(50):
        (tmp_path / ".vscode" / f"{number}").symlink_to("../1")
    walked.clear()
    before = guarded.look(mounts, {})
    assert len(walked) <= without + 100 // 38 + 1
    (tmp_path / "39").write_text("changed")
    assert guarded.planted(before, guarded.look(mounts, {})) == (f"{HERE}/.vscode",)


def test_the_list_is_the_documented_one() -> None:
    text = (Path(__file__).parents[3] / "docs/servers.md").read_text()
    section = text.partition("### What a writable mount does not give")[2].partition("\n## ")[0]
    shells = (".bash", ".zsh", ".zlog", ".zprofile")
    assert [name for name in acted_upon.NAMES if not name.startswith(shells) and f"`{name}`" not in section] == []
