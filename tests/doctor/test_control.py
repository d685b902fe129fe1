"""Controls: they can do what a box prevents, harm nothing, and stop at twice the limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Program
from ringfence.core.errors import Unavailable
from ringfence.doctor.case import Control
from ringfence.doctor.control import ControlBackend, ControlLauncher
from ringfence.doctor.props import CONTROL_ID
from ringfence.doctor.stage import Stage
from ringfence.doctor.suite import claim_of, text_of
from tests import tooling

pytestmark = pytest.mark.anyio
QUICK = Limits(wall_seconds=5, output_bytes=MIB)


async def run(launcher: ControlLauncher, program: str, settings: Control | None = None, **spec: object) -> BoxReport:
    source = Program("python", text_of(program, {}))
    return await ControlBackend(launcher, settings).run(BoxSpec(source, **{"limits": QUICK, **spec}))  # type: ignore[arg-type]


async def test_a_program_runs_and_its_status_is_told(launcher: ControlLauncher) -> None:
    report = await run(launcher, "print('hello'); sys.exit(3)")
    assert (report.ended, report.exit_status, report.stdout.text) == ("exited", 3, "hello\n")


async def test_it_is_nobody_on_the_host_and_root_only_in_its_own_namespace(launcher: ControlLauncher) -> None:
    report = await run(launcher, "print(os.getuid(), open('/proc/self/uid_map').read().split())")
    outside = CONTROL_ID if os.geteuid() == 0 else os.geteuid()
    assert report.stdout.text.strip() == f"0 {['0', str(outside), '1']}"


async def test_it_has_namespaces_of_its_own_but_for_those_that_it_shares(launcher: ControlLauncher) -> None:
    program = "print(json.dumps({n: os.readlink('/proc/self/ns/' + n) for n in ('user', 'pid', 'mnt', 'net', 'ipc')}))"
    for share in (frozenset(), frozenset({"net"})):
        report = await run(launcher, program, Control(share=share))  # type: ignore[arg-type]
        spaces = eval(report.stdout.text)
        shared = {name for name, found in spaces.items() if found == os.readlink(f"/proc/self/ns/{name}")}
        assert shared == share


async def test_what_it_mounts_and_writes_does_not_reach_the_host(launcher: ControlLauncher) -> None:
    report = await run(launcher, "call('mount', b'none', b'/usr', b'tmpfs', 0, None); open('/usr/x', 'w'); say(True)")
    assert claim_of(report.stdout) == {"done": True, "detail": ""}
    assert Path("/usr/bin").exists() and not Path("/usr/x").exists()


async def test_it_is_stopped_at_twice_its_time(launcher: ControlLauncher) -> None:
    report = await run(launcher, "import time\nwhile True: time.sleep(1)", limits=Limits(wall_seconds=0.4))
    assert report.ended == "timeout" and 700 < report.wall_ms < 300_000


async def test_it_is_stopped_at_twice_its_output(launcher: ControlLauncher) -> None:
    report = await run(launcher, "while True: os.write(1, b'x' * 65536)", limits=Limits(60, output_bytes=MIB))
    assert report.ended == "output" and 2 * MIB < report.stdout.total < 8 * MIB


async def test_it_is_stopped_at_twice_its_disk(launcher: ControlLauncher) -> None:
    program = "attempt(lambda: [open('tmp/big', 'ab').write(b'x' * MIB) for _ in range(100)] and None)"
    report = await run(launcher, program, limits=Limits(60, disk_bytes=8 * MIB))
    assert (claim_of(report.stdout) or {})["detail"] == "ENOSPC"


async def test_what_outlives_it_is_counted_and_ended(launcher: ControlLauncher) -> None:
    program = "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nsay(False)"
    for seconds in tooling.LONGER:
        report = await run(launcher, program, Control(share=frozenset({"pid"})), limits=Limits(seconds))
        if report.isolation["control"]["left"]:  # otherwise it did not get that far
            break
    assert report.isolation["control"] == {"begun": True, "left": 1, "late": True}


async def test_its_supervisor_believes_what_is_written_on_the_way_to_it(launcher: ControlLauncher) -> None:
    program = """
for number in range(3, 64):
    try:
        os.write(number, b'{"status": 0}\\n')
    except OSError:
        pass
os._exit(7)
"""
    assert (await run(launcher, program)).exit_status == 0


async def test_its_collector_follows_links(launcher: ControlLauncher, stage: Stage) -> None:
    props = stage.props(("output",))
    await run(launcher, f"os.symlink({props.given['canary']!r}, 'output/link')", output=props.output)
    assert props.collected() == {"link": props.secret.encode()}
    props.close()


async def test_inputs_and_environment_reach_it(launcher: ControlLauncher) -> None:
    program, inputs = "print(open('input/deep/a.txt').read(), os.environ['K'])", (Input("deep/a.txt", b"in"),)
    report = await run(launcher, program, inputs=inputs, env={"K": "V"})
    assert report.stdout.text == "in V\n"


async def test_programs_of_one_place_are_forked_from_one_process(launcher: ControlLauncher) -> None:
    first, second = "open('tmp/left', 'w').write('x')\nsay(True, 1)", "say(os.path.exists('tmp/left'), 2)"
    specs = [BoxSpec(Program("python", text_of(text, {})), QUICK) for text in (first, second)]
    reports = await ControlBackend(launcher).run_all(specs)
    assert [claim_of(report.stdout) for report in reports] == [{"done": True, "detail": n} for n in ("1", "2")]


async def test_a_host_that_cannot_run_it_is_told(launcher: ControlLauncher) -> None:
    broken = ControlLauncher()
    broken._start()
    broken._control.close()  # type: ignore[union-attr]
    broken._process.wait()  # type: ignore[union-attr]
    with pytest.raises((Unavailable, OSError)):
        await run(broken, "pass")
