"""The topics that Spark reads: an 8-byte key, and a value half of which is the same everywhere, half random digits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.scale import Scale

TOPIC = "orders"

# The columns of a plain `load()`.
LOADED = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp"

_MANY = 1_000
_MIB = 1 << 20

# What differs from a plain topic: one partition, segments of 64 MiB, frames of a thousand messages, no codec.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partitions": {"partitions": 3},
    "zstd": {"codec": "zstd"},
    "single": {},
    "random": {},
    "large": {"segment_bytes": 512 * _MIB},
}


def fill(folder: Path, kind: str, scale: Scale, rows: int | None = None) -> None:
    """Make a data folder with one topic of this kind."""
    import holdfast

    single = kind == "single"
    if rows is None:
        rows = scale.spark_single_rows if single else scale.spark_rows
    settings = KINDS[kind]
    partitions = settings.get("partitions", 1)
    with holdfast.open_broker(folder, durability="os") as broker:
        broker.create_topic(TOPIC, **settings)
        for turn, some in enumerate(_messages(rows, scale.body_bytes, 1 if kind == "random" else 2)):
            if single:
                for message in some:
                    broker.publish(TOPIC, message.body, key=message.key)
            else:
                broker.publish_many(TOPIC, some, partition=turn % partitions)


def _messages(rows: int, body_bytes: int, random_part: int) -> Iterator[list[Any]]:
    """A thousand at a time, the same in every run; of a body, one in so many bytes is random."""
    from holdfast import NewMessage

    source = random.Random(rows)
    random_bytes = body_bytes // random_part // 2  # two digits each
    same = (b'{"customer":"a customer of ours","country":"PT","digest":"' * 20)[: body_bytes - 2 * random_bytes]
    for first in range(0, rows, _MANY):
        count = min(_MANY, rows - first)
        digits = source.randbytes(random_bytes * count).hex().encode()
        width = 2 * random_bytes
        yield [
            NewMessage(body=same + digits[at * width : at * width + width], key=b"%08d" % (first + at))
            for at in range(count)
        ]
