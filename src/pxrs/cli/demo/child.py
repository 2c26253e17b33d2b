"""The demo's other processes: producers and the follower. They report in JSON lines on stdout.

They end when their stdin does, so none outlives its parent, however that one died.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import msgspec

from pxrs.cli.demo.script import END, PING, ROUND, Digest, key_of, value_of
from pxrs.runtime.app import connect

_TELL_EVERY = 5000
_encode = msgspec.json.Encoder().encode


def tell(**report: Any) -> None:
    # One write per report: a kill can't leave half a line.
    os.write(sys.stdout.fileno(), _encode(report) + b"\n")


def mind_parent() -> threading.Event:
    """Die with the parent; the event is set when it asks to stop."""
    stop = threading.Event()

    def listen() -> None:
        for _ in sys.stdin.buffer:
            stop.set()
        os._exit(1)

    threading.Thread(target=listen, name="pxrs-demo-parent", daemon=True).start()
    return stop


def produce(url: str, topic: str, producer: int, messages: int) -> None:
    """Send in rounds; report a round before, and once every message of it is acknowledged."""
    stop = mind_parent()
    with connect(url) as px, px.producer() as sender:
        number = 0
        while number < messages and not stop.is_set():
            last = min(number + ROUND, messages)
            pairs = [(key_of(producer, n), value_of(n)) for n in range(number, last)]
            tell(sending=last)
            sender.send_many(topic, pairs).result()
            number = last
            tell(acked=number)
    tell(done=True)


def follow(url: str, topic: str) -> None:
    """Follow until every partition has had its end marker; a digest says what was seen."""
    mind_parent()
    with connect(url) as px:
        reader = px.reader(topic)
        digests = [Digest() for _ in range(reader.topic.partitions)]
        source = reader.follow(start="earliest")
        tell(ready=True)
        seen = ended = 0
        for message in source:
            if message.key == PING:
                tell(ping=int(message.value), at=time.monotonic_ns(), seen=seen)
            elif message.key == END:
                ended += 1
                if ended == len(digests):
                    break
            else:
                digests[message.partition].add(message.key, message.value)
                seen += 1
                if seen % _TELL_EVERY == 0:
                    tell(seen=seen)
        tell(seen=seen, digests=[digest.text for digest in digests])


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "produce":
        produce(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
    else:
        follow(arguments[0], arguments[1])
