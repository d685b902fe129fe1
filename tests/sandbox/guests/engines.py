"""A Docker engine of a test's own: dockerd with its own data, its own socket and no network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ringfence.sandbox.guests.docker_api import DockerApi, DockerGone, DockerRefused

_DRIVERS = ("overlay2", "vfs")
_TRIES = 600


class Dockerd:
    """One that runs."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def api(self) -> DockerApi:
        api = DockerApi(self.address)
        api.speak("1.41")
        return api

    def kill(self) -> None:
        """With all that it runs, as if the machine had lost it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def dockerd(folder: Path, *more: str) -> Iterator[Dockerd | str]:
    """Why there is none, if there is none."""
    program = shutil.which("dockerd", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        yield "dockerd is not installed: apt install docker.io"
        return
    if os.geteuid() != 0:
        yield "a dockerd of one's own needs root"
        return
    said = ""
    for driver in _DRIVERS:
        own = folder / driver
        own.mkdir()
        words = [program, "--storage-driver", driver, "--iptables=false", "--ip6tables=false", "--bridge=none", *more]
        words += ["--data-root", f"{own}/data", "--exec-root", f"{own}/exec", "--pidfile", f"{own}/pid"]
        words += ["--config-file", f"{own}/none.json", "-H", f"unix://{own}/docker.sock"]
        (own / "none.json").write_text("{}")
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        running = Dockerd(process, f"unix://{own}/docker.sock")
        with ThreadPoolExecutor(1) as apart:  # whoever asks may have a loop that runs
            answers = apart.submit(_answering, running)
        if answers.result():
            try:
                yield running
            finally:
                process.terminate()
                process.wait()
                _clear(own)
            return
        process.kill()
        process.wait()
        _clear(own)
        said = (own / "log").read_text(errors="replace").strip().rpartition("\n")[2]
    yield f"dockerd does not start: {said}"


def _clear(folder: Path) -> None:
    """What an engine that was killed has left: what watches its containers, and mounts."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes()
            if b"containerd-shim" in words.partition(b"\0")[0] and f"{folder}/".encode() in words:
                os.kill(int(each.parent.name), signal.SIGKILL)
    with open("/proc/self/mountinfo") as mounts:
        places = [line.split(" ")[4] for line in mounts]
    for place in reversed(places):
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)


def _answering(engine: Dockerd) -> bool:
    return asyncio.run(_answers(engine))


async def _answers(engine: Dockerd) -> bool:
    for _ in range(_TRIES):
        with contextlib.suppress(DockerGone, DockerRefused):
            await engine.api.ask("GET", "/version")
            return True
        if engine.process.poll() is not None:
            return False
        await asyncio.sleep(0.1)
    return False
