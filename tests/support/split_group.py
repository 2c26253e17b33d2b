"""A group whose coordination is a cluster of etcd nodes that lose sight of each other.

Each member is a process that knows one node only, so there are members on either side of every
split. Messages are in an SQLite file, which nothing breaks.
"""

from __future__ import annotations

import os
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pxrs
from pxrs.core.records import Claim, decode
from pxrs.stores.etcd.wire import after_prefix, grpc, rpc
from pxrs.types import Versioned
from support.child import Child
from support.engine_fixtures import started
from support.inside import say
from support.loaded import GROUP, TOPIC, Loaded
from support.partitions import Network

NODES = 3
TTL = 2.0
# All that passes between nodes goes through threads of this process: it may take its time.
_FLAGS = ["--heartbeat-interval=100", "--election-timeout=1000"]


def consume(log: str, coord: str, journal: str) -> None:
    """Write a line for every message that was handled, at once and whole."""
    lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with pxrs.connect(log, coord=coord) as px:
        consumer = px.consumer(TOPIC, GROUP, session_ttl=TTL, auto_commit_interval=0.05)
        say(consumer.member)
        while True:
            with suppress(pxrs.StoreError):
                for each in consumer.poll(max_records=50, timeout=0.5):
                    place = f"{each.partition} {each.fence.epoch} {each.offset}"
                    os.write(lines, f"{place} {each.value.decode()}\n".encode())


class Handled(NamedTuple):
    """One line of a journal."""

    partition: int
    epoch: int
    offset: int
    number: int


class SplitGroup(Loaded):
    """The cluster, its network, the load and the members: number n knows node n only."""

    def __init__(self, folder: Path, *, to_be_killed: bool = False) -> None:
        self._folder = folder
        self._log = f"sqlite:///{folder}/messages.db"
        with ExitStack() as stack:
            self.network = stack.enter_context(Network())
            self.etcd = stack.enter_context(
                started(
                    "etcd",
                    before=self.network.joins,
                    nodes=NODES,
                    flags=_FLAGS,
                    to_be_killed=to_be_killed,
                    advertise=self.network.advertise,
                )
            )
            super().__init__(f"{self.etcd.url} log={self._log}")
            stack.callback(super().close)
            stack.callback(self.network.heal)
            self.members: list[tuple[str, Child]] = []
            for number in range(NODES):
                journal = str(folder / f"journal-{number}")
                child = Child(consume, self._log, self.url_of(number), journal)
                stack.callback(child.kill)
                self.members.append((child.read(), child))
            self._stack = stack.pop_all()

    def url_of(self, node: int) -> str:
        """The place of the group, for those who know this node only."""
        return f"etcd://127.0.0.1:{self.etcd.ports[3 * node]}/pxrs"

    def close(self) -> None:
        self._stack.close()

    def leader(self) -> int | None:
        """The node that says it leads."""
        for number, node in enumerate(self.etcd.nodes):
            if node.running:
                port = self.etcd.ports[3 * number + 2]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    if b"etcd_server_is_leader 1" in answer.read():
                        return number
        return None

    def owners(self) -> set[str]:
        """Names of the members that own partitions."""
        return {claim.name for claim in self.claims() if claim.name is not None}

    def settle(self) -> None:
        """Until every member owns partitions, and the group has committed something since."""
        names = {name for name, _ in self.members}
        self.wait(lambda: self.owners() == names)
        self.advance()

    def advance(self) -> None:
        """Until the group has committed more than it had."""
        before = self._committed()
        self.wait(lambda: self._committed() > before)

    def without(self, member: int) -> None:
        """Until this member owns nothing any more."""
        self.wait(lambda: self.members[member][0] not in self.owners())

    def wait(self, condition: Callable[[], bool]) -> None:
        def held() -> bool:
            # Between two leaders there is nobody to ask.
            with suppress(pxrs.StoreUnavailable):
                return condition()
            return False

        super().wait(held)

    def judge(self) -> None:
        """After `finish`: nothing lost, one owner per epoch, and no checkpoint went back."""
        handled = {number: self._handled(number) for number in range(NODES)}
        everything = [each for some in handled.values() for each in some]
        assert {each.number for each in everything} == set(range(self.sent)), "messages were lost"
        by_epoch: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for number, some in handled.items():
            last: dict[tuple[int, int], int] = {}
            for each in some:
                where = each.partition, each.epoch
                by_epoch[where].add(number)
                assert each.offset > last.get(where, -1), f"{each} came again, or too late"
                last[where] = each.offset
        assert all(len(members) == 1 for members in by_epoch.values()), "an epoch had two owners"
        _judge_claims(list(self._history()))

    def _committed(self) -> int:
        return sum(claim.checkpoint or 0 for claim in self.claims())

    def _handled(self, number: int) -> list[Handled]:
        lines = (self._folder / f"journal-{number}").read_text().splitlines()
        return [Handled(*map(int, line.split())) for line in lines]

    def _history(self) -> Iterator[tuple[str, Claim | None]]:
        """Everything that was ever written to a claim, as etcd remembers it; None: deleted."""
        prefix = b"pxrs/records/"
        folder = prefix + f"claims/{GROUP}/".encode()
        last = max(each.version for each in self.px.stores.coord.list(f"claims/{GROUP}/"))
        create = rpc.WatchCreateRequest(
            key=folder, range_end=after_prefix(folder), start_revision=1
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.etcd.ports[0]}") as channel:
            requests = iter([rpc.WatchRequest(create_request=create)])
            for answer in rpc.WatchStub(channel).Watch(requests, timeout=30.0):
                for event in answer.events:
                    key = event.kv.key[len(prefix) :].decode()
                    yield key, _claim(key, event)
                if answer.events and answer.events[-1].kv.mod_revision >= last:
                    return


