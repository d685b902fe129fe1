"""What a supervisor happens to carry and a box must not get: a secret in its environment, open files, an odd umask.

On for as long as the suite runs. A backend that keeps boxes ready must be made after this, or it inherits nothing.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from ringfence.doctor.props import CONTROL_ID, Props, secret
from ringfence.sandbox.process import mounting

VARIABLE = "DOCTOR_CANARY_TOKEN"
UMASK = 0o032
"""Unusual, and no looser than others."""
GROUP = CONTROL_ID + 1
GO_FIRST = 25
IGNORED = signal.SIGUSR2
_OPEN_PLACES = (Path("/var/lib"), Path("/srv"), Path("/opt"))
"""A folder that every user may pass through, and whose file system is often another than that of /run and /tmp."""
BLOCKED = signal.SIGRTMIN + 5


class Stage:
    """Sets this process up, and leaves it as it was."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = Path()
        self.secret = secret()

    def __enter__(self) -> Stage:
        with ExitStack() as stack:
            self._folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="ringfence-doctor-", dir=_place())))
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder.chmod(0o755)
            stack.callback(os.umask, os.umask(UMASK))
            os.environ[VARIABLE] = self.secret
            stack.callback(os.environ.pop, VARIABLE, None)
            self._open_files(stack)
            self._signals(stack)
            if os.geteuid() == 0:
                stack.callback(os.setgroups, os.getgroups())
                os.setgroups([*os.getgroups(), GROUP])
                self._may_go_first(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def props(self, wanted: tuple[str, ...]) -> Props:
        return Props(Path(tempfile.mkdtemp(dir=self._folder)), wanted)

    def _open_files(self, stack: ExitStack) -> None:
        """A file and a folder that every started process inherits, unless it closes them."""
        kept = self._folder / "inherited"
        kept.write_text(self.secret)
        kept.chmod(0o644)
        for path, flags in ((kept, os.O_RDONLY), (self._folder, os.O_RDONLY | os.O_DIRECTORY)):
            descriptor = os.open(path, flags)
            os.set_inheritable(descriptor, True)
            stack.callback(os.close, descriptor)

    def _may_go_first(self, stack: ExitStack) -> None:
        """The right to run before others, which is inherited like any limit."""
        for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
            before = resource.getrlimit(kind)
            # Where even root may not raise it, there is nothing to inherit.
            with suppress(OSError, ValueError):
                resource.setrlimit(kind, (GO_FIRST, GO_FIRST))
                stack.callback(resource.setrlimit, kind, before)

    def _signals(self, stack: ExitStack) -> None:
        if threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, IGNORED, signal.signal(IGNORED, signal.SIG_IGN))
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, [BLOCKED]))


def _place() -> Path | None:
    """Where a canary is out of the way: below /tmp a box has a folder of its own, so nothing can be lent there.

    As root, where it can be lent for writing, too, if there is such a place: not every file system lets a mount of it
    have other owners.
    """
    user = os.geteuid()
    mine = lendable(Path("/run")) if user == 0 else [Path(f"/run/user/{user}"), Path.home(), *_registered_home(user)]
    taken = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))  # noqa: S108
    fit = [path for path in mine if os.access(path, os.W_OK) and not any(path.is_relative_to(other) for other in taken)]
    return fit[0] if fit else None


def lendable(first: Path) -> list[Path]:
    """As root: this place, if what is there can be lent for writing; before it, if not, others where that is so."""
    places = [path for path in (first, *_OPEN_PLACES) if os.access(path, os.W_OK)]
    return sorted(places, key=lambda path: not mounting.maps_ids(path))


def _registered_home(user: int) -> list[Path]:
    """Where the variable HOME leads below /tmp, there may still be the one of the account."""
    try:
        return [Path(pwd.getpwuid(user).pw_dir)]
    except KeyError:
        return []
