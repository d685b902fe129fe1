"""Completion of verbs and options, as each shell has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ringfence.cli.commands import every_command
from ringfence.cli.completion import script
from ringfence.cli.verbs import VERBS
from tests import gateways


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_verb_and_its_options(shell: str) -> None:
    made = script(shell, every_command())
    assert all(verb in made for verb in VERBS)
    assert "'box files put'" in made or '"box files put"' in made
    assert ("--allow-package" in made) or ("--long-option allow-package" in made)
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=made, text=True, check=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ringfence aud", "audit"),
        ("ringfence box ex", "exec expose"),
        ("ringfence box files p", "put"),
        ("ringfence -v box files p", "put"),
        ("ringfence audit verify --pub", "--public-key"),
        ("ringfence run --timeout 3 --bat", "--batch"),
    ],
)
def test_bash_completes(words: str, completed: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _ringfence; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        [bash, "-c", f"{script('bash', every_command())}\n{asked}"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"{completed}\n", "")


CASES = [("aud", {"audit"}), ("box ex", {"exec", "expose"}), ("run --bat", {"--batch"})]


@pytest.mark.parametrize(("words", "completed"), CASES)
def test_fish_completes(words: str, completed: set[str], tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("there is no fish here")
    asked = f"{script('fish', every_command())}\ncomplete -C 'ringfence {words}'"
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run([fish, "-c", asked], capture_output=True, text=True, timeout=60, env=home)
    assert ({line.partition("\t")[0] for line in done.stdout.splitlines()}, done.stderr) == (completed, "")


@pytest.mark.parametrize(("words", "completed"), CASES)
def test_zsh_offers_what_begins_so(words: str, completed: set[str]) -> None:
    """Zsh itself leaves out what does not begin as the last word does; it does so on a terminal only."""
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh here")
    last = words.split()[-1]
    asked = (
        "compdef() {}; _describe() { print -rl -- ${(P)2} }; _files() { print files }\n"
        f"{script('zsh', every_command())}\n"
        f"words=(ringfence {words}); CURRENT=$#words; PREFIX={last}; _ringfence"
    )
    done = subprocess.run([zsh, "-f", "-c", asked], capture_output=True, text=True, timeout=60)
    offered = {line.partition(":")[0] for line in done.stdout.splitlines()}
    assert ({name for name in offered if name.startswith(last)}, done.stderr) == (completed, "")


def test_a_shell_that_is_not_known_is_told_which_are() -> None:
    done = gateways.run("completion", "tcsh")
    assert done.returncode == 2 and "bash, zsh, fish" in done.stderr
