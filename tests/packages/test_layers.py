"""Layers, one over the other: what each takes away and what it leaves, against a file system that is only words."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.packages.images import rootfs
from ringfence.packages.inside.layers import LayerError, Layers
from tests import tooling
from tests.packages.images import entry, layer

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
HERE = st.lists(NAMES, max_size=2).map(lambda parts: "".join(f"{part}/" for part in parts))
STEPS = st.one_of(
    st.tuples(st.just("file"), PATHS),
    st.tuples(st.just("folder"), PATHS),
    st.tuples(st.just("hide"), HERE, NAMES),
    st.tuples(st.just("opaque"), HERE),
)


def applied(layers: list[bytes], keep: Path) -> dict[str, Any]:
    """By path: the text of a file, the target of a link, None for a folder."""
    keep.mkdir(exist_ok=True)
    for left in keep.iterdir():
        left.unlink()
    together = Layers(10_000)
    for data in layers:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
            together.apply(archive, str(keep))
    found: dict[str, Any] = {}
    for path, kind, _, what in together.listing():
        found[path] = None if kind == "folder" else what if kind == "link" else (keep / str(what)).read_text()
    return found


def written(steps: list[Any], number: int) -> bytes:
    entries: list[Any] = []
    for index, step in enumerate(steps):
        match step:
            case ("file", path):
                entries.append((path, f"{number}.{index}"))
            case ("folder", path):
                entries.append(entry(path, tarfile.DIRTYPE))
            case ("hide", folder, name):
                entries.append((f"{folder}.wh.{name}", ""))
            case ("opaque", folder):
                entries.append((f"{folder}.wh..wh..opq", ""))
    return layer(*entries)


def plainly(layers: list[list[Any]]) -> dict[str, Any]:
    """The same by the words of the specification: what is hidden of lower layers first, then what a layer has."""
    found: dict[str, Any] = {}
    for number, steps in enumerate(layers):
        for step in steps:
            if step[0] == "hide":
                _drop(found, f"{step[1]}{step[2]}", itself=True)
            elif step[0] == "opaque":
                _drop(found, step[1].rstrip("/"), itself=False)
        for index, step in enumerate(steps):
            if step[0] not in ("file", "folder"):
                continue
            parts = step[1].split("/")
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if found.get(above) is not None:
                    _drop(found, above, itself=True)
                found[above] = None
            if step[0] == "file":
                _drop(found, step[1], itself=True)
                found[step[1]] = f"{number}.{index}"
            elif found.get(step[1], "") is not None:
                _drop(found, step[1], itself=True)
                found[step[1]] = None
    return found


def _drop(found: dict[str, Any], path: str, *, itself: bool) -> None:
    if path and any(
        found.get(path[:at]) is not None for at, sign in enumerate(path) if sign == "/" and path[:at] in found
    ):
        return  # beneath a file there is nothing
    for name in [name for name in found if not path or name.startswith(f"{path}/") or (itself and name == path)]:
        del found[name]


@settings(max_examples=tooling.examples(4))
@given(st.lists(st.lists(STEPS, max_size=6), max_size=4))
def test_layers_are_what_the_specification_says(
    tmp_path_factory: pytest.TempPathFactory, layers: list[list[Any]]
) -> None:
    keep = tmp_path_factory.getbasetemp() / "keep"
    assert applied([written(steps, number) for number, steps in enumerate(layers)], keep) == plainly(layers)


@given(
    st.lists(st.tuples(st.text(max_size=8), st.sampled_from([b"0", b"1", b"2", b"3", b"5", b"6"]), st.text(max_size=8)))
)
def test_whatever_a_layer_has_stays_words(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, bytes, str]]
) -> None:
    base = tmp_path_factory.getbasetemp()
    try:
        data = layer(*(entry(name.replace("\0", ""), kind, target.replace("\0", "")) for name, kind, target in entries))
    except (UnicodeEncodeError, ValueError):
        return
    try:
        found = applied([data], base / "keep2")
    except (LayerError, tarfile.TarError):
        return
    for path in found:
        assert not path.startswith("/") and ".." not in path.split("/")


# ── The list of a box, laid out ──


def laid_out(folder: Path, entries: Any) -> Path:
    (folder / "files").mkdir()
    (folder / "files" / "1").write_text("one")
    rootfs.laid_out({"entries": entries}, folder / "files", folder / "tree")
    return folder / "tree"


def test_a_list_is_laid_out(tmp_path: Path) -> None:
    entries = [
        ["d", "folder", False, 0],
        ["d/f", "file", True, 1],
        ["second", "file", True, 1],
        ["d/l", "link", False, "/../../etc"],
    ]
    tree = laid_out(tmp_path, entries)
    assert (tree / "d/f").read_text() == (tree / "second").read_text() == "one"
    assert (tree / "d/l").readlink() == Path("/../../etc")
    assert oct((tree / "d/f").stat().st_mode & 0o7777) == "0o755"


@pytest.mark.parametrize(
    "entries",
    [
        None,
        [1],
        [["../x", "folder", False, 0]],
        [["/x", "folder", False, 0]],
        [["a//b", "folder", False, 0]],
        [["", "folder", False, 0]],
        [["a/b", "folder", False, 0]],
        [["a", "link", False, "/etc"], ["a/b", "file", False, 1]],
        [["a", "file", False, 1], ["a/b", "folder", False, 0]],
        [["a", "folder", False, 0], ["a", "folder", False, 0]],
        [["a", "folder", False, 0], ["a", "link", False, "b"]],
        [["a", "link", False, "x"], ["a", "link", False, "y"]],
        [["a", "file", False, 2]],
        [["a", "file", False, "../../etc/passwd"]],
        [["a", "file", False, True]],
        [["a", "link", False, ""]],
        [["a", "link", False, "x\0y"]],
        [["\ud800", "folder", False, 0]],
        [["a", "device", False, 0]],
        [["a", ["file"], False, 1]],
        [["x" * 300, "folder", False, 0]],
    ],
)
def test_a_list_that_cannot_be_is_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(Unavailable, match="cannot be kept"):
        laid_out(tmp_path, entries)


def test_a_program_is_found_within_the_image_and_never_outside(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/it").write_text("")
    (tree / "usr/bin/it").chmod(0o755)
    (tree / "usr/bin/text").write_text("")
    (tree / "bin").symlink_to("/usr/bin")
    (tree / "up").symlink_to("../../../../usr/bin/it")
    (tree / "sh").symlink_to("/bin/sh")
    (tree / "round").symlink_to("round")
    path = "relative:/nowhere:/bin"
    assert rootfs.program(tree, "it", path, "/") == "/bin/it"
    assert rootfs.program(tree, "/up", path, "/") == "/up"
    assert rootfs.program(tree, "./it", path, "/usr/bin") == "/usr/bin/it"
    for word in ("sh", "/sh", "/round", "text", "/usr/bin", "/usr/bin/it/x", "../../../../../bin/sh", "none"):
        assert rootfs.program(tree, word, path, "/") is None


def test_a_folder_is_looked_through_once_for_each_layer_that_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, is_kept = list[str](), Layers._is_kept

    def counted(self: Layers, node: Any) -> bool:
        looked.append(node.kind)
        return is_kept(self, node)

    monkeypatch.setattr(Layers, "_is_kept", counted)
    folders = [entry(f"d{number}", tarfile.DIRTYPE) for number in range(50)]
    hiding = layer(*folders, *([(".wh..wh..opq", "")] * 50))
    assert len(applied([layer(("old", "x")), hiding], tmp_path / "keep")) == 50
    assert len(looked) == 51
