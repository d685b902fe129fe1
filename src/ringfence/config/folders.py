"""Folders of the host: which of them may be mounted, and whether a mount exposes what governs the mount.

A symbolic link in a mount's path is followed once, when the configuration is read. A link that lies in a folder which
the same configuration lets a box write to is refused: the box may have put it there. From then on the real path counts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ringfence.config import paths
from ringfence.core.box import Mount, within
from ringfence.core.errors import ConfigError, Problem
from ringfence.core.model import ServerSpec

if TYPE_CHECKING:
    from ringfence.config.settings import Config

_IN_A_HOME = {
    ".ssh": "keys of SSH",
    ".gnupg": "keys of GnuPG",
    ".aws": "credentials of AWS",
    ".azure": "credentials of Azure",
    ".config/gcloud": "credentials of Google Cloud",
    ".oci": "credentials of Oracle Cloud",
    ".kube": "credentials of Kubernetes",
    ".docker": "credentials of Docker",
    ".config/containers": "credentials of Podman",
    ".netrc": "passwords",
    ".npmrc": "tokens of npm",
    ".pypirc": "tokens of PyPI",
    ".config/pip": "tokens of pip",
    ".cargo/credentials.toml": "tokens of Cargo",
    ".gem/credentials": "tokens of RubyGems",
    ".git-credentials": "passwords of Git",
    ".config/git/credentials": "passwords of Git",
    ".config/gh": "tokens of GitHub",
    ".config/hub": "tokens of GitHub",
    ".config/glab-cli": "tokens of GitLab",
    ".config/doctl": "tokens of DigitalOcean",
    ".config/hcloud": "tokens of Hetzner Cloud",
    ".config/rclone": "credentials of storage services",
    ".s3cfg": "credentials of S3",
    ".databrickscfg": "tokens of Databricks",
    ".snowflake": "credentials of Snowflake",
    ".fly": "tokens of Fly.io",
    ".composer": "tokens of Composer",
    ".config/composer": "tokens of Composer",
    ".m2": "passwords of Maven",
    ".gradle/gradle.properties": "passwords of Gradle",
    ".nuget": "tokens of NuGet",
    ".yarnrc.yml": "tokens of Yarn",
    ".config/sops": "keys of SOPS",
    ".config/op": "1Password",
    ".config/Bitwarden CLI": "Bitwarden",
    ".terraform.d": "tokens of Terraform",
    ".vault-token": "a token of Vault",
    ".pgpass": "passwords of PostgreSQL",
    ".my.cnf": "passwords of MySQL",
    ".password-store": "passwords",
    ".local/share/keyrings": "the keyring",
    ".mozilla": "a browser's profile",
    ".config/google-chrome": "a browser's profile",
    ".config/chromium": "a browser's profile",
    ".config/BraveSoftware": "a browser's profile",
    ".config/microsoft-edge": "a browser's profile",
    ".thunderbird": "mail",
    ".config/Signal": "messages",
    ".config/Slack": "messages",
    ".config/discord": "messages",
    ".env": "settings, which may be secrets",
    ".bash_history": "what was typed into a shell",
    ".zsh_history": "what was typed into a shell",
    ".local/share/fish": "what was typed into a shell",
    ".python_history": "what was typed into a program",
    ".node_repl_history": "what was typed into a program",
    ".psql_history": "what was typed into a program",
    ".mysql_history": "what was typed into a program",
    ".sqlite_history": "what was typed into a program",
    ".config/Code": "tokens of an editor",
    ".config/Cursor": "tokens of an editor",
    ".config/github-copilot": "tokens of an agent",
    ".config/Claude": "tokens of an agent",
    ".claude": "tokens of an agent",
    ".claude.json": "tokens of an agent",
    ".codex": "tokens of an agent",
    ".cursor": "tokens of an agent",
    ".gemini": "tokens of an agent",
    ".config/ringfence": "Ringfence's own configuration and keys",
    ".local/state/ringfence": "Ringfence's own state",
}
"""Keyed by the path below a home folder."""
_SYSTEM = {
    "/etc/shadow": "passwords of the system",
    "/etc/ssh": "keys of SSH",
    "/etc/ssl/private": "keys of the system",
    "/etc/kubernetes": "credentials of Kubernetes",
    "/run": "sockets and secrets of services",
    "/var/run": "sockets and secrets of services",
    "/proc": "the insides of processes",
    "/sys": "the insides of the kernel",
    "/dev": "devices",
}
_HOMES = ("/home", "/Users")


def declared(
    mount: Mount, base: Path, writable: Sequence[str] = (), own: Mapping[Path, str] = MappingProxyType({})
) -> Mount:
    """The mount with the real path of its folder. `own`: what the configuration itself keeps where. Raises ValueError
    if the folder may not be mounted."""
    host = real_path(str(paths.resolve(mount.host, base)), writable)
    why = touches_credentials(host, own)
    if why is not None and not mount.unsafe:
        raise ValueError(f"{host} holds {why}; mount a folder without it, or say why it is right: unsafe: REASON")
    return replace(mount, host=host)


def real_path(path: str, writable: Iterable[str] = ()) -> str:
    """Where a path leads, link by link. Raises ValueError for a link that a box may have put there, and for a loop."""
    writable = list(writable)
    rest = [part for part in path.split("/") if part]
    found = ""
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            found = os.path.dirname(found) if found else ""
            continue
        if part == ".":
            continue
        step = f"{found}/{part}"
        if not os.path.islink(step):
            found = step
            continue
        links += 1
        if links > 40:
            raise ValueError(f"{path} is a loop of links")
        if any(within(step, folder) for folder in writable):
            raise ValueError(f"{step} is a link in a folder that a box may write to; it is not followed")
        target = os.readlink(step)
        found = "" if target.startswith("/") else found
        rest = [*(each for each in target.split("/") if each), *rest]
    return found or "/"


def touches_credentials(path: str, own: Mapping[Path, str] = MappingProxyType({})) -> str | None:
    """What would be handed over with this folder or file, by lying at it, in it or around it; None: nothing known.
    `own`: what else is known to lie somewhere, and where."""
    homes = _homes()
    if any(within(home, path) for home in (*homes, *_HOMES)):
        return "a home folder, and with it all credentials there"
    places = {f"{home}/{name}": what for home in homes for name, what in _IN_A_HOME.items()}
    places |= {str(paths.state_folder()): "Ringfence's own state", str(paths.key_folder()): "Ringfence's own keys"}
    for kept, what in own.items():
        real = os.path.realpath(kept)
        if within(path, real) or within(real, path):  # also where it is not there yet
            return what
    for place, what in (places | _SYSTEM).items():
        if within(path, place) or (within(place, path) and os.path.lexists(place)):
            return what
    return None


def _homes() -> list[str]:
    """The home of the current user, and every folder that looks like a home."""
    homes = [os.path.realpath(paths.home()), "/root"]
    for folder in _HOMES:
        try:
            homes += [f"{folder}/{name}" for name in os.listdir(folder)]
        except OSError:
            continue
    return homes


def kept_apart(config: Config) -> tuple[str, ...]:
    """What no box is shown because a program lies beside it: the state, the files that the configuration names as
    secrets, and the socket of the gateway; each where it is named, and where that leads."""
    files = [str(each.options["path"]) for each in config.secrets.values() if each.source == "file"]
    if config.vault is not None and config.vault.token_file is not None:
        files.append(str(config.vault.token_file))
    if config.gateway.socket is not None:
        files.append(str(config.gateway.socket))
    # The folder of a name counts where it really is; the name itself may be a link, which is apart as well.
    named = [f"{os.path.realpath(os.path.dirname(each))}/{os.path.basename(each)}" for each in files]
    real = [os.path.realpath(each) for each in (str(config.gateway.state), *files)]
    return tuple(dict.fromkeys((*real, *named)))


# ── Governing files in folders that a box may write ───────────────────────────────────────────────


def overlaps(config: Config) -> list[Problem]:
    """Configuration, policy files, state or keys under a folder that a box or server may write; keys in the state."""
    governing = [
        ("the configuration", config.path),
        *(("the policy file", path) for path in config.policy.files),
        ("the state", config.gateway.state),
        ("the signing key", paths.key_folder()),
        *((f"the function of hook {name!r}", path) for name, path in _hook_files(config)),
    ]
    file = str(config.path)
    problems = [
        Problem(file, 1, 1, f"{what} ({path}) lies under {folder}, which {who} may write")
        for folder, who in _writable(config)
        for what, path in governing
        if _under(path, folder)
    ]
    problems += (problem for problem, certain in _over_code(config) if certain)
    if _under(paths.key_folder(), config.gateway.state):
        text = f"the signing key ({paths.key_folder()}) lies in the state folder, whose writers could then sign"
        problems.append(Problem(file, 1, 1, text))
    return problems


def doubts(config: Config) -> list[Problem]:
    """Folders that a box or server may write and that lie among the code of a server, which may load it or not."""
    return [problem for problem, certain in _over_code(config) if not certain]


def _over_code(config: Config) -> Iterator[tuple[Problem, bool]]:
    """Writable folders that the code of a server comes from, whose next start then runs what was written there with
    all that the server has; and whether that is certain."""
    from ringfence.sandbox.servers.resolve import code_of, is_installed  # noqa: PLC0415 - `run` need not load it

    code: list[tuple[str, str]] = []
    for server in config.servers.values():
        if server.command and server.packages is None:
            environment = {**paths.process_environment(), **server.env}
            found = code_of(server.command, environment, server.cwd or str(config.path.parent), server.mounts)
            code += ((server.name, place) for place in found)
    for folder, who in _writable_unasked(config):
        for owner, place in code:
            if within(place, folder):
                certain = True
                text = f"the code of server {owner!r} ({place}) lies under {folder}, which {who} may write: its"
            elif within(folder, place):
                certain = is_installed(place)
                text = f"{folder}, which {who} may write, lies in the code of server {owner!r} ({place}):"
                text += " its" if certain else " if it loads code from there, its"
            else:
                continue
            text += " next start runs what was written there, with all that the server has; mount it ro, keep the code"
            yield Problem(str(config.path), 1, 1, f"{text} elsewhere, or say why: unsafe: REASON"), certain


def _writable_unasked(config: Config) -> Iterator[tuple[str, str]]:
    """Folders that a box may write without a reason of the operator's. A command in no box is left out: it could write
    to its own code by any path."""
    for name, contract in config.contracts.items():
        if contract.server is None:  # a tool of a server has some of the server's own mounts
            yield from ((each, f"capability {name!r}") for each in _unasked(contract.mounts))
    for name, server in config.servers.items():
        if server.placement != "unsafe_host":
            yield from ((each, f"server {name!r}") for each in _unasked(server.mounts))
    for name, hook in config.hooks.items():
        yield from ((each, f"hook {name!r}") for each in _unasked(hook.mounts))


def _unasked(mounts: Iterable[Mount]) -> Iterator[str]:
    return (os.path.realpath(mount.host) for mount in mounts if mount.mode == "rw" and not mount.unsafe)


def governs(folder: Path, config: Config) -> str | None:
    """What rules over boxes, or runs them, and would be replaced by what a box leaves in this folder; None: nothing.

    It lies in the folder, or the folder in it. A configuration of that folder counts even if it is not the one in force
    here, since another command obeys it.
    """
    kept = {
        str(folder / paths.CONFIG_NAME): "a configuration",
        **{str(path): "the configuration" for path in (*_own_paths(), *config.files)},
        **{str(path): "the policy" for path in config.policy.files},
        **{str(path): "the state of Ringfence" for path in (config.gateway.state, paths.state_folder())},
        str(paths.key_folder()): "the signing key",
        **{str(path): f"the function of hook {name!r}" for name, path in _hook_files(config)},
        str(Path(__file__).parents[1]): "Ringfence itself",
        **({} if sys.prefix == sys.base_prefix else {sys.prefix: "Ringfence itself"}),
    }
    here = os.path.realpath(folder)
    for place, what in kept.items():
        real = os.path.realpath(place)
        if within(here, real) or (within(real, here) and os.path.lexists(place)):
            return f"{what} ({place})"
    return None


def _hook_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Code of the operator's that runs in no box."""
    for name, hook in config.hooks.items():
        file = (hook.python or "").rpartition(":")[0]
        if file.endswith(".py"):
            yield name, Path(file)


