"""What the harness sets up on the host for one case: canaries, listeners, a victim. All of it is its own.

A prop knows afterwards whether anything reached it, which is better evidence than what a program says.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from ringfence.core.box import Mount
from ringfence.core.model import Json
from ringfence.doctor.fake_internet import Answers, FakeInternet

CONTROL_ID = 1_900_000_017
"""Who a control is on the host when the harness is root: an id of no user, in no range that others hand out."""
MARK = "rf-canary-"
"""Every secret of the harness begins so."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_IPC_CREAT = 0o1000
_IPC_EXCL = 0o2000
_IPC_RMID = 0
_OPEN_TO_ALL = 0o666
PROJECT = "/srv/project"
"""Where a box sees the folder that it may write to."""
_KEPT = (
    *(".git/hooks/pre-commit", ".git/config", ".envrc", ".vscode/tasks.json", ".mcp.json"),
    *("scripts/post-merge", "conf/idea/workspace.xml"),
)
"""What programs of the host go by there."""
_KEPT_ELSEWHERE = ("store/hooks/pre-commit", "store/config")
"""The same, where the project's repository lies in a folder of its own."""
_LINKS = {".git/hooks/post-merge": "../../scripts/post-merge", ".idea": "conf/idea"}


def secret() -> str:
    return MARK + secrets.token_hex(12)


