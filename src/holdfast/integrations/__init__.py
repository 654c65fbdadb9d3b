"""Holdfast as the broker of task frameworks. Importing `holdfast` imports none of them."""

from __future__ import annotations

import msgspec


def register_transport() -> None:
    """Tell kombu what `holdfast://` means.

    Kombu has no entry point for transports. But it loads those for serializers when it is first imported, before any
    URL is looked at, so `kombu_serializer` below is one, and brings the transport with it. A program that uses kombu
    without Celery imports `holdfast.integrations.kombu`.

    Kombu cuts a URL at its plus sign, except for one that it fails over to: then the whole scheme is the name.
    """
    from kombu.transport import TRANSPORT_ALIASES

    from holdfast.broker.folder.layout import STORE_SCHEMES

    for scheme in ("holdfast", *(f"holdfast+{place}" for place in ("http", "https", "unix", *sorted(STORE_SCHEMES)))):
        TRANSPORT_ALIASES.setdefault(scheme, "holdfast.integrations.kombu:HoldfastTransport")


def __getattr__(name: str) -> object:
    if name != "kombu_serializer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_transport()
    return msgspec.json.encode, msgspec.json.decode, "application/vnd.holdfast+json", "utf-8"
