"""The output files of a box that stays: what takes long is done in a thread, whatever the box does meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import FileFact
from ringfence.core.sessions import Cell
from ringfence.sandbox.files import collect
from ringfence.sandbox.process import output_files
from ringfence.sandbox.process.live import LiveBox
from ringfence.sandbox.process.output_files import Mappings, OutputFiles
from ringfence.sandbox.process.seccomp import notifications

pytestmark = pytest.mark.anyio

MUCH = 2_000_000


class Folder:
    """A workspace of our own, and the threads that its files are read in."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = path / "output"
        self.output.mkdir()
        self.readers: list[threading.Thread] = []
        self.made: int | None = None
        self.is_mapped = False
        self.descriptor = os.open(path, os.O_RDONLY)
        self.files = OutputFiles(self.descriptor, 100_000_000, Mappings(lambda: self.made, lambda most: self.is_mapped))
        collecting = collect.collect

        def watched(*given: Any, **how: Any) -> tuple[tuple[FileFact, ...], dict[str, str]]:
            self.readers.append(threading.current_thread())
            return collecting(*given, **how)

        monkeypatch.setattr(collect, "collect", watched)

    def write(self, name: str, size: int) -> None:
        with (self.output / name).open("wb") as file:
            file.truncate(size)

    async def changed(self) -> list[str]:
        await self.files.read_ahead()
        return [fact.path.rpartition("/")[2] for fact in self.files.changed()[0]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.setattr(output_files, "EMPTY_FOLDER", -1)  # folders of other file systems have another size
    made = Folder(tmp_path, monkeypatch)
    yield made
    os.close(made.descriptor)


async def test_little_is_read_at_once_and_much_in_a_thread(folder: Folder) -> None:
    folder.write("little", 10)
    assert await folder.changed() == ["little"]
    assert folder.readers == [threading.main_thread()]
    folder.write("much", MUCH)
    assert await folder.changed() == ["much"]
    assert len(folder.readers) == 2 and folder.readers[1] is not threading.main_thread()
    assert await folder.changed() == [] and len(folder.readers) == 2
    folder.is_mapped = True
    assert await folder.changed() == []
    assert len(folder.readers) == 3 and folder.readers[2] is not threading.main_thread()


async def test_files_are_read_again_while_they_can_be_changed_without_a_trace(folder: Folder) -> None:
    folder.made = 0
    folder.write("file", 10)
    assert await folder.changed() == ["file"]
    assert await folder.changed() == [] and len(folder.readers) == 1
    folder.made = 1  # and is gone again
    assert await folder.changed() == [] and len(folder.readers) == 2
    assert await folder.changed() == [] and len(folder.readers) == 2
    folder.made, folder.is_mapped = 2, True
    for readings in (3, 4):
        assert await folder.changed() == [] and len(folder.readers) == readings
    folder.is_mapped = False
    assert await folder.changed() == [] and len(folder.readers) == 5, "it was written to before it was given up"
    assert await folder.changed() == [] and len(folder.readers) == 5


async def test_what_is_read_ahead_in_vain_is_read_again(folder: Folder) -> None:
    folder.made = 0
    folder.write("much", MUCH)
    assert await folder.changed() == ["much"]
    folder.made = 1
    await folder.files.read_ahead()
    await folder.files.read_ahead()
    folder.files.changed()
    assert len(folder.readers) == 3


async def test_many_files_are_much_however_small(folder: Folder) -> None:
    for number in range(200):
        folder.write(f"{number:03}", 1)
    assert len(await folder.changed()) == 200
    assert threading.main_thread() not in folder.readers


async def test_what_grows_between_two_looks_is_left_to_the_next_step(folder: Folder) -> None:
    folder.write("growing", 10)
    await folder.files.read_ahead()
    folder.write("growing", MUCH)
    assert folder.files.changed() == ((), {})
    assert folder.readers == []
    assert await folder.changed() == ["growing"]
    assert threading.main_thread() not in folder.readers


async def test_what_a_step_read_ahead_is_there_for_it_while_another_reads(folder: Folder) -> None:
    folder.write("much", MUCH)
    await folder.files.read_ahead()
    other = asyncio.create_task(folder.files.read_ahead())
    await asyncio.sleep(0)  # it reads now
    assert [fact.path for fact in folder.files.changed()[0]] == ["/workspace/output/much"]
    await other
    assert folder.files.changed() == ((), {})


async def test_a_box_with_many_memory_areas_is_not_looked_through(box: LiveBox) -> None:
    areas = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
os.mkdir("/workspace/output")
open("/workspace/output/x", "w").write("x")
size = os.sysconf("SC_PAGE_SIZE")
start = libc.mmap(None, 8000 * size, 0, 0x4022, -1, 0)
assert not any(libc.mprotect(start + number * size, size, 1) for number in range(0, 8000, 2))
"""
    interpreter = await box.interpreter()
    quiet = await interpreter.run(Cell(b"1"), lambda *_: None, lambda _: None)
    assert quiet.error is None and not box._maps_files(1 << 20)
    report = await interpreter.run(Cell(areas.encode()), lambda *_: None, lambda _: None)
    assert report.error is None, report.error
    assert box._maps_files(1 << 17), "a list that is too long to be read counts as if something were mapped"
    assert not box._maps_files(1 << 24)
    mapping = b"import mmap\nf = open('/workspace/output/x', 'r+b')\nm = mmap.mmap(f.fileno(), 1)\nm[0] = 65"
    mapped = await interpreter.run(Cell(mapping), lambda *_: None, lambda _: None)
    assert [fact.path for fact in mapped.report.files] == ["/workspace/output/x"]
    assert box._maps_files(1 << 24)


async def test_a_folder_that_is_closed_to_us_is_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an ordinary user's boxes have ids of their own."""
    folder.write("a", 10)
    opened = os.open

    def refused(path: Any, *rest: Any, **more: Any) -> int:
        if path == "output":
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest, **more)

    monkeypatch.setattr(output_files, "left_any", lambda _: True)
    monkeypatch.setattr(os, "open", refused)
    await folder.files.read_ahead()
    assert folder.files.changed() == ((), {collect.OUTPUT: "it cannot be read: Permission denied"})
    await folder.files.read_ahead()
    assert folder.files.changed() == ((), {}), "nothing is new"
    assert output_files.collected(folder.descriptor, None, 1000, 10)[1]