class Props:
    """The props of one trial. Close it when the trial was judged."""

    def __init__(self, folder: Path, wanted: tuple[str, ...]) -> None:
        self.secret = secret()
        self.folder = folder
        self.given: Json = {"harness": os.getpid()}
        """What the harness gives the program."""
        self.trees: tuple[Path, ...] = ()
        self.mounts: tuple[Mount, ...] = ()
        self.output: Path | None = None
        self.outside: FakeInternet | None = None
        self._listeners: dict[str, socket.socket] = {}
        self._victim: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        self._canary("canary")
        makers: dict[str, Callable[[], None]] = {
            "tree": self._tree,
            "code": self._code,
            "project": self._project,
            "worktree": self._worktree,
            "output": self._output,
            "tcp": self._tcp,
            "udp": self._udp,
            "unix": self._unix,
            "abstract": self._abstract,
            "victim": self._start_victim,
            "shm": self._shm,
            "sem": self._sem,
            "msg": self._msg,
            "mq": self._mq,
        }
        try:
            for name in wanted:
                makers[name]()
        except BaseException:
            self.close()
            raise
        self._before = self._look()

    def close(self) -> None:
        self._stack.close()

    def play(self, answers: Answers, pace: float = 1.0) -> FakeInternet:
        """All that lies outside of a box with a network."""
        self.outside = FakeInternet(answers, pace)
        self._stack.callback(self.outside.close)
        return self.outside

    # ── What was seen of them ──

    def changes(self) -> str | None:
        """What is different on the host now from what it was."""
        now = self._look()
        for path in sorted(set(self._before) | set(now)):
            if self._before.get(path) != now.get(path):
                return (
                    f"{path} on the host was {'changed' if path in self._before and path in now else 'made or removed'}"
                )
        return None

    def reached(self, name: str) -> bool:
        """Did anything come in at this listener?"""
        listener = self._listeners[name]
        try:
            if listener.type == socket.SOCK_DGRAM:
                listener.recv(4096)
            else:
                listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def namespace(self, name: str) -> str:
        """The harness's own."""
        return os.readlink(f"/proc/self/ns/{name}")

    def victim_lives(self) -> bool:
        return self._victim is not None and self._victim.poll() is None

    def collected(self) -> dict[str, bytes]:
        """What lies in the output folder on the host; what a link there leads to was not collected."""
        assert self.output is not None
        found = {}
        for path in sorted(self.output.rglob("*")):
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(self.output))] = path.read_bytes()
        return found

    def _look(self) -> dict[str, tuple[object, ...]]:
        """Every file of ours that must not change, with all that can be changed of it."""
        found: dict[str, tuple[object, ...]] = {}
        for top in ("canary", "tree", *(f"project/{name}" for name in (*_KEPT, *_KEPT_ELSEWHERE))):
            for path in [self.folder / top, *sorted((self.folder / top).rglob("*"))]:
                if not os.path.lexists(path):
                    continue
                info = path.lstat()
                content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
                names = os.listxattr(path, follow_symlinks=False)
                found[str(path.relative_to(self.folder))] = (
                    content,
                    info.st_mode,
                    info.st_uid,
                    info.st_nlink,
                    info.st_mtime_ns,
                    tuple(names),
                )
        return found

    # ── Making them ──

    def _canary(self, name: str) -> None:
        """A folder and files that any user may write: only the box protects them."""
        folder = self.folder / name
        (folder / "home" / ".ssh").mkdir(parents=True)
        (folder / "home" / ".aws").mkdir()
        for file in ("canary.txt", "tool", "home/.ssh/id_ed25519", "home/.aws/credentials"):
            (folder / file).write_text(self.secret)
        _open_to_all(folder)
        self.given |= {name: str(folder / "canary.txt"), f"{name}_folder": str(folder), "home": str(folder / "home")}

    def _tree(self) -> None:
        self._canary("tree")
        self.trees = (self.folder / "tree",)

    def _code(self) -> None:
        """A tree with programs as packages have them: some may not be executed, and some are named like libraries."""
        folder = self.folder / "code"
        (folder / "lib").mkdir(parents=True)
        program = shutil.which("id", path="/usr/bin:/bin") or "/bin/sh"
        for name in ("id", "lib/id", "id.so.1"):
            shutil.copyfile(program, folder / name)
        _open_to_all(folder)
        (folder / "id").chmod(0o755)
        self.given["code"] = str(folder)
        self.trees = (folder,)

    def _project(self) -> None:
        """A folder that a box may write to, with what it may not."""
        self._lent(_KEPT, _LINKS)

    def _worktree(self) -> None:
        """The same, with a file that says where the repository is."""
        folder = self.folder / "project"
        folder.mkdir()
        (folder / ".git").write_text("gitdir: store\n")
        self._lent(_KEPT_ELSEWHERE, {})

    def _lent(self, names: tuple[str, ...], links: Mapping[str, str]) -> None:
        folder = self.folder / "project"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(self.secret)
        for name, target in links.items():
            (folder / name).symlink_to(target)
        _open_to_all(folder)
        self.given["project"] = str(folder)
        self.mounts = (Mount(str(folder), PROJECT, "rw"),)

    def _output(self) -> None:
        self.output = self.folder / "out"
        self.output.mkdir()
        _open_to_all(self.output)

    def plant(self, name: str) -> None:
        """Something that an earlier run could have left in the output folder: a link out of it."""
        assert self.output is not None
        target = self.folder / "canary"
        (self.output / name).symlink_to(target if name.endswith("/") else target / "canary.txt")

    def _listen(self, name: str, family: int, kind: int, address: object) -> socket.socket:
        listener = self._stack.enter_context(socket.socket(family, kind))
        listener.setblocking(False)
        listener.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            listener.listen(16)
        self._listeners[name] = listener
        return listener

    def _tcp(self) -> None:
        listener = self._listen("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.given["port"] = listener.getsockname()[1]
        with suppress(OSError):
            self._listen("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", self.given["port"]))

    def _udp(self) -> None:
        self.given["udp"] = self._listen("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)).getsockname()[1]

    def _unix(self) -> None:
        path = self.folder / "canary" / "agent.sock"
        self._listen("unix", socket.AF_UNIX, socket.SOCK_STREAM, str(path))
        path.chmod(_OPEN_TO_ALL)
        self.given["socket"] = str(path)

    def _abstract(self) -> None:
        name = f"ringfence-{secrets.token_hex(8)}"
        self._listen("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}")
        self.given["abstract"] = name

    def _start_victim(self) -> None:
        """A process that any program with the control's id could end or read."""
        user, groups = (CONTROL_ID, ()) if os.geteuid() == 0 else (None, None)
        self._victim = subprocess.Popen(
            ["/bin/sleep", "3600"],
            env={"SECRET": self.secret},
            cwd="/",
            stdin=subprocess.DEVNULL,
            user=user,
            group=user,
            extra_groups=groups,
        )
        self._stack.callback(self._victim.wait)
        self._stack.callback(self._victim.send_signal, signal.SIGKILL)
        self.given["victim"] = self._victim.pid

    def _shm(self) -> None:
        key = _key()
        segment = _checked(_libc.shmget(key, 4096, _IPC_CREAT | _IPC_EXCL | _OPEN_TO_ALL))
        self._stack.callback(_libc.shmctl, segment, _IPC_RMID, None)
        address = ctypes.c_void_p(_libc.shmat(segment, None, 0))
        ctypes.memmove(address, self.secret.encode(), len(self.secret))
        _libc.shmdt(address)
        self.given["key"] = key

    def _sem(self) -> None:
        self.given["key"] = _key()
        group = _checked(_libc.semget(self.given["key"], 1, _IPC_CREAT | _IPC_EXCL | _OPEN_TO_ALL))
        self._stack.callback(_libc.semctl, group, 0, _IPC_RMID)

    def _msg(self) -> None:
        self.given["key"] = _key()
        queue = _checked(_libc.msgget(self.given["key"], _IPC_CREAT | _IPC_EXCL | _OPEN_TO_ALL))
        self._stack.callback(_libc.msgctl, queue, _IPC_RMID, None)

    def _mq(self) -> None:
        name = f"ringfence-{secrets.token_hex(8)}"
        posix = ctypes.CDLL("librt.so.1", use_errno=True)
        queue = _checked(posix.mq_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL | os.O_RDWR, _OPEN_TO_ALL, None))
        os.fchmod(queue, _OPEN_TO_ALL)
        self._stack.callback(posix.mq_unlink, f"/{name}".encode())
        self._stack.callback(os.close, queue)
        self.given["queue"] = name


def _open_to_all(folder: Path) -> None:
    """Any user may write here; where the harness is root, the control owns it."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() or path.name == "tool" else _OPEN_TO_ALL)
        if os.geteuid() == 0:
            os.chown(path, CONTROL_ID, CONTROL_ID, follow_symlinks=False)


def _key() -> int:
    return secrets.randbits(30) | 1


def _checked(result: int) -> int:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
