"""`ringfence box create|list|pause|resume|snapshot|fork|rm|volume`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import typer

from ringfence.cli import common, options, program
from ringfence.cli.box import shared
from ringfence.cli.box.shared import IdArgument, finish, open_calls, sandbox
from ringfence.cli.terminal import safe
from ringfence.compose.runs import provision
from ringfence.config.settings import Config
from ringfence.core.box import Limits
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.core.sessions import VolumeMount
from ringfence.sdk.client import ask, given
from ringfence.sdk.infos import SandboxInfo, SnapshotInfo, VolumeInfo
from ringfence.sdk.sandbox import AsyncSandbox

_Timeout = typer.Option(None, "--timeout", min=0.001, max=86_400, metavar="S", help="For each step, in seconds.")
_Lifetime = typer.Option(None, "--lifetime", min=1, metavar="S", help="Seconds until the box is removed.")
_Idle = typer.Option(None, "--idle", min=0, metavar="S", help="Seconds without work until it is paused; 0: never.")
_Env = typer.Option(None, "--env", metavar="K=V", help="A variable in the box. May be repeated.")
_Image = typer.Option(None, "--image", metavar="REF", help="A container image as its root; see `run --image`.")
_Snapshot = typer.Option(None, "--snapshot", metavar="REF", help="Start with the files of a snapshot.")
_Volumes = typer.Option(
    None, "--volume", metavar="NAME:AT[:ro]", help="A durable folder, under /workspace. May be repeated."
)
_Listen = typer.Option(False, "--listen", help="Allow its ports to be exposed; see `box expose`.")
_Ports = typer.Option(
    None, "--port", metavar="NAME=PORT", help="Allow only this port to be exposed, by name. May be repeated."
)
_Secrets = typer.Option(
    None, "--secret", metavar="NAME", help="A secret of the configuration that it may use. May be repeated."
)
_Setup = typer.Option(None, "--setup", metavar="FILE", help="Python to run first in each of its interpreters.")
_Fresh = typer.Option(False, "--fresh", help="Give its interpreters an address layout and hash seed of their own.")
_Metadata = typer.Option(None, "--metadata", metavar="K=V", help="A label. May be repeated.")
_Retain = typer.Option(None, "--retain", metavar="WHAT", help="What to keep at its end: `output` or `none`.")


def create(
    template: options.Template = None,
    image: str | None = _Image,
    backend: options.Backend = None,
    timeout: float | None = _Timeout,
    lifetime: float | None = _Lifetime,
    idle: float | None = _Idle,
    memory: options.Memory = None,
    disk: options.Disk = None,
    pids: options.Pids = None,
    env: list[str] | None = _Env,
    inputs: options.Inputs = None,
    snapshot: str | None = _Snapshot,
    volumes: list[str] | None = _Volumes,
    allow: options.Allow = None,
    listen: bool = _Listen,
    port: list[str] | None = _Ports,
    secret: list[str] | None = _Secrets,
    package: options.Packages = None,
    allow_package: options.AllowPackages = None,
    setup: Path | None = _Setup,
    fresh: bool = _Fresh,
    metadata: list[str] | None = _Metadata,
    retain: str | None = _Retain,
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Make a box that stays, and print its id.

    It stays when this command ends. --timeout applies to steps without their own. After --idle seconds without work
    it is paused and uses no processor. At the end of its --lifetime, pauses not counted, it is removed.

    \b
    ringfence box create
    ringfence box create --template data --memory 1G --lifetime 7200 --metadata job=sales
    ringfence box create --snapshot ready --volume models:/workspace/models:ro
    id=$(ringfence box create)
    """
    if retain not in (None, "none", "output"):
        common.fail("--retain: `output` or `none`", 2)
    chosen: Any = given(template=template, timeout=timeout, lifetime=lifetime, snapshot=snapshot, retain=retain)
    chosen |= given(image=None if image is None else program.image(image))
    chosen["envs"] = program.environment(env or [])
    chosen["metadata"] = program.environment(metadata or [], "--metadata")
    chosen["inputs"] = {each.name: each for each in program.inputs(inputs or [], None)}
    chosen["volumes"] = [_mount(each) for each in volumes or ()]
    chosen["network"] = program.places(allow or [])
    chosen |= {"packages": package or [], "allow_packages": allow_package or [], "secrets": secret or []}
    chosen["listen"] = _ports(port) if port else listen
    chosen |= given(setup=program.source(setup) if setup else None, memory_layout="fresh" if fresh else None)
    if idle is not None:
        chosen["idle"] = idle or None
    configured = common.own_config(config_path, backend)
    chosen |= _sized(configured, memory, disk, pids)
    info = finish(lambda: _create(configured, chosen))
    if as_json:
        common.dump(shared.plain(info))
    else:
        print(info.id)


