"""A box whose root is an image: it sees that and nothing of the host, however the image is made."""

from __future__ import annotations

import json
import os
import stat
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Mount, NetworkRule, Program
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import Command, StaySpec
from ringfence.governance.route import ProxyServer
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.zygote.template import DEVICES, WRITTEN
from tests.boxing import need_boxes
from tests.egress.outside import NOBODY, Names
from tests.rooting import system_root, variant

pytestmark = pytest.mark.anyio

LOOK = """
import json, os
def tried(do):
    try:
        return do()
    except OSError as exc:
        return exc.strerror
def read(path):
    with open(path) as file:
        return file.read()
def wrote(path):
    with open(path, "w") as file:
        return file.write("x")
print(json.dumps({
    "etc": {name: tried(lambda: read(f"/etc/{name}")) for name in %(written)r},
    "dev": sorted(os.listdir("/dev")), "null": tried(lambda: read("/dev/null")),
    "proc": tried(lambda: read("/proc/self/comm")), "processes": sorted(n for n in os.listdir("/proc") if n.isdigit()),
    "cwd": os.getcwd(), "own": tried(lambda: wrote("/workspace/x")), "tmp": tried(lambda: wrote("/tmp/x")),
    "home": tried(lambda: wrote("/home/user/x")), "ids": os.getresuid() + os.getresgid(), "host": os.uname().nodename,
    "others": {path: tried(lambda: wrote(path))
               for path in ("/x", "/etc/x", "/etc/passwd", "/dev/x", "/usr/x", "/run/x", "/var/x", "/proc/x")},
    "canary": tried(lambda: read(%(canary)r)), "workspace": sorted(os.listdir("/workspace")),
}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_boxes()
    return system_root(tmp_path_factory.mktemp("system") / "root")


@pytest.fixture
def changed(root: Path, tmp_path: Path) -> Path:
    """One of one's own, to be made worse."""
    return variant(root, tmp_path / "root")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "passwd").write_text("not for boxes")
    return tmp_path / "canary" / "passwd"


async def command(backend: ProcessBackend, root: Path, *argv: str, **more: Any) -> BoxReport:
    box = await backend.open(StaySpec(root=root, **more))
    try:
        return await (await box.command(Command(argv), lambda *_: None)).over()
    finally:
        await box.end()


async def look(backend: ProcessBackend, root: Path, canary: Path, **more: Any) -> dict[str, Any]:
    source = LOOK % {"written": sorted(WRITTEN), "canary": str(canary)}
    report = await command(backend, root, "python3", "-c", source, **more)
    assert (report.ended, report.exit_status) == ("exited", 0), report.stderr.text
    told: dict[str, Any] = json.loads(report.stdout.text)
    return told


def is_a_box_of_ours(told: dict[str, Any]) -> None:
    """Whatever the image is."""
    assert told["etc"] == WRITTEN
    assert (
        set(told["dev"]) == {*DEVICES, "fd", "ptmx", "pts", "shm", "stdin", "stdout", "stderr"} and told["null"] == ""
    )
    assert told["proc"].startswith("python3") and told["processes"] == ["2"]
    assert (told["own"], told["tmp"], told["home"], told["cwd"]) == (1, 1, 1, "/workspace")
    assert told["ids"] == [1000] * 6 and told["host"] == "box"
    assert told["workspace"] == ["x"]
    refused = {"Read-only file system", "Permission denied", "No such file or directory"}
    assert set(told["others"].values()) <= refused, told["others"]
    assert told["canary"] == "No such file or directory"


async def test_it_sees_the_image_and_nothing_of_the_host(backend: ProcessBackend, root: Path, canary: Path) -> None:
    is_a_box_of_ours(await look(backend, root, canary))
    there = await command(backend, root, "ls", "/", "/usr/bin", "/etc")
    ours = {"etc", "dev", "proc", "workspace", "run", "home", "sys", "var", "tmp"}
    tops = {entry.name for entry in root.iterdir()} | ours
    shown = there.stdout.text.split("\n\n")
    assert set(shown[0].splitlines()) == {"/:", *tops}
    assert "gcc" not in shown[2].split() and "python3" in shown[2].split()
    assert there.isolation["root"] == "image"
    on = there.isolation["protections"]
    for name in ("own_root", "read_only_root", "trees_read_only", "own_devices", "proc", "seccomp"):
        assert on[name] == {"on": True, "verified": "run"}, name
    assert all(each["on"] for each in on.values())
    assert not (root / "workspace").exists() and not (root / "etc").exists()


