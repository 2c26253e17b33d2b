"""One member of a group that a node holds for a remote client: what it owns and was last sent.

The client polls, and is answered from here; the node can't call it. So a partition that goes to
another member is given up in two steps: the next answer that shows the client its partitions leaves
this one out; when the client has sent another request after that, or did not in time, the partition
is released. Requests whose answers show no partitions, and those that the client may have sent
before it had such an answer, are signs of life and no more. This module uses no clock and no store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pxrs.core.claims import OwnedClaim
from pxrs.core.records import GroupTopic
from pxrs.groups.owned_claims import Mark
from pxrs.types import TopicPartition


class Owned(NamedTuple):
    """A partition that the client may work on, and how far the group has come in it."""

    topic_id: str
    epoch: int
    checkpoint: int | None


class Leaving(NamedTuple):
    """A partition that is to be given up. `told`: the first answer that left it out, and when."""

    since: float
    told: tuple[int, float] | None = None


class HeldMember:
    """State shared by the group's thread and the client's requests; `PartitionWork` of the group.

    `asked` counts the requests of a client that has seen the answers before; `tell` is the answer
    with the partitions that it owns and that are not leaving. A partition is released once the
    client has asked after the answer that left it out, and `notice` seconds after that answer; at
    the latest `patience` seconds after it began to leave. Thread-safe.
    """

    def __init__(
        self, now: float, session_timeout: float, patience: float, notice: float = 0.0
    ) -> None:
        self.session_timeout = session_timeout
        self._patience = patience
        self._notice = notice
        self._lock = threading.Lock()
        self._now = now
        self.heard_at = now
        self.asked = 0
        # Whether the latest answer was the first one to leave a partition out.
        self.told_news = False
        self._owned: dict[TopicPartition, Owned] = {}
        self._leaving: dict[TopicPartition, Leaving] = {}

    # The client's side

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        with self._lock:
            self.heard_at = max(self.heard_at, now)

    def ask(self, now: float) -> None:
        """Note a request: the client is alive, and has seen what it was told before."""
        with self._lock:
            self.heard_at = max(self.heard_at, now)
            self.asked += 1

    def tell(self) -> dict[TopicPartition, Owned]:
        """The partitions that the client is shown now."""
        with self._lock:
            self.told_news = False
            for part, leaving in self._leaving.items():
                if leaving.told is None:
                    self._leaving[part] = leaving._replace(told=(self.asked, self.heard_at))
                    self.told_news = True
            return self._shown()

    @property
    def shown(self) -> frozenset[TopicPartition]:
        """The partitions that an answer would show now."""
        with self._lock:
            return frozenset(self._shown())

    @property
    def parts(self) -> frozenset[TopicPartition]:
        """The partitions that the client may commit: all it owns, until they are released."""
        with self._lock:
            return frozenset(self._owned)

    @property
    def is_leaving(self) -> bool:
        """Whether partitions are being given up."""
        return bool(self._leaving)

    @property
    def has_news(self) -> bool:
        """Whether the next answer is the first one that leaves a partition out."""
        with self._lock:
            return any(leaving.told is None for leaving in self._leaving.values())

    def silent_until(self) -> float:
        """When the client counts as gone if it sends nothing more."""
        return self.heard_at + self.session_timeout

    def committed(self, checkpoints: Mapping[TopicPartition, int | None]) -> None:
        """Note the group's new checkpoints; one that is noted late does not go back."""
        with self._lock:
            for part, checkpoint in checkpoints.items():
                owned = self._owned.get(part)
                if owned is None or checkpoint is None or checkpoint < (owned.checkpoint or 0):
                    continue
                self._owned[part] = owned._replace(checkpoint=checkpoint)

    # The group's side

    def tick(self, now: float) -> None:
        """Set the time that `leaving` and `releasable` use."""
        self._now = now

    def claimed(self, owned_claims: list[OwnedClaim], topics: Mapping[str, GroupTopic]) -> None:
        with self._lock:
            for claim in owned_claims:
                topic_id = topics[claim.part.topic].id
                self._owned[claim.part] = Owned(topic_id, claim.epoch, claim.claim.checkpoint)
                self._leaving.pop(claim.part, None)

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        with self._lock:
            self._leaving = {
                part: self._leaving.get(part, Leaving(self._now))
                for part in parts & self._owned.keys()
            }

    def releasable(self) -> dict[TopicPartition, Mark | None]:
        with self._lock:
            return {part: None for part, leaving in self._leaving.items() if self._is_over(leaving)}

    def release_due(self) -> float | None:
        """When the next partition is released if the client does not ask again."""
        with self._lock:
            return min(map(self._due, self._leaving.values()), default=None)

    def final_marks(self) -> dict[TopicPartition, Mark | None]:
        return dict.fromkeys(self.parts)

    def gone(self, parts: Iterable[TopicPartition], *, lost: bool) -> None:
        with self._lock:
            for part in parts:
                self._owned.pop(part, None)
                self._leaving.pop(part, None)

    def _shown(self) -> dict[TopicPartition, Owned]:
        return {part: it for part, it in self._owned.items() if part not in self._leaving}

    def _due(self, leaving: Leaving) -> float:
        latest = leaving.since + self._patience
        if leaving.told is None or self.asked <= leaving.told[0]:
            return latest
        return min(latest, leaving.told[1] + self._notice)

    def _is_over(self, leaving: Leaving) -> bool:
        return self._now >= self._due(leaving)
