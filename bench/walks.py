"""The ways of a message and of an item through the code, counted: `./run bench walks`.

Every call of a function of pxrs in the thread that takes the step, on SQLite, once topics are known
and partitions are owned. What the engine does behind the seams is counted apart.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pxrs

_SOURCE = Path(pxrs.__file__).parent
# They are no calls from Python 3.12 on.
_INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
_LONG = 60.0


class Walk:
    """The calls of one way through the code: the module, the function, and how deep it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[int, str, str]] = []
        self.in_engine = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is called in the block, by this thread."""
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name in _INLINED:
            return
        if (module := _module(frame)) is None:
            return
        above = list(_above(frame))
        if any(each.startswith("stores/") for each in (module, *above)):
            self.in_engine += 1
        else:
            self.calls.append((len(above), module, frame.f_code.co_qualname))

    @property
    def modules(self) -> list[str]:
        """In the order in which they are first called."""
        return list(dict.fromkeys(module for _, module, _ in self.calls))


def _above(frame: FrameType) -> Iterator[str]:
    """The modules of ours that the call came through."""
    above = frame.f_back
    while above is not None:
        if (module := _module(above)) is not None:
            yield module
        above = above.f_back


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(_SOURCE)) if path.is_relative_to(_SOURCE) else None


def walks(folder: Path) -> list[Walk]:
    """A message is sent and flushed; one is taken by a loop, handled and auto-committed.

    And an item is put, and taken and done in a transaction.
    """
    with pxrs.connect(f"sqlite:///{folder / 'walks.db'}") as px:
        px.topics.create("t", partitions=1)
        return [_sending(px), _consuming(px), _working(px)]


def _sending(px: pxrs.Pxrs) -> Walk:
    walk = Walk("send, and flush until it is durable")
    # The background thread waits for company for longer than this takes.
    with px.producer(linger=_LONG) as producer:
        producer.send("t", b"value", b"key")
        producer.flush()
        with walk.counted():
            producer.send("t", b"value", b"key")
            producer.flush()
    return walk


def _consuming(px: pxrs.Pxrs) -> Walk:
    walk = Walk("one turn of `for message in consumer`, and its auto-commit")
    with px.consumer("t", group="g", auto_commit_interval=_LONG) as consumer:
        messages = iter(consumer)
        for _ in range(2):
            next(messages)
        with px.producer() as producer:
            for _ in range(2):
                producer.send("t", b"value", b"key")
        commit = _auto_commit(consumer)
        commit()
        with walk.counted():
            next(messages)
        next(messages)  # only now the one before is handled
        with walk.counted():
            commit()
    return walk


def _working(px: pxrs.Pxrs) -> Walk:
    walk = Walk("put an item; take it in a transaction, and commit")
    for _ in range(2):
        px.put("q", b"value")
    with px.transaction() as tx:
        tx.take("q")
    with walk.counted():
        px.put("q", b"value")
        with px.transaction() as tx:
            tx.take("q")
    return walk


def _auto_commit(consumer: pxrs.Consumer) -> Callable[[], object]:
    """What the background thread calls when it is time."""
    return consumer._steps.commit_handled


def show(say: Callable[[str], None], *, tree: bool) -> None:
    """Print the walks, with every call if `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        for walk in walks(Path(folder)):
            say(
                f"{walk.name}: {len(walk.calls)} calls in {len(walk.modules)} modules, "
                f"and {walk.in_engine} in the engine"
            )
            say(f"  {', '.join(walk.modules)}")
            top = min(depth for depth, _, _ in walk.calls)
            for depth, module, function in walk.calls if tree else ():
                say(f"    {'  ' * (depth - top)}{function}  {module}")
