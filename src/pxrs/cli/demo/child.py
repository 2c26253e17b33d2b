"""The demo's other processes: the producer and the consumers.

They hear orders, a word a line, on stdin and report in JSON lines on stdout. They end when their
stdin does, and with their parent, so none outlives it, however it died: a frozen one neither.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import msgspec

from pxrs.app import connect
from pxrs.cli.demo.ledger import open_ledger
from pxrs.cli.demo.script import (
    BATCH,
    ROUNDS_PER_SECOND,
    SESSION_TTL,
    Entry,
    key_of,
    value_of,
)
from pxrs.config import default_url
from pxrs.types import Message

_PR_SET_PDEATHSIG = 1
_LOOK = 0.05
_encode = msgspec.json.Encoder().encode


def tell(**report: Any) -> None:
    # One write per report: a kill can't leave half a line.
    os.write(sys.stdout.fileno(), _encode(report) + b"\n")


class Orders:
    """What the parent wants, as it comes."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="pxrs-demo-parent", daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            self._orders.put(line.decode().strip())
        os._exit(1)

    def next(self, timeout: float) -> str | None:
        """The next order; None if there is none."""
        try:
            return self._orders.get(timeout=timeout) if timeout > 0 else self._orders.get_nowait()
        except queue.Empty:
            return None

    def wait(self) -> None:
        """Until there is an order."""
        self._orders.get()


def produce(topic: str, round_size: str) -> None:
    """Send at a steady pace; `burst N` sends N more at once, `stop` ends it."""
    orders = Orders()
    with connect(default_url()) as px, px.producer() as producer:
        number = 0
        due = time.monotonic()
        while (order := orders.next(due - time.monotonic())) != "stop":
            due = max(due + 1 / ROUNDS_PER_SECOND, time.monotonic())
            count = int(order.removeprefix("burst ")) if order else int(round_size)
            pairs = [(key_of(n), value_of(n)) for n in range(number, number + count)]
            producer.send_many(topic, pairs).result()
            number += count
            tell(acked=number)
    tell(done=True)


def consume(topic: str, group: str, address: str) -> None:
    """Enter every message into the ledger. `hold`: wait with the next batch in hand; `leave`."""
    orders = Orders()
    with connect(default_url()) as px:
        ledger = open_ledger(px, address)
        turn = 0
        order: str | None = None
        with px.consumer(topic, group, auto_commit=False, session_ttl=SESSION_TTL) as consumer:
            tell(member=consumer.member)
            while (order := orders.next(0) or order) != "leave":
                messages = consumer.poll(max_records=BATCH, timeout=_LOOK)
                if not messages:
                    continue
                if order == "hold":
                    # Here, and not inside a transaction: that would stop the whole file.
                    tell(holding=len(messages), upto=_upto(messages))
                    orders.wait()
                entries = [
                    Entry(m.partition, m.offset, int(m.value), m.fence.epoch, turn + n)
                    for n, m in enumerate(messages)
                ]
                turn += len(entries)
                entered = ledger.enter(consumer, entries)
                if order == "hold":
                    tell(refused=not entered)
                    order = None
            # One clock for all processes of a host: the parent measures from here.
            tell(leaving=time.monotonic())
    tell(done=True)


def _upto(messages: list[Message]) -> dict[str, int]:
    """By partition: the offset after the last message."""
    return {str(message.partition): message.offset + 1 for message in messages}


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    role, *arguments = sys.argv[1:]
    if role == "produce":
        produce(*arguments)
    else:
        consume(*arguments)
