from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
ROUTE_FIELD_NUMBER: _ClassVar[int]
route: _descriptor.FieldDescriptor

class Route(_message.Message):
    __slots__ = ("method", "path")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    method: str
    path: str
    def __init__(self, method: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class PublishStreamRequest(_message.Message):
    __slots__ = ("number", "queue", "messages", "bodies", "durability")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    number: int
    queue: str
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    durability: str
    def __init__(self, number: _Optional[int] = ..., queue: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ..., bodies: _Optional[_Iterable[bytes]] = ..., durability: _Optional[str] = ...) -> None: ...

class PublishStreamResponse(_message.Message):
    __slots__ = ("number", "stored", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    error: StreamError
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class SubscribeStart(_message.Message):
    __slots__ = ("queue", "prefetch", "group", "owner", "lease", "state", "heartbeat")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    prefetch: int
    group: str
    owner: str
    lease: float
    state: bool
    heartbeat: float
    def __init__(self, queue: _Optional[str] = ..., prefetch: _Optional[int] = ..., group: _Optional[str] = ..., owner: _Optional[str] = ..., lease: _Optional[float] = ..., state: _Optional[bool] = ..., heartbeat: _Optional[float] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("number", "start", "ack", "nack", "reject", "extend")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: SubscribeStart
    ack: AckRequest
    nack: NackRequest
    reject: RejectRequest
    extend: ExtendRequest
    def __init__(self, number: _Optional[int] = ..., start: _Optional[_Union[SubscribeStart, _Mapping]] = ..., ack: _Optional[_Union[AckRequest, _Mapping]] = ..., nack: _Optional[_Union[NackRequest, _Mapping]] = ..., reject: _Optional[_Union[RejectRequest, _Mapping]] = ..., extend: _Optional[_Union[ExtendRequest, _Mapping]] = ...) -> None: ...

class SubscribeSettled(_message.Message):
    __slots__ = ("number", "settled", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    settled: int
    error: StreamError
    def __init__(self, number: _Optional[int] = ..., settled: _Optional[int] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("messages", "settled")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Delivery]
    settled: SubscribeSettled
    def __init__(self, messages: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ..., settled: _Optional[_Union[SubscribeSettled, _Mapping]] = ...) -> None: ...

class PayloadChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("queue", "partition", "durability", "codec", "create", "messages", "bodies", "acks")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    partition: int
    durability: str
    codec: str
    create: bool
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    acks: str
    def __init__(self, queue: _Optional[str] = ..., partition: _Optional[int] = ..., durability: _Optional[str] = ..., codec: _Optional[str] = ..., create: _Optional[bool] = ..., messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ..., bodies: _Optional[_Iterable[bytes]] = ..., acks: _Optional[str] = ...) -> None: ...

class NewMessage(_message.Message):
    __slots__ = ("key", "key_data", "headers", "priority", "delay", "at", "ttl", "dedup_id", "dedup_data", "correlation_id", "body", "text", "json", "tombstone")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    DEDUP_DATA_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    delay: float
    at: str
    ttl: float
    dedup_id: str
    dedup_data: bytes
    correlation_id: str
    body: bytes
    text: str
    json: _struct_pb2.Value
    tombstone: bool
    def __init__(self, key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., delay: _Optional[float] = ..., at: _Optional[str] = ..., ttl: _Optional[float] = ..., dedup_id: _Optional[str] = ..., dedup_data: _Optional[bytes] = ..., correlation_id: _Optional[str] = ..., body: _Optional[bytes] = ..., text: _Optional[str] = ..., json: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., tombstone: _Optional[bool] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    def __init__(self, stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ...) -> None: ...

class Stored(_message.Message):
    __slots__ = ("id", "topic", "durability", "partition", "offset", "delayed_id", "duplicate")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DELAYED_ID_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    durability: str
    partition: int
    offset: int
    delayed_id: int
    duplicate: bool
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., durability: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., delayed_id: _Optional[int] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("queue", "count", "wait", "owner", "lease", "group", "state", "attempt_id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    count: int
    wait: float
    owner: str
    lease: float
    group: str
    state: bool
    attempt_id: str
    def __init__(self, queue: _Optional[str] = ..., count: _Optional[int] = ..., wait: _Optional[float] = ..., owner: _Optional[str] = ..., lease: _Optional[float] = ..., group: _Optional[str] = ..., state: _Optional[bool] = ..., attempt_id: _Optional[str] = ...) -> None: ...

class TakeResponse(_message.Message):
    __slots__ = ("messages", "runs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Delivery]
    runs: _containers.RepeatedCompositeFieldContainer[DeliveryRun]
    def __init__(self, messages: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[DeliveryRun, _Mapping]]] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "receipt", "fence", "attempt", "holder", "lease_ms", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    receipt: str
    fence: int
    attempt: int
    holder: str
    lease_ms: int
    state: State
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., receipt: _Optional[str] = ..., fence: _Optional[int] = ..., attempt: _Optional[int] = ..., holder: _Optional[str] = ..., lease_ms: _Optional[int] = ..., state: _Optional[_Union[State, _Mapping]] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("value", "version")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    value: _struct_pb2.Value
    version: int
    def __init__(self, value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class DeliveryRun(_message.Message):
    __slots__ = ("topic", "partition", "offsets", "timestamps_ns", "bodies", "token", "fence", "holder", "lease_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_NS_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    timestamps_ns: _containers.RepeatedScalarFieldContainer[int]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    token: bytes
    fence: int
    holder: str
    lease_ms: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., timestamps_ns: _Optional[_Iterable[int]] = ..., bodies: _Optional[_Iterable[bytes]] = ..., token: _Optional[bytes] = ..., fence: _Optional[int] = ..., holder: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("queue", "receipts", "runs", "group", "durability")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedCompositeFieldContainer[RunReceipts]
    group: str
    durability: str
    def __init__(self, queue: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[_Union[RunReceipts, _Mapping]]] = ..., group: _Optional[str] = ..., durability: _Optional[str] = ...) -> None: ...

class RunReceipts(_message.Message):
    __slots__ = ("partition", "token", "offsets")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    token: bytes
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition: _Optional[int] = ..., token: _Optional[bytes] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("queue", "receipts", "runs", "group", "durability", "intent", "delay", "error")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    queue: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedCompositeFieldContainer[RunReceipts]
    group: str
    durability: str
    intent: str
    delay: float
    error: str
    def __init__(self, queue: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[_Union[RunReceipts, _Mapping]]] = ..., group: _Optional[str] = ..., durability: _Optional[str] = ..., intent: _Optional[str] = ..., delay: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class RejectRequest(_message.Message):
    __slots__ = ("queue", "receipts", "runs", "group", "durability", "reason")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    queue: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedCompositeFieldContainer[RunReceipts]
    group: str
    durability: str
    reason: str
    def __init__(self, queue: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[_Union[RunReceipts, _Mapping]]] = ..., group: _Optional[str] = ..., durability: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RejectResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("queue", "receipts", "runs", "group", "durability", "lease")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedCompositeFieldContainer[RunReceipts]
    group: str
    durability: str
    lease: float
    def __init__(self, queue: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[_Union[RunReceipts, _Mapping]]] = ..., group: _Optional[str] = ..., durability: _Optional[str] = ..., lease: _Optional[float] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class GetMessageStateRequest(_message.Message):
    __slots__ = ("queue", "group", "receipt")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    receipt: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class GetMessageStateResponse(_message.Message):
    __slots__ = ("value", "version")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    value: _struct_pb2.Value
    version: int
    def __init__(self, value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class SaveMessageStateRequest(_message.Message):
    __slots__ = ("queue", "receipt", "version", "value", "group", "durability")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    queue: str
    receipt: str
    version: int
    value: _struct_pb2.Value
    group: str
    durability: str
    def __init__(self, queue: _Optional[str] = ..., receipt: _Optional[str] = ..., version: _Optional[int] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., group: _Optional[str] = ..., durability: _Optional[str] = ...) -> None: ...

class SaveMessageStateResponse(_message.Message):
    __slots__ = ("value", "version")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    value: _struct_pb2.Value
    version: int
    def __init__(self, value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., version: _Optional[int] = ...) -> None: ...

class GetInFlightRequest(_message.Message):
    __slots__ = ("queue", "group", "receipt")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    receipt: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class GetInFlightResponse(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "receipt", "fence", "attempt", "holder", "lease_ms", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    receipt: str
    fence: int
    attempt: int
    holder: str
    lease_ms: int
    state: State
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., receipt: _Optional[str] = ..., fence: _Optional[int] = ..., attempt: _Optional[int] = ..., holder: _Optional[str] = ..., lease_ms: _Optional[int] = ..., state: _Optional[_Union[State, _Mapping]] = ...) -> None: ...

class CreateQueueRequest(_message.Message):
    __slots__ = ("queue", "partitions", "settings")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    queue: str
    partitions: int
    settings: _struct_pb2.Struct
    def __init__(self, queue: _Optional[str] = ..., partitions: _Optional[int] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class CreateQueueResponse(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class PartitionInfo(_message.Message):
    __slots__ = ("number", "start", "end", "bytes", "segments", "problem", "tiered_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TIERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    end: int
    bytes: int
    segments: int
    problem: str
    tiered_bytes: int
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., bytes: _Optional[int] = ..., segments: _Optional[int] = ..., problem: _Optional[str] = ..., tiered_bytes: _Optional[int] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("name", "folder", "ready", "leased", "delayed", "dead", "start", "end", "floor", "bytes", "segments", "waiters", "durability", "metrics", "group", "partitions", "damaged", "paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    ready: int
    leased: int
    delayed: int
    dead: int
    start: int
    end: int
    floor: int
    bytes: int
    segments: int
    waiters: int
    durability: str
    metrics: MetricsSnapshot
    group: str
    partitions: int
    damaged: int
    paused: Pause
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ..., ready: _Optional[int] = ..., leased: _Optional[int] = ..., delayed: _Optional[int] = ..., dead: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., floor: _Optional[int] = ..., bytes: _Optional[int] = ..., segments: _Optional[int] = ..., waiters: _Optional[int] = ..., durability: _Optional[str] = ..., metrics: _Optional[_Union[MetricsSnapshot, _Mapping]] = ..., group: _Optional[str] = ..., partitions: _Optional[int] = ..., damaged: _Optional[int] = ..., paused: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class MetricsSnapshot(_message.Message):
    __slots__ = ("published", "published_bytes", "delivered", "acked", "nacked", "deferred", "rejected", "expired_leases", "returned", "buried", "redriven", "expired", "cancelled", "duplicates", "released", "lost_leases", "damaged", "put_seconds", "wait_seconds", "handle_seconds", "lateness_seconds", "sync_seconds", "gauges")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    NACKED_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    BURIED_FIELD_NUMBER: _ClassVar[int]
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    PUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LATENESS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SYNC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    published: int
    published_bytes: int
    delivered: int
    acked: int
    nacked: int
    deferred: int
    rejected: int
    expired_leases: int
    returned: int
    buried: int
    redriven: int
    expired: int
    cancelled: int
    duplicates: int
    released: int
    lost_leases: int
    damaged: int
    put_seconds: Times
    wait_seconds: Times
    handle_seconds: Times
    lateness_seconds: Times
    sync_seconds: Times
    gauges: _containers.ScalarMap[str, float]
    def __init__(self, published: _Optional[int] = ..., published_bytes: _Optional[int] = ..., delivered: _Optional[int] = ..., acked: _Optional[int] = ..., nacked: _Optional[int] = ..., deferred: _Optional[int] = ..., rejected: _Optional[int] = ..., expired_leases: _Optional[int] = ..., returned: _Optional[int] = ..., buried: _Optional[int] = ..., redriven: _Optional[int] = ..., expired: _Optional[int] = ..., cancelled: _Optional[int] = ..., duplicates: _Optional[int] = ..., released: _Optional[int] = ..., lost_leases: _Optional[int] = ..., damaged: _Optional[int] = ..., put_seconds: _Optional[_Union[Times, _Mapping]] = ..., wait_seconds: _Optional[_Union[Times, _Mapping]] = ..., handle_seconds: _Optional[_Union[Times, _Mapping]] = ..., lateness_seconds: _Optional[_Union[Times, _Mapping]] = ..., sync_seconds: _Optional[_Union[Times, _Mapping]] = ..., gauges: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Times(_message.Message):
    __slots__ = ("count", "sum", "min", "max", "p50", "p95", "p99")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P95_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    count: int
    sum: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float
    def __init__(self, count: _Optional[int] = ..., sum: _Optional[float] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., p50: _Optional[float] = ..., p95: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("since_ms", "reason")
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    since_ms: int
    reason: str
    def __init__(self, since_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class PeekRequest(_message.Message):
    __slots__ = ("queue", "group", "count")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    count: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class PeekResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Said]
    def __init__(self, messages: _Optional[_Iterable[_Union[Said, _Mapping]]] = ...) -> None: ...

class Said(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ...) -> None: ...

class ListMessagesRequest(_message.Message):
    __slots__ = ("queue", "group", "phase", "where", "limit", "bodies", "after")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    phase: str
    where: str
    limit: int
    bodies: bool
    after: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., phase: _Optional[str] = ..., where: _Optional[str] = ..., limit: _Optional[int] = ..., bodies: _Optional[bool] = ..., after: _Optional[str] = ...) -> None: ...

class ListMessagesResponse(_message.Message):
    __slots__ = ("messages", "next", "scanned", "damaged")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Listed]
    next: str
    scanned: int
    damaged: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Listed, _Mapping]]] = ..., next: _Optional[str] = ..., scanned: _Optional[int] = ..., damaged: _Optional[int] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ...) -> None: ...

class GetMessageRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GetMessageResponse(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ...) -> None: ...

class LookUpMessageRequest(_message.Message):
    __slots__ = ("queue", "group", "id")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    id: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class LookUpMessageResponse(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms", "leased_at_ms", "first_delivery_ms", "last_delivery_ms", "failures", "state", "history")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    LEASED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_DELIVERY_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    leased_at_ms: int
    first_delivery_ms: int
    last_delivery_ms: int
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    state: _struct_pb2.Value
    history: _containers.RepeatedCompositeFieldContainer[TraceStep]
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ..., leased_at_ms: _Optional[int] = ..., first_delivery_ms: _Optional[int] = ..., last_delivery_ms: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., state: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., history: _Optional[_Iterable[_Union[TraceStep, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("at_ms", "holder", "why", "error")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    holder: str
    why: str
    error: str
    def __init__(self, at_ms: _Optional[int] = ..., holder: _Optional[str] = ..., why: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class TraceStep(_message.Message):
    __slots__ = ("at_ns", "step", "id", "topic", "partition", "offset", "group", "holder", "attempt", "why", "error", "due_ms", "until_ms", "trace_id", "span_id", "parent_id", "state", "related")
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RELATED_FIELD_NUMBER: _ClassVar[int]
    at_ns: int
    step: str
    id: str
    topic: str
    partition: int
    offset: int
    group: str
    holder: str
    attempt: int
    why: str
    error: str
    due_ms: int
    until_ms: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    related: str
    def __init__(self, at_ns: _Optional[int] = ..., step: _Optional[str] = ..., id: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., group: _Optional[str] = ..., holder: _Optional[str] = ..., attempt: _Optional[int] = ..., why: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[str] = ..., parent_id: _Optional[str] = ..., state: _Optional[str] = ..., related: _Optional[str] = ...) -> None: ...

class CancelMessageRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class CancelMessageResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class TakeBackMessageRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class TakeBackMessageResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class RunMessageNowRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class RunMessageNowResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class SearchMessagesRequest(_message.Message):
    __slots__ = ("q", "limit", "after")
    Q_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    q: str
    limit: int
    after: str
    def __init__(self, q: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class SearchMessagesResponse(_message.Message):
    __slots__ = ("messages", "next", "scanned", "scanned_in_all", "queues", "left", "left_out", "not_queues", "where")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    SCANNED_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NOT_QUEUES_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[FoundMessage]
    next: str
    scanned: int
    scanned_in_all: int
    queues: _containers.RepeatedCompositeFieldContainer[QueueSearched]
    left: _containers.RepeatedScalarFieldContainer[str]
    left_out: int
    not_queues: _containers.RepeatedScalarFieldContainer[str]
    where: str
    def __init__(self, messages: _Optional[_Iterable[_Union[FoundMessage, _Mapping]]] = ..., next: _Optional[str] = ..., scanned: _Optional[int] = ..., scanned_in_all: _Optional[int] = ..., queues: _Optional[_Iterable[_Union[QueueSearched, _Mapping]]] = ..., left: _Optional[_Iterable[str]] = ..., left_out: _Optional[int] = ..., not_queues: _Optional[_Iterable[str]] = ..., where: _Optional[str] = ...) -> None: ...

class FoundMessage(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms", "group")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    group: str
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class QueueSearched(_message.Message):
    __slots__ = ("queue", "searched", "messages", "whole", "problem")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    queue: str
    searched: int
    messages: int
    whole: bool
    problem: str
    def __init__(self, queue: _Optional[str] = ..., searched: _Optional[int] = ..., messages: _Optional[int] = ..., whole: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...

class SeekRequest(_message.Message):
    __slots__ = ("queue", "group", "to", "offset", "time", "partition")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    to: str
    offset: int
    time: str
    partition: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., to: _Optional[str] = ..., offset: _Optional[int] = ..., time: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class SeekResponse(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class PurgeResponse(_message.Message):
    __slots__ = ("purged",)
    PURGED_FIELD_NUMBER: _ClassVar[int]
    purged: int
    def __init__(self, purged: _Optional[int] = ...) -> None: ...

class CompactRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class CompactResponse(_message.Message):
    __slots__ = ("segments", "bytes", "journal_bytes")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    segments: int
    bytes: int
    journal_bytes: int
    def __init__(self, segments: _Optional[int] = ..., bytes: _Optional[int] = ..., journal_bytes: _Optional[int] = ...) -> None: ...

class GetCommittedRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GetCommittedResponse(_message.Message):
    __slots__ = ("offsets",)
    class OffsetsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.ScalarMap[str, int]
    def __init__(self, offsets: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("queue", "group", "reason")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    reason: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("changed", "paused")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    paused: Pause
    def __init__(self, changed: _Optional[bool] = ..., paused: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("queue", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("changed", "paused")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    paused: Pause
    def __init__(self, changed: _Optional[bool] = ..., paused: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class GetSamplesRequest(_message.Message):
    __slots__ = ("queue", "last", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    last: float
    group: str
    def __init__(self, queue: _Optional[str] = ..., last: _Optional[float] = ..., group: _Optional[str] = ...) -> None: ...

class GetSamplesResponse(_message.Message):
    __slots__ = ("topic", "group", "mode", "step_seconds", "since", "until", "samples")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    mode: str
    step_seconds: int
    since: str
    until: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., mode: _Optional[str] = ..., step_seconds: _Optional[int] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("at", "published_rate", "handled_rate", "failed_rate", "ready", "dead", "oldest_seconds", "handle_p50_seconds", "handle_p99_seconds")
    AT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_RATE_FIELD_NUMBER: _ClassVar[int]
    HANDLED_RATE_FIELD_NUMBER: _ClassVar[int]
    FAILED_RATE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    at: str
    published_rate: float
    handled_rate: float
    failed_rate: float
    ready: int
    dead: int
    oldest_seconds: float
    handle_p50_seconds: float
    handle_p99_seconds: float
    def __init__(self, at: _Optional[str] = ..., published_rate: _Optional[float] = ..., handled_rate: _Optional[float] = ..., failed_rate: _Optional[float] = ..., ready: _Optional[int] = ..., dead: _Optional[int] = ..., oldest_seconds: _Optional[float] = ..., handle_p50_seconds: _Optional[float] = ..., handle_p99_seconds: _Optional[float] = ...) -> None: ...

class ReportWorkerRequest(_message.Message):
    __slots__ = ("queue", "group", "id", "name", "host", "pid", "version", "started_ms", "concurrency", "status", "running", "running_count", "handled", "failed")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    id: str
    name: str
    host: str
    pid: int
    version: str
    started_ms: int
    concurrency: int
    status: str
    running: _containers.RepeatedCompositeFieldContainer[RunningMessage]
    running_count: int
    handled: int
    failed: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., started_ms: _Optional[int] = ..., concurrency: _Optional[int] = ..., status: _Optional[str] = ..., running: _Optional[_Iterable[_Union[RunningMessage, _Mapping]]] = ..., running_count: _Optional[int] = ..., handled: _Optional[int] = ..., failed: _Optional[int] = ...) -> None: ...

class RunningMessage(_message.Message):
    __slots__ = ("id", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    seconds: float
    def __init__(self, id: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReportWorkerResponse(_message.Message):
    __slots__ = ("order",)
    ORDER_FIELD_NUMBER: _ClassVar[int]
    order: str
    def __init__(self, order: _Optional[str] = ...) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "group", "where", "limit", "bodies", "after")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    where: str
    limit: int
    bodies: bool
    after: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., where: _Optional[str] = ..., limit: _Optional[int] = ..., bodies: _Optional[bool] = ..., after: _Optional[str] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("letters", "next", "scanned", "damaged")
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[Letter]
    next: str
    scanned: int
    damaged: int
    def __init__(self, letters: _Optional[_Iterable[_Union[Letter, _Mapping]]] = ..., next: _Optional[str] = ..., scanned: _Optional[int] = ..., damaged: _Optional[int] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms", "original_offset", "original_timestamp", "dead_at", "failures", "first_delivery", "last_delivery", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    DEAD_AT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    LAST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    original_offset: int
    original_timestamp: str
    dead_at: str
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    first_delivery: str
    last_delivery: str
    state: _struct_pb2.Value
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ..., original_offset: _Optional[int] = ..., original_timestamp: _Optional[str] = ..., dead_at: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., first_delivery: _Optional[str] = ..., last_delivery: _Optional[str] = ..., state: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...

class GroupDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "group", "where", "limit")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    where: str
    limit: int
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., where: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class GroupDeadLettersResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[DeadGroup]
    def __init__(self, groups: _Optional[_Iterable[_Union[DeadGroup, _Mapping]]] = ...) -> None: ...

class DeadGroup(_message.Message):
    __slots__ = ("reason", "error", "count", "first", "last", "example")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    error: str
    count: int
    first: str
    last: str
    example: str
    def __init__(self, reason: _Optional[str] = ..., error: _Optional[str] = ..., count: _Optional[int] = ..., first: _Optional[str] = ..., last: _Optional[str] = ..., example: _Optional[str] = ...) -> None: ...

class GetDeadLetterRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class GetDeadLetterResponse(_message.Message):
    __slots__ = ("id", "topic", "offset", "timestamp_ns", "body", "partition", "key", "key_data", "headers", "priority", "correlation_id", "expires_at_ms", "due_at_ms", "tombstone", "original_id", "size", "omitted", "phase", "attempts", "holder", "reason", "error", "due_ms", "lease_until_ms", "original_offset", "original_timestamp", "dead_at", "failures", "first_delivery", "last_delivery", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_AT_MS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OMITTED_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DUE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    DEAD_AT_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    LAST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    topic: str
    offset: int
    timestamp_ns: int
    body: bytes
    partition: int
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    correlation_id: str
    expires_at_ms: int
    due_at_ms: int
    tombstone: bool
    original_id: str
    size: int
    omitted: bool
    phase: str
    attempts: int
    holder: str
    reason: str
    error: str
    due_ms: int
    lease_until_ms: int
    original_offset: int
    original_timestamp: str
    dead_at: str
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    first_delivery: str
    last_delivery: str
    state: _struct_pb2.Value
    def __init__(self, id: _Optional[str] = ..., topic: _Optional[str] = ..., offset: _Optional[int] = ..., timestamp_ns: _Optional[int] = ..., body: _Optional[bytes] = ..., partition: _Optional[int] = ..., key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., correlation_id: _Optional[str] = ..., expires_at_ms: _Optional[int] = ..., due_at_ms: _Optional[int] = ..., tombstone: _Optional[bool] = ..., original_id: _Optional[str] = ..., size: _Optional[int] = ..., omitted: _Optional[bool] = ..., phase: _Optional[str] = ..., attempts: _Optional[int] = ..., holder: _Optional[str] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., due_ms: _Optional[int] = ..., lease_until_ms: _Optional[int] = ..., original_offset: _Optional[int] = ..., original_timestamp: _Optional[str] = ..., dead_at: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., first_delivery: _Optional[str] = ..., last_delivery: _Optional[str] = ..., state: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...

class RedriveDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "group", "ids", "where", "limit", "dry_run", "to", "rate")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    where: str
    limit: int
    dry_run: bool
    to: str
    rate: float
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., where: _Optional[str] = ..., limit: _Optional[int] = ..., dry_run: _Optional[bool] = ..., to: _Optional[str] = ..., rate: _Optional[float] = ...) -> None: ...

class RedriveDeadLettersResponse(_message.Message):
    __slots__ = ("matched", "done", "ids", "ended")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    matched: int
    done: int
    ids: _containers.RepeatedScalarFieldContainer[str]
    ended: bool
    def __init__(self, matched: _Optional[int] = ..., done: _Optional[int] = ..., ids: _Optional[_Iterable[str]] = ..., ended: _Optional[bool] = ...) -> None: ...

class PurgeDeadLettersRequest(_message.Message):
    __slots__ = ("queue", "group", "ids", "where", "limit", "dry_run")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    where: str
    limit: int
    dry_run: bool
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ..., where: _Optional[str] = ..., limit: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class PurgeDeadLettersResponse(_message.Message):
    __slots__ = ("matched", "done", "ids", "ended")
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    matched: int
    done: int
    ids: _containers.RepeatedScalarFieldContainer[str]
    ended: bool
    def __init__(self, matched: _Optional[int] = ..., done: _Optional[int] = ..., ids: _Optional[_Iterable[str]] = ..., ended: _Optional[bool] = ...) -> None: ...

class ReadPayloadInFlightRequest(_message.Message):
    __slots__ = ("queue", "group", "receipt")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    queue: str
    group: str
    receipt: str
    def __init__(self, queue: _Optional[str] = ..., group: _Optional[str] = ..., receipt: _Optional[str] = ...) -> None: ...

class ReadPayloadRequest(_message.Message):
    __slots__ = ("queue", "id", "group")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    queue: str
    id: str
    group: str
    def __init__(self, queue: _Optional[str] = ..., id: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("limit", "after")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: str
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics", "more")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicInfo]
    more: bool
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicInfo, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class TopicInfo(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "partitions", "settings", "exist_ok", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    EXIST_OK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    settings: _struct_pb2.Struct
    exist_ok: bool
    shard: int
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., exist_ok: _Optional[bool] = ..., shard: _Optional[int] = ...) -> None: ...

class CreateTopicResponse(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class GetTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class GetTopicResponse(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class AlterTopicRequest(_message.Message):
    __slots__ = ("topic", "settings")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    settings: _struct_pb2.Struct
    def __init__(self, topic: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class AlterTopicResponse(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddPartitionsRequest(_message.Message):
    __slots__ = ("topic", "count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    count: int
    def __init__(self, topic: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class AddPartitionsResponse(_message.Message):
    __slots__ = ("name", "id", "created_at", "partitions", "groups", "stream_groups", "settings", "shard")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    STREAM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_at: str
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionInfo]
    groups: _containers.RepeatedScalarFieldContainer[str]
    stream_groups: _containers.RepeatedScalarFieldContainer[str]
    settings: _struct_pb2.Struct
    shard: int
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_at: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[PartitionInfo, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ..., stream_groups: _Optional[_Iterable[str]] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class CompactTopicRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class CompactTopicResponse(_message.Message):
    __slots__ = ("segments", "removed_messages", "freed_bytes")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    segments: int
    removed_messages: int
    freed_bytes: int
    def __init__(self, segments: _Optional[int] = ..., removed_messages: _Optional[int] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class ApplyRetentionRequest(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ApplyRetentionResponse(_message.Message):
    __slots__ = ("messages", "dead_letters", "segments", "bytes")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    messages: int
    dead_letters: int
    segments: int
    bytes: int
    def __init__(self, messages: _Optional[int] = ..., dead_letters: _Optional[int] = ..., segments: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CreateGroupRequest(_message.Message):
    __slots__ = ("topic", "group", "start", "settings")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    start: str
    settings: _struct_pb2.Struct
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., start: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class CreateGroupResponse(_message.Message):
    __slots__ = ("name", "topic", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    settings: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class PublishToTopicRequest(_message.Message):
    __slots__ = ("topic", "partition", "durability", "codec", "create", "messages", "bodies", "acks")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    durability: str
    codec: str
    create: bool
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    acks: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., durability: _Optional[str] = ..., codec: _Optional[str] = ..., create: _Optional[bool] = ..., messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ..., bodies: _Optional[_Iterable[bytes]] = ..., acks: _Optional[str] = ...) -> None: ...

class PublishToTopicResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    def __init__(self, stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ...) -> None: ...

class ReadMessagesRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset", "limit", "wait", "bodies", "on_damage")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    ON_DAMAGE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    limit: int
    wait: float
    bodies: bool
    on_damage: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ..., wait: _Optional[float] = ..., bodies: _Optional[bool] = ..., on_damage: _Optional[str] = ...) -> None: ...

class ReadMessagesResponse(_message.Message):
    __slots__ = ("messages", "next_offset", "start", "end")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Said]
    next_offset: int
    start: int
    end: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Said, _Mapping]]] = ..., next_offset: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class ReadPayloadAtRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ListDelayedRequest(_message.Message):
    __slots__ = ("topic", "limit", "bodies", "after")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    bodies: bool
    after: str
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ..., bodies: _Optional[bool] = ..., after: _Optional[str] = ...) -> None: ...

class ListDelayedResponse(_message.Message):
    __slots__ = ("messages", "next", "scanned", "damaged")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    SCANNED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Listed]
    next: str
    scanned: int
    damaged: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Listed, _Mapping]]] = ..., next: _Optional[str] = ..., scanned: _Optional[int] = ..., damaged: _Optional[int] = ...) -> None: ...

class CancelDelayedRequest(_message.Message):
    __slots__ = ("topic", "id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    id: str
    def __init__(self, topic: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class CancelDelayedResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: _Optional[bool] = ...) -> None: ...

class GetTopicSettingsRequest(_message.Message):
    __slots__ = ("topic", "all")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    topic: str
    all: bool
    def __init__(self, topic: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class GetTopicSettingsResponse(_message.Message):
    __slots__ = ("settings", "path")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[SettingTold]
    path: str
    def __init__(self, settings: _Optional[_Iterable[_Union[SettingTold, _Mapping]]] = ..., path: _Optional[str] = ...) -> None: ...

class SettingTold(_message.Message):
    __slots__ = ("name", "value", "origin", "kind")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: _struct_pb2.Value
    origin: str
    kind: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., origin: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class AlterTopicSettingsRequest(_message.Message):
    __slots__ = ("topic", "settings")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    settings: _struct_pb2.Struct
    def __init__(self, topic: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class AlterTopicSettingsResponse(_message.Message):
    __slots__ = ("settings", "path")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[SettingTold]
    path: str
    def __init__(self, settings: _Optional[_Iterable[_Union[SettingTold, _Mapping]]] = ..., path: _Optional[str] = ...) -> None: ...

class GetStandingRequest(_message.Message):
    __slots__ = ("topic", "limit", "after")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    after: str
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class GetStandingResponse(_message.Message):
    __slots__ = ("topics", "delayed", "next")
    class DelayedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicStanding]
    delayed: _containers.ScalarMap[str, int]
    next: str
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicStanding, _Mapping]]] = ..., delayed: _Optional[_Mapping[str, int]] = ..., next: _Optional[str] = ...) -> None: ...

class TopicStanding(_message.Message):
    __slots__ = ("name", "id", "created_ms", "partitions", "groups", "dead", "settings")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: int
    created_ms: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionStanding]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStanding]
    dead: int
    settings: _struct_pb2.Struct
    def __init__(self, name: _Optional[str] = ..., id: _Optional[int] = ..., created_ms: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionStanding, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupStanding, _Mapping]]] = ..., dead: _Optional[int] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class PartitionStanding(_message.Message):
    __slots__ = ("number", "start", "end", "bytes", "segments", "tiered_bytes", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TIERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    end: int
    bytes: int
    segments: int
    tiered_bytes: int
    problem: str
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., bytes: _Optional[int] = ..., segments: _Optional[int] = ..., tiered_bytes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class GroupStanding(_message.Message):
    __slots__ = ("name", "topic", "mode", "static_members", "partitions", "wrong", "query", "paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STATIC_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    mode: str
    static_members: _containers.RepeatedScalarFieldContainer[str]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionProgress]
    wrong: _containers.RepeatedScalarFieldContainer[str]
    query: QueryStanding
    paused: Pause
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., mode: _Optional[str] = ..., static_members: _Optional[_Iterable[str]] = ..., partitions: _Optional[_Iterable[_Union[PartitionProgress, _Mapping]]] = ..., wrong: _Optional[_Iterable[str]] = ..., query: _Optional[_Union[QueryStanding, _Mapping]] = ..., paused: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class PartitionProgress(_message.Message):
    __slots__ = ("topic", "partition", "offset", "end", "lag", "lag_seconds", "leased", "waiting")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    end: int
    lag: int
    lag_seconds: float
    leased: int
    waiting: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., end: _Optional[int] = ..., lag: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., leased: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class QueryStanding(_message.Message):
    __slots__ = ("kind", "holder", "renewed_seconds", "timeout_seconds", "stale")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RENEWED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    holder: str
    renewed_seconds: float
    timeout_seconds: float
    stale: bool
    def __init__(self, kind: _Optional[str] = ..., holder: _Optional[str] = ..., renewed_seconds: _Optional[float] = ..., timeout_seconds: _Optional[float] = ..., stale: _Optional[bool] = ...) -> None: ...

class BeginProducerRequest(_message.Message):
    __slots__ = ("name", "resume")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    name: str
    resume: bool
    def __init__(self, name: _Optional[str] = ..., resume: _Optional[bool] = ...) -> None: ...

class BeginProducerResponse(_message.Message):
    __slots__ = ("id", "epoch", "since")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    epoch: int
    since: int
    def __init__(self, id: _Optional[str] = ..., epoch: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("topic", "partition", "producer", "sequence", "epoch", "durability", "codec", "messages", "bodies")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    producer: str
    sequence: int
    epoch: int
    durability: str
    codec: str
    messages: _containers.RepeatedCompositeFieldContainer[NewMessage]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., producer: _Optional[str] = ..., sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., durability: _Optional[str] = ..., codec: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[NewMessage, _Mapping]]] = ..., bodies: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("offsets", "durability", "duplicate")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    durability: str
    duplicate: bool
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., durability: _Optional[str] = ..., duplicate: _Optional[bool] = ...) -> None: ...

class GetNextSequenceRequest(_message.Message):
    __slots__ = ("topic", "partition", "producer", "since", "first", "count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    producer: str
    since: int
    first: int
    count: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., producer: _Optional[str] = ..., since: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class GetNextSequenceResponse(_message.Message):
    __slots__ = ("sequence", "offsets")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    offsets: _containers.RepeatedCompositeFieldContainer[_struct_pb2.Value]
    def __init__(self, sequence: _Optional[int] = ..., offsets: _Optional[_Iterable[_Union[_struct_pb2.Value, _Mapping]]] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("topic", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    limit: int
    def __init__(self, topic: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupInfo]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupInfo, _Mapping]]] = ...) -> None: ...

class GroupInfo(_message.Message):
    __slots__ = ("name", "topic", "mode", "lag", "members", "lag_seconds", "renewed_seconds", "timeout_seconds", "problem", "paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RENEWED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    mode: str
    lag: int
    members: int
    lag_seconds: float
    renewed_seconds: float
    timeout_seconds: float
    problem: str
    paused: Pause
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., mode: _Optional[str] = ..., lag: _Optional[int] = ..., members: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., renewed_seconds: _Optional[float] = ..., timeout_seconds: _Optional[float] = ..., problem: _Optional[str] = ..., paused: _Optional[_Union[Pause, _Mapping]] = ...) -> None: ...

class GetGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class GetGroupResponse(_message.Message):
    __slots__ = ("name", "topics", "stream")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    topics: _containers.RepeatedCompositeFieldContainer[GroupInfo]
    stream: GroupFacts
    def __init__(self, name: _Optional[str] = ..., topics: _Optional[_Iterable[_Union[GroupInfo, _Mapping]]] = ..., stream: _Optional[_Union[GroupFacts, _Mapping]] = ...) -> None: ...

class GroupFacts(_message.Message):
    __slots__ = ("name", "state", "epoch", "assignor", "rebalance", "members", "lag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ASSIGNOR_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    epoch: int
    assignor: str
    rebalance: str
    members: _containers.RepeatedCompositeFieldContainer[MemberFacts]
    lag: _containers.RepeatedCompositeFieldContainer[PartitionLag]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., assignor: _Optional[str] = ..., rebalance: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberFacts, _Mapping]]] = ..., lag: _Optional[_Iterable[_Union[PartitionLag, _Mapping]]] = ...) -> None: ...

class MemberFacts(_message.Message):
    __slots__ = ("id", "instance_id", "holder", "topics", "partitions", "epoch", "heard_ms_ago")
    ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARD_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    id: str
    instance_id: str
    holder: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    partitions: _containers.RepeatedCompositeFieldContainer[_struct_pb2.ListValue]
    epoch: int
    heard_ms_ago: int
    def __init__(self, id: _Optional[str] = ..., instance_id: _Optional[str] = ..., holder: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., partitions: _Optional[_Iterable[_Union[_struct_pb2.ListValue, _Mapping]]] = ..., epoch: _Optional[int] = ..., heard_ms_ago: _Optional[int] = ...) -> None: ...

class PartitionLag(_message.Message):
    __slots__ = ("topic", "partition", "offset", "end", "messages", "seconds")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    end: int
    messages: int
    seconds: float
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., end: _Optional[int] = ..., messages: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("group", "topic")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class DeleteGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetOffsetsRequest(_message.Message):
    __slots__ = ("group", "topic")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class GetOffsetsResponse(_message.Message):
    __slots__ = ("offsets",)
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedCompositeFieldContainer[PartitionLag]
    def __init__(self, offsets: _Optional[_Iterable[_Union[PartitionLag, _Mapping]]] = ...) -> None: ...

class ResetOffsetsRequest(_message.Message):
    __slots__ = ("group", "topic", "to", "offset", "time", "partition", "dry_run")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    group: str
    topic: str
    to: str
    offset: int
    time: str
    partition: int
    dry_run: bool
    def __init__(self, group: _Optional[str] = ..., topic: _Optional[str] = ..., to: _Optional[str] = ..., offset: _Optional[int] = ..., time: _Optional[str] = ..., partition: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ResetOffsetsResponse(_message.Message):
    __slots__ = ("partitions", "dry_run")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[ResetTold]
    dry_run: bool
    def __init__(self, partitions: _Optional[_Iterable[_Union[ResetTold, _Mapping]]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ResetTold(_message.Message):
    __slots__ = ("topic", "partition", "before", "after", "messages")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    before: int
    after: int
    messages: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., messages: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("group", "topics", "instance_id", "owner", "settings")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    instance_id: str
    owner: str
    settings: _struct_pb2.Struct
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., instance_id: _Optional[str] = ..., owner: _Optional[str] = ..., settings: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("member", "assignment", "epoch", "session_ms", "heartbeat_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    member: str
    assignment: _containers.RepeatedCompositeFieldContainer[Assigned]
    epoch: int
    session_ms: int
    heartbeat_ms: int
    def __init__(self, member: _Optional[str] = ..., assignment: _Optional[_Iterable[_Union[Assigned, _Mapping]]] = ..., epoch: _Optional[int] = ..., session_ms: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ...) -> None: ...

class Assigned(_message.Message):
    __slots__ = ("topic", "partition", "position")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    position: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class SendHeartbeatRequest(_message.Message):
    __slots__ = ("group", "member")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class SendHeartbeatResponse(_message.Message):
    __slots__ = ("assignment", "epoch")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    assignment: _containers.RepeatedCompositeFieldContainer[Assigned]
    epoch: int
    def __init__(self, assignment: _Optional[_Iterable[_Union[Assigned, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("group", "member", "poll", "max_records", "wait", "commit", "paused")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    POLL_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    poll: int
    max_records: int
    wait: float
    commit: _containers.RepeatedCompositeFieldContainer[Offset]
    paused: _containers.RepeatedCompositeFieldContainer[At]
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., poll: _Optional[int] = ..., max_records: _Optional[int] = ..., wait: _Optional[float] = ..., commit: _Optional[_Iterable[_Union[Offset, _Mapping]]] = ..., paused: _Optional[_Iterable[_Union[At, _Mapping]]] = ...) -> None: ...

class Offset(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class At(_message.Message):
    __slots__ = ("topic", "partition")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class PollResponse(_message.Message):
    __slots__ = ("messages", "assignment", "epoch", "refused")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Said]
    assignment: _containers.RepeatedCompositeFieldContainer[Assigned]
    epoch: int
    refused: _containers.RepeatedCompositeFieldContainer[At]
    def __init__(self, messages: _Optional[_Iterable[_Union[Said, _Mapping]]] = ..., assignment: _Optional[_Iterable[_Union[Assigned, _Mapping]]] = ..., epoch: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[At, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("group", "member", "offsets", "durability")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    offsets: _containers.RepeatedCompositeFieldContainer[Offset]
    durability: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[Offset, _Mapping]]] = ..., durability: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    def __init__(self, committed: _Optional[int] = ...) -> None: ...

class MoveMemberRequest(_message.Message):
    __slots__ = ("group", "member", "topic", "partition", "to", "offset", "time")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    topic: str
    partition: int
    to: str
    offset: int
    time: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., to: _Optional[str] = ..., offset: _Optional[int] = ..., time: _Optional[str] = ...) -> None: ...

class MoveMemberResponse(_message.Message):
    __slots__ = ("assignment", "epoch")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    assignment: _containers.RepeatedCompositeFieldContainer[Assigned]
    epoch: int
    def __init__(self, assignment: _Optional[_Iterable[_Union[Assigned, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("group", "member")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireLockRequest(_message.Message):
    __slots__ = ("name", "owner", "lease", "wait", "if_not_exists")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    IF_NOT_EXISTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    lease: float
    wait: float
    if_not_exists: bool
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., lease: _Optional[float] = ..., wait: _Optional[float] = ..., if_not_exists: _Optional[bool] = ...) -> None: ...

class AcquireLockResponse(_message.Message):
    __slots__ = ("name", "owner", "fence", "lease_id", "lease", "acquired_at", "expires_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    fence: int
    lease_id: str
    lease: float
    acquired_at: str
    expires_at: str
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., fence: _Optional[int] = ..., lease_id: _Optional[str] = ..., lease: _Optional[float] = ..., acquired_at: _Optional[str] = ..., expires_at: _Optional[str] = ...) -> None: ...

class KeepLockRequest(_message.Message):
    __slots__ = ("name", "lease_id", "lease")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    lease: float
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ..., lease: _Optional[float] = ...) -> None: ...

class KeepLockResponse(_message.Message):
    __slots__ = ("name", "owner", "fence", "lease_id", "lease", "acquired_at", "expires_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    fence: int
    lease_id: str
    lease: float
    acquired_at: str
    expires_at: str
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., fence: _Optional[int] = ..., lease_id: _Optional[str] = ..., lease: _Optional[float] = ..., acquired_at: _Optional[str] = ..., expires_at: _Optional[str] = ...) -> None: ...

class ReleaseLockRequest(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseLockResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForceReleaseLockRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ForceReleaseLockResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class ListLocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLocksResponse(_message.Message):
    __slots__ = ("locks",)
    LOCKS_FIELD_NUMBER: _ClassVar[int]
    locks: _containers.RepeatedCompositeFieldContainer[LockInfo]
    def __init__(self, locks: _Optional[_Iterable[_Union[LockInfo, _Mapping]]] = ...) -> None: ...

class LockInfo(_message.Message):
    __slots__ = ("name", "held", "owner", "fence", "acquired_at", "expires_at", "waiting", "document_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    held: bool
    owner: str
    fence: int
    acquired_at: str
    expires_at: str
    waiting: int
    document_version: int
    def __init__(self, name: _Optional[str] = ..., held: _Optional[bool] = ..., owner: _Optional[str] = ..., fence: _Optional[int] = ..., acquired_at: _Optional[str] = ..., expires_at: _Optional[str] = ..., waiting: _Optional[int] = ..., document_version: _Optional[int] = ...) -> None: ...

class GetLockRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetLockResponse(_message.Message):
    __slots__ = ("name", "held", "owner", "fence", "acquired_at", "expires_at", "waiting", "document_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ACQUIRED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    held: bool
    owner: str
    fence: int
    acquired_at: str
    expires_at: str
    waiting: int
    document_version: int
    def __init__(self, name: _Optional[str] = ..., held: _Optional[bool] = ..., owner: _Optional[str] = ..., fence: _Optional[int] = ..., acquired_at: _Optional[str] = ..., expires_at: _Optional[str] = ..., waiting: _Optional[int] = ..., document_version: _Optional[int] = ...) -> None: ...

class ListDocumentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDocumentsResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class GetDocumentRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetDocumentResponse(_message.Message):
    __slots__ = ("name", "value", "version", "updated_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: _struct_pb2.Value
    version: int
    updated_at: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., version: _Optional[int] = ..., updated_at: _Optional[str] = ...) -> None: ...

class UpdateDocumentRequest(_message.Message):
    __slots__ = ("name", "version", "lease_id", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    lease_id: str
    value: _struct_pb2.Value
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., lease_id: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...

class UpdateDocumentResponse(_message.Message):
    __slots__ = ("name", "value", "version", "updated_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: _struct_pb2.Value
    version: int
    updated_at: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., version: _Optional[int] = ..., updated_at: _Optional[str] = ...) -> None: ...

class RemoveDocumentRequest(_message.Message):
    __slots__ = ("name", "version", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., lease_id: _Optional[str] = ...) -> None: ...

class RemoveDocumentResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: _Optional[bool] = ...) -> None: ...

class ListSchedulesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSchedulesResponse(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[Schedule]
    def __init__(self, schedules: _Optional[_Iterable[_Union[Schedule, _Mapping]]] = ...) -> None: ...

class Schedule(_message.Message):
    __slots__ = ("name", "topic", "body", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter", "paused", "next_due", "fired", "missed", "firings", "error", "created_at", "changed_at")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    body: bytes
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    paused: bool
    next_due: str
    fired: int
    missed: int
    firings: _containers.RepeatedCompositeFieldContainer[Firing]
    error: str
    created_at: str
    changed_at: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ..., paused: _Optional[bool] = ..., next_due: _Optional[str] = ..., fired: _Optional[int] = ..., missed: _Optional[int] = ..., firings: _Optional[_Iterable[_Union[Firing, _Mapping]]] = ..., error: _Optional[str] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class Firing(_message.Message):
    __slots__ = ("due", "at", "message_id", "missed", "by_hand")
    DUE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    BY_HAND_FIELD_NUMBER: _ClassVar[int]
    due: str
    at: str
    message_id: str
    missed: int
    by_hand: bool
    def __init__(self, due: _Optional[str] = ..., at: _Optional[str] = ..., message_id: _Optional[str] = ..., missed: _Optional[int] = ..., by_hand: _Optional[bool] = ...) -> None: ...

class GetScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    def __init__(self, schedule: _Optional[str] = ...) -> None: ...

class GetScheduleResponse(_message.Message):
    __slots__ = ("name", "topic", "body", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter", "paused", "next_due", "fired", "missed", "firings", "error", "created_at", "changed_at")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    body: bytes
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    paused: bool
    next_due: str
    fired: int
    missed: int
    firings: _containers.RepeatedCompositeFieldContainer[Firing]
    error: str
    created_at: str
    changed_at: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ..., paused: _Optional[bool] = ..., next_due: _Optional[str] = ..., fired: _Optional[int] = ..., missed: _Optional[int] = ..., firings: _Optional[_Iterable[_Union[Firing, _Mapping]]] = ..., error: _Optional[str] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class PutScheduleRequest(_message.Message):
    __slots__ = ("schedule", "topic", "body", "text", "json", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    topic: str
    body: bytes
    text: str
    json: _struct_pb2.Value
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    def __init__(self, schedule: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., text: _Optional[str] = ..., json: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ...) -> None: ...

class PutScheduleResponse(_message.Message):
    __slots__ = ("name", "topic", "body", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter", "paused", "next_due", "fired", "missed", "firings", "error", "created_at", "changed_at")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    body: bytes
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    paused: bool
    next_due: str
    fired: int
    missed: int
    firings: _containers.RepeatedCompositeFieldContainer[Firing]
    error: str
    created_at: str
    changed_at: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ..., paused: _Optional[bool] = ..., next_due: _Optional[str] = ..., fired: _Optional[int] = ..., missed: _Optional[int] = ..., firings: _Optional[_Iterable[_Union[Firing, _Mapping]]] = ..., error: _Optional[str] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class DeleteScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    def __init__(self, schedule: _Optional[str] = ...) -> None: ...

class DeleteScheduleResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: _Optional[bool] = ...) -> None: ...

class PauseScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    def __init__(self, schedule: _Optional[str] = ...) -> None: ...

class PauseScheduleResponse(_message.Message):
    __slots__ = ("name", "topic", "body", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter", "paused", "next_due", "fired", "missed", "firings", "error", "created_at", "changed_at")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    body: bytes
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    paused: bool
    next_due: str
    fired: int
    missed: int
    firings: _containers.RepeatedCompositeFieldContainer[Firing]
    error: str
    created_at: str
    changed_at: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ..., paused: _Optional[bool] = ..., next_due: _Optional[str] = ..., fired: _Optional[int] = ..., missed: _Optional[int] = ..., firings: _Optional[_Iterable[_Union[Firing, _Mapping]]] = ..., error: _Optional[str] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class ResumeScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    def __init__(self, schedule: _Optional[str] = ...) -> None: ...

class ResumeScheduleResponse(_message.Message):
    __slots__ = ("name", "topic", "body", "key", "headers", "priority", "cron", "timezone", "every", "at", "misfire", "jitter", "paused", "next_due", "fired", "missed", "firings", "error", "created_at", "changed_at")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MISFIRE_FIELD_NUMBER: _ClassVar[int]
    JITTER_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_DUE_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    FIRINGS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topic: str
    body: bytes
    key: str
    headers: _containers.ScalarMap[str, str]
    priority: int
    cron: str
    timezone: str
    every: float
    at: str
    misfire: str
    jitter: float
    paused: bool
    next_due: str
    fired: int
    missed: int
    firings: _containers.RepeatedCompositeFieldContainer[Firing]
    error: str
    created_at: str
    changed_at: str
    def __init__(self, name: _Optional[str] = ..., topic: _Optional[str] = ..., body: _Optional[bytes] = ..., key: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., priority: _Optional[int] = ..., cron: _Optional[str] = ..., timezone: _Optional[str] = ..., every: _Optional[float] = ..., at: _Optional[str] = ..., misfire: _Optional[str] = ..., jitter: _Optional[float] = ..., paused: _Optional[bool] = ..., next_due: _Optional[str] = ..., fired: _Optional[int] = ..., missed: _Optional[int] = ..., firings: _Optional[_Iterable[_Union[Firing, _Mapping]]] = ..., error: _Optional[str] = ..., created_at: _Optional[str] = ..., changed_at: _Optional[str] = ...) -> None: ...

class RunScheduleRequest(_message.Message):
    __slots__ = ("schedule",)
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    def __init__(self, schedule: _Optional[str] = ...) -> None: ...

class RunScheduleResponse(_message.Message):
    __slots__ = ("due", "at", "message_id", "missed", "by_hand")
    DUE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    BY_HAND_FIELD_NUMBER: _ClassVar[int]
    due: str
    at: str
    message_id: str
    missed: int
    by_hand: bool
    def __init__(self, due: _Optional[str] = ..., at: _Optional[str] = ..., message_id: _Optional[str] = ..., missed: _Optional[int] = ..., by_hand: _Optional[bool] = ...) -> None: ...

class GetNextDuesRequest(_message.Message):
    __slots__ = ("schedule", "count")
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    schedule: str
    count: int
    def __init__(self, schedule: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetNextDuesResponse(_message.Message):
    __slots__ = ("times",)
    TIMES_FIELD_NUMBER: _ClassVar[int]
    times: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, times: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginTransactionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class BeginTransactionResponse(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommitTransactionRequest(_message.Message):
    __slots__ = ("name", "epoch", "messages", "acks", "offsets", "documents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    messages: _containers.RepeatedCompositeFieldContainer[TransactionMessage]
    acks: _containers.RepeatedCompositeFieldContainer[TransactionAcks]
    offsets: _containers.RepeatedCompositeFieldContainer[TransactionOffsets]
    documents: _containers.RepeatedCompositeFieldContainer[TransactionDocument]
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[TransactionMessage, _Mapping]]] = ..., acks: _Optional[_Iterable[_Union[TransactionAcks, _Mapping]]] = ..., offsets: _Optional[_Iterable[_Union[TransactionOffsets, _Mapping]]] = ..., documents: _Optional[_Iterable[_Union[TransactionDocument, _Mapping]]] = ...) -> None: ...

class TransactionMessage(_message.Message):
    __slots__ = ("key", "key_data", "headers", "priority", "delay", "at", "ttl", "dedup_id", "dedup_data", "correlation_id", "body", "text", "json", "tombstone", "topic", "partition")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEY_DATA_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DELAY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DEDUP_ID_FIELD_NUMBER: _ClassVar[int]
    DEDUP_DATA_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    key: str
    key_data: bytes
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    priority: int
    delay: float
    at: str
    ttl: float
    dedup_id: str
    dedup_data: bytes
    correlation_id: str
    body: bytes
    text: str
    json: _struct_pb2.Value
    tombstone: bool
    topic: str
    partition: int
    def __init__(self, key: _Optional[str] = ..., key_data: _Optional[bytes] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., priority: _Optional[int] = ..., delay: _Optional[float] = ..., at: _Optional[str] = ..., ttl: _Optional[float] = ..., dedup_id: _Optional[str] = ..., dedup_data: _Optional[bytes] = ..., correlation_id: _Optional[str] = ..., body: _Optional[bytes] = ..., text: _Optional[str] = ..., json: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., tombstone: _Optional[bool] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class TransactionAcks(_message.Message):
    __slots__ = ("topic", "group", "receipts")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    receipts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., receipts: _Optional[_Iterable[str]] = ...) -> None: ...

class TransactionOffsets(_message.Message):
    __slots__ = ("group", "member", "offsets")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    offsets: _containers.RepeatedCompositeFieldContainer[Offset]
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[Offset, _Mapping]]] = ...) -> None: ...

class TransactionDocument(_message.Message):
    __slots__ = ("name", "value", "remove", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: _struct_pb2.Value
    remove: bool
    version: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ..., remove: _Optional[bool] = ..., version: _Optional[int] = ...) -> None: ...

class CommitTransactionResponse(_message.Message):
    __slots__ = ("name", "epoch", "stored")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    stored: _containers.RepeatedCompositeFieldContainer[Stored]
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[Stored, _Mapping]]] = ...) -> None: ...

class ListTransactionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTransactionsResponse(_message.Message):
    __slots__ = ("transactions",)
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    transactions: _containers.RepeatedCompositeFieldContainer[TransactionInfo]
    def __init__(self, transactions: _Optional[_Iterable[_Union[TransactionInfo, _Mapping]]] = ...) -> None: ...

class TransactionInfo(_message.Message):
    __slots__ = ("name", "epoch", "changed_at", "committed", "unfinished")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHANGED_AT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    changed_at: str
    committed: bool
    unfinished: bool
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., changed_at: _Optional[str] = ..., committed: _Optional[bool] = ..., unfinished: _Optional[bool] = ...) -> None: ...

class AbortTransactionRequest(_message.Message):
    __slots__ = ("transaction",)
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    transaction: str
    def __init__(self, transaction: _Optional[str] = ...) -> None: ...

class AbortTransactionResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: _Optional[bool] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "folder", "started_at", "uptime_seconds", "disk_free_bytes", "connections", "max_connections", "descriptors", "max_descriptors", "waiters", "max_waiters", "streams", "members", "topics", "leaving", "tokens_problem", "store")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    MAX_DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITERS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    version: str
    folder: str
    started_at: str
    uptime_seconds: float
    disk_free_bytes: int
    connections: int
    max_connections: int
    descriptors: int
    max_descriptors: int
    waiters: int
    max_waiters: int
    streams: int
    members: int
    topics: int
    leaving: bool
    tokens_problem: str
    store: StoreStatus
    def __init__(self, version: _Optional[str] = ..., folder: _Optional[str] = ..., started_at: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., disk_free_bytes: _Optional[int] = ..., connections: _Optional[int] = ..., max_connections: _Optional[int] = ..., descriptors: _Optional[int] = ..., max_descriptors: _Optional[int] = ..., waiters: _Optional[int] = ..., max_waiters: _Optional[int] = ..., streams: _Optional[int] = ..., members: _Optional[int] = ..., topics: _Optional[int] = ..., leaving: _Optional[bool] = ..., tokens_problem: _Optional[str] = ..., store: _Optional[_Union[StoreStatus, _Mapping]] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("name", "owner", "epoch", "objects", "silent_seconds", "unsent_bytes", "problem", "standbys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNSENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    epoch: int
    objects: int
    silent_seconds: float
    unsent_bytes: int
    problem: str
    standbys: _containers.RepeatedCompositeFieldContainer[StandbyStatus]
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ..., objects: _Optional[int] = ..., silent_seconds: _Optional[float] = ..., unsent_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., standbys: _Optional[_Iterable[_Union[StandbyStatus, _Mapping]]] = ...) -> None: ...

class StandbyStatus(_message.Message):
    __slots__ = ("process", "number", "lag_objects", "lag_seconds")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAG_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    process: str
    number: int
    lag_objects: int
    lag_seconds: float
    def __init__(self, process: _Optional[str] = ..., number: _Optional[int] = ..., lag_objects: _Optional[int] = ..., lag_seconds: _Optional[float] = ...) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SyncResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWaitersRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListWaitersResponse(_message.Message):
    __slots__ = ("waiting", "max_waiters", "lines")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITERS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    max_waiters: int
    lines: _containers.RepeatedCompositeFieldContainer[WaitersAt]
    def __init__(self, waiting: _Optional[int] = ..., max_waiters: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[WaitersAt, _Mapping]]] = ...) -> None: ...

class WaitersAt(_message.Message):
    __slots__ = ("topic", "group", "waiters", "streams")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    waiters: int
    streams: int
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., waiters: _Optional[int] = ..., streams: _Optional[int] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("id", "name", "host", "pid", "version", "started_ms", "concurrency", "state", "queues", "handled", "failed", "seen_seconds", "order")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    HANDLED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SEEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    host: str
    pid: int
    version: str
    started_ms: int
    concurrency: int
    state: str
    queues: _containers.RepeatedCompositeFieldContainer[WorkerQueueInfo]
    handled: int
    failed: int
    seen_seconds: float
    order: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., started_ms: _Optional[int] = ..., concurrency: _Optional[int] = ..., state: _Optional[str] = ..., queues: _Optional[_Iterable[_Union[WorkerQueueInfo, _Mapping]]] = ..., handled: _Optional[int] = ..., failed: _Optional[int] = ..., seen_seconds: _Optional[float] = ..., order: _Optional[str] = ...) -> None: ...

class WorkerQueueInfo(_message.Message):
    __slots__ = ("topic", "group", "running", "running_count")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_COUNT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    running: _containers.RepeatedCompositeFieldContainer[RunningMessage]
    running_count: int
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., running: _Optional[_Iterable[_Union[RunningMessage, _Mapping]]] = ..., running_count: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class ResumeWorkerResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class StopWorkerRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class StopWorkerResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSettingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSettingsResponse(_message.Message):
    __slots__ = ("settings", "path")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[SettingTold]
    path: str
    def __init__(self, settings: _Optional[_Iterable[_Union[SettingTold, _Mapping]]] = ..., path: _Optional[str] = ...) -> None: ...

class GetTotalSamplesRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: float
    def __init__(self, last: _Optional[float] = ...) -> None: ...

class GetTotalSamplesResponse(_message.Message):
    __slots__ = ("topic", "group", "mode", "step_seconds", "since", "until", "samples")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    group: str
    mode: str
    step_seconds: int
    since: str
    until: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, topic: _Optional[str] = ..., group: _Optional[str] = ..., mode: _Optional[str] = ..., step_seconds: _Optional[int] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class SearchTracesRequest(_message.Message):
    __slots__ = ("topic", "since", "until", "group", "event", "holder", "error", "limit", "last", "after")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    since: str
    until: str
    group: str
    event: str
    holder: str
    error: str
    limit: int
    last: bool
    after: str
    def __init__(self, topic: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ..., group: _Optional[str] = ..., event: _Optional[str] = ..., holder: _Optional[str] = ..., error: _Optional[str] = ..., limit: _Optional[int] = ..., last: _Optional[bool] = ..., after: _Optional[str] = ...) -> None: ...

class SearchTracesResponse(_message.Message):
    __slots__ = ("steps", "next")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TraceStep]
    next: str
    def __init__(self, steps: _Optional[_Iterable[_Union[TraceStep, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("message_id", "limit", "after")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    limit: int
    after: str
    def __init__(self, message_id: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("steps", "next")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TraceStep]
    next: str
    def __init__(self, steps: _Optional[_Iterable[_Union[TraceStep, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class GetTraceStatsRequest(_message.Message):
    __slots__ = ("topic", "since", "until")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    topic: str
    since: str
    until: str
    def __init__(self, topic: _Optional[str] = ..., since: _Optional[str] = ..., until: _Optional[str] = ...) -> None: ...

class GetTraceStatsResponse(_message.Message):
    __slots__ = ("messages", "steps", "first_delivery", "handling", "attempts", "errors")
    class StepsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AttemptsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    HANDLING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    messages: int
    steps: _containers.ScalarMap[str, int]
    first_delivery: Times
    handling: Times
    attempts: _containers.ScalarMap[str, int]
    errors: _containers.RepeatedCompositeFieldContainer[_struct_pb2.ListValue]
    def __init__(self, messages: _Optional[int] = ..., steps: _Optional[_Mapping[str, int]] = ..., first_delivery: _Optional[_Union[Times, _Mapping]] = ..., handling: _Optional[_Union[Times, _Mapping]] = ..., attempts: _Optional[_Mapping[str, int]] = ..., errors: _Optional[_Iterable[_Union[_struct_pb2.ListValue, _Mapping]]] = ...) -> None: ...
