"""Where things lie by default. The only file that reads the environment.

The environment gives paths, and what OpenTelemetry's own variables say where the configuration leaves it to them: what
the configuration file says, no variable changes.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from ringfence.core.errors import ConfigError, Problem
from ringfence.core.system import open_place

CONFIG_NAME = "ringfence.yaml"
TRACES_PATH = "/v1/traces"
"""Where a collector takes traces, by OpenTelemetry's convention."""

ORGANISATION = Path("/etc/ringfence/organisation.yaml")
"""The policy of this machine's operator, for every configuration on it."""


def is_organised() -> bool:
    """Whether there is one. Where that cannot be known there is, and reading it says why it cannot be read."""
    try:
        ORGANISATION.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def default_paths() -> tuple[Path, ...]:
    """Where the configuration is looked for when none is named; the first that exists is taken. Raises ConfigError."""
    named = _named()
    if named is not None:
        return (named,)
    return (_absolute(CONFIG_NAME), _base("XDG_CONFIG_HOME", ".config") / CONFIG_NAME)


def _named() -> Path | None:
    """The configuration that a variable names. One that is not there is an error: to go on without it would be to go
    on without the rules that it holds. Raises ConfigError."""
    named = os.environ.get("RINGFENCE_CONFIG")
    if not named:
        return None
    path = _absolute(named)
    if not path.is_file():
        text = "RINGFENCE_CONFIG names this file, which does not exist; correct the variable, or unset it"
        raise ConfigError([Problem(str(path), 1, 1, text)])
    return path


def untrusted_because(path: Path) -> str | None:
    """Why a configuration that was found, and not named by the user, must not be used: another user may have put it
    there. None: only this user can have. Its owner alone proves nothing: a user who may write to the folder can move
    a file of another owner there, and one of its group may have written the text."""
    # No user behind sudo either: what a program of theirs wrote would run as the one that they became.
    found = open_place(path)
    if found is None:
        return None
    place, why = found
    if place == path:
        return why
    if place == path.parent:
        return f"lies in a folder that {why}"
    return f"{'lies below' if place in path.parents else 'leads to'} {place}, which {why}"


def own_paths() -> tuple[Path, ...]:
    """The same without the folder that we happen to stand in: what lies there may be what is to be confined."""
    return (_named() or _base("XDG_CONFIG_HOME", ".config") / CONFIG_NAME,)


def state_folder() -> Path:
    """Where the state lies unless `gateway.state` says otherwise."""
    return _base("XDG_STATE_HOME", ".local/state")


def key_folder() -> Path:
    """Where the signing key lies: never in the state folder, whose writer could then sign what it forged."""
    named = os.environ.get("RINGFENCE_KEYS")
    return _absolute(named) if named else _base("XDG_CONFIG_HOME", ".config") / "keys"


def socket_folders(state: Path) -> tuple[Path, ...]:
    """Where sockets that belong to a state folder can lie, the best first, and none where another user could have made
    a folder of that name before us, as in /tmp. The folder itself comes first, since no service cleans it up; the
    others are for file systems that have no sockets."""
    state = Path(os.path.realpath(state))
    name = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    user = os.geteuid()
    runtime = [Path(os.environ.get("XDG_RUNTIME_DIR", "")), Path(f"/run/user/{user}")]
    found = [state / "keeper"]
    found += [folder / "ringfence" / name for folder in dict.fromkeys(runtime) if _is_private(folder, user)]
    found.append(Path("/run/ringfence") / name if user == 0 else state_folder() / "run" / name)
    return tuple(found)


def _is_private(folder: Path, user: int) -> bool:
    """Whether a folder belongs to this user, and no other user may write to it."""
    with suppress(OSError):
        info = os.stat(folder)
        return folder.is_absolute() and info.st_uid == user and not info.st_mode & 0o022
    return False


def resolve(text: str, base: Path) -> Path:
    """A path as a configuration writes it: relative ones are relative to the file's folder."""
    if text == "~" or text.startswith("~/"):
        return Path(os.path.normpath(home() / text[2:]))
    return Path(os.path.normpath(_absolute(str(base)) / text))


