"""A topic on a cluster of NATS nodes that lose sight of each other, its producers and its group.

Each producer and each member knows one node only: there are some on either side of every split.
The group's records are in an etcd that nothing breaks, and that remembers all of them.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pxrs
from pxrs.core.records import Claim, decode
from support.child import Child
from support.engine_fixtures import started
from support.loaded import GROUP, KEYS, PARTITIONS, TOPIC
from support.partitions import Network
from support.reading import read_partition
from support.split_history import consume, judge_claims, judge_handled, read_journal

NODES = 3
# The nodes take up to 15 s to have leaders again; and everything passes through this process.
_PATIENCE = 120.0
_LOOK = 0.05
_PER_PRODUCER = 10**9
_AT_ONCE = 40


class Sender:
    """Sends numbered messages until it is told to stop, and notes where each of them is."""

    def __init__(self, url: str, number: int) -> None:
        self._px = pxrs.connect(url)
        self._first = number * _PER_PRODUCER
        self._stop = threading.Event()
        # By partition and offset: what a producer was told is there.
        self.sent: dict[tuple[int, int], int] = {}
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        try:
            with self._px.producer(delivery_timeout=2 * _PATIENCE) as producer:
                number = self._first
                while not self._stop.wait(0.005):
                    numbers = range(number, number + _AT_ONCE)
                    sent = [producer.send(TOPIC, str(n), key=self._key(n)) for n in numbers]
                    for n, handle in zip(numbers, sent, strict=True):
                        place = handle.result()
                        self.sent[place.partition, place.offset] = n
                    number += _AT_ONCE
        except BaseException as error:
            self.failed = error
            raise

    def _key(self, number: int) -> str:
        """Each producer has keys of its own: of those the order is known."""
        return f"key-{self._first}-{number % KEYS}"

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self._px.close()


class SplitLog:
    """The cluster, its network, producers and members: number n of each knows node n only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with ExitStack() as stack:
            self._etcd = stack.enter_context(started("etcd"))
            self._coord = f"{self._etcd.url}/pxrs"
            self.network = stack.enter_context(Network())
            self.nats = stack.enter_context(
                started(
                    "nats",
                    before=self.network.joins,
                    nodes=NODES,
                    advertise=self.network.advertise,
                    tells_clients=False,
                )
            )
            every = f"{self.nats.url}?replicas={NODES}"
            self._px = stack.enter_context(pxrs.connect(self._coord, log=every))
            self._px.topics.create(TOPIC, partitions=PARTITIONS)
            self._senders: list[Sender] = []
            for number in range(NODES):
                sender = Sender(f"{self._coord} log={self.url_of(number)}", number)
                stack.callback(sender.close)
                self._senders.append(sender)
            for number in range(NODES):
                journal = str(folder / f"journal-{number}")
                child = Child(consume, self.url_of(number), self._coord, journal)
                stack.callback(child.kill)
                child.read()
            stack.callback(self.network.heal)
            self._stack = stack.pop_all()

    @property
    def sent(self) -> int:
        return sum(len(sender.sent) for sender in self._senders)

    def url_of(self, node: int) -> str:
        return f"nats://127.0.0.1:{self.nats.ports[3 * node]}?replicas={NODES}&timeout=5"

    def close(self) -> None:
        self._stack.close()

    def leader(self) -> int | None:
        """The node that leads the topic's stream, as one of them says."""
        for number, node in enumerate(self.nats.nodes):
            if node.running:
                port = self.nats.ports[3 * number + 2]
                address = f"http://127.0.0.1:{port}/jsz?streams=true"
                with urllib.request.urlopen(address, timeout=_PATIENCE) as answer:
                    accounts = json.load(answer).get("account_details", [])
                for stream in (each for one in accounts for each in one["stream_detail"]):
                    if leader := stream.get("cluster", {}).get("leader"):
                        return int(leader.removeprefix("n"))
        return None

    def settle(self) -> None:
        """Until every producer was told of more, and the group has more of every partition."""
        sent = [len(sender.sent) for sender in self._senders]
        done = self._checkpoints()

        def is_alive() -> bool:
            now = self._checkpoints()
            senders = zip(self._senders, sent, strict=True)
            return (
                len(now) == PARTITIONS
                and all(now[each] > done.get(each, 0) for each in now)
                and all(len(sender.sent) > before for sender, before in senders)
            )

        self._wait(is_alive)

    def advance(self, but: int) -> None:
        """Until the producers at all nodes but one were told of batches that they began since, and
        the group has committed as much."""
        others = [sender for number, sender in enumerate(self._senders) if number != but]
        sent = [len(sender.sent) + 3 * _AT_ONCE for sender in others]
        done = sum(self._checkpoints().values()) + 3 * _AT_ONCE
        self._wait(
            lambda: (
                all(len(sender.sent) >= n for sender, n in zip(others, sent, strict=True))
                and sum(self._checkpoints().values()) >= done
            )
        )

    def finish(self) -> None:
        """End the load and wait until everything is handled and committed."""
        for sender in self._senders:
            sender.stop()
        self._wait(lambda: sum(self._checkpoints().values()) >= self.sent)

    def judge(self) -> None:
        """After `finish`: what was acknowledged is where it was said to be, once, in order, and was
        handled so; one owner per epoch, no checkpoint went back."""
        log = {
            (number, message.offset): int(message.value)
            for number in range(PARTITIONS)
            for message in read_partition(self._px, TOPIC, number)
        }
        told = {place: n for sender in self._senders for place, n in sender.sent.items()}
        lost = {place: n for place, n in told.items() if log.get(place) != n}
        assert not lost, f"{len(lost)} messages are not where they were, e.g. {min(lost.items())}"
        assert len(log) == len(told), "messages are there that nobody was told of"
        assert len(set(log.values())) == len(log), "messages are there twice"
        self._judge_order(log)
        handled = {
            number: read_journal(self._folder / f"journal-{number}") for number in range(NODES)
        }
        for each in (each for some in handled.values() for each in some):
            assert log[each.partition, each.offset] == each.number, f"{each} is another message"
        assert {each.number for some in handled.values() for each in some} == set(log.values())
        judge_handled(handled)
        judge_claims(self._px.stores.coord, self._etcd.ports[0])

    @staticmethod
    def _judge_order(log: dict[tuple[int, int], int]) -> None:
        """The messages of a key are in one partition, in the order in which they were sent."""
        by_key: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for (partition, offset), n in log.items():
            by_key[n // _PER_PRODUCER, n % KEYS].append((n, partition, offset))
        for places in by_key.values():
            places.sort()
            assert len({partition for _, partition, _ in places}) == 1
            offsets = [offset for *_, offset in places]
            assert offsets == sorted(offsets), "the messages of a key changed places"

    def _checkpoints(self) -> dict[str, int]:
        records = self._px.stores.coord.list(f"claims/{GROUP}/")
        return {each.key: decode(each, Claim).checkpoint or 0 for each in records}

    def _wait(self, condition: Callable[[], bool]) -> None:
        """What is sent rings at none of the records: so it looks now and then."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            for sender in self._senders:
                assert sender.failed is None, f"a producer has failed: {sender.failed}"
            assert time.monotonic() < deadline, "producers or the group came to a halt"
            threading.Event().wait(_LOOK)


def isolate_leader(group: SplitLog, random: Random) -> None:
    """The stream's leader loses the others, which elect another one."""
    leader = group.leader()
    if leader is not None:
        group.network.isolate(leader)
        group.advance(but=leader)


def isolate_any(group: SplitLog, random: Random) -> None:
    """A node loses the others."""
    node = random.randrange(NODES)
    group.network.isolate(node)
    group.advance(but=node)


def cut_pair(group: SplitLog, random: Random) -> None:
    """Two nodes don't see each other, and both see the third."""
    group.network.cut(*random.sample(range(NODES), 2))
    _for_a_while(random)


def shatter(group: SplitLog, random: Random) -> None:
    """No node sees another, for so long that leaders give up, or not."""
    for node in range(NODES):
        group.network.isolate(node)
    _for_a_while(random)


def freeze(group: SplitLog, random: Random) -> None:
    """A node stands still, the leader or another."""
    node = group.leader() if random.random() < 0.5 else random.randrange(NODES)
    if node is None:
        return
    group.nats.nodes[node].freeze()
    try:
        group.advance(but=node)
    finally:
        group.nats.nodes[node].thaw()


def kill(group: SplitLog, random: Random) -> None:
    """A node dies and comes back."""
    node = random.randrange(NODES)
    group.nats.kill(node)
    group.advance(but=node)
    group.nats.restart(node)


def _for_a_while(random: Random) -> None:
    """There is no event to wait for: whether anything comes of it is for the nodes to decide."""
    threading.Event().wait(random.uniform(0.0, 15.0))


Fault = Callable[[SplitLog, Random], None]
FAULTS: tuple[Fault, ...] = (isolate_leader, isolate_any, cut_pair, shatter, freeze, kill)