async def test_its_environment_is_of_ours_and_names_no_place_of_the_host(backend: ProcessBackend, root: Path) -> None:
    report = await command(backend, root, "env", env={"OWN": "1"})
    told = dict(line.split("=", 1) for line in report.stdout.text.splitlines())
    assert set(told) - {"LC_CTYPE"} == {
        "HOME",
        "LANG",
        "LOGNAME",
        "NODE_OPTIONS",
        "OWN",
        "PATH",
        "TERM",
        "TMPDIR",
        "USER",
    }
    assert sys.base_prefix not in told["PATH"].replace("/usr/", "/")


def hostile_images(root: Path, canary: Path) -> dict[str, Callable[[], None]]:
    """What an image may bring where a box has something itself."""

    def link(target: str, *names: str) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target)

    written = [f"etc/{name}" for name in WRITTEN]

    def places(kind: Callable[[Path], object]) -> None:
        for name in ("etc", "dev", "proc", "workspace", "run", "home", "tmp"):
            kind(root / name)

    def full(path: Path) -> None:
        for name in ("passwd", "hosts", "null", "shm", "self", "input"):
            (path / name).mkdir(parents=True)

    def clashing() -> None:
        for name in ("t", "m", "ours", "image", "staging", "absent", ".", "workspace/tmp/x", "old\nroot", "\udcff"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def attributes() -> None:
        (root / "etc").mkdir()
        for name, value in (("opaque", b"y"), ("redirect", b"/usr"), ("metacopy", b"")):
            for space in ("trusted", "user") if os.geteuid() == 0 else ("user",):
                os.setxattr(root / "etc", f"{space}.overlay.{name}", value)

    return {
        "etc_leads_into_the_workspace": lambda: link("/workspace", "etc"),
        "etc_leads_up": lambda: link("../" * 12 + "etc", "etc"),
        "etc_leads_to_the_host": lambda: link(str(canary.parent), "etc"),
        "everything_leads_to_the_root": lambda: places(lambda path: path.symlink_to("/")),
        "everything_leads_to_itself": lambda: places(lambda path: path.symlink_to(path.name)),
        "everything_leads_to_the_host": lambda: places(lambda path: path.symlink_to(canary.parent)),
        "everything_leads_to_a_process": lambda: places(lambda path: path.symlink_to("/proc/self/root")),
        "everything_is_a_file": lambda: places(lambda path: path.write_text("root:x:0:0::/:/bin/sh")),
        "everything_is_a_pipe": lambda: places(os.mkfifo),
        "everything_is_full": lambda: places(full),
        "var_leads_into_the_workspace": lambda: link("/workspace", "var"),
        "files_of_etc_lead_to_the_host": lambda: link(str(canary), *written),
        "files_of_etc_lead_into_the_workspace": lambda: link("/workspace/x", *written),
        "devices_lead_elsewhere": lambda: link("/workspace/x", *(f"dev/{name}" for name in DEVICES)),
        "names_of_ours": clashing,
        "attributes_of_layers": attributes,
    }


@pytest.mark.parametrize("how", sorted(hostile_images(Path(), Path())))
async def test_whatever_an_image_brings_where_a_box_has_its_own_is_not_there(
    how: str, backend: ProcessBackend, changed: Path, canary: Path
) -> None:
    hostile_images(changed, canary)[how]()
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in canary.parent.rglob("*"))
    is_a_box_of_ours(await look(backend, changed, canary))
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in canary.parent.rglob("*")) == before


async def test_links_of_an_image_end_within_the_box(backend: ProcessBackend, changed: Path, canary: Path) -> None:
    (changed / "out").symlink_to(canary)
    (changed / "up").symlink_to("../" * 20 + str(canary).lstrip("/"))
    (changed / "through").symlink_to("/proc/1/root" + str(canary))
    (changed / "name").symlink_to("/etc/hostname")
    report = await command(backend, changed, "cat", "/name", "/out", "/up", "/through")
    assert report.stdout.text == "box\n"
    assert report.stderr.text.count("No such file") + report.stderr.text.count("Permission denied") == 3


