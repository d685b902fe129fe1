"""Options that several commands have, each defined once.

An option that only one command has stands beside that command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST_MB = 2**24
"""The largest size that an option takes, in MiB."""

# ── What to run ───────────────────────────────────────────────────────────────────────────────────

Code = Annotated[str | None, typer.Option("-c", metavar="CODE", help="Python source instead of a FILE.")]
Shell = Annotated[str | None, typer.Option("--shell", metavar="CMD", help="A command line for /bin/sh instead.")]
ProgramTimeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, max=86_400, metavar="S", help="Seconds until it is killed."),
]

# ── The box ───────────────────────────────────────────────────────────────────────────────────────

Backend = Annotated[str | None, typer.Option("--backend", metavar="B", help="The sandbox backend: process.")]
Template = Annotated[
    str | None,
    typer.Option(
        "--template", metavar="NAME", help="`python`, `data` (numpy, pandas, matplotlib), or a configured one."
    ),
]
Memory = Annotated[int | None, typer.Option("--memory", min=16, max=MOST_MB, metavar="MB", help="Memory, in MiB.")]
Disk = Annotated[int | None, typer.Option("--disk", min=1, max=MOST_MB, metavar="MB", help="Disk, in MiB.")]
Pids = Annotated[int | None, typer.Option("--pids", min=1, max=1_000_000, metavar="N", help="Processes and threads.")]
Inputs = Annotated[
    list[Path] | None,
    typer.Option("--input", metavar="PATH", help="A file or folder for /workspace/input. May be repeated."),
]
Packages = Annotated[
    list[str] | None,
    typer.Option("--package", metavar="NAME[==VERSION]", help="A Python package to install for it. May be repeated."),
]
AllowPackages = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-package",
        metavar="NAME[==VERSION]",
        help="A package (name or pattern) that programs in it may install with `pip install`. May be repeated.",
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="HOST[:PORT]", help="A host, `*.suffix` or address that it may reach. May be repeated."
    ),
]
Listen = Annotated[
    bool,
    typer.Option("--listen", help="Let it listen for connections, which only programs in its own box can make."),
]

# ── The configuration, and output ─────────────────────────────────────────────────────────────────

OwnConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A ringfence.yaml for policy, limits and state. Default: the user's own, if there is one.",
    ),
]
SandboxConfig = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A ringfence.yaml for the sandbox settings. Default: the user's own, if any."
    ),
]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
