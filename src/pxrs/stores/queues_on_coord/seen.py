"""Dedupe keys: until when they count, by the wall clock of who puts."""

from __future__ import annotations

import msgspec

from pxrs.stores.queue_rules import delay_ms
from pxrs.stores.queues_on_coord.draft import Draft
from pxrs.stores.queues_on_coord.layout import Layout, decode, encode


class SeenRecord(msgspec.Struct, frozen=True):
    until_ms: int


class Seen:
    """The dedupe keys that one draft has to do with."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._added: set[str] = set()

    def add(self, at: Layout, dedupe: str, window: float) -> bool:
        """Whether it is new; then it counts from now on."""
        key = at.seen(dedupe)
        if key in self._added:
            return False
        found = self._draft.coord.get(key)
        if found is not None and is_seen(found.value, self._draft.now_ms):
            return False
        self._added.add(key)
        self._draft.require(key, 0 if found is None else found.version)
        self._draft.put(key, encode(SeenRecord(self._draft.now_ms + delay_ms(window))))
        return True


def is_seen(value: bytes, now_ms: int) -> bool:
    return decode(value, SeenRecord).until_ms > now_ms
