"""Tools for the files of sessions."""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.box import MIB
from ringfence.model import Json, Mode
from ringfence.sandbox.offers.parts import COUNT, DIGEST, ENTRY, FILE, FLAG, ONE, PATH, SESSION, TEXT, Tool

_TO: Json = {**PATH, "description": "Where to, beneath /workspace."}

TOOLS: Mapping[str, Tool] = {
    "list_files": Tool(
        "List files",
        Mode.READ,
        "What is in a folder of a session. Left out, the path is /workspace.",
        {**ONE, "path": PATH, "depth": {"type": "integer", "minimum": 1, "maximum": 32, "description": "Left out: 1."}},
        ("session",),
        {"session": TEXT, "path": TEXT, "entries": {"type": "array", "items": ENTRY}, "left_out": COUNT},
        wide={"depth": {"type": "integer", "minimum": 0, "maximum": 64}},
    ),
    "read_file": Tool(
        "Read a file",
        Mode.READ,
        "Read a file of a session: text as text, a picture as a picture, anything else as a blob. A result has {result}"
        " at most: of a longer file comes the first part, and next_offset says where to go on.",
        {**ONE, "path": PATH, "offset": COUNT, "length": {"type": "integer", "minimum": 1, "maximum": 64 * MIB}},
        ("session", "path"),
        {
            **{"session": TEXT, "path": TEXT, "mime": TEXT, "size": COUNT, "offset": COUNT, "bytes": COUNT},
            **{"text": TEXT, "next_offset": {"type": ["integer", "null"], "description": "null: that was all."}},
        },
        ("text",),
    ),
    "write_file": Tool(
        "Write a file",
        Mode.WRITE,
        "Write a file in a session, with the folders above it: `text`, or `base64` for what is no text. What was there"
        " is replaced; with `append` it is added to. For more than fits into one call, append. /workspace/input is"
        " read-only.",
        {
            **ONE,
            "path": PATH,
            "text": TEXT,
            "base64": {"type": "string", "contentEncoding": "base64"},
            "append": FLAG,
        },
        ("session", "path"),
        {"session": TEXT, **FILE},
        wide={"data": DIGEST, "mode": {"type": "integer", "minimum": 0, "maximum": 0o777}},
        one_of=("text", "base64", "data"),
    ),
    "remove_file": Tool(
        "Remove a file",
        Mode.WRITE,
        "Remove a file of a session, or a folder with all that is in it.",
        {**ONE, "path": PATH},
        ("session", "path"),
        {"session": TEXT, "path": TEXT},
        destructive=True,
    ),
    "make_folder": Tool(
        "Make a folder",
        Mode.WRITE,
        "Make a folder in a session, with those above it.",
        {**ONE, "path": PATH},
        ("session", "path"),
        {"session": TEXT, "path": TEXT, "made": {**FLAG, "description": "false: it was there already."}},
    ),
    "copy_file": Tool(
        "Copy a file",
        Mode.WRITE,
        "Copy a file, of this session or into another one of yours, without its content passing through you.",
        {**ONE, "path": PATH, "to_session": SESSION, "to_path": _TO},
        ("session", "path", "to_path"),
        {"session": TEXT, **FILE},
    ),
    "rename_file": Tool(
        "Rename a file", Mode.WRITE, "Give a file another path.", {**ONE, "path": PATH, "to": _TO},
        ("session", "path", "to"), only_wide=True,
    ),
    "read_folder": Tool(
        "Read a folder", Mode.READ, "A folder as a tar stream.", {**ONE, "path": PATH}, ("session", "path"),
        only_wide=True,
    ),
    "write_folder": Tool(
        "Write a folder", Mode.WRITE, "Put the files of a tar stream into a folder.",
        {**ONE, "path": PATH, "data": DIGEST}, ("session", "path", "data"), only_wide=True,
    ),
    "watch_files": Tool(
        "Watch a folder", Mode.READ, "Tells what changes in a folder.", {**ONE, "path": PATH, "recursive": FLAG},
        ("session", "path"), only_wide=True,
    ),
}  # fmt: skip
