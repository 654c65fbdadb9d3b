"""The layout of a data folder, the names allowed in it, and small JSON files that carry a checksum."""

from __future__ import annotations

import posixpath
from binascii import b2a_base64
from contextlib import closing
from os import fspath
from typing import Final, NamedTuple

import msgspec

from holdfast.checksum import crc32c
from holdfast.env import World
from holdfast.errors import ChecksumMismatch, HoldfastError, InvalidRequest, NotALog, NotAQueue
from holdfast.later import hashlib, pattern
from holdfast.storage.files import LOCK, join, open_error, read_file

TOPICS: Final = "topics"
GROUPS: Final = "groups"
LOCKS: Final = "locks"
# Of the documents that hold schedules and transactions: users cannot give such names.
SCHEDULE_PREFIX: Final = "schedule:"
TRANSACTION_PREFIX: Final = "transaction:"
UNNAMED: Final = "~"  # what the names of transactions without a name begin with
RESERVE: Final = "reserve"
RESERVE_BYTES: Final = 1024 * 1024
TIER: Final = "tier"  # segments that were fetched from the store that they have moved to
OWNER_SOCKET: Final = "owner.sock"  # where other processes connect to the owner of a data folder
QUERIES: Final = "queries"
STAGING: Final = "staging"
SETTINGS: Final = "settings.json"
TOPIC: Final = "topic.json"
INTERNAL_PREFIX: Final = "__"
DEAD_SUFFIX: Final = ".dlq"
DEFAULT_GROUP: Final = "default"
DEFAULT_TOPIC: Final = "queue"
SCHEMAS_TOPIC: Final = "_schemas"  # only the registry of schemas writes to it

# Stores that a data folder may live in, by the scheme of its URL; `stored` opens them.
STORE_SCHEMES: Final = frozenset({"s3", "az", "gs", "postgresql", "file", "memory"})
STORE_MARK: Final = "store.url"  # beside the local copy of such a folder: what it is a copy of

_MOST_CHARS: Final = 200
_NAME: Final = pattern(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{_MOST_CHARS - 1}}}")
_ID: Final = pattern(r"(?:(.*)-([0-9]{1,5})-)?(d?)([0-9]{1,18})")
_TOKEN: Final = r"@([0-9a-f]{1,16}|[A-Za-z0-9_-]{32})"  # as proofs.py makes them, or only a fence
_RECEIPT: Final = pattern(r"(?:(.*)-([0-9]{1,5})-)?([0-9]{1,18})" + _TOKEN)
_LEASE: Final = pattern(r"(.*)" + _TOKEN)


def is_store(place: object) -> bool:
    """Return whether the text is the URL of a folder in a store."""
    if not isinstance(place, str):
        return False
    scheme, separator, _ = place.partition("://")
    return bool(separator) and scheme in STORE_SCHEMES


def folder_path(folder: object, what: str = "the folder") -> str:
    """The path as text, without a trailing slash. Raises InvalidRequest."""
    try:
        path: object = fspath(folder)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidRequest(f"{what} must be a path, not {type(folder).__name__}") from None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest(f"{path!r} cannot be the path of a folder: name another")
    return path if is_store(path) else path.rstrip("/") or "/"


def opening_error(folder: str, error: OSError) -> HoldfastError:
    """Return the error for a data folder, or a part of it, that cannot be opened."""
    failure = open_error(folder, error)
    if isinstance(failure, NotALog):
        return NotAQueue(
            f"cannot open {folder}: {error.strerror or error}; name a folder, or a path where one can be created"
        )
    return failure


def store_of(world: World, folder: str) -> str | None:
    """Return the URL of which the folder is the local copy; None if it is a folder in its own right."""
    content = read_file(world.disk, join(posixpath.dirname(folder) or ".", STORE_MARK))
    return None if content is None else content.decode()


