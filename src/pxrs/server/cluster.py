"""The cluster of nodes: a group that shares 64 slots, by the same claims as any group.

A group's name hashes to a slot, and so does a partition; the node that owns the slot leads it.
Leadership gives clients one place to talk to, and nothing more: what is written is fenced in the
store, so a node that still believes it leads a slot it has lost can do no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

import msgspec
from xxhash import xxh64_intdigest

from pxrs.core.assign import assignor
from pxrs.core.claims import OwnedClaim
from pxrs.core.group import Rules
from pxrs.core.kv import shard_of, slot_of_shard
from pxrs.core.records import (
    Claim,
    GroupTopic,
    MemberRecord,
    claim_key,
    claims_prefix,
    decode,
    head_key,
    member_key,
    members_prefix,
)
from pxrs.core.routing import SLOTS
from pxrs.errors import ConfigError, Displaced, NotLeader, PxrsError
from pxrs.groups.membership import MemberSettings, Membership
from pxrs.groups.owned_claims import Mark, OwnedClaims
from pxrs.groups.snapshot import GroupReader, Snapshot
from pxrs.server.groups.host import Context
from pxrs.server.settings import Endpoint, parse_endpoint
from pxrs.stores.api import CoordStore
from pxrs.types import RESERVED, Check, Committed, Put, Topic, TopicPartition

_NODES = f"{RESERVED}nodes"
_SLOTS = f"{RESERVED}slots"
_NUMBERS = "nodes/"
_COUNTER = "node-numbers"
_GRPC = "grpc:"
_DEBOUNCE = 0.1
_CAREFUL_WAIT = 1.0
_RETRY_PAUSE = 0.2
_LOG = logging.getLogger("pxrs.serve")


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A live node. `number` is its own for ever, for clients that know nodes by number.

    `grpc_address` is empty if it does not serve gRPC.
    """

    name: str
    number: int
    address: str
    grpc_address: str = ""

    @property
    def endpoint(self) -> Endpoint:
        return parse_endpoint("address", self.address)


class ClusterView(msgspec.Struct, frozen=True):
    """The live nodes and which one leads each slot.

    `epoch` never falls. It rises with every assignment and every new leader. A node that comes or
    goes shows a moment before that, still under the epoch of the view before.
    """

    epoch: int = 0
    nodes: tuple[NodeInfo, ...] = ()
    slots: tuple[str | None, ...] = (None,) * SLOTS

    def leader_of(self, slot: int) -> NodeInfo | None:
        """The node that leads the slot; None while no node does."""
        name = self.slots[slot]
        return next((node for node in self.nodes if node.name == name), None)


def slot_of(key: str) -> int:
    """The slot of a group's name, or of a partition written as `topic/number`."""
    return xxh64_intdigest(key.encode()) % SLOTS


