"""The two ends of TLS that are ours: an authority for one run towards the box, and the system's trust towards outside.

The keys of the authority and of its certificates exist in this process alone and end with it. Only the box of the run
is given the certificate, so no other client believes what it signs.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections import OrderedDict
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringfence.core.errors import Unavailable
from ringfence.egress import names
from ringfence.egress.names import BadName, Host

_MAX_CONTEXTS = 256
_SLACK = datetime.timedelta(hours=1)
_ALPN = ["http/1.1"]

_Callback = Callable[[ssl.SSLObject | ssl.SSLSocket, str | None, ssl.SSLContext], int | None]


class Authority:
    """Signs for the hosts of one run, as they are asked for."""

    def __init__(self, lifetime: datetime.timedelta = datetime.timedelta(days=1)) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self._key = ec.generate_private_key(ec.SECP256R1())
        # One key for all certificates: they are all ours, and making keys is what takes the time.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._begins = now - _SLACK
        self._ends = now + lifetime
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Ringfence, one run")])
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        self._certificate = (
            self._builder(subject, subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._contexts: OrderedDict[Host, ssl.SSLContext] = OrderedDict()

    @property
    def pem(self) -> bytes:
        """The certificate that the box of the run has to trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def check(self) -> None:
        """Raises Unavailable once the certificate has expired."""
        if datetime.datetime.now(datetime.UTC) >= self._ends:
            raise Unavailable("authority_expired", "the authority of this run has expired")

    def context(self, host: Host) -> ssl.SSLContext:
        """For serving as this host. Raises Unavailable."""
        self.check()
        found = self._contexts.get(host)
        if found is None:
            found = self._contexts[host] = self._serving(host)
            if len(self._contexts) > _MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(host)
        return found

    def pair(self, host: Host) -> bytes:
        """In PEM: the key and the certificate of a server of this name."""
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return key + self._leaf(host).public_bytes(serialization.Encoding.PEM)

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begins)
            .not_valid_after(self._ends)
        )

    def _leaf(self, host: Host) -> x509.Certificate:
        name: x509.GeneralName = x509.DNSName(host.text)
        if host.address is not None:
            name = x509.IPAddress(ipaddress.ip_address(host.text))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            # A common name has 64 characters at most and no client reads it: the alternative name is critical then.
            self._builder(x509.Name([]), self._certificate.subject, self._leaf_key.public_key())
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _serving(self, host: Host) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        # The ssl module reads keys from files alone: this one is memory of ours, never on a disk.
        file = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(file, self.pair(host))
            context.load_cert_chain(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
        context.sni_callback = _same_name(host)
        return context


def _same_name(host: Host) -> _Callback:
    """A second look at the server's name, by the parser that the handshake itself uses."""

    def check(_tls: ssl.SSLObject | ssl.SSLSocket, name: str | None, _context: ssl.SSLContext) -> int | None:
        if name is None and host.address is not None:
            return None
        try:
            same = name is not None and names.host(name) == host
        except BadName:
            same = False
        return None if same else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    return check


def outside(cafile: str | None = None) -> ssl.SSLContext:
    """For dialling: certificates are verified against the system's store, or against this file."""
    context = ssl.create_default_context(cafile=cafile)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    return context
