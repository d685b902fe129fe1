"""The words of `ringfence run`, as Typer takes and explains them. `run_words` reads the same."""

from __future__ import annotations

from pathlib import Path

import typer

from ringfence.cli import options

_Words = typer.Argument(
    None, metavar="[FILE] [-- ARGS…]", help="A program (`-`: from stdin), and its arguments.", show_default=False
)
_Output = typer.Option(None, "--output", metavar="DIR", help="The folder to copy the files of /workspace/output to.")
_Env = typer.Option(None, "--env", metavar="K=V", help="A variable of the program. May be repeated.")
_Secrets = typer.Option(
    None,
    "--secret",
    metavar="NAME",
    help="A secret of the configuration: the program finds a placeholder for it in its environment. May be repeated.",
)
_Facts = typer.Option(None, "--facts", metavar="FILE", help="Write the facts as JSON; `-`: to stderr.")
_Batch = typer.Option(
    None,
    "--batch",
    metavar="FILE",
    help="Programs, one JSON value a line: Python source, or `{code, id, timeout, env}` (`-`: from stdin).",
)
_Workers = typer.Option(
    None, "--workers", min=1, metavar="N", help="How many of a batch run at a time. Default: 2 for each processor."
)
_Fresh = typer.Option(False, "--fresh", help="Give it an address layout and hash seed that no other box has.")
_Image = typer.Option(
    None,
    "--image",
    metavar="REF",
    help="A container image as its root, instead of this host's system: HOST/NAME:TAG of a registry, ./PATH of an OCI"
    " layout, tar archive or root folder, or the sha256:… of `ringfence image build`.",
)
_Trees = typer.Option(
    None, "--tree", metavar="DIR", help="A folder that is readable in the box, at the same path. May be repeated."
)


def run(
    words: list[str] | None = _Words,
    code: options.Code = None,
    shell: options.Shell = None,
    batch: str | None = _Batch,
    workers: int | None = _Workers,
    backend: options.Backend = None,
    timeout: options.ProgramTimeout = None,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    allow: options.Allow = None,
    listen: options.Listen = False,
    package: options.Packages = None,
    allow_package: options.AllowPackages = None,
    inputs: options.Inputs = None,
    output: Path | None = _Output,
    env: list[str] | None = _Env,
    secret: list[str] | None = _Secrets,
    facts: str | None = _Facts,
    template: options.Template = None,
    image: str | None = _Image,
    fresh: bool = _Fresh,
    tree: list[Path] | None = _Trees,
    config_path: options.OwnConfig = None,
) -> None:
    """Run a program in a fresh box: without network, with only the files that you name, and with limits.

    FILE is Python source. A file that ends in .js or .sh, or names another interpreter in its first line, is run by
    that. Stdin is passed on unless it is a terminal. The working folder is /workspace, with input/, output/ and tmp/.

    The exit code is the program's, or 128+n if signal n killed it. Ringfence's own are: 2 wrong usage, 124 timeout,
    125 the box itself failed, 126 refused by policy, 137 killed by a limit.

    With --batch, each program has a box of its own, the options hold for all of them, and a line of JSON is printed
    for each, in their order: {"id", "status", "exit_status", "stdout", "stderr", "error", "ended", "facts"}, and
    "truncated": true where not all of the output is in it. The exit code is 0 if every program exited with status 0,
    else 1, or 125 if no box could be made.

    \b
    ringfence run script.py -- --verbose data.csv     a file, with arguments
    ringfence run -c 'print(6 * 7)'                   a line of Python
    ringfence run --shell 'wc -l input/*' --input data.csv
    ringfence run train.py --timeout 300 --memory 2G --output results/
    echo 1 2 3 | ringfence run -c 'print(sum(map(int, input().split())))'
    ringfence run fetch.py --allow api.example.com:443 --allow '*.cdn.example.com'
    ringfence run untrusted.js --facts facts.json     what it did, as the supervisor saw it
    ringfence run --image ./image/oci -c 'import sys; print(sys.version)'
    ringfence run --batch programs.jsonl --workers 8 --timeout 10 > results.jsonl
    """
    from ringfence.cli.run import perform  # noqa: PLC0415 - `--help` need not load it

    perform(
        words=words,
        code=code,
        shell=shell,
        batch=batch,
        workers=workers,
        backend=backend,
        timeout=timeout,
        memory=memory,
        disk=disk,
        pids=pids,
        allow=allow,
        listen=listen,
        package=package,
        allow_package=allow_package,
        inputs=inputs,
        output=output,
        env=env,
        secret=secret,
        facts=facts,
        template=template,
        image=image,
        fresh=fresh,
        tree=tree,
        config_path=config_path,
    )
