"""Clients that write and read keys without a pause, and write down what they were told."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from pxrs.types import Version
from support.child import PATIENCE
from support.keys_clients import KeysClient, Written, WrongAnswerError
from support.keys_history import NOTHING, Did, History, Seen

# Keys that everybody writes to, until so many operations have come; then there are others.
_HOT = 3
_OPERATIONS_OF_A_KEY = 300
_COLD = 40
# Clients do not take all of the machine: nodes have to start meanwhile.
_PACE = 0.015
_AFTER_A_FAILURE = 0.03
# How often a write whose outcome is not known is repeated, with its idempotency key.
_REPEATS = 30


class Keys:
    """The keys of all clients, of one run. Thread-safe."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._used = [0] * _HOT

    def choose(self, rng: Random) -> str:
        if rng.random() < 0.25:
            return self.cold(rng)
        place = rng.randrange(_HOT)
        with self._lock:
            self._used[place] += 1
            return self._hot(place)

    def cold(self, rng: Random) -> str:
        """One of many, which is seldom written to."""
        return f"{self._run}-cold-{rng.randrange(_COLD)}"

    def hot(self) -> list[str]:
        """Those that are written to now."""
        with self._lock:
            return [self._hot(place) for place in range(_HOT)]

    def _hot(self, place: int) -> str:
        return f"{self._run}-hot-{place}-{self._used[place] // _OPERATIONS_OF_A_KEY}"


class Ways(NamedTuple):
    """How a thread reaches the nodes: its own way, and other ones for what it repeats."""

    own: KeysClient
    others: Sequence[KeysClient]


class Load:
    """Threads at work until `stop`."""

    def __init__(self, history: History, ways: Sequence[Ways], seed: int) -> None:
        self.history = history
        self.keys = Keys(seed)
        self._seed = seed
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(each, Random(f"{seed}/{each.own.name}")))
            for each in ways
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all threads, each after the operation that it is at."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "an operation hangs"

    def _work(self, ways: Ways, rng: Random) -> None:
        worker = Worker(self.history, ways, rng, self.keys, self._stop.wait)
        try:
            for number in count():
                if self._stop.is_set():
                    break
                unique = f"{self._seed}.{ways.own.name}.{number}"
                answered = worker.act(self.keys.choose(rng), unique)
                self._stop.wait(_PACE if answered else _AFTER_A_FAILURE)
        except WrongAnswerError as error:
            self.history.fail(f"{ways.own.name} was told: {error}")
        except Exception as error:
            self.history.fail(f"{ways.own.name} failed: {error!r}")
            raise
        finally:
            for client in (ways.own, *ways.others):
                client.close()


