"""When the disk runs short, messages that are handled go before a message is refused.

Handled messages are kept to be replayed, and nobody waits for them: of all that lies on the disk they can be missed
first. Whoever finds too little space asks here, in the middle of a write and with any lock in hand but that of its own
log. So this takes none but those of the logs, and goes by the floors that are known to be on disk. Where that is not
enough, the next tick brings the floors up to date, and what a write is refused for now may fit a moment later.

The oldest segments of all open topics go first, and no more than it takes. Topics that are closed have their turn when
the sweep comes to them.

Somebody else may have filled the disk to its last byte, and nothing may be done yet. Then messages must still be
handled, for that is what frees space; and before that the folder must be opened, which writes a little as well. For
these the folder keeps a file of blocks that are of no use to anybody. It is cut shorter when they are needed, never for
a new message, and filled up when there is space for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from holdfast.broker.layout import RESERVE, TOPICS
from holdfast.errors import HoldfastError
from holdfast.storage.files import join

if TYPE_CHECKING:
    from holdfast.broker.broker import BrokerEngine
    from holdfast.storage.log import Log
    from holdfast.storage.retention import SegmentFacts

logger = logging.getLogger(__name__)

_RESERVE_BYTES: Final = 1024 * 1024
_BLOCK_BYTES: Final = 4 * 1024


class Space:
    """What a data folder can give back to its disk. Safe to use from any thread."""

    def __init__(self, engine: BrokerEngine) -> None:
        self._engine = engine
        self._wanted_bytes = 0  # so many were to be free, and were not
        self._asked = False  # whether somebody was refused since the last tick

    def make(self, wanted_bytes: int, *, urgent_bytes: int = 0) -> bool:
        """Remove handled messages until so many bytes are free, or none are left; answers whether any were removed.

        Where none are, what is urgent comes from the reserve.
        """
        return self._make(wanted_bytes) or (urgent_bytes > 0 and self._release(urgent_bytes))

    def _make(self, wanted_bytes: int) -> bool:
        if self._asked:
            return False  # nothing has changed since the last one was refused
        try:
            freed = self._free(wanted_bytes)
            short = self._is_short(wanted_bytes)
        except OSError:  # whoever asks is refused for want of space, not for this
            return False
        if short:
            self._wanted_bytes, self._asked = wanted_bytes, True
            self._engine.on_attention()
        return freed > 0

    def keep_reserve(self) -> None:
        """Fill up the reserve, if that leaves as much free again."""
        disk, path = self._engine.world.disk, self._reserve
        with suppress(OSError):  # the next tick tries again
            if not disk.exists(join(self._engine.folder, TOPICS)):
                return  # a folder with nothing else in it might be taken for somebody else's
            file = disk.open(path, write=True, create=True)
            try:
                if file.size() < _RESERVE_BYTES and not self._is_short(2 * _RESERVE_BYTES):
                    file.reserve(_RESERVE_BYTES)
                    file.sync()
            finally:
                file.close()

    def _release(self, urgent_bytes: int) -> bool:
        """Give back so much of the reserve, and no more: somebody else may take whatever is free."""
        try:
            file = self._engine.world.disk.open(self._reserve, write=True)
            try:
                left = file.size() - -(-urgent_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
                if left < 0:
                    return False
                file.truncate(left)
            finally:
                file.close()
        except OSError:
            return False  # there is none
        logger.warning("the disk is full: its reserve is used", extra={"folder": self._engine.folder, "left": left})
        return True

    @property
    def _reserve(self) -> str:
        return join(self._engine.folder, RESERVE)

    def tick(self, *, everything: bool) -> None:
        """Try again for whoever was refused, with the floors of all groups as they are now."""
        if everything:
            self.keep_reserve()
        if not self._wanted_bytes or not (self._asked or everything):
            return
        self._asked = False
        if self._is_short(self._wanted_bytes):
            for topic in self._engine.open_topics():
                with suppress(HoldfastError, OSError):  # then less can go
                    topic.bring_pins()
            self._free(self._wanted_bytes)
        if not self._is_short(self._wanted_bytes):
            self._wanted_bytes = 0

    def _is_short(self, wanted_bytes: int) -> bool:
        return self._engine.world.disk.free_bytes(self._engine.folder) < wanted_bytes

    def _free(self, wanted_bytes: int) -> int:
        freed = self._drop(self._logs(), wanted_bytes)
        for log in self._logs():
            if log.all_done and self._is_short(wanted_bytes):
                with suppress(HoldfastError, OSError):  # a new segment may need what is missing
                    log.roll()
                    freed += self._drop([log], wanted_bytes)
        if freed:
            logger.warning(
                "handled messages removed: the disk is full", extra={"folder": self._engine.folder, "bytes": freed}
            )
        return freed

    def _drop(self, logs: Iterable[Log], wanted_bytes: int) -> int:
        found: list[tuple[SegmentFacts, Log]] = []
        for log in logs:
            with suppress(HoldfastError, OSError):  # closed meanwhile
                found += [(segment, log) for segment in log.done_segments()]
        freed = 0
        for segment, log in sorted(found, key=lambda each: each[0].max_time_ns):
            if not self._is_short(wanted_bytes):
                break
            with suppress(HoldfastError, OSError):  # others may be removed
                freed += log.drop_done(segment).bytes
        return freed

    def _logs(self) -> list[Log]:
        return [log for topic in self._engine.open_topics() for log in topic.logs()]
