"""Nodes that are broken in one place; what their clients are told has to show it.

Each function breaks the process that calls it. `NodeProcess(broken=…)` starts such a node.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Any

from pxrs.core import kv
from pxrs.core.kv import Change, Draft, Head, KeyBatch, Written, shard_of, slot_of_shard
from pxrs.errors import OutcomeUnknown, PxrsError
from pxrs.kv.store import KeyValues
from pxrs.server.cluster import ClusterView
from pxrs.server.keys import KeyService
from pxrs.server.remote.node_keys import NodeKeys
from pxrs.types import Check, Entry, Version

_HEARS_LATE = 1.0
_COMMITS_LATE = 0.3
# One of so many batches gets no answer.
_ANSWERS_LOST = 5


def reads_from_memory_while_it_leads() -> None:
    """Answers from memory for keys that it leads, as far as it knows, and asks nobody.

    It hears a little late that it does not lead any more, and not at all if it leads again by then.
    """
    read, write, lead = KeyValues._read, KeyValues._do_all, KeyService.lead
    memory: dict[bytes, Entry | None] = {}
    led: set[int] = set()
    writes_of: Counter[bytes] = Counter()

    def note_led(self: KeyService, view: ClusterView) -> None:
        lead(self, view)
        led.update(self._led)
        threading.Timer(_HEARS_LATE, hear, [self]).start()

    def hear(self: KeyService) -> None:
        lost = led - self._led
        led.difference_update(lost)
        for key in [key for key in list(memory) if slot_of_shard(shard_of(key)) in lost]:
            memory.pop(key, None)

    def remembered(self: KeyValues, key: bytes) -> Entry | None:
        if slot_of_shard(shard_of(key)) not in led:
            return read(self, key)
        if key in memory:
            return memory[key]
        before = writes_of[key]
        found = read(self, key)
        if before == writes_of[key]:
            memory[key] = found
        return found

    def writes(self: KeyValues, batches: Any) -> Any:
        try:
            return write(self, batches)
        finally:
            for batch in batches:
                for change in batch.changes:
                    writes_of[change.key] += 1
                    memory.pop(change.key, None)

    KeyValues._read = remembered  # type: ignore[method-assign]
    KeyValues._do_all = writes  # type: ignore[method-assign]
    KeyService.lead = note_led  # type: ignore[method-assign]


def does_not_check_the_head() -> None:
    """Commits whether or not others have written to the shard since."""
    checks: Any = Draft.checks

    def unfenced(self: Draft) -> list[Check]:
        return [it for it in checks.fget(self) if not it.key.startswith(kv.HEADS)]

    Draft.checks = property(unfenced)  # type: ignore[assignment]


def forgets_idempotency_keys() -> None:
    """Makes a write again that was made before."""
    add = Draft.add

    def forgetful(self: Draft, change: Change) -> Written | PxrsError:
        return add(self, change._replace(once=""))

    Draft.add = forgetful  # type: ignore[method-assign]


def answers_before_it_commits() -> None:
    """Says that a put is done, with the version that it is going to have, and does it later."""
    write, write_batch = KeyService.write, NodeKeys.write
    late: set[asyncio.Task[object]] = set()

    async def commit(self: KeyService, change: Change) -> None:
        await asyncio.sleep(_COMMITS_LATE)
        await write(self, change)

    async def promise(self: KeyService, change: Change) -> Written:
        head = self._keys._heads.get(shard_of(change.key))
        if change.reads or head is None:
            return await write(self, change)
        coming: Coroutine[Any, Any, None] = commit(self, change)
        task = asyncio.create_task(coming)
        late.add(task)
        task.add_done_callback(late.discard)
        return Written(Version(head.head.term, head.head.index + 1))

    def promise_batch(
        self: NodeKeys, writer: str, number: int, changes: list[Change], again: bool
    ) -> list[Written | PxrsError]:
        head = self._keys._heads.get(shard_of(changes[0].key))
        if again or len(changes) > 1 or changes[0].reads or head is None:
            return write_batch(self, writer, number, changes, again)
        threading.Timer(_COMMITS_LATE, write_batch, (self, writer, number, changes, again)).start()
        return [Written(Version(head.head.term, head.head.index + 1))]

    KeyService.write = promise  # type: ignore[method-assign]
    NodeKeys.write = promise_batch  # type: ignore[method-assign]


def loses_answers() -> None:
    """Writes a batch and does not say so, now and then: this harms nobody."""
    write = NodeKeys.write
    batches = count(1)

    def write_silently(
        self: NodeKeys, writer: str, number: int, changes: list[Change], again: bool
    ) -> list[Written | PxrsError]:
        answers = write(self, writer, number, changes, again)
        if next(batches) % _ANSWERS_LOST == 0:
            raise OutcomeUnknown("the answer was lost")
        return answers

    NodeKeys.write = write_silently  # type: ignore[method-assign]


def forgets_writers() -> None:
    """Makes a batch again that is sent again because its answer was lost."""
    loses_answers()

    def forgetful(self: Draft, batch: KeyBatch) -> list[Written | PxrsError]:
        return [self.add(change) for change in batch.changes]

    Draft.add_batch = forgetful  # type: ignore[method-assign]


def begins_to_count_again() -> None:
    """Begins with the first index, in the same term, when it takes a shard over."""
    advance = Draft._advance

    def restarted(self: Draft, shard: int) -> Version:
        if shard in self._leads and shard not in self._heads:
            known = self.known[shard]
            self.known[shard] = known._replace(head=Head(term=known.head.term))
            self._leads -= {shard}
        return advance(self, shard)

    Draft._advance = restarted  # type: ignore[method-assign]
