"""A backend whose boxes are guests of an engine, with our agent as their first process."""

from __future__ import annotations

import asyncio
import marshal
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from ringfence.core.aio import leave, shielded
from ringfence.core.box import (
    TEMPLATES,
    BoxReport,
    BoxSpec,
    FileFact,
    ImageRoot,
    Input,
    Limits,
    Mount,
    OnOutput,
    Program,
    Serve,
    SetUp,
)
from ringfence.core.errors import Unavailable, beginning
from ringfence.core.model import Json, Recheck, always
from ringfence.core.sessions import StaySpec
from ringfence.sandbox.files import guarded, inputs
from ringfence.sandbox.guests.engine import Ability, Guest, GuestEngine, GuestRoot, GuestShape
from ringfence.sandbox.guests.files import GuestPlaces
from ringfence.sandbox.guests.files_here import LentFolders
from ringfence.sandbox.guests.link import GuestGone, Link, first_words
from ringfence.sandbox.guests.outlet import GuestOutlet
from ringfence.sandbox.guests.run import GuestRun
from ringfence.sandbox.guests.staying import StayingGuest, WhatRuns
from ringfence.sandbox.process import image_root, mounting
from ringfence.sandbox.process.host.capabilities import check_spec
from ringfence.sandbox.process.limit_watch import kernel_cpu_seconds, longest_file
from ringfence.sandbox.process.outlet import PORT, NetworkOutlet
from ringfence.sandbox.process.seccomp.filter import compile_filter
from ringfence.sandbox.process.seccomp.notifications import Account, Denials

Roots = Callable[[str, ImageRoot | None], Awaitable[GuestRoot]]
"""The root of a template, or of an image. Raises Unavailable."""
_SHIPPED = (
    "process.zygote.kernel",
    "process.zygote.landlock",
    "process.zygote.machine",
    "guests.harden",
    "guests.counting",
    "guests.own_kernel",
    "guests.passage",
    "guests.agent",
    "guests.agent_staying",
    "guests.agent_disk",
    "guests.agent_files",
    "guests.agent_watch",
)
"""Modules that run in a guest, each after those that it needs."""
_NO_SETUP = SetUp()
_NO_SETUPS: Mapping[str, SetUp] = MappingProxyType({})
_SANDBOX = Path(__file__).parents[1]
_BOOT_SECONDS = 60.0
_BESIDES = 4
"""The limit of a user, above that of the guest: whoever counts for the whole guest is to say no first."""
_SIGNALS = 4096
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/user",
    "TMPDIR": "/workspace/tmp",
    "LANG": "C.UTF-8",
    "USER": "box",
    "LOGNAME": "box",
    "TERM": "xterm-256color",
}


