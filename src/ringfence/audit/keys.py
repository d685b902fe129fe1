"""The key that signs checkpoints: made once, kept outside the state, readable by its owner alone."""

from __future__ import annotations

import binascii
import importlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from types import ModuleType

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence.audit.chain import Head, Since, StateIdentity, key_id, sign_message, sign_record
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.record import dataclass

PRIVATE = "audit-private.pem"
PUBLIC = "audit-public.pem"
SIGNER = "signer"
"""A folder beside these: what belongs to a signer that has the key, and is its user's alone."""
_MAX_PEM = 16 * 1024
_PEM = re.compile(rb"-----BEGIN (PRIVATE|PUBLIC) KEY-----\n([A-Za-z0-9+/=]{1,100})\n-----END \1 KEY-----\n")
_HEADS = {
    b"PRIVATE": bytes.fromhex("302e020100300506032b657004220420"),
    b"PUBLIC": bytes.fromhex("302a300506032b6570032100"),
}
"""How the DER form of an Ed25519 key begins (RFC 8410); the 32 bytes of the key follow."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The signing key of this installation and the folder it lies in."""

    folder: Path
    private: Ed25519PrivateKey = field(repr=False)

    @property
    def public(self) -> Ed25519PublicKey:
        return self.private.public_key()

    @property
    def id(self) -> str:
        return key_id(self.public)

    # What the signer process does for those that do not have the key themselves (`signing_client`).

    def sign(self, message: bytes, since: Since | None = None) -> bytes:
        return sign_message(self.private, message)

    def sign_record(self, text: bytes) -> str:
        return sign_record(self.private, text)

    def adopt(self, state: StateIdentity, identity: bytes, checkpoints: Iterable[bytes]) -> None:
        """Nothing beside the log is known of it."""

    def last(self, state: str, chain: str) -> Head | None:
        return None

    def show(self, chain: str, texts: Iterable[str], checkpoint: bytes | None = None) -> None:
        """Whoever has the key needs no proof."""

    def close(self) -> None:
        """There is nothing to end."""


def load_or_create(folder: Path) -> Keys:
    """The keys in `folder`; made there at the first start. Raises StoreError for a key that others can reach."""
    if (folder / SIGNER).is_dir():
        raise StoreError(f"the audit key in {folder} was given to a signer, and is not made anew")
    private = _private(folder / PRIVATE, kept(folder, PRIVATE, _new_key))
    try:
        _publish(folder / PUBLIC, private.public_key())
    except OSError as exc:
        raise StoreError(f"the audit key in {folder} cannot be used: {exc.strerror or exc}") from exc
    return Keys(folder.resolve(), private)


def kept(folder: Path, name: str, make: Callable[[], bytes]) -> bytes:
    """What a file of this folder holds that is its owner's alone; made at the first time. Raises StoreError."""
    path = folder / name
    try:
        # Those above it, too: whoever can write one of them can move the folder.
        for each in (*reversed(folder.parents), folder):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
        check_folder(folder)
        if not path.exists():
            _create(path, make())
        return _read(path)
    except OSError as exc:
        raise StoreError(f"{name} in {folder} cannot be used: {exc.strerror or exc}") from exc


def published(folder: Path) -> Ed25519PublicKey:
    """The public key in `folder`, which must be a plain file: a pipe there would be waited for. Raises StoreError."""
    path = folder / PUBLIC
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is not a plain file; move it away")
    if not path.exists():
        raise StoreError(
            f"there is no public key {path}: under this account no gateway has signed anything yet. Name the key that"
            " the log was signed with (ringfence audit verify --public-key FILE), or start a gateway (ringfence serve)"
        )
    return public_key_from_file(path)


def public_key_from_file(path: Path) -> Ed25519PublicKey:
    """Read a public key as `load_or_create` wrote it. Raises StoreError."""
    try:
        with path.open("rb") as file:
            pem = file.read(_MAX_PEM)
        raw = _raw(pem, b"PUBLIC")
        key = Ed25519PublicKey.from_public_bytes(raw) if raw is not None else _forms().load_pem_public_key(pem)
    except OSError as exc:
        raise StoreError(f"the public key {path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, UnsupportedAlgorithm):
        raise StoreError(f"{path} is not a public key in PEM form") from None
    if not isinstance(key, Ed25519PublicKey):
        raise StoreError(f"{path} holds a public key of another kind than Ed25519")
    return key


def check_folder(folder: Path) -> None:
    info = folder.stat()
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(f"the key folder {folder} is not a folder")
    if system.stranger(info):
        raise StoreError(f"the key folder {folder} belongs to another user (uid {info.st_uid})")
    if system.open_to_others(info, 0o022):
        # A user who can write the folder can put another key in the place of this one.
        raise StoreError(f"others can write the key folder {folder}; run: chmod 700 {folder}")


def _new_key() -> bytes:
    forms = _forms()
    made: bytes = Ed25519PrivateKey.generate().private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()
    )
    return made


def _create(path: Path, data: bytes) -> None:
    made = _write_beside(path, data, 0o600)
    try:
        os.link(made, path)  # unlike a rename, this never replaces the key that another process made meanwhile
    except FileExistsError:
        pass
    finally:
        made.unlink()
    system.sync_folder(path.parent)


def _publish(path: Path, public: Ed25519PublicKey) -> None:
    if path.exists():
        if key_id(published(path.parent)) != key_id(public):
            raise StoreError(f"{path} is not the public half of {PRIVATE} beside it")
        return
    forms = _forms()
    pem = public.public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    _write_beside(path, pem, 0o644).replace(path)
    system.sync_folder(path.parent)


def _write_beside(path: Path, data: bytes, mode: int) -> Path:
    made = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.PLAIN, mode)
    with open(descriptor, "wb") as file:
        system.restrict(descriptor, mode)
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    return made


def _read(path: Path) -> bytes:
    # What is checked must be what is read, so both go through one descriptor; no link is followed, no pipe waited for.
    descriptor = os.open(path, os.O_RDONLY | system.PRIVATE | system.UNHURRIED)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise StoreError(f"{path} is not a plain file; move it away")
        if system.stranger(info):
            raise StoreError(f"{path} belongs to another user (uid {info.st_uid})")
        if system.open_to_others(info, 0o077):
            raise StoreError(f"others can reach {path}; run: chmod 600 {path}")
        return file.read(_MAX_PEM)


def _private(path: Path, pem: bytes) -> Ed25519PrivateKey:
    try:
        raw = _raw(pem, b"PRIVATE")
        if raw is not None:
            return Ed25519PrivateKey.from_private_bytes(raw)
        key = _forms().load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise StoreError(f"{path} is not a private key in PEM form") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(f"{path} holds a private key of another kind than Ed25519")
    return key


def _raw(pem: bytes, kind: bytes) -> bytes | None:
    """The 32 bytes of an Ed25519 key as `load_or_create` writes it. None: another form, or none at all."""
    found = _PEM.fullmatch(pem)
    if found is None or found[1] != kind:
        return None
    head = _HEADS[kind]
    try:
        der = binascii.a2b_base64(found[2], strict_mode=True)
    except binascii.Error:
        return None
    return der.removeprefix(head) if der.startswith(head) and len(der) == len(head) + 32 else None


def _forms() -> ModuleType:
    """What reads and writes keys in every form. It is larger than all that signing needs, so most never load it."""
    return importlib.import_module("cryptography.hazmat.primitives.serialization")
