"""What a consumer's caller wants to hear of rebalances."""

from __future__ import annotations

from collections.abc import Callable

from pxrs.errors import InvalidRequest
from pxrs.types import TopicPartition

Parts = set[TopicPartition]


class Callbacks:
    """What to call. It happens in the consuming thread, and in the one that closes."""

    __slots__ = ("assigned", "lost", "revoked")

    def __init__(
        self,
        assigned: Callable[[dict[TopicPartition, int | None]], None] | None,
        revoked: Callable[[Parts], None] | None,
        lost: Callable[[Parts], None] | None,
    ) -> None:
        for name, callback in (("assigned", assigned), ("revoked", revoked), ("lost", lost)):
            if callback is not None and not callable(callback):
                raise InvalidRequest(f"on_{name}={callback!r}; a function is needed")
        self.assigned = assigned
        self.revoked = revoked
        self.lost = lost