async def test_a_hundred_thousand_entries_are_no_matter(backend: ProcessBackend, changed: Path, canary: Path) -> None:
    (changed / "many").mkdir()
    for number in range(100_000):
        os.mknod(changed / "many" / str(number)) if number % 10 else (changed / f"top{number}").mkdir()
    told = await look(backend, changed, canary)
    is_a_box_of_ours(told)
    report = await command(backend, changed, "sh", "-c", "ls / | cat; ls /many | cat")
    assert len(report.stdout.text.splitlines()) > 99_000


async def test_no_file_of_an_image_has_more_rights_than_the_box(backend: ProcessBackend, changed: Path) -> None:
    (changed / "usr/bin/idd").write_bytes((changed / "usr/bin/id").read_bytes())
    (changed / "usr/bin/idd").chmod(0o6755)
    if os.geteuid() == 0:
        os.mknod(changed / "mem", stat.S_IFCHR | 0o666, os.makedev(1, 1))
        os.mknod(changed / "usr/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    report = await command(backend, changed, "sh", "-c", "idd -u; cat /mem /usr/null; true")
    assert report.stdout.text == "1000\n"
    assert report.stderr.text.count("\n") == 2


CHANGE = """
import fcntl, json, mmap, os, struct
def tried(do):
    try:
        return repr(do())
    except OSError as exc:
        return exc.strerror
def again():
    held = os.open(path, os.O_PATH)
    return os.open(f"/proc/self/fd/{held}", os.O_WRONLY)
def mapped():
    with open(path, "rb") as file:
        mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
told = {}
for path in ("/usr/bin/python3", os.path.realpath("/bin/sh"), os.__file__):
    path = os.path.realpath(path)
    held = os.open(path, os.O_RDONLY)
    ways = [lambda: open(path, "r+b"), again, mapped, lambda: os.chmod(path, 0o777), lambda: os.fchmod(held, 0o777),
            lambda: os.utime(path), lambda: os.unlink(path), lambda: os.rename(path, path + "x"),
            lambda: os.link(path, path + "y"), lambda: os.link(path, "/workspace/y"), lambda: os.truncate(path, 0),
            lambda: os.setxattr(path, "user.x", b"y"), lambda: os.posix_fallocate(held, 0, 9),
            lambda: os.mkdir(path + "z"), lambda: fcntl.ioctl(held, 0x40086602, struct.pack("l", 16))]
    told[path] = [tried(way) for way in ways]
print(json.dumps(told))
"""


async def test_nothing_of_an_image_can_be_changed(backend: ProcessBackend, root: Path) -> None:
    def seen() -> list[tuple[object, ...]]:
        found = ((str(path), path.lstat()) for path in sorted(root.rglob("*")))
        return [(name, at.st_mode, at.st_size, at.st_nlink, at.st_mtime_ns, at.st_ctime_ns) for name, at in found]

    before = seen()
    report = await command(backend, root, "python3", "-c", CHANGE)
    told = json.loads(report.stdout.text)
    refused = {"Read-only file system", "Permission denied", "Operation not permitted", "Invalid cross-device link"}
    refused |= {"Bad file descriptor", "Inappropriate ioctl for device"}
    assert len(told) == 3 and {each for some in told.values() for each in some} <= refused, told
    assert seen() == before


async def test_what_the_kernel_makes_no_root_of_is_said(backend: ProcessBackend, root: Path) -> None:
    with pytest.raises(Unavailable, match="an image cannot be the root of a box here: the kernel makes no overlay"):
        await backend.open(StaySpec(root=Path("/proc")))


async def test_no_code_of_an_image_runs_before_its_program_is_started(backend: ProcessBackend, changed: Path) -> None:
    """Where our interpreter would look for its own library, an image may have another."""
    library = changed / sysconfig.get_path("stdlib").lstrip("/")
    (library / "encodings").mkdir(parents=True, exist_ok=True)
    for name in ("warnings", "os", "site", "sitecustomize", "encodings/__init__", "ringfence/__init__", "linecache"):
        (library / f"{name}.py").parent.mkdir(exist_ok=True)
        (library / f"{name}.py").unlink(missing_ok=True)
        (library / f"{name}.py").write_text("open('/workspace/ran', 'w')\nimport os; os.write(1, b'ran')\n")
    box = await backend.open(StaySpec(root=changed))
    for words in (("ls", "/workspace"), ("/usr/bin/ls", "/workspace"), ("missing",)):
        report = await (await box.command(Command(words), lambda *_: None)).over()
        assert report.stdout.text in ("", "input\noutput\ntmp\n")
    assert (report.exit_status, report.stderr.text) == (127, "missing: No such file or directory\n")
    await box.end()


async def test_mounts_are_seen_where_they_were_declared(backend: ProcessBackend, root: Path, tmp_path: Path) -> None:
    lent, shared = tmp_path / "lent", tmp_path / "shared folder"
    for folder in (lent, shared):
        folder.mkdir(mode=0o700)
        (folder / "note").write_text(folder.name)
    mounts = (
        *(Mount(str(lent), at) for at in ("/app/data/deep", "/opt", "/workspace/lent", "/home/a b")),
        Mount(str(lent / "note"), "/srv/one/note"),
        Mount(str(shared), "/home/shared", "rw"),
        Mount(str(lent), "/tmp"),
    )
    script = """cat /app/data/deep/note /opt/note /workspace/lent/note '/home/a b/note' /srv/one/note /tmp/note
    echo mine >/home/shared/new; cat /home/shared/note; for at in /opt /app /srv/one /tmp; do touch $at/x; done"""
    report = await command(backend, root, "sh", "-c", script, mounts=mounts)
    assert report.stdout.text == "lent" * 6 + "shared folder"
    assert report.stderr.text.count("Read-only file system") == 4
    assert (shared / "new").read_text() == "mine\n" and (shared / "new").stat().st_uid == os.geteuid()
    assert not (root / "app").exists() and not (root / "opt").exists()


async def test_a_mount_behind_a_link_of_the_image_is_refused(backend: ProcessBackend, changed: Path) -> None:
    (changed / "data").symlink_to("/workspace")
    for at in ("/data", "/data/deep"):
        with pytest.raises(ValueError, match="/data is a link to '/workspace'"):
            await backend.open(StaySpec(root=changed, mounts=(Mount(str(changed / "usr"), at),)))


async def test_there_is_no_interpreter_of_ours(backend: ProcessBackend, root: Path) -> None:
    box = await backend.open(StaySpec(root=root))
    with pytest.raises(Unavailable, match="no interpreter of ours"):
        await box.interpreter()
    with pytest.raises(Unavailable, match="no interpreter of ours"):
        await box.command(Command((), source=b"print(1)"), lambda *_: None)
    await box.end()


async def test_a_box_for_one_command_can_have_one_too(backend: ProcessBackend, root: Path) -> None:
    report = await backend.run(BoxSpec(Program("command", argv=("python3", "-c", "print(1 + 1)")), root=root))
    assert (report.stdout.text, report.isolation["root"]) == ("2\n", "image")
    assert report.isolation["protections"]["own_root"]["verified"] == "run"
    plain = await backend.run(BoxSpec(Program("command", argv=("ls", "/usr/share"))))
    assert "root" not in plain.isolation and plain.stdout.total


async def test_whom_to_trust_is_told_in_a_place_of_ours(backend: ProcessBackend, changed: Path) -> None:
    (changed / "run").symlink_to("/workspace")
    rule = NetworkRule("api", ("api.example",), terminate=True)
    serve = ProxyServer(Names(api_example=["127.0.0.1"]), NOBODY).by((rule,))
    box = await backend.open(StaySpec(root=changed), serve)
    try:
        script = 'cat "$SSL_CERT_FILE"; touch /run/x /run/ringfence/x; ls /workspace; echo $http_proxy'
        report = await (await box.command(Command(("sh", "-c", script)), lambda *_: None)).over()
    finally:
        await box.end()
    assert "BEGIN CERTIFICATE" in report.stdout.text
    assert report.stdout.text.endswith("\nhttp://127.0.0.1:3128\n")
    assert report.stderr.text.count("Read-only file system") == 2
