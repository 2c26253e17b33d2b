"""`px.kv` over `pxrs://`: each write goes to the node that leads its key, and happens once.

The writes of concurrent threads to one node travel as one batch, in a lane (see `pxrs.core.kv`). A
batch whose answer is lost is sent again, through whichever node answers, and is answered as it was
the first time, or written now.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import count

from pxrs.client.client import Client
from pxrs.client.topology import NodeAddress
from pxrs.clock import Clock
from pxrs.core import kv
from pxrs.core.kv import Change, KeyBatch, Written
from pxrs.errors import NotLeader, OutcomeUnknown, PermissionDenied, PxrsError
from pxrs.kv.group_commit import GroupCommit, Waiting
from pxrs.kv.store import Answers, KeyValues, check_ttl
from pxrs.stores.api import CoordStore
from pxrs.types import Entry, Limits

# A round trip to a node takes some of these.
_PAUSE = 0.0003
_MOST_READ = 100
# Nodes forget a lane that was not used for an hour.
_LONGEST_REST = 1800.0


class LedKeys(KeyValues):
    """See `KeyValues`. What is written and read alone goes to the leading node."""

    def __init__(self, coord: CoordStore, clock: Clock, client: Client) -> None:
        super().__init__(coord, clock)
        self._client = client
        self._name = secrets.token_hex(8)
        self._lane_numbers = count()
        self._lane_of: dict[NodeAddress | None, WritingLane] = {}
        self._reading_of: dict[NodeAddress | None, Reading] = {}

    def _do_all(self, batches: Sequence[KeyBatch]) -> list[Answers | BaseException]:
        return [[self._write(change) for change in batch.changes] for batch in batches]

    def _write(self, change: Change) -> Written | PxrsError:
        try:
            lane = self._lane_to(self._client._node_for(change.key))
            return lane.group.do(change)
        except PxrsError as error:
            return error
        finally:
            self._forget_seen(change.key)

    def _lane_to(self, node: NodeAddress | None) -> WritingLane:
        lane = self._lane_of.get(node)
        if lane is None:
            new = WritingLane(self._client, node, self._new_name, self._coord.limits)
            lane = self._lane_of.setdefault(node, new)
        return lane

    def _new_name(self) -> str:
        return f"{self._name}.{next(self._lane_numbers)}"

    def _read(self, key: bytes) -> Entry | None:
        return self._reading_to(self._client._node_for(key)).group.do(key)

    def _reading_to(self, node: NodeAddress | None) -> Reading:
        reading = self._reading_of.get(node)
        if reading is None:
            reading = self._reading_of.setdefault(node, Reading(self._client, node))
        return reading

    def _ttl_ms(self, ttl: float | None) -> int:
        # Whether the nodes can is for them to say.
        return check_ttl(ttl)


class Reading:
    """Reads through one node: those that wait travel together."""

    def __init__(self, client: Client, node: NodeAddress | None) -> None:
        self.group: GroupCommit[bytes, Entry | None] = GroupCommit(self._read, _PAUSE)
        self._client = client
        self._node = node

    def _read(self, waiting: Sequence[Waiting[bytes, Entry | None]]) -> None:
        """Reads as many as fit into an answer, and settles them. By one thread at a time."""
        try:
            answers = self._ask([it.work for it in waiting[:_MOST_READ]])
        except PermissionDenied as error:
            if len(waiting) > 1:
                # It may be for one key only.
                for each in waiting[:_MOST_READ]:
                    self._read([each])
                return
            waiting[0].settle(error)
            return
        except PxrsError as error:
            for each in waiting[:_MOST_READ]:
                each.settle(error)
            return
        for each, answer in zip(waiting, answers, strict=False):
            each.settle(answer)

    def _ask(self, keys: list[bytes]) -> list[Entry | None]:
        tries = self._client._begin()
        node = self._node
        while True:
            try:
                found: list[Entry | None] = self._client._ask(node, "kv.read", [keys], tries)
                return found
            except PxrsError as error:
                if not (error.retryable or isinstance(error, OutcomeUnknown)):
                    raise
                tries.again(error)
            node = self._client._node_for(keys[0])


class WritingLane:
    """A lane to one node: the batch under way, and those that wait for it."""

    def __init__(
        self, client: Client, node: NodeAddress | None, new_name: Callable[[], str], limits: Limits
    ) -> None:
        self.group: GroupCommit[Change, Written] = GroupCommit(self._commit, _PAUSE)
        self._client = client
        self._node = node
        self._new_name = new_name
        self._limits = limits
        self._name = ""
        self._number = 0
        self._used = 0.0

    def _commit(self, waiting: Sequence[Waiting[Change, Written]]) -> None:
        """Sends as many as fit into a batch, and settles them. By one thread at a time."""
        batch = waiting[: kv.count_together((it.work for it in waiting), self._limits)]
        answers: Sequence[Written | PxrsError]
        try:
            answers = self._send([it.work for it in batch])
        except PermissionDenied as error:
            # The right to one of the keys is missing; the others have nothing to do with it.
            answers = [error] if len(batch) == 1 else [self._alone(it.work) for it in batch]
        except PxrsError as error:
            answers = [error] * len(batch)
        for each, answer in zip(batch, answers, strict=True):
            each.settle(answer)

    def _alone(self, change: Change) -> Written | PxrsError:
        try:
            (answer,) = self._send([change])
        except PxrsError as error:
            return error
        return answer

    def _send(self, changes: list[Change]) -> list[Written | PxrsError]:
        tries = self._client._begin()
        self._advance(tries.ends)
        node, again, doubted = self._node, False, False
        while True:
            values = [self._name, self._number, changes, again]
            try:
                answers: list[Written | PxrsError]
                answers = self._client._ask(node, "kv.write", values, tries)
                return answers
            except PxrsError as error:
                doubted = doubted or isinstance(error, OutcomeUnknown)
                try:
                    node = self._next_node(error, changes[0].key)
                    tries.again(error, at_once=not again)
                except PxrsError as last:
                    if not doubted:
                        raise
                    raise OutcomeUnknown(
                        f"a write was sent, and whether it was done is not known: {last}"
                    ) from last
            again = True

    def _next_node(self, error: PxrsError, key: bytes) -> NodeAddress | None:
        """Where a batch is sent after this error; raises it if that would be no use."""
        if isinstance(error, NotLeader):
            leader = NodeAddress(error.node, error.address)
            self._client._learn(error.key, leader)
            return leader
        if error.retryable or isinstance(error, OutcomeUnknown):
            # The node that leads it now, or any: the fence is in the store.
            return self._client._node_for(key)
        raise error

    def _advance(self, now: float) -> None:
        """Takes the next number; in a new lane, if nodes may have forgotten this one."""
        if not self._name or now - self._used > _LONGEST_REST:
            self._name, self._number = self._new_name(), 0
        self._number += 1
        self._used = now
