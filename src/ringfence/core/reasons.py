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
        "A person must approve the call, but too much of it looks like secrets to be shown to them.",
        "Send fewer values that look like secrets in one call.",
    ),
    "ambiguous_keys": (
        "Two keys of one object would look the same to a reader.",
        "Give them names that differ visibly.",
    ),
    "bad_arguments": ("The arguments do not fit the tool's schema.", "Read the message and the schema; call again."),
    "bad_meta": ("What the call carries in `_meta` cannot be forwarded.", "Send less in `_meta`, as plain JSON."),
    "bad_request": (
        "The request cannot be parsed.",
        "Send valid JSON-RPC: an object without duplicate keys.",
    ),
    "bad_http": ("The request is not HTTP/1.1.", "Send HTTP/1.1."),
    "head_too_large": ("The head of the request is too large.", "Send fewer or shorter headers."),
    "too_slow": ("The request arrived too slowly.", "Send all of it at once."),
    "foreign_network": (
        "The keeper serves no program from another network, such as one in a box.",
        "Call it from the host itself.",
    ),
    "rules_changed": (
        "The rules were changed while the call waited, so it was not begun, or did not get its client's answer.",
        "Make the call again. The current rules decide, and ask a person again if they require it.",
    ),
    "labels_changed": (
        "What the call would send lies in a place that got another label while it was decided.",
        "Make the call again; it is decided by all labels.",
    ),
    "key_conflict": ("The idempotency key was used for another request.", "Use a different key for each request."),
    "no_key": (
        "The contract derives a key from arguments that the call does not have.",
        "Send the arguments that it names.",
    ),
    "loop": ("The same call failed too often in a row, unchanged.", "Change the call, or wait as the message says."),
    "unknown_tool": ("No tool with that name is offered.", "List the tools; the message names similar ones."),
    "not_for_agent": (
        "The agent may not call this: the operator did not declare it for this agent.",
        "Use what is listed; the operator can add more under `agents:`.",
    ),
    "unknown_agent": (
        "The caller is none of the agents that the configuration declares, or is not to call anything here.",
        "Call as an agent that is declared under `agents:`.",
    ),
    "unknown_resource": ("No such resource is offered.", "List the resources."),
    "unknown_prompt": ("No such prompt is offered.", "List the prompts."),
    "unknown_completion": ("No completion is offered for that.", "Ask for a prompt or resource that is offered."),
    "unknown_listing": ("The server's lists are not offered.", "Name a configured server."),
    "unknown_logging": ("The server's log is not offered.", "Name a configured server."),
    "unknown_template": ("There is no template with that name.", "Use one that the message names."),
    "wrong_environment": ("The tool is not offered in this environment.", "Call it where its contract allows it."),
    "caller_timeout": ("The caller's own time ran out.", "Give it more time, or ask for less."),
    "cancelled": ("The caller cancelled the call.", "Nothing; call again if it was a mistake."),
    "wait_timeout": ("The wait timed out; what it waited for is still running.", "Wait again, or kill it."),
    "too_large": ("What was sent or asked for is too large.", "Send or ask for less at a time."),
    "too_many": ("The limit on their number is reached.", "End or remove some, or name fewer."),
    "client_refused": ("The client did not answer a server's question.", "Answer it, or use a client that can."),
    "commands_in_session": (
        "A contract that names programs cannot be used in a session.",
        "Call it without a session.",
    ),
    # what runs in a box
    "file_size": ("It wrote a file larger than its disk allows.", "Write less, or raise the disk limit."),
    "exit_status": ("The program exited with a status other than 0.", "Read its output."),
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
    "forged": ("Its interpreter claimed to be done, but went on.", "Do not tamper with the interpreter."),
    "input_changed": ("An input changed while it was sent.", "Send it again while nothing writes to it."),
    "no_input": ("An input is missing or unreadable, or the program takes none.", "Name a readable file."),
    "no_output": ("The place for output cannot be written.", "Name a writable folder."),
    # sessions
    "no_session": (
        "The call needs a session, or sessions are not available here.",
        "Open one and name it; if there are none here, leave `session` out.",
    ),
    "unknown_session": ("The caller has no session with this id.", "List the sessions, or open another."),
    "session_stopped": ("The session has ended.", "Open another; the message says why it ended."),
    "session_paused": ("The session is paused.", "Resume it first."),
    "session_starting": ("The session is still starting.", "Wait until it runs."),
    "session_changed": ("Another step ran in between.", "Look at the session again, then decide."),
    "session_network": (
        "The session's network was tightened since it was opened.",
        "Open another session, and close this one.",
    ),
    "session_layout": ("The session was opened without what the contract requires.", "Open one as the message says."),
    "not_open": ("The sandbox has not been created yet.", "Use it in a `with`, or call `create()`."),
    "started": ("The gateway is already running.", "Start it once."),
    "not_started": ("The gateway is not running.", "Use `async with`, or call `start()`."),
    "unknown_process": ("The session has no such process.", "List its processes."),
    "unknown_snapshot": ("There is no such snapshot.", "List the snapshots."),
    "unknown_volume": ("There is no such volume.", "List the volumes."),
    "volume_busy": ("Another session writes to the volume.", "End that session, or mount the volume read-only."),
    "retain_none": ("The session was opened to keep nothing.", "Open one with `retain: output`."),
    "quota": ("A quota is used up.", "Remove some, wait for the next day, or ask the operator for more."),
    "listen_denied": (
        "The contract or the session does not allow this port to be exposed.",
        "Open the session with `listen`, if the contract allows it.",
    ),
    "too_many_ports": ("The session has reached its limit of exposed ports.", "Close some."),
    "bad_port": ("That is not a port.", "Use 1 to 65535."),
    "bad_context": ("That name cannot be used for a context.", "Use another name."),
    "bad_count": ("A session cannot be forked that many times at once.", "Ask for fewer at a time."),
    "bad_signal": ("That is not a signal.", "Use 15 to ask a process to end, or 9 to kill it."),
    "bad_size": ("It cannot have that size.", "Use a size that the message allows."),
    "bad_source": ("The source is not valid text.", "Send Unicode text."),
    "bad_command": ("That is not a command that can be run.", "Send a string without NUL, or a list of them."),
    "bad_spec": ("No session can be made like this.", "Read the message, and change what you ask for."),
    # files
    "bad_path": ("That path cannot be used.", "Use a plain path under `/workspace`."),
    "bad_name": ("That name cannot be used.", "Use letters, digits, `-` and `_`."),
    "bad_range": ("That is not a range of a file.", "Use an offset and length of 0 or more."),
    "bad_depth": ("That is not a depth.", "Use 1 or more."),
    "bad_archive": ("The archive cannot be used.", "Create it again as a plain tar file."),
    "outside": (
        "The session has ended and kept only `/workspace/output`, or a volume cannot be mounted there.",
        "Use a path under `/workspace`.",
    ),
    "not_found": ("There is no such file, snapshot or volume.", "List the folder, the snapshots or the volumes."),
    "not_a_folder": ("The path leads through something that is not a folder.", "Check the path, and the links in it."),
    "not_a_file": ("The path is not a regular file.", "Name a file."),
    "link": ("The path leads through a link that is not followed.", "Use the path that the link points to."),
    "not_possible": ("The operation is not possible on this file.", "Read the message."),
    "exists": ("Something with that name already exists.", "Remove it first, or use another name."),
    "mounted": ("A folder of the host is mounted there.", "Use another place."),
    "no_permission": ("The file's permissions forbid it.", "Change them in the box, with `chmod`."),
    "read_only": ("It may only be read.", "Mount it read-write."),
    "other_disk": ("The two paths are on different disks.", "Copy instead of moving."),
    "changing": ("The file changes while it is used.", "Pause the box, or try again."),
    "too_deep": ("The folders are nested too deeply.", "Remove or move the folder."),
    "artifact": (
        "A file that was copied out could not be searched for secrets.",
        "Leave the output folder alone while a call runs.",
    ),
    # packages
    "bad_package": ("That is not a valid package name.", "Write it as the package index does."),
    "no_package": ("The packages are not in the cache.", "Run `ringfence init --fetch`."),
    "no_program": ("The box, package or image has no such program.", "Install it, or name one that exists."),
    # the command line
    "bad_url": ("The address cannot be used.", "Write an http or https URL."),
    "no_terminal": (
        "A person must answer, but there is no terminal.",
        "Run it in a terminal, or answer with an option.",
    ),
    "nothing_taken": ("No server was taken over.", "Read why above, and name other servers."),
    "remote_server": ("A remote server has no box to learn about.", "Name a server that runs on this machine."),
    "no_gateway": ("What answers there is not a gateway.", "Name the gateway's address."),
    "http": (
        "The gateway answered with an HTTP error.",
        "Check that it is this user's gateway and that the path is `/mcp`.",
    ),
    "unreachable": ("No gateway answers there.", "Start it: `ringfence serve`."),
    "rpc_error": ("The gateway answered with a protocol error.", "Read the message."),
    # what a client sent to a gateway
    "not_the_proxy": (
        "The connection comes from another address than that of the declared proxy.",
        "Connect through the proxy, or correct `gateway.trusted_proxy`.",
    ),
    "insufficient_scope": (
        "The token lacks a scope that this needs.",
        "Get a token with the scope that the answer names.",
    ),
    "no_token": ("The request carries no bearer token.", "Send one as `Authorization: Bearer`."),
    "bad_token": ("The bearer token is not one that this gateway knows.", "Send the token as it was printed."),
    "token_expired": ("The bearer token's time is over.", "Ask the operator for another."),
    "token_revoked": ("The bearer token was revoked.", "Ask the operator for another."),
    "token_unproven": (
        "The signed log does not have it that this bearer token was made.",
        "Ask the operator for another.",
    ),
    "token_in_address": (
        "A token stands in the address of a request.",
        "Revoke it, and send another as `Authorization: Bearer`.",
    ),
    "agent_token": ("The token is an agent's, and only people use the console.", "Use a token of a person."),
    "link_used": ("The link was used already: each logs one person in, once.", "Run `ringfence console`."),
    "logged_in": ("Another person is logged in to the console in this browser.", "Log out there first."),
    "unknown_person": (
        "The holder of the credential is none of the people that the configuration declares.",
        "Have the operator declare them under `people:`.",
    ),
    "cross_site": (
        "A form of the console was sent by another page, or by one that is out of date.",
        "Load the console's own page again, and send its form.",
    ),
    "person_token": ("The token is a person's, and only agents make calls.", "Use a token of an agent."),
    "shut_out": ("The caller's credential ended while the request was served.", "Ask the operator for another."),
    "not_json": ("The body is not JSON.", "Send JSON."),
    "invalid_request": ("The message is not a request.", "Send a valid JSON-RPC request."),
    "unknown_method": ("There is no such method.", "Use a method that MCP defines."),
    "invalid_params": ("The parameters do not fit the method.", "Send the parameters that MCP defines."),
    "header_mismatch": ("A header contradicts the body.", "Send the same value in both."),
    "missing_capability": ("The client lacks a capability that the request needs.", "Use a client that has it."),
    "unsupported_version": ("This protocol revision is not supported.", "Use one that the answer names."),
}

