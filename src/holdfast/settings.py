"""Settings for operators: plain values with units in their names and limits in their types."""

# Annotations are evaluated here (no `from __future__ import annotations`): every process checks its settings against
# them before it does anything else.

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from holdfast.errors import BadSettings
from holdfast.later import difflib
from holdfast.model import BodyKind, CodecName, Durability

# The variable that names the settings file.
FILE_VARIABLE: Final = "HOLDFAST_CONFIG"

_KIB = 1024
_MIB = 1024 * 1024

# The lowest and highest level of each codec.
_LEVELS = {"none": (-7, 22), "zstd": (-7, 22), "lz4": (-7, 12), "gzip": (0, 9)}

_MOST: Final = 2**53  # as good as no limit
_UNITS: Final = {"_ms": "milliseconds", "_bytes": "bytes"}

_Count = Annotated[int, Meta(ge=1, le=_MOST)]
_DAY_MS = 24 * 3600 * 1000
_Weight = Annotated[int, Meta(ge=1, le=1_000_000)]
_Millis = Annotated[int, Meta(ge=1, le=100 * 365 * 24 * 3600 * 1000)]
_Path = Annotated[str, Meta(min_length=1, max_length=4_096)]


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one log. None means "no limit"."""

    durability: Durability = "fsync"
    sync_interval_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 1_000

    segment_bytes: Annotated[int, Meta(ge=4 * _KIB, le=2048 * _MIB)] = 64 * _MIB
    segment_messages: _Count | None = None
    segment_ms: _Millis | None = None
    frame_bytes: Annotated[int, Meta(ge=1 * _KIB, le=16 * _MIB)] = 256 * _KIB
    index_bytes: Annotated[int, Meta(ge=512, le=1 * _MIB)] = 4 * _KIB

    max_message_bytes: Annotated[int, Meta(ge=1, le=1024 * _MIB)] = 10 * _MIB
    max_batch_bytes: Annotated[int, Meta(ge=1, le=1024 * _MIB)] = 256 * _MIB
    min_free_bytes: Annotated[int, Meta(ge=0)] = 100 * _MIB

    codec: CodecName = "none"
    codec_level: Annotated[int, Meta(ge=-7, le=22)] | None = None
    codec_min_bytes: Annotated[int, Meta(ge=0)] = 1 * _KIB
    codec_min_saving_percent: Annotated[int, Meta(ge=0, le=99)] = 5
    max_raw_bytes: Annotated[int, Meta(ge=64 * _KIB, le=1024 * _MIB)] = 100_000_000

    retention_ms: _Millis | None = None
    retention_bytes: Annotated[int, Meta(ge=0)] | None = None
    retention_segments: _Count | None = None
    retention_done_bytes: Annotated[int, Meta(ge=0)] | None = None
    retention_min_segments: _Count = 1
    retention_ignores_pins: bool = False
    retention_check_ms: _Millis = 60_000

    def __post_init__(self) -> None:
        check_fields(self)
        low, high = _LEVELS[self.codec]
        if self.codec_level is not None and not low <= self.codec_level <= high:
            raise BadSettings(f"codec_level={self.codec_level} is outside {low} to {high}, the levels of {self.codec}")


class QueueSettings(LogSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one queue: those of its log, and how messages are delivered."""

    retention_ms: _Millis | None = 7 * _DAY_MS
    retention_done_bytes: Annotated[int, Meta(ge=0)] | None = 1024 * _MIB
    segment_ms: _Millis | None = None

    lease_ms: Annotated[int, Meta(ge=1, le=30 * _DAY_MS)] = 30_000
    max_attempts: _Count | None = 5
    backoff_ms: Annotated[int, Meta(ge=0, le=30 * _DAY_MS)] = 1_000
    backoff_factor: Annotated[float, Meta(ge=1, le=100)] = 2.0
    backoff_max_ms: Annotated[int, Meta(ge=0, le=365 * _DAY_MS)] = 600_000
    backoff_jitter_percent: Annotated[int, Meta(ge=0, le=100)] = 20
    dropped_delay_ms: Annotated[int, Meta(ge=0, le=30 * _DAY_MS)] | None = None
    max_error_chars: Annotated[int, Meta(ge=100, le=1_000_000)] = 4_000

    ttl_ms: _Millis | None = None
    expired_to_dead: bool = False
    dead_retention_ms: _Millis | None = 14 * _DAY_MS

    promote_after_ms: _Millis | None = 300_000
    priority_choice: Literal["strict", "fair"] = "strict"
    priority_weights: tuple[_Weight, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

    dedup_window_ms: _Millis = _DAY_MS
    tier_after_ms: _Millis | None = None
    tier_after_bytes: Annotated[int, Meta(ge=0)] | None = None
    ack_durability: Durability = "interval"
    snapshot_events: Annotated[int, Meta(ge=100, le=10**9)] = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.priority_weights) != 10:
            raise BadSettings(
                f"priority_weights has {len(self.priority_weights)} numbers; give ten, for the priorities 0 to 9"
            )

    @property
    def is_tiered(self) -> bool:
        """Whether sealed segments are to leave the disk."""
        return self.tier_after_ms is not None or self.tier_after_bytes is not None