class GuestBackend:
    """Boxes that are guests."""

    def __init__(
        self,
        engine: GuestEngine,
        roots: Roots,
        templates: Mapping[str, tuple[str, ...]] = TEMPLATES,
        setups: Mapping[str, SetUp] = _NO_SETUPS,
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._templates = templates
        self._setups = setups
        self._staying: set[StayingGuest] = set()
        self._guests: set[Guest] = set()
        self._finding = asyncio.Lock()
        self._found: dict[str | Path, GuestRoot] = {}

    @property
    def name(self) -> str:
        return self._engine.name

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        check_spec(spec, self._templates)
        if spec.inputs or spec.output is not None:
            inputs.check_inputs(spec.inputs, spec.output)
        runs: list[GuestRun] = []
        with beginning("the box", lambda: any(run.ordered for run in runs)):
            await self._engine.open()
            self._check(spec)
            root = await self._root(spec)
            return await self._run(spec, root, tell, recheck, runs)

    async def _run(
        self, spec: BoxSpec, root: GuestRoot, tell: OnOutput | None, recheck: Recheck, runs: list[GuestRun]
    ) -> BoxReport:
        given: Path | None = None
        placed = mounting.place(spec.mounts) if spec.mounts else ()
        before = guarded.look(spec.mounts, mounting.held(placed)) if spec.mounts else None
        facts: tuple[FileFact, ...] = ()
        guest: Guest | None = None
        outlet: NetworkOutlet | None = None
        try:
            if spec.inputs:
                given, facts = await asyncio.to_thread(_put, spec.inputs)
            guest = await self._engine.start(GuestShape(root, spec.limits, given, _mounts(spec), placed))
            self._guests.add(guest)
            await self._boot(guest, spec, root)
            isolation = self._isolation(guest, spec)
            env = dict(spec.env)
            if spec.packages:
                env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), *map(str, spec.packages))))
            if spec.network is not None:
                outlet = await GuestOutlet.of(guest, spec.network)
                env = {**outlet.env, **env}
            await recheck()
            link = guest.link
            assert link is not None
            denials = Denials(link.given[0] if link.given else None, Account(spec.limits.memory_bytes))
            run = GuestRun(guest, link, spec, root, tell, denials)
            runs.append(run)
            try:
                report = await run.to_the_end(env, facts)
            except asyncio.CancelledError as cancelled:
                leave(cancelled, BoxReport("cancelled", isolation=isolation, inputs=facts))
                raise
        finally:
            if outlet is not None:
                await outlet.close()
            if guest is not None:
                await shielded(asyncio.ensure_future(self._remove(guest)))
            if given is not None:
                await asyncio.to_thread(shutil.rmtree, given, ignore_errors=True)
        network = outlet.final_facts if outlet is not None else None
        planted = () if before is None else guarded.planted_since(spec.mounts, before)
        return replace(report, isolation=isolation, network=network, planted=planted, trouble=tuple(guest.trouble))

    # ── Boxes that stay ──

    async def open(self, spec: StaySpec, network: Serve | None = None) -> StayingGuest:
        """A box that stays until it is ended. Raises ValueError, Unavailable."""
        as_run = _as_run(spec, network)
        check_spec(as_run, self._templates)
        inputs.check_inputs(spec.inputs, None)
        with beginning("the box"):
            await self._engine.open()
            self._engine.abilities.require(self.name, "staying")
            self._check_filled_later(spec)
            self._check(as_run, stays=True)
            root = await self._root(as_run)
            return await self._open(spec, as_run, root)

    def _check_filled_later(self, spec: StaySpec) -> None:
        """Raises Unavailable for folders that programs cannot write to and that are filled once the guest is there,
        where that sees no folder of this host as it is."""
        if "writable_mounts" in self._engine.abilities.given:
            return
        asked = {
            "volumes that they may only read": any(folder.mode == "ro" for folder in spec.folders),
            "the inputs of a snapshot": spec.has_input,
        }
        lacking = [what for what, wanted in asked.items() if wanted]
        if lacking:
            text = f"backend {self.name} cannot give boxes {', '.join(lacking)}; backend process can"
            raise Unavailable("not_supported", text)

    async def _open(self, spec: StaySpec, as_run: BoxSpec, root: GuestRoot) -> StayingGuest:
        setup = self._setups.get(spec.template, _NO_SETUP) if spec.root is None else _NO_SETUP
        given = (*(Input(name, Path(host), links=True) for name, host in setup.files.items()), *spec.inputs)
        placed = mounting.place(spec.mounts) if spec.mounts else ()
        folder: Path | None = None
        lent = LentFolders()
        given_at: int | None = None
        guest: Guest | None = None
        outlet: NetworkOutlet | None = None

        async def remove() -> None:
            if given_at is not None:
                os.close(given_at)
            if guest is not None:
                await shielded(asyncio.ensure_future(self._remove(guest)))
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            await asyncio.to_thread(lent.remove)

        try:
            if given or spec.has_input:
                folder, _ = await asyncio.to_thread(_put, given)
            mounts = (*_mounts(as_run), *lent.make(folder.at for folder in spec.folders if folder.mode == "ro"))
            own = tuple(folder for folder in spec.folders if folder.mode == "rw")
            limited = "folders" in self._engine.abilities.given
            shape = GuestShape(root, spec.limits, folder, mounts, placed, own if limited else (), stays=True)
            guest = await self._engine.start(shape)
            self._guests.add(guest)
            await self._boot(guest, as_run, root, stays=True)
            if as_run.network is not None:
                outlet = await GuestOutlet.of(guest, as_run.network)
            link = guest.link
            assert link is not None
            env = {**(outlet.env if outlet is not None else {}), **setup.env, **spec.env}
            if spec.packages:
                env["PYTHONPATH"] = ":".join(filter(None, (env.get("PYTHONPATH"), *map(str, spec.packages))))
            lacking = image_root.lacks_cells(spec.image) if spec.root is not None else ""
            setups = tuple(source for source in (setup.source, spec.setup) if source)
            if folder is not None:
                given_at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            places = _places(guest, spec.limits, given_at, lent.descriptors)
            runs = WhatRuns(root, env, spec.limits, places, setups, lacking or None)
            isolation = self._isolation(guest, as_run)
            if own and not limited:
                isolation["volumes"] = {"limit": "when they are saved"}
            if spec.setup is not None:
                isolation["template"] = {"setup": "user", "started": "exec"}
            account = Account(spec.limits.memory_bytes)
            denials = Denials(link.given[0] if link.given else None, account)
            box = StayingGuest(guest, link, runs, isolation, (denials, account), outlet, remove)
        except BaseException as problem:
            if outlet is not None:
                await outlet.close()
            await remove()
            if isinstance(problem, GuestGone):
                raise Unavailable("no_box", f"the box was gone before anything ran: {problem}") from None
            raise
        box.mounted = mounting.held(placed)
        self._staying.add(box)
        guest.ended.add_done_callback(lambda _: self._staying.discard(box))
        return box

    async def close(self) -> None:
        for box in list(self._staying):
            await box.end()
        for guest in list(self._guests):
            await self._remove(guest)
        await self._engine.close()

    async def _remove(self, guest: Guest) -> None:
        await guest.remove()
        if guest.link is not None:
            for descriptor in guest.link.given:
                os.close(descriptor)
            guest.link.given = []
        self._guests.discard(guest)

    # ── What guests are made of ──

    def _check(self, spec: BoxSpec, *, stays: bool = False) -> None:
        """Raises Unavailable for what this backend cannot give: it never gives less instead; ValueError for what no box
        with an image has."""
        setup = self._setups.get(spec.template)
        asked = {
            "named programs": spec.programs is not None,
            "installs by programs": spec.installs,
            "that run one program of a template with set-up": setup is not None and spec.root is None and not stays,
        }
        lacking = [what for what, wanted in asked.items() if wanted]
        if lacking:
            text = f"backend {self.name} cannot give boxes {', '.join(lacking)} yet; backend process can"
            raise Unavailable("not_supported", text)
        wanted: dict[Ability, object] = {
            "network": spec.network,
            "mounts": spec.mounts or spec.trees or spec.packages,
            "writable_mounts": any(each.mode == "rw" for each in spec.mounts),
            "images": spec.root or spec.image,
        }
        for ability, value in wanted.items():
            if value:
                self._engine.abilities.require(self.name, ability)
        if spec.root is not None:
            image_root.check(spec, spec.root)
        if spec.mounts:
            mounting.check(spec.mounts, map(os.path.realpath, (*spec.trees, *spec.packages)))

    async def _root(self, spec: BoxSpec) -> GuestRoot:
        """Found once: looking whether the host is still the same takes longer than a box."""
        image = spec.image
        if image is None and spec.root is not None:
            image = ImageRoot(spec.root, spec.root.name, "")
        found = spec.template if image is None else image.folder
        async with self._finding:
            if found not in self._found:
                self._found[found] = await self._roots(spec.template, image)
        return self._found[found]

    async def _boot(self, guest: Guest, spec: BoxSpec, root: GuestRoot, *, stays: bool = False) -> None:
        """Start the agent. Raises Unavailable."""
        limits = spec.limits
        cpu = kernel_cpu_seconds(limits)
        hardens = guest.hardens or {}
        unprivileged, own_kernel = bool(hardens.get("unprivileged")), bool(hardens.get("own_kernel"))
        apart = stays and _is_apart(guest)
        told: Json = {
            "python": root.agent,
            "env": {**_ENV, "TMPDIR": "/tmp"} if apart else _ENV,  # noqa: S108 - in the guest
            "output": "/workspace/output",
            "folders": [] if apart else ["/workspace/tmp"] if stays else ["/workspace/output", "/workspace/tmp"],
            "limits": {
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_FSIZE": longest_file(limits),
                # Without a user namespace of its own, the kernel counts those of other guests, too.
                **({} if unprivileged else {"RLIMIT_NPROC": limits.processes + (-1 if own_kernel else _BESIDES)}),
                # The kernel counts queues for all of the guest's user, and programs can open none; one of its own may
                # know neither limit.
                **({} if own_kernel else {"RLIMIT_MSGQUEUE": 0, "RLIMIT_SIGPENDING": _SIGNALS}),
                **({"RLIMIT_CPU": cpu} if cpu else {}),
            },
            "harden": {**hardens, "apart": True} if apart else guest.hardens,
            "hand_over": guest.hands_over,
            "listen": PORT if spec.network is not None and guest.hands_over else 0,
        }
        given = (1 + (spec.network is not None)) if guest.hands_over else 0
        machine = hardens.get("machine") or os.uname().machine
        first = first_words(
            agent_code(), told, compile_filter(machine, notify=guest.hands_over or bool(hardens.get("notify")))
        )
        try:
            async with asyncio.timeout(_BOOT_SECONDS):
                link = guest.link = await Link.over(guest.stream, first, settle=guest.settle, given=given)
                await link.ready()
        except (GuestGone, TimeoutError):
            guest.kill()
            async with asyncio.timeout(_BOOT_SECONDS):
                why = await asyncio.shield(guest.ended)
            raise Unavailable("no_box", f"the box could not be started: {why}") from None
        guest.look()
        self._check_protections(guest)

    def _check_protections(self, guest: Guest) -> None:
        """Raises Unavailable where the kernel of this host says that its programs are held by less than they must be.
        Elsewhere a kernel of the guest's own holds them, or its engine is believed."""
        protections = guest.isolation["protections"] if self._engine.level == "process" else {}
        for name in _NEEDED:
            fact = protections.get(name)
            if fact is not None and fact["verified"] == "run" and fact["on"] is False:
                raise Unavailable("no_box", f"the box was not started: its protection {name} is not on")

    def _isolation(self, guest: Guest, spec: BoxSpec) -> Json:
        fact = {"backend": self.name, "level": self._engine.level, "memory_layout": "fresh", **guest.isolation}
        if guest.link is None or not guest.link.given:  # nobody tells us of them
            fact["refused_calls"] = "not counted"
        if spec.root is not None:
            fact["root"] = "image"
        if spec.image is not None:
            fact["image"] = {"name": spec.image.name, "digest": spec.image.digest}
        if spec.mounts:
            fact["mounts"] = [{"at": each.at, "mode": each.mode} for each in spec.mounts]
        return fact


