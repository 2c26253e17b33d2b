"""Other queues on SQLite, as their own manuals have it, all at `synchronous=FULL`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers import require_full


class Peer(NamedTuple):
    """An open queue: `take` removes one item, acknowledged where the peer knows that."""

    put: Callable[[bytes], Any]
    take: Callable[[], Any]
    close: Callable[[], None]


def persist_queue(folder: Path) -> Peer:
    """`SQLiteQueue`: gone once it is handed out."""
    from persistqueue import SQLiteQueue

    queue = SQLiteQueue(str(folder), auto_commit=True)
    require_full(queue._putter)
    return Peer(queue.put, lambda: queue.get(block=False), queue.close)


def persist_queue_ack(folder: Path) -> Peer:
    """`SQLiteAckQueue`: taken, then acknowledged."""
    from persistqueue import SQLiteAckQueue

    queue = SQLiteAckQueue(str(folder), auto_commit=True)
    require_full(queue._putter)
    return Peer(queue.put, lambda: queue.ack(queue.get(block=False)), queue.close)


def litequeue(folder: Path) -> Peer:
    """`LiteQueue`: popped, then done. It takes text only."""
    from litequeue import LiteQueue

    queue = LiteQueue(folder / "queue.db")
    queue.conn.execute("PRAGMA synchronous=FULL")
    require_full(queue.conn)
    return Peer(
        lambda value: queue.put(value.decode()),
        lambda: queue.done(queue.pop().message_id),
        queue.close,
    )


def huey(folder: Path) -> Peer:
    """huey's SQLite storage, without tasks: gone once it is handed out."""
    from huey.storage import SqliteStorage

    storage = SqliteStorage(filename=str(folder / "huey.db"), fsync=True)
    require_full(storage.conn)

    def take() -> None:
        if storage.dequeue() is None:
            raise RuntimeError("the queue is empty")

    return Peer(storage.enqueue, take, storage.close)


PEERS = {
    "persist-queue": (persist_queue, "lost if its worker dies"),
    "persist-queue, acknowledged": (persist_queue_ack, ""),
    "litequeue": (litequeue, "acknowledged"),
    "huey": (huey, "lost if its worker dies"),
}
