"""One program in a fresh box, which is removed with it.

    execution = ringfence.run_code("print(6 * 7)")
    print(execution.text, execution.facts["explanation"])

The run is a governed call, and is on record. To keep state from one step to the next, use a `Sandbox`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from ringfence.compose.run_request import RunRequest
from ringfence.core.box import Input, Layout, Limits, Mount
from ringfence.core.model import Outcome
from ringfence.sandbox.tools.limits import limits_problem
from ringfence.sdk import engine
from ringfence.sdk.execution import Execution, execution

OnOutput = Callable[[str], object]
"""Gets text as it is written. It may be asynchronous if its caller is."""
Inputs = Mapping[str, bytes | str | Path]
"""Files for /workspace/input by name: their content, or the path of a file to copy."""
Mounts = Mapping[str, str | Path] | Sequence[Mount]
Network = str | Sequence[str]
Listen = bool | Mapping[str, int]


Language = Literal["python", "bash", "javascript"]


class OnceOptions(TypedDict, total=False):
    """Options of a program that runs once."""

    language: Language
    """What the code is written in. JavaScript needs Node.js in the box."""
    template: str
    """`python`, `data` (numpy, pandas, matplotlib), or one of the configuration's."""
    image: str
    """A container image as its root: of a registry, ./PATH of an OCI layout, archive or folder, or a sha256:…"""
    backend: str
    """What makes its box, by name, or `auto`; default: what your configuration names."""
    timeout: float
    """Seconds."""
    envs: Mapping[str, str]
    metadata: Mapping[str, str]
    """Labels of your own; policy can see them as `args.metadata`."""
    limits: Limits
    inputs: Inputs
    mounts: Mounts
    """Folders and files of the host, by where the box sees them; read-only, unless a Mount says `rw`."""
    network: Network
    """What it may reach: HOST[:PORT], `*.suffix`, addresses; or the name of one of your networks. Default: nothing."""
    listen: Listen
    """Taken, and of no effect: programs may listen on the loopback of their own box."""
    secrets: Sequence[str]
    """Names under `secrets:` of your configuration: the program finds a placeholder for each in its environment."""
    packages: Sequence[str]
    """Packages of your index, `name` or `name==1.2`: installed once, in a box of their own, and ready to import."""
    allow_packages: Sequence[str]
    """What programs in it may install by themselves (`pip install`): names or patterns, with or without `==version`."""
    memory_layout: Layout
    """`fresh`: an address layout and hash seed of its own, which takes as long as starting an interpreter."""
    output: str | Path
    """A folder that the files of /workspace/output are copied to."""
    on_stdout: OnOutput
    on_stderr: OnOutput


def run_code(code: str, **options: Unpack[OnceOptions]) -> Execution:
    """Run Python source, or that of another language, in a fresh box. An exception in the code is in the Execution.

    Raises Unavailable if it never ran, Refused if it may not run, OutcomeUnknown if it may have run.
    """
    known(options, OnceOptions)
    return engine.waited(run_code_async, code, **options)


async def run_code_async(code: str, **options: Unpack[OnceOptions]) -> Execution:
    """`run_code`, awaited."""
    known(options, OnceOptions)
    wanted = request_of(code, options)
    return execution(
        await run_request(wanted, options.get("on_stdout"), options.get("on_stderr")), options.get("language")
    )


async def run_request(wanted: RunRequest, on_stdout: OnOutput | None, on_stderr: OnOutput | None) -> Outcome:
    """A run on the engine of this process, its output told to callbacks on the loop of the caller."""
    if on_stdout is None and on_stderr is None:
        return await engine.elsewhere(engine.engine().run(wanted, None))

    async def telling(tell: Callable[[str, Any], None]) -> Outcome:
        return await engine.elsewhere(engine.engine().run(wanted, tell))

    return await engine.with_callbacks(telling, {"stdout": on_stdout, "stderr": on_stderr})


