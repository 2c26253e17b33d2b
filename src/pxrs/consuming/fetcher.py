"""Fills the empty buffers of a partition table from the log. Nothing in here waits.

A partition that can't be read, because a batch is damaged, a message can't be decoded or its
checkpoint is gone, must neither hide the messages before the error nor keep other partitions from
their turn. So these messages are handed out first, then those of the others, then the error is
raised: again and again, until a seek past it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import NamedTuple

from pxrs.codec.messages import Decoder, cut, sized_messages_of
from pxrs.config import ConsumerSettings
from pxrs.consuming.continuity import LastRead, goes_on, last_read
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.consuming.partition_table import PartitionTable
from pxrs.consuming.reader import FETCH_BYTES
from pxrs.errors import Fenced, MessagesLost, NoCheckpoint, OffsetOutOfRange, TopicNotFound
from pxrs.stores.api import FetchesMany, LogStore, NoticesAnother, SettlesLate
from pxrs.topics import is_virtual, named, offset_or_end_at, require_in_range, settled_end
from pxrs.types import Bounds, Fetched, Message

_LOG = logging.getLogger("pxrs.groups")
# To fetch from a partition at its end costs no more than to ask for the ends of this many together:
# 8 where the store is a file, more over a network.
_ASK_TOGETHER = 32
# How many partitions are fetched in one call, where the store can do that.
_TOGETHER = 16


class _Place(NamedTuple):
    """The position of a partition when it was fetched for; the result is void if it moved since."""

    turn: int
    position: int


class _Troubles:
    """The failures of one round. The partition whose turn it is, `first`, raises at once."""

    def __init__(
        self,
        first: OwnedPartition | None,
        is_deleted: Callable[[OwnedPartition], bool],
        topic_gone: Callable[[], None],
    ) -> None:
        self.first = first
        self._is_deleted = is_deleted
        self._topic_gone = topic_gone
        self.owned: OwnedPartition | None = None
        self.error: Exception | None = None

    def attempt(self, owned: OwnedPartition, work: Callable[[], bool]) -> bool:
        """Run the work and return its result; false if it failed."""
        try:
            return self._try(owned, work)
        except Fenced:
            # The partition was lost while its checkpoint was moved: it has left the table.
            return False
        except Exception as error:
            if self.error is None:
                self.owned, self.error = owned, error
            if owned is self.first:
                raise
        return False

    def _try(self, owned: OwnedPartition, work: Callable[[], bool]) -> bool:
        try:
            return work()
        except TopicNotFound as error:
            if not self._is_deleted(owned):
                # A topic's deletion is recorded first, and then its messages are dropped.
                raise MessagesLost(*owned.part, max(owned.position, 0), None, None) from error
            # The topic was deleted; the next look will notice and drop the partition.
            self._topic_gone()
            return False


class Fetcher:
    """Fetches for the partitions of one table. For one thread at a time."""

    def __init__(
        self,
        log: LogStore,
        table: PartitionTable,
        settings: ConsumerSettings,
        decoder: Decoder,
        pin: Callable[[Mapping[OwnedPartition, int]], None],
        skip: Callable[[OwnedPartition, int, str], None],
        is_deleted: Callable[[OwnedPartition], bool],
    ) -> None:
        self._log = log
        # What the log can do: to ask each time costs as much as to decode some hundred messages.
        self._fetches_many = log if isinstance(log, FetchesMany) else None
        self._notices = log if isinstance(log, NoticesAnother) else None
        self._settles = log if isinstance(log, SettlesLate) else None
        self._table = table
        self._settings = settings
        self._decoder = decoder
        self._most = min(FETCH_BYTES, settings.prefetch_bytes)
        # Makes these offsets the first checkpoints.
        self._pin = pin
        # Sets the checkpoint to another offset, and records why.
        self._skip = skip
        # Whether the partition's topic was deleted.
        self._is_deleted = is_deleted
        # The partition whose error was put off because others had messages: it is raised next.
        self._put_off: OwnedPartition | None = None
        # The error that keeps a partition from being read, as of the last fetch. For health.
        self.trouble: Exception | None = None

    def fetch(self, topic_gone: Callable[[], None]) -> bool:
        """Fill empty buffers, as far as the settings allow; true if anything came."""
        self._table.forget_idle(self._settings.prefetch_bytes)
        troubles = _Troubles(self._put_off, self._is_deleted, topic_gone)
        self._put_off = None
        try:
            came = self._fill_all(self._table.hungry(), troubles)
        finally:
            self._note(troubles.error)
        if troubles.error is not None:
            if not came:
                raise troubles.error
            self._put_off = troubles.owned
        return came

    def _note(self, trouble: Exception | None) -> None:
        """Keep the trouble for the health; logs lost messages, once."""
        if isinstance(trouble, MessagesLost) and str(trouble) != str(self.trouble):
            _LOG.error("group %s: %s", self._settings.group, trouble)
        self.trouble = trouble

    def _fill_all(self, hungry: list[OwnedPartition], troubles: _Troubles) -> bool:
        if troubles.first is not None:
            hungry.sort(key=lambda owned: owned is not troubles.first)
        ends: dict[str, Mapping[int, Bounds]] = {}
        if self._settings.start not in ("earliest", "error"):
            self._pin_the_start(hungry, ends)
        behind = [
            owned
            for owned in hungry
            if troubles.attempt(owned, partial(self._has_more, owned, len(hungry), ends))
        ]
        came, room = False, self._settings.prefetch_bytes
        with closing(self._fetched(behind)) as coming:
            for owned, place, fetched in coming:
                fill = partial(self._fill, owned, place, fetched, max(room, self._most))
                owned.size = 0
                came = troubles.attempt(owned, fill) or came
                room -= owned.size
                if room <= 0 and came:
                    # The others come next time: those that were served are behind them then.
                    break
        return came

    def offset_at(self, owned: OwnedPartition, timestamp: int) -> int:
        """Offset of the first message of that time (ms) or later, else the end."""
        with named(owned.part.topic):
            return offset_or_end_at(self._log, owned.where, owned.fence, timestamp)

    def _check_incarnation(self, owned: OwnedPartition) -> None:
        """Raise `SourceChanged` if its offsets are those of rows that are not there any more.

        It stays so for this owner. Who begins later, at a checkpoint that was reset, begins in the
        rows that are there now; one that seeks does, too.
        """
        if self._notices is not None and is_virtual(owned.where.topic_id):
            owned.incarnation = self._notices.incarnation(owned.where, owned.incarnation)

    def _has_more(
        self, owned: OwnedPartition, hungry: int, ends: dict[str, Mapping[int, Bounds]]
    ) -> bool:
        """Whether a fetch is worth while. For a partition that has not started, it is."""
        self._check_incarnation(owned)
        started = owned.started
        if started and (owned.end > owned.position or hungry * _ASK_TOGETHER <= owned.siblings):
            # It had more at the last look, or a fetch costs less than another look at all.
            return True
        bounds = self._bounds(owned, ends)
        if not started:
            self._start(owned, *bounds)
            started = owned.started
        owned.end = bounds.end
        if owned.end < owned.position and not is_virtual(owned.where.topic_id):
            # The end may be an old one, or messages were lost: a fetch shows which.
            return started
        return started and owned.end > owned.position

    def _bounds(self, owned: OwnedPartition, known: dict[str, Mapping[int, Bounds]]) -> Bounds:
        topic_id = owned.where.topic_id
        if topic_id not in known:
            known[topic_id] = self._log.bounds(topic_id)
        return known[topic_id][owned.part.partition]

    def _pin_the_start(
        self, partitions: list[OwnedPartition], ends: dict[str, Mapping[int, Bounds]]
    ) -> None:
        """Make the start a checkpoint where there is none, before anything is handed out.

        Otherwise a member that takes over before the first commit would begin at a later end, or
        by other settings, and messages in between would be lost.
        """
        new: dict[OwnedPartition, int] = {}
        for owned in partitions:
            if not owned.started and owned.checkpoint is None:
                with suppress(TopicNotFound):
                    start = self._given_start(owned, ends)
                    if start is not None:
                        new[owned] = start
        self._pin(new)

    def _given_start(
        self, owned: OwnedPartition, ends: dict[str, Mapping[int, Bounds]]
    ) -> int | None:
        """The offset to begin at: above what was handled elsewhere, or the end."""
        if not isinstance(self._settings.start, Mapping):
            return self._final_end(owned, ends)
        last = self._settings.start.get(owned.part.topic)
        if last is None:
            return None
        bounds = self._bounds(owned, ends)
        if not bounds.start <= last + 1 <= bounds.end:
            require_in_range(self._log, owned.where, owned.part.topic, last + 1)
        return last + 1

    def _final_end(
        self, owned: OwnedPartition, ends: dict[str, Mapping[int, Bounds]]
    ) -> int | None:
        """The end, below which nothing can appear later; None if that is not known yet."""
        if self._settles is not None and is_virtual(owned.where.topic_id):
            return self._settles.final(owned.where)
        return self._bounds(owned, ends).end

    def _fetched(
        self, partitions: list[OwnedPartition]
    ) -> Generator[tuple[OwnedPartition, _Place, Fetched | Exception]]:
        """Yields the fetched result of each partition, while the rest is still being read."""
        if len(partitions) > 1 and self._fetches_many is not None:
            for few in (
                partitions[at : at + _TOGETHER] for at in range(0, len(partitions), _TOGETHER)
            ):
                places = [self._place(owned) for owned in few]
                where = [owned.where for owned in few]
                asked = list(zip(where, (place.position for place in places), strict=True))
                with closing(self._fetches_many.fetch_many(asked, self._most)) as coming:
                    yield from zip(few, places, coming, strict=True)
            return
        for owned in partitions:
            place = self._place(owned)
            try:
                yield owned, place, self._log.fetch(owned.where, place.position, self._most)
            except Exception as error:  # noqa: BLE001 - raised in its turn
                yield owned, place, error

    def _place(self, owned: OwnedPartition) -> _Place:
        with self._table.lock:
            return _Place(owned.turn, owned.position)

    def _fill(
        self, owned: OwnedPartition, place: _Place, fetched: Fetched | Exception, room: int
    ) -> bool:
        """Decodes what was fetched; messages beyond the room, decompressed, are fetched again."""
        if owned.turn != place.turn:
            return False
        # Before anything is taken: what was read may be another table's rows.
        self._check_incarnation(owned)
        if isinstance(fetched, OffsetOutOfRange):
            return self._out_of_range(owned, fetched)
        if isinstance(fetched, Exception):
            raise fetched
        owned.end = fetched.end
        if not fetched.batches:
            return False
        messages: list[Message] = []
        position = place.position
        if not goes_on(owned.last_read, position, fetched.batches[0]):
            raise MessagesLost(*owned.part, position, fetched.start, fetched.end)
        last: LastRead | None = None
        try:
            for batch in fetched.batches:
                if owned.size >= room and messages:
                    break
                found, size = sized_messages_of(batch, owned.fence)
                owned.size += size
                self._decoder.deserialize_into(messages, cut(found, position))
                position, last = batch.next, last_read(batch)
        except Exception:
            if not messages:
                raise
            position = messages[-1].offset + 1
        came = self._table.fill(owned, place.turn, messages, position, last)
        # A source may have had nothing for this partition so far, but more after that.
        return came or (not messages and place.position < position < fetched.end)

    def _start(self, owned: OwnedPartition, start: int, end: int) -> None:
        """Begins at the checkpoint, or by policy if it is missing or gone."""
        if owned.checkpoint is not None:
            if start <= owned.checkpoint <= end or self._is_there(owned, owned.checkpoint):
                self._table.start(owned, owned.checkpoint)
            return
        if self._settings.start == "error":
            raise NoCheckpoint(
                f"group {self._settings.group!r} has no checkpoint in {owned.part.topic!r} "
                f"partition {owned.part.partition}, and start='error' was asked for; set one with "
                f"groups.reset({self._settings.group!r}, {owned.part.topic!r}, to=…), or choose "
                "start='earliest' or 'latest'"
            )
        if self._settings.start != "latest":
            self._table.start(owned, start)

    def _is_there(self, owned: OwnedPartition, offset: int) -> bool:
        """Whether the log, asked for this very offset, holds it: bounds may be a moment old."""
        try:
            self._log.fetch(owned.where, offset, 1)
        except OffsetOutOfRange as error:
            self._out_of_range(owned, error)
            return False
        return True

    def _out_of_range(self, owned: OwnedPartition, error: OffsetOutOfRange) -> bool:
        """Raise because the next message is gone, or skip it, by the settings.

        True: look again at once. Retention removes the oldest messages: those that are gone at
        the other end were lost, and no policy covers that.
        """
        is_past_the_end = error.offset > error.end
        if is_past_the_end and not is_virtual(owned.where.topic_id):
            raise MessagesLost(*owned.part, error.offset, error.start, error.end) from error
        policy = self._settings.on_trimmed
        if policy == "error" or is_past_the_end:
            # The log only knows the topic's id, not its name.
            raise OffsetOutOfRange(*owned.part, error.offset, error.start, error.end)
        if policy == "earliest":
            offset = error.start
        else:
            virtual = is_virtual(owned.where.topic_id)
            offset = settled_end(self._log, owned.where) if virtual else error.end
        # Retention may have gone on since: then the next fetch finds it out of range again.
        with suppress(OffsetOutOfRange):
            self._skip(owned, offset, f"on_trimmed={policy!r}, offset {error.offset} is gone")
        return True
