"""What a zygote does once, before there is a box: loads what boxes are to have, and becomes what they inherit."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import struct

from ringfence.sandbox.process import kernel, template, worker
from ringfence.sandbox.process.confine import INSIDE_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from ringfence.sandbox.process.native import First


def load_image() -> ModuleType:
    """As long as our own files can be seen, and with what starts a program there; other boxes would only carry it."""
    import warnings  # noqa: F401, PLC0415 - `os` wants it to look for a program

    from ringfence.sandbox.process import image  # noqa: PLC0415 - likewise

    return image


def take_ids(lender: First | None) -> str:
    """Be root of our own user namespace, where ids were mapped, and nobody outside of it.

    `lender`: where an ordinary user's boxes have them, tries what boxes then do, so that their files are that user's.
    Returns why it cannot be.
    """
    try:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if lender is not None:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            _try_lending(lender)
    except OSError as exc:
        return f"ids were mapped, and are of no use: {exc.strerror}"
    return ""


def _try_lending(first: First) -> None:
    """A tmpfs that shows the files of one id as another's."""
    pid = first.start(kernel.NEWUSER)
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                file.write(f"{INSIDE_ID} 1 1")
        space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        kernel.mount("lent", template.BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
        copy = kernel.call("open_tree", -100, template.BASE.encode(), 1 | os.O_CLOEXEC)  # OPEN_TREE_CLONE
        wanted = struct.pack("QQQQ", kernel.ATTR_IDMAP, 0, 0, space)
        kernel.call("mount_setattr", copy, b"", 0x1000, wanted, len(wanted))  # AT_EMPTY_PATH
        kernel.call("umount2", template.BASE.encode(), kernel.MNT_DETACH)
        worker.close([copy, space])
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def preload(name: str) -> None:
    with template.Inside():
        try:
            __import__(name)
        except ImportError:
            return


def set_up(source: str) -> None:
    """The operator's own code, of a template: what it makes, every session of the template begins with."""
    with template.Inside():
        exec(compile(source, "<template>", "exec", dont_inherit=True), worker.names)  # noqa: S102 - the operator's
    worker.names.pop("__builtins__", None)


def one_thread() -> None:
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise SystemExit(f"the zygote has {tasks} threads; what was preloaded started them")


def forget_signals() -> None:
    """Whatever the supervisor ignored or blocked; what the interpreter itself handles stays as it is."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
