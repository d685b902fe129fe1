"""Modules that are entered when they are imported, and executed when they are used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from ringfence.core import deferred

ENTERED = """
import sys, types
from ringfence.core import deferred
def waiting():
    return sorted(n for n in deferred.DEFERRED if n in sys.modules and type(sys.modules[n]) is not types.ModuleType)
deferred.enable()
with deferred.loading():
    import asyncio, inspect, ssl
assert {"asyncio.sslproto", "inspect", "ssl"} <= set(waiting()), waiting()
"""
USES = {
    "a name of it": "ssl.SSLContext; assert 'ssl' not in waiting() and 'inspect' in waiting()",
    "from": "from inspect import signature; assert signature(print) and 'inspect' not in waiting()",
    "a name that it lacks": "assert not hasattr(inspect, 'nothing') and 'inspect' not in waiting()",
    "another import alone": "import inspect, ssl, asyncio; assert 'inspect' in waiting() and 'ssl' in waiting()",
    "all of its names": "assert 'SSLContext' in deferred.names(ssl) and 'ssl' not in waiting()",
    "a loop": "asyncio.run(asyncio.sleep(0)); assert 'ssl' in waiting()",
    "reloaded": "import importlib; importlib.reload(inspect); assert inspect.signature(print)",
    "its loader": "ssl.SSLContext; assert ssl.__loader__ is ssl.__spec__.loader and ssl.__loader__.get_source('ssl')",
    "many threads": """
import threading
sys.setswitchinterval(1e-6)
got = []
threads = [threading.Thread(target=lambda: got.append((inspect.signature, ssl.SSLContext))) for _ in range(20)]
for each in threads: each.start()
for each in threads: each.join()
assert len(set(got)) == 1 and len(got) == 20""",
    "TLS": """
async def refused():
    await asyncio.open_connection("127.0.0.1", 9, ssl=True)
try: asyncio.run(refused())
except OSError: pass
assert 'ssl' not in waiting()""",
}


@pytest.mark.parametrize("use", USES)
def test_a_module_is_executed_when_it_is_used(use: str) -> None:
    subprocess.run([sys.executable, "-c", ENTERED + USES[use]], check=True, timeout=300)


def test_what_was_loaded_before_stays_as_it_is() -> None:
    code = "import ssl\nfrom ringfence.core import deferred\ndeferred.enable()\n"
    code += "with deferred.loading():\n    import ssl as again\n"
    code += "import sys, types\nassert again is ssl and type(ssl) is types.ModuleType\n"
    code += "assert not any(type(each).__module__ == deferred.__name__ for each in sys.meta_path)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_every_name_is_that_of_a_module() -> None:
    assert [name for name in deferred.DEFERRED if importlib.util.find_spec(name) is None] == []


def test_a_program_that_uses_the_sdk_finds_its_modules_as_it_knows_them() -> None:
    code = (
        "import ringfence, sys, types\nringfence.run_code, ringfence.Sandbox\nfrom ringfence.compose import backends\n"
    )
    code += "assert {type(each) for name, each in sys.modules.items() if name in ('ssl', 'inspect', 'shutil')}"
    code += " <= {types.ModuleType}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
