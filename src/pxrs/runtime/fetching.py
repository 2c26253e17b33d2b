"""Filling a desk's empty buffers from the log. Nothing in here waits.

A partition that can't be read, because a batch is damaged, a message can't be decoded or its
checkpoint is gone, must neither hide what stands before the trouble nor keep other partitions from
their turn. So what precedes is handed out first, then what others have, then the error is raised:
again and again, until somebody seeks past it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pxrs.config import ConsumerSettings
from pxrs.errors import NoCheckpoint, OffsetOutOfRange, TopicNotFound
from pxrs.log.batches import decode
from pxrs.runtime.decoding import Decoder, cut
from pxrs.runtime.desk import ConsumerDesk, Seat
from pxrs.runtime.reader import FETCH_BYTES
from pxrs.stores.api import LogStore
from pxrs.types import Bounds, Message, StoredBatch

# Fetching from a partition at its end costs no more than asking so many together for their
# ends: 8 where the store is a file, more over a network.
_ASK_TOGETHER = 32


class Fetcher:
    """Fetches for the seats of one desk. For one thread at a time."""

    def __init__(
        self, log: LogStore, desk: ConsumerDesk, settings: ConsumerSettings, decoder: Decoder
    ) -> None:
        self._log = log
        self._desk = desk
        self._settings = settings
        self._decoder = decoder
        # The seat whose error was put off because others had messages: it is told next.
        self._put_off: Seat | None = None

    def fetch(self, topic_gone: Callable[[], None]) -> bool:
        """Fill empty buffers; true if anything came."""
        came = False
        ends: dict[str, Mapping[int, Bounds]] = {}
        hungry = self._desk.hungry()
        first, self._put_off = self._put_off, None
        if first is not None:
            hungry.sort(key=lambda seat: seat is not first)
        trouble: tuple[Seat, Exception] | None = None
        for seat in hungry:
            try:
                came = self._fill(seat, len(hungry), ends) or came
            except TopicNotFound:
                # The topic was deleted under us; the next look will notice and drop the seat.
                topic_gone()
            except Exception as error:
                if seat is first:
                    raise
                trouble = trouble or (seat, error)
        if trouble is not None:
            seat, raised = trouble
            if not came:
                raise raised
            self._put_off = seat
        return came

    def _fill(self, seat: Seat, hungry: int, ends: dict[str, Mapping[int, Bounds]]) -> bool:
        if seat.started and hungry * _ASK_TOGETHER <= seat.siblings:
            return self._fetch_seat(seat)
        topic_id = seat.where.topic_id
        if topic_id not in ends:
            ends[topic_id] = self._log.bounds(topic_id)
        if not seat.started:
            self._start(seat, *ends[topic_id][seat.part.partition])
        seat.end = ends[topic_id][seat.part.partition].end
        return seat.end > seat.position and self._fetch_seat(seat)

    def _fetch_seat(self, seat: Seat) -> bool:
        fetched = self._log.fetch(seat.where, seat.position, FETCH_BYTES)
        seat.end = fetched.end
        if not fetched.batches:
            return False
        messages: list[Message] = []
        try:
            position = self._decode(seat, fetched.batches, messages)
        except Exception:
            if not messages:
                raise
            position = messages[-1].offset + 1
        return self._desk.fill(seat, messages, position)

    def _decode(self, seat: Seat, batches: list[StoredBatch], messages: list[Message]) -> int:
        """Add the batches' messages; where to go on."""
        position = seat.position
        for batch in batches:
            self._decoder.deserialize_into(messages, cut(decode(batch, seat.fence), position))
            position = batch.next
        return position

    def _start(self, seat: Seat, start: int, end: int) -> None:
        """Where to begin: at the checkpoint; by policy where there is none or it is gone."""
        if seat.checkpoint is not None:
            if start <= seat.checkpoint <= end:
                self._desk.start(seat, seat.checkpoint)
                return
            if self._settings.on_trimmed == "error":
                raise OffsetOutOfRange(*seat.part, seat.checkpoint, start, end)
            self._desk.start(seat, start if self._settings.on_trimmed == "earliest" else end)
            return
        if self._settings.start == "error":
            raise NoCheckpoint(
                f"group {self._settings.group!r} has no checkpoint in {seat.part.topic!r} "
                f"partition {seat.part.partition}"
            )
        self._desk.start(seat, start if self._settings.start == "earliest" else end)