def _is_apart(guest: Guest) -> bool:
    """Whether its folders for temporary files and for its user lie beside its workspace where it stays, as in every box
    that stays: its agent can arrange that where it begins with the rights to mount."""
    return "temporary" in (guest.hardens or {})


def _places(guest: Guest, limits: Limits, given: int | None, lent: Mapping[str, int]) -> GuestPlaces:
    if not _is_apart(guest):
        return GuestPlaces(limits, stays=("/workspace/tmp",), input=given, has_input=given is not None, lent=lent)
    temporary = "/tmp"  # noqa: S108 - in the guest
    kept = ("/workspace", temporary, "/home/user")
    return GuestPlaces(limits, kept=kept, temporary=temporary, input=given, has_input=given is not None, lent=lent)


def _put(given: Sequence[Input]) -> tuple[Path, tuple[FileFact, ...]]:
    """The inputs in a folder of the host, which the guest sees."""
    folder = Path(tempfile.mkdtemp(prefix="ringfence-input-"))
    folder.chmod(0o755)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return folder, inputs.put_inputs(descriptor, tuple(given))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _as_run(spec: StaySpec, network: Serve | None) -> BoxSpec:
    """Raises ValueError for what no box has."""
    program = Program("python", (spec.setup or "").encode())
    if spec.root is not None:
        program = image_root.COMMANDS
        if spec.setup is not None and (lacks := image_root.lacks_cells(spec.image)):
            raise ValueError(f"set-up code cannot run: {lacks}")
    return BoxSpec(
        program,
        spec.limits,
        layout="fresh",
        trees=spec.trees,
        template=spec.template,
        tenant=spec.tenant,
        mounts=spec.mounts,
        packages=spec.packages,
        installs=spec.installs,
        listening=spec.listening,
        root=spec.root,
        image=spec.image,
        network=network,
    )


def _mounts(spec: BoxSpec) -> tuple[Mount, ...]:
    """Everything of the host that it sees besides its root."""
    lent = dict.fromkeys(os.path.realpath(each) for each in (*spec.trees, *spec.packages))
    return (*spec.mounts, *(Mount(each, each) for each in lent))


_NEEDED = ("seccomp", "no_new_privs", "capabilities")
"""Without one of these programs do not run."""


@cache
def agent_code(*, compiled: bool = True) -> bytes:
    """The agent, for an interpreter of the same version as this one, or for any."""
    packages = ("ringfence", "ringfence.sandbox", "ringfence.sandbox.process", "ringfence.sandbox.process.zygote")
    parts: list[tuple[str, object]] = [(name, b"") for name in (*packages, "ringfence.sandbox.guests")]
    for name in _SHIPPED:
        source = _SANDBOX.joinpath(*name.split(".")).with_suffix(".py").read_bytes()
        whole = f"ringfence.sandbox.{name}"
        code = compile(source, f"<{whole}>", "exec", dont_inherit=True) if compiled else source
        parts.append((whole, code))
    return marshal.dumps(parts)
