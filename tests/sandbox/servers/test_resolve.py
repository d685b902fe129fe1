"""What a command needs is found from the command itself, and never a folder with credentials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringfence.core.box import Mount
from ringfence.sandbox.servers.provenance import Hidden
from ringfence.sandbox.servers.resolve import ResolvedCommand, resolve, resolve_in_image


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def found(
    *command: str | Path,
    cwd: str | Path = "/",
    path: str = "",
    private: str = "/nowhere",
    apart: Path | None = None,
    **more: object,
) -> ResolvedCommand:
    def holds(folder: str) -> str | None:
        return "keys" if folder == private or private.startswith(f"{folder}/") else None

    hidden = Hidden(holds, () if apart is None else (str(apart),))
    return resolve([str(word) for word in command], {"PATH": path or "/usr/bin:/bin"}, str(cwd), hidden, **more)  # type: ignore[arg-type]


def test_a_program_of_the_system_needs_nothing() -> None:
    shell = found("sh", "-c", "echo")
    assert (shell.trees, shell.files, shell.mounts) == (set(), {}, ())
    assert os.path.basename(shell.argv[0]) == "sh" and shell.argv[1:] == ("-c", "echo")
    assert shell.path == "/usr/bin:/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin"
    assert shell.cwd == "/workspace"


def test_a_virtual_environment_its_python_and_what_it_refers_to(tmp_path: Path) -> None:
    base, environment, source = tmp_path / "python", tmp_path / "venv", tmp_path / "source"
    program(base / "bin" / "python3", "")
    program(base / "lib" / "python3.13" / "os.py", "")
    source.mkdir()
    (tmp_path / "pyproject.toml").touch()
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(base / "bin" / "python3")
    (environment / "pyvenv.cfg").write_text(f"home = {base}/bin\nversion = 3.13\n")
    packages = environment / "lib" / "python3.13" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "own.pth").write_text(f"import something\n{source}\n{tmp_path}/absent\n")
    server = program(environment / "bin" / "server", f"#!{environment}/bin/python\n")
    wanted = {str(base), str(environment), str(source)}
    for command in ([server], [environment / "bin" / "python", "-m", "server"]):
        seen = found(*command)
        assert seen.trees == wanted and not seen.files
        assert seen.argv[0] == str(command[0]), "by its own name, or it would not know its environment"
    assert str(environment / "bin") in found("server", path=f"{environment}/bin:/bin").path.split(":")


def test_an_environment_shows_no_folder_that_its_files_merely_name(tmp_path: Path) -> None:
    private, environment = tmp_path / "documents", tmp_path / "repository" / "venv"
    (private / "x").mkdir(parents=True)
    environment.parent.mkdir()
    (tmp_path / "repository" / "inward").symlink_to(private)
    packages = environment / "lib" / "python3.13" / "site-packages"
    packages.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {private}/x\n")
    (packages / "a.pth").write_text(f"{private}\n{tmp_path}/repository/inward\n{environment}/../../documents\n")
    assert found(program(environment / "bin" / "server", "#!/bin/sh\n")).trees == {str(environment)}


def test_a_script_is_no_link_to_whatever_lies_elsewhere(tmp_path: Path) -> None:
    private = program(tmp_path / "documents" / "readme.txt", "")
    repository = tmp_path / "repository"
    program(repository / "src" / "server.js", "")
    (repository / "link.js").symlink_to(private)
    (repository / "folder").symlink_to(private.parent)
    (repository / "own.js").symlink_to("src/server.js")
    for word in ("link.js", "./folder/readme.txt", str(repository / "link.js")):
        with pytest.raises(ValueError, match="name that file itself"):
            found("sh", word, cwd=repository)
    assert found("sh", "own.js", cwd=repository).trees == {str(repository)}
    installed = program(tmp_path / "lib" / "node_modules" / "server" / "cli.js", "")
    (repository / "cli").symlink_to(installed)
    with pytest.raises(ValueError, match="name that file itself"):
        found("sh", repository / "cli")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cli").symlink_to(installed)
    assert str(tmp_path / "lib" / "node_modules") in found("sh", tmp_path / "bin" / "cli").trees, "one prefix has both"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A stranger's, beside what is the user's."""
    program(tmp_path / "own" / "bin" / "tool", "")
    (tmp_path / "own" / "lib").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("private")
    program(tmp_path / "own" / "node_modules" / "a" / "index.js", "")
    (tmp_path / "src" / "project").mkdir(parents=True)
    return tmp_path / "src" / "project"


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/env -S -u ../../own/bin/tool sh",
        "/usr/bin/env -S -u tool sh",
        "/usr/bin/env -C ../../own sh",
        "/usr/bin/env -S ../../own/bin/tool",
        "/usr/bin/env",
        "../../own/bin/tool",
        "../../own/notes.txt",
        "../../own/node_modules/a/index.js",
        "{own}/bin/tool",
        "/proc/self/cwd/{own}/bin/tool",
        "inward/bin/tool",
    ],
)
def test_a_script_says_nothing_of_what_is_shown_outside_of_its_folder(project: Path, line: str) -> None:
    own = project.parent.parent / "own"
    (project / "inward").symlink_to(own)
    server = program(project / "server", f"#!{line.format(own=own)}\n")
    for word in ("./server", str(server)):
        with pytest.raises(ValueError, match=r"not shown because a file says so|are understood|no program|executable"):
            found(word, cwd=project)