def _base(variable: str, otherwise: str) -> Path:
    given = os.environ.get(variable, "")
    # The base directory specification: a relative path is invalid and ignored.
    return (Path(given) if os.path.isabs(given) else home() / otherwise) / "ringfence"


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError([Problem("HOME", 1, 1, "is not set, and this account has no home folder")]) from None


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))


def variable(name: str) -> str | None:
    """A variable that the configuration names as the source of a secret."""
    return os.environ.get(name)


def otlp_endpoint() -> str | None:
    """Where OpenTelemetry's own variables have traces sent, with its path."""
    if whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return whole
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
    return f"{base}{TRACES_PATH}" if base else None


def otlp_headers() -> tuple[tuple[str, str], ...]:
    """What a collector wants to see in requests, as OpenTelemetry's own variables have it. It may be secret."""
    said = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = [each.partition("=") for each in said.split(",")]
    return tuple((name.strip().lower(), unquote(value.strip())) for name, mark, value in pairs if mark and name.strip())


def service_name() -> str:
    """The name of this gateway in traces, if the configuration gives none."""
    return os.environ.get("OTEL_SERVICE_NAME") or "ringfence"


def colours() -> bool:
    """Whether a terminal is to show colours: not where NO_COLOR says so, nor where it has none."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def caller_of_sudo() -> str | None:
    """The number of the user who became root by sudo."""
    return os.environ.get("SUDO_UID")


def process_environment() -> dict[str, str]:
    """What a server process inherits of our environment: enough to run, nothing that could be a credential."""
    names = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TERM", "TMPDIR")
    return {name: os.environ[name] for name in names if name in os.environ}


def index_environment() -> dict[str, str]:
    """The settings of pip in environment variables: which index to ask, and which certificates to trust."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "XDG_CONFIG_HOME"}


def trust_environment() -> dict[str, str]:
    """Where certificates are that this process trusts, when it is not where they usually are."""
    return {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}


def engine_files() -> dict[str, tuple[Path, ...]]:
    """The configuration files of container engines on this host, by the names of `packages.engines.EngineFiles`."""
    given = {name: os.environ.get(name, "") for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR")}
    mine = _base("XDG_CONFIG_HOME", ".config").parent
    client = _absolute(given["DOCKER_CONFIG"]) if given["DOCKER_CONFIG"] else home() / ".docker"
    auths = [client / "config.json", mine / "containers/auth.json"]
    if os.path.isabs(given["XDG_RUNTIME_DIR"]):
        auths.insert(1, Path(given["XDG_RUNTIME_DIR"]) / "containers/auth.json")
    if given["REGISTRY_AUTH_FILE"]:
        auths.insert(0, _absolute(given["REGISTRY_AUTH_FILE"]))
    named = os.environ.get("CONTAINERS_REGISTRIES_CONF", "")
    usual = (mine / "containers/registries.conf", Path("/etc/containers/registries.conf"))
    own = next((path for path in usual if path.is_file()), usual[1])
    folders = (mine / "containers/registries.conf.d", Path("/etc/containers/registries.conf.d"))
    return {
        "daemon": (mine / "docker/daemon.json", Path("/etc/docker/daemon.json")),
        "registries": (_absolute(named),) if named else (*folders, own),
        "auths": tuple(auths),
        "certificates": (
            *(mine / "containers/certs.d", mine / "docker/certs.d"),
            *(Path("/etc/containers/certs.d"), Path("/etc/docker/certs.d")),
        ),
    }


def docker_hosts() -> tuple[str, ...]:
    """Where the socket of a Docker Engine API may be: as DOCKER_HOST says, or in the usual places that there are."""
    if named := os.environ.get("DOCKER_HOST"):
        return (named,)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    usual = [Path("/var/run/docker.sock"), Path("/run/podman/podman.sock")]
    if os.path.isabs(runtime):
        usual[1:1] = [Path(runtime) / "docker.sock", Path(runtime) / "podman/podman.sock"]
    usual += [home() / each for each in (".docker/run/docker.sock", ".colima/default/docker.sock", ".rd/docker.sock")]
    return tuple(f"unix://{path}" for path in usual if path.exists()) or (f"unix://{usual[0]}",)
