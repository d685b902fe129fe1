"""The kernel's own headers, of both machines that boxes run on, whichever of them this is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.tooling import ROOT, missing

_COMPLETE = 7 << 16
"""Headers of Linux 7.0 and later know all that we name."""
FETCHED = ROOT / ".tools" / "headers" / "usr"


def folders(machine: str) -> list[Path]:
    """Where a compiler would look for them: fetched ones first, which are the newest, then those of this host."""
    name = f"{machine}-linux-gnu"
    for places in (
        [FETCHED / "include" / name, FETCHED / "include"],
        [FETCHED / name / "include"],
        [Path("/usr/include", name), Path("/usr/include")],
    ):
        if (places[0] / "asm" / "unistd.h").exists():
            return places
    missing(f"a set of kernel headers for {machine}", "run scripts/setup --tests")


def numbers(machine: str) -> Mapping[str, int]:
    """Of every system call that they know."""
    plain = folders(machine)[0] / "asm" / "unistd_64.h"
    defined = plain.read_text() if plain.exists() else _compiler(machine, "#include <asm/unistd.h>", "-E", "-dM")
    macros: dict[str, str] = dict(re.findall(r"^#define (__NR\w*) +(\w+)", defined, re.MULTILINE))
    for name in ("__NR_syscalls", "__NR_arch_specific_syscall"):
        macros.pop(name, None)
    return {
        macro.removeprefix("__NR_"): int(macros.get(value, value))
        for macro, value in macros.items()
        if macro.startswith("__NR_")
    }


def disagreements(machine: str, files: Sequence[str], values: Mapping[str, int]) -> str:
    """What a compiler says of expressions that are not what is said here; nothing, if all are."""
    lines = [f"#include <{file}>" for file in ("linux/version.h", *files)]
    for what, value in values.items():
        unknown = " || ".join(f"!defined({name})" for name in re.findall(r"\b[A-Z_0-9]+\b", what)) or "0"
        lines += [f"#if LINUX_VERSION_CODE >= {_COMPLETE} || !({unknown})"]  # older ones need not know every name
        lines += [f'_Static_assert(({what}) == {value}ULL, "{what}");', "#endif"]
    return _compiler(machine, "\n".join(lines), "-fsyntax-only")


def _compiler(machine: str, source: str, *options: str) -> str:
    """What it answers. It may be that of the other machine: both have the same sizes of everything."""
    compiler = shutil.which("cc")
    if compiler is None:
        missing("a C compiler", "apt-get install gcc")
    command = [compiler, "-xc", "-undef", "-nostdinc", f"-D__{machine}__", "-D__LP64__", "-D__linux__", *options]
    command += [f"-I{folder}" for folder in folders(machine)]
    run = subprocess.run([*command, "-"], input=source + "\n", capture_output=True, text=True, check=False)
    return run.stdout + run.stderr
