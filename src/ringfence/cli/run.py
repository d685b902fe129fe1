"""`ringfence run`: a program in a fresh box. Its exit code is the program's."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from ringfence.cli import common, program

_MIB = 1024 * 1024
_MOST_MB = 2**44 // _MIB

_Words = typer.Argument(
    None, metavar="[FILE] [-- ARGS…]", help="A program (`-`: from stdin), and what it is given.", show_default=False
)
_Code = typer.Option(None, "-c", metavar="CODE", help="Python source instead of a FILE.")
_Shell = typer.Option(None, "--shell", metavar="CMD", help="A command line for /bin/sh instead.")
_Backend = typer.Option(None, "--backend", metavar="B", help="The sandbox backend: process.")
_Timeout = typer.Option(None, "--timeout", min=0.001, max=86_400, metavar="S", help="Seconds until it is ended.")
_Memory = typer.Option(None, "--memory", min=16, max=_MOST_MB, metavar="MB", help="Memory, in MiB.")
_Disk = typer.Option(None, "--disk", min=1, max=_MOST_MB, metavar="MB", help="Disk, in MiB.")
_Pids = typer.Option(None, "--pids", min=1, max=1_000_000, metavar="N", help="Processes and threads.")
_Allow = typer.Option(
    None, "--allow", metavar="HOST[:PORT]", help="A host, `*.suffix` or address that it may reach. May be repeated."
)
_Listen = typer.Option(False, "--listen", help="Let it wait for connections, which only its own box can make.")
_Packages = typer.Option(
    None, "--package", metavar="NAME[==VERSION]", help="A Python package that is installed for it. May be repeated."
)
_AllowPackages = typer.Option(
    None,
    "--allow-package",
    metavar="NAME[==VERSION]",
    help="A name or pattern of packages that programs in it may install (`pip install`). May be repeated.",
)
_Inputs = typer.Option(None, "--input", metavar="PATH", help="A file or folder for /workspace/input. May be repeated.")
_Output = typer.Option(None, "--output", metavar="DIR", help="Where the files of /workspace/output are copied to.")
_Env = typer.Option(None, "--env", metavar="K=V", help="A variable of the program. May be repeated.")
_Secrets = typer.Option(
    None,
    "--secret",
    metavar="NAME",
    help="A secret of the configuration: the program finds a placeholder for it in its environment.",
)
_Facts = typer.Option(None, "--facts", metavar="FILE", help="Write the facts as JSON; `-`: to stderr.")
_Template = typer.Option(
    None, "--template", metavar="NAME", help="`python`, `data` (numpy, pandas, matplotlib), or one of yours."
)
_Fresh = typer.Option(False, "--fresh", help="An address layout and hash seed that no other box has.")
_Trees = typer.Option(
    None, "--tree", metavar="DIR", help="A folder that is readable in the box, at the same path. May be repeated."
)
_Config = typer.Option(
    None, "--config", help="A ringfence.yaml for policy, limits and state. Left out: the user's own, if there is one."
)


def run(
    words: list[str] | None = _Words,
    code: str | None = _Code,
    shell: str | None = _Shell,
    backend: str | None = _Backend,
    timeout: float | None = _Timeout,
    memory: int | None = _Memory,
    disk: int | None = _Disk,
    pids: int | None = _Pids,
    allow: list[str] | None = _Allow,
    listen: bool = _Listen,
    package: list[str] | None = _Packages,
    allow_package: list[str] | None = _AllowPackages,
    inputs: list[Path] | None = _Inputs,
    output: Path | None = _Output,
    env: list[str] | None = _Env,
    secret: list[str] | None = _Secrets,
    facts: str | None = _Facts,
    template: str | None = _Template,
    fresh: bool = _Fresh,
    tree: list[Path] | None = _Trees,
    config_path: Path | None = _Config,
) -> None:
    """Run a program in a fresh box: no network and no files of yours but those you name, limits on everything.

    FILE is Python source; one that ends in .js or .sh, or names another interpreter in its first line, is run by that.
    Stdin is passed on where it is no terminal. The working folder is /workspace, with input/, output/ and tmp/.

    The exit code is the program's, and 128+n for one that died of signal n. Ours are: 2 wrong usage, 124 timeout,
    125 the box itself failed, 126 refused by policy, 137 killed by a limit.

    \b
    ringfence run script.py -- --verbose data.csv     a file, with arguments of its own
    ringfence run -c 'print(6 * 7)'                   a line of Python
    ringfence run --shell 'wc -l input/*' --input data.csv
    ringfence run train.py --timeout 300 --memory 2048 --output results/
    echo 1 2 3 | ringfence run -c 'print(sum(map(int, input().split())))'
    ringfence run fetch.py --allow api.example.com:443 --allow '*.cdn.example.com'
    ringfence run untrusted.js --facts facts.json     what it did, as the supervisor saw it
    """
    chosen = program.chosen(list(words or ()), code, shell)
    boxed = common.loaded("ringfence.cli.boxed")
    wanted = boxed.Wanted(
        **{"code": chosen.code, "command": chosen.command, "argv": chosen.argv, "name": chosen.name},
        env=program.environment(env or []),
        limits=_limits(timeout, memory, disk, pids),
        inputs=program.inputs(inputs or [], chosen.script),
        output=program.output_folder(output),
        network=program.places(allow or []),
        trees=program.trees(tree or []),
        **{"packages": tuple(package or ()), "allow_packages": tuple(allow_package or ())},
        **{"secrets": tuple(secret or ()), "listen": "allowed" if listen else None},
        **{"template": template, "layout": "fresh" if fresh else None},
    )
    settings = boxed.settings(config_path, backend)
    if facts not in (None, "-") and wanted.output and Path(facts).resolve().is_relative_to(wanted.output):
        common.fail(f"--facts {facts}: lies in the folder of --output, where the program says what is in which file", 2)
    report = boxed.Report(facts)
    raise typer.Exit(common.run(boxed.run, wanted, settings, report, not chosen.reads_stdin))


def _limits(timeout: float | None, memory: int | None, disk: int | None, pids: int | None) -> dict[str, float]:
    if timeout is not None and not math.isfinite(timeout):
        common.fail("--timeout: not a number of seconds", 2)
    sizes = {"memory_bytes": memory, "disk_bytes": disk}
    given = {name: value * _MIB for name, value in sizes.items() if value is not None}
    others = {"wall_seconds": timeout, "processes": pids}
    return {**given, **{name: value for name, value in others.items() if value is not None}}
