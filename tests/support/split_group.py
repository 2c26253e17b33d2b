"""A group whose coordination is a cluster of etcd nodes that lose sight of each other.

Each member is a process that knows one node only, so there are members on either side of every
split. Messages are in an SQLite file, which nothing breaks.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import pxrs
from support.child import Child
from support.engine_fixtures import started
from support.loaded import Loaded
from support.partitions import Network
from support.split_history import TTL, consume, judge_claims, judge_handled, read_journal

NODES = 3
# All that passes between nodes goes through threads of this process: it may take its time.
_FLAGS = ["--heartbeat-interval=100", "--election-timeout=1000"]


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
        handled = {
            number: read_journal(self._folder / f"journal-{number}") for number in range(NODES)
        }
        numbers = {each.number for some in handled.values() for each in some}
        assert numbers == set(range(self.sent)), "messages were lost"
        judge_handled(handled)
        judge_claims(self.px.stores.coord, self.etcd.ports[0])

    def _committed(self) -> int:
        return sum(claim.checkpoint or 0 for claim in self.claims())


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


Fault = Callable[[SplitGroup, Random], None]
FAULTS: tuple[Fault, ...] = (isolate_leader, isolate_any, cut_pair, shatter, freeze, kill)
