"""From what a caller hands over to bodies that can be stored, with errors that say what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from holdfast.codec.encode import Body, Packing, encode_batch, encode_values, message_sizes
from holdfast.codec.frame import Kind
from holdfast.errors import InvalidRequest, MessageTooLarge
from holdfast.large import LARGE_BYTES, LargeValue
from holdfast.model import NO_PRODUCER, Batch, CodecName, Producer
from holdfast.settings import LogSettings


class Encoder:
    """Checks and encodes batches by a log's settings."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings
        self._small_enough = min(settings.max_message_bytes, settings.max_batch_bytes)
        self._packings: dict[str, Packing] = {}

    def encode(
        self,
        messages: Sequence[bytes] | Batch,
        now_ns: int,
        *,
        codec: CodecName | None,
        kind: Kind,
        any_size: bool = False,
    ) -> list[Body]:
        """The bodies of the batch; none for an empty one. `any_size`: it was accepted before, in another log."""
        packing = self._packing(codec or self._settings.codec)
        try:
            if isinstance(messages, Batch):
                batch = messages
            else:
                values = _as_values(messages)
                body = self._encode_values(values, now_ns, packing, kind)
                if body is not None:
                    return [body]
                batch = Batch(values=values)
            if not batch.values:
                return []
            _check_columns(batch)
            if not any_size:
                self._check_sizes(message_sizes(batch))
            return encode_batch(batch, now_ns, packing=packing, cap_bytes=self._settings.frame_bytes, kind=kind)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InvalidRequest(f"the batch cannot be stored: {error}. Nothing of it was kept") from error

    def encode_arrow(self, values: Any, now_ns: int) -> list[Body]:
        """The bodies of an Arrow array of binary or text values."""
        from holdfast.codec.arrow import encode_arrow

        settings = self._settings
        bodies = encode_arrow(
            values,
            now_ns,
            cap_bytes=settings.frame_bytes,
            max_message_bytes=settings.max_message_bytes,
            packing=self._packing(settings.codec),
        )
        self._check_batch(sum(body.raw_bytes - 4 * body.count for body in bodies))
        return bodies

    def _encode_values(self, values: Sequence[bytes], now_ns: int, packing: Packing, kind: Kind) -> Body | None:
        """The short way for plain values that fit in one frame; None where it does not lead there."""
        try:
            ends = list(accumulate(map(len, values), initial=0))
            if not values or ends[-1] + 4 * len(ends) > self._settings.frame_bytes:
                return None
            if ends[-1] > self._small_enough:
                self._check_sizes([end - start for start, end in pairwise(ends)])
            return encode_values(values, ends, now_ns, packing=packing, kind=kind)
        except TypeError:
            return None  # the long way says what is wrong

    def _check_sizes(self, sizes: list[int]) -> None:
        limit = self._settings.max_message_bytes
        if max(sizes) > limit:
            which = next(i for i, size in enumerate(sizes) if size > limit)
            raise MessageTooLarge(
                f"message {which} of the batch has {sizes[which]} bytes with key and headers, the limit is {limit}; "
                "nothing of the batch was kept. Send it in parts, or raise max_message_bytes"
            )
        if len(sizes) > 1:
            self._check_batch(sum(sizes))

    def _check_batch(self, total: int) -> None:
        limit = self._settings.max_batch_bytes
        if total > limit:
            raise MessageTooLarge(f"the batch has {total} bytes, the limit is {limit}; send smaller batches")

    def _packing(self, codec: str) -> Packing:
        packing = self._packings.get(codec)
        if packing is None:
            settings = self._settings
            packing = Packing.named(
                codec,
                level=settings.codec_level if codec == settings.codec else None,
                min_bytes=settings.codec_min_bytes,
                min_saving_percent=settings.codec_min_saving_percent,
                max_bytes=settings.max_raw_bytes,
            )
            self._packings[codec] = packing
        return packing


def most_plain_bytes(settings: LogSettings) -> int:
    """Up to how many bytes a single value goes the short way."""
    return min(settings.max_message_bytes, LARGE_BYTES) if settings.codec == "none" else -1


def check_origin(kind: Kind, producer: Producer) -> None:
    """Refuse what no frame can say of its messages."""
    if kind not in (Kind.DATA, Kind.CONTROL, Kind.JOURNAL):
        raise InvalidRequest(f"kind={kind!r} cannot be appended; use Kind.DATA, Kind.CONTROL or Kind.JOURNAL")
    if producer is not NO_PRODUCER:
        fits = 0 <= producer.id < 2**64 and 0 <= producer.epoch < 2**32 and 0 <= producer.first_sequence < 2**32
        if not fits:
            raise InvalidRequest(f"{producer} is out of range: the id has 64 bits, epoch and sequence have 32")


def _as_values(messages: object) -> Sequence[bytes]:
    if isinstance(messages, (bytes, bytearray, str)):
        raise InvalidRequest(
            f"append takes a list of messages, not a single {type(messages).__name__}: write append([message])"
        )
    if not isinstance(messages, Iterable):
        raise InvalidRequest(f"append takes a list of messages, not {type(messages).__name__}")
    return messages if isinstance(messages, (list, tuple)) else list(messages)


def _check_columns(batch: Batch) -> None:
    count = len(batch.values)
    for name in batch.__struct_fields__:
        column = getattr(batch, name)
        if column is not None and len(column) != count:
            raise ValueError(f"{name} has {len(column)} items for {count} values")
    _require("a message's value must be bytes", batch.values, {bytes, bytearray, LargeValue})
    if batch.keys is not None:
        _require("a key must be bytes or None", batch.keys, {bytes, type(None)})
    if batch.headers is not None:
        pairs = [pair for row in batch.headers for pair in row]
        _require("a header's name must be text", [name for name, _ in pairs], {str})
        _require("a header's value must be bytes", [value for _, value in pairs], {bytes})


def _require(what: str, column: Sequence[object], allowed: set[type]) -> None:
    wrong = set(map(type, column)) - allowed
    if wrong:
        raise TypeError(f"{what}, not {wrong.pop().__name__}")
