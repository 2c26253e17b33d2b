"""Nobody polls: who waits for messages sleeps until one comes, from whichever process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs import Message, Pxrs
from pxrs.stores.open import open_stores
from support.child import PATIENCE, Child
from support.faults import FaultyLog, FaultyStores
from support.inside import say, wait_for_parent

TOPIC = "orders"
NOISE = 200
# A follower looks at its partitions when it starts, and now and then to be sure. One that polls,
# or is woken by what is not its own, looks more often than there is noise.
HANDFUL = NOISE // 2


def send_when_told(url: str, messages: int) -> None:
    """Send a message each time the parent says so."""
    with pxrs.connect(url) as px, px.producer() as producer:
        say("ready")
        for number in range(messages):
            wait_for_parent()
            producer.send(TOPIC, str(number), partition=number % 2).result()
            say("sent")


def follow_and_say(url: str, messages: int) -> None:
    """Follow, and say what comes; at the end how often it looked."""
    stores = FaultyStores(open_stores(url))
    with Pxrs(stores) as px:
        found = px.reader(TOPIC).follow([0, 1])
        say("ready")
        for _ in range(messages):
            say(int(next(found).value))
        say(stores.log.fetches)


class Follower:
    """Follows in a thread; `read` waits for the next message."""

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages = messages
        self._came = threading.Semaphore(0)
        self.values: list[bytes] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for message in self._messages:
            self.values.append(message.value)
            self._came.release()
            if message.value == b"end":
                return

    def wait(self) -> None:
        assert self._came.acquire(timeout=PATIENCE)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.mark.engine("sqlite")
class TestBetweenProcesses:
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"

    def test_a_follower_is_woken_by_another_process(self, faulty: Pxrs, log: FaultyLog) -> None:
        faulty.topics.create(TOPIC, partitions=2)
        with Child(send_when_told, faulty.url, 20) as child:
            assert child.read() == "ready"
            follower = Follower(faulty.reader(TOPIC).follow())
            for number in range(20):
                child.tell()
                assert child.read() == "sent"
                follower.wait()
                assert follower.values[-1] == b"%d" % number
            child.join()
        with faulty.producer() as producer:
            producer.send(TOPIC, "end")
        follower.join()
        # Each message: at most a look at each partition when woken, and one until it is quiet.
        assert log.fetches <= 20 * 6 + HANDFUL

    @pytest.mark.long
    def test_a_follower_in_another_process_does_not_poll(self, px: Pxrs) -> None:
        """While it waits this process does a lot, elsewhere in the same topic."""
        px.topics.create(TOPIC, partitions=4)
        with Child(follow_and_say, px.url, 1) as child:
            assert child.read() == "ready"
            with px.producer(linger=0.0) as producer:
                for number in range(NOISE):
                    producer.send(TOPIC, "noise", partition=2 + number % 2).result()
                producer.send(TOPIC, "7", partition=1).result()
            assert child.read() == 7
            assert child.read() <= HANDFUL
            child.join()

    @pytest.mark.long
    def test_many_followers_are_all_woken(self, px: Pxrs) -> None:
        px.topics.create(TOPIC, partitions=2)
        children = [Child(follow_and_say, px.url, 2) for _ in range(3)]
        for child in children:
            assert child.read() == "ready"
        with px.producer() as producer:
            producer.send(TOPIC, "1", partition=0).result()
            for child in children:
                assert child.read() == 1
            producer.send(TOPIC, "2", partition=1).result()
            for child in children:
                assert child.read() == 2
        for child in children:
            child.rest()
            child.join()


def test_a_follower_of_one_partition_sleeps_while_another_is_filled(
    faulty: Pxrs, log: FaultyLog
) -> None:
    faulty.topics.create(TOPIC, partitions=2)
    follower = Follower(faulty.reader(TOPIC).follow([1]))
    with faulty.producer(linger=0.0) as producer:
        for _ in range(NOISE):
            producer.send(TOPIC, "noise", partition=0).result()
        producer.send(TOPIC, "end", partition=1).result()
    follower.join()
    assert follower.values == [b"end"]
    assert log.fetches <= HANDFUL


def test_no_message_waits_for_the_next_one(px: Pxrs) -> None:
    """Each is sent only when the one before was seen: a lost wake-up would be felt at once."""
    px.topics.create(TOPIC, partitions=3)
    follower = Follower(px.reader(TOPIC).follow())
    with px.producer(linger=0.0) as producer:
        for number in range(300):
            producer.send(TOPIC, str(number), key=str(number))
            follower.wait()
        producer.send(TOPIC, "end")
        follower.join()
    assert len(follower.values) == 301


@pytest.mark.long
def test_the_background_thread_never_sleeps_on_a_message(
    px: Pxrs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It falls asleep after one empty look, and nobody else asks for the result."""
    monkeypatch.setattr("pxrs.producing.producer._LOOKS", 1)
    monkeypatch.setattr("pxrs.producing.committer._SHORTEST_WAIT", 1e-6)
    px.topics.create(TOPIC, partitions=1)
    follower = Follower(px.reader(TOPIC).follow())
    with px.producer(linger=0.0) as producer:
        for number in range(1000):
            producer.send(TOPIC, str(number))
            follower.wait()
        producer.send(TOPIC, "end")
        follower.join()
