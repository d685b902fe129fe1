"""Servers that run from our cache: which tree, seen where; and images, which are the root of a box."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.errors import ConfigError

TREE = "sha256:" + "0a" * 32
IMAGE = f"h.example/x:1@{TREE}"


def loaded(keys: str, *, kind: str = "image", names: str = f"['{IMAGE}']") -> config.Config:
    packages = f"packages: {{from: {kind}, names: {names}, tree: '{TREE}'}}"
    text = f"gateway: {{state: /state}}\nservers:\n  it: {{command: [/bin/it], cwd: /app, {packages}{keys}}}\n"
    return config.loads(text, file="ringfence.yaml", base=Path("/project"))


def test_packages_are_seen_in_the_box() -> None:
    spec = loaded("", kind="npm", names="[it@1.0.0]").servers["it"]
    folder = f"/state/packages/{TREE.removeprefix('sha256:')}/tree"
    assert [(mount.host, mount.at, mount.mode) for mount in spec.mounts] == [(folder, "/packages", "ro")]


def test_an_image_is_no_mount() -> None:
    spec = loaded("").servers["it"]
    assert spec.packages is not None
    assert spec.packages.folder == f"/state/packages/{TREE.removeprefix('sha256:')}/tree"
    assert (spec.mounts, spec.cwd, spec.packages.names) == ((), "/app", (IMAGE,))


@pytest.mark.parametrize(
    ("names", "keys", "why"),
    [
        ("['h.example/x:1']", "", "with its registry and digest"),
        (f"['x@{TREE}']", "", "with its registry and digest"),
        (f"['{IMAGE}', '{IMAGE}']", "", "an image is one"),
        ("['../x']", "", "not the name of an image"),
        (f"['{IMAGE}']", ", placement: shared", "so that box is its own"),
        (f"['{IMAGE}']", ", placement: unsafe_host", "so that box is its own"),
        (f"['{IMAGE}']", ", placement: session", "so that box is its own"),
    ],
)
def test_an_image_is_named_as_it_was_pinned_and_has_a_box_of_its_own(names: str, keys: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        loaded(keys, names=names)


@pytest.mark.parametrize("program", ["npx", "uvx", "docker", "podman"])
def test_a_command_that_fetches_what_it_runs_is_warned_of(program: str) -> None:
    found = config.loads(f"servers: {{it: {{command: [{program}, x]}}}}", file="ringfence.yaml", base=Path("/project"))
    assert [warning for warning in found.warnings if "ringfence init --from" in str(warning)]