class TopicSettings(QueueSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one topic: those of each partition, plus key handling and defaults for its groups."""

    partitions: Annotated[int, Meta(ge=1, le=10_000)] = 1
    cleanup: Literal["delete", "compact", "compact,delete"] = "delete"
    tombstone_ms: Annotated[int, Meta(ge=0, le=100 * 365 * _DAY_MS)] = _DAY_MS
    compact_min_saving_percent: Annotated[int, Meta(ge=0, le=99)] = 20
    trace_sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    producer_idle_ms: _Millis = 7 * _DAY_MS
    dead_letters: bool = True
    bodies: BodyKind | None = None
    schema_check: Literal["off", "warn", "reject"] = "off"
    schema_plain: bool = False

    key_order: bool = False
    key_group_separator: Annotated[str, Meta(min_length=1, max_length=20)] | None = None
    key_group_concurrency: _Count | None = None
    key_group_rate: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    key_group_burst: _Count = 1
    key_group_fair: bool = False
    key_lookahead: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000

    @property
    def keyed(self) -> bool:
        """Whether the choice of the next message depends on the keys."""
        limited = self.key_group_concurrency is not None or self.key_group_rate is not None
        return self.key_order or self.key_group_fair or limited


# The settings that have segments leave the disk.
TIERING = frozenset({"tier_after_ms", "tier_after_bytes"})

# The settings that a group may override for itself.
GROUP_FIELDS = frozenset(
    {
        "lease_ms",
        "max_attempts",
        "backoff_ms",
        "backoff_factor",
        "backoff_max_ms",
        "backoff_jitter_percent",
        "dropped_delay_ms",
        "max_error_chars",
        "expired_to_dead",
        "promote_after_ms",
        "priority_choice",
        "priority_weights",
        "ack_durability",
        "snapshot_events",
        "dead_letters",
        "key_order",
        "key_group_separator",
        "key_group_concurrency",
        "key_group_rate",
        "key_group_burst",
        "key_group_fair",
        "key_lookahead",
    }
)


class ProducerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a producer batches and retries messages, and what it waits for."""

    linger_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 5
    batch_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    batch_bytes: Annotated[int, Meta(ge=1, le=256 * _MIB)] = 64 * _KIB
    buffer_bytes: Annotated[int, Meta(ge=1 * _KIB)] = 32 * _MIB
    acks: Literal["none", "leader", "all"] = "all"
    retries: Annotated[int, Meta(ge=0)] | None = 3
    retry_backoff_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 100
    retry_backoff_max_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 10_000
    idempotent: bool = True
    block_ms: Annotated[int, Meta(ge=0)] = 60_000

    def __post_init__(self) -> None:
        check_fields(self)


class ConsumerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the members of a group in stream mode share partitions and commit offsets."""

    session_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 30_000
    heartbeat_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 3_000
    rebalance_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 60_000
    max_poll_ms: Annotated[int, Meta(ge=1, le=30 * _DAY_MS)] = 300_000
    max_records: Annotated[int, Meta(ge=1, le=1_000_000)] = 500
    auto_commit: bool = True
    auto_commit_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 5_000
    start: Literal["earliest", "latest"] = "earliest"
    assignor: Literal["range", "round_robin", "sticky"] = "sticky"
    rebalance: Literal["cooperative", "eager"] = "cooperative"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heartbeat_ms >= self.session_ms:
            raise BadSettings(
                f"heartbeat_ms ({self.heartbeat_ms}) must be below session_ms ({self.session_ms}), or every member "
                "would be considered dead; a third of it is usual"
            )


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one data folder: how much of it is kept open, and defaults for producers, consumers and topics."""

    id: Annotated[str, Meta(max_length=100)] = ""
    open_partitions: Annotated[int, Meta(ge=1, le=1_000_000)] = 512
    open_files: Annotated[int, Meta(ge=50, le=10_000_000)] = 3_000
    trace_retention_ms: _Millis | None = 7 * _DAY_MS
    trust_folder: bool = False
    tier: Annotated[str, Meta(min_length=1, max_length=2_048)] | None = None
    tier_cache_bytes: Annotated[int, Meta(ge=0)] = 1024 * _MIB
    backup_key_file: _Path | None = None
    # For a folder that lives in a store.
    store_cache_dir: _Path | None = None
    store_lease_ms: Annotated[int, Meta(ge=1_000, le=600_000)] = 10_000
    store_send_ms: Annotated[int, Meta(ge=1, le=60_000)] = 200
    store_wait_ms: Annotated[int, Meta(ge=0, le=_DAY_MS)] = 15_000
    producer: ProducerSettings = msgspec.field(default_factory=ProducerSettings)
    consumer: ConsumerSettings = msgspec.field(default_factory=ConsumerSettings)
    topic: TopicSettings = msgspec.field(default_factory=TopicSettings)
    topics: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tiers(self) -> bool:
        """Whether segments of some topic are to leave the disk, as far as it is set here."""
        return self.topic.is_tiered or any(each.keys() & TIERING for each in self.topics.values())

    def of_topic(self, name: str, kept: Mapping[str, Any] | None = None) -> TopicSettings:
        """Return a topic's settings: the defaults, then those `kept` in its folder, then those set for its name."""
        values = {**msgspec.structs.asdict(self.topic), **(kept or {}), **self.topics.get(name, {})}
        return load(TopicSettings, values)


_Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Address = Annotated[str, Meta(min_length=1, max_length=2_048)]
_Secret = Annotated[str, Meta(min_length=1, max_length=16_384)]

# The settings whose values are shown to nobody, and what is shown instead.
SECRETS: Final = frozenset({"s3_secret_access_key", "s3_session_token", "azure_account_key", "postgres_password"})
HIDDEN: Final = "***"


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this process reaches stores: their addresses and keys. The makers' own variables count where it is None."""

    s3_endpoint: _Address | None = None
    s3_region: _Name | None = None
    s3_access_key_id: _Name | None = None
    s3_access_key_id_file: _Path | None = None
    s3_secret_access_key: _Secret | None = None
    s3_secret_access_key_file: _Path | None = None
    s3_session_token: _Secret | None = None
    s3_session_token_file: _Path | None = None
    azure_endpoint: _Address | None = None
    azure_account_name: _Name | None = None
    azure_account_key: _Secret | None = None
    azure_account_key_file: _Path | None = None
    google_endpoint: _Address | None = None
    google_credentials_file: _Path | None = None
    postgres_password: _Secret | None = None
    postgres_password_file: _Path | None = None
    ca_file: _Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None:
                continue
            if not value.isprintable():
                raise BadSettings(f"{name} has line breaks or other characters that cannot be printed")
            if name.endswith("_endpoint"):
                _check_endpoint(name, value)
            if name.endswith("_file") and getattr(self, name.removesuffix("_file"), None) is not None:
                raise BadSettings(f"{name.removesuffix('_file')} and {name} are both set: remove one")
        if self.has("s3_access_key_id") != self.has("s3_secret_access_key"):
            raise BadSettings("s3_access_key_id and s3_secret_access_key belong together: set both, or neither")
        if self.has("s3_session_token") and not self.has("s3_access_key_id"):
            raise BadSettings("s3_session_token belongs to an s3_access_key_id: set both")

    def has(self, name: str) -> bool:
        """Whether it is set, or is in a file."""
        return getattr(self, name) is not None or getattr(self, f"{name}_file", None) is not None

    def __repr__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        said = (f"{name}={HIDDEN if name in SECRETS else value!r}" for name, value in given if value)
        return f"StoreSettings({', '.join(said)})"


def _check_endpoint(name: str, value: str) -> None:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(value)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in value and parts.port != 0
        has_user = parts.username is not None
    except ValueError:
        is_good, has_user = False, "@" in value
    if has_user:
        raise BadSettings(f"{name} has a user or a password in it: keys have settings of their own")
    if not is_good:
        raise BadSettings(f"{name}={value!r} is not an address: give one such as https://host:9000")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `holdfast serve`: where it listens, who may call, and limits for each caller."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 7_700
    socket: _Path | None = None
    grpc_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None

    tls_cert_file: _Path | None = None
    tls_key_file: _Path | None = None
    tls_client_ca_file: _Path | None = None
    tokens_file: _Path | None = None
    allow_anonymous_network: bool = False
    allowed_hosts: tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...] = ()
    metrics_auth: bool = True
    read_only: bool = False
    console: bool = True
    lake: _Path | None = None

    max_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    max_connections_per_address: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_header_bytes: Annotated[int, Meta(ge=1 * _KIB, le=1 * _MIB)] = 64 * _KIB
    max_request_bytes: Annotated[int, Meta(ge=1, le=1024 * _MIB)] = 64 * _MIB
    max_unpack_ratio: Annotated[int, Meta(ge=1, le=1_000_000)] = 200
    max_batch_messages: Annotated[int, Meta(ge=1, le=100_000)] = 100_000
    header_timeout_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 10_000
    body_timeout_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 10_000
    min_body_bytes_per_s: Annotated[int, Meta(ge=1, le=1024 * _MIB)] = 16 * _KIB
    write_timeout_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 30_000
    idle_timeout_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 75_000
    max_groups: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    max_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 128
    max_waiters: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    max_waiters_per_principal: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    max_wait_ms: Annotated[int, Meta(ge=0, le=_DAY_MS)] = 300_000
    drain_ms: Annotated[int, Meta(ge=0, le=_DAY_MS)] = 30_000
    scan_workers: Annotated[int, Meta(ge=1, le=64)] = 2
    scan_messages: Annotated[int, Meta(ge=1, le=10_000_000)] = 20_000

    watch: bool = True
    poll_interval_ms: Annotated[int, Meta(ge=1, le=_DAY_MS)] = 3_000
    poll_jitter_ms: Annotated[int, Meta(ge=0, le=_DAY_MS)] = 500
    safety_poll_ms: Annotated[int, Meta(ge=0, le=_DAY_MS)] = 300_000

    log_format: Literal["text", "json"] = "text"
    metrics_groups: Annotated[int, Meta(ge=0, le=1_000_000)] = 200
    otlp_endpoint: Annotated[str, Meta(min_length=1, max_length=2_048)] | None = None
    audit_file: _Path | None = None
    audit_bytes: Annotated[int, Meta(ge=4 * _KIB, le=1024 * _MIB)] = 16 * _MIB
    audit_files: Annotated[int, Meta(ge=1, le=1_000)] = 10

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(settings: msgspec.Struct) -> None:
    """Check every field against its type and limits, however the struct was made; raises BadSettings."""
    for name, kind in field_types(type(settings)).items():
        try:
            msgspec.convert(getattr(settings, name), kind)
        except msgspec.ValidationError:
            value = HIDDEN if name in SECRETS else repr(getattr(settings, name))
            raise BadSettings(f"{name}={value} cannot be used: give {wanted(name, kind)}") from None


