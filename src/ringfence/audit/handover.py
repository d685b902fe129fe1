"""A folder to hand over: an export, the same calls as a table, what was signed of them, and a program that verifies it.

Whoever gets it needs neither Ringfence nor this machine.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ringfence.audit import standalone
from ringfence.audit.chain import Verification
from ringfence.audit.keys import PUBLIC
from ringfence.audit.signer import SigningKey
from ringfence.audit.witness import signed_heads
from ringfence.core import system
from ringfence.core.errors import StoreError, TamperError

PROGRAM = "verify.py"
_README = """\
An export of the audit log of Ringfence, to be verified on any machine.

  log.jsonl           every record with its hash; signed at its end
  calls.csv           the calls in it as a table
  checkpoints.jsonl   the last signed head of each chain when the log was exported
  audit-public.pem    the public key; its id is {key}
  verify.py           verifies all of this; needs Python 3.11 and the package cryptography alone

  python3 -m venv check && check/bin/pip install cryptography
  check/bin/python verify.py . --public-key KEY       KEY: the key as you got it by another way than this folder
  check/bin/python verify.py . --call CALL_ID         tells of one call

Whoever made this folder could have made its key, too. So get the key, or its id, from somebody you trust, by another
way; and read verify.py, or have it from a copy of Ringfence of your own (ringfence/audit/standalone.py).
"""


def write_folder(
    folder: Path, keys: SigningKey, checkpoints: Mapping[str, bytes], export: Callable[[Path], Verification]
) -> Verification:
    """Write all of it to a folder that is not there yet; `export` writes the log. Nothing is left where it cannot be
    written, or does not verify. Raises StoreError, TamperError."""
    try:
        folder.mkdir(mode=0o700)
        try:
            report = export(folder / standalone.LOG)
            _write_rest(folder, keys, checkpoints)
        except BaseException:
            shutil.rmtree(folder)
            raise
    except OSError as exc:
        raise StoreError(f"the export {folder} cannot be written: {exc.strerror or exc}") from exc
    return report


def _write_rest(folder: Path, keys: SigningKey, checkpoints: Mapping[str, bytes]) -> None:
    shutil.copyfile(keys.folder / PUBLIC, folder / standalone.KEY)
    read = standalone.LogExport(standalone.VerifyingKey(folder / standalone.KEY))
    read.load(folder / standalone.LOG)
    heads = b"".join(line + b"\n" for head, line in signed_heads(checkpoints, keys.public) if head.chain in read.chains)
    (folder / standalone.CHECKPOINTS).write_bytes(heads)
    if heads:
        read.compare_heads(folder / standalone.CHECKPOINTS)
    if read.faults:
        raise TamperError(f"the export does not verify, so nothing was handed over: {read.faults[0]}")
    (folder / standalone.TABLE).write_bytes(standalone.table(read.records).encode())
    (folder / PROGRAM).write_text(inspect.getsource(standalone), encoding="utf-8")
    (folder / "README.txt").write_text(_README.format(key=keys.id), encoding="utf-8")
    system.sync_folder(folder)
