"""The partitions a consumer works on: what to fetch, what was handed out, what was handled.

Three numbers per partition, never going back but by a seek: `position` (fetched up to here),
`handed` (given to the handler) and the progress (handled). A checkpoint comes from the progress
alone. The group's thread and the consumer's share the desk under one lock; reading the log
happens outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pxrs.core.claims import Holding
from pxrs.core.group import PartState, move
from pxrs.core.progress import Progress
from pxrs.core.records import GroupTopic
from pxrs.runtime.holdings import Mark
from pxrs.types import Fence, LogPartition, Message, TopicPartition


class Seat:
    """One partition at the desk."""

    __slots__ = (
        "at",
        "buffer",
        "checkpoint",
        "done",
        "end",
        "epoch",
        "fence",
        "full",
        "goodbye",
        "handed",
        "key",
        "origin",
        "out",
        "part",
        "paused",
        "position",
        "progress",
        "siblings",
        "state",
        "turn",
        "where",
    )  # fmt: skip

    def __init__(self, holding: Holding, topic: GroupTopic) -> None:
        self.part = holding.part
        self.where = LogPartition(topic.id, holding.part.partition)
        # How many partitions the topic has.
        self.siblings = topic.partitions
        # The claim's: epochs of a topic that was made again start anew.
        self.key = holding.key
        self.epoch = holding.epoch
        self.fence = Fence(holding.part.topic, holding.part.partition, holding.epoch)
        self.state: PartState = "owned"
        self.checkpoint = holding.claim.checkpoint
        self.done = holding.claim.done
        self.paused = False
        # Raised whenever what was handed out before is not to be worked on any more.
        self.turn = 0
        # Whether the caller has been told that it goes, or need not be.
        self.goodbye = True
        # Known once the start is: a claim without a checkpoint has to ask the log first.
        self.progress: Progress | None = None
        self.origin = -1
        # The end of the partition when it was last looked at.
        self.end = -1
        self.position = -1
        self.handed = -1
        self.buffer: list[Message] = []
        self.at = 0
        # How many messages are with others, where that is counted, and whether those are enough.
        self.out = 0
        self.full = False

    @property
    def lag(self) -> int:
        """How many messages wait here, as far as is known."""
        return max(0, self.end - self.progress.checkpoint) if self.progress is not None else 0

    @property
    def window_is_full(self) -> bool:
        """Whether no more gaps can be remembered: the oldest has to close first.

        If that was not handed out, nobody is about to close it: an owner that begins with a full
        window has to go on.
        """
        progress = self.progress
        return progress is not None and progress.full and self.handed > progress.checkpoint

    @property
    def started(self) -> bool:
        return self.progress is not None

    def start(self, offset: int) -> None:
        """Begin at this offset."""
        self.progress = Progress(offset, self.done)
        self.origin = offset
        self.go_to(offset)

    def go_to(self, offset: int) -> None:
        """Fetch from this offset next; what was fetched or handed out before is void."""
        self.position = self.handed = offset
        self.buffer, self.at = [], 0
        self.turn += 1

    def fill(self, messages: list[Message], position: int) -> None:
        """Put fetched messages into the buffer, without those that are done already."""
        progress = self.progress
        if (
            messages
            and progress is not None
            and (progress.runs or messages[0].offset < progress.checkpoint)
        ):
            messages = [message for message in messages if not progress.is_done(message.offset)]
        self.buffer = messages
        self.at = 0
        self.position = position

    @property
    def waiting(self) -> int:
        """How many messages lie in the buffer."""
        return len(self.buffer) - self.at

    def hand_out(self, most: int) -> list[Message]:
        """Take messages from the buffer."""
        if self.at == 0 and most >= len(self.buffer):
            messages, self.buffer = self.buffer, []
        else:
            messages = self.buffer[self.at : self.at + most]
            self.at += len(messages)
        if messages:
            self.handed = messages[-1].offset + 1
        return messages

    def finish(self, start: int, end: int) -> None:
        """The messages from `start` up to `end` were handled."""
        if self.progress is not None:
            self.progress.finish(start, end)

    def mark(self) -> Mark | None:
        """How far it was handled; None before it has started."""
        if self.progress is None:
            return None
        return Mark(self.progress.checkpoint, self.progress.runs)


class Change(NamedTuple):
    """What happened to the assignment, for the callbacks."""

    kind: str
    parts: dict[TopicPartition, int | None]


class ConsumerDesk:
    """All seats. See `pxrs.runtime.membership.Desk` for what the group's thread asks of it."""

    def __init__(
        self,
        *,
        in_hand: Callable[[Seat], bool],
        commits_handled: bool,
        asks_before_release: bool = False,
        most_out: int | None = None,
    ) -> None:
        # Whether somebody works on messages of the seat at this moment. Asked under the lock.
        self._in_hand = in_hand
        self.lock = threading.RLock()
        self.seats: dict[TopicPartition, Seat] = {}
        # Kept across rebalances: a partition that comes back is still paused.
        self.paused: set[TopicPartition] = set()
        self._commits_handled = commits_handled
        self._asks = asks_before_release
        # How many messages may be out at a time. Every partition has an equal share of it: one
        # whose messages do not come back must not keep the others from theirs.
        self._most_out = most_out
        self._order: list[Seat] = []
        self._changes: list[Change] = []
        # Raised with every change: whoever waits for messages looks again.
        self.version = 0

    def claimed(self, holdings: list[Holding], topics: Mapping[str, GroupTopic]) -> None:
        if not holdings:
            return
        with self.lock:
            for holding in holdings:
                seat = Seat(holding, topics[holding.part.topic])
                seat.paused = holding.part in self.paused
                self.seats[holding.part] = seat
            self._changed(
                "assigned", {holding.part: holding.claim.checkpoint for holding in holdings}
            )

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        with self.lock:
            going: dict[TopicPartition, int | None] = {}
            for part, seat in self.seats.items():
                if part in parts and seat.state == "owned":
                    seat.state = move(seat.state, "given up")
                    seat.goodbye = not self._asks
                    seat.go_to(seat.handed)
                    going[part] = None
                elif part not in parts and seat.state == "leaving":
                    seat.state = move(seat.state, "gained")
                    if seat.progress is not None:
                        seat.go_to(seat.progress.checkpoint)
                    self.version += 1
            if going:
                self._changed("leaving", going)

    def releasable(self) -> dict[TopicPartition, Mark | None]:
        with self.lock:
            return {
                part: self._final(seat)
                for part, seat in self.seats.items()
                if seat.state == "leaving" and seat.goodbye and not self._in_hand(seat)
            }

    def final_marks(self) -> dict[TopicPartition, Mark | None]:
        with self.lock:
            return {part: self._final(seat) for part, seat in self.seats.items()}

    def gone(self, parts: Iterable[TopicPartition], *, lost: bool) -> None:
        with self.lock:
            gone: dict[TopicPartition, int | None] = {}
            for part in parts:
                seat = self.seats.pop(part, None)
                if seat is not None:
                    seat.turn += 1
                    gone[part] = None
            if gone:
                self._changed("lost" if lost else "revoked", gone)

    def _final(self, seat: Seat) -> Mark | None:
        return seat.mark() if self._commits_handled else None

    def _changed(self, kind: str, parts: dict[TopicPartition, int | None]) -> None:
        self._order = list(self.seats.values())
        self._changes.append(Change(kind, parts))
        self.version += 1

    # For the consumer

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def changes(self) -> list[Change]:
        """What has happened since the last call, in order."""
        with self.lock:
            changes, self._changes = self._changes, []
            return changes

    def said_goodbye(self, parts: Iterable[TopicPartition]) -> None:
        """The caller knows that these go."""
        with self.lock:
            for part in parts:
                if part in self.seats:
                    self.seats[part].goodbye = True

    def start(self, seat: Seat, offset: int) -> None:
        """Begin a seat at this offset."""
        with self.lock:
            seat.start(offset)

    def restart(self, part: TopicPartition, offset: int) -> None:
        """Go on from another offset, forgetting what was done above it."""
        with self.lock:
            seat = self.seats.get(part)
            if seat is not None:
                seat.checkpoint, seat.done = offset, ()
                seat.start(offset)
                self.version += 1

    def fill(self, seat: Seat, messages: list[Message], position: int) -> bool:
        """Put fetched messages at a seat, unless it went in the meantime."""
        with self.lock:
            if self.seats.get(seat.part) is not seat or seat.state != "owned":
                return False
            seat.fill(messages, position)
            return seat.waiting > 0

    def give_back(self, seat: Seat, handed: int) -> None:
        """What was handed out from this offset on was not looked at."""
        with self.lock:
            seat.go_to(min(seat.handed, handed))

    def rewind(self, seats: Iterable[Seat]) -> None:
        """Go back to what was committed: what was handed out since has to be handled again."""
        with self.lock:
            for seat in seats:
                if self.seats.get(seat.part) is seat:
                    seat.start(seat.origin if seat.checkpoint is None else seat.checkpoint)
                    self.version += 1

    def pause(self, parts: Iterable[TopicPartition], *, paused: bool) -> None:
        """Hand out nothing of these, or go on."""
        with self.lock:
            for part in parts:
                (self.paused.add if paused else self.paused.discard)(part)
                if part in self.seats:
                    self.seats[part].paused = paused
            self.version += 1

    def marks(self) -> dict[TopicPartition, Mark]:
        """How far everything was handled that has moved since it was claimed or committed."""
        with self.lock:
            return {
                part: mark
                for part, seat in self.seats.items()
                if (mark := seat.mark()) is not None
                and (mark.checkpoint, mark.done) != (seat.checkpoint, seat.done)
            }

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """These were written."""
        with self.lock:
            for part, mark in marks.items():
                seat = self.seats.get(part)
                if seat is not None:
                    seat.checkpoint, seat.done = mark.checkpoint, mark.done

    def owned(self) -> list[Seat]:
        """Seats that may be worked on, the one served last at the end."""
        with self.lock:
            return [seat for seat in self._order if seat.state == "owned" and not seat.paused]

    def hungry(self) -> list[Seat]:
        """Owned seats whose buffer is empty."""
        return [
            seat
            for seat in self.owned()
            if not seat.waiting and not seat.full and not seat.window_is_full
        ]

    @property
    def has_messages(self) -> bool:
        """Whether `hand_out` would give any."""
        return any(seat.waiting and not seat.full for seat in self.owned())

    def hand_out(self, most: int) -> list[tuple[Seat, list[Message]]]:
        """Messages from the buffers, at most so many, each partition's in order."""
        out: list[tuple[Seat, list[Message]]] = []
        with self.lock:
            for seat in self.owned():
                if most <= 0:
                    break
                if seat.waiting and (room := min(most, self._room(seat))) > 0:
                    messages = seat.hand_out(room)
                    most -= len(messages)
                    seat.out += len(messages)
                    out.append((seat, messages))
            served = {id(seat) for seat, _ in out}
            self._order.sort(key=lambda seat: id(seat) in served)
        return out

    def came_back(self, seat: Seat) -> bool:
        """A message that was out is handled or given up; whether the seat can give more again."""
        with self.lock:
            seat.out -= 1
            if not seat.full or seat.out > self._share() // 2:
                return False
            seat.full = seat.window_is_full
            return not seat.full

    def _room(self, seat: Seat) -> int:
        """How many more messages of a seat may be out. It is noted if there is no room."""
        if self._most_out is None:
            return seat.waiting
        room = 0 if seat.window_is_full else self._share() - seat.out
        seat.full = room <= 0
        return room

    def _share(self) -> int:
        return max(1, (self._most_out or 0) // max(1, len(self.seats)))