def wanted(name: str, kind: Any, none: str = "none") -> str:
    """Return what a setting takes, in words; `none` is how to write that there is no limit."""
    from msgspec import inspect

    found = inspect.type_info(kind)
    types = found.types if isinstance(found, inspect.UnionType) else [found]
    bare = next(each for each in types if not isinstance(each, inspect.NoneType))
    unit = next((f" of {unit}" for end, unit in _UNITS.items() if name.endswith(end)), "")
    return _in_words(bare, unit) + (f", or {none}" if len(types) > 1 else "")


def _in_words(kind: Any, unit: str = "") -> str:
    from msgspec import inspect

    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(map(str, kind.values))}"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list, each of it {_in_words(kind.item_type)}"
    if isinstance(kind, inspect.StrType):
        length = f"{kind.min_length} to {kind.max_length}" if kind.min_length else f"at most {kind.max_length}"
        return f"a text of {length} characters" if kind.max_length else "a text"
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return "a table of settings"
    what = f"a whole number{unit}" if isinstance(kind, inspect.IntType) else f"a number{unit}"
    if kind.gt is not None:
        return f"{what} above {kind.gt:g} and up to {kind.le:g}"
    if kind.ge is None:
        return what
    return f"{what}, {kind.ge} or more" if kind.le in (None, _MOST) else f"{what} from {kind.ge} to {kind.le}"


_Settings = TypeVar("_Settings", bound=msgspec.Struct)


def load(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Build settings from a mapping, such as a TOML table; raises BadSettings for unknown names."""
    unknown = sorted(set(values) - set(kind.__struct_fields__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], kind.__struct_fields__, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known ones: {', '.join(kind.__struct_fields__)}"
        raise BadSettings(f"unknown setting {', '.join(unknown)}; {hint}")
    return kind(**values)


_types: dict[type, dict[str, Any]] = {}


def field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the type of each field, including its limits (computed once per class)."""
    if kind not in _types:
        _types[kind] = get_type_hints(kind, include_extras=True)
    return _types[kind]


_DEFAULTS: Final = TopicSettings()


def check_settings(given: QueueSettings | None, changes: Mapping[str, Any]) -> TopicSettings:
    """Apply the changes to the settings given; raises BadSettings if they are invalid."""
    if given is not None and not isinstance(given, QueueSettings):
        raise BadSettings(f"settings must be QueueSettings or TopicSettings, not {type(given).__name__}")
    return load(TopicSettings, {**msgspec.structs.asdict(given or _DEFAULTS), **changes})
