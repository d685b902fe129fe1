"""What may help a program that failed, from its own last words."""

from __future__ import annotations

import importlib.util

import pytest

from ringfence.cli.hints import hint
from tests import gateways

DENIED = {"network": {"denied": [{"host": "a.example", "port": 443, "count": 1}], "allowed": []}}


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'numpy'\n", "--package numpy"),
        ("ModuleNotFoundError: No module named 'yaml.nodes'; 'yaml' is not a package\n", "--package pyyaml"),
        ("urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>\n", "--allow HOST"),
        ("curl: (6) Could not resolve host: a.example\n", "--allow HOST"),
    ],
)
def test_what_is_missing_is_named_with_the_option_for_it(stderr: str, said: str) -> None:
    assert said in (hint(stderr, {}) or "")


def test_what_was_refused_is_named_by_its_place() -> None:
    assert "--allow a.example:443" in (hint("HTTPError: 403\n", DENIED) or "")


@pytest.mark.parametrize(
    "stderr", ["", "ValueError: 3\n", "print: ModuleNotFoundError: No module named 'x'\n", "No module"]
)
def test_nothing_is_made_up(stderr: str) -> None:
    assert hint(stderr, {"network": {"denied": [], "allowed": []}}) is None


def test_a_run_says_what_to_do_next() -> None:
    done = gateways.run("run", "-c", "import no_such_module_at_all")
    assert done.returncode == 1
    assert done.stderr.endswith("install it for this program with --package no_such_module_at_all\n")
    done = gateways.run("run", "-c", "import socket; socket.create_connection(('example.com', 80))")
    assert done.returncode == 1 and "--allow HOST[:PORT]" in done.stderr.splitlines()[-1]
    fine = gateways.run("run", "-c", "import sys; sys.exit('plain')")
    assert (fine.returncode, fine.stderr) == (1, "plain\n")


def test_a_template_without_its_packages_says_how_to_install_them() -> None:
    if importlib.util.find_spec("numpy") is not None:
        pytest.skip("numpy is installed here")
    done = gateways.run("run", "--template", "data", "-c", "pass")
    assert done.returncode == 125 and "-m pip install numpy" in done.stderr, done.stderr
