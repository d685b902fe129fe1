"""Every reason code: who must act, what it means, and what to do about it.

A code stands in errors, in outcomes, in records and in facts. Its own message names the call, the limit or the file;
this table says what is true of every message with that code. `docs/reasons.md` is made from it, and a test checks that
no code in the source is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Actor = Literal["the caller", "the operator", "a person", "the server", "time", "nobody"]


class Reason(NamedTuple):
    """What is true of every message with one code."""

    actor: Actor
    meaning: str
    remedy: str


_CALLER = {
    # the call itself
    "not_to_be_judged": (
        "A person must approve the call, and too much of it looks like secrets for them to be shown.",
        "Send less in one call that looks like secrets.",
    ),
    "ambiguous_keys": ("Two keys of one object would look the same to a reader.", "Name the keys apart."),
    "bad_arguments": ("The arguments do not fit the tool's schema.", "Read the message and the schema; call again."),
    "bad_meta": ("What the call carries in `_meta` cannot be sent on.", "Send less in `_meta`, as plain JSON."),
    "bad_request": (
        "The request is not one that can be read.",
        "Send valid JSON-RPC: an object without duplicate keys.",
    ),
    "bad_http": ("The request is not HTTP/1.1.", "Send HTTP/1.1."),
    "head_too_large": ("The head of the request is too large.", "Send fewer or shorter headers."),
    "too_slow": ("The request arrived too slowly.", "Send all of it at once."),
    "foreign_network": (
        "The keeper serves no program of another network, such as a box.",
        "Call it from its own host.",
    ),
    "rules_changed": (
        "The rules were changed while the call waited, so it was not begun, or got no answer of its client.",
        "Make the call again: the rules of now decide on it, and a person is asked anew where they want one.",
    ),
    "key_conflict": ("The idempotency key was used for another request.", "Use a key of its own for each request."),
    "no_key": (
        "The contract derives a key from the arguments, and they give none.",
        "Send the arguments that it names.",
    ),
    "loop": ("The same call failed unchanged too often in a row.", "Change the call, or wait as the message says."),
    "unknown_tool": ("No tool of that name is offered.", "List the tools; the message names similar ones."),
    "unknown_resource": ("No such resource is offered.", "List the resources."),
    "unknown_prompt": ("No such prompt is offered.", "List the prompts."),
    "unknown_completion": ("No completion is offered for that.", "Ask for a prompt or resource that is offered."),
    "unknown_listing": ("The server's lists are not offered.", "Ask a server that is configured."),
    "unknown_logging": ("The server's log is not offered.", "Ask a server that is configured."),
    "unknown_template": ("There is no template of that name.", "Use one that the message names."),
    "wrong_environment": ("The tool is not offered in this environment.", "Call it where its contract allows it."),
    "caller_timeout": ("The caller's own time ran out.", "Give it more time, or ask for less."),
    "cancelled": ("The caller cancelled the call.", "Nothing; call again if it was a mistake."),
    "wait_timeout": ("The wait is over; what it waited for goes on.", "Wait again, or kill it."),
    "too_large": ("What was sent or asked for is larger than may be.", "Send or ask for less at a time."),
    "too_many": ("There would be more of them than may be.", "End or remove some, or name fewer."),
    "client_refused": ("The client did not answer a server's question.", "Answer it, or use a client that can."),
    "commands_in_session": (
        "A contract that names programs cannot be used in a session.",
        "Call it without a session.",
    ),
    # what runs in a box
    "file_size": ("It wrote a file larger than its disk allows.", "Write less, or raise the disk limit."),
    "exit_status": ("The program ended with an exit status that is not 0.", "Read its output."),
    "signalled": ("The program was ended by a signal.", "Read its output; look for a crash."),
    "setup_failed": (
        "The set-up code failed in the sandbox.",
        "Correct the set-up code; the message ends with its error.",
    ),
    "timeout": ("It took longer than its time limit.", "Do less, or ask for a longer limit."),
    "memory": ("It used more memory than its limit.", "Use less, or ask for more memory."),
    "cpu": ("It used more processor time than its limit.", "Do less, or ask for more time."),
    "pids": ("It made more processes than its limit.", "Start fewer, or ask for more."),
    "disk": ("The disk of the box is used up.", "Remove files, or ask for more disk."),
    "output": ("It wrote more output than its limit.", "Print less, or write to a file."),
    "policy": ("A rule refuses it, or it broke the rules of its box.", "Read the reason; ask the operator for a rule."),
    "forged": ("Its interpreter said that it was done and went on.", "Do not tamper with the interpreter."),
    "input_changed": ("An input changed while it was sent.", "Send it again when nothing writes to it."),
    "no_input": ("An input is not there, cannot be read, or is not taken.", "Name a file that can be read."),
    "no_output": ("The place for output cannot be written.", "Name a folder that can be written."),
    # sessions
    "no_session": (
        "The call needs a session, or sessions are not available here.",
        "Open one and name it; where there are none, leave `session` out.",
    ),
    "unknown_session": ("No session of the caller's has this id.", "List the sessions, or open another."),
    "session_stopped": ("The session has ended.", "Open another; the message says why it ended."),
    "session_paused": ("The session is paused.", "Resume it first."),
    "session_starting": ("The session is still starting.", "Wait until it runs."),
    "session_changed": ("Another step came between.", "Look at the session again, then decide."),
    "session_network": (
        "The session's network was tightened since it was opened.",
        "Open another session, and close this one.",
    ),
    "session_layout": ("The session was opened without what the contract demands.", "Open one as the message says."),
    "not_open": ("The sandbox was not made yet.", "Use it in a `with`, or call `create()`."),
    "started": ("The gateway runs already.", "Start it once."),
    "not_started": ("The gateway does not run.", "Use `async with`, or call `start()`."),
    "unknown_process": ("No such process runs in the session.", "List its processes."),
    "unknown_snapshot": ("There is no such snapshot.", "List the snapshots."),
    "unknown_volume": ("There is no such volume.", "List the volumes."),
    "volume_busy": ("Another session writes to the volume.", "End that session, or mount it to be read."),
    "retain_none": ("The session was opened to keep nothing.", "Open one with `retain: output`."),
    "quota": ("A quota is used up.", "Remove some, wait for the next day, or ask the operator for more."),
    "listen_denied": (
        "The contract or the session lets no port be shown outside of the box.",
        "Open it with `listen`, if the contract allows.",
    ),
    "too_many_ports": ("The session shows as many ports as it may.", "Close some."),
    "bad_port": ("That is not a port.", "Use 1 to 65535."),
    "bad_context": ("That is not a name for a context.", "Use another name."),
    "bad_count": ("A session cannot be forked into so many.", "Ask for fewer at a time."),
    "bad_signal": ("That is not a signal.", "15 asks a process to end, 9 ends it."),
    "bad_size": ("It cannot have that size.", "Use a size that the message allows."),
    "bad_source": ("The source is not proper text.", "Send Unicode text."),
    "bad_command": ("That is not a command that can be run.", "Send a command without NUL, or a list of texts."),
    "bad_spec": ("No session can be made like this.", "Read the message, and ask for another."),
    # files
    "bad_path": ("That path cannot be used.", "Use a plain path beneath the workspace."),
    "bad_name": ("That name cannot be used.", "Use letters, digits, `-` and `_`."),
    "bad_range": ("That is not a range of a file.", "Use an offset and length of 0 or more."),
    "bad_depth": ("That is not a depth.", "Use 1 or more."),
    "bad_archive": ("The archive cannot be used.", "Make it anew, as a plain tar file."),
    "outside": (
        "Of that session only `/workspace/output` is left, or the path is no place for a volume.",
        "Use a path beneath `/workspace`.",
    ),
    "not_found": ("There is no such file, snapshot or volume.", "List the folder, the snapshots or the volumes."),
    "not_a_folder": ("The path leads through something that is not a folder.", "Look at the path, and at links in it."),
    "not_a_file": ("The path is not a regular file.", "Name a file."),
    "link": ("The path leads through a link that is not followed.", "Use the path that the link leads to."),
    "not_possible": ("The file cannot be used so.", "Read the message."),
    "exists": ("There is something of that name already.", "Remove it first, or use another name."),
    "mounted": ("A folder of the host is mounted there.", "Use another place."),
    "no_permission": ("The file's permissions forbid it.", "Open it with `chmod` in the box."),
    "read_only": ("It may only be read.", "Mount it to be written."),
    "other_disk": ("The two places are not on one disk.", "Copy instead of moving."),
    "changing": ("The file changes while it is used.", "Pause the box, or try again."),
    "too_deep": ("The folders are nested too deeply.", "Remove or move the folder."),
    "artifact": (
        "A file that was copied out cannot be searched for secrets.",
        "Leave the output folder alone while a call runs.",
    ),
    # packages
    "bad_package": ("That is not a package that can be named.", "Write it as its index has it."),
    "no_package": ("The packages are not in the cache.", "Run `ringfence init --fetch`."),
    "no_program": ("The box, package or image has no such program.", "Install it, or name one that is there."),
    # the command line
    "bad_url": ("The address cannot be used.", "Write an http or https URL."),
    "no_terminal": ("A person must answer, and there is no terminal.", "Run it in a terminal, or answer by an option."),
    "nothing_taken": ("No server was taken over.", "Read why above; name other servers."),
    "remote_server": ("A remote server has no box to learn about.", "Use it with a server that is started here."),
    "no_gateway": ("What answers there is not a gateway.", "Name the gateway's address."),
    "http": (
        "The gateway answered with an HTTP error.",
        "Check that it is a gateway of this user, and its path `/mcp`.",
    ),
    "unreachable": ("No gateway answers there.", "Start it: `ringfence serve`."),
    "rpc_error": ("The gateway answered with an error of the protocol.", "Read the message."),
    # what a client sent to a gateway
    "not_json": ("The body is not JSON.", "Send JSON."),
    "invalid_request": ("The message is not a request.", "Send it as JSON-RPC has it."),
    "unknown_method": ("There is no such method.", "Use a method of MCP."),
    "invalid_params": ("The parameters do not fit the method.", "Send them as MCP has them."),
    "header_mismatch": ("A header contradicts the body.", "Send the same in both."),
    "missing_capability": ("The client lacks a capability that the request needs.", "Use a client that has it."),
    "unsupported_version": ("The revision of the protocol is not spoken here.", "Use one that the answer names."),
}

_OPERATOR = {
    # rules, contracts, approvals
    "policy_error": ("A rule of the policy failed, so the call is refused.", "Correct the rule: `ringfence check`."),
    "approval": (
        "Policy asks a person for each use of a secret, which cannot be.",
        "Allow or deny it by rule instead.",
    ),
    "approval_unproven": ("The log does not prove the approval.", "Run `ringfence audit verify`; ask again."),
    "not_entitled": ("This person may not answer this question.", "Have a person answer who holds the role."),
    "not_pinned": ("The definition was not accepted yet.", "Run `ringfence check --accept`."),
    "pin_changed": (
        "The definition is not the one that was accepted.",
        "Look at the change: `ringfence check --accept`.",
    ),
    "tool_gone": ("The server no longer offers the tool.", "Look at the server; remove its contract."),
    "ambiguous_server": (
        "Several servers offer the tool, or may, and the contract names none.",
        "Name the server in the contract.",
    ),
    "bad_schema": ("The tool's own schema cannot be used.", "Report it to the server's author; pin another version."),
    "sandbox_impossible": (
        "The contract or policy wants a box, and the server cannot have one.",
        "Change its placement.",
    ),
    "session_placement": (
        "A server in an agent's own box may only be read.",
        "Give it a box of its own, or a read contract.",
    ),
    "mounts": ("The contract names a mount that its server does not have.", "Write it under the server's mounts, too."),
    "network": ("The contract's network does not cover the server.", "Make the two networks agree."),
    "bad_network": ("Such a network cannot be.", "Correct it under `networks:`."),
    "no_network": ("There is no network of that name.", "Write it under `networks:`."),
    "no_network_control": ("The network of it cannot be confined.", "Run it in a box."),
    "no_transport": ("That transport is not available.", "Use one that is."),
    "no_server": ("There is no such server.", "Write it under `servers:`."),
    "no_isolation": ("The backend does not give the isolation that the contract demands.", "Use another backend."),
    # secrets
    "no_secret": (
        "The secret is not there, or cannot be used here.",
        "Read the message; look at its source and scope.",
    ),
    "bad_secret": ("There is a value, and it cannot be kept secret.", "Use a value of 12 characters or more."),
    "secret_scope": ("The secret is not for this use.", "Widen its scope under `secrets:`, if that is meant."),
    "secret_in_clear": ("A secret goes over TLS alone.", "Use https."),
    "secret_method": ("The secret is not for this HTTP method.", "Name the method under the secret's `methods`."),
    "secret_revoked": ("The secrets of this box were revoked.", "Make another box."),
    "method_override": ("A header overrides the method.", "Send the method itself."),
    "path_override": ("A header overrides the path.", "Send the path itself."),
    "ambiguous_path": (
        "Servers could read the path in two ways.",
        "Write it without `..`, `//`, `;`, `%2f` and double encoding.",
    ),
    "placeholder": ("A placeholder stood where no secret may be put in.", "Send it in its header, to its hosts."),
    # addresses
    **{
        f"address_{kind}": (
            "The name leads to an address that is not public.",
            "Name the address in the rule, if meant.",
        )
        for kind in (
            *("unspecified", "loopback", "private", "link_local", "shared", "multicast", "documentation", "reserved"),
            *("metadata", "embedded"),
        )
    },
    "own_port": ("Ringfence itself listens there, and boxes may not reach it.", "Nothing; no rule allows it."),
    # packages and images
    "package_denied": ("The package may not be installed.", "Name it under `sandbox.allow_packages`."),
    "package_not_pinned": (
        "The package names no version or hash.",
        "Name them: `sandbox.require_packages` asks for it.",
    ),
    "package_altered": (
        "The bytes are not those that the index or the cache names.",
        "Fetch them again; ask the registry.",
    ),
    "template_lacks": (
        "The template loads packages that are not installed here.",
        "Install them; the message has the command.",
    ),
    "no_packages": ("Nothing can be installed for these boxes.", "Configure packages for them."),
    "no_build": ("The package has only sources.", "Set `sandbox.build_packages`, or name another version."),
    "no_integrity": ("The registry gives no strong hash.", "Use another registry or version."),
    "no_npm": ("npm and node are not installed.", "Install them."),
    "no_registry": ("The registry cannot be used.", "Look at the registry's configuration."),
    "registry_blocked": ("The registry is blocked on this host.", "Look at `registries.conf`."),
    "registry_credentials": ("The registry wants credentials, or refuses those of the operator.", "Log in anew."),
    "bad_image": ("The image is not taken.", "Read the message; use another image."),
    "install_failed": ("The installation failed.", "Read the message: it ends with the installer's own error."),
    # the host
    "no_backend": ("No backend makes boxes here.", "Run `ringfence host`."),
    "missing_protection": (
        "Boxes would lack a protection on this host.",
        "Run `ringfence host`; fix it, or accept it by name.",
    ),
    "self_test": ("The test of a first box failed.", "Run `ringfence doctor`."),
    "machine": ("Boxes do not run on this kind of processor.", "Use a machine that the message names."),
    "no_box": ("A box could not be made.", "Run `ringfence host`; look at the log."),
    "box_ended_at_once": ("The box ended as soon as it was made.", "Look at the log; run `ringfence doctor`."),
    "no_group": ("There is no control group for a box.", "Run `ringfence host`."),
    "no_zygote": ("The process that starts boxes is gone or full.", "Try again; look at the log."),
    "no_process": ("No process could be started in the box.", "Look at its limits, and at the log."),
    "no_interpreter": (
        "The box has no interpreter of ours, or it could not be started.",
        "Use commands, or another template.",
    ),
    "no_mount": ("A folder cannot be mounted.", "Look at the folder and its permissions."),
    "maps_no_ids": ("The folder's file system maps no ids.", "Start Ringfence as the folder's owner."),
    "uids": ("No user ids are left for boxes.", "Give the user more subordinate ids."),
    "no_ports": ("No port of a session can be shown.", "Free some ports of this host."),
    "watches": ("The kernel has no watches left for this user.", "Stop other watchers, or raise the limit."),
    "listen": ("The gateway cannot listen there.", "Name another address, or end what listens there."),
    "damaged": ("Stored data cannot be read.", "Restore it."),
    "store": ("The state could not be written, so nothing ran on it.", "Look at the disk and the log."),
    "authority_expired": ("The certificate of the run has expired.", "Make another box."),
    "foreign_user": ("What listens there belongs to another user.", "End it; look at who runs it."),
    "in_use": ("Another keeper has these sessions.", "Connect to it, or end it."),
    "keeper_start": ("The keeper of sessions could not be started.", "Read the message; look at its log."),
    "keeper_failed": ("The keeper failed at a request.", "Look at its log in the state folder."),
    "keeper_version": ("The keeper that runs is of another version.", "End its sessions, or use another state folder."),
    "keeper_settings": (
        "The keeper that runs makes boxes of another kind.",
        "End its sessions, or use another state folder.",
    ),
    "keeper_stuck": ("The keeper does not answer.", "End it."),
    "not_paused": ("The session cannot be paused.", "Run `ringfence host`."),
    "not_resumed": ("The session cannot be resumed.", "Look at the log; open another."),
    "not_removed": ("Something of the box could not be removed.", "Remove it; look at the log."),
    "bench": ("A measurement failed.", "Read the message."),
    "control_failed": ("A control of the doctor failed, so its case says nothing.", "Read the message."),
    "internal": ("The gateway itself failed.", "Report it, with the log."),
}

_PERSON = {
    "approval_required": (
        "A person must approve the call first.",
        "They find it with `ringfence approvals list`; once it is answered, make the same call again.",
    ),
    "approval_refused": ("A person refused the call.", "Talk to them."),
    "crash": (
        "The gateway stopped while the call was running; it may have run.",
        "Check whether it took effect before it is repeated.",
    ),
    "answer_lost": (
        "The answer was lost; the call may have run.",
        "Check whether it took effect before it is repeated.",
    ),
    "box_failed": ("The box itself failed after it had begun.", "Look at what it changed before it is repeated."),
    "gave_way": (
        "Others needed the server while the call waited for its client's answer; it was given up, and may have run.",
        "Check whether it took effect. Answer sooner, or let fewer calls wait at once.",
    ),
    "key_unknown": ("An earlier call under the same key may have run.", "Look whether it did; then use another key."),
    "keeper_died": ("The keeper died; its sessions died with it.", "Open other sessions; look at what was done."),
    "request_timeout": ("The request took too long and was stopped.", "Look at what it did; try again."),
    "session_lost": ("The server forgot the session; the call may have run.", "Check whether it took effect."),
    "server_died": ("The server ended without an answer; the call may have run.", "Check whether it took effect."),
    "server_error": ("The server answered with an HTTP error; the call may have run.", "Check whether it took effect."),
}

_SERVER = {
    "tool_error": ("The tool itself failed.", "Read its answer."),
    "upstream_error": ("The server answered with an error.", "Read its message."),
    "answer_unusable": ("The answer cannot be read.", "Report it to the server's author."),
    "bad_output": ("The result does not fit its own schema or the contract.", "Report it to the server's author."),
    "invalid_result": ("The type of result is not known here.", "Report it to the server's author."),
    "result_too_large": (
        "The result is larger than the contract allows.",
        "Ask for less, or raise `result.max_bytes`.",
    ),
    "server_question": ("The server asked something that cannot be passed on.", "Read the message."),
    "too_many_rounds": ("The server asked too often in one call.", "Report it to the server's author."),
    "server_listing": ("The server's list is broken, or too long.", "Report it to the server's author."),
    "server_version": ("The server speaks a revision that is not spoken here.", "Use another version of it."),
    "server_start": ("The server could not be started.", "Read the message: it ends with what the server said."),
}

_TIME = {
    "throttled": ("There were too many calls in this time, or at once.", "Wait as the message says."),
    "key_busy": ("A call under the same key has not ended yet.", "Wait for it."),
    "grant_expired": ("The grant expired before the call began.", "Call again."),
    "capacity": ("There is no room for another session.", "End some, wait, or ask the operator for more."),
    "too_many_clients": ("The keeper has as many clients as it takes.", "Try again when others have gone."),
    "busy": ("Too many requests wait already.", "Try again in a moment."),
    "closing": ("The keeper is being stopped.", "Try again in a moment."),
    "closed": ("The backend is closed.", "Start another gateway."),
    "stopping": ("The gateway is stopping.", "Start it again."),
    "server_busy": ("All connections to the server are in use.", "Try again in a moment."),
    "server_changed": ("The server's configuration changed while it started.", "Try again."),
    "server_down": ("The server is down.", "Wait for the next try, or look at the server."),
    "server_starting": ("The server is still starting.", "Try again in a moment."),
    "server_refused": ("The server took no request just now.", "Try again later."),
    "server_unreachable": ("The server cannot be reached.", "Look at its address and the network; try again."),
    "resolve": ("The name cannot be resolved.", "Check the name; try again."),
}

_NOBODY = {"ok": ("It succeeded.", "Nothing.")}

_BY_ACTOR: Mapping[Actor, Mapping[str, tuple[str, str]]] = {
    "the caller": _CALLER,
    "the operator": _OPERATOR,
    "a person": _PERSON,
    "the server": _SERVER,
    "time": _TIME,
    "nobody": _NOBODY,
}

REASONS: Mapping[str, Reason] = {
    code: Reason(actor, meaning, remedy)
    for actor, table in _BY_ACTOR.items()
    for code, (meaning, remedy) in table.items()
}


def page() -> str:
    """The table as `docs/reasons.md` has it."""
    rows = [f"| `{code}` | {each.actor} | {each.meaning} | {each.remedy} |" for code, each in sorted(REASONS.items())]
    return "\n".join(("| code | who must act | meaning | what to do |", "|---|---|---|---|", *rows))