_OPERATOR = {
    # rules, contracts, approvals
    "policy_error": ("A rule of the policy failed, so the call is refused.", "Correct the rule: `ringfence check`."),
    "approval": (
        "Policy requires approval for each use of a secret, which is not supported.",
        "Allow or deny it with a rule instead.",
    ),
    "approval_unproven": ("The log does not prove the approval.", "Run `ringfence audit verify`; ask again."),
    "not_entitled": ("This person may not answer or do this.", "Have someone answer or do it who holds the role."),
    "not_pinned": ("The definition has not been accepted yet.", "Run `ringfence check --accept`."),
    "pin_changed": (
        "The definition is not the one that was accepted.",
        "Review the change: `ringfence check --accept`.",
    ),
    "tool_gone": ("The server no longer offers the tool.", "Check the server, or remove the contract."),
    "ambiguous_server": (
        "Several servers offer the tool, or may offer it, and the contract names none of them.",
        "Name the server in the contract.",
    ),
    "bad_schema": ("The tool's own schema cannot be used.", "Report it to the server's author; pin another version."),
    "sandbox_impossible": (
        "The contract or policy requires a box, but the server cannot have one.",
        "Change its placement.",
    ),
    "session_placement": (
        "A server in an agent's own session may only be used for reads.",
        "Give it a box of its own, or a read contract.",
    ),
    "mounts": ("The contract names a mount that its server does not have.", "Add it to the server's mounts, too."),
    "network": ("The contract's network does not cover the server.", "Make the two networks agree."),
    "bad_network": ("The network's definition is invalid.", "Correct it under `networks:`."),
    "no_network": ("There is no network with that name.", "Define it under `networks:`."),
    "no_network_control": ("Its network access cannot be restricted.", "Run it in a box."),
    "no_transport": ("The server is not of the kind that the transport says.", "Correct the transport."),
    "no_server": ("There is no such server.", "Define it under `servers:`."),
    "no_isolation": (
        "Nothing here gives the isolation that the contract asks for, or the named backend is weaker.",
        "Install what the message names, or name none.",
    ),
    # secrets
    "no_secret": (
        "The secret does not exist, or cannot be used here.",
        "Read the message; check its source and scope.",
    ),
    "bad_secret": (
        "The secret has a value that cannot be kept secret or cannot be sent.",
        "Use a value of 12 characters or more.",
    ),
    "secret_scope": ("The secret is not for this use.", "If this is intended, widen its scope under `secrets:`."),
    "secret_in_clear": ("A secret is sent only over TLS.", "Use https."),
    "secret_method": ("The secret is not for this HTTP method.", "Name the method under the secret's `methods`."),
    "secret_revoked": ("The secrets of this box were revoked.", "Make another box."),
    "method_override": ("A header overrides the method.", "Use the method itself, without such a header."),
    "path_override": ("A header overrides the path.", "Use the path itself, without such a header."),
    "ambiguous_path": (
        "Servers could read the path in two ways.",
        "Write it without `..`, `//`, `;`, `%2f` and double encoding.",
    ),
    "placeholder": (
        "A placeholder was sent where its secret may not go.",
        "Send it in the secret's header, to the secret's hosts.",
    ),
    # addresses
    **{
        f"address_{kind}": (
            "The name resolves to an address that is not public.",
            "If this is intended, name the address in the rule.",
        )
        for kind in (
            *("unspecified", "loopback", "private", "link_local", "shared", "multicast", "documentation", "reserved"),
            *("metadata", "embedded"),
        )
    },
    "own_port": ("Ringfence itself listens there, and no box may reach it.", "Nothing; no rule allows it."),
    # packages and images
    "package_denied": ("The package may not be installed.", "Name it under `sandbox.allow_packages`."),
    "package_not_pinned": (
        "No version or hash is given for the package.",
        "Add them; `sandbox.require_packages` requires it.",
    ),
    "package_altered": (
        "The content does not match what the index or the cache recorded.",
        "Fetch it again; if that fails too, ask the registry.",
    ),
    "template_lacks": (
        "The template loads packages that are not installed on this host.",
        "Install them; the message has the command.",
    ),
    "no_packages": ("Nothing can be installed for these boxes.", "Configure packages for them."),
    "no_build": ("The package is only available as source.", "Set `sandbox.build_packages`, or name another version."),
    "no_integrity": ("The registry gives no strong hash.", "Use another registry or version."),
    "no_npm": ("npm and node are not installed.", "Install them."),
    "no_registry": ("The registry cannot be used.", "Check the registry's configuration."),
    "registry_blocked": ("The registry is blocked on this host.", "Check `registries.conf`."),
    "registry_credentials": ("The registry requires credentials, or refuses the operator's.", "Log in again."),
    "no_image": ("The image cannot be built, written or found here.", "Read the message."),
    "bad_image": ("The image cannot be used.", "Read the message; use another image."),
    "install_failed": ("The installation failed.", "Read the message: it ends with the installer's own error."),
    "no_telemetry": (
        "Traces are wanted, and OpenTelemetry is not installed.",
        "Install what the message names, or take `telemetry.otlp` out.",
    ),
    # the host
    "no_backend": (
        "No backend can make boxes here.",
        "Do what the message says, or run `ringfence doctor --all`.",
    ),
    "not_supported": ("Boxes of this backend cannot have that.", "Use the backend that the message names."),
    "missing_protection": (
        "Boxes would lack a protection on this host.",
        "Run `ringfence host`; fix that, or accept it by name.",
    ),
    "self_test": ("The first box failed its self-test.", "Run `ringfence doctor`."),
    "machine": ("Boxes do not run on this processor architecture.", "Use a machine that the message names."),
    "no_box": ("A box could not be made.", "Run `ringfence host`; check the log."),
    "guest_failed": ("The agent in a box could not do what was asked.", "Check the log; run `ringfence doctor`."),
    "box_ended_at_once": ("The box ended as soon as it was made.", "Check the log; run `ringfence doctor`."),
    "no_group": ("There is no control group for a box.", "Run `ringfence host`."),
    "no_zygote": ("The process that starts boxes is gone or full.", "Try again; check the log."),
    "no_process": ("No process could be started in the box.", "Check its limits and the log."),
    "no_interpreter": (
        "The box has no interpreter of Ringfence's, or it could not be started.",
        "Use commands, or another template.",
    ),
    "no_mount": ("A folder cannot be mounted.", "Check the folder and its permissions."),
    "maps_no_ids": (
        "The folder's file system does not support id-mapped mounts.",
        "Start Ringfence as the folder's owner, or mount it read-only.",
    ),
    "uids": (
        "No user ids can be reserved for boxes.",
        "Read the message; if all are in use, give the user more subordinate ids.",
    ),
    "no_ports": ("No port of a session can be exposed.", "Free some ports on this host."),
    "watches": ("This user has no inotify watches left.", "Stop other watchers, or raise the limit."),
    "listen": ("The gateway cannot listen there.", "Name another address, or stop what listens there."),
    "damaged": ("Stored data cannot be read.", "Restore it."),
    "store": (
        "The state could not be written.",
        "Check the disk and the log. If the status is `unknown`, check whether the call took effect before repeating"
        " it.",
    ),
    "authority_expired": ("The run's certificate authority has expired.", "Make another box."),
    "no_issuer": (
        "The identity provider's keys cannot be fetched.",
        "Check `gateway.oidc`, and whether the provider can be reached.",
    ),
    "foreign_user": ("What listens there belongs to another user.", "Find out who runs it, and stop it."),
    "in_use": ("Another keeper holds these sessions.", "Connect to it, or end it."),
    "keeper_start": ("The keeper of sessions could not be started.", "Read the message; check its log."),
    "keeper_failed": ("The keeper failed to handle a request.", "Check its log in the state folder."),
    "keeper_version": ("The running keeper has another version.", "End its sessions, or use another state folder."),
    "keeper_settings": (
        "The running keeper was started with other settings for boxes.",
        "End its sessions, or use another state folder.",
    ),
    "keeper_stuck": ("The keeper does not answer.", "End it."),
    "not_paused": ("The session cannot be paused.", "Run `ringfence host`."),
    "not_resumed": ("The session cannot be resumed.", "Check the log; open another."),
    "not_removed": ("Part of the box could not be removed.", "Check the log, and remove it by hand."),
    "bench": ("A measurement failed.", "Read the message."),
    "control_failed": ("One of the doctor's controls failed, so its case proves nothing.", "Read the message."),
    "internal": ("The gateway itself failed.", "Report it, and attach the log."),
}

