"""Which state this is: a random id in a signed file beside the checkpoints, made with the state and never replaced.

The database does not hold it, so that a program which can write there cannot make this state pass for another one.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringfence.audit.chain import FILE_BYTES, SLOT_BYTES, StateIdentity, identity_name, is_chain_name, read_slots
from ringfence.audit.keys import kept
from ringfence.audit.signer import Signer, SigningKey
from ringfence.core import canonical
from ringfence.core.errors import StoreError

FOLDER = "checkpoints"


def identify(connection: sqlite3.Connection, folder: Path, keys: SigningKey) -> tuple[Signer, bool]:
    """What signs in the name of this state, and whether it got its id only now. Raises StoreError."""
    made: list[StateIdentity] = []

    def make() -> bytes:
        made.append(_new(connection, folder / FOLDER, keys.public))
        return keys.sign(made[-1].message(keys.id))

    name = identity_name(keys.public)
    line = kept(folder / FOLDER, name, make)
    found = StateIdentity.verify(keys.public, line)
    if found is None:
        raise StoreError(
            f"{folder / FOLDER / name} does not say which state this is: another program changed it. Put back a copy"
            " of it, or find out who did (ringfence audit verify)"
        )
    if not made or found.older:
        keys.adopt(found, line, _signed(folder / FOLDER, keys.public))
    else:
        keys.adopt(found, line, ())
    return Signer(keys, found), found in made


def _signed(checkpoints: Path, public: Ed25519PublicKey) -> Iterator[bytes]:
    """The last checkpoint of each chain, for a signer that does not know this state yet."""
    for path in sorted(checkpoints.iterdir()):
        if is_chain_name(path.name) and path.is_file():
            data = path.read_bytes()[:FILE_BYTES]
            index = read_slots(data, path.name, public).index
            if index >= 0:
                yield data[index * SLOT_BYTES : (index + 1) * SLOT_BYTES].strip()


def _new(connection: sqlite3.Connection, checkpoints: Path, public: Ed25519PublicKey) -> StateIdentity:
    """The identity of a state that has none. Where only the file is gone, checkpoints still say what was in it."""
    try:
        files = sorted(path for path in checkpoints.iterdir() if is_chain_name(path.name) and path.is_file())
        found = [read_slots(path.read_bytes()[:FILE_BYTES], path.name, public).newest for path in files]
        (last,) = connection.execute("SELECT max(at) FROM records").fetchone()
    except OSError as exc:
        raise StoreError(f"the checkpoints cannot be read: {exc.strerror or exc}") from exc
    except sqlite3.Error as exc:
        raise StoreError(f"the log could not be read: {exc}") from exc
    newest = max((each for each in found if each is not None and each.state), key=lambda each: each.at, default=None)
    identity = canonical.new_id("state") if newest is None else str(newest.state)
    # A clock may have been set back since the last record, which is of this state all the same.
    at = time.time() if last is None else max(time.time(), math.nextafter(last, math.inf))
    return StateIdentity(identity, at, last is not None)
