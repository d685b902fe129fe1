"""`ringfence audit`: what is on record, why it happened, and whether the record is still what was written."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence import config, identity
from ringfence.audit.chain import MAX_FAULTS, Findings, KnownHead, Period, Verification, identity_in, key_id
from ringfence.audit.explain import explain
from ringfence.audit.export import Checkpoints, prunes, verify_export, verify_live, write_export
from ringfence.audit.exposure import exposure
from ringfence.audit.handover import PROGRAM, write_folder
from ringfence.audit.keys import PUBLIC, SIGNER, public_key_from_file, published
from ringfence.audit.signer import SigningKey
from ringfence.audit.signing import signing_key
from ringfence.audit.signing_client import SignerProcess
from ringfence.audit.witness import witnessed
from ringfence.cli import common, options
from ringfence.cli.progress import ProgressLine, progress
from ringfence.cli.terminal import cut, json_text, moment, painted, quoted, safe, table
from ringfence.core import canonical
from ringfence.core.canonical import object_at
from ringfence.core.errors import StoreError, TamperError
from ringfence.core.model import Json
from ringfence.store import Reader, Record, Transaction
from ringfence.store.schema import DATABASE

T = TypeVar("T")
Part = Literal["arguments", "result"]
_PREFIX = "call_"
_TRIES = 3
_PLACE = ("v", "chain", "seq", "prev", "at", "kind", "call_id")

audit = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
IdArgument = typer.Argument(
    ..., metavar="ID", help="A call's id, the beginning of it, or `last` for the newest call of an agent."
)


@audit.callback()
def group() -> None:
    """Read, explain, verify and export the audit log.

    \b
    ringfence audit list                        the newest calls
    ringfence audit explain last                why the newest was allowed or refused
    ringfence audit verify                      is the log as it was written?
    """


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


@audit.command("list", short_help="List calls, the newest first.")
def list_(
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    limit: int = typer.Option(20, "--limit", metavar="N", min=1, max=1_000_000_000, help="How many."),
    everything: bool = typer.Option(
        False, "--all", help="Every record instead of calls alone: reloads, accepted definitions, answers …"
    ),
    shadow: bool = typer.Option(
        False, "--shadow", help="Calls on which rules in shadow mode matched, and what these would have done."
    ),
    as_json: options.PrintJson = False,
) -> None:
    """List calls, the newest first: when, id, tool, agent, status and reason.

    \b
    ringfence audit list --limit 5
    ringfence audit list --all
    ringfence audit list --shadow
    """
    if everything and shadow:
        common.fail("--all lists every record, --shadow calls: give one", 2)
    with _log(config_path, demo) as reader:
        # One more than is asked for tells whether there are more.
        if shadow:
            rows = list(itertools.islice(_shadow_rows(reader), limit + 1))
        elif everything:
            rows = [_any_row(record) for record in reader.records(newest_first=True, limit=limit + 1)]
        else:
            rows = list(itertools.islice(_call_rows(reader), limit + 1))
    more = len(rows) > limit
    del rows[limit:]
    if as_json:
        common.dump(rows)
    elif not rows:
        print("No rule in shadow mode matched a call on record." if shadow else "Nothing is on record yet.")
    else:
        _table(rows)
        if shadow and sys.stdout.isatty():
            counts = Counter(rule for row in rows for rule in row["shadow"].split(", "))
            print("\n" + ", ".join(f"{safe(rule)}: {count}" for rule, count in counts.most_common()))
    if more:
        print(f"There are more; these are the newest {limit} (--limit).", file=sys.stderr)


@audit.command(short_help="Show all records of a call, and its stored payloads.")
def show(
    identifier: str = IdArgument,
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Show all records of a call, those of its approvals, and what is kept of its payloads.

    \b
    ringfence audit show last --json
    """
    with _log(config_path, demo) as reader:
        call_id = _find(reader, identifier)
        records = sorted(reader.story(call_id), key=lambda record: record.at)
        kept = {part: _kept(reader, call_id, part) for part in get_args(Part)}
    payloads = {part: value for part, (value, _) in kept.items()}
    unlike = [f"{part}: {_UNLIKE[right]}" for part, (value, right) in kept.items() if value is not None and not right]
    if as_json:
        bodies = [{**record.body, "hash": record.hash} for record in records]
        common.dump(
            {"call_id": call_id, "records": bodies, "payloads": payloads, **({"unlike": unlike} if unlike else {})}
        )
        return
    for record in records:
        body = {name: value for name, value in record.body.items() if name not in _PLACE}
        print(f"{moment(record.at)}  {safe(record.kind)}  (chain {safe(record.chain)}, record {record.seq})")
        print(f"  sha256 {record.hash}")
        print(quoted(json_text(body), "  "), end="\n\n")
    for part, (value, right) in kept.items():
        of = "arguments, and of what went beside them" if part == "arguments" and _carries(records) else part
        if value is None and _is_gone(records, part):
            print(f"What was kept of the {part} is gone, and no erasure is on record.")
        elif value is None:
            print(f"Of the {part} nothing but a digest is kept.")
        elif not right:
            print(f"Kept of the {of}, and {_UNLIKE[right]}:\n{quoted(json_text(value), '  ')}")
        else:
            print(f"Kept of the {of}, redacted:\n{quoted(json_text(value), '  ')}")