def _claim(key: str, event: Any) -> Claim | None:
    if event.type == event.DELETE:
        return None
    return decode(Versioned(key, bytes(event.kv.value), event.kv.mod_revision, None), Claim)


def _judge_claims(history: list[tuple[str, Claim | None]]) -> None:
    now: dict[str, Claim] = {}
    for key, claim in history:
        assert claim is not None, f"{key} was deleted"
        before = now.get(key, Claim())
        assert claim.epoch >= before.epoch, f"{key}: a stale owner wrote {claim} over {before}"
        if claim.epoch == before.epoch:
            assert claim.owner == before.owner, f"{key}: {claim} and {before} are of one epoch"
        assert (claim.checkpoint or 0) >= (before.checkpoint or 0), f"{key} went back: {claim}"
        now[key] = claim


def isolate_leader(group: SplitGroup, random: Random) -> None:
    """The leader loses its followers; its member loses all it owns to the others."""
    leader = group.leader()
    if leader is not None:
        group.network.isolate(leader)
        group.without(leader)
        group.advance()


def isolate_any(group: SplitGroup, random: Random) -> None:
    """A node loses the others; its member loses all it owns."""
    node = random.randrange(NODES)
    group.network.isolate(node)
    group.without(node)
    group.advance()


def cut_pair(group: SplitGroup, random: Random) -> None:
    """Two nodes don't see each other, and both see the third."""
    group.network.cut(*random.sample(range(NODES), 2))
    _for_a_while(random)
    group.advance()


def shatter(group: SplitGroup, random: Random) -> None:
    """No node sees another, for so long that sessions end, or not."""
    for node in range(NODES):
        group.network.isolate(node)
    _for_a_while(random)


def freeze(group: SplitGroup, random: Random) -> None:
    """A node stands still."""
    node = random.randrange(NODES)
    group.etcd.nodes[node].freeze()
    try:
        group.without(node)
        group.advance()
    finally:
        group.etcd.nodes[node].thaw()


def kill(group: SplitGroup, random: Random) -> None:
    """A node dies and comes back."""
    node = random.randrange(NODES)
    group.etcd.kill(node)
    group.advance()
    group.etcd.restart(node)


def _for_a_while(random: Random) -> None:
    """There is no event to wait for: whether anything comes of it is for the nodes to decide."""
    threading.Event().wait(random.uniform(0.0, 2 * TTL))


FAULTS = (isolate_leader, isolate_any, cut_pair, shatter, freeze, kill)
