"""Ends of a TLS connection that do not trust each other: to try again would change nothing."""

from __future__ import annotations

from typing import Final

from holdfast.client.address import Address
from holdfast.errors import Unauthenticated

_UNTRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
_ALERT: Final = "ALERT"
_PASSING: Final = "INTERNAL_ERROR"


def tls_refusal(address: Address, error: BaseException) -> Unauthenticated | None:
    """What to tell of an error that will be the same the next time; None for one that may pass."""
    reason = getattr(error, "reason", None)
    if not address.secure or not isinstance(reason, str):
        return None
    if reason == _UNTRUSTED:
        why = getattr(error, "verify_message", "") or str(error)
        return Unauthenticated(
            f"the server at {address.text} has not proved who it is: {why}. Nothing was sent. Use the name that its "
            "certificate has, and give tls= the certificate of its issuer, unless this is not your server"
        )
    if reason in _NO_TLS:
        return Unauthenticated(
            f"what listens at {address.text} does not speak TLS: {error}. Nothing was sent; use its right port, or http://"
        )
    if _ALERT in reason and _PASSING not in reason:
        return Unauthenticated(
            f"the server at {address.text} refused the connection: {error}. Nothing was done. Where it asks for a "
            "client's certificate, give tls= an ssl.SSLContext with one that its issuer has signed"
        )
    return None
