"""The `process` backend: no container engine, no root needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ringfence.core.aio import begun, call_when_done, leave
from ringfence.core.box import (
    CAN_DO_WITHOUT,
    TEMPLATES,
    TEMPLATES_NEED,
    BoxReport,
    BoxSpec,
    Input,
    Limits,
    OnOutput,
    Program,
    Programs,
    Serve,
    SetUp,
)
from ringfence.core.errors import Unavailable, beginning
from ringfence.core.model import Json, Recheck, always
from ringfence.core.sessions import StaySpec
from ringfence.core.system import interpreter
from ringfence.sandbox.files import guarded, inputs
from ringfence.sandbox.process.baseline import INSTALLED, Baseline
from ringfence.sandbox.process.box import Box
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, GroupPool, sweep
from ringfence.sandbox.process.cgroups.hierarchy import Systemd
from ringfence.sandbox.process.host import capabilities, remembered
from ringfence.sandbox.process.limit_watch import kernel_cpu_seconds, longest_file
from ringfence.sandbox.process.pool import BoxPool
from ringfence.sandbox.process.run import ProgramRun, read_at_start
from ringfence.sandbox.process.zygote.confine import Shape

if TYPE_CHECKING:
    from ringfence.sandbox.process.live import LiveBox
    from ringfence.sandbox.process.outlet import NetworkOutlet

# ruff: noqa: PLC0415 - most boxes have no mounts, no network and no image; what only some need is loaded for those
log = logging.getLogger(__name__)

_NO_SETUP = SetUp()
_NO_SETUPS: Mapping[str, SetUp] = MappingProxyType({})
_NO_WARMUPS: Mapping[str, str] = MappingProxyType({})
_WARMUP_CPU_SECONDS = 60
"""The kernel counts all processor time of a process; what it used before its program came is not the program's."""
_TEST_SECONDS = (30.0, 600.0)
"""How long the box of the self-test may take; a machine that is too slow for the first gets the second."""
_REAP_SECONDS = 10.0
_SPARE_SECONDS = 0.05
"""The next box that stays is made after that time, when the one that was opened has had its first step."""