def check_name(name: object, what: str, most: int = _MOST_CHARS) -> str:
    """Return the name if a topic or group may have it; raises otherwise. A valid name cannot form a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > most:
        raise InvalidRequest(
            f"{what} {name!r} cannot be used: use letters, digits, '.', '_' and '-', not beginning with '.' or '-', "
            f"at most {most} characters"
        )
    return name


def topic_folder(root: str, topic: str) -> str:
    return f"{root}/{TOPICS}/{check_name(topic, 'topic')}"


def partition_folder(root: str, topic: str, partition: int = 0) -> str:
    return f"{topic_folder(root, topic)}/{partition}"


def group_folder(root: str, topic: str, partition: int, group: str) -> str:
    return f"{partition_folder(root, topic, partition)}/groups/{check_name(group, 'group')}"


def stream_group_folder(root: str, group: str) -> str:
    return f"{root}/{GROUPS}/{check_name(group, 'group')}"


def check_topic_name(name: object) -> str:
    """Return the name if users may give it to a topic; raises otherwise."""
    name = check_name(name, "topic", _MOST_CHARS - len(DEAD_SUFFIX))  # leaves room for the name of its dead letters
    if name.endswith(DEAD_SUFFIX) or name.startswith(INTERNAL_PREFIX):
        raise InvalidRequest(
            f"topic {name!r} cannot be used: names that end in {DEAD_SUFFIX} are for dead letters, and those that "
            f"begin with {INTERNAL_PREFIX} are reserved"
        )
    return name


def check_readable_name(name: object) -> str:
    """Return the name if users may read a topic by it, their own or its dead letters; raises otherwise."""
    if isinstance(name, str) and name.endswith(DEAD_SUFFIX):
        return check_topic_name(name.removesuffix(DEAD_SUFFIX)) + DEAD_SUFFIX
    return check_topic_name(name)


def is_users_topic(name: str) -> bool:
    """Whether this is the folder name of a topic that users created."""
    return bool(_NAME.fullmatch(name)) and not name.endswith(DEAD_SUFFIX) and not name.startswith(INTERNAL_PREFIX)


def topics(world: World, root: str) -> list[str]:
    """Return the topics in a data folder, without dead letters and internal topics."""
    return list(filter(is_users_topic, names_in(world, join(root, TOPICS))))


def names_in(world: World, folder: str) -> list[str]:
    """Return the names in a folder; none if it does not exist."""
    return world.disk.names(folder) if world.disk.exists(folder) else []


def topic_for(root: str) -> str:
    """Return the topic name for a new queue in this folder: the folder's own name if it is allowed."""
    name = root.rstrip("/").rpartition("/")[2]
    return name if is_users_topic(name) else DEFAULT_TOPIC


def message_id(topic: str, partition: int, offset: int | None, delayed_id: int | None) -> str:
    """Return the public id of a message: its place in the log, or its delayed id."""
    return f"{topic}-{partition}-{offset}" if delayed_id is None else f"{topic}-{partition}-d{delayed_id}"


class MessagePlace(msgspec.Struct, frozen=True, gc=False):
    """A parsed message id: the partition, and the offset there or the delayed id."""

    partition: int
    offset: int | None = None
    delayed_id: int | None = None


def parse_message_id(text: object, topic: str) -> MessagePlace:
    """Parse the id of a message of this topic; raises InvalidRequest for anything else."""
    found = _ID.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[1] not in (None, topic):
        raise InvalidRequest(f"{text!r} is not a message id of {topic}; ids look like {topic}-0-42 or {topic}-0-d7")
    partition, number = int(found[2] or 0), int(found[4])
    return MessagePlace(partition, None, number) if found[3] else MessagePlace(partition, number)


def topic_of_id(text: object) -> str:
    """Return the topic that a message id names."""
    found = _ID.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[1] is None:
        raise InvalidRequest(f"{text!r} is not a message id; ids look like orders-0-42 or orders-0-d7")
    return found[1]


class ReceiptText(NamedTuple):
    """A parsed receipt, not verified yet."""

    partition: int
    offset: int
    token: str


def parse_receipt(text: object, topic: str) -> ReceiptText:
    """Parse a receipt; raises InvalidRequest if it is not one of this topic."""
    found = _RECEIPT.fullmatch(text) if isinstance(text, str) else None
    if found is not None and found[1] in (None, topic):
        return ReceiptText(int(found[2] or 0), int(found[3]), found[4])
    raise InvalidRequest(f"{text!r:.300} is not a receipt of {topic}; give the text that came with the message")


