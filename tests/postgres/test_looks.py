"""What a process looks at by itself, if no notification comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pxrs.stores.postgres.looks import Looks
from pxrs.types import Check, Conflict, Delete, Put
from support.child import PATIENCE
from support.postgres import PostgresLab

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture
def deaf(postgres_url: str) -> Iterator[PostgresLab]:
    lab = PostgresLab(postgres_url, channel="nobody_hears_this")
    yield lab
    lab.close()


class Gate:
    """Looks wait while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._looked = threading.Semaphore(0)
        self.open()
        look = Looks.look

        def gated(*arguments: Any) -> Any:
            assert self._open.wait(PATIENCE)
            seen = look(*arguments)
            self._looked.release()
            return seen

        monkeypatch.setattr(Looks, "look", gated)

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        """Nobody looks from now on, and there was a look before."""
        assert self._looked.acquire(timeout=PATIENCE)
        self._open.clear()
        while self._looked.acquire(blocking=False):
            pass


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.parametrize("read", ["get", "list", "conflict"])
def test_a_record_that_came_and_went_between_two_looks(
    deaf: PostgresLab, gate: Gate, read: str
) -> None:
    """Who has read it meanwhile waits for its end, and both looks saw nothing."""
    here, there = deaf.open().coord, deaf.open().coord
    watch = here.watch("k/")
    gate.shut()
    watch.wait(0)
    there.commit((), (Put("k/1", b"1"),))
    if read == "get":
        assert here.get("k/1") is not None
    elif read == "list":
        assert here.list("k/")
    else:
        assert isinstance(here.commit((Check("k/1", 0),), (Put("k/1", b"2"),)), Conflict)
    there.commit((), (Delete("k/1"),))
    gate.open()
    assert watch.wait(PATIENCE)
    watch.close()


def test_what_stays_as_it_was_read_wakes_nobody(deaf: PostgresLab, gate: Gate) -> None:
    here = deaf.open().coord
    here.commit((), (Put("k/1", b"1"),))
    watch = here.watch("k/")
    for _ in range(2):
        assert here.get("k/1") is not None
        gate.shut()
        gate.open()
    watch.wait(0)
    for _ in range(3):
        assert here.get("k/1") is not None
        gate.shut()
        gate.open()
        assert not watch.wait(0)
    watch.close()
