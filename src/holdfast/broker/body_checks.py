"""What topics demand of message bodies: a schema that is registered for them, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

from holdfast.broker.folder.layout import SCHEMAS_TOPIC
from holdfast.broker.messages import TOMBSTONE
from holdfast.broker.metrics import Counter
from holdfast.env.process import get_logger
from holdfast.errors import InvalidRequest, SchemaMismatch, SchemaNotFound
from holdfast.large import Value
from holdfast.settings import TopicSettings

if TYPE_CHECKING:
    from holdfast.broker.engine import BrokerEngine
    from holdfast.broker.schemas import FolderSchemas
    from holdfast.broker.topic import Topic

logger = get_logger(__name__)

# Raises SchemaMismatch for a value, with flags, that its topic does not accept.
BodyCheck: TypeAlias = Callable[[Value, int], None]

_MOST_BYTES: Final = 4 * 1024 * 1024  # of a value that is checked
_LOGGED_EVERY: Final = 1_000


class BodyChecks:
    """The checks of a data folder's topics, and its registry of schemas, which is made when somebody asks for it."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._schemas: FolderSchemas | None = None
        self.refused, self.passed = Counter("refused"), Counter("passed")

    def schemas(self) -> FolderSchemas:
        """The registry of schemas; nothing is read before its first use."""
        with self._lock:
            self._engine.check_open()
            if self._schemas is None:
                from holdfast.broker.schemas import FolderSchemas  # few programs have any

                self._schemas = FolderSchemas(self._engine)
            return self._schemas

    def counts(self) -> Iterator[tuple[str, str, int]]:
        """Return what was counted since the folder was opened, each with its name and what it is."""
        yield "schemas_refused", "Messages refused by a schema.", self.refused.value
        yield "schemas_passed", "Messages stored in spite of a schema.", self.passed.value

    def of(self, topic: str, settings: TopicSettings) -> BodyCheck | None:
        """Return what checks the bodies of a topic; None if nothing does."""
        if topic == SCHEMAS_TOPIC:
            return _refuse
        if settings.schema_check == "off":
            return None
        return SchemaCheck(self, topic, settings)


class SchemaCheck:
    """Checks the values of a topic against the subject of its name with -value."""

    def __init__(self, checks: BodyChecks, topic: str, settings: TopicSettings) -> None:
        self._checks = checks
        self._topic = topic
        self._subject = f"{topic}-value"
        self._refuses = settings.schema_check == "reject"
        self._takes_plain = settings.schema_plain

    def __call__(self, value: Value, flags: int) -> None:
        if flags & TOMBSTONE:
            return
        try:
            self._check(value)
        except (SchemaMismatch, SchemaNotFound) as error:
            if self._refuses:
                self._checks.refused.add()
                raise SchemaMismatch(
                    f"a message for {self._topic} was refused: {error}. The topic's setting schema_check is reject"
                ) from None
            if self._checks.passed.value % _LOGGED_EVERY == 0:
                logger.warning("a message does not match its schema", extra={"topic": self._topic, "error": str(error)})
            self._checks.passed.add()

    def _check(self, value: Value) -> None:
        if len(value) > _MOST_BYTES:
            raise SchemaMismatch(f"it has {len(value)} bytes, and values are checked up to {_MOST_BYTES}")
        content = bytes(value)
        schemas = self._checks.schemas()
        if self._takes_plain and content[:1] != b"\0":
            schemas.newest(self._subject).check(content)
        else:
            schemas.carried(self._subject, content)


def body_check_of(topic: Topic) -> BodyCheck | None:
    """Return what checks the bodies of a topic; None if nothing does."""
    return None if topic.body_checks is None else topic.body_checks.of(topic.name, topic.settings)


def check_not_kept(topic: str) -> str:
    """Return the name of a topic that users may change; the registry's own is not."""
    if topic == SCHEMAS_TOPIC:
        _refuse(b"", 0)
    return topic


def _refuse(_value: Value, _flags: int) -> None:
    raise InvalidRequest(
        f"{SCHEMAS_TOPIC}, where the registry keeps its schemas, cannot be written to or changed: use `holdfast schema`"
    )