def _carries(records: list[Record]) -> bool:
    """Whether more than its arguments went to the server of this call."""
    return any(object_at(record.body, "carried").keys() & {"meta", "inputs"} for record in records)


def _is_gone(records: list[Record], part: str) -> bool:
    said = any("kept" in object_at(record.body, part) for record in records)
    return said and not any(record.kind == "payload_erased" for record in records)


@audit.command("explain", short_help="Explain a call step by step.")
def explain_(
    identifier: str = IdArgument,
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Explain a call, a line for each step: caller, contract, policy, approval, budget, run, result, remedy, record.

    \b
    ringfence audit explain last
    """
    with _log(config_path, demo) as reader:
        call_id = _find(reader, identifier)
        story = [record.body for record in reader.story(call_id)]
        public = config.key_folder() / PUBLIC
        key = published(public.parent) if public.exists() else None
        text = explain(story, key)
    if as_json:
        common.dump({"call_id": call_id, "lines": text.splitlines()})
    else:
        print(safe(text, lines=True))


@audit.command("exposure", short_help="List the calls that could have used a secret.")
def exposure_(
    secret: str = typer.Argument(..., metavar="SECRET", help="Its name in the configuration, not its value."),
    since: str | None = typer.Option(None, "--since", metavar="TIME", help="From this time on (ISO 8601, UTC)."),
    until: str | None = typer.Option(None, "--until", metavar="TIME", help="Up to, not including, this time."),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """List the calls that could have used a secret: when it has leaked, or before it is withdrawn.

    BY says why: its `contract` names the secret, its `server` was given it, it `used` it, or a `result` had it. USED
    and REFUSED count requests that it was put into or was asked for; SEEN what was removed from results.

    \b
    ringfence audit exposure helpdesk_token --since 2026-03-01
    """
    period = Period(common.read_time(since, "--since"), common.read_time(until, "--until"))
    with _log(config_path, demo) as reader:
        # A server may have been given it long before.
        found = [
            row
            for row in exposure(reader.records(), secret)
            if (period.since is None or row["at"] >= period.since)
            and (period.until is None or row["at"] < period.until)
        ]
    rows = [{**row, "at": _zulu(row["at"])} for row in found]
    if as_json:
        common.dump(rows)
    elif rows:
        _table(rows)
    else:
        print(f"No call on record could have used a secret of the name {safe(secret)}.")


@audit.command(short_help="Run a recorded program again, and tell what differs.")
def replay(
    identifier: str = IdArgument,
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Run a recorded program again in a fresh box, and tell what differs and of which kind.

    Kinds: output, clock, randomness, network, files, environment. What a program was is kept where its capability says
    `record: full`. It runs without a network and secrets, and reads its mounts only. Exits with 1 where it differs.

    \b
    ringfence audit replay last
    """
    from ringfence.cli.replay import replay_call  # noqa: PLC0415 - to read the log takes no boxes

    settings = common.demo_config() if demo else common.load(config_path)
    with _log(config_path, demo) as reader:
        call_id = _find(reader, identifier)
        records = list(reader.records(call_id=call_id))
        kept, right = reader.kept(call_id, "run")
    replay_call(settings, (call_id, [record.body for record in records]), (kept, right), as_json=as_json)


# ── Evidence ──────────────────────────────────────────────────────────────────────────────────────


@audit.command(short_help="Verify the log, or an export offline.")
def verify(
    export_path: Path | None = typer.Argument(None, metavar="[EXPORT]", help="An export. Default: the live log."),
    public_key: Path | None = typer.Option(
        None,
        "--public-key",
        metavar="FILE",
        help="The key to verify with; an export needs one that did not come with it.",
    ),
    witness: list[Path] = typer.Option(
        [], "--witness", metavar="FILE", help="Where a witness keeps what it was told; may be given again."
    ),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Verify the live log against its signed checkpoints, or an export offline.

    Finds edits, deletions, reordering, gaps, a cut end, and calls that ran on an approval that the log does not prove;
    with a witness also what was cut together with its checkpoints. An export is checked with the key that you name, and
    the witnesses, and nothing else, so this works on any machine.

    \b
    ringfence audit verify
    ringfence audit verify --witness /var/log/ringfence-heads
    ringfence audit verify march.jsonl --public-key audit-public.pem
    """
    if export_path is not None:
        if public_key is None:
            common.fail("an export is verified with a key from outside: name it with --public-key FILE", 2)
        with progress("verifying the export"):
            report = verify_export(export_path, public_key_from_file(public_key), witness)
        _conclude(report, as_json)
        return
    folder = common.state_of(config_path, demo)
    if not (folder / DATABASE).is_file():
        _no_log(folder, public_key, witness)
    key = public_key_from_file(public_key) if public_key else published(config.key_folder())
    with _log(config_path, demo) as reader:
        report = _verified(reader, key, witness)
    _conclude(report, as_json)


def _no_log(folder: Path, public_key: Path | None, witnesses: Iterable[Path]) -> None:
    """Where there is no log at all, a witness is the only one to say whether there was one."""
    at = public_key or config.key_folder() / PUBLIC
    for path in witnesses if at.is_file() else ():
        heads = witnessed(path, public_key_from_file(at), None)
        if heads:
            common.fail(
                f"there is no database in {folder}, but the witness {path} has {len(heads)} heads that this key"
                " signed: the log was removed or lies elsewhere. Put a copy of it back, or name the configuration of"
                " its gateway with --config FILE"
            )


def _known_to_signer(reader: Reader, key: Ed25519PublicKey) -> tuple[list[KnownHead], list[str]]:
    """The heads that the signer has, if there is one, and what is to be said of it."""
    if not (config.key_folder() / SIGNER).is_dir():
        return [], []
    state = identity_in(reader.checkpoints(), key)
    signer = None
    try:
        signer = signing_key(config.key_folder())
        if state is None or not isinstance(signer, SignerProcess) or signer.id != key_id(key):
            return [], []
        heads = [head for head in signer.heads(state.id).values() if head.seq]
    except StoreError as exc:
        return [], [f"what the signer has was not compared: {exc}"]
    finally:
        if signer is not None:
            signer.close()
    return [KnownHead(head, "the signer") for head in heads], [
        f"the signer's heads of {len(heads)} chains were compared."
    ]


def _verified(reader: Reader, key: Ed25519PublicKey, witnesses: Iterable[Path] = ()) -> Verification:
    """Others write meanwhile. If one begins a chain, or prunes, the parts read do not belong together: try again."""
    known, notes = _known_to_signer(reader, key)  # before the records, which only grow
    state = identity_in(reader.checkpoints(), key)
    for path in witnesses:
        heads = witnessed(path, key, state)
        if not heads:
            common.fail(f"{path} has no head of this state that verifies with this key, so it witnesses nothing")
        known += heads
        notes.append(f"{len(heads)} heads of the witness {path} were compared.")
    for _ in range(_TRIES):
        records, checkpoints = reader.evidence()
        with progress("verifying records") as line:
            counted = {chain: _counted(each, line) for chain, each in records.items()}
            report = verify_live(counted, checkpoints, key, reader.record, known)
        if report.ok or not _moved(reader, checkpoints, key):
            break
    report = replace(report, notes=(*report.notes, *notes))
    return _compared(reader, report, key)


def _moved(reader: Reader, checkpoints: Checkpoints, key: Ed25519PublicKey) -> bool:
    now = reader.checkpoints()
    return now.keys() != checkpoints.keys() or prunes(now, key) != prunes(checkpoints, key)


def _conclude(report: Verification, as_json: bool) -> None:
    if as_json:
        found = {"ok": report.ok, "records": report.records, "chains": len(report.heads), "state": report.state}
        common.dump({**found, "faults": list(map(str, report.faults)), "notes": list(report.notes)})
    else:
        print(painted(safe(str(report), lines=True), "good" if report.ok else "bad"))
    if not report.ok:
        raise typer.Exit(1)


@audit.command(short_help="Write the log to a file that verifies offline.")
def export(
    path: Path = typer.Argument(..., metavar="FILE", help="Where to write it; must not exist."),
    since: str | None = typer.Option(None, "--since", metavar="TIME", help="From this time on (ISO 8601, UTC)."),
    until: str | None = typer.Option(None, "--until", metavar="TIME", help="Up to, not including, this time."),
    folder_to_hand_over: bool = typer.Option(
        False, "--folder", help="A folder to hand over: log, table (CSV), checkpoints, public key, and its verifier."
    ),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    as_json: options.PrintJson = False,
) -> None:
    """Write the log, or a period of it, to a file that verifies offline with the public key.

    \b
    ringfence audit export march.jsonl --since 2026-03-01 --until 2026-04-01
    ringfence audit export march --folder --since 2026-03-01 --until 2026-04-01
    """
    period = Period(common.read_time(since, "--since"), common.read_time(until, "--until"))
    if period.since is not None and period.until is not None and period.since >= period.until:
        common.fail("--since must lie before --until", 2)
    if os.path.lexists(path):
        common.fail(f"{path} exists already; an export never replaces a file")
    folder = common.state_of(config_path, demo)
    with _log(config_path, demo) as reader:
        keys = signing_key(config.key_folder())
        if folder_to_hand_over:
            write = partial(_exported, reader, keys=keys, period=period)
            report = write_folder(path, keys, reader.checkpoints(), write)
        else:
            report = _exported(reader, path, keys, period)
    if as_json:
        counts = {"records": report.records, "chains": len(report.heads)}
        public_key = str(keys.folder / PUBLIC)
        common.dump({"file": str(path), "state": str(folder), **counts, "key": keys.id, "public_key": public_key})
        return
    shown, counted = safe(str(path)), f"{report.records} records of {len(report.heads)} chains"
    print(f"{shown}: {counted} from {safe(str(folder))}, signed with key {keys.id}.")
    public = safe(str(keys.folder / PUBLIC))
    print(f"The public key is {public}; send it to the verifier separately from the export.")
    if folder_to_hand_over:
        print(
            f"Verify with Python and the package cryptography alone: python3 {shown}/{PROGRAM} {shown} --public-key KEY"
        )
        return
    print(f"Verify with: ringfence audit verify {shown} --public-key {PUBLIC}")


def _exported(reader: Reader, path: Path, keys: SigningKey, period: Period) -> Verification:
    """The same holds for an export."""
    left = _TRIES
    while True:
        left -= 1
        checkpoints = reader.checkpoints()  # before the records, which only grow
        try:
            with progress("exporting records") as line:
                records = _counted(reader.period(period), line)
                return write_export(path, records, keys, period, checkpoints, reader.record)
        except TamperError:
            if left == 0 or not _moved(reader, checkpoints, keys.public):
                raise


def _counted(records: Iterable[T], line: ProgressLine) -> Iterator[T]:
    for record in records:
        line.step()
        yield record


@audit.command()
def erase(
    identifier: str = IdArgument, config_path: Path | None = common.ConfigOption, demo: bool = common.DemoOption
) -> None:
    """Erase a call's stored payloads, and record that. Its records stay; they do not hold the values.

    Exits with 1 where another program reads the database, so that they are still in its files; then repeat it.

    \b
    ringfence audit erase call_0123456789abcdef0123
    """
    with _log(config_path, demo) as reader:
        call_id = _find(reader, identifier)
        if call_id in reader.running():
            common.fail(f"{call_id} is still running; erase it when it has ended")
    person = identity.os_user()
    with common.writing(common.state_of(config_path, demo)) as store:

        def work(tx: Transaction) -> bool:
            if not tx.erase_payload(call_id):
                return False
            tx.append("payload_erased", call_id, {"by": person})
            return True

        erased = store.write_sync(work, durable=True)
        if store.has_left_over:
            common.fail(
                f"{call_id}: what was kept of its payloads is out of the tables, but not yet out of the files: another"
                f" program reads the database just now. End it, then repeat: ringfence audit erase {call_id}"
            )
    print(f"{call_id}: what was kept of its payloads is erased." if erased else f"{call_id}: nothing was kept of it.")


@audit.command()
def prune(
    before: str = typer.Option(..., "--before", metavar="TIME", help="Remove what is older (ISO 8601, UTC)."),
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
) -> None:
    """Remove the oldest records. The removal is recorded and signed, so the rest still verifies.

    All records stay from the oldest call on that still runs, waits for an approval, or has an idempotency key in
    force. With `gateway.retention: 90d` in a ringfence.yaml, `ringfence serve` does this every hour.

    \b
    ringfence audit export 2025.jsonl --until 2026-01-01
    ringfence audit prune --before 2026-01-01
    """
    moment = common.read_time(before, "--before")
    assert moment is not None
    if moment > time.time():
        common.fail("--before must lie in the past", 2)
    folder = common.state_of(config_path, demo)
    with _log(config_path, demo):
        pass  # there has to be one
    with common.writing(folder) as store:
        gone = store.prune(moment, identity.os_user())
    if gone.records:
        print(f"{gone.records} records of {gone.chains} chains in {folder} are removed. See: ringfence audit verify")
    else:
        print("Nothing was removed: nothing is that old, or it is still needed.")


# ── Finding ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _log(config_path: Path | None, demo: bool) -> Iterator[Reader]:
    """The log, opened read-only. A damaged record is reported in one sentence."""
    with common.reading(common.state_of(config_path, demo)) as reader:
        try:
            yield reader
        except canonical.NotCanonical as exc:
            common.fail(f"a record cannot be read ({exc}); see: ringfence audit verify")


def _find(reader: Reader, identifier: str) -> str:
    if identifier == "last":
        return _last(reader)
    if next(reader.records(call_id=identifier, limit=1), None) is not None:
        return identifier
    wanted = identifier if identifier.startswith(_PREFIX) else _PREFIX + identifier
    found = reader.call_ids(wanted, 2)
    if len(found) > 1:
        common.fail(f"{identifier} could be any of: {', '.join(found)}, …")
    if not found:
        common.fail(f"there is no call {identifier} on record; see: ringfence audit list")
    return found[0]


def _last(reader: Reader) -> str:
    for record in reader.records(kind="finished", newest_first=True):
        if record.call_id is not None and object_at(record.body, "call", "principal").get("kind") != "system":
            return record.call_id
    common.fail("no call of an agent has ended yet")


_UNLIKE = {False: "not what was recorded", None: "cannot be checked: its record does not say that anything was kept"}


def _kept(reader: Reader, call_id: str, part: Part) -> tuple[Any, bool | None]:
    """A kept payload, and whether it is what was recorded."""
    payload, right = reader.kept(call_id, part)
    if payload is None:
        return None, right
    body = payload.body if isinstance(payload.body, bytes) else str(payload.body).encode()
    try:
        return canonical.loads(body), right
    except canonical.NotCanonical:
        return body.decode("utf-8", "replace"), right


def _compared(reader: Reader, report: Verification, key: Ed25519PublicKey) -> Verification:
    """The report, with records out of order, and payloads and tokens that differ from what was recorded."""
    found = Findings(list(report.faults), list(report.notes))
    for fault in reader.faults(MAX_FAULTS):
        found.add(fault)
    for fault in reader.misreported(MAX_FAULTS):
        found.add(fault)
    for call_id, part in reader.missing_payloads(MAX_FAULTS):
        found.add(f"what was kept of the {part} of call {call_id} is gone, and no erasure is on record")
    for call_id in reader.unsalted(MAX_FAULTS):
        found.add(f"the salt of the digests of call {call_id} is gone, and no erasure is on record")
    for token in reader.tokens(reader.token_proofs(key)):
        if token.state(time.time()) == "unproven":
            text = f"token {token.id} is not what the signed log has of its making"
            if reader.has_unsigned_making(token.id):
                found.notes.append(f"{text}: an earlier version made it, which signed none. It is good for nothing.")
            else:
                found.add(text)
    for chain, seq in reader.misplaced(MAX_FAULTS):
        found.add("stands before the record that it follows: lists have another order", chain, seq)
    sealed = 0
    for call_id, part in reader.payloads():
        try:
            payload, right = reader.kept(call_id, part)
        except StoreError:
            sealed += 1
            continue
        if payload is None or right or reader.payload(call_id, part) is None:
            continue  # the last: it was erased or pruned meanwhile
        if right is None:
            found.notes.append(f"what is kept of the {part} of call {call_id} {_UNLIKE[right]}.")
        else:
            found.add(f"what is kept of the {part} of call {call_id} is {_UNLIKE[right]}")
    if sealed:
        text = (
            f"{sealed} payloads that are kept in full could not be checked: their key is not in {config.key_folder()}"
        )
        found.notes.append(text)
    return replace(report, faults=tuple(found.faults), notes=tuple(found.notes))


# ── Rows ──────────────────────────────────────────────────────────────────────────────────────────


def _call_rows(reader: Reader) -> Iterator[Json]:
    """Calls that are under way, then those that ended."""
    for call_id in reversed(reader.running()):
        started = next(reader.records(call_id=call_id, kind="started", newest_first=True, limit=1), None)
        if started is not None:
            yield {**_call_row(started), "status": "running", "reason_code": ""}
    for record in reader.records(kind="finished", newest_first=True):
        yield _call_row(record)


def _call_row(record: Record) -> Json:
    body = record.body
    call = object_at(body, "call")
    principal = object_at(call, "principal")
    return {
        "at": _zulu(record.at),
        "call_id": record.call_id,
        "tool": call.get("tool"),
        "agent": principal.get("agent"),
        "status": body.get("status"),
        "reason_code": body.get("reason_code"),
    }


def _shadow_rows(reader: Reader) -> Iterator[Json]:
    """The ended calls on which rules in shadow mode matched."""
    for record in reader.records(kind="finished", newest_first=True):
        found = object_at(record.body, "decision", "shadow")
        if found:
            row = _call_row(record)
            del row["reason_code"]
            yield {**row, "would": found.get("verdict"), "shadow": ", ".join(map(str, found.get("rules") or ()))}


def _any_row(record: Record) -> Json:
    body = {name: value for name, value in record.body.items() if name not in _PLACE}
    brief = record.kind in ("started", "finished")
    row = {"at": _zulu(record.at), "kind": record.kind, "call_id": record.call_id}
    return {**row, "about": _call_row(record) if brief else body}


def _table(rows: list[Json]) -> None:
    heads = [name.upper().replace("_", " ") for name in rows[0]]
    # A script reads rows alone.
    print(table(heads if sys.stdout.isatty() else None, [[_cell(value) for value in row.values()] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return cut("  ".join(f"{name}={_plain(each)}" for name, each in value.items() if each not in (None, "")), 100)
    return cut(value, 40) if isinstance(value, str) else cut(json_text(value, indent=None), 100)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value, indent=None)


def _zulu(at: float) -> str:
    return moment(at, "%Y-%m-%dT%H:%M:%SZ")
