"""`px.kv` over `pxrs://`: each write goes to the node that leads its key, and happens once.

The writes of concurrent threads to one node travel as one batch of a writer (see `pxrs.core.kv`). A
batch whose answer is lost is sent again, through whichever node answers, and is answered as it was
the first time, or written now.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from pxrs.client.client import Client
from pxrs.client.retry import Tries
from pxrs.client.topology import NodeAddress
from pxrs.clock import Clock
from pxrs.core import kv
from pxrs.core.kv import Change, KeyBatch, Written
from pxrs.errors import (
    NotLeader,
    OutcomeUnknown,
    PermissionDenied,
    PxrsError,
    StoreUnavailable,
)
from pxrs.kv.group_commit import GroupCommit, Waiting
from pxrs.kv.store import Answers, KeyValues, check_ttl
from pxrs.serde import to_bytes
from pxrs.stores.api import CoordStore
from pxrs.types import Entry, Limits

# A round trip to a node takes some of these.
_PAUSE = 0.0003
_MOST_READ = 100
# Nodes forget a writer that was not used for an hour.
_LONGEST_REST = 1800.0
# Parts of a batch that give up within so many seconds of each other give up together.
_TOGETHER = 1.0

T = TypeVar("T")


class LedKeys(KeyValues):
    """See `KeyValues`. Single writes and reads go to the node that leads the key."""

    def __init__(self, coord: CoordStore, clock: Clock, client: Client) -> None:
        super().__init__(coord, clock)
        self._client = client
        self._name = secrets.token_hex(8)
        self._writer_numbers = count()
        self._writer_of: dict[NodeAddress | None, NodeWriter] = {}
        self._reading_of: dict[NodeAddress | None, Reading] = {}

    def _do_all(self, batches: Sequence[KeyBatch]) -> list[Answers | BaseException]:
        return [[self._write(change) for change in batch.changes] for batch in batches]

    def _write(self, change: Change) -> Written | PxrsError:
        try:
            tries = self._client._begin()
            writer = self._writer_to(self._client._node_for(change.key, tries))
            return writer.group.do(Timed(change, tries.ends))
        except PxrsError as error:
            return error
        finally:
            self._forget_seen(change.key)

    def _writer_to(self, node: NodeAddress | None) -> NodeWriter:
        writer = self._writer_of.get(node)
        if writer is None:
            new = NodeWriter(self._client, node, self._new_name, self._coord.limits)
            writer = self._writer_of.setdefault(node, new)
        return writer

    def _new_name(self) -> str:
        return f"{self._name}.{next(self._writer_numbers)}"

    def _read(self, key: bytes) -> Entry | None:
        tries = self._client._begin()
        reading = self._reading_to(self._client._node_for(key, tries))
        return reading.group.do(Timed(key, tries.ends))

    def get_many(
        self, keys: Iterable[str | bytes], *, consistency: str = "lease"
    ) -> dict[bytes, Entry]:
        """See `KeyValues`. The keys of one node travel together, as many as an answer holds."""
        wanted = [to_bytes(key, "key") for key in keys]
        if any(self._check_read(key, consistency) for key in wanted):
            return super().get_many(wanted, consistency=consistency)
        led: defaultdict[NodeAddress | None, list[bytes]] = defaultdict(list)
        for key in dict.fromkeys(wanted):
            led[self._client._node_for(key, self._client._begin())].append(key)
        found: dict[bytes, Entry] = {}
        for node, mine in led.items():
            for at in range(0, len(mine), _MOST_READ):
                ends = self._client._begin().ends
                works = [Timed(key, ends) for key in mine[at : at + _MOST_READ]]
                for answer in self._reading_to(node).group.do_all(works):
                    if isinstance(answer, BaseException):
                        raise answer
                    if answer is not None:
                        found[answer.key] = answer
        return {key: found[key] for key in wanted if key in found}

    def _reading_to(self, node: NodeAddress | None) -> Reading:
        reading = self._reading_of.get(node)
        if reading is None:
            reading = self._reading_of.setdefault(node, Reading(self._client, node))
        return reading

    def _ttl_ms(self, ttl: float | None) -> int:
        # Whether the store supports it is for the nodes to check.
        return check_ttl(ttl)


class Timed(NamedTuple, Generic[T]):
    """A key to be read, or a change, and when its caller gives up.

    Waiting for the batch before counts, too. Batches are taken in the order in which their parts
    came, and one batch is tried until the first of its parts gives up. So whoever waits for a batch
    waits for one that ends by its own deadline, and then its own batch does.
    """

    work: T
    ends: float


def _in_time(
    waiting: Sequence[Waiting[Timed[T], Any]], client: Client
) -> list[Waiting[Timed[T], Any]]:
    """Settles those whose time was over before they were sent, and returns the others."""
    now = client._now()
    for each in waiting:
        if each.work.ends <= now:
            each.settle(StoreUnavailable("no node answered in time; this was not sent"))
    return [each for each in waiting if not each.is_settled]


def _given_up(
    batch: Sequence[Waiting[Timed[T], Any]], tries: Tries
) -> Sequence[Waiting[Timed[T], Any]]:
    """The parts of a batch that get its error. Nothing was done.

    Those that came much later than the one whose time is over stay for another batch.
    """
    if not tries.is_late:
        return batch
    return [each for each in batch if each.work.ends <= tries.ends + _TOGETHER]


class Reading:
    """Reads through one node: those that wait travel together."""

    def __init__(self, client: Client, node: NodeAddress | None) -> None:
        self.group: GroupCommit[Timed[bytes], Entry | None] = GroupCommit(self._read, _PAUSE)
        self._client = client
        self._node = node

    def _read(self, waiting: Sequence[Waiting[Timed[bytes], Entry | None]]) -> None:
        """Reads as many as fit into an answer, and settles them. By one thread at a time."""
        batch = _in_time(waiting, self._client)[:_MOST_READ]
        if not batch:
            return
        tries = self._client._begin(min(it.work.ends for it in batch))
        try:
            answers = self._ask([it.work.work for it in batch], tries)
        except PermissionDenied as error:
            if len(batch) > 1:
                # It may be for one key only.
                for each in batch:
                    self._read([each])
                return
            batch[0].settle(error)
            return
        except PxrsError as error:
            for each in _given_up(batch, tries):
                each.settle(error)
            return
        for each, answer in zip(batch, answers, strict=False):
            each.settle(answer)

    def _ask(self, keys: list[bytes], tries: Tries) -> list[Entry | None]:
        node = self._node
        while True:
            try:
                found: list[Entry | None] = self._client._ask(node, "kv.read", [keys], tries)
                # One without an answer would be asked again and again.
                if not 1 <= len(found) <= len(keys):
                    raise StoreUnavailable(f"a node answered {len(keys)} reads with {len(found)}")
                return found
            except PxrsError as error:
                if not (error.retryable or isinstance(error, OutcomeUnknown)):
                    raise
                tries.again(error)
            node = self._client._node_for(keys[0], tries)


class NodeWriter:
    """Sends batches to one node: the one under way, and the writes that wait for it."""

    def __init__(
        self, client: Client, node: NodeAddress | None, new_name: Callable[[], str], limits: Limits
    ) -> None:
        self.group: GroupCommit[Timed[Change], Written] = GroupCommit(self._commit, _PAUSE)
        self._client = client
        self._node = node
        self._new_name = new_name
        self._limits = limits
        self._name = ""
        self._number = 0
        self._used = 0.0

    def _commit(self, waiting: Sequence[Waiting[Timed[Change], Written]]) -> None:
        """Sends as many as fit into a batch, and settles them. By one thread at a time."""
        found = _in_time(waiting, self._client)
        batch = found[: kv.count_together((it.work.work for it in found), self._limits)]
        if not batch:
            return
        tries = self._client._begin(min(it.work.ends for it in batch))
        answers: Sequence[Written | PxrsError]
        try:
            answers = self._send([it.work.work for it in batch], tries)
        except PermissionDenied as error:
            # The right to one of the keys is missing; the others have nothing to do with it.
            answers = [error] if len(batch) == 1 else [self._alone(it.work) for it in batch]
        except OutcomeUnknown as error:
            answers = [error] * len(batch)
        except PxrsError as error:
            for each in _given_up(batch, tries):
                each.settle(error)
            return
        for each, answer in zip(batch, answers, strict=True):
            each.settle(answer)

    def _alone(self, change: Timed[Change]) -> Written | PxrsError:
        try:
            (answer,) = self._send([change.work], self._client._begin(change.ends))
        except PxrsError as error:
            return error
        return answer

    def _send(self, changes: list[Change], tries: Tries) -> list[Written | PxrsError]:
        self._advance(self._client._now())
        node, again, doubted = self._node, False, False
        while True:
            values = [self._name, self._number, changes, again]
            try:
                answers: list[Written | PxrsError]
                answers = self._client._ask(node, "kv.write", values, tries)
                if len(answers) != len(changes):
                    raise OutcomeUnknown(
                        f"a node answered {len(changes)} writes with {len(answers)}"
                    )
                return answers
            except PxrsError as error:
                doubted = doubted or isinstance(error, OutcomeUnknown)
                try:
                    node = self._next_node(error, changes[0].key, tries)
                    tries.again(error, at_once=not again)
                except PxrsError as last:
                    if not doubted:
                        raise
                    raise OutcomeUnknown(
                        f"a write was sent, and whether it was done is not known: {last}"
                    ) from last
            again = True

    def _next_node(self, error: PxrsError, key: bytes, tries: Tries) -> NodeAddress | None:
        """The node to send a batch to after this error; raises it if another attempt is no use."""
        if isinstance(error, NotLeader):
            return NodeAddress(error.node, error.address)
        if error.retryable or isinstance(error, OutcomeUnknown):
            # The node that leads the key now, or any: the fence is in the store.
            return self._client._node_for(key, tries)
        raise error

    def _advance(self, now: float) -> None:
        """Takes the next number; as a new writer, if nodes may have forgotten this one."""
        if not self._name or now - self._used > _LONGEST_REST:
            self._name, self._number = self._new_name(), 0
        self._number += 1
        self._used = now
