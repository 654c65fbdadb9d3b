"""TLS with a server: whom we trust, what we show of ourselves, and errors that would be the same the next time."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from holdfast.client.address import Address
from holdfast.errors import InvalidRequest, Unauthenticated

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


# Ends of a TLS connection that do not trust each other: to try again would change nothing.


_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
_ALERT: Final = "ALERT"
_PASSING: Final = "INTERNAL_ERROR"
# What OpenSSL finds amiss only where it is told to be strict (VERIFY_X509_STRICT), as Python tells it from 3.13 on.
_STRICT: Final = range(80, 94)
_SHOW_ONE: Final = f"set {CERTIFICATE}, or give tls= an ssl.SSLContext with one"


def told(address: Address, error: BaseException, *, fresh: bool) -> str:
    """What an error says; and what it may mean where a server hangs up before it has said a word."""
    text = str(error) or type(error).__name__
    if address.secure and fresh and has_hung_up(error):
        text += f" (as servers do that ask for a client's certificate, and get none that they trust: {_SHOW_ONE})"
    return text


def has_hung_up(error: BaseException) -> bool:
    """Whether the other end closed the connection, and did not say why."""
    return isinstance(error, (ConnectionResetError, BrokenPipeError, EOFError)) or "EOF" in str(_reason(error))


def distrust(error: BaseException) -> str:
    """What is wrong with the certificate that a server showed; nothing where that is not what the error tells."""
    return (getattr(error, "verify_message", "") or str(error)) if _reason(error) == _UNTRUSTED else ""


def strictness(error: BaseException) -> str:
    """What to do about a certificate that only strict checks refuse; nothing where another thing is wrong with it."""
    if getattr(error, "verify_code", 0) not in _STRICT:
        return ""
    return (
        "Python 3.13 and newer check certificates more strictly. Let its issuer make it anew, with an authority key "
        "identifier, and with a key usage in the issuer's own; the guide `Secure the server` has commands for that"
    )


def _reason(error: BaseException) -> object:
    return getattr(error, "reason", None)


def tls_refusal(address: Address, error: BaseException) -> Unauthenticated | None:
    """What to tell of an error that will be the same the next time; None for one that may pass."""
    reason = _reason(error)
    if not address.secure or not isinstance(reason, str):
        return None
    why = distrust(error)
    if why:
        advice = strictness(error) or (
            "Use the name that its certificate has, and give tls= the certificate of its issuer, unless this is not "
            "your server"
        )
        return Unauthenticated(
            f"the server at {address.text} has not proved who it is: {why}. Nothing was sent. {advice}"
        )
    if reason in _NO_TLS:
        return Unauthenticated(
            f"what listens at {address.text} does not speak TLS: {error}. Nothing was sent; use its right port, or http://"
        )
    if _ALERT in reason and _PASSING not in reason:
        return Unauthenticated(
            f"the server at {address.text} refused the connection: {error}. Nothing was done. Where it asks for a "
            f"client's certificate, show one that its issuer has signed: {_SHOW_ONE}"
        )
    return None