@pytest.mark.parametrize("word", ["./link", "./node_modules/a/index.js", "./inward/bin/tool", "./further"])
def test_a_link_says_nothing_of_what_is_shown_outside_of_its_folder(project: Path, word: str) -> None:
    own = project.parent.parent / "own"
    (project / "link").symlink_to("../../own/bin/tool")
    (project / "further").symlink_to("link")
    (project / "node_modules").symlink_to("../../own/node_modules")
    (project / "inward").symlink_to(own)
    for named in (word, str(project / word)):
        for command in ([named], ["sh", named]):
            for cwd in (project, project.parent, "/"):
                if cwd == project or named.startswith("/"):
                    with pytest.raises(ValueError, match="name that file itself"):
                        found(*command, cwd=cwd)
    (project / "module").symlink_to(own)
    with pytest.raises(ValueError, match="name that file itself"):
        found("python3", "-m", "module", cwd=project)


def test_a_project_says_nothing_of_its_neighbours(project: Path) -> None:
    """By being an environment as a whole, by the name of a version, by having no package.json of its own."""
    own = project.parent.parent / "own"
    packages = project / "lib" / "python3.13" / "site-packages"
    packages.mkdir(parents=True)
    (project / "pyvenv.cfg").touch()
    (packages / "a.pth").write_text(f"{project.parent}\n{own}\n/proc/self/cwd\n")
    assert found(program(project / "bin" / "server")).trees == {str(project)}
    shims = program(own.parent / "pyenv" / "shims" / "tool").parent
    (project / ".python-version").write_text("../../own\n")
    with pytest.raises(ValueError, match="shim"):
        found("tool", cwd=project, path=str(shims))
    plain = project.parent / "plain"
    program(plain / "server.js", "")
    (plain / ".git").mkdir()
    (project.parent / "package.json").touch()
    assert found("sh", plain / "server.js").trees == {str(plain)}


def test_what_could_hold_credentials_is_not_shown_as_a_single_file_either(project: Path) -> None:
    key = program(project / "key", "")
    with pytest.raises(ValueError, match="holds keys"):
        found(key, private=str(key))
    with pytest.raises(ValueError, match="what no box sees"):
        found(key, apart=key)
    (project / "link").symlink_to("key")
    with pytest.raises(ValueError, match="not shown"):
        found("sh", project / "link", apart=key)


def test_what_the_user_installed_is_found_over_links_and_first_lines(tmp_path: Path) -> None:
    python = program(tmp_path / "python" / "bin" / "python3.13", "")
    program(tmp_path / "python" / "lib" / "python3.13" / "os.py", "")
    environment = tmp_path / "tools" / "server"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / "python").symlink_to(python)
    script = program(environment / "bin" / "server", f"#!{environment}/bin/python\n")
    path = tmp_path / "home" / "bin"
    path.mkdir(parents=True)
    (path / "server").symlink_to(script)
    wanted = {str(environment), str(tmp_path / "python")}
    assert found("server", path=str(path)).trees == wanted
    assert found(path / "server", path=str(path), cwd=tmp_path / "x").trees == wanted
    with pytest.raises(ValueError, match="name that file itself"):
        found("server", path=str(path), cwd=path.parent)
    tool = program(tmp_path / "project" / "tool", "#!/usr/bin/env -S A=b server --flag\n")
    assert found(tool, path=str(path)).trees == wanted
    (tmp_path / "home" / "project").symlink_to(tmp_path / "project")
    tool.write_text("")
    assert found(tmp_path / "home" / "project" / "tool", private=str(tmp_path / "home")).sees(str(tool))


