"""The partitions of a consumer: what to fetch, what was handed out, what was handled.

Each is an `OwnedPartition`. The group's thread and the consumer's share the table under one lock;
reading the log happens outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pxrs.consuming.continuity import LastRead
from pxrs.consuming.in_hand import InFlight
from pxrs.consuming.owned_partition import OwnedPartition
from pxrs.core.claims import OwnedClaim
from pxrs.core.group import move
from pxrs.core.records import GroupTopic
from pxrs.groups.owned_claims import Mark
from pxrs.types import Message, TopicPartition


class Change(NamedTuple):
    """A change of the assignment to report: "assigned", "leaving" or "lost"."""

    kind: str
    parts: dict[TopicPartition, int | None]


class PartitionTable:
    """All partitions. See `PartitionWork` for the part that the group's thread calls."""

    def __init__(
        self,
        *,
        commits_handled: bool,
        asks_before_release: bool = False,
        most_out: int | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.partitions: dict[TopicPartition, OwnedPartition] = {}
        # What the caller has in hand, or is about to get from its loop.
        self.in_flight: list[InFlight] = []
        # Kept across rebalances: a partition that comes back is still paused.
        self.paused: set[TopicPartition] = set()
        self._commits_handled = commits_handled
        self._asks = asks_before_release
        # How many messages may be out at a time. Every partition has an equal share of it: one
        # whose messages do not come back must not use up that of the others.
        self._most_out = most_out
        self._order: list[OwnedPartition] = []
        # What the caller believes to own. The difference is reported, not each event: the caller
        # need not hear of what came and went, and is never asked to tidy up what it has lost.
        self._told: dict[TopicPartition, OwnedPartition] = {}
        self.has_changes = False
        # Raised with every change: a thread that waits for messages looks again.
        self.version = 0

    def claimed(self, owned_claims: list[OwnedClaim], topics: Mapping[str, GroupTopic]) -> None:
        if not owned_claims:
            return
        with self.lock:
            for owned_claim in owned_claims:
                owned = OwnedPartition(owned_claim, topics[owned_claim.part.topic])
                owned.paused = owned_claim.part in self.paused
                self.partitions[owned_claim.part] = owned
            self._changed()

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        with self.lock:
            changed = False
            for part, owned in self.partitions.items():
                if part in parts and owned.state == "owned":
                    owned.state = move(owned.state, "given up")
                    owned.goodbye = not self._asks
                    owned.go_to(owned.handed)
                    changed = True
                    for flight in self.in_flight:
                        flight.recall()
                elif part not in parts and owned.state == "leaving":
                    owned.state = move(owned.state, "gained")
                    owned.stay()
                    changed = True
            if changed:
                self._changed()

    def releasable(self) -> dict[TopicPartition, Mark | None]:
        with self.lock:
            return {
                part: self._final(owned)
                for part, owned in self.partitions.items()
                if owned.state == "leaving" and owned.goodbye and not self._in_hand(owned)
            }

    def _in_hand(self, owned: OwnedPartition) -> bool:
        """Whether the caller, or one of its worker threads, works on messages of the partition."""
        return owned.working > 0 or any(
            flight.owned is owned and not flight.is_void for flight in self.in_flight
        )

    def final_marks(self) -> dict[TopicPartition, Mark | None]:
        with self.lock:
            return {part: self._final(owned) for part, owned in self.partitions.items()}

    def gone(self, parts: Iterable[TopicPartition], *, lost: bool) -> None:
        with self.lock:
            gone = [
                owned for part in parts if (owned := self.partitions.pop(part, None)) is not None
            ]
            for owned in gone:
                owned.turn += 1
                if owned.state == "owned" and not lost:
                    # The member leaves the group: it has no target any more.
                    owned.state = move(owned.state, "given up")
                owned.state = move(owned.state, "fenced" if lost else "released")
                owned.released = not lost
                if not lost:
                    self._told.pop(owned.part, None)
            if gone:
                self._changed()

    def _final(self, owned: OwnedPartition) -> Mark | None:
        return owned.mark() if self._commits_handled else owned.asked

    def _changed(self) -> None:
        self._order = list(self.partitions.values())
        self.has_changes = True
        self.version += 1

    # For the consumer

    def next_change(self) -> Change | None:
        """Returns the next change to report; from now on it counts as reported."""
        with self.lock:
            told = self._told
            if lost := [
                part for part, owned in told.items() if self.partitions.get(part) is not owned
            ]:
                return self._change("lost", lost)
            for part, owned in self.partitions.items():
                if part not in told and owned.state == "leaving":
                    owned.goodbye = True
            if going := [part for part, owned in told.items() if not owned.goodbye]:
                return self._change("leaving", going)
            new = [part for part, owned in self.partitions.items() if self._is_news(part, owned)]
            if new:
                return self._change("assigned", new)
            self.has_changes = False
            return None

    def forget_told(self) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Returns the partitions reported to the caller: those still owned, and those lost."""
        with self.lock:
            told, self._told = self._told, {}
            kept = {part for part, owned in told.items() if self.partitions.get(part) is owned}
            return kept, told.keys() - kept

    def _is_news(self, part: TopicPartition, owned: OwnedPartition) -> bool:
        return owned.state == "owned" and part not in self._told

    def _change(self, kind: str, parts: list[TopicPartition]) -> Change:
        for part in parts:
            if kind == "assigned":
                self._told[part] = self.partitions[part]
            else:
                del self._told[part]
        checkpoints = {
            part: self.partitions[part].checkpoint for part in parts if part in self.partitions
        }
        return Change(kind, {part: checkpoints.get(part) for part in parts})

    def said_goodbye(self, parts: Iterable[TopicPartition]) -> None:
        """Note that the caller knows that these go."""
        with self.lock:
            for part in parts:
                if part in self.partitions:
                    self.partitions[part].goodbye = True

    def start(self, owned: OwnedPartition, offset: int) -> None:
        """Begin a partition at this offset."""
        with self.lock:
            owned.start(offset)

    def restart(self, part: TopicPartition, offset: int) -> None:
        """Go on from another offset, forgetting what was done above it."""
        with self.lock:
            owned = self.partitions.get(part)
            if owned is not None:
                owned.checkpoint, owned.done = offset, ()
                owned.last_read = None
                owned.incarnation = None
                owned.start(offset)
                self.version += 1

    def fill(
        self,
        owned: OwnedPartition,
        turn: int,
        messages: list[Message],
        position: int,
        last_read: LastRead | None = None,
    ) -> bool:
        """Put fetched messages into a partition, unless it went, or moved on, meanwhile."""
        with self.lock:
            if self.partitions.get(owned.part) is not owned or owned.state != "owned":
                return False
            if owned.turn != turn:
                return False
            owned.fill(messages, position)
            owned.last_read = last_read
            return owned.waiting > 0

    def give_back(self, owned: OwnedPartition, handed: int) -> None:
        """Give back what was handed out from this offset on: it was not handled."""
        with self.lock:
            owned.go_to(min(owned.handed, handed))

    def hand_out_again(self) -> None:
        """Go back, in all partitions, to what was handled; that stays handled."""
        with self.lock:
            for owned in self.partitions.values():
                if owned.progress is not None:
                    owned.go_to(owned.progress.checkpoint)

    def rewind(self, partitions: Iterable[OwnedPartition]) -> None:
        """Go back to what was committed: what was handed out since has to be handled again."""
        with self.lock:
            for owned in partitions:
                if self.partitions.get(owned.part) is owned:
                    owned.rewind()
                    self.version += 1

    def pause(self, parts: Iterable[TopicPartition], *, paused: bool) -> None:
        """Hand out nothing of these, or go on."""
        with self.lock:
            for part in parts:
                (self.paused.add if paused else self.paused.discard)(part)
                if part in self.partitions:
                    self.partitions[part].paused = paused
            self.version += 1

    def marks(self) -> dict[TopicPartition, Mark]:
        """Returns the progress of all that moved since it was claimed or committed."""
        with self.lock:
            return {
                part: mark
                for part, owned in self.partitions.items()
                if (mark := owned.moved()) is not None
            }

    def empty_marks(self) -> dict[TopicPartition, Mark]:
        """Returns the progress of partitions that moved though nothing of them was handed out."""
        with self.lock:
            return {
                part: mark
                for part, owned in self.partitions.items()
                if (mark := owned.gap()) is not None
            }

    def committed(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """Note that these marks were written."""
        with self.lock:
            for part, mark in marks.items():
                owned = self.partitions.get(part)
                if owned is not None:
                    owned.checkpoint, owned.done = mark.checkpoint, mark.done
                    if owned.asked is not None and mark.checkpoint >= owned.asked.checkpoint:
                        owned.asked = None

    def ask(self, marks: Mapping[TopicPartition, Mark]) -> None:
        """Note marks to be committed, at the latest when the partitions are given up."""
        with self.lock:
            for part, mark in marks.items():
                self.partitions[part].asked = mark

    def asked(self) -> dict[TopicPartition, Mark]:
        """Returns the marks that were asked to be committed and are not yet."""
        with self.lock:
            partitions = self.partitions.items()
            return {part: owned.asked for part, owned in partitions if owned.asked is not None}

    def owned(self) -> list[OwnedPartition]:
        """Partitions that may be worked on; those served last are at the end."""
        with self.lock:
            return [owned for owned in self._order if owned.state == "owned" and not owned.paused]

    def hungry(self) -> list[OwnedPartition]:
        """Owned partitions whose buffer is empty."""
        return [
            owned
            for owned in self.owned()
            if not owned.waiting and not owned.full and not owned.window_is_full
        ]

    def forget_idle(self, most_bytes: int) -> None:
        """Drop buffers of partitions that can't be served now, if they are too large together."""
        with self.lock:
            idle = [owned for owned in self.partitions.values() if owned.waiting]
            idle = [owned for owned in idle if owned.full or owned.paused]
            if sum(owned.size for owned in idle) > most_bytes:
                for owned in idle:
                    owned.forget_buffer()

    @property
    def has_messages(self) -> bool:
        """Whether `hand_out` would give any."""
        return any(owned.waiting and not owned.full for owned in self.owned())

    def hand_out(self, most: int) -> list[InFlight]:
        """Messages from the buffers, at most `most`, each partition's in order."""
        out: list[InFlight] = []
        with self.lock:
            for owned in self.owned():
                if most <= 0:
                    break
                if owned.waiting and (room := min(most, self._room(owned))) > 0:
                    messages = owned.hand_out(room)
                    most -= len(messages)
                    owned.out += len(messages)
                    out.append(InFlight(owned, messages))
            if out:
                served = dict.fromkeys(flight.owned for flight in out)
                self._order = [owned for owned in self._order if owned not in served]
                self._order += served
        return out

    def came_back(self, owned: OwnedPartition) -> bool:
        """Note that a message was handled or given up; returns whether there is room again."""
        with self.lock:
            owned.out -= 1
            if not owned.full or owned.out > self._share() // 2:
                return False
            owned.full = owned.window_is_full
            return not owned.full

    def _room(self, owned: OwnedPartition) -> int:
        """Returns how many more messages of a partition may be out. Notes if there is no room."""
        if self._most_out is None:
            return owned.waiting
        room = 0 if owned.window_is_full else self._share() - owned.out
        owned.full = room <= 0
        return room

    def _share(self) -> int:
        return max(1, (self._most_out or 0) // max(1, len(self.partitions)))