RUN_HEAD_BYTES: Final = 13  # of a token: version, fence, time of the grant; see `broker/leases.py`
TOKEN_MAC_BYTES: Final = 11
TOKEN_TO_URL: Final = bytes.maketrans(b"+/", b"-_")


def run_receipt(token: bytes, start: str, offset: int) -> str:
    """Return the receipt of a message of a run, from the run's token and what its messages' names start with."""
    head, key = token[:RUN_HEAD_BYTES], token[RUN_HEAD_BYTES:]
    mac = hashlib.blake2b(b"%d" % offset, key=key, digest_size=TOKEN_MAC_BYTES).digest()
    return f"{start}{offset}@{b2a_base64(head + mac, newline=False).translate(TOKEN_TO_URL).decode()}"


class LeaseText(NamedTuple):
    """A parsed lease id of a lock, not verified yet."""

    name: str
    token: str


def parse_lease(text: object) -> LeaseText:
    """Parse the lease id of a lock; raises InvalidRequest if it is not one."""
    found = _LEASE.fullmatch(text) if isinstance(text, str) else None
    if found is None or not _NAME.fullmatch(found[1]):
        raise InvalidRequest(f"{text!r:.300} is not a lease of a lock; give the lease_id that came with the lock")
    return LeaseText(found[1], found[2])


# Small JSON files with a checksum, so that a flipped bit in a number is not taken for another number.
#
# The checksum is the first member, ``"check"``: CRC32C, in hexadecimal, of all bytes after it. A file without one was
# written by an older release or by a person, and is accepted as it is; the next write adds one.


_CHECK: Final = pattern(rb'\{\s*"check":\s*"([0-9a-f]{8})",?')


def sealed(document: bytes) -> bytes:
    """Return a JSON object with its checksum added."""
    rest = document.strip()[1:]
    comma = b"" if rest.strip() == b"}" else b","
    return b'{"check":"%08x"%s%s' % (crc32c(rest), comma, rest)


def is_sealed(content: bytes) -> bool:
    return _CHECK.match(content) is not None


def unsealed(content: bytes, path: str) -> bytes:
    """Return the object without its checksum; raises ChecksumMismatch if the checksum is wrong."""
    found = _CHECK.match(content)
    if found is None:
        return content
    rest = content[found.end() :]
    if int(found[1], 16) != crc32c(rest):
        raise ChecksumMismatch(
            f"{path} does not match its checksum: it was damaged. Restore it from a copy; or run `holdfast repair` on "
            'the data folder to continue without it. If you changed it by hand, remove "check" from it'
        )
    return b"{" + rest


def short_reserve(world: World, folder: str) -> str | None:
    """Say that the reserve of a data folder is used, and what to do; None if it is not, or there is none yet."""
    path = join(folder, RESERVE)
    if not world.disk.exists(path):
        return None
    with closing(world.disk.open(path)) as file:
        size = file.size()
    if size >= RESERVE_BYTES:
        return None
    return (
        f"{path} has {size:,} of {RESERVE_BYTES:,} bytes, because the disk is or was full: new messages are refused. "
        f"Handle some messages, or free at least {2 * RESERVE_BYTES:,} bytes on this disk; the owner then fills it up "
        "again"
    )


def check_folder(world: World, folder: str, *, create: bool) -> None:
    """Raise NotAQueue unless the folder is new, empty or a data folder: never write among other files."""
    there = world.disk.exists(folder)
    names = [name for name in world.disk.names(folder) if name not in (LOCK, OWNER_SOCKET)] if there else []
    if TOPICS in names:
        return
    if not create:
        raise NotAQueue(
            f"{folder} {'holds no queue' if there else 'does not exist'}; open it with create=True to create one"
        )
    if names:
        raise NotAQueue(
            f"{folder} holds other files ({', '.join(names[:3])}, ...) and no queue; choose a new or empty folder"
        )
