"""Filling a desk's empty buffers from the log. Nothing in here waits.

A partition that can't be read, because a batch is damaged, a message can't be decoded or its
checkpoint is gone, must neither hide what stands before the trouble nor keep other partitions from
their turn. So what precedes is handed out first, then what others have, then the error is raised:
again and again, until somebody seeks past it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from functools import partial
from typing import NamedTuple

from pxrs.config import ConsumerSettings
from pxrs.errors import NoCheckpoint, OffsetOutOfRange, TopicNotFound
from pxrs.log.batches import decode
from pxrs.runtime.decoding import Decoder, cut
from pxrs.runtime.desk import ConsumerDesk
from pxrs.runtime.reader import FETCH_BYTES
from pxrs.runtime.seat import Seat
from pxrs.stores.api import LogStore
from pxrs.stores.optional import FetchesMany
from pxrs.types import Bounds, Fetched, Message, StoredBatch

# Fetching from a partition at its end costs no more than asking so many together for their
# ends: 8 where the store is a file, more over a network.
_ASK_TOGETHER = 32
# So many partitions are fetched from in one go, where the store can do that.
_TOGETHER = 16


class _Place(NamedTuple):
    """Where a seat stood when it was fetched for: what came is void if it was moved since."""

    turn: int
    position: int


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

        def attempt(seat: Seat, work: Callable[[], bool]) -> bool:
            nonlocal trouble
            try:
                return work()
            except TopicNotFound:
                # The topic was deleted under us; the next look will notice and drop the seat.
                topic_gone()
            except Exception as error:
                if seat is first:
                    raise
                trouble = trouble or (seat, error)
            return False

        behind = [
            seat
            for seat in hungry
            if attempt(seat, partial(self._has_more, seat, len(hungry), ends))
        ]
        with closing(self._fetched(behind)) as coming:
            for seat, place, fetched in coming:
                came = attempt(seat, partial(self._fill, seat, place, fetched)) or came
        if trouble is not None:
            seat, raised = trouble
            if not came:
                raise raised
            self._put_off = seat
        return came

    def _has_more(self, seat: Seat, hungry: int, ends: dict[str, Mapping[int, Bounds]]) -> bool:
        """Whether it is worth a fetch. One that has not started does."""
        if seat.started and hungry * _ASK_TOGETHER <= seat.siblings:
            return True
        topic_id = seat.where.topic_id
        if topic_id not in ends:
            ends[topic_id] = self._log.bounds(topic_id)
        if not seat.started:
            self._start(seat, *ends[topic_id][seat.part.partition])
        seat.end = ends[topic_id][seat.part.partition].end
        return seat.end > seat.position

    def _fetched(self, seats: list[Seat]) -> Generator[tuple[Seat, _Place, Fetched | Exception]]:
        """What each seat's partition has from where on. The rest comes while it is looked at."""
        if len(seats) > 1 and isinstance(self._log, FetchesMany):
            for few in (seats[at : at + _TOGETHER] for at in range(0, len(seats), _TOGETHER)):
                places = [self._place(seat) for seat in few]
                asked = [
                    (seat.where, place.position) for seat, place in zip(few, places, strict=True)
                ]
                with closing(self._log.fetch_many(asked, FETCH_BYTES)) as coming:
                    yield from zip(few, places, coming, strict=True)
            return
        for seat in seats:
            place = self._place(seat)
            try:
                yield seat, place, self._log.fetch(seat.where, place.position, FETCH_BYTES)
            except Exception as error:  # noqa: BLE001 - told when it is its turn
                yield seat, place, error

    def _place(self, seat: Seat) -> _Place:
        with self._desk.lock:
            return _Place(seat.turn, seat.position)

    def _fill(self, seat: Seat, place: _Place, fetched: Fetched | Exception) -> bool:
        if isinstance(fetched, Exception):
            raise fetched
        seat.end = fetched.end
        if not fetched.batches:
            return False
        messages: list[Message] = []
        try:
            position = self._decode(seat, place.position, fetched.batches, messages)
        except Exception:
            if not messages:
                raise
            position = messages[-1].offset + 1
        return self._desk.fill(seat, place.turn, messages, position)

    def _decode(
        self, seat: Seat, position: int, batches: list[StoredBatch], messages: list[Message]
    ) -> int:
        """Add the batches' messages from a position on; where to go on."""
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
