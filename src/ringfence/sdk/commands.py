"""Commands in a sandbox, in the foreground and in the background."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from ringfence.core.box import Attached, Stream
from ringfence.core.errors import NotFound, RingfenceError, TimedOut
from ringfence.core.model import Json, Outcome
from ringfence.sdk import engine
from ringfence.sdk.client import SessionClient, call_by_engine, given
from ringfence.sdk.execution import CommandBytes, CommandResult, command_bytes, command_result, is_truncated, value
from ringfence.sdk.infos import ProcessInfo
from ringfence.sdk.once import OnOutput, known

Processes = list[ProcessInfo]
OnBytes = Callable[[bytes], object]
Put = Callable[[Stream, bytes], None]

_ENDED = {"timeout": ("timeout", 124), "exited": ("failed", None), "signalled": ("failed", None)}


class CommandOptions(TypedDict, total=False):
    """Options of a command."""

    timeout: float
    """Seconds until it is ended, also in the background."""
    envs: Mapping[str, str]
    cwd: str
    """Its working folder, absolute or relative to /workspace. Default: /workspace."""
    stdin: str | bytes
    """Its whole input. A command in the background without one takes input from `send_stdin`."""
    pty: tuple[int, int]
    """Columns and rows of a terminal for it, instead of pipes. All output is then stdout."""
    on_stdout: OnOutput | OnBytes
    on_stderr: OnOutput | OnBytes
    """Both get text, or bytes where `output` says so. For a command in the background they are called during `wait`."""


def digest(data: bytes) -> Json:
    """How the arguments of a call refer to bytes that are sent beside them."""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class AsyncCommands:
    """Commands in a sandbox."""

    def __init__(self, client: SessionClient) -> None:
        self._client = client

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        output: Literal["text"] = "text",
        **options: Unpack[CommandOptions],
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[False] = False,
        *,
        output: Literal["bytes"],
        **options: Unpack[CommandOptions],
    ) -> CommandBytes: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        background: Literal[True],
        output: Literal["text"] = "text",
        **options: Unpack[CommandOptions],
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        background: bool = False,
        output: Literal["text", "bytes"] = "text",
        **options: Unpack[CommandOptions],
    ) -> CommandResult | CommandBytes | AsyncCommandHandle:
        """Run a line of /bin/sh, or a command given as words. A command that fails is a result, not an exception.

        With `output="bytes"` stdout and stderr are bytes as they were written, also those that callbacks get.
        """
        known(options, CommandOptions)
        if output not in ("text", "bytes"):
            raise ValueError(f"output is text or bytes, not {output!r}")
        if background and output == "bytes":
            raise ValueError("a command in the background has text; write its bytes into a file, and read that")
        stdin = options.get("stdin", b"")
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        wanted = _wanted(cmd, options, stdin)
        timeout = options.get("timeout")
        if not background or timeout is not None:  # a background command may run as long as the sandbox lives
            wanted |= given(limits=self._client.step_limits(timeout))
        callbacks: dict[str, Any] = {"stdout": options.get("on_stdout"), "stderr": options.get("on_stderr")}
        result = command_bytes if output == "bytes" else command_result
        if background:
            reply = await self._client.work("run_shell", {**wanted, "background": True}, Attached(stdin=stdin))
            return AsyncCommandHandle(self._client, ProcessInfo.of(reply), callbacks)
        if not any(callbacks.values()):
            return result(await self._client.outcome("run_shell", wanted, Attached(stdin=stdin)))

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            return await self._client.outcome("run_shell", wanted, Attached(stdin=stdin, tell=tell))

        return result(await engine.with_callbacks(telling, callbacks, raw=output == "bytes"))

    async def list(self) -> Processes:
        """List the commands that were started in the background, including those that are over."""
        reply = await self._client.ask("list_processes")
        return [ProcessInfo.of(each) for each in reply["processes"]]

    async def kill(self, pid: int, signal: int = 9) -> bool:
        """Signal a background command and everything that it started. False if there is no such command."""
        try:
            await self._client.ask("stop_process", process=pid, signal=signal)
        except NotFound:
            return False
        return True

    async def connect(self, pid: int) -> AsyncCommandHandle:
        """A handle of a background command, started here or elsewhere. Raises NotFound."""
        found = next((each for each in await self.list() if each.pid == pid), None)
        if found is None:
            reply = await self._client.ask("process_output", process=pid)  # raises, in the words of the sandbox
            found = ProcessInfo(pid, (), "", bool(reply.get("running")))
        return AsyncCommandHandle(self._client, found)


def _wanted(cmd: str | Sequence[str], options: CommandOptions, stdin: bytes) -> Json:
    pty = options.get("pty")
    return given(
        command=cmd if isinstance(cmd, str) else None,
        argv=None if isinstance(cmd, str) else list(cmd),
        cwd=options.get("cwd"),
        env=dict(options.get("envs") or {}) or None,
        stdin=digest(stdin) if stdin else None,
        pty=None if pty is None else list(pty),
    )


class AsyncCommandHandle:
    """A command in the background. It runs on whether or not a handle of it exists."""

    info: ProcessInfo
    """Its state when this handle was made."""

    def __init__(
        self, client: SessionClient, info: ProcessInfo, callbacks: Mapping[str, OnOutput | None] | None = None
    ) -> None:
        self.info = info
        self._client = client
        self._callbacks = dict(callbacks or {"stdout": None, "stderr": None})
        self._seen: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._unheard: dict[str, list[str]] = {"stdout": [], "stderr": []}
        """What was seen and neither `read` nor `wait` nor an iteration has handed out yet."""
        self._reading = 0
        """How many of those are under way: each begins where the one before ended."""
        self._over = False
        self._at = {"stdout": 0, "stderr": 0}
        utf8 = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: utf8("replace") for name in self._seen}

    @property
    def pid(self) -> int:
        """Its number in the sandbox."""
        return self.info.pid

    @property
    def stdout(self) -> str:
        """All of its stdout so far, what came before this handle was made included."""
        self._look()
        return "".join(self._seen["stdout"])

    @property
    def stderr(self) -> str:
        """Its stderr, likewise."""
        self._look()
        return "".join(self._seen["stderr"])

    async def read(self) -> tuple[str, str]:
        """Its new stdout and stderr since the last read or wait, without waiting."""
        with self._going_on():
            await self._fetch()
        return self._new("stdout"), self._new("stderr")

    async def wait(
        self, timeout: float | None = None, on_stdout: OnOutput | None = None, on_stderr: OnOutput | None = None
    ) -> CommandResult:
        """Wait until it is over. Raises TimedOut if that takes longer; the command then goes on."""
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        if not any(callbacks.values()):
            callbacks = dict(self._callbacks)

        async def telling(tell: Callable[[str, Any], None]) -> Outcome:
            for stream in self._seen:
                tell(stream, self._new(stream))
            return await self._follow(lambda stream, data: tell(stream, self._take(stream, data)), timeout)

        with self._going_on():
            outcome = await engine.with_callbacks(telling, callbacks)
        reply = value(outcome)
        if reply["running"]:
            text = f"command {self.pid} of sandbox {self._client.id} still runs after {timeout} s and goes on"
            raise TimedOut("wait_timeout", f"{text}; wait again, or kill it")
        self._over = True
        return self._result(reply, outcome)

    async def __aiter__(self) -> AsyncIterator[tuple[str, str]]:
        """Yield pairs of `stdout` or `stderr` and text, as it is written, until the command is over."""
        with self._going_on():
            for stream in self._seen:
                if text := self._new(stream):
                    yield stream, text
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self) -> AsyncGenerator[tuple[str, str], None]:
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[tuple[Stream, bytes] | None] = asyncio.Queue()
        following = loop.create_task(self._follow(lambda *piece: engine.quietly(loop, heard.put_nowait, piece), None))
        following.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            while (piece := await heard.get()) is not None:
                if text := self._take(*piece):
                    yield piece[0], text
            value(following.result())
        finally:
            following.cancel()

    async def kill(self) -> bool:
        """End it with everything that it started. False if the sandbox does not know it any more."""
        return await AsyncCommands(self._client).kill(self.pid)

    async def send_stdin(self, data: str | bytes, *, eof: bool = False) -> None:
        """Write to its stdin; `eof` closes it afterwards."""
        data = data.encode() if isinstance(data, str) else data
        arguments = given(process=self.pid, data=digest(data), eof=eof or None)
        await self._client.work("send_input", arguments, Attached(data=data))

    async def resize(self, columns: int, rows: int) -> None:
        """Give its terminal another size; what runs in front is told. Raises Refused if it has none (`pty`)."""
        await self._client.work("send_input", {"process": self.pid, "pty": [columns, rows]})

    def _place(self) -> Json:
        return {"process": self.pid, "stdout_at": self._at["stdout"], "stderr_at": self._at["stderr"]}

    def _take(self, stream: Stream, data: bytes) -> str:
        """Take what came, and hand it out with all that was not handed out before."""
        self._keep(stream, data)
        return self._new(stream)

    def _keep(self, stream: Stream, data: bytes) -> None:
        self._at[stream] += len(data)
        text = self._decoders[stream].decode(data)
        self._seen[stream].append(text)
        self._unheard[stream].append(text)

    def _new(self, stream: str) -> str:
        text = "".join(self._unheard[stream])
        self._unheard[stream].clear()
        return text

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    async def _fetch(self) -> None:
        """Read what is there, without waiting for more."""
        reply = value(await self._client.outcome("process_output", self._place(), Attached(tell=self._keep)))
        self._at = {"stdout": int(reply["stdout_at"]), "stderr": int(reply["stderr_at"])}
        self._over = not reply["running"]

    def _look(self) -> None:
        """Read what is there now, for a property: its caller cannot await. The engine has a thread of its own, so this
        takes a moment and never waits for the caller's loop."""
        if self._over or self._reading or self._client.call_tool is not call_by_engine or engine.engine().here:
            return
        with self._going_on(), contextlib.suppress(RingfenceError):  # it is gone: what was seen of it stays
            engine.waited(self._fetch)

    async def _follow(self, put: Put, timeout: float | None) -> Outcome:
        arguments = {**self._place(), **given(seconds=timeout)}
        return await self._client.outcome("wait_process", arguments, Attached(tell=put))

    def _result(self, reply: Json, outcome: Outcome) -> CommandResult:
        status, code = _ENDED.get(str(reply["ended"]), ("killed", 137))
        if code is None:
            code = reply["exit_code"] if reply["exit_code"] is not None else 128 + int(reply.get("signal") or 0)
        if reply["ended"] == "exited" and code == 0:
            status = "success"
        ran = outcome.ran
        out, err = (self.stdout, self.stderr) if ran is None else (ran.report.stdout.text, ran.report.stderr.text)
        return CommandResult(out, err, code, outcome.facts, status, truncated=is_truncated(outcome))