OUTPUT = "/workspace/output/x"
BEFORE = f"""
import mmap, os
os.mkdir("/workspace/output")
with open({OUTPUT!r}, 'wb') as file:
    file.write(b'1' * 4096)
open({OUTPUT!r}).read()
"""
OPENS = f"""
with open({OUTPUT!r}, 'r+b') as file:
    memory = mmap.mmap(file.fileno(), 0)
memory[0]
"""


async def test_what_is_written_through_a_mapping_is_a_change_though_it_is_closed_again(box: LiveBox) -> None:
    interpreter = await box.interpreter()

    async def changed(source: str) -> list[tuple[str, str]]:
        ran = await interpreter.run(Cell(source.encode()), lambda *_: None, lambda _: None)
        assert ran.error is None, ran.error
        return [(fact.path, fact.sha256) for fact in ran.report.files]

    versions = [await changed(BEFORE), await changed(f"{OPENS}memory[0] = 50\nmemory.close()")]
    assert await changed("pass") == []
    assert await changed(OPENS) == []
    versions.append(await changed("memory[0] = 51\nmemory.close()"))
    assert await changed("pass") == []
    assert [[path for path, _ in each] for each in versions] == [[OUTPUT]] * 3
    assert len({digest for each in versions for _, digest in each}) == 3


async def test_a_box_that_maps_without_end_waits_for_us(box: LiveBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifications, "_GRANTED_A_SECOND", 5)
    interpreter = await box.interpreter()
    rests: list[float] = []
    rest = box.box.hub.rest

    def noted(descriptor: int, seconds: float) -> None:
        rests.append(seconds)
        rest(descriptor, seconds)

    monkeypatch.setattr(box.box.hub, "rest", noted)
    many = f"""
import mmap, os
os.mkdir("/workspace/output")
with open({OUTPUT!r}, 'w+b') as file:
    file.truncate(4096)
    for _ in range(12):
        mmap.mmap(file.fileno(), 0).close()
"""
    ran = await interpreter.run(Cell(many.encode()), lambda *_: None, lambda _: None)
    assert ran.error is None and [fact.path for fact in ran.report.files] == [OUTPUT]
    assert rests and max(rests) <= 1
