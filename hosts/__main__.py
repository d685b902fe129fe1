"""python -m hosts: guests under QEMU, one by one or all."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from hosts.guests import GUESTS, Guest, named
from hosts.machine import Running, disks
from hosts.places import ROOT, Trouble, need_programs, say
from hosts.project import as_whom, bring, quoted
from hosts.results import Results, write
from hosts.trying import try_guest


def _list(_: argparse.Namespace) -> int:
    for guest in GUESTS:
        print(f"{guest.name:26} {'runs' if Running(guest.name).alive else '-':5} {guest.says}")
    return 0


def _started(chosen: argparse.Namespace) -> tuple[Guest, Running]:
    guest = named(chosen.guest)
    running = Running(chosen.as_name or guest.name)
    if not running.alive:
        began = time.monotonic()
        running.start(guest, chosen.source)
        with running.line():
            say(f"{running.place.name} is up after {time.monotonic() - began:.0f} s")
    return guest, running


def _up(chosen: argparse.Namespace) -> int:
    _started(chosen)
    return 0


def _build(chosen: argparse.Namespace) -> int:
    for guest in [named(chosen.guest)] if chosen.guest else GUESTS:
        disks(guest, chosen.source)
    return 0


def _down(chosen: argparse.Namespace) -> int:
    Running(chosen.as_name or chosen.guest).stop()
    return 0


def _show(stream: str, data: bytes) -> None:
    target = sys.stdout if stream == "out" else sys.stderr
    target.buffer.write(data)
    target.flush()


def _run(chosen: argparse.Namespace) -> int:
    guest, running = _started(chosen)
    with running.line() as line:
        bring(line, guest, chosen.source)
        ended = line.call(as_whom(chosen.who, quoted(chosen.command)), show=_show)
    return ended.code if ended.code >= 0 else 128 - ended.code


def _put(chosen: argparse.Namespace) -> int:
    _, running = _started(chosen)
    with running.line() as line:
        line.put(chosen.target, chosen.file.read_bytes())
        line.call(["chmod", "755", chosen.target])
    return 0


def _try(chosen: argparse.Namespace) -> int:
    guests = [named(name) for name in chosen.guest] or list(GUESTS)
    good = True
    for guest in guests:
        wanted = lambda part: not chosen.part or part.name in chosen.part  # noqa: E731
        good = try_guest(guest, chosen.source, wanted, chosen.again) and good
        write(ROOT / "docs" / "hosts.md", Results().every(), [guest.name for guest in GUESTS])
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m hosts", description=__doc__)
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("list", help="the guests").set_defaults(call=_list)
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("guest", choices=[guest.name for guest in GUESTS], metavar="GUEST")
    one.add_argument("--as", dest="as_name", metavar="NAME", help="a second guest of the kind, under another name")
    one.add_argument("--source", type=Path, default=ROOT, help="the checkout whose code is tried")
    build = commands.add_parser("build", help="make the images and kernels of a guest, or of all")
    build.add_argument("guest", nargs="?", choices=[guest.name for guest in GUESTS], metavar="GUEST")
    build.add_argument("--source", type=Path, default=ROOT, help="the checkout whose dependencies are fetched")
    build.set_defaults(call=_build)
    commands.add_parser("up", parents=[one], help="start a guest and leave it running").set_defaults(call=_up)
    commands.add_parser("down", parents=[one], help="end a guest; its disk is as new").set_defaults(call=_down)
    run = commands.add_parser("run", parents=[one], help="run a command line in a guest, which is started if needed")
    run.add_argument("--who", choices=["root", "user", "service", "plain"], default="root")
    run.add_argument("command", nargs="+")
    run.set_defaults(call=_run)
    trying = commands.add_parser("try", help="try everything in some guests, or in all, and write docs/hosts.md")
    trying.add_argument("guest", nargs="*", choices=[[], *(guest.name for guest in GUESTS)], metavar="GUEST")
    trying.add_argument("--part", action="append", default=[], help="only this part; may be repeated")
    trying.add_argument("--again", action="store_true", help="also what has a result already")
    trying.add_argument("--source", type=Path, default=ROOT, help="the checkout whose code is tried")
    trying.set_defaults(call=_try)
    put = commands.add_parser("put", parents=[one], help="copy a file into a guest")
    put.add_argument("file", type=Path)
    put.add_argument("target")
    put.set_defaults(call=_put)
    return parser


def main() -> int:
    chosen = _parser().parse_args()
    # Ended from outside, what was started for the time being is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        need_programs()
        return int(chosen.call(chosen))
    except Trouble as trouble:
        say(str(trouble))
        return 1


if __name__ == "__main__":
    sys.exit(main())