class Worker:
    """One thread's operations. `pause` waits a moment, and says whether to stop."""

    def __init__(
        self,
        history: History,
        ways: Ways,
        rng: Random,
        keys: Keys,
        pause: Callable[[float], bool],
    ) -> None:
        self._history = history
        self._keys = keys
        self._own, self._others = ways
        self._rng = rng
        self._pause = pause
        self._acts: list[tuple[Callable[[str, str], bool], int]] = [
            (self.read, 25),
            (self.read_old, 8),
            (self.read_several, 4),
            (self.put, 15),
            (self.put_once, 14),
            (self.compare, 18),
            (self.create, 6),
            (self.delete, 6),
            (self.compare_and_delete, 4),
        ]

    def act(self, key: str, unique: str) -> bool:
        """One operation; whether it was answered."""
        acts, weights = zip(*self._acts, strict=True)
        act: Callable[[str, str], bool] = self._rng.choices(acts, weights)[0]
        return act(key, unique)

    def read(self, key: str, unique: str) -> bool:
        return self._get(key, self._rng.choice(["lease", "lease", "linearizable"])) is not None

    def read_old(self, key: str, unique: str) -> bool:
        return self._get(key, "stale_ok") is not None

    def read_several(self, key: str, unique: str) -> bool:
        keys = [key, self._keys.cold(self._rng)]
        called = monotonic()
        found = self._own.get_many(keys)
        for each, seen in (found or {}).items():
            self._history.note(read(self._own, each, seen, called))
        return found is not None

    def put(self, key: str, unique: str) -> bool:
        return self._write("put", key, unique)

    def create(self, key: str, unique: str) -> bool:
        return self._write("put", key, unique, NOTHING)

    def delete(self, key: str, unique: str) -> bool:
        return self._write("delete", key, None)

    def compare(self, key: str, unique: str) -> bool:
        seen = self._get(key, "lease")
        return seen is not None and self._write("put", key, unique, seen)

    def compare_and_delete(self, key: str, unique: str) -> bool:
        seen = self._get(key, "lease")
        if seen is None or seen == NOTHING:
            return seen is not None
        return self._write("delete", key, None, seen)

    def put_once(self, key: str, unique: str) -> bool:
        """A put that is repeated, through other nodes, until its outcome is known.

        Some are repeated once more: a client that did not hear the answer does that.
        """
        called = began = monotonic()
        took = 0.0
        client = self._own
        for _ in range(_REPEATS):
            try:
                written = client.put(key, unique, None, unique)
            except WrongAnswerError:
                self._note("put", key, unique, Written("unknown"), called, once=unique)
                raise
            took = max(took, monotonic() - began)
            if written.outcome not in ("unknown", "never") or self._pause(_AFTER_A_FAILURE):
                break
            client, began = self._other(), monotonic()
        # While there was no answer it may have been done, whatever the last one says.
        if written.outcome == "never":
            written = Written("unknown")
        self._note("put", key, unique, written, called, once=unique, took=took)
        if written.outcome == "done" and self._rng.random() < 0.5:
            began = monotonic()
            again = self._other().put(key, unique, None, unique)
            if again.outcome == "done" and again.version != written.version:
                self._note("put", key, unique, again, began, once=unique)
        return written.outcome == "done"

    def _other(self) -> KeysClient:
        return self._rng.choice(self._others)

    def _get(self, key: str, consistency: str) -> Seen | None:
        called = monotonic()
        seen = self._own.get(key, consistency)
        if seen is not None:
            may_be_old = consistency == "stale_ok"
            self._history.note(read(self._own, key, seen, called, may_be_old=may_be_old))
        return seen

    def _note(self, *what: Any, **more: Any) -> None:
        self._history.note(wrote(self._own, *what, **more))

    def _write(self, kind: str, key: str, value: str | None, expected: Seen | None = None) -> bool:
        condition: Version | None = None if expected is None else expected.version
        called = monotonic()
        try:
            if kind == "put":
                assert value is not None
                written = self._own.put(key, value, condition, "")
            else:
                written = self._own.delete(key, condition)
        except WrongAnswerError:
            self._note(kind, key, value, Written("unknown"), called, expected)
            raise
        if written.outcome != "never":
            self._note(kind, key, value, written, called, expected)
        return written.outcome in ("done", "refused")


def read(
    client: KeysClient, key: str, seen: Seen, called: float, *, may_be_old: bool = False
) -> Did:
    """A read that was answered just now."""
    now = monotonic()
    return Did(
        client.name, "get", key, "done", seen.value, called, now, now - called,
        version=seen.version, may_be_old=may_be_old,
    )  # fmt: skip


def wrote(
    client: KeysClient,
    kind: str,
    key: str,
    value: str | None,
    written: Written,
    called: float,
    expected: Seen | None = None,
    *,
    once: str = "",
    took: float | None = None,
) -> Did:
    """A write that was answered, or given up, just now."""
    now = monotonic()
    return Did(
        client.name, kind, key, written.outcome, value, called,
        math.inf if written.outcome == "unknown" else now,
        now - called if took is None else took,
        written.version, expected, once, written.existed,
    )  # fmt: skip


def wait_for_key(choices: Callable[[str], bool]) -> str:
    """The first key of many for which this holds."""
    return next(key for key in (f"probe-{number}" for number in count()) if choices(key))