_PERSON = {
    "approval_required": (
        "A person must approve the call first.",
        "They find it with `ringfence approvals list`; once it is answered, make the same call again.",
    ),
    "approval_refused": ("A person refused the call.", "Talk to them."),
    "crash": (
        "The gateway stopped while the call was running; it may have run.",
        "Check whether it took effect before repeating it.",
    ),
    "answer_lost": (
        "The answer was lost; the call may have run.",
        "Check whether it took effect before repeating it.",
    ),
    "box_failed": ("The box itself failed after the work had begun.", "Check what it changed before repeating it."),
    "gave_way": (
        "Others needed the server while the call waited for its client's answer, so it was given up. It may have run.",
        "Check whether it took effect. Answer sooner, or let fewer calls wait at once.",
    ),
    "key_unknown": ("An earlier call under the same key may have run.", "Check whether it did; then use another key."),
    "result_not_kept": (
        "An earlier call under the same key has ended, and its result gave way to newer ones, or was erased.",
        "See in the log how it ended, or ask the server; it is not made again under this key.",
    ),
    "keeper_died": ("The keeper died, and its sessions with it.", "Check what was done, then open other sessions."),
    "request_timeout": ("The request took too long and was stopped.", "Check what it did before trying again."),
    "session_lost": ("The server forgot the session; the call may have run.", "Check whether it took effect."),
    "server_died": ("The server ended without an answer; the call may have run.", "Check whether it took effect."),
    "server_refused": (
        "The server answered with an HTTP status instead of an MCP message.",
        "A read can be tried again. For any other call, first check whether it took effect.",
    ),
    "server_error": ("The server answered with an HTTP error; the call may have run.", "Check whether it took effect."),
}

