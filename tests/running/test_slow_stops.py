"""Stopping while handlers take their time: whoever waits is told what for."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE, Child
from support.inside import say, signal_when_heard

pytestmark = pytest.mark.engine("sqlite")


class Told(logging.Handler):
    """Sets the event when somebody is told that a stop takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "stopping" in record.getMessage():
            self.words.append(record.getMessage())
            self.event.set()


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    logging.getLogger("pxrs").addHandler(told)
    yield told
    logging.getLogger("pxrs").removeHandler(told)


@pytest.mark.parametrize("limit", [None, 20.0])
def test_run_tells_how_many_handlers_it_waits_for(told: Told, limit: float | None) -> None:
    with pxrs.connect("memory://") as px:
        px.topics.create("orders", partitions=2)
        with px.producer() as producer:
            for partition in (0, 1):
                producer.send("orders", "x", partition=partition)
        both = threading.Barrier(2)

        def handle(message: pxrs.Message) -> None:
            both.wait(PATIENCE)
            px.stop()
            assert told.event.wait(PATIENCE)

        px.run(handle, topic="orders", group="g", workers=2, max_handler_time=limit).join()
        assert px.groups.describe("g").lag == 0
    until = "" if limit is None else ", up to 20 s"
    assert told.words == [f"stopping: waiting for 2 handlers to return{until}"]


def listen_and_be_interrupted(url: str) -> None:
    """In a child: a handler that goes on until somebody was told."""
    told = Told()
    logging.getLogger("pxrs").addHandler(told)

    def handle(item: pxrs.Item, tx: Any) -> None:
        signal_when_heard(signal.SIGINT)
        say(told.event.wait(PATIENCE))

    with pxrs.connect(url) as px, px.listen("inbox", handle) as listener:
        listener.join()
    say(told.words)


@pytest.mark.long
def test_listen_tells_how_many_handlers_it_waits_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    with pxrs.connect(url) as px:
        px.put("inbox", "x")
    with Child(listen_and_be_interrupted, url) as child:
        assert child.rest() == [True, ["stopping: waiting for 1 handler to return"]]
        assert child.join() == 0
