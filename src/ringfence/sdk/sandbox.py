"""Sandboxes from Python: boxes to live in, step by step.

    async with await AsyncSandbox.create() as sandbox:
        await sandbox.run_code("x = 6")
        print((await sandbox.run_code("x * 7")).text)

Variables, files and processes stay from one step to the next, until the sandbox is killed or its lifetime is over. They
also outlive this process: another one can connect to the sandbox by its id. Each step is a governed call, and is on
record. To run a program once, in a box of its own, use `ringfence.run_code`.

`ringfence.sdk.blocking` has the same without await; it is generated from these classes by scripts/blocking.py.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from ringfence.compose.run_request import named
from ringfence.core.box import Attached, Layout, Limits
from ringfence.core.errors import NotFound, RingfenceError, SandboxStopped
from ringfence.core.model import Json, Outcome, Status
from ringfence.core.sessions import VolumeMount
from ringfence.sdk import engine
from ringfence.sdk.client import CallTool, SessionClient, ask, call_by_engine, given
from ringfence.sdk.commands import AsyncCommands
from ringfence.sdk.execution import Execution, Result, cell, error
from ringfence.sdk.files import AsyncFiles
from ringfence.sdk.infos import CodeContext, SandboxInfo, SnapshotInfo, VolumeInfo
from ringfence.sdk.once import (
    Inputs,
    Language,
    Listen,
    Mounts,
    Network,
    OnOutput,
    image_of,
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

OnResult = Callable[[Result], object]
Contexts = list[CodeContext]
Sandboxes = list[SandboxInfo]
Snapshots = list[SnapshotInfo]
Volumes = list[VolumeInfo]

_STEP_LIMITS = ("wall_seconds", "output_bytes", "capture_bytes")


class ConnectOptions(TypedDict, total=False):
    """Options of a connection to a sandbox."""

    timeout: float
    """Run timeout: seconds for each run that names no other; then the run is stopped."""
    request_timeout: float
    """Seconds to wait for an answer to anything other than a run or a transfer."""


class SandboxOptions(ConnectOptions, total=False):
    """Options of a new sandbox."""

    template: str
    """`python`, `data` (numpy, pandas, matplotlib), or one of the configuration's."""
    image: str
    """A container image as its root: of a registry, ./PATH of an OCI layout, archive or folder, or a sha256:…"""
    backend: str
    """What makes its box, by name, or `auto`; default: what your configuration names."""
    envs: Mapping[str, str]
    metadata: Mapping[str, str]
    """Labels of your own; policy can see them as `args.metadata`."""
    limits: Limits
    network: Network
    """What it may reach: HOST[:PORT], `*.suffix`, addresses; or the name of one of your networks. Default: nothing."""
    listen: Listen
    """Whether `get_host` can show ports that programs in it listen on. If ports are named, only those."""
    packages: Sequence[str]
    """Packages of your index, `name` or `name==1.2`: installed once, in a box of their own, and ready to import."""
    allow_packages: Sequence[str]
    """What programs in it may install by themselves (`pip install`): names or patterns, with or without `==version`."""
    secrets: Sequence[str]
    """Names under `secrets:` of your configuration: its programs find a placeholder for each in their environment."""
    mounts: Mounts
    """Folders and files of the host, by where the box sees them; read-only, unless a Mount says `rw`."""
    volumes: Mapping[str, str] | Sequence[VolumeMount]
    """Durable folders: names of volumes by their path beneath /workspace."""
    setup: str
    """Python to run in each interpreter before its first cell. Such interpreters are started by exec, not forked."""
    memory_layout: Layout
    """`fresh`: interpreters with an address layout and hash seed of their own, which take longer to start."""
    snapshot: str | SnapshotInfo
    """What to start from: the files of another sandbox, by the snapshot's id or name."""
    inputs: Inputs
    """Files for /workspace/input, which is read-only; without any there is no such folder."""
    lifetime: float
    """Box lifetime: seconds until it is ended. Pauses do not count."""
    idle: float | None
    """Seconds without work until it is paused; None: never."""
    auto_resume: bool
    """Whether using it while it is paused resumes it. If not, its use is refused until `resume`."""
    retain: Literal["none", "output"]
    """What to keep of it when it has ended: the files in /workspace/output, where it made that, or nothing."""


