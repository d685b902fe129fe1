"""`docker run` as a client's file has it: what it runs, what of it a box has anyway, and what is not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.config.clientfiles import ClientServer, Setting, parse
from ringfence.config.docker_run import Bound, ContainerRun, Variable, is_container, parse_run

VALUE = "q8Zk2mP0vX7tR4wL9sB1"


def run(text: str) -> ContainerRun:
    return parse_run(tuple(text.split()))


@pytest.mark.parametrize(
    ("text", "image", "arguments"),
    [
        ("docker run -i --rm me/x", "me/x", ()),
        ("podman run -it me/x:1 serve --port 5", "me/x:1", ("serve", "--port", "5")),
        ("/usr/bin/docker container run -ti --init --read-only me/x -e not-ours", "me/x", ("-e", "not-ours")),
        ("nerdctl run --pull always --name=n --label a=b -l c=d -h host -- me/x", "me/x", ()),
        ("docker run --rm=true --sig-proxy=false -q me/x", "me/x", ()),
        ("docker run -ie A me/x", "me/x", ()),
        ("docker run -eA=1 me/x", "me/x", ()),
    ],
)
def test_which_image_and_what_it_is_given(text: str, image: str, arguments: tuple[str, ...]) -> None:
    found = run(text)
    assert (found.image, found.arguments, found.refused) == (image, arguments, [])


def test_what_is_honoured() -> None:
    found = run("docker run -w /srv --entrypoint /bin/x --platform linux/arm64 -e A=1 --env=B -e C= me/x y")
    assert (found.cwd, found.entrypoint, found.platform) == ("/srv", "/bin/x", "linux/arm64")
    assert found.env == [Variable("A", "1"), Variable("B", None), Variable("C", "")]


def test_folders_of_the_host() -> None:
    found = run(
        "docker run -v ./a:/a -v /b:/b:ro,z --mount type=bind,src=/c,dst=/c"
        " --mount type=bind,source=d,target=/d,readonly -v named:/e -v /f --mount type=volume,dst=/g --tmpfs=/h me/x"
    )
    assert found.refused == [found.refused[0]] and "--tmpfs" in found.refused[0]
    assert found.bound == [
        Bound("./a", "/a", True),
        Bound("/b", "/b", False),
        Bound("/c", "/c", True),
        Bound("d", "/d", False),
    ]
    assert len(found.notes) == 2
    assert found.volumes == [("named", "/e")]


@pytest.mark.parametrize(
    "option",
    [
        *("-p 80:80", "--publish=80:80", "--privileged", "--privileged=false", "--cap-add ALL", "--device /dev/kvm"),
        *("--pid host", "--ipc=host", "--uts host", "--security-opt seccomp=unconfined", "-d", "-itd", "--gpus all"),
        *("--userns host", "--cgroupns host", "--volumes-from x", "--add-host a:b", "--sysctl a=b", "--group-add 0"),
        *("--runtime x", "--ulimit a", "--unknown", "-z", "--", "--mount type=bind,src=/a,dst=/b,bind-nonrecursive"),
    ],
)
def test_what_would_loosen_a_box_or_is_not_known_is_refused_by_name(option: str) -> None:
    found = run(f"docker run -i {option} me/x" if option != "--" else "docker run -i --")
    assert len(found.refused) == 1
    named = {"-itd": "-d", "--": "no image"}.get(option, option.partition(" ")[0].partition("=")[0])
    assert named in found.refused[0]


@pytest.mark.parametrize(
    "text", ["docker", "docker run", "docker run -i -e", "docker compose up", "docker --context x run y"]
)
def test_what_runs_no_image_is_not_taken(text: str) -> None:
    assert run(text).refused


@pytest.mark.parametrize(
    ("option", "note"), [("--network host", "network"), ("--user 0", "user"), ("-u me", "user"), ("-m 1g", "memory_mb")]
)
def test_what_a_box_does_not_have_is_told(option: str, note: str) -> None:
    found = run(f"docker run {option} me/x")
    assert (found.image, len(found.notes)) == ("me/x", 1) and note in found.notes[0]
    assert run("docker run --network none me/x").notes == []


@given(st.lists(st.text(max_size=20) | st.sampled_from(["-e", "-v", "run", "--env", "--mount", "-it", "me/x", "A=1"])))
def test_any_words_are_taken_apart_or_refused(words: list[str]) -> None:
    command = ("docker", "run", *words)
    found = parse_run(command)
    assert bool(found.image) or bool(found.refused) or "" in words
    assert len(found.shown) == len(command)


# ── In a client's file ──


def server(folder: Path, *words: str, **more: Any) -> ClientServer:
    entry = {"command": "docker", "args": ["run", "-i", *words], **more}
    return parse(json.dumps({"mcpServers": {"it": entry}}), folder / ".mcp.json").servers[0]


def test_variables_are_settings_like_those_of_env(tmp_path: Path) -> None:
    words = ["-e", f"API_KEY={VALUE}", "-e", "GIVEN", "--env=LEVEL=info", "-e", "TOKEN=${MY_TOKEN}", "-e", "ELSEWHERE"]
    found = server(tmp_path, *words, "h.example/x", env={"GIVEN": VALUE, "DOCKER_HOST": "tcp://x.example"})
    assert {s.name: (s.kind, s.text) for s in found.env} == {
        "API_KEY": ("hidden", ""),
        "GIVEN": ("hidden", ""),
        "LEVEL": ("plain", "info"),
        "TOKEN": ("reference", "${MY_TOKEN}"),
        "ELSEWHERE": ("reference", "${ELSEWHERE}"),
    }
    assert found.unusable == ()
    assert any("DOCKER_HOST" in note for note in found.notes)
    assert VALUE not in repr(found)
    assert found.container is not None and found.container.image == "h.example/x"


def test_a_secret_elsewhere_in_the_command_is_not_shown(tmp_path: Path) -> None:
    found = server(tmp_path, "h.example/x", "--token", VALUE)
    assert VALUE not in repr(found) and found.unusable


def test_a_file_of_variables_is_read_beside_the_clients_file_alone(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "it.env").write_text(f"# of ours\nLEVEL=info\nAPI_KEY={VALUE}\nbad name=1\n")
    (tmp_path / "other.env").write_text("OTHER=1\n")
    (project / "link.env").symlink_to(tmp_path / "other.env")
    words = [word for path in ("it.env", "../other.env", "link.env", "none.env") for word in ("--env-file", path)]
    found = server(project, *words, "h.example/x")
    assert {s.name: s.kind for s in found.env} == {"LEVEL": "plain", "API_KEY": "hidden"}
    assert len([note for note in found.notes if "--env-file" in note]) == 3


def test_only_engines_of_containers() -> None:
    assert not is_container(("node", "run")) and not is_container(())


@pytest.mark.parametrize("words", [["-eAPI_TOKEN=hunter2"], ["-ie=API_TOKEN=hunter2"], ["--env=API_TOKEN=hunter2"]])
def test_a_variable_in_the_same_word_as_its_option_hides_no_image(tmp_path: Path, words: list[str]) -> None:
    entry = {"command": "docker", "args": ["run", *words, "corp.example/x"]}
    server = parse(json.dumps({"mcpServers": {"s": entry}}), tmp_path / ".mcp.json").servers[0]
    assert server.container is not None and server.container.image == "corp.example/x"
    assert (server.unusable, server.env) == ((), (Setting("API_TOKEN", "hidden"),))
    assert "hunter2" not in " ".join(server.command)
