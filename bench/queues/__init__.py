"""The queues: ours, what people install, what people write by hand, and servers where they are installed."""

from bench.queues.base import Queue, Taken
from bench.queues.diskcache_deque import DiskcacheDeque
from bench.queues.huey_sqlite import HueyStorage
from bench.queues.litequeue_sqlite import LitequeueQueue
from bench.queues.lmdb_by_hand import LmdbQueue, LmdbQueueSynced
from bench.queues.nats_jetstream import NatsJetStream
from bench.queues.ours import HoldfastAckSynced, HoldfastQueue, HoldfastQueueSynced
from bench.queues.persist_queue import PersistAckQueue, PersistFileQueue
from bench.queues.postgres_skip_locked import PostgresSkipLocked
from bench.queues.queuelib_disk import QueuelibQueue
from bench.queues.rabbitmq import RabbitMq
from bench.queues.redis_stream import RedisStream, RedisStreamSynced
from bench.queues.rocksdict_by_hand import RocksdictQueue
from bench.queues.sqlite_by_hand import SqliteClaimed, SqliteClaimedSynced

# Ours first, as among the peers.
QUEUES: tuple[type[Queue], ...] = (
    HoldfastQueue,
    HoldfastQueueSynced,
    HoldfastAckSynced,
    QueuelibQueue,
    LmdbQueue,
    LmdbQueueSynced,
    RocksdictQueue,
    SqliteClaimed,
    SqliteClaimedSynced,
    LitequeueQueue,
    DiskcacheDeque,
    HueyStorage,
    PersistFileQueue,
    PersistAckQueue,
    RedisStream,
    RedisStreamSynced,
    NatsJetStream,
    RabbitMq,
    PostgresSkipLocked,
)

__all__ = ["QUEUES", "Queue", "Taken"]
