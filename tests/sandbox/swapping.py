"""A process that swaps two names as fast as it can, while a test uses one of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def swapping(first: Path, second: Path) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(first), str(second)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"x"
            yield
            assert process.poll() is None, "the names were swapped to the end"
        finally:
            process.kill()


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here, first, second = -100, sys.argv[1].encode(), sys.argv[2].encode()
    os.write(1, b"x")
    while True:
        # Either may be gone for a moment, when the test removes or replaces it.
        libc.renameat2(here, first, here, second, 2)


if __name__ == "__main__":
    main()
