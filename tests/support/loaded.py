"""A topic under constant load and a group that works on it, for tests that kill its members."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pxrs
from pxrs.core.records import Claim, decode
from support.child import PATIENCE

TOPIC, GROUP = "orders", "handlers"
PARTITIONS, KEYS = 8, 40


class Loaded:
    """Sends numbered messages until it is told to stop: number n has the key n % KEYS."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.px = pxrs.connect(url)
        self.px.topics.create(TOPIC, partitions=PARTITIONS)
        self.sent = 0
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._send)
        self._load.start()

    def _send(self) -> None:
        with self.px.producer() as producer:
            while not self._stop.wait(0.005):
                pairs = [(f"key-{n % KEYS}", str(n)) for n in range(self.sent, self.sent + 40)]
                producer.send_many(TOPIC, pairs).result()
                self.sent += 40

    def claims(self) -> list[Claim]:
        return [decode(record, Claim) for record in self.px.stores.coord.list(f"claims/{GROUP}/")]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds, looking whenever the group's records change."""
        watch = self.px.stores.coord.watch(
            f"claims/{GROUP}/", f"members/{GROUP}/", f"group/{GROUP}"
        )
        while not condition():
            assert watch.wait(PATIENCE), "the group came to a halt"
        watch.close()

    def finish(self) -> None:
        """End the load and wait until everything is handled and committed."""
        self._stop.set()
        self._load.join()
        self.wait(lambda: sum(claim.checkpoint or 0 for claim in self.claims()) == self.sent)

    def close(self) -> None:
        self._stop.set()
        self._load.join()
        self.px.close()
