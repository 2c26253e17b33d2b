"""One partition that a consumer works on: fetched up to here, handed out, handled.

Three numbers, never going back but by a seek: `position` (fetched up to here), `handed` (given to
the handler) and the progress (handled). A checkpoint comes from the progress alone.
"""

from __future__ import annotations

from pxrs.consuming.continuity import LastRead
from pxrs.core.claims import OwnedClaim
from pxrs.core.group import PartState, move
from pxrs.core.progress import Progress
from pxrs.core.records import GroupTopic
from pxrs.groups.owned_claims import Mark
from pxrs.types import Fence, LogPartition, Message


class OwnedPartition:
    """One partition of the table."""

    __slots__ = (
        "asked",
        "buffer",
        "checkpoint",
        "done",
        "end",
        "epoch",
        "fence",
        "full",
        "goodbye",
        "handed",
        "incarnation",
        "key",
        "last_read",
        "origin",
        "out",
        "part",
        "paused",
        "position",
        "progress",
        "released",
        "shown",
        "siblings",
        "size",
        "state",
        "turn",
        "waiting",
        "where",
        "working",
    )  # fmt: skip

    def __init__(self, owned_claim: OwnedClaim, topic: GroupTopic) -> None:
        self.part = owned_claim.part
        self.where = LogPartition(topic.id, owned_claim.part.partition)
        # How many partitions the topic has.
        self.siblings = topic.partitions
        # The claim's key: a topic that was made again has another one.
        self.key = owned_claim.key
        self.epoch = owned_claim.epoch
        self.fence = Fence(owned_claim.part.topic, owned_claim.part.partition, owned_claim.epoch)
        self.state: PartState = move("wanted", "claimed")
        self.checkpoint = owned_claim.claim.checkpoint
        self.done = owned_claim.claim.done
        # A commit that the caller has asked for and that is not made yet.
        self.asked: Mark | None = None
        # Whether it was given away, with its last checkpoint.
        self.released = False
        self.paused = False
        # Raised whenever messages that were handed out must not be worked on any more.
        self.turn = 0
        # Whether the caller knows that it goes, or need not know.
        self.goodbye = True
        # Known once the start is: a claim without a checkpoint has to ask the log first.
        self.progress: Progress | None = None
        self.origin = -1
        # The end of the partition when it was last looked at.
        self.end = -1
        self.position = -1
        # The batch before the position, as far as it was read by this owner.
        self.last_read: LastRead | None = None
        # The incarnation of the log in which it was begun, once that is known.
        self.incarnation: int | None = None
        self.handed = -1
        # Handed out up to here when it was to go and then stayed: the caller still has these.
        self.shown = -1
        self.buffer: list[Message] = []
        # How many messages of the buffer, the last ones, were not handed out.
        self.waiting = 0
        # How many bytes were fetched for the buffer.
        self.size = 0
        # How many messages worker threads have, where that is counted, and whether that is enough.
        self.out = 0
        self.full = False
        # How many worker threads have a message of it in hand. Under the table's lock.
        self.working = 0

    @property
    def lag(self) -> int:
        """The number of messages that wait here, as far as is known."""
        return max(0, self.end - self.progress.checkpoint) if self.progress is not None else 0

    @property
    def window_is_full(self) -> bool:
        """Whether no more gaps can be remembered: the oldest has to close first.

        If the oldest was not handed out, nothing is about to close it: an owner that begins with a
        full window has to go on.
        """
        progress = self.progress
        return progress is not None and progress.full and self.handed > progress.checkpoint

    @property
    def started(self) -> bool:
        return self.progress is not None

    def gap(self) -> Mark | None:
        """Its progress, if all that was handed out is committed: then the source has a gap."""
        since = self.origin if self.checkpoint is None else self.checkpoint
        if self.handed > since or self.asked is not None or self.shown > since:
            return None
        mark = self.moved()
        # To have begun is no progress: a caller who commits by itself has committed nothing.
        return mark if mark is not None and mark.checkpoint > since else None

    def start(self, offset: int) -> None:
        """Begin at this offset."""
        self.progress = Progress(offset, self.done)
        self.asked = None
        self.origin = offset
        self.go_to(offset)
        self.shown = -1

    def rewind(self) -> None:
        """Go back to what was committed, or was asked to be: a caller that asked relies on it."""
        asked = self.asked
        self.start(self.origin if self.checkpoint is None else self.checkpoint)
        if asked is not None:
            self.progress, self.asked = Progress(asked.checkpoint, asked.done), asked
            self.go_to(asked.checkpoint)

    def found(self, owned_claim: OwnedClaim) -> None:
        """Adopt the checkpoint of the claim, which differs from the one known here."""
        self.checkpoint, self.done = owned_claim.claim.checkpoint, owned_claim.claim.done
        if self.asked is not None and (self.checkpoint or 0) >= self.asked.checkpoint:
            self.asked = None

    def go_to(self, offset: int) -> None:
        """Fetch from this offset next; messages fetched or handed out before are void."""
        self.position = self.handed = offset
        self.buffer, self.waiting = [], 0
        self.turn += 1
        # `hand_out` counts anew.
        self.full = False

    def stay(self) -> None:
        """Keep a partition that was to go: messages that a loop has not shown are fetched again."""
        self.goodbye = True
        if self.progress is not None:
            self.shown = max(self.shown, self.handed)
            self.go_to(self.progress.checkpoint)

    def fill(self, messages: list[Message], position: int) -> None:
        """Put fetched messages into the buffer, without those that are done already.

        They are all that there is from the partition's position up to the new one.
        """
        progress = self.progress
        if (
            messages
            and progress is not None
            and (progress.ranges or messages[0].offset < progress.checkpoint)
        ):
            messages = [message for message in messages if not progress.is_done(message.offset)]
        if progress is not None and position - self.position != len(messages):
            progress.found(self.position, [message.offset for message in messages], position)
        self.buffer, self.waiting = messages, len(messages)
        self.position = position

    def forget_buffer(self) -> None:
        """Drop what was fetched and not handed out; it will be fetched again."""
        self.buffer, self.waiting = [], 0
        self.position = self.handed

    def hand_out(self, most: int) -> list[Message]:
        """Take messages from the buffer."""
        at = len(self.buffer) - self.waiting
        if at == 0 and most >= self.waiting:
            messages, self.buffer = self.buffer, []
        else:
            messages = self.buffer[at : at + most]
        self.waiting -= len(messages)
        if messages:
            self.handed = messages[-1].offset + 1
        return messages

    def finish(self, start: int, end: int) -> None:
        """Note that the messages from `start` up to `end` were handled."""
        if self.progress is not None:
            self.progress.finish(start, end)

    def mark(self) -> Mark | None:
        """Its progress; None before it has started."""
        if self.progress is None:
            return None
        return Mark(self.progress.checkpoint, self.progress.ranges)

    def moved(self) -> Mark | None:
        """Its progress, if that is further than what is committed."""
        mark = self.mark()
        if mark is None or (mark.checkpoint, mark.done) == (self.checkpoint, self.done):
            return None
        return mark