def request_of(code: str, options: OnceOptions) -> RunRequest:
    """Raises TypeError or ValueError for options that make no sense."""
    output = options.get("output")
    return RunRequest(
        code=code,
        language=options.get("language"),
        env=options.get("envs") or {},
        limits=limits_of(options),
        inputs=inputs_of(options),
        mounts=mounts_of(options),
        network=network_of(options),
        listen=listen_of(options),
        packages=packages_of(options),
        allow_packages=packages_of(options, "allow_packages"),
        secrets=secrets_of(options),
        output=None if output is None else engine.named(output, "no_output"),
        template=options.get("template"),
        image=image_of(options),
        backend=options.get("backend"),
        layout=options.get("memory_layout"),
        metadata=options.get("metadata") or {},
    )


# ── Options ───────────────────────────────────────────────────────────────────────────────────────


def known(options: Mapping[str, Any], kind: Any) -> None:
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        raise TypeError(f"there is no option {', '.join(unknown)}; there are {', '.join(kind.__annotations__)}")


def limits_of(options: Mapping[str, Any]) -> dict[str, float | int]:
    """The limits that the options name. Raises ValueError."""
    limits = options.get("limits")
    problem = limits_problem(limits) if limits is not None else None
    if problem is not None:
        raise ValueError(problem)
    out = {name: value for name, value in asdict(limits).items() if value is not None} if limits is not None else {}
    if options.get("timeout") is not None:
        out["wall_seconds"] = seconds(options["timeout"])
    return out


def seconds(timeout: float, name: str = "timeout") -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout):
        raise ValueError(f"{name} must be a number of seconds, this is {timeout!r}")
    problem = limits_problem(Limits(wall_seconds=timeout))
    if problem is not None:
        raise ValueError(problem.replace("wall_seconds", name))
    return timeout


def inputs_of(options: Mapping[str, Any]) -> tuple[Input, ...]:
    return tuple(_input(name, given) for name, given in (options.get("inputs") or {}).items())


def image_of(options: Mapping[str, Any]) -> str | None:
    wanted = options.get("image")
    if wanted is None:
        return None
    if isinstance(wanted, Path) or str(wanted).startswith(("/", "./", "../")):
        return str(Path(wanted).resolve())
    return str(wanted)


def mounts_of(options: Mapping[str, Any]) -> tuple[Mount, ...]:
    """Raises ValueError for a mount that holds credentials without a reason, and for a link that another may have
    made on its path."""
    wanted = options.get("mounts") or ()
    if not wanted:
        return ()
    from ringfence.config.folders import declared  # noqa: PLC0415 - most mount nothing
    from ringfence.config.named_paths import resolve  # noqa: PLC0415 - as above

    if isinstance(wanted, Mapping):
        wanted = [Mount(str(host), at) for at, host in wanted.items()]
    if not all(isinstance(mount, Mount) for mount in wanted):
        raise ValueError("mounts: a mapping from where the box sees it to what it is on the host, or Mounts")
    return tuple(declared(replace(mount, host=str(resolve(Path(mount.host)))), Path()) for mount in wanted)


def network_of(options: Mapping[str, Any]) -> str | tuple[str, ...]:
    wanted = options.get("network") or ()
    return wanted if isinstance(wanted, str) else tuple(wanted)


def listen_of(options: Mapping[str, Any]) -> str | dict[str, int] | None:
    wanted = options.get("listen")
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return "allowed"
    if not isinstance(wanted, Mapping) or not wanted:
        raise TypeError("listen is True, or ports by name")
    for name, port in wanted.items():
        if not isinstance(name, str) or isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError(f"listen: {name!r}: {port!r} is not a port")
    return dict(wanted)


def packages_of(options: Mapping[str, Any], option: str = "packages") -> tuple[str, ...]:
    wanted = options.get(option) or ()
    if isinstance(wanted, str):
        raise TypeError(f"{option} is a list of names, not one text")
    return tuple(wanted)


def secrets_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    secrets = options.get("secrets")
    if isinstance(secrets, str) or not all(isinstance(name, str) for name in secrets or ()):
        raise TypeError("secrets are named in a list; their values are in the configuration's sources")
    return tuple(secrets or ())


def _input(name: str, given: bytes | str | Path | Input) -> Input:
    if isinstance(given, Input):
        return given  # the command line has looked it up
    if isinstance(given, Path):
        return Input(name, engine.named(given, "no_input"))
    return Input(name, given.encode() if isinstance(given, str) else given)
