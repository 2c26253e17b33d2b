"""The partitions a consumer works on: what to fetch, what was handed out, what was handled.

Each has a `Seat`. The group's thread and the consumer's share the desk under one lock; reading
the log happens outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from pxrs.consuming.owned_partition import Seat
from pxrs.core.claims import Holding
from pxrs.core.group import move
from pxrs.core.records import GroupTopic
from pxrs.groups.owned_claims import Mark
from pxrs.types import Message, TopicPartition


class Change(NamedTuple):
    """What the caller has to be told of its assignment: "assigned", "leaving" or "lost"."""

    kind: str
    parts: dict[TopicPartition, int | None]


class ConsumerDesk:
    """All seats. See `pxrs.groups.membership.Desk` for what the group's thread asks of it."""

    def __init__(
        self,
        *,
        in_hand: Callable[[Seat], bool],
        commits_handled: bool,
        asks_before_release: bool = False,
        most_out: int | None = None,
        recall: Callable[[], None] = lambda: None,
    ) -> None:
        # Whether somebody works on messages of the seat at this moment. Asked under the lock.
        self._in_hand = in_hand
        self.lock = threading.RLock()
        self.seats: dict[TopicPartition, Seat] = {}
        # Kept across rebalances: a partition that comes back is still paused.
        self.paused: set[TopicPartition] = set()
        self._commits_handled = commits_handled
        self._asks = asks_before_release
        # Lets the caller come back soon. Called under the lock.
        self._recall = recall
        # How many messages may be out at a time. Every partition has an equal share of it: one
        # whose messages do not come back must not keep the others from theirs.
        self._most_out = most_out
        self._order: list[Seat] = []
        # What the caller believes to own. It is told the difference, not what has happened: it
        # need not hear of what came and went, and is never asked to tidy up what it has lost.
        self._told: dict[TopicPartition, Seat] = {}
        self.has_changes = False
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
            self._changed()

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        with self.lock:
            changed = False
            for part, seat in self.seats.items():
                if part in parts and seat.state == "owned":
                    seat.state = move(seat.state, "given up")
                    seat.goodbye = not self._asks
                    seat.go_to(seat.handed)
                    changed = True
                    self._recall()
                elif part not in parts and seat.state == "leaving":
                    seat.state = move(seat.state, "gained")
                    seat.stay()
                    changed = True
            if changed:
                self._changed()

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
            gone = [seat for part in parts if (seat := self.seats.pop(part, None)) is not None]
            for seat in gone:
                seat.turn += 1
                seat.released = not lost
                if not lost:
                    self._told.pop(seat.part, None)
            if gone:
                self._changed()

    def _final(self, seat: Seat) -> Mark | None:
        return seat.mark() if self._commits_handled else seat.asked

    def _changed(self) -> None:
        self._order = list(self.seats.values())
        self.has_changes = True
        self.version += 1

    # For the consumer

    def next_change(self) -> Change | None:
        """What the caller has to be told next; from now on it counts as told."""
        with self.lock:
            told = self._told
            if lost := [part for part, seat in told.items() if self.seats.get(part) is not seat]:
                return self._change("lost", lost)
            for part, seat in self.seats.items():
                if part not in told and seat.state == "leaving":
                    seat.goodbye = True
            if going := [part for part, seat in told.items() if not seat.goodbye]:
                return self._change("leaving", going)
            new = [part for part, seat in self.seats.items() if self._is_news(part, seat)]
            if new:
                return self._change("assigned", new)
            self.has_changes = False
            return None

    def forget_told(self) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """What the caller believes to own and does, and what it has lost; that ends here."""
        with self.lock:
            told, self._told = self._told, {}
            kept = {part for part, seat in told.items() if self.seats.get(part) is seat}
            return kept, told.keys() - kept

    def _is_news(self, part: TopicPartition, seat: Seat) -> bool:
        return seat.state == "owned" and part not in self._told

    def _change(self, kind: str, parts: list[TopicPartition]) -> Change:
        for part in parts:
            if kind == "assigned":
                self._told[part] = self.seats[part]
            else:
                del self._told[part]
        checkpoints = {part: self.seats[part].checkpoint for part in parts if part in self.seats}
        return Change(kind, {part: checkpoints.get(part) for part in parts})

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

    def fill(self, seat: Seat, turn: int, messages: list[Message], position: int) -> bool:
        """Put fetched messages at a seat, unless it went, or was sent elsewhere, meanwhile."""
        with self.lock:
            if self.seats.get(seat.part) is not seat or seat.state != "owned":
                return False
            if seat.turn != turn:
                return False
            seat.fill(messages, position)
            return seat.waiting > 0

    def give_back(self, seat: Seat, handed: int) -> None:
        """What was handed out from this offset on was not looked at."""
        with self.lock:
            seat.go_to(min(seat.handed, handed))

    def hand_out_again(self) -> None:
        """Go back to what was handled, everywhere; nothing of it is taken back."""
        with self.lock:
            for seat in self.seats.values():
                if seat.progress is not None:
                    seat.go_to(seat.progress.checkpoint)

    def rewind(self, seats: Iterable[Seat]) -> None:
        """Go back to what was committed: what was handed out since has to be handled again."""
        with self.lock:
            for seat in seats:
                if self.seats.get(seat.part) is seat:
                    seat.rewind()
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
                if seat.has_moved and (mark := seat.mark()) is not None
            }

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """These were written."""
        with self.lock:
            for part, mark in marks.items():
                seat = self.seats.get(part)
                if seat is not None:
                    seat.checkpoint, seat.done = mark.checkpoint, mark.done
                    if seat.asked is not None and mark.checkpoint >= seat.asked.checkpoint:
                        seat.asked = None

    def ask(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """These shall be committed, at the latest when the partitions are given away."""
        with self.lock:
            for part, mark in marks.items():
                self.seats[part].asked = mark

    def asked(self) -> dict[TopicPartition, Mark]:
        """What shall be committed and is not yet."""
        with self.lock:
            seats = self.seats.items()
            return {part: seat.asked for part, seat in seats if seat.asked is not None}

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

    def forget_idle(self, most_bytes: int) -> None:
        """Drop what lies ready for seats that can't be served now, if it is more than so much."""
        with self.lock:
            idle = [seat for seat in self.seats.values() if seat.waiting]
            idle = [seat for seat in idle if seat.full or seat.paused]
            if sum(seat.size for seat in idle) > most_bytes:
                for seat in idle:
                    seat.forget_buffer()

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
