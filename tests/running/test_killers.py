"""Messages that kill their process, and those that were in hand beside them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from support.child import PATIENCE
from support.running import Running, wait_for_checkpoints

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

# Long enough for a thread of the same process that is not held back.
_A_MOMENT = 0.5
TWICE = pxrs.Backoff(attempts=2, first=0.0)

_innocent_is_at_work, _killer_is_at_work = threading.Event(), threading.Event()


def kill_beside_the_innocent(message: pxrs.Message) -> None:
    """In a worker process: the killer kills while the innocent is in hand, if it can be."""
    if message.key == b"killer":
        _killer_is_at_work.set()
        _innocent_is_at_work.wait(_A_MOMENT)
        os.kill(os.getpid(), signal.SIGKILL)
    if message.key == b"innocent":
        _innocent_is_at_work.set()
        if _killer_is_at_work.wait(_A_MOMENT):
            threading.Event().wait(PATIENCE)


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/run.db") as px:
        px.topics.create("orders", partitions=1)
        yield px


def send(px: pxrs.Pxrs, *keys: str) -> None:
    with px.producer() as producer:
        for key in keys:
            producer.send("orders", "x", key)


def dead_letters(px: pxrs.Pxrs) -> list[bytes | None]:
    return [each.key for each in px.reader("orders.dlq").follow(start="earliest", timeout=0)]


def test_a_sibling_that_lives_does_not_blame_the_killers_neighbour(px: pxrs.Pxrs) -> None:
    """When the owner dies the sibling gets both messages, and it may know of no killer."""
    send(px, "killer", "innocent")
    running = Running(
        px,
        kill_beside_the_innocent,
        topic="orders",
        processes=2,
        workers=2,
        parallel="key",
        retry=TWICE,
    )
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    assert running.error is None
    assert dead_letters(px) == [b"killer"]


class Deadly:
    """A serde in which one value kills its process, after the innocent has begun."""

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, data: bytes) -> str:
        if data == b"killer":
            _innocent_is_at_work.wait(_A_MOMENT)
            os.kill(os.getpid(), signal.SIGKILL)
        return data.decode()


def wait_beside_the_killer(message: pxrs.Message) -> None:
    """In a worker process: the only one in hand, unless what is being decoded is, too."""
    _innocent_is_at_work.set()
    _killer_is_at_work.wait(_A_MOMENT)


def test_a_message_that_kills_while_it_is_decoded_is_blamed_itself(px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        for value in ("killer", "innocent"):
            producer.send("orders", value, key=value)
    running = Running(
        px,
        wait_beside_the_killer,
        topic="orders",
        processes=1,
        workers=2,
        parallel="key",
        retry=TWICE,
        serde=Deadly(),
    )
    wait_for_checkpoints(px, 2)
    px.stop()
    running.join()
    assert running.error is None
    assert dead_letters(px) == [b"killer"]
