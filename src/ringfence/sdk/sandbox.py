"""Sandboxes from Python: boxes to live in, step by step.

    async with await AsyncSandbox.create() as sandbox:
        await sandbox.run_code("x = 6")
        print((await sandbox.run_code("x * 7")).text)

Variables, files and processes stay from one step to the next, until the sandbox is killed or its lifetime is over; also
when this process ends, for whoever connects to its id. Each step goes the governed way, and is on record. What is to
run once, in a box of its own, is for `ringfence.run_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from ringfence.box import Attached, Layout, Limits
from ringfence.errors import NotFound, RingfenceError, SandboxStopped
from ringfence.model import Json, Outcome, Status
from ringfence.sdk import engine
from ringfence.sdk.cells import cell
from ringfence.sdk.commands import AsyncCommands
from ringfence.sdk.execution import Execution, error
from ringfence.sdk.files import AsyncFiles
from ringfence.sdk.infos import SandboxInfo, SnapshotInfo, VolumeInfo
from ringfence.sdk.link import Link, Way, asked, by_engine, given
from ringfence.sdk.once import (
    Inputs,
    Listen,
    Mounts,
    Network,
    OnOutput,
    inputs_of,
    known,
    limits_of,
    listen_of,
    mounts_of,
    network_of,
    packages_of,
    seconds,
    secrets_of,
)
from ringfence.sdk.result import Result
from ringfence.sessions import VolumeMount
from ringfence.wanted import named

OnResult = Callable[[Result], object]
Infos = list[SandboxInfo]
Snapshots = list[SnapshotInfo]
Volumes = list[VolumeInfo]

_STEP_LIMITS = ("wall_seconds", "output_bytes", "capture_bytes")


class ConnectOptions(TypedDict, total=False):
    """What can be said of the way to a sandbox."""

    timeout: float
    """Run timeout: seconds for each run that says nothing else; then its work is stopped."""
    request_timeout: float
    """Seconds to wait for an answer to anything that is no run and no transfer."""


class SandboxOptions(ConnectOptions, total=False):
    """What can be said of a sandbox."""

    template: str
    """`python`, `data` (numpy, pandas, matplotlib), or one of the configuration's."""
    backend: str
    envs: Mapping[str, str]
    metadata: Mapping[str, str]
    """Words of yours; policy can see them as `args.metadata`."""
    limits: Limits
    network: Network
    """Whom it may reach: HOST[:PORT], `*.suffix`, addresses; or the name of one of your networks. Else nobody."""
    listen: Listen
    """Whether programs in it may wait for connections. Ports by name are the only ones that `get_host` can show."""
    packages: Sequence[str]
    """Packages of your index, `name` or `name==1.2`: installed once, in a box of their own, and ready to import."""
    allow_packages: Sequence[str]
    """What programs in it may install by themselves (`pip install`): names or patterns, with or without `==version`."""
    secrets: Sequence[str]
    """Names under `secrets:` of your configuration: what runs in it finds a placeholder for each in its environment."""
    mounts: Mounts
    """Folders and files of the host, by where the box sees them; read-only, unless a Mount says `rw`."""
    volumes: Mapping[str, str] | Sequence[VolumeMount]
    """Durable folders: names of volumes by where they are to be, beneath /workspace."""
    setup: str
    """Python that runs in each interpreter before its first cell; such interpreters are started by exec, not forked."""
    memory_layout: Layout
    """`fresh`: interpreters with an address layout and hash seed of their own, which take longer to start."""
    snapshot: str | SnapshotInfo
    """What to start from: the files of another sandbox, by the snapshot's id or name."""
    inputs: Inputs
    """Files for /workspace/input, which is read-only."""
    lifetime: float
    """Box lifetime: seconds until it is ended. Pauses do not count."""
    idle: float | None
    """Seconds without work until it is paused; None: never."""
    auto_resume: bool
    """Whether using it resumes it; else that is refused until somebody resumes it."""
    retain: Literal["none", "output"]
    """Of a sandbox that has ended: what is in /workspace/output, or nothing at all."""


class CodeOptions(TypedDict, total=False):
    """What can be said of one run."""

    context: str
    """One of several interpreters in the sandbox, by a name of yours, each with variables of its own."""
    timeout: float
    envs: Mapping[str, str]
    on_stdout: OnOutput
    on_stderr: OnOutput
    on_result: OnResult