def test_what_the_operator_mounts_may_be_named_by_files(project: Path) -> None:
    own = project.parent.parent / "own"
    server = program(project / "server", f"#!{own}/bin/tool\n")
    (project / "link.js").symlink_to(own / "notes.txt")
    mounts = (Mount(str(own), str(own)),)
    assert found(server, mounts=mounts).mounts == (Mount(str(server), str(server)),)
    assert str(project) in found("sh", project / "link.js", mounts=mounts).trees


def test_node_modules_from_the_outermost(tmp_path: Path) -> None:
    modules = tmp_path / "node_modules"
    script = program(modules / "server" / "node_modules" / "inner" / "index.js", "#!/usr/bin/env node\n")
    (modules / ".bin").mkdir()
    (modules / ".bin" / "server").symlink_to(script)
    node = program(tmp_path / "node" / "bin" / "node", "")
    (tmp_path / "node" / "lib").mkdir()
    for command in ([node, script], [modules / ".bin" / "server"]):
        seen = found(*command, path=f"{tmp_path}/node/bin:/bin")
        assert seen.trees == {str(modules), str(tmp_path / "node")}
        assert str(tmp_path / "node" / "bin") in seen.path.split(":"), "or `env` would not find it"


def test_the_script_of_an_interpreter(tmp_path: Path) -> None:
    script = program(tmp_path / "servers" / "mine.py", "")
    assert found("sh", script).trees == {str(script.parent)}
    assert found("sh", "servers/mine.py", cwd=tmp_path).trees == {str(script.parent)}
    assert found("sh", "-c", str(script)).trees == set(), "what a shell is told is not looked into"
    package = tmp_path / "package"
    program(package / "dist" / "index.js", "")
    (package / "package.json").write_text("{}")
    seen = found("sh", package / "dist" / "index.js", cwd=package)
    assert (seen.trees, seen.cwd) == ({str(package)}, str(package))
    (tmp_path / "module").mkdir()
    assert found("perl", "-m", "module.inner", cwd=tmp_path).trees == {str(tmp_path)}


def test_a_relative_script_is_the_one_that_the_bare_command_would_run(tmp_path: Path) -> None:
    script = program(tmp_path / "servers" / "mine.py", "")
    seen = found("sh", "servers/mine.py", "servers/mine.py", cwd=tmp_path)
    assert (seen.cwd, seen.argv[1:]) == ("/workspace", (str(script), "servers/mine.py")), "the rest is the script's own"
    seen = found("sh", "-x", "../servers/mine.py", cwd=tmp_path / "elsewhere")
    assert seen.argv[1:] == ("-x", str(script))
    seen = found("sh", "mine.py", cwd=script.parent)
    assert (seen.cwd, seen.argv[1:]) == (str(script.parent), ("mine.py",)), "in its own folder nothing has to change"
    seen = found("sh", "home/server.py", cwd=tmp_path, private=str(tmp_path / "home"))
    assert seen.argv[1:] == ("home/server.py",), "what is not there is for the interpreter to say"
    private = program(tmp_path / "home" / "server.py", "")
    seen = found("sh", "server.py", cwd=tmp_path / "home", private=str(tmp_path / "home"))
    assert (seen.files, seen.argv[1:]) == ({str(private): str(private)}, (str(private),))


def test_what_is_private_is_never_shown_whole(tmp_path: Path) -> None:
    script = program(tmp_path / "home" / "server.py", "")
    seen = found("sh", script, private=str(tmp_path / "home"))
    assert (seen.trees, seen.files) == (set(), {str(script): str(script)})
    tool = program(tmp_path / "home" / "bin" / "tool", "")
    (tmp_path / "home" / "lib").mkdir()
    assert found(tool, private=str(tmp_path / "home" / ".ssh")).mounts == (Mount(str(tool), str(tool)),)


def test_a_folder_behind_a_link_is_seen_under_both_names(tmp_path: Path) -> None:
    program(tmp_path / "v2" / "node_modules" / "a" / "index.js", "")
    (tmp_path / "current").symlink_to("v2")
    seen = found("sh", tmp_path / "current" / "node_modules" / "a" / "index.js")
    assert seen.trees == {str(tmp_path / "v2" / "node_modules")}
    assert seen.files == {str(tmp_path / "current" / "node_modules"): str(tmp_path / "v2" / "node_modules")}


