"""Messages sent without a pause while something breaks, and what has to be true of them then."""

from __future__ import annotations

import threading
from collections import defaultdict

from pxrs import Position, Pxrs
from pxrs.producing.handles import Sent
from support.child import PATIENCE
from support.reading import read_all

KEYS = 16
_AT_ONCE = 50


class Load:
    """A thread that sends numbered messages of several keys and remembers what was acknowledged."""

    def __init__(self, px: Pxrs, topic: str) -> None:
        self._px = px
        self._topic = topic
        self.acked: dict[bytes, Position] = {}
        self.failed: list[BaseException] = []
        self._grown = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def await_more(self, count: int, patience: float = PATIENCE) -> None:
        """Until so many more messages were acknowledged."""
        with self._grown:
            wanted = len(self.acked) + count
            done = self._grown.wait_for(
                lambda: len(self.acked) >= wanted or bool(self.failed), patience
            )
        assert not self.failed, self.failed
        assert done, f"only {len(self.acked)} of {wanted} messages were acknowledged"

    def stop(self) -> None:
        """No more; returns when all that was sent is settled."""
        self._stop.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()
        assert not self.failed, self.failed

    def check(self, px: Pxrs) -> None:
        """What was acknowledged is where it was said to be, nothing twice, each key in order."""
        found = read_all(px, self._topic)
        values = [message.value for message in found]
        assert len(values) == len(set(values)), "a message stands in the log twice"
        places = {m.value: Position(self._topic, m.partition, m.offset) for m in found}
        lost = {value for value, place in self.acked.items() if places.get(value) != place}
        assert not lost, f"acknowledged, and not there: {sorted(lost)[:5]} of {len(lost)}"
        by_key: defaultdict[bytes, list[int]] = defaultdict(list)
        for message in found:
            by_key[message.key].append(int(message.value.rpartition(b"/")[2]))
        for key, numbers in by_key.items():
            assert numbers == sorted(numbers), f"key {key!r} is out of order"

    def _send(self) -> None:
        number = 0
        try:
            with self._px.producer() as producer:
                while not self._stop.is_set():
                    sent: list[tuple[bytes, Sent]] = []
                    for _ in range(_AT_ONCE):
                        key = b"key-%d" % (number % KEYS)
                        value = key + b"/%d" % number
                        sent.append((value, producer.send(self._topic, value, key=key)))
                        number += 1
                    for value, handle in sent:
                        self._note(value, handle.result())
        except BaseException as error:  # noqa: BLE001 - told to whoever waits
            with self._grown:
                self.failed.append(error)
                self._grown.notify_all()

    def _note(self, value: bytes, position: Position) -> None:
        with self._grown:
            self.acked[value] = position
            self._grown.notify_all()
