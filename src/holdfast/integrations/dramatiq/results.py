"""Results of actors as documents that expire."""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from typing import Any

from dramatiq.results.backend import Missing, ResultBackend

from holdfast.integrations.dramatiq.broker import HeldMessage
from holdfast.integrations.places import Tls, places
from holdfast.integrations.results import Results

logger = logging.getLogger(__name__)


class HoldfastResults(ResultBackend):
    """A backend for dramatiq's middleware `Results`, at the same places as the broker."""

    def __init__(self, url: str, *, tls: Tls = None, **options: Any) -> None:
        super().__init__(**options)
        self.url = url
        opening = {} if tls is None else {"tls": tls}
        self._results = Results(lambda: places.at(url, opening).broker, "dramatiq.result.")

    def _get(self, message_key: str) -> Any:
        found = self._results.get(message_key)
        return Missing if found is None else self.encoder.decode(b64decode(found["value"]))

    def store_result(self, message: Any, result: Any, ttl: int) -> None:
        """Store a result, unless another worker has the message by now: what that one stores counts."""
        if self._is_lost(message):
            return
        super().store_result(message, result, ttl)

    def store_exception(self, message: Any, exception: Exception, ttl: int) -> None:
        """As `store_result`."""
        if self._is_lost(message):
            return
        super().store_exception(message, exception, ttl)

    def _is_lost(self, message: Any) -> bool:
        lost: bool = isinstance(message, HeldMessage) and message.lease.lost
        if lost:
            logger.warning("The lease of the message %s was lost, so its result is not kept", message.message_id)
        return lost

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        value = b64encode(self.encoder.encode(result)).decode()
        self._results.put(message_key, {"value": value}, keep_s=ttl / 1000)
        self._results.sweep()
