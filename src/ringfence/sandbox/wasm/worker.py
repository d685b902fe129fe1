"""The worker: a process in a box of its own that runs one program in WebAssembly, and may die of it. It is sent into
the box as source, and made ready there before any program comes.

What kills the interpreter in WebAssembly kills this process alone: deep nesting, say, for which the runtime has no
limit that it survives. Its exit status is that of the program.
"""

from __future__ import annotations

import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "ringfence_wasm"
"""Where the program that is the order finds it."""
INPUT = "/workspace/tmp/.input"
STATUS = "/workspace/tmp/.status"
"""As in `inside`."""
FOLDERS = (
    ("/workspace", "/workspace", False),
    ("/workspace/tmp", "/tmp", False),  # noqa: S108 - as it is called in a box
    ("/workspace/tmp", "/home/user", False),
    ("/workspace/input", "/workspace/input", True),
)
"""Of the box, where the program sees each, and whether it can only read it."""
_SETTINGS = {
    # Address space of a terabyte for a thousand sandboxes, where there is one.
    "ERYX_ALLOCATOR": "on-demand",
    "ERYX_WARM_INSTANCES": "0",
    # What it says of a program that left is long, and takes long to make.
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}
_EXITED = "Exited with i32 exit status"
_PART = 65536
_LENGTH = 4


class Worker:
    def __init__(self, place: str, cache: str, inside: str) -> None:
        """`place`: where the runtime's package lies; `cache`: what it unpacked; `inside`: source that runs in it."""
        os.environ.update(_SETTINGS, TMPDIR=cache)
        sys.path.append(place)
        import eryx  # noqa: PLC0415 - it is in this box alone

        self._eryx: Any = eryx
        self._inside = inside
        self._folders: tuple[tuple[str, str, bool], ...] = FOLDERS
        self._session = self._begin()

    def _begin(self) -> Any:
        folders = [each for each in self._folders if os.path.isdir(each[0])]
        session = self._eryx.Session(volumes=folders)
        session.execute(self._inside)
        return session

    def run(self, order: dict[str, Any]) -> None:
        """Run the program of an order, and end with its status."""
        if order["folders"]:
            self._folders = (*FOLDERS, *order["folders"])
            self._session = self._begin()
        order["folders"] = [(at, read_only) for _, at, read_only in FOLDERS]
        if os.fstat(0).st_rdev != os.stat("/dev/null").st_rdev:
            order["input"] = True
            self._take_input()
        try:
            status = self._session.execute(f"result = run({order!r})").result
        except self._eryx.EryxError as exc:
            if _EXITED not in str(exc):
                self._crash(str(exc))
            status = self._left_with()
        os._exit(status)

    def _left_with(self) -> int:
        """The exit status of a program that left without an end."""
        try:
            with open(STATUS, encoding="ascii") as file:
                return int(file.read(4)) & 0xFF
        except (OSError, ValueError):
            return 1

    def _crash(self, why: str) -> None:
        """End as an interpreter does that crashed."""
        lines = [line for line in why.splitlines() if line.strip()]
        os.write(2, f"the interpreter in WebAssembly crashed: {lines[-1] if lines else '?'}\n".encode())
        os.abort()

    def _take_input(self) -> None:
        """Pass on standard input through a file, which is all that the runtime can read."""
        file = os.open(INPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        threading.Thread(target=_pass_on, args=(file,), daemon=True).start()


def _pass_on(file: int) -> None:
    try:
        while True:
            part = os.read(0, _PART)
            data = len(part).to_bytes(_LENGTH, "big") + part
            while data:
                data = data[os.write(file, data) :]
            if not part:
                return
    except OSError as exc:
        os.write(2, f"standard input cannot be passed on: {exc.strerror}\n".encode())
        os._exit(1)