class CodeOptions(TypedDict, total=False):
    """Options of one run."""

    context: str | CodeContext
    """An interpreter in the sandbox, by name: each name has an interpreter, with variables, of its own."""
    language: Language
    """What the code is written in. Only Python keeps state; JavaScript needs Node.js in the sandbox."""
    timeout: float
    envs: Mapping[str, str]
    on_stdout: OnOutput
    on_stderr: OnOutput
    on_result: OnResult


class AsyncSandbox:
    """A box that stays: variables, files and processes live on from step to step. Its first use opens it."""

    commands: AsyncCommands
    """Runs commands in it."""
    files: AsyncFiles
    """Reads and writes its files."""

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        known(options, SandboxOptions)
        inputs = inputs_of(options)
        client = SessionClient(
            call_by_engine, {**_opening(options), **given(inputs=[named(each) for each in inputs] or None)}
        )
        client.attached = Attached(inputs)
        client.limits = _of_step(limits_of(options))
        self._setup(client, options)
        self._metadata: Mapping[str, str] = dict(options.get("metadata") or {})

    def _setup(self, client: SessionClient, options: ConnectOptions) -> None:
        self._client = client
        if options.get("timeout") is not None:
            client.limits = {**client.limits, "wall_seconds": seconds(options["timeout"])}
        if options.get("request_timeout") is not None:
            client.patience = seconds(options["request_timeout"], "request_timeout")
        self.commands = AsyncCommands(client)
        self.files = AsyncFiles(client)

    # ── Its life ──

    @classmethod
    async def create(cls, **options: Unpack[SandboxOptions]) -> Self:
        """Open a sandbox.

        Raises QuotaExceeded if there is no room for it, NotFound for an unknown snapshot or volume, SetUpFailed.
        """
        sandbox = cls(**options)
        await sandbox._client.open()
        return sandbox

    @classmethod
    async def connect(cls, id: str, **options: Unpack[ConnectOptions]) -> Self:
        """Connect to a sandbox that was opened elsewhere, by its id. Raises SandboxNotFound, SandboxStopped."""
        known(options, ConnectOptions)
        sandbox = cls.over(call_by_engine, id, options)
        info = await sandbox.info()
        sandbox._client.limits = {**_of_step(info.limits), **sandbox._client.limits}
        if info.state == "stopped":
            text = f"sandbox {id} has ended ({info.why}, {info.ended_at}); make another"
            raise SandboxStopped(Status.VALIDATION_FAILURE, "session_stopped", text)
        sandbox._metadata = dict(info.metadata)
        return sandbox

    @classmethod
    def over(cls, call_tool: CallTool, id: str | None, options: SandboxOptions | ConnectOptions) -> Self:
        """A sandbox whose tools `call_tool` calls, not this process's engine: an open one (`id`) or a new one."""
        sandbox = cls(**options) if id is None else cls.__new__(cls)
        if id is None:
            sandbox._client.call_tool = call_tool
        else:
            sandbox._setup(SessionClient(call_tool, None, id=id), options)
            sandbox._metadata = {}
        return sandbox

    @classmethod
    async def list(cls, *, ended: bool = False) -> Sandboxes:
        """List your sandboxes; with `ended`, also those that ended within the last day."""
        reply = await ask(call_by_engine, "list_sessions", {"ended": True} if ended else {})
        return [SandboxInfo.of(each) for each in reply["sessions"]]

    async def open(self) -> str:
        """Open the sandbox, if it is not open yet, and return its id."""
        return await self._client.open()

    @property
    def id(self) -> str:
        """Its id. Raises Unavailable if it was not opened yet."""
        return self._client.id

    @property
    def metadata(self) -> Mapping[str, str]:
        """The labels that it was made with."""
        return dict(self._metadata)

    async def info(self) -> SandboxInfo:
        """Its state now, also when it has ended."""
        return SandboxInfo.of((await self._client.ask("list_sessions"))["sessions"][0])

    async def pause(self) -> SandboxInfo:
        """Freeze everything in it. Its clocks stop too, and nothing is lost."""
        return SandboxInfo.of(await self._client.ask("pause_session"))

    async def resume(self) -> SandboxInfo:
        """Let it go on after a pause. Policy decides anew what it may do."""
        return SandboxInfo.of(await self._client.ask("resume_session"))

    async def set_lifetime(self, seconds: float) -> SandboxInfo:
        """End it after so many seconds from now."""
        return SandboxInfo.of(await self._client.ask("extend_session", lifetime_seconds=seconds))

    async def set_timeout(self, timeout: float) -> None:
        """Set the run timeout of everything that this object runs from now on."""
        self._client.limits = {**self._client.limits, "wall_seconds": seconds(timeout)}

    async def kill(self) -> bool:
        """End it, with everything that runs in it. False if it was never opened, or this object killed it before.

        A RuntimeWarning says what of its volumes and outputs could not be kept.
        """
        try:
            last = await self._client.kill()
        except (SandboxStopped, NotFound):
            return False
        if last is not None and "not_kept" in last:
            from ringfence.core.invisible import visible  # noqa: PLC0415 - of use here alone

            lost = "; ".join(map(visible, last["not_kept"]))
            warnings.warn(f"sandbox {last['session']}: {lost}", RuntimeWarning, stacklevel=2)
        return last is not None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    # ── Steps ──

    async def run_code(self, code: str, **options: Unpack[CodeOptions]) -> Execution:
        """Run Python in the sandbox's interpreter, which keeps its state. An exception in the code is in the Execution.
        With `language`, run a bash or JavaScript program instead.

        Raises Unavailable if it never ran, Refused if it may not run, OutcomeUnknown if it may have run.
        """
        known(options, CodeOptions)
        language = options.get("language")
        wanted = given(
            code=code,
            language=language,
            context=None if options.get("context") is None else _context(options["context"]),
            env=dict(options.get("envs") or {}) or None,
            limits=self._client.step_limits(options.get("timeout")),
        )
        callbacks: dict[str, engine.Callback | None] = {"stdout": options.get("on_stdout")}
        callbacks |= {"stderr": options.get("on_stderr"), "result": options.get("on_result")}
        if not any(callbacks.values()):
            return cell(await self._client.outcome("execute_python", wanted), language)

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            def shown(what: Any) -> None:
                if hasattr(what, "data"):  # and not the failure, which comes with the end
                    tell("result", Result(dict(what.data), what.main, dict(what.cut)))

            return await self._client.outcome("execute_python", wanted, Attached(tell=tell, shown=shown))

        return cell(await engine.with_callbacks(telling, callbacks), language)

    async def interrupt(self, context: str | CodeContext | None = None) -> bool:
        """Raise KeyboardInterrupt in the code that runs now; variables stay. False if nothing runs."""
        wanted = None if context is None else _context(context)
        return bool((await self._client.ask("interrupt_session", context=wanted))["interrupted"])

    # ── Contexts: interpreters side by side ──

    async def create_code_context(self, name: str | None = None, cwd: str | None = None) -> CodeContext:
        """Name an interpreter for `run_code(context=…)`; it starts with its first cell, or here in the folder `cwd`."""
        context = CodeContext(name or f"context-{secrets.token_hex(4)}")
        if cwd is not None:
            entered = await self.run_code(f"__import__('os').chdir({cwd!r})", context=context)
            if entered.error is not None:
                raise NotFound(Status.FAILED, "not_found", f"{cwd}: {entered.error.value}")
        return context

    async def list_code_contexts(self) -> Contexts:
        """List the contexts that were named so far; `default` is always there."""
        return [CodeContext(name) for name in (await self.info()).contexts]

    async def restart_code_context(self, context: str | CodeContext = "default") -> bool:
        """End its interpreter, with all variables and the code that runs; the next run has a fresh one. False if it has
        none now."""
        return bool((await self._client.ask("restart_context", context=_context(context)))["ended"])

    async def remove_code_context(self, context: str | CodeContext) -> bool:
        """End its interpreter, and forget the context. False if there is no such context."""
        return bool((await self._client.ask("remove_context", context=_context(context)))["ended"])

    async def get_host(self, port: int | str) -> str:
        """Show a port of the sandbox on this machine's loopback, to your user alone; returns `127.0.0.1:PORT`.

        Name it by number, or as `listen` named it. Raises Refused if the sandbox was made without `listen`.
        """
        reply = await self._client.ask("expose_port", port=port)
        return f"{reply['host']}:{reply['port']}"

    # ── Tools ──

    async def outcome(self, tool: str, arguments: Json, attached: Attached) -> Outcome:
        """Call one of our own tools in this sandbox, and return its outcome, good or bad."""
        return await self._client.outcome(tool, arguments, attached)

    # ── Snapshots and forks ──

    async def snapshot(self, name: str | None = None) -> SnapshotInfo:
        """Keep its files, environment and working folder, for `create(snapshot=…)`. Memory is not kept."""
        return SnapshotInfo.of(await self._client.work("snapshot_session", given(name=name)))

    async def fork(self, count: int = 1) -> Sequence[AsyncSandbox | RingfenceError]:
        """Make `count` sandboxes that start with the files of this one, which goes on.

        Each is made or fails by itself: an error stands in the place of one that failed.
        """
        reply = await self._client.work("fork_session", {"count": count})
        return [self._child(each) for each in reply["sessions"]]

    def _child(self, reply: Json) -> AsyncSandbox | RingfenceError:
        if "error" in reply:
            return error(Status.UNAVAILABLE, reply["error"]["reason_code"], reply["error"]["message"])
        info = SandboxInfo.of(reply)
        child = AsyncSandbox.over(self._client.call_tool, info.id, {})
        child._client.limits = self._client.limits
        child._client.patience = self._client.patience
        child._metadata = dict(info.metadata)
        return child

    @classmethod
    async def snapshots(cls) -> Snapshots:
        """List your snapshots, the newest first."""
        reply = await ask(call_by_engine, "list_snapshots", {})
        return [SnapshotInfo.of(each) for each in reply["snapshots"]]

    @classmethod
    async def remove_snapshot(cls, snapshot: str | SnapshotInfo) -> None:
        """Remove a snapshot. Raises NotFound."""
        await ask(call_by_engine, "remove_snapshot", {"snapshot": _reference(snapshot)})

    # ── Volumes ──

    @classmethod
    async def create_volume(
        cls, name: str, max_bytes: int | None = None, mode: Literal["ro", "rw"] | None = None
    ) -> VolumeInfo:
        """Make a durable folder for your sandboxes: `create(volumes={"/workspace/data": name})`."""
        return VolumeInfo.of(
            await ask(call_by_engine, "create_volume", given(name=name, max_bytes=max_bytes, mode=mode))
        )

    @classmethod
    async def volumes(cls) -> Volumes:
        """List your volumes."""
        reply = await ask(call_by_engine, "list_volumes", {})
        return [VolumeInfo.of(each) for each in reply["volumes"]]

    @classmethod
    async def remove_volume(cls, name: str) -> None:
        """Remove a volume, with everything in it. Raises NotFound."""
        await ask(call_by_engine, "remove_volume", {"name": name})


def _opening(options: SandboxOptions) -> Json:
    """The arguments to open a sandbox with. Raises ValueError or Unavailable before any call is made."""
    snapshot = options.get("snapshot")
    volumes = options.get("volumes") or ()
    if isinstance(volumes, Mapping):
        volumes = [VolumeMount(name, at) for at, name in volumes.items()]
    opening = given(
        template=options.get("template"),
        image=image_of(options),
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
        backend=options.get("backend"),
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
    """The limits that hold for one step; all others are limits of the box."""
    return {name: limits[name] for name in _STEP_LIMITS if limits.get(name) is not None}


def _span(options: Mapping[str, Any], name: str) -> float | None:
    found = options.get(name)
    return None if found is None else seconds(found, name)


def _context(context: str | CodeContext) -> str:
    return context.id if isinstance(context, CodeContext) else context


def _reference(snapshot: str | SnapshotInfo) -> str:
    return snapshot.id if isinstance(snapshot, SnapshotInfo) else snapshot
