"""What a server may be given besides, and the configuration with it: all else in the file stays as it is."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from ringfence.config import drafting, writing
from ringfence.model import Definition
from ringfence.sandbox.wants import Want

_LIMITS = {"--memory": "memory_mb", "--pids": "processes", "--disk": "disk_mb"}


@dataclass(frozen=True, slots=True)
class Grant:
    """One thing, by the words that a person can name it with."""

    kind: Literal["mount", "allow", "listen", "limit"]
    what: str
    value: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (self.kind, self.what, self.value)))


def grants_of(want: Want) -> list[Grant]:
    """None where no line of a configuration would give it."""
    words = want.option.split(" ")
    if want.option.startswith("--mount "):
        path, _, mode = want.option.removeprefix("--mount ").rpartition(":")
        return [Grant("mount", path[: len(path) // 2], mode)]
    if words[0] == "--listen":
        return [Grant("listen", "allowed")]
    if words[0] in _LIMITS:
        return [Grant("limit", _LIMITS[words[0]], words[1])]
    hosts = [word for word in words if not word.startswith("--") and "." in word]
    return [Grant("allow", host) for host in hosts] if words[0] == "--allow" else []


def granted(text: str, server: str, grants: Iterable[Grant], tools: Iterable[Definition] = ()) -> str:
    """The configuration with these grants, and with drafts for these tools."""
    yaml = YAML(typ="rt")
    yaml.width, yaml.preserve_quotes = 4096, True
    yaml.indent(mapping=2, sequence=4, offset=2)
    top = yaml.load(text)
    entry = top["servers"][server]
    for grant in grants:
        _give(top, entry, server, grant)
    if tools:
        capabilities = _section(top, "capabilities")
        for tool in tools:
            keys = {"server": server, **({"tool": tool.name} if tool.name in capabilities else {})}
            name = f"{server}_{tool.name}" if tool.name in capabilities else tool.name
            capabilities[name] = _flow({**keys, **drafting.drafted(tool.body)})
    out = io.StringIO()
    yaml.dump(top, out)
    return out.getvalue()


def _give(top: Any, entry: Any, server: str, grant: Grant) -> None:
    if grant.kind == "mount":
        mounts = entry.setdefault("mounts", _sequence([]))
        same = next((mount for mount in mounts if mount.get("at") == grant.what), None)
        if same is None:
            mounts.append(_flow({"host": grant.what, "at": grant.what, "mode": grant.value}))
        elif grant.value == "rw":
            same["mode"] = "rw"
    elif grant.kind == "listen":
        entry["listen"] = grant.what
    elif grant.kind == "limit":
        entry.setdefault("limits", _flow({}))[grant.what] = int(grant.value)
    else:
        if entry.get("network", "denied") == "denied":
            entry["network"] = f"{server}_network"
        network = _section(top, "networks").setdefault(entry["network"], _flow({"allow": _sequence([])}))
        network.setdefault("allow", _sequence([])).append(grant.what)


def _section(top: Any, name: str) -> Any:
    if not top.get(name):
        top[name] = CommentedMap()
    top[name].fa.set_block_style()
    return top[name]


def _flow(keys: Mapping[str, Any]) -> CommentedMap:
    made = CommentedMap(keys)
    made.fa.set_flow_style()
    return made


def _sequence(items: list[Any]) -> CommentedSeq:
    made = CommentedSeq(items)
    made.fa.set_flow_style()
    return made


def shown(grant: Grant) -> str:
    """For a person, as the file will have it."""
    if grant.kind == "mount":
        access = "read and write" if grant.value == "rw" else "read"
        return f"{access} {grant.what}"
    if grant.kind == "listen":
        return "wait for connections within its box"
    if grant.kind == "allow":
        return f"reach {grant.what}"
    return f"use more: {writing.flow({grant.what: int(grant.value)})}"
