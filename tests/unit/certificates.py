"""Certificates for tests: an issuer, and what it signs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = timedelta(days=1)


class Issuer:
    """An authority of its own; a careless one leaves out what only strict checks ask for."""

    def __init__(self, name: str = "issuer", *, careless: bool = False) -> None:
        self._name = name
        self._careless = careless
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._signed(name, self._key, (), is_issuer=True)

    def write(self, path: Path) -> Path:
        """Its own certificate."""
        path.write_bytes(_pem(self._certificate))
        return path

    def issue(self, folder: Path, name: str, *alternatives: str, passphrase: bytes = b"") -> tuple[Path, Path]:
        """A certificate and its key, as files."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, secret = folder / f"{name or 'nameless'}.pem", folder / f"{name or 'nameless'}.key"
        certificate.write_bytes(_pem(self._signed(name, key, alternatives)))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            encryption = serialization.BestAvailableEncryption(passphrase)
        secret.touch(mode=0o600)
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
        return certificate, secret

    def _signed(
        self, name: str, key: ec.EllipticCurvePrivateKey, alternatives: tuple[str, ...], *, is_issuer: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            issuer_name=_subject(self._name),
            subject_name=_subject(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _DAY,
            not_valid_after=now + _DAY,
        ).add_extension(x509.BasicConstraints(ca=is_issuer, path_length=None), critical=True)
        if alternatives:
            names = [_alternative(each) for each in alternatives]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not name)
        if not self._careless:
            builder = self._marked(builder, key, is_issuer=is_issuer)
        return builder.sign(self._key, hashes.SHA256())

    def _marked(
        self, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, *, is_issuer: bool
    ) -> x509.CertificateBuilder:
        """With what VERIFY_X509_STRICT asks for, which Python sets from 3.13 on."""
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(authority, critical=False).add_extension(own, critical=False)
        return builder.add_extension(_SIGNS if is_issuer else _SPEAKS, critical=True)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


_SIGNS, _SPEAKS = _usage(signs=True), _usage(signs=False)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])


def _alternative(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