class ProcessBackend:
    """Boxes made of namespaces, Landlock, seccomp and control groups, forked from zygotes."""

    name = "process"

    def __init__(
        self,
        *,
        accept_missing: Sequence[str] = (),
        templates: Mapping[str, tuple[str, ...]] = TEMPLATES,
        setups: Mapping[str, SetUp] = _NO_SETUPS,
        warmups: Mapping[str, str] = _NO_WARMUPS,
        without: Sequence[str] = (),
        depth: int | None = None,
        state: Path | None = None,
    ) -> None:
        """`warmups`: by template, source of ours that each box runs before it is ready. `without` leaves confinement
        steps out, for tests that each is needed; facts and `doctor` report it. `depth`: boxes of a kind that are kept
        ready. `state`: a folder that is its owner's, where the self-test is remembered.
        """
        self._accepted = tuple(accept_missing)
        self._templates = templates
        self._setups = setups
        self._warmups = warmups
        self._without = tuple(without)
        self._cgroups: Cgroups | None = None
        self._depth = depth
        self._state = state
        self._pool: BoxPool | None = None
        self._host: capabilities.HostCapabilities | None = None
        self._tested: capabilities.Tested | None = None
        """The result of the self-test; until then no other program gets a box."""
        self._untested: capabilities.Tested | None = None
        self._opening = asyncio.Lock()
        self._made = 0
        self._inherited: list[str] = []
        self._groups: GroupPool | None = None
        self._running: dict[int, ProgramRun] = {}
        self._live: set[LiveBox] = set()
        self._removing: dict[int, asyncio.Task[None]] = {}
        self._isolations: dict[tuple[object, ...], Json] = {}

    # ── The port ──

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        capabilities.check_spec(spec, self._templates)
        if spec.inputs or spec.output is not None:
            inputs.check_inputs(spec.inputs, spec.output)
        setup = self._setups.get(spec.template, _NO_SETUP)
        if spec.program.kind == "python" and read_at_start(spec.env, setup.env):
            spec = replace(spec, layout="fresh")
        runs: list[ProgramRun] = []
        with beginning("the box", lambda: any(run.ordered for run in runs)):
            await self._open()
            return await self._run(spec, tell, runs.append, recheck)

    async def _run(
        self,
        spec: BoxSpec,
        tell: OnOutput | None = None,
        made: Callable[[ProgramRun], object] = lambda _: None,
        recheck: Recheck = always,
    ) -> BoxReport:
        assert self._pool is not None
        if spec.network is not None:
            _check_namespace(self._without)
        pool = self._pool
        baseline = self._baseline(spec)
        limits = spec.limits
        setup = self._setups.get(spec.template, _NO_SETUP)
        if spec.programs is not None:
            baseline = await self._with_programs(baseline, spec.programs)
        if baseline.packages:
            spec = replace(spec, env=_with_packages(baseline.packages, {**setup.env, **spec.env}))
        elif setup.env:
            spec = replace(spec, env={**setup.env, **spec.env})
        if setup.files:
            files = (Input(name, Path(host), links=True) for name, host in setup.files.items())
            spec = replace(spec, inputs=(*files, *spec.inputs))
        shape = self._shape(limits)
        if baseline.mounts:
            shape["mounts"] = [mount.shape for mount in baseline.mounts]
        if baseline.programs is not None:
            shape["noexec"] = "noexec" not in self._without
            if "execute" not in self._without:
                shape["executable"] = list(baseline.programs.executable)
        if baseline.warmup and shape["cpu_seconds"]:
            shape["cpu_seconds"] += _WARMUP_CPU_SECONDS
        box = await pool.take(baseline, limits, shape)
        box.warmed = bool(baseline.warmup)
        self._look_at_root(box, baseline)
        self._inherited = box.inherited
        run = ProgramRun(box, spec, str(interpreter()), partial(self._isolation, box, spec), tell)
        made(run)
        self._running[id(run)] = run
        outlet: NetworkOutlet | None = None
        try:
            before = guarded.look(spec.mounts, _held(baseline)) if spec.mounts else None
            if not baseline.uses_host_mounts:  # a mount is for the moment, so no box is kept ready with one
                call_when_done(box.left, partial(pool.refill, baseline, limits, box.ended))
            if spec.installs:
                inputs.make_folder(box.descriptors["workspace"], f"tmp/{INSTALLED}", box.host_id)
            if spec.network is not None:
                outlet = await _open_outlet(box, spec.network)
                run.spec = replace(spec, env={**outlet.env, **spec.env})
            await recheck()
            report = await run.to_the_end()
        finally:
            await self._finish_removal(run, outlet)
        if report.ended == "infra" and not box.begun:
            raise Unavailable("no_box", "the box ended before the program began: " + ("; ".join(box.trouble) or "?"))
        report = _complete(report, run, baseline, before, outlet)
        if run.cancelled is not None:  # what it did until then is as much on record as of any other
            leave(run.cancelled, report)
            raise run.cancelled
        return report

    @property
    def counts_memory(self) -> bool:
        """Whether a control group counts the memory of its boxes; known once one has run."""
        return self._counts("memory")

    async def warm(self, spec: BoxSpec) -> None:
        """Have boxes for specs like this one ready. Raises Unavailable."""
        capabilities.check_spec(spec, self._templates)
        await self._open()
        assert self._pool is not None
        limits = _of_the_box(spec.limits)
        await self._pool.fill(self._baseline(spec), limits, self._shape(limits))

    def weaker(self) -> tuple[str, ...]:
        """Which limits the kernel does not hold here, and what to do about it."""
        lacking: dict[str, list[str]] = {}
        for name, why in (self._cgroups.why if self._cgroups is not None else {}).items():
            if name in capabilities.MEANS:
                lacking.setdefault(why, []).append(f"{name} by {capabilities.MEANS[name]}")
        return tuple(
            f"limits that no control group holds, and that are therefore weaker: {', '.join(names)} ({why})"
            for why, names in lacking.items()
        )

    async def open(self, spec: StaySpec, network: Serve | None = None) -> LiveBox:
        """A box that stays until it is ended. Raises ValueError, Unavailable."""
        # A fork would run the user's code among all that is ready.
        by_exec = spec.layout == "fresh" or spec.setup is not None
        if spec.image is not None:
            by_exec = spec.image.python != ""
        elif spec.root is None and read_at_start(spec.env, self._setups.get(spec.template, _NO_SETUP).env):
            by_exec = True
        program = Program("python", (spec.setup or "").encode())
        if spec.root is not None:
            from ringfence.sandbox.process import image_root

            program = image_root.COMMANDS
            if spec.image is not None and spec.setup is not None and (lacks := image_root.lacks_cells(spec.image)):
                raise ValueError(f"set-up code cannot run: {lacks}")
        as_run = BoxSpec(
            program,
            spec.limits,
            layout="fresh" if by_exec else "shared",
            trees=spec.trees,
            template=spec.template,
            tenant=spec.tenant,
            mounts=spec.mounts,
            packages=spec.packages,
            installs=spec.installs,
            listening=spec.listening,
            root=spec.root,
            image=spec.image,
        )
        capabilities.check_spec(as_run, self._templates)
        if spec.inputs:
            inputs.check_inputs(spec.inputs, None)
        if network is not None:
            _check_namespace(self._without)
        with beginning("the box"):
            return await self._open_live(spec, as_run, network, by_exec=by_exec)

    async def _open_live(self, spec: StaySpec, as_run: BoxSpec, network: Serve | None, *, by_exec: bool) -> LiveBox:
        await self._open()
        assert self._pool is not None
        setup = self._setups.get(spec.template, _NO_SETUP)
        source = "" if spec.root is not None else setup.source  # else it would run in ours
        baseline = replace(self._baseline(as_run), stays=True, setup=source)
        given = (*(Input(name, Path(host), links=True) for name, host in setup.files.items()), *spec.inputs)
        shape = self._shape(spec.limits)
        shape["mounts"] = [mount.shape for mount in baseline.mounts]
        shape["folders"] = [[folder.at, folder.max_bytes, folder.mode == "ro"] for folder in spec.folders]
        shape["places"] = list(baseline.places)
        shape["input"] = bool(given) or spec.has_input
        live = await self._make_live(baseline, as_run, shape, network)
        box = live.box
        live.mounted = _held(baseline)
        live.env = {**(live.outlet.env if live.outlet is not None else {}), **setup.env, **spec.env}
        if spec.packages or (by_exec and baseline.packages):
            live.env = _with_packages(baseline.packages, live.env)
        if by_exec:
            path = str(interpreter()) if spec.image is None else spec.image.python
            live.exec_interpreters(path, (setup.source, spec.setup), spec.limits, spec.image)
        if spec.root is not None:
            from ringfence.sandbox.process import image_root

            live.lacks_interpreter = image_root.lacks_cells(spec.image)
        self._live.add(live)
        box.ended.add_done_callback(lambda _: self._live.discard(live))
        try:
            if spec.installs:
                inputs.make_folder(box.descriptors["disk"], f"{baseline.home[1:]}/{INSTALLED}", box.host_id)
            if given:
                inputs.put_inputs(box.descriptors["input"], given, box.host_id)
        except BaseException:
            await live.end()
            raise
        return live

    async def _make_live(self, baseline: Baseline, spec: BoxSpec, shape: Shape, network: Serve | None) -> LiveBox:
        """Take a box that is ready, or make one. Raises Unavailable."""
        assert self._pool is not None
        limits = _of_the_box(spec.limits)
        if shape["folders"] or shape["input"] or baseline.uses_host_mounts:
            zygote, box = await self._pool.spawn(baseline, limits, shape)
            self._look_at_root(box, baseline)
        else:
            zygote, box = await self._pool.stay(baseline, limits, shape)
            asyncio.get_running_loop().call_later(_SPARE_SECONDS, self._pool.refill, baseline, limits)
        from ringfence.sandbox.process.live import LiveBox

        live = LiveBox(box, zygote, shape, self._isolation(box, spec, None, stays=True))
        try:
            if network is not None:
                live.outlet = await _open_outlet(box, network)
            live.adopt_first_worker()
        except BaseException:
            box.kill()
            box.ended.add_done_callback(lambda _: box.remove())
            if live.outlet is not None:
                await live.outlet.close()
            raise
        return live

    async def drain(self) -> None:
        """End the boxes that are kept ready."""
        if self._pool is not None:
            await self._pool.drain()

    async def close(self) -> None:
        for live in list(self._live):
            await live.end()
        for run in self._running.values():
            run.stop("cancelled", None)
        most = max((run.box.pace.allow(_REAP_SECONDS) for run in self._running.values()), default=_REAP_SECONDS)
        async with asyncio.timeout(most):
            while self._running:
                await asyncio.sleep(0.002)
        if self._groups is not None:
            self._groups.close()
        if self._pool is not None:
            await self._pool.close()
            self._pool = self._tested = None
        await self._groups_removed()

    async def _groups_removed(self) -> None:
        """Wait for the control groups whose last processes are still ending; the next start sweeps the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_SECONDS):
                while self._groups is not None and not self._groups.remove_leaving():
                    await asyncio.sleep(0.01)

    # ── The end of a box ──

    async def _finish_removal(self, run: ProgramRun, outlet: NetworkOutlet | None) -> None:
        # A task of its own: the caller may cancel us again and again, and the box must be gone all the same.
        removing = self._removing[id(run)] = begun(self._remove(run.box, outlet))
        if removing.done():
            self._forget(run)
            return
        removing.add_done_callback(lambda _: self._forget(run))
        await asyncio.shield(removing)

    def _forget(self, run: ProgramRun) -> None:
        del self._running[id(run)], self._removing[id(run)]

    async def _remove(self, box: Box, outlet: NetworkOutlet | None = None) -> None:
        try:
            if outlet is not None:
                await outlet.close()
            if not box.ended.done():
                box.kill()
                async with asyncio.timeout(box.pace.allow(_REAP_SECONDS)):
                    await asyncio.shield(box.ended)
        except TimeoutError:
            box.trouble.append("the box did not end when it was killed; its slot is not used again")
            log.error("a box did not end when it was killed (process %d)", box.first)
            return
        if not box.remove():
            log.error("a box could not be removed: %s", "; ".join(box.trouble))

    # ── What boxes are made of ──

    async def _open(self) -> None:
        """Raises Unavailable where this host lacks a protection that was not given up."""
        if self._tested is not None:
            return
        async with self._opening:
            if self._tested is not None:
                return
            if self._pool is None:
                self._host = capabilities.HostCapabilities.detect()
                self._host.require(self._accepted)
                # In a thread: systemd may have to be asked for a group.
                self._cgroups = await asyncio.to_thread(Cgroups.detect, manager=Systemd())
                for left in sweep(self._cgroups):
                    log.info("removed what a dead supervisor left: %s", left)
                self._groups = GroupPool(self._cgroups)
                self._pool = BoxPool(self._groups, self._depth)
            self._tested = await self._test_once()

    async def _test_once(self) -> capabilities.Tested:
        """The result of a self-test that still holds; or else the test is made now, and kept. Raises Unavailable."""
        if self._state is None or self._without or self._accepted:
            return await capabilities.explained(self._test())
        counted = sorted(self._cgroups.available) if self._cgroups is not None else []
        grounds = remembered.grounds(counted)
        tested = remembered.recall(self._state, grounds)
        if tested is None:
            tested = await capabilities.explained(self._test())
            remembered.keep(self._state, grounds, tested)
        return tested

    async def _test(self) -> capabilities.Tested:
        """Look at a box before the first program is let into one."""
        from ringfence.sandbox.process import selftest

        assert self._host is not None
        left_out = frozenset({*self._without, *(name for name in self._accepted if name in self._host.missing)})
        self._untested = capabilities.Tested({}, "", left_out)
        for seconds in _TEST_SECONDS:
            spec = BoxSpec(Program("python", source=selftest.PROGRAM), Limits(wall_seconds=seconds))
            report = await self._run(spec)
            if report.ended != "timeout":
                break
        if self._without:
            with contextlib.suppress(Unavailable):  # it may need just what was left out
                return selftest.tested(report, self._inherited, left_out, capabilities.PROTECTIONS)
            return capabilities.Tested({}, "", left_out)
        given_up = left_out.union(name for name in self._accepted if name in CAN_DO_WITHOUT)
        return selftest.tested(report, self._inherited, left_out, given_up)

    def _look_at_root(self, box: Box, baseline: Baseline) -> None:
        """A root that is an image was not looked at by the self-test. Raises Unavailable."""
        if baseline.image is None:
            return
        from ringfence.sandbox.process import image_root, selftest

        found = image_root.look(box.worker, baseline.mounts)
        if lacking := selftest.lacking(found, baseline.without):
            box.kill()
            box.ended.add_done_callback(lambda _: box.remove())
            raise Unavailable("self_test", f"a box with this image as its root lacks {lacking}")
        box.isolation |= {name: look.on for name, look in found.items()}

    def _baseline(self, spec: BoxSpec) -> Baseline:
        assert self._host is not None
        trees = tuple(sorted(map(str, spec.trees)))
        if spec.root is not None:
            from ringfence.sandbox.process import image_root

            image_root.check(spec, spec.root)
        preload = self._templates[spec.template]
        packages = (*(_packages() if preload else ()), *map(os.path.realpath, spec.packages))
        if spec.template in TEMPLATES_NEED:
            _check_installed(spec.template, preload, packages)
        trees = tuple(sorted({*trees, *packages}))
        left_out = {*self._without, *(name for name in self._accepted if name in self._host.missing)}
        if not self._counts("memory"):
            left_out.add("memfd")  # nothing else would see it
        baseline = Baseline(spec.tenant, spec.template, preload, trees, tuple(sorted(left_out)), packages)
        if spec.template in self._warmups:
            baseline = replace(baseline, warmup=self._warmups[spec.template])
        if spec.installs:
            baseline = replace(baseline, installs=True)
        if spec.root is not None:
            baseline = replace(baseline, image=image_root.place(spec.root))
        if not spec.mounts:
            return baseline
        from ringfence.sandbox.process import mounting

        mounting.check(spec.mounts, () if spec.root is not None else (*trees, os.path.realpath(sys.base_prefix)))
        return replace(baseline, mounts=mounting.place(spec.mounts))

    async def _with_programs(self, baseline: Baseline, programs: Programs) -> Baseline:
        from ringfence.sandbox.process.named_programs import SYSTEM, choose

        system = (*SYSTEM, sys.base_prefix)
        # In a thread: callers that wait for another box are not to wait for this.
        chosen = await asyncio.to_thread(choose, programs, str(interpreter()), system, baseline.trees)
        return replace(baseline, programs=chosen)

    def _counts(self, what: str) -> bool:
        return self._cgroups is not None and what in self._cgroups.available

    def _shape(self, limits: Limits) -> Shape:
        cores: list[int] = []
        every = sorted(os.sched_getaffinity(0))
        wanted = max(1, math.ceil(limits.cpu_cores))
        if not self._counts("cpu"):
            cores = [every[(self._made + n) % len(every)] for n in range(wanted)] if wanted < len(every) else []
        open_files, sends = capabilities.descriptors(limits.open_files)
        return {
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            # One more where a control group counts: that is to be the first to say no.
            "processes": limits.processes + self._counts("pids"),
            "open_files": open_files,
            "sends": sends,
            "file_bytes": longest_file(limits),
            "cpu_seconds": kernel_cpu_seconds(limits),
            "data_bytes": 0 if self._counts("memory") else 2 * limits.memory_bytes,
            "cores": cores,
            "memory_bytes": limits.memory_bytes,
            "processors": min(wanted, len(every)),
        }

    def _means(self) -> Json:
        """What enforces each limit, and why it is not the kernel where it is not."""
        why = self._cgroups.why if self._cgroups is not None else {}
        return {
            name: {"by": "cgroup"} if self._counts(name) else {"by": how, "why": why.get(name, "")}
            for name, how in capabilities.MEANS.items()
        }

    def _isolation(self, box: Box, spec: BoxSpec, overshoot: int | None, *, stays: bool = False) -> Json:
        tested = self._tested or self._untested
        assert self._host is not None and tested is not None
        overshoot = None if self._counts("memory") else overshoot
        listens = spec.listening.allowed
        gives_back = stays and box.group is not None and box.group.gives_back()
        named = None if spec.image is None else (spec.image.name, spec.image.digest)
        given = (spec.layout, spec.mounts, spec.root is not None, named, listens, stays, gives_back)
        seen = (tuple(box.isolation.items()), tuple(box.host_id_fact.items()), tested.at, given, overshoot)
        if seen not in self._isolations:
            means = self._means()
            if overshoot is not None:
                means["memory"]["overshoot_bytes"] = overshoot
            # One object for all boxes that are alike: it is large, and is encoded only once.
            fact = self._host.isolation(box.isolation, tested, spec.layout, means) | {"host_id": box.host_id_fact}
            if spec.mounts:
                fact["mounts"] = [{"at": each.at, "mode": each.mode} for each in spec.mounts]
            if listens:
                fact["listen"] = "allowed"
            if spec.root is not None:
                fact["root"] = "image"
            if spec.image is not None:
                fact["image"] = {"name": spec.image.name, "digest": spec.image.digest}
            if stays:
                fact["paused_memory"] = "given_back" if gives_back else "resident"
            self._isolations = {seen: fact}
        return self._isolations[seen]


def _complete(
    report: BoxReport, run: ProgramRun, baseline: Baseline, before: guarded.Seen | None, outlet: NetworkOutlet | None
) -> BoxReport:
    """The report with what is known only once its box is gone."""
    mounts = run.spec.mounts
    trouble = run.box.trouble
    if mounts or len(trouble) > len(report.trouble):
        planted = () if before is None else guarded.planted_since(mounts, before)
        report = replace(report, trouble=tuple(trouble), planted=planted)
    if baseline.programs is not None:
        loose = baseline.programs.advisory or not report.isolation["protections"]["landlock"]["on"]
        report = replace(report, commands="advisory" if loose else "enforced")
    return report if outlet is None else replace(report, network=outlet.final_facts)


def _with_packages(packages: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a new interpreter finds these packages, after what the caller wants it to find."""
    return {**env, "PYTHONPATH": ":".join(filter(None, (env.get("PYTHONPATH"), *packages)))}


