"""`ringfence box files ls|get|put|rm`."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

import typer

from ringfence.cli import common, named_paths, options, program, running
from ringfence.cli.box import shared
from ringfence.cli.box.shared import IdArgument, finish, sandbox
from ringfence.cli.streams import OutputEscaper
from ringfence.cli.terminal import safe
from ringfence.sdk.infos import FileInfo, Moved

files = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
PathArgument = typer.Argument(..., metavar="PATH", help="As programs in the box see it, or relative to /workspace.")


@files.callback()
def group() -> None:
    """The files of a box. Paths are those that its programs see, or relative to /workspace.

    What a program in the box could not read or write is refused here, too.

    \b
    ringfence box files ls ID
    ringfence box files put ID data/ data
    ringfence box files get ID output/report.html
    ringfence box files get ID /tmp/log.txt -
    ringfence box files rm ID data
    """


@files.command()
def ls(
    id: str = IdArgument,
    path: str = typer.Argument("/workspace", metavar="PATH", help="A folder."),
    depth: int = typer.Option(1, "--depth", min=1, max=64, metavar="N", help="How deep."),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """List a folder of a box: kind, permissions, size, time, path.

    \b
    ringfence box files ls ID
    ringfence box files ls ID output --depth 3 --json
    """

    async def work() -> list[FileInfo]:
        async with sandbox(config_path, id) as box:
            return await box.files.list(path, depth)

    found = finish(work)
    if as_json:
        common.dump([{**shared.plain(each), "modified": each.modified.isoformat()} for each in found])
    elif found:
        print(shared.files(found))


@files.command(short_help="Copy a file or folder out of a box.")
def get(
    id: str = IdArgument,
    path: str = PathArgument,
    target: str | None = typer.Argument(
        None, metavar="TARGET", help="Where to; `-`: stdout. Default: its own name, here.", show_default=False
    ),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Copy a file out of a box; or a folder, into a folder, or as an archive if TARGET ends in .tar.

    \b
    ringfence box files get ID output/report.html
    ringfence box files get ID output results/
    ringfence box files get ID /workspace work.tar
    ringfence box files get ID output/table.csv - | head
    """
    if target == "-":
        finish(lambda: _print(config_path, id, path))
        return
    place = named_paths.resolve("TARGET", Path(target or PurePosixPath(path).name or "workspace"))
    program.check_output("TARGET", place, running.own_config(config_path))

    async def work() -> Moved:
        async with sandbox(config_path, id) as box, shared.metered(f"get {path}") as meter:
            return await box.files.download(path, place, on_progress=meter)

    _print_moved(finish(work), as_json)


async def _print(config_path: Path | None, id: str, path: str) -> None:
    escaper = OutputEscaper(sys.stdout.fileno())
    async with sandbox(config_path, id) as box:
        async for piece in await box.files.read(path, "stream"):
            sys.stdout.buffer.write(escaper.shown(piece))
    sys.stdout.buffer.flush()


@files.command(short_help="Copy a local file or folder into a box.")
def put(
    id: str = IdArgument,
    source: str = typer.Argument(..., metavar="SOURCE", help="A local file or folder; `-`: stdin."),
    path: str = PathArgument,
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Copy a local file to PATH in a box, or the content of a local folder into the folder PATH.

    It is written as a whole or not at all. Links that lead out of the folder and special files are left out, and named.

    \b
    ringfence box files put ID sales.csv data/sales.csv
    ringfence box files put ID project/ project
    generate | ringfence box files put ID - data/numbers.txt
    """

    async def work() -> Moved:
        async with sandbox(config_path, id) as box, shared.metered(f"put {source}") as meter:
            if source == "-":
                return Moved(1, (await box.files.write(path, sys.stdin.buffer)).bytes)
            return await box.files.upload(named_paths.resolve("SOURCE", Path(source)), path, on_progress=meter)

    _print_moved(finish(work), as_json)


@files.command()
def rm(
    id: str = IdArgument,
    paths: list[str] = typer.Argument(..., metavar="PATH…", help="Files, or folders with everything in them."),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Remove files of a box, and folders with everything in them.

    \b
    ringfence box files rm ID data/sales.csv tmp/scratch
    """

    async def work() -> None:
        async with sandbox(config_path, id) as box:
            for path in paths:
                await box.files.remove(path)

    finish(work)
    if as_json:
        common.dump({"removed": paths})


def _print_moved(moved: Moved, as_json: bool) -> None:
    if as_json:
        common.dump(shared.plain(moved))
        return
    print(f"{moved.files} file{'' if moved.files == 1 else 's'}, {shared.size(moved.bytes)}", file=sys.stderr)
    for path, why in moved.left_out.items():
        print(f"left out: {safe(path)}: {safe(why)}", file=sys.stderr)
