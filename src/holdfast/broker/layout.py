"""Where things lie in a data folder, and which names may be given.

jobs/
  lock                             one owner for all of it
  topics/jobs/settings.json
  topics/jobs/0/log/               the messages of partition 0
  topics/jobs/0/delayed/           those that are not due yet; made when first needed
  topics/jobs/0/dedup/             dedup ids; made when first needed
  topics/jobs/0/groups/default/    the journal of a group
  topics/jobs.dlq/...              the dead letters, the same again; made when first needed
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final

from holdfast.delivery.commands import Receipt
from holdfast.env import World
from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.storage.files import join

TOPICS: Final = "topics"
SETTINGS: Final = "settings.json"
DEAD_SUFFIX: Final = ".dlq"
DEFAULT_GROUP: Final = "default"
DEFAULT_TOPIC: Final = "queue"

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def check_name(name: object, what: str) -> str:
    """The name, if a topic or group may have it; no path can be made of it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{what} {name!r} cannot be used: letters, digits, '.', '_' and '-', not beginning with '.' or '-', "
            "at most 200 of them"
        )
    return name


def topic_folder(root: str, topic: str) -> str:
    return f"{root}/{TOPICS}/{check_name(topic, 'topic')}"


def partition_folder(root: str, topic: str, partition: int = 0) -> str:
    return f"{topic_folder(root, topic)}/{partition}"


def group_folder(root: str, topic: str, partition: int, group: str) -> str:
    return f"{partition_folder(root, topic, partition)}/groups/{check_name(group, 'group')}"


def topics(world: World, root: str) -> list[str]:
    """The topics in a data folder, without the dead letters' ones."""
    folder = join(root, TOPICS)
    if not world.disk.exists(folder):
        return []
    return [name for name in world.disk.names(folder) if _NAME.fullmatch(name) and not name.endswith(DEAD_SUFFIX)]


def topic_for(root: str) -> str:
    """The name for the topic of a new queue in this folder: the folder's own, where that may be used."""
    name = root.rstrip("/").rpartition("/")[2]
    return name if _NAME.fullmatch(name) and not name.endswith(DEAD_SUFFIX) else DEFAULT_TOPIC


def message_id(topic: str, partition: int, offset: int | None, delayed_id: int | None) -> str:
    """What a message is called outside: where it is, or its number among those that were delayed."""
    return f"{topic}-{partition}-{offset}" if delayed_id is None else f"{topic}-{partition}-d{delayed_id}"


def parse_message_id(text: object, topic: str) -> tuple[int | None, int | None]:
    """(offset, None) or (None, delayed id) of a message of this topic; InvalidRequest for anything else."""
    found = re.fullmatch(r"(?:(.*)-(0)-)?(d?)([0-9]{1,18})", text) if isinstance(text, str) else None
    if found is None or found[1] not in (None, topic):
        raise InvalidRequest(f"{text!r} is no id of a message of {topic}; ids look like {topic}-0-42 or {topic}-0-d7")
    number = int(found[4])
    return (None, number) if found[3] else (number, None)


def receipt_text(topic: str, receipt: Receipt) -> str:
    """A receipt as text, for scripts: the message's offset and the delivery's number."""
    return f"{topic}-0-{receipt.offset}@{receipt.fence:x}"


def parse_receipt(text: object, topic: str) -> Receipt:
    """The receipt that a text stands for; InvalidRequest where it is none of this queue."""
    found = re.fullmatch(r"(.*)@([0-9a-f]{1,16})", text) if isinstance(text, str) else None
    if found is not None:
        with suppress(HoldfastError):
            offset, _ = parse_message_id(found[1], topic)
            if offset is not None:
                return Receipt(offset, int(found[2], 16))
    raise InvalidRequest(f"{text!r} is no receipt of {topic}; receipts look like {topic}-0-42@10000000001")
