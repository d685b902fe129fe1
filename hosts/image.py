"""The disks of a guest: a root with the distribution's packages, and an environment with what Ringfence needs."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from hosts.guests import GUESTS, Guest
from hosts.mirror import mirror
from hosts.places import CACHE, Trouble, digest, fresh, make_ext4, run, say, size_of

# What every root has, beside what the release holds essential.
_PACKAGES = (
    "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,udev,kmod,uidmap,procps,iproute2,strace,"
    "python3,python3-venv,ca-certificates,git"
)
# Container tools come where a guest asks for them: they are half of an image.
_CONTAINERS = "podman,crun,fuse-overlayfs,slirp4netns,catatonit,nftables,netavark,aardvark-dns"
_MEGABYTES = 4096
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# The Python of each release, and what its wheels are called.
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
_WHEELS = {"amd64": "x86_64", "arm64": "aarch64"}


def native(machine: str) -> bool:
    return _MACHINES.get(os.uname().machine) == machine


def root_image(guest: Guest, finish: Callable[[Path], None]) -> Path:
    """A root file system, made at its first use. What only the machine itself can do is left to `finish`."""
    release, machine = guest.release, guest.machine
    alike = [other for other in GUESTS if (other.release, other.machine) == (release, machine)]
    packages = f"{_PACKAGES},{_CONTAINERS}" if any(other.container for other in alike) else _PACKAGES
    image = CACHE / "images" / f"{release}-{machine}-{digest(packages, _MEGABYTES, 1)}.ext4"
    if image.exists():
        return image
    if os.geteuid() != 0:
        raise Trouble("a guest's root is made as root, since its files belong to many users: sudo make hosts")
    image.parent.mkdir(parents=True, exist_ok=True)
    tree = CACHE / "images" / f"{release}-{machine}.tree"
    foreign = [] if native(machine) else ["--foreign"]
    log, unpacked = image.with_suffix(".log"), image.with_suffix(".unpacked")
    if not unpacked.exists():
        fresh(tree)
        say(f"making a root of {release} for {machine} (a few minutes; where the machine is emulated, more)")
        options = ["--variant=minbase", f"--arch={machine}", f"--include={packages}", *foreign]
        run(["debootstrap", *options, release, tree, mirror(), "/usr/share/debootstrap/scripts/sid"], log=log)
        # In a container debootstrap leaves a link there, to what its own host has mounted.
        if (tree / "proc").is_symlink():
            (tree / "proc").unlink()
            (tree / "proc").mkdir()
        # The image is thrown away where the power fails, and an emulated machine has no time to lose.
        (tree / "etc" / "dpkg" / "dpkg.cfg.d").mkdir(parents=True, exist_ok=True)
        (tree / "etc" / "dpkg" / "dpkg.cfg.d" / "unsafe-io").write_text("force-unsafe-io\n")
        if foreign:
            _keep_what_was_fetched(tree)
        unpacked.touch()
    settle = Path(__file__).parent / "inside" / "settle.sh"
    shutil.copy(settle, tree / "settle.sh")
    (tree / "settle.sh").chmod(0o755)
    whole = image.with_suffix(".whole")
    if foreign and not _runs_here(tree):
        say("programs of that machine do not run here, so a guest finishes its root, which takes an hour; with")
        say("qemu-user-static registered for them (binfmt_misc) it would take minutes")
        make_ext4(whole, tree, _MEGABYTES)
        finish(whole)
    else:
        # From here on the tree changes: an installation that is broken off starts anew. In a mount namespace of its
        # own: what is mounted on the way goes with it, however it ends.
        unpacked.unlink()
        run(["unshare", "--mount", "chroot", tree, "/settle.sh"], log=log)
        make_ext4(whole, tree, _MEGABYTES)
    whole.rename(image)
    run(["rm", "-rf", "--one-file-system", tree])
    unpacked.unlink(missing_ok=True)
    return image


def _keep_what_was_fetched(tree: Path) -> None:
    """Cut the release's list of packages to those that are to be installed.

    The second half of the installation reads the whole list anew for each step. A foreign machine, emulated, takes
    a minute for every reading of all 60,000 packages.
    """
    fetched = {archive.name.partition("_")[0] for archive in (tree / "var/cache/apt/archives").glob("*.deb")}
    for packages in (tree / "var/lib/apt/lists").glob("*_Packages"):
        stanzas = packages.read_text().split("\n\n")
        kept = [each for each in stanzas if each.partition("\n")[0].removeprefix("Package: ") in fetched]
        packages.write_text("".join(f"{each}\n\n" for each in kept))


def _runs_here(tree: Path) -> bool:
    """Whether this host runs the programs of that root, its own or by an emulator that the kernel knows of."""
    command = ["chroot", str(tree), "/usr/bin/true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine: the program itself, not a version manager's shim."""
    for place in [
        *map(Path, os.environ.get("PATH", "").split(":")),
        *Path.home().glob(f".pyenv/versions/{version}*/bin"),
    ]:
        candidate = place / f"python{version}"
        if candidate.is_file() and "shims" not in place.parts:
            return str(candidate)
    return None


def python_disk(release: str, machine: str, source: Path) -> Path:
    """A virtual environment for a guest, with the dependencies of a checkout, and the checkout by reference."""
    version = PYTHONS[release]
    wanted = tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"]
    constraints = source / "constraints.txt"
    key = digest(version, machine, wanted, constraints.read_text(), 1)
    image = CACHE / "images" / f"python{version}-{machine}-{key}.ext4"
    if image.exists():
        return image
    image.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching what Ringfence needs on Python {version} for {machine}")
    tree = fresh(CACHE / "images" / f"python{version}-{machine}.tree")
    packages = tree / "lib" / f"python{version}" / "site-packages"
    platforms = [f"--platform=manylinux_2_{minor}_{_WHEELS[machine]}" for minor in (36, 34, 31, 28, 27, 26, 17)]
    platforms.append(f"--platform=manylinux2014_{_WHEELS[machine]}")
    where: list[str | Path] = ["--target", packages, "--constraint", constraints]
    tags = ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *platforms]
    run([_python_with_pip(version), "-m", "pip", "install", "--quiet", *where, *tags, *wanted])
    shutil.rmtree(packages / "bin", ignore_errors=True)
    (packages / "ringfence-source.pth").write_text("/opt/project/src\n")
    _programs(tree, version)
    compile_all(packages, version)
    make_ext4(image, tree, size_of(tree) * 5 // 4 + 64)
    shutil.rmtree(tree)
    return image


def _python_with_pip(version: str) -> str:
    """Best one of the same version, which decides on what packages ask for under conditions."""
    for python in filter(None, (interpreter(version), sys.executable)):
        if subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0:
            return python
    raise Trouble("pip is not installed here: run scripts/setup, and start this with .venv/bin/python")


def _programs(tree: Path, version: str) -> None:
    (tree / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    (tree / "bin").mkdir()
    for name, target in (("python3", "/usr/bin/python3"), ("python", "python3"), (f"python{version}", "python3")):
        (tree / "bin" / name).symlink_to(target)
    program = tree / "bin" / "ringfence"
    program.write_text(
        "#!/opt/ringfence/bin/python3\nimport sys\nfrom ringfence.cli.main import main\nsys.exit(main())\n"
    )
    program.chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)


def compile_all(folder: Path, version: str) -> bool:
    """Compile modules here, where a Python of the guest's version is at hand: an emulated one takes minutes."""
    python = interpreter(version)
    if python is None:
        return False
    # By content, since an archive does not keep times as exactly as a file system.
    run([python, "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", "-j0", folder])
    return True
