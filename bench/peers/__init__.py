"""The contestants: ours, what people use, what people write by hand, and floors."""

from bench.peers.base import KILL, NOTHING, POWER_CUT, Peer
from bench.peers.litequeue_sqlite import Litequeue
from bench.peers.lmdb_by_hand import LmdbNoSync, LmdbSync
from bench.peers.ours import Holdfast, HoldfastSynced
from bench.peers.persist_queue import PersistQueueFile, PersistQueueSqlite
from bench.peers.queuelib_disk import QueuelibFifo
from bench.peers.raw_log import RawLog, RawLogSynced, RawMap
from bench.peers.rocksdict_by_hand import RocksdictLog
from bench.peers.sqlite_by_hand import SqliteFull, SqliteNormal

# Ours first, so that it is neither favoured nor hurt by the place in a round changing with who is installed.
OS_CLASS: tuple[type[Peer], ...] = (
    Holdfast,
    RawLog,
    RawMap,
    QueuelibFifo,
    LmdbNoSync,
    RocksdictLog,
    SqliteNormal,
    Litequeue,
    PersistQueueFile,
)
DURABLE: tuple[type[Peer], ...] = (HoldfastSynced, RawLogSynced, LmdbSync, SqliteFull, PersistQueueSqlite)
EVERYBODY = OS_CLASS + DURABLE

__all__ = ["DURABLE", "EVERYBODY", "KILL", "NOTHING", "OS_CLASS", "POWER_CUT", "Peer"]