def test_a_shim_is_looked_through(tmp_path: Path) -> None:
    shim = program(tmp_path / "pyenv" / "shims" / "python3", "#!/bin/sh\n")
    real = program(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3", "")
    (tmp_path / "pyenv" / "versions" / "3.12.1" / "lib").mkdir()
    path = str(shim.parent)
    with pytest.raises(ValueError, match="shim"):
        found("python3", path=path)
    (tmp_path / "pyenv" / "version").write_text("3.12.1\n")
    assert found("python3", path=path).argv == (str(real),)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".python-version").write_text("3.12.1\n")
    assert found("python3", path=path, cwd=tmp_path / "project").trees == {str(real.parent.parent)}


def test_a_program_in_a_mount_needs_only_its_interpreter(tmp_path: Path) -> None:
    program(tmp_path / "tree" / "server", "#!/bin/sh\n")
    mounts = (Mount(str(tmp_path / "tree"), "/packages"),)
    seen = found("/packages/server", "--flag", mounts=mounts)
    assert (seen.argv, seen.trees) == (("/packages/server", "--flag"), set())


def test_of_an_image_nothing_is_looked_for_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "link").symlink_to("/nowhere")

    def of_image(*command: str, cwd: str | None = None, mounts: tuple[Mount, ...] = ()) -> ResolvedCommand:
        return resolve_in_image(command, cwd, str(tmp_path), mounts)

    seen = of_image("no-such-program", "--flag", cwd="/app")
    assert (seen.argv, seen.trees, seen.mounts) == (("no-such-program", "--flag"), set(), ())
    assert seen.path == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert [of_image("x", cwd=cwd).cwd for cwd in ("/app", "/", "/link/deep")] == ["/app", "/", "/link/deep"]
    assert {of_image("x", cwd=cwd).cwd for cwd in (None, "/app/none", "/workspace/a", "/tmp", "/proc")} == {
        "/workspace"
    }
    for hidden in ("/workspace/server", "/tmp/server", "/dev/x"):
        with pytest.raises(ValueError, match="of a box is its own"):
            of_image(hidden)
    assert of_image("/workspace/code/x", mounts=(Mount("/usr", "/workspace/code"),)).argv == ("/workspace/code/x",)


@pytest.mark.parametrize("word", ["no-such-program", "/no/such/program", "./none"])
def test_what_is_not_there(word: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no program"):
        found(word, cwd=tmp_path)
    script = program(tmp_path / "script", "#!/no/such/interpreter\n")
    with pytest.raises(ValueError, match="which a script begins with"):
        found(script)


def test_our_own_state_beside_a_script_is_not_shown_and_the_rest_is(tmp_path: Path) -> None:
    script = program(tmp_path / "server.py", "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "var" / "state").mkdir(parents=True)
    (tmp_path / "var" / "data.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "var" / "state")
    seen = found("python3", script, cwd=tmp_path, apart=tmp_path / "var" / "state")
    assert not any(tree in (str(tmp_path), str(tmp_path / "var")) for tree in seen.trees)
    beneath = {at: host for at, host in seen.files.items() if at.startswith(str(tmp_path))}
    shown = ("server.py", "lib", "var/data.json")
    assert beneath == {f"{tmp_path}/{name}": f"{tmp_path}/{name}" for name in shown}
    assert seen.cwd == str(tmp_path), "paths that are relative to its folder lead where they did"


@pytest.mark.parametrize("there", [True, False], ids=["there", "not yet there"])
def test_a_file_of_ours_beside_a_script_is_not_shown_and_the_rest_is(tmp_path: Path, there: bool) -> None:
    script = program(tmp_path / "server.py", "")
    (tmp_path / "lib").mkdir()
    if there:
        (tmp_path / "tok.txt").write_text("s3cr3t")
    seen = found("python3", script, cwd=tmp_path, apart=tmp_path / "tok.txt")
    assert not seen.sees(str(tmp_path / "tok.txt"))
    assert seen.sees(str(tmp_path / "lib")) and seen.sees(str(script))


def test_a_script_in_our_own_state_is_shown_alone(tmp_path: Path) -> None:
    script = program(tmp_path / "state" / "server.py", "")
    seen = found("python3", script, cwd=tmp_path, apart=tmp_path / "state")
    assert [at for at in seen.files if at.startswith(str(tmp_path))] == [str(script)]
    assert not any(tree.startswith(str(tmp_path)) for tree in seen.trees)
