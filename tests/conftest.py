"""What every test gets: asyncio, a home of its own, and the fixture servers."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import coverage
import pytest
from hypothesis import HealthCheck, settings

from tests import tooling

# The workers measure themselves: what they start is left alone, since measuring it takes longer than testing it.
_measured = coverage.Coverage() if "PYTEST_XDIST_WORKER" in os.environ and "COVERED" in os.environ else None
if _measured is not None:
    _measured.start()

# A loaded machine is no defect: examples have no deadline, and are never too slow to make. They are the same in every
# run, so that a change is judged by itself; `make thorough` has more, and others each time.
settings.register_profile(
    "ringfence",
    deadline=None,
    print_blob=True,
    max_examples=30,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("ringfence"), max_examples=1000, derandomize=False)
settings.load_profile("ringfence")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So it is in the background of a shell without job control; what we start would never see an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_LONGEST = (
    "docs/test_servers.py",
    "doctor/test_placement.py",
    "durability/test_kill.py",
    "compose/test_packages.py",
    "doctor/test_kept.py",
    "cli/init/test_images.py",
    "mcp/test_conformance.py",
    "durability/test_faults.py",
    "doctor/test_inimage.py",
    "suites/test_suites.py",
    "test_othersystem.py",
    "durability/test_race.py",
    "durability/test_restart.py",
    "docs/test_platform.py",
    "packages/test_images.py",
    "packages/test_real_images.py",
)
"""Files of tests that take half a minute and more. Those that wait for what they fetch stand between those that
compute: several of the latter at once would take each other's time, and cases of the doctor would be tried again."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: at the end, one of them would keep one worker busy and the others idle."""
    order = {tooling.ROOT / "tests" / name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """The tests themselves stay to the end: the collector need not look at half a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    if _measured is not None:
        _measured.stop()
        _measured.save()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home, so that no test reads or writes what belongs to the person who runs it."""
    path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        for name in list(os.environ):
            if name.startswith(("XDG_", "RINGFENCE_")):
                patch.delenv(name)
        yield path


@pytest.fixture(scope="session", autouse=True)
def no_keeper_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A keeper stays as long as it has sessions; those that tests left open are nobody's any more."""
    yield
    folder = os.fsencode(tmp_path_factory.getbasetemp())
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(b"ringfence.compose.keeper" in word for word in words) and any(
                word.startswith(folder) for word in words
            ):
                os.kill(int(process.name), signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_open() -> Iterator[None]:
    """What a file of tests forgot to close is told there, and not wherever the collector happens to run."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def everything_url() -> Iterator[str]:
    """The endpoint of the everything server, which speaks both protocol eras."""
    with tooling.serve_fixture("everything_server.py") as url:
        yield url


@pytest.fixture(scope="module")
def echo_url() -> Iterator[str]:
    """The endpoint of the echo server."""
    with tooling.serve_fixture("echo_server.py") as url:
        yield url


@pytest.fixture(scope="session")
def hostile_command() -> list[str]:
    """The command of the stdio server that misbehaves on demand."""
    return tooling.fixture_command("hostile_server.py")