_SERVER = {
    "tool_error": ("The tool itself failed.", "Read its answer."),
    "upstream_error": ("The server answered with an error.", "Read its message."),
    "answer_unusable": ("The answer cannot be read.", "Report it to the server's author."),
    "bad_output": ("The result does not fit its own schema or the contract.", "Report it to the server's author."),
    "invalid_result": ("The type of the result is unknown.", "Report it to the server's author."),
    "result_too_large": (
        "The result is larger than the contract allows.",
        "Ask for less, or raise `result.max_bytes`.",
    ),
    "server_question": ("The server asked something that cannot be passed on.", "Read the message."),
    "too_many_rounds": ("The server asked too often in one call.", "Report it to the server's author."),
    "server_listing": ("The server's list is invalid or too long.", "Report it to the server's author."),
    "server_version": ("The server's protocol revision is not supported.", "Use another version of it."),
    "server_start": ("The server could not be started.", "Read the message; it ends with the server's own output."),
}

_TIME = {
    "throttled": ("Too many calls were made within a period, or at once.", "Wait as the message says."),
    "key_busy": ("A call under the same key has not ended yet.", "Wait for it."),
    "grant_expired": ("The grant expired before the call began.", "Call again."),
    "capacity": ("There is no capacity for another session.", "End some, wait, or ask the operator for more."),
    "too_many_clients": ("The keeper has reached its limit of clients.", "Try again when others have gone."),
    "busy": ("Too many requests are already waiting.", "Try again in a moment."),
    "closing": ("The keeper is being stopped.", "Try again in a moment."),
    "closed": ("The backend is closed.", "Start another gateway."),
    "stopping": ("The gateway is stopping.", "Start it again."),
    "circuit_open": (
        "The server failed several times in a row, so it is left alone for a while; nothing was sent.",
        "Try again after the time that the message names; ask the operator if it stays so.",
    ),
    "server_busy": ("All connections to the server are in use.", "Try again in a moment."),
    "server_changed": ("The server's configuration changed while it started.", "Try again."),
    "server_down": ("The server is down.", "Wait for the next attempt, or check the server."),
    "server_starting": ("The server is still starting.", "Try again in a moment."),
    "server_unreachable": ("The server cannot be reached.", "Check its address and the network; try again."),
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
