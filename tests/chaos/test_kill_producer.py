"""A process is killed in the middle of its appends, fifty times, on one file."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

import pxrs
from pxrs import Message
from support.child import Child
from support.inside import say

pytestmark = pytest.mark.thorough

KILLS = 50
PARTITIONS = 4
TOPIC = "orders"


def produce(url: str, run: int) -> None:
    """Send without end, singly and in bulk, and say where each acknowledged message went."""
    px = pxrs.connect(url)
    producer = px.producer(linger=0.001)

    def in_bulk() -> None:
        start = 0
        while True:
            numbers = range(start, start + 200)
            sent = producer.send_many(
                TOPIC, [(f"{run}-bulk", _value(run, "b", n)) for n in numbers]
            )
            say(
                [
                    ["b", n, *position[1:]]
                    for n, position in zip(numbers, sent.result(), strict=True)
                ]
            )
            start += 200

    threading.Thread(target=in_bulk, daemon=True).start()
    number = 0
    while True:
        position = producer.send(TOPIC, _value(run, "s", number), key=f"{run}-single").result()
        say([["s", number, position.partition, position.offset]])
        number += 1


def _value(run: int, kind: str, number: int) -> str:
    return f"{run} {kind} {number} " + "x" * (number % 300)


@pytest.mark.engine("sqlite")
def test_every_acknowledged_message_is_there_once_and_in_order(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/chaos.db"
    rng = random.Random(20261115)
    acknowledged: dict[tuple[int, int], str] = {}
    with pxrs.connect(url) as px:
        px.topics.create(TOPIC, partitions=PARTITIONS)
        for run in range(KILLS):
            with Child(produce, url, run) as child:
                words = [child.read() for _ in range(rng.randrange(1, 12))]
                child.kill()
                words += child.rest()
            for kind, number, partition, offset in chain.from_iterable(words):
                assert (partition, offset) not in acknowledged
                acknowledged[partition, offset] = _value(run, kind, number)
        stored = _read_everything(px)
    assert len(acknowledged) > KILLS
    for place, value in acknowledged.items():
        assert stored[place].value == value.encode()
    _assert_whole_and_ordered(stored)


def _read_everything(px: pxrs.Pxrs) -> dict[tuple[int, int], Message]:
    reader = px.reader(TOPIC)
    stored: dict[tuple[int, int], Message] = {}
    for partition in range(PARTITIONS):
        offset, end = reader.bounds(partition)
        while offset < end:
            messages = reader.read(partition, offset)
            assert [message.offset for message in messages] == list(
                range(offset, offset + len(messages))
            )
            stored |= {(partition, message.offset): message for message in messages}
            offset += len(messages)
    return stored


def _assert_whole_and_ordered(stored: dict[tuple[int, int], Message]) -> None:
    """No message is torn or doubled, and each key's numbers run from 0 without a gap."""
    numbers: defaultdict[bytes, list[int]] = defaultdict(list)
    for _, message in sorted(stored.items()):
        run, kind, number, _ = message.value.decode().split(" ")
        assert message.value.decode() == _value(int(run), kind, int(number))
        assert message.key == f"{run}-{'bulk' if kind == 'b' else 'single'}".encode()
        numbers[message.key].append(int(number))
    for sequence in numbers.values():
        assert sequence == list(range(len(sequence)))