def _own_paths() -> tuple[Path, ...]:
    try:
        return paths.own_paths()
    except ConfigError:  # a variable names a file that is not there
        return ()


def _writable(config: Config) -> Iterator[tuple[Path, str]]:
    for name, contract in config.contracts.items():
        for mount in contract.mounts:
            if mount.mode == "rw":
                yield Path(mount.host), f"capability {name!r}"
    for name, hook in config.hooks.items():
        yield from ((Path(mount.host), f"hook {name!r}") for mount in hook.mounts if mount.mode == "rw")
    for name, server in config.servers.items():
        boxed = (Path(mount.host) for mount in server.mounts if mount.mode == "rw")
        for folder in _given_folders(server, config.path.parent) if server.placement == "unsafe_host" else boxed:
            yield folder, f"server {name!r}"


def _given_folders(server: ServerSpec, config_folder: Path) -> Iterator[Path]:
    """The folders that a command in no box is pointed at: those among its arguments, and its working folder.

    A command that runs beside the configuration only by default was not pointed at that folder.
    """
    if not server.command or server.cwd is None:
        return
    if Path(server.cwd) != config_folder:
        yield Path(server.cwd)
    for argument in server.command[1:]:
        text = argument.rpartition("=")[2] if argument.startswith("-") else argument
        folder = Path(server.cwd) / text
        if text and _is_folder(folder):
            yield folder


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # too long to be a path, for one
        return False


def _under(path: Path, folder: Path) -> bool:
    # Links are followed on both sides: what counts is where the bytes lie.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