def _sized(configured: Config, memory: int | None, disk: int | None, pids: int | None) -> dict[str, Limits]:
    """The limits of the configuration, with those that the options name, if any."""
    limits = given(memory_bytes=memory, disk_bytes=disk, processes=pids)
    return {"limits": replace(provision(configured.sandbox).limits, **limits)} if limits else {}


async def _create(configured: Config, chosen: Any) -> SandboxInfo:
    async with open_calls(configured) as way, shared.metered("opening"):
        made = AsyncSandbox.over(way, None, chosen)
        await made.open()
        return await made.info()


def _ports(given: list[str]) -> dict[str, int]:
    pairs = program.environment(given, "--port")
    for name, port in pairs.items():
        if not port.isdecimal() or not 0 < int(port) < 65536:
            common.fail(f"--port {name}={port}: not a port", 2)
    return {name: int(port) for name, port in pairs.items()}


def _mount(text: str) -> VolumeMount:
    name, _, rest = text.partition(":")
    at, _, mode = rest.partition(":")
    if not name or not at or mode not in ("", "ro", "rw"):
        common.fail(f"--volume {text}: write it as NAME:AT or NAME:AT:ro", 2)
    kind: Literal["ro", "rw"] = "ro" if mode == "ro" else "rw"
    return VolumeMount(name, at, kind)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Something that can be listed."""

    tool: str
    key: str
    of: Callable[[Json], Any]
    shown: Callable[[list[Any]], str]


_BOXES = _Kind("list_sessions", "sessions", SandboxInfo.of, shared.sandboxes)
_SNAPSHOTS = _Kind("list_snapshots", "snapshots", SnapshotInfo.of, shared.snapshots)
_VOLUMES = _Kind("list_volumes", "volumes", VolumeInfo.of, shared.volumes)


def list_(
    everything: bool = typer.Option(False, "--all", help="Also those that ended within the last day."),
    snapshots: bool = typer.Option(False, "--snapshots", help="Snapshots instead of boxes."),
    volumes: bool = typer.Option(False, "--volumes", help="Volumes instead of boxes."),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """List your boxes and their states: starting, running, paused; with --all also those that stopped, and why.

    \b
    ringfence box list
    ringfence box list --all --json
    ringfence box list --snapshots
    """
    kind = _SNAPSHOTS if snapshots else _VOLUMES if volumes else _BOXES

    async def work() -> list[Any]:
        async with open_calls(common.own_config(config_path)) as way:
            wanted = {"ended": True} if everything and kind is _BOXES else {}
            return [kind.of(each) for each in (await ask(way, kind.tool, wanted))[kind.key]]

    found = finish(work)
    if as_json:
        common.dump([shared.plain(each) for each in found])
    elif found:
        print(kind.shown(found))
    else:
        print("There are none. Make one: ringfence box create" if kind is _BOXES else "There are none.")


def pause(id: str = IdArgument, config_path: options.OwnConfig = None, as_json: options.PrintJson = False) -> None:
    """Freeze everything in a box, its clocks included, until it is used or resumed. Nothing is lost.

    \b
    ringfence box pause ID
    """
    _changed(lambda box: box.pause(), id, config_path, as_json)


def resume(id: str = IdArgument, config_path: options.OwnConfig = None, as_json: options.PrintJson = False) -> None:
    """Resume a paused box. Using it resumes it, too.

    \b
    ringfence box resume ID
    """
    _changed(lambda box: box.resume(), id, config_path, as_json)


def expose(
    id: str = IdArgument,
    port: str = typer.Argument(
        ..., metavar="PORT", help="The port that a program listens on in the box: its number or its name."
    ),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Show a port of a box on this machine's loopback, to your user alone, until the box is removed; print where.

    \b
    id=$(ringfence box create --listen)
    ringfence box exec $id --background --shell 'python3 -m http.server 8000 --bind 127.0.0.1'
    curl http://$(ringfence box expose $id 8000)/
    """

    wanted = int(port) if port.isdecimal() else port

    async def shown() -> str:
        async with open_calls(common.own_config(config_path)) as way:
            return await AsyncSandbox.over(way, id, {}).get_host(wanted)

    place = finish(shown)
    if as_json:
        common.dump({"box": id, "port": wanted, "at": place})
    else:
        print(place)


