"""What a zygote does once, before there is a box: loads what boxes are to have, and becomes what they inherit."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os

from ringfence.sandbox.process import template, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


def load_image() -> ModuleType:
    """As long as our own files can be seen, and with what starts a program there; other boxes would only carry it."""
    import warnings  # noqa: F401, PLC0415 - `os` wants it to look for a program

    from ringfence.sandbox.process import image  # noqa: PLC0415 - likewise

    return image


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