def _check_namespace(without: tuple[str, ...]) -> None:
    from ringfence.sandbox.process.outlet import check_namespace

    check_namespace(without)


async def _open_outlet(box: Box, network: Serve) -> NetworkOutlet:
    from ringfence.sandbox.process.outlet import NetworkOutlet

    return await NetworkOutlet.open(box, network)


def _held(baseline: Baseline) -> guarded.Held:
    if not baseline.mounts:
        return {}
    from ringfence.sandbox.process import mounting

    return mounting.held(baseline.mounts)


def _packages() -> tuple[str, ...]:
    """Where packages are installed beside the interpreter: in a virtual environment, say."""
    own = os.path.realpath(sys.base_prefix) + os.sep
    found = (os.path.realpath(path) for path in sys.path if path.endswith("site-packages") and os.path.isdir(path))
    return tuple(path for path in found if not path.startswith(own))


def _check_installed(template: str, modules: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Raises Unavailable where the template's own package is missing."""
    if (template, packages) in _installed:
        return
    places = [*packages, *sys.path]
    missing = [name for name in modules if PathFinder.find_spec(name, places) is None]
    if TEMPLATES_NEED[template] in missing:
        raise Unavailable(
            "template_lacks",
            f"the template {template} loads {', '.join(modules)}, and {', '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not installed here; install with:"
            f" {sys.executable} -m pip install {' '.join(missing)}",
        )
    _installed.add((template, packages))


_installed: set[tuple[str, tuple[str, ...]]] = set()
"""Templates, with the folders of packages beside them, that were found complete."""


def _of_the_box(limits: Limits) -> Limits:
    """The limits that a box is made with. The supervisor watches the others, which may differ from run to run."""
    return replace(limits, wall_seconds=1.0, output_bytes=1, capture_bytes=0)