def _changed(
    change: Callable[[AsyncSandbox], Coroutine[Any, Any, SandboxInfo]],
    id: str,
    config_path: Path | None,
    as_json: bool,
) -> None:
    async def work() -> SandboxInfo:
        async with sandbox(config_path, id) as box:
            return await change(box)

    info = finish(work)
    if as_json:
        common.dump(shared.plain(info))
    else:
        print(f"{info.id} {info.state}")


def snapshot(
    id: str = IdArgument,
    name: str | None = typer.Option(None, "--name", metavar="NAME", help="A name for it."),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Keep the files of a box as they are, to start others from, and print the snapshot's id.

    Variables, processes and rules are not kept. A file in several snapshots is stored once.

    \b
    ringfence box snapshot ID --name ready
    ringfence box create --snapshot ready
    ringfence box list --snapshots
    """

    async def work() -> SnapshotInfo:
        async with sandbox(config_path, id) as box, shared.metered("taking a snapshot"):
            return await box.snapshot(name)

    taken = finish(work)
    if as_json:
        common.dump(shared.plain(taken))
    else:
        print(taken.id)


def fork(
    id: str = IdArgument,
    count: int = typer.Argument(1, metavar="N", min=1, help="How many."),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Make boxes that start with the files of this one, which keeps running, and print their ids, one on each line.

    Each is made or fails by itself: errors are printed on stderr, and the exit code is 1.

    \b
    ringfence box fork ID
    ringfence box fork ID 4
    """

    async def work() -> list[Any]:
        async with sandbox(config_path, id) as box, shared.metered(f"forking {count}"):
            return [each if isinstance(each, RingfenceError) else each.id for each in await box.fork(count)]

    made = finish(work)
    if as_json:
        common.dump([{"error": str(each)} if isinstance(each, RingfenceError) else {"id": each} for each in made])
    for each in made:
        if isinstance(each, RingfenceError):
            print(safe(str(each)), file=sys.stderr)
        elif not as_json:
            print(each)
    if any(isinstance(each, RingfenceError) for each in made):
        raise typer.Exit(1)


def rm(
    ids: list[str] | None = typer.Argument(None, metavar="ID…", help="The boxes.", show_default=False),
    everything: bool = typer.Option(False, "--all", help="All of your boxes."),
    snapshots: list[str] | None = typer.Option(None, "--snapshot", metavar="REF", help="A snapshot. May be repeated."),
    volumes: list[str] | None = typer.Option(
        None, "--volume", metavar="NAME", help="A volume, with everything in it. May be repeated."
    ),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """End boxes, with everything that runs in them; or remove snapshots and volumes.

    The files in /workspace/output of a box are kept for a day, unless it was made with --retain none.

    \b
    ringfence box rm ID
    ringfence box rm --all
    ringfence box rm --snapshot ready --volume models
    """
    if not (ids or everything or snapshots or volumes):
        common.fail("nothing to remove: give an ID, --all, --snapshot or --volume (ringfence box rm --help)", 2)

    async def work() -> list[str]:
        async with open_calls(common.own_config(config_path)) as way:
            every = (await ask(way, "list_sessions", {}))["sessions"] if everything else []
            ended = [*(ids or ()), *(each["session"] for each in every if each["state"] != "stopped")]
            for each in dict.fromkeys(ended):
                last = await ask(way, "close_session", {"session": each})
                for lost in last.get("not_kept", ()):
                    print(f"ringfence: {safe(each)}: {safe(lost)}", file=sys.stderr)
            for reference in snapshots or ():
                await ask(way, "remove_snapshot", {"snapshot": reference})
            for name in volumes or ():
                await ask(way, "remove_volume", {"name": name})
            return [*dict.fromkeys(ended), *(snapshots or ()), *(volumes or ())]

    removed = finish(work)
    if as_json:
        common.dump({"removed": removed})
    else:
        print("\n".join(map(safe, removed)))


def volume(
    name: str = typer.Argument(..., metavar="NAME", help="Its name."),
    size: int | None = typer.Option(
        None,
        "--size",
        parser=options.size(1),
        metavar="SIZE",
        help="Its maximum size, in MiB or with a unit: 512, 512M, 1.5G.",
    ),
    config_path: options.OwnConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Make a volume: a durable folder for boxes, for everything that must outlive them.

    \b
    ringfence box volume models --size 2G
    ringfence box create --volume models:/workspace/models
    ringfence box list --volumes
    """

    async def work() -> VolumeInfo:
        async with open_calls(common.own_config(config_path)) as way:
            wanted = given(name=name, max_bytes=size)
            return VolumeInfo.of(await ask(way, "create_volume", wanted))

    made = finish(work)
    if as_json:
        common.dump(shared.plain(made))
    else:
        print(safe(made.name))
