"""What a guest is started with: modules in an order in which they can be loaded, and an archive that a kernel reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hosts import kernel
from hosts.places import find

DEP = """\
kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/lib/crc16.ko.xz kernel/fs/mbcache.ko.xz
kernel/fs/jbd2/jbd2.ko.xz:
kernel/lib/crc16.ko.xz:
kernel/fs/mbcache.ko.xz:
kernel/drivers/virtio/virtio.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/virtio/virtio_ring.ko.xz:
kernel/drivers/virtio/virtio_pci.ko.xz: kernel/drivers/virtio/virtio.ko.xz kernel/drivers/virtio/virtio_ring.ko.xz
kernel/drivers/char/virtio-rng.ko.xz: kernel/drivers/virtio/virtio.ko.xz
"""


def names(wanted: list[str]) -> list[str]:
    return [kernel.name_of(file) for file in kernel.load_order(DEP, wanted)]


def test_a_module_comes_after_all_that_it_needs() -> None:
    order = names(["virtio_pci", "ext4"])
    for line in DEP.splitlines():
        file, _, needed = line.partition(":")
        if kernel.name_of(file) in order:
            after = order.index(kernel.name_of(file))
            assert all(order.index(kernel.name_of(other)) < after for other in needed.split())
    assert len(order) == len(set(order)) == 7


def test_what_is_built_in_is_left_out() -> None:
    assert names(["virtio_mmio", "jbd2"]) == ["jbd2"]


def test_dashes_and_underscores_are_the_same() -> None:
    assert names(["virtio_rng"]) == ["virtio_ring", "virtio", "virtio_rng"]


def test_the_archive_holds_files_links_and_their_folders(tmp_path: Path) -> None:
    if find("cpio") is None:
        pytest.skip("cpio is not installed here")
    files = {"init": (0o100755, b"#!/bin/sh\n"), "a/b/c.txt": (0o100644, b"abc"), "a/link": (0o120777, b"b/c.txt")}
    archive = kernel.cpio(files) + kernel.cpio({"later": (0o100644, b"x")})
    for part in (kernel.cpio(files), kernel.cpio({"later": (0o100644, b"x")})):
        subprocess.run(["cpio", "-idm", "--quiet"], input=part, cwd=tmp_path, check=True)
    assert len(archive) % 4 == 0
    assert (tmp_path / "a" / "link").read_text() == "abc"
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "later").read_text() == "x"