class AsyncSandbox:
    """A box that stays: variables, files and processes live on from step to step. Opened when it is first used."""

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        known(options, SandboxOptions)
        inputs = inputs_of(options)
        link = Link(by_engine, {**_opening(options), **given(inputs=[named(each) for each in inputs] or None)})
        link.attached = Attached(inputs)
        link.limits = _of_step(limits_of(options))
        self._setup(link, options)
        self._metadata: Mapping[str, str] = dict(options.get("metadata") or {})

    def _setup(self, link: Link, options: ConnectOptions) -> None:
        self._link = link
        if options.get("timeout") is not None:
            link.limits = {**link.limits, "wall_seconds": seconds(options["timeout"])}
        if options.get("request_timeout") is not None:
            link.patience = seconds(options["request_timeout"], "request_timeout")
        self.commands = AsyncCommands(link)
        self.files = AsyncFiles(link)

    # ── Its life ──

    @classmethod
    async def create(cls, **options: Unpack[SandboxOptions]) -> Self:
        """A sandbox that is open.

        Raises QuotaExceeded where there is no room, NotFound for a snapshot or volume, SetUpFailed.
        """
        sandbox = cls(**options)
        await sandbox._link.open()
        return sandbox

    @classmethod
    async def connect(cls, id: str, **options: Unpack[ConnectOptions]) -> Self:
        """A sandbox that was opened elsewhere. Raises SandboxNotFound, SandboxStopped."""
        known(options, ConnectOptions)
        sandbox = cls.over(by_engine, id, options)
        info = await sandbox.info()
        sandbox._link.limits = {**_of_step(info.limits), **sandbox._link.limits}
        if info.state == "stopped":
            text = f"sandbox {id} has ended ({info.why}, {info.ended_at}); make another"
            raise SandboxStopped(Status.VALIDATION_FAILURE, "session_stopped", text)
        sandbox._metadata = dict(info.metadata)
        return sandbox

    @classmethod
    def over(cls, way: Way, id: str | None, options: SandboxOptions | ConnectOptions) -> Self:
        """A sandbox by another way than this process's own: one that is there, or one that is yet to be opened."""
        sandbox = cls(**options) if id is None else cls.__new__(cls)
        if id is None:
            sandbox._link.way = way
        else:
            sandbox._setup(Link(way, None, id=id), options)
            sandbox._metadata = {}
        return sandbox

    @classmethod
    async def list(cls, *, ended: bool = False) -> Infos:
        """Your sandboxes; where `ended`, those that ended within a day, too."""
        told = await asked(by_engine, "list_sessions", {"ended": True} if ended else {})
        return [SandboxInfo.of(each) for each in told["sessions"]]

    async def open(self) -> str:
        """Its id; it is opened, where it was not used yet."""
        return await self._link.open()

    @property
    def id(self) -> str:
        """Raises Unavailable where it was not opened yet."""
        return self._link.id

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self._metadata)

    async def info(self) -> SandboxInfo:
        """What it is like now, also when it has ended."""
        return SandboxInfo.of((await self._link.ask("list_sessions"))["sessions"][0])

    async def pause(self) -> SandboxInfo:
        """Let everything in it stand still, with our clocks; nothing is lost."""
        return SandboxInfo.of(await self._link.ask("pause_session"))

    async def resume(self) -> SandboxInfo:
        """Let it go on; what it may do is decided anew."""
        return SandboxInfo.of(await self._link.ask("resume_session"))

    async def set_lifetime(self, seconds: float) -> SandboxInfo:
        """So long to live, from now on."""
        return SandboxInfo.of(await self._link.ask("extend_session", lifetime_seconds=seconds))

    async def set_timeout(self, timeout: float) -> None:
        """The run timeout of whatever is run by this object from now on."""
        self._link.limits = {**self._link.limits, "wall_seconds": seconds(timeout)}

    async def kill(self) -> bool:
        """End it, with all that runs in it. False where this object had killed it before, or it was never opened."""
        try:
            return await self._link.kill() is not None
        except (SandboxStopped, NotFound):
            return False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    # ── Steps ──

    async def run_code(self, code: str, **options: Unpack[CodeOptions]) -> Execution:
        """Run Python in the sandbox's interpreter, which keeps its state. What it does wrong is in the Execution.

        Raises Unavailable where it never ran, Refused where it may not run, OutcomeUnknown where nobody can say.
        """
        known(options, CodeOptions)
        wanted = given(
            code=code,
            context=options.get("context"),
            env=dict(options.get("envs") or {}) or None,
            limits=self._link.step_limits(options.get("timeout")),
        )
        callbacks: dict[str, engine.Callback | None] = {"stdout": options.get("on_stdout")}
        callbacks |= {"stderr": options.get("on_stderr"), "result": options.get("on_result")}
        if not any(callbacks.values()):
            return cell(await self._link.outcome("execute_python", wanted))

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            def shown(what: Any) -> None:
                if hasattr(what, "data"):  # and not the failure, which comes with the end
                    tell("result", Result(dict(what.data), what.main, dict(what.cut)))

            return await self._link.outcome("execute_python", wanted, Attached(tell=tell, shown=shown))

        return cell(await engine.told(telling, callbacks))

    async def interrupt(self, context: str | None = None) -> bool:
        """Raise KeyboardInterrupt in what runs just now; its variables stay. False where nothing does."""
        return bool((await self._link.ask("interrupt_session", context=context))["interrupted"])

    async def get_host(self, port: int | str) -> str:
        """Where this port of the sandbox is on this machine's loopback, for your user alone: `127.0.0.1:PORT`.

        By number, or by the name that `listen` gave it. Raises Refused where the sandbox was made without `listen`.
        """
        told = await self._link.ask("expose_port", port=port)
        return f"{told['host']}:{told['port']}"

    # ── As its tools have it ──

    async def outcome(self, tool: str, arguments: Json, attached: Attached) -> Outcome:
        """One of our own tools, in this sandbox, whatever it comes to."""
        return await self._link.outcome(tool, arguments, attached)

    # ── What others can start from ──

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keep its files, environment and folder as they are, for `create(snapshot=…)`. Memory is not kept."""
        return SnapshotInfo.of(await self._link.work("snapshot_session", given(name=name)))

    async def fork(self, count: int = 1) -> Sequence[AsyncSandbox | RingfenceError]:
        """So many sandboxes that begin with the files of this one, which goes on; for each, it or why it is not."""
        told = await self._link.work("fork_session", {"count": count})
        return [self._child(each) for each in told["sessions"]]

    def _child(self, told: Json) -> AsyncSandbox | RingfenceError:
        if "error" in told:
            return error(Status.UNAVAILABLE, told["error"]["reason_code"], told["error"]["message"])
        info = SandboxInfo.of(told)
        child = AsyncSandbox.over(self._link.way, info.id, {})
        child._link.limits, child._link.patience = self._link.limits, self._link.patience
        child._metadata = dict(info.metadata)
        return child

    @classmethod
    async def snapshots(cls) -> Snapshots:
        """Your snapshots, the newest first."""
        told = await asked(by_engine, "list_snapshots", {})
        return [SnapshotInfo.of(each) for each in told["snapshots"]]

    @classmethod
    async def remove_snapshot(cls, snapshot: str | SnapshotInfo) -> None:
        """Raises NotFound."""
        await asked(by_engine, "remove_snapshot", {"snapshot": _reference(snapshot)})

    # ── What outlives them ──

    @classmethod
    async def create_volume(
        cls, name: str, max_bytes: int | None = None, mode: Literal["ro", "rw"] | None = None
    ) -> VolumeInfo:
        """A durable folder that your sandboxes can have: `create(volumes={"/workspace/data": name})`."""
        return VolumeInfo.of(await asked(by_engine, "create_volume", given(name=name, max_bytes=max_bytes, mode=mode)))

    @classmethod
    async def volumes(cls) -> Volumes:
        told = await asked(by_engine, "list_volumes", {})
        return [VolumeInfo.of(each) for each in told["volumes"]]

    @classmethod
    async def remove_volume(cls, name: str) -> None:
        """With all that is in it. Raises NotFound."""
        await asked(by_engine, "remove_volume", {"name": name})


def _opening(options: SandboxOptions) -> Json:
    """The arguments that a sandbox is opened with. Raises ValueError, Unavailable before anything is asked for."""
    snapshot, volumes = options.get("snapshot"), options.get("volumes") or ()
    if isinstance(volumes, Mapping):
        volumes = [VolumeMount(name, at) for at, name in volumes.items()]
    opening = given(
        template=options.get("template"),
        limits=limits_of(options) or None,
        env=dict(options.get("envs") or {}) or None,
        metadata=dict(options.get("metadata") or {}) or None,
        volumes=[{"name": each.name, "at": each.at, "mode": each.mode} for each in volumes] or None,
        mounts=[asdict(mount) for mount in mounts_of(options)] or None,
        packages=list(packages_of(options)) or None,
        allow_packages=list(packages_of(options, "allow_packages")) or None,
        network=_network(options),
        listen=listen_of(options),
        secrets=list(secrets_of(options)) or None,
        setup=options.get("setup"),
        memory_layout=options.get("memory_layout"),
        snapshot=None if snapshot is None else _reference(snapshot),
        lifetime_seconds=_span(options, "lifetime"),
        idle_seconds=_span(options, "idle"),
        auto_resume=options.get("auto_resume"),
        retain=options.get("retain"),
    )
    if "idle" in options and options["idle"] is None:
        opening["idle_seconds"] = None
    return opening


def _network(options: SandboxOptions) -> Any:
    wanted = network_of(options)
    return wanted if isinstance(wanted, str) else list(wanted) or None


def _of_step(limits: Json) -> Json:
    """Of all limits those that hold for one step; the others are the box's."""
    return {name: limits[name] for name in _STEP_LIMITS if limits.get(name) is not None}


def _span(options: Mapping[str, Any], name: str) -> float | None:
    found = options.get(name)
    return None if found is None else seconds(found, name)


def _reference(snapshot: str | SnapshotInfo) -> str:
    return snapshot.id if isinstance(snapshot, SnapshotInfo) else snapshot