class Cluster:
    """Takes part in the group of nodes, and knows the others. Thread-safe."""

    def __init__(
        self,
        context: Context,
        name: str,
        displaced: Callable[[], object],
        ttl: float,
        grpc_address: str = "",
    ) -> None:
        self._context = context
        self._name = name
        self._displaced = displaced
        self._ttl = ttl
        self._grpc_address = grpc_address
        self._claims = OwnedClaims(context.coord, context.clock)
        self._reader = GroupReader(_NODES, context.coord, _SlotTopic())
        self._stop = threading.Event()
        self._listeners: list[Callable[[ClusterView], object]] = []
        self._numbers: dict[str, int] = {}
        self.view = ClusterView()
        # Whether another node has taken this one's name.
        self.is_displaced = False
        self._thread = threading.Thread(target=self._run, name="pxrs-cluster", daemon=True)

    def start(self) -> None:
        """Join the other nodes. `ConfigError` if one of them has this name."""
        self._await_name()
        self._number(self._name)
        self._membership = Membership(
            MemberSettings(
                group=_NODES,
                name=self._name,
                topics=lambda: (_SLOTS,),
                rules=Rules(_DEBOUNCE, 1.0, assignor("sticky")),
                ttl=self._ttl,
                client=_GRPC + self._grpc_address,
                node=self._context.node,
            ),
            self._context.coord,
            _SlotTopic(),
            self._context.clock,
            self._claims,
            _SlotWork(),
            open_session=self._context.session.lend,
        )
        self._watch = self._context.coord.watch(
            head_key(_NODES), members_prefix(_NODES), claims_prefix(_NODES)
        )
        self._membership.join()
        self._step()
        self._thread.start()

    def _await_name(self) -> None:
        """Wait until no other node has this name; a dead node has it until its session ends.

        A record with this node's address is not another node's: this one listens there.
        """
        key = member_key(_NODES, self._name)
        coord, clock = self._context.coord, self._context.clock
        ends = clock.monotonic() + self._ttl + _CAREFUL_WAIT
        with closing(coord.watch(key)) as watch:
            while (found := coord.get(key)) is not None:
                address = decode(found, MemberRecord).node
                if address == self._context.node:
                    return
                if (left := ends - clock.monotonic()) <= 0:
                    raise ConfigError(
                        f"node_id {self._name!r} is the name of the node at {address}; "
                        "choose another --node-id"
                    )
                watch.wait(min(left, _CAREFUL_WAIT))

    def leader_of(self, key: str) -> NodeInfo | None:
        """The node that leads a group's name or a partition."""
        return self.view.leader_of(slot_of(key))

    def other_leader_of(self, key: bytes) -> NodeInfo | None:
        """The other node that leads a key of `px.kv`; None if this one does, or none."""
        leader = self.view.leader_of(slot_of_shard(shard_of(key)))
        return None if leader is None or leader.name == self._name else leader

    def refuse_led_elsewhere(self, key: bytes) -> None:
        """Raises `NotLeader` if another node leads the key."""
        leader = self.other_leader_of(key)
        if leader is not None:
            raise NotLeader(key, leader.name, leader.address)

    @property
    def here(self) -> NodeInfo:
        """This node."""
        return NodeInfo(
            self._name, self._number(self._name), self._context.node, self._grpc_address
        )

    def on_change(self, listener: Callable[[ClusterView], object]) -> None:
        """Call `listener` with every new view, from the cluster's thread."""
        self._listeners.append(listener)

    def close(self) -> None:
        """Hand the slots over and leave."""
        self._stop.set()
        self._watch.wake()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._membership.leave()
        except PxrsError as error:
            _LOG.warning("this node's slots are led elsewhere once its session ends: %s", error)
        self._watch.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                due = self._step()
            except Displaced:
                self.is_displaced = True
                self._displaced()
                return
            except PxrsError as error:
                _LOG.warning("the nodes' records can't be reached: %s", error)
                self._stop.wait(_RETRY_PAUSE)
                continue
            except Exception:  # noqa: BLE001 - logged, and tried again
                # A bug of ours. Without this thread the node would lead for ever, or never.
                _LOG.exception("a look at the other nodes failed")
                self._stop.wait(_CAREFUL_WAIT)
                continue
            now = self._context.clock.monotonic()
            wait = _CAREFUL_WAIT if due is None else min(_CAREFUL_WAIT, due - now)
            if wait > 0 and not self._stop.is_set():
                self._watch.wait(wait)

    def _step(self) -> float | None:
        due = self._membership.look_at(self._reader.see({self._name: self._claims.parts}))
        self._publish(self._reader.see({}))
        return due

    def _publish(self, seen: Snapshot) -> None:
        view = self._view_of(seen)
        if view.epoch != self.view.epoch or view.nodes != self.view.nodes:
            self.view = view
            for listener in self._listeners:
                listener(view)

    def _view_of(self, seen: Snapshot) -> ClusterView:
        """Epochs of slots and the generation only rise, so their sum never falls."""
        members = seen.view.members
        living = {member.id: name for name, member in members.items()}
        leaders: list[str | None] = []
        epoch = seen.view.head.generation
        for slot in range(SLOTS):
            record = seen.all_claims.get(claim_key(_NODES, _SLOTS, slot))
            claim = decode(record, Claim) if record is not None else Claim()
            epoch += claim.epoch
            leaders.append(living.get(claim.owner or ""))
        nodes = tuple(
            NodeInfo(name, self._number(name), member.node, _grpc_address(member))
            for name, member in members.items()
        )
        return ClusterView(epoch, nodes, tuple(leaders))

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = number_of(self._context.coord, name)
        return number


def _grpc_address(member: MemberRecord) -> str:
    """The address at which a node serves gRPC, from the `client` field of its member record."""
    return member.client.removeprefix(_GRPC) if member.client.startswith(_GRPC) else ""


def number_of(coord: CoordStore, name: str) -> int:
    """A node's number: counted from 1, given once, and never to another node."""
    while True:
        if (found := coord.get(_NUMBERS + name)) is not None:
            return int(found.value)
        counter = coord.get(_COUNTER)
        number = 1 if counter is None else int(counter.value) + 1
        checks = [
            Check(_COUNTER, counter.version if counter is not None else 0),
            Check(_NUMBERS + name, 0),
        ]
        text = str(number).encode()
        outcome = coord.commit(checks, [Put(_COUNTER, text), Put(_NUMBERS + name, text)])
        if isinstance(outcome, Committed):
            return number


class _SlotTopic:
    """The slots as the group machine sees them: a topic that never changes and has no log."""

    def find(self, name: str) -> Topic:
        return Topic(name=_SLOTS, id=_SLOTS, partitions=SLOTS)


class _SlotWork:
    """The work in slots, which is none: a slot is released as soon as another node is to own it."""

    def __init__(self) -> None:
        self._owned: set[TopicPartition] = set()
        self._leaving: frozenset[TopicPartition] = frozenset()

    def claimed(self, owned_claims: list[OwnedClaim], topics: Mapping[str, GroupTopic]) -> None:
        self._owned |= {claim.part for claim in owned_claims}

    def leaving(self, parts: frozenset[TopicPartition]) -> None:
        self._leaving = parts & self._owned

    def releasable(self) -> dict[TopicPartition, Mark | None]:
        return dict.fromkeys(self._leaving)

    def final_marks(self) -> dict[TopicPartition, Mark | None]:
        return dict.fromkeys(self._owned)

    def gone(self, parts: Iterable[TopicPartition], *, lost: bool) -> None:
        self._owned -= set(parts)
        self._leaving -= set(parts)
