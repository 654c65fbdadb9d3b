"""Whom we trust, and what we show of ourselves, where we speak TLS with a server."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    import ssl

CA: Final = "HOLDFAST_TLS_CA"
CERTIFICATE: Final = "HOLDFAST_TLS_CERT"
KEY: Final = "HOLDFAST_TLS_KEY"


def context_of(tls: ssl.SSLContext | str | PathLike[str] | None, environ: Mapping[str, str]) -> ssl.SSLContext:
    """The context that was given; or one that trusts the file that was given, with what the variables say."""
    import ssl

    if isinstance(tls, ssl.SSLContext):
        return tls
    said = f"tls={tls!r}" if tls is not None else f"{CA}={environ.get(CA)}"
    context = _trusting(fspath(tls) if tls is not None else environ.get(CA) or None, said)
    certificate, key = environ.get(CERTIFICATE), environ.get(KEY) or None
    if certificate:
        _show(context, certificate, key, f"{CERTIFICATE}={certificate}" + (f" with {KEY}={key}" if key else ""))
    return context


def context_from(
    ca: str | None, certificate: str | None, key: str | None, environ: Mapping[str, str]
) -> ssl.SSLContext:
    """A context from files; where none is named, what the variables say."""
    more = {name: value for name, value in ((CERTIFICATE, certificate), (KEY, key)) if value is not None}
    return context_of(ca, {**environ, **({KEY: ""} if certificate else {}), **more})


def _trusting(ca: str | None, said: str) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"{said} cannot be used: {error}. Give a file of certificates to trust") from None


def _show(context: ssl.SSLContext, certificate: str, key: str | None, said: str) -> None:
    try:
        # Nobody is there to be asked for a passphrase; without this, OpenSSL would wait at the terminal.
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{said} cannot be used: {error}. Give a file with your certificate and one with its key, both PEM; "
            "or one that has both"
        ) from None


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase, which nobody is asked for; take it off")
