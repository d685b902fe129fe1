"""Options that several commands have, each defined once.

An option that only one command has stands beside that command.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ringfence.cli.sizes import size_in_bytes


def size(least_mb: int) -> Callable[[str], int]:
    """The parser of an option for a size, whose value is in bytes; errors say what is understood."""
    read = size_in_bytes(least_mb)

    def parse(text: str) -> int:
        try:
            return read(text)
        except ValueError as exc:
            raise typer.BadParameter(str(exc)) from None

    return parse


# ── What to run ───────────────────────────────────────────────────────────────────────────────────

Code = Annotated[str | None, typer.Option("-c", metavar="CODE", help="Python source instead of a FILE.")]
Shell = Annotated[str | None, typer.Option("--shell", metavar="CMD", help="A command line for /bin/sh instead.")]
ProgramTimeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, max=86_400, metavar="S", help="Seconds until it is killed."),
]

# ── The box ───────────────────────────────────────────────────────────────────────────────────────

Backend = Annotated[str | None, typer.Option("--backend", metavar="B", help="What makes the box, by name, or auto.")]
Template = Annotated[
    str | None,
    typer.Option(
        "--template", metavar="NAME", help="`python`, `data` (numpy, pandas, matplotlib), or a configured one."
    ),
]
Memory = Annotated[
    int | None,
    typer.Option("--memory", parser=size(16), metavar="SIZE", help="Memory, in MiB or with a unit: 512, 512M, 1.5G."),
]
Disk = Annotated[
    int | None,
    typer.Option("--disk", parser=size(1), metavar="SIZE", help="Disk, in MiB or with a unit: 512, 512M, 1.5G."),
]
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
    typer.Option("--listen", hidden=True, help="Needed no more: programs of a box may listen on its own loopback."),
]

# ── The configuration, the gateway, and output ────────────────────────────────────────────────────

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
        "--config", metavar="FILE", help="A ringfence.yaml for the settings of boxes. Default: the user's own, if any."
    ),
]
GatewayUrl = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="A gateway's endpoint, as `serve` prints it; also unix:PATH."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="A file with a bearer token for --url (`ringfence token`)."),
]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
