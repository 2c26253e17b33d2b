"""What an operator sees of a queue with ZooKeeper's own tools, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kazoo.client import KazooClient

from pxrs.config import parse_url, zookeeper_settings
from pxrs.errors import InvalidRequest, MessageTooLarge
from pxrs.stores.open import open_stores
from pxrs.testing.conformance.queue_tools import Worker, look
from pxrs.types import NewItem

pytestmark = pytest.mark.engine("zookeeper")


@contextmanager
def znodes(url: str) -> Iterator[Any]:
    """Reads the queue `mail` with a bare client."""
    settings = zookeeper_settings(parse_url(url))
    client = KazooClient(hosts=",".join(settings.hosts))
    client.start()
    top = f"/{settings.prefix}/records/queues/mail"

    def names(folder: str) -> list[str]:
        # The servers remove folders that are empty.
        there = client.exists(f"{top}/{folder}") is not None
        found = client.get_children(f"{top}/{folder}") if there else []
        return sorted(name.removeprefix("=") for name in found if name.startswith("="))

    def text(path: str) -> bytes:
        folder, _, name = path.rpartition("/")
        value: bytes = client.get(f"{top}/{folder}/={name}")[0]
        return value

    yield names, text
    client.stop()
    client.close()


def test_items_locks_meta_and_dlq_are_where_the_reference_has_them(zookeeper_url: str) -> None:
    stores = open_stores(zookeeper_url)
    worker = Worker(stores)
    worker.put(b"one", b"two", b"three", queue="mail")
    held = worker.take_one("mail")
    worker.release(worker.take_one("mail"), error="no address", dead=True)
    with znodes(zookeeper_url) as (names, text):
        assert names("items") == ["item-000000000001", "item-000000000003"]
        assert names("locks") == ["lock-000000000001"]
        assert names("meta") == ["meta-000000000001"]
        assert names("dlq") == ["item-000000000002"]
        assert text("items/item-000000000001").endswith(b"\none")
        assert b'"deliveries":1' in text("meta/meta-000000000001")
        assert worker.session.id.encode() in text("locks/lock-000000000001")
        dead = text("dlq/item-000000000002")
        assert dead.endswith(b"\ntwo")
        assert b"no address" in dead
        worker.apply(held)
        assert names("items") == ["item-000000000003"]
        assert names("locks") == names("meta") == []
    stores.close()


def test_what_does_not_fit_into_a_megabyte_is_refused_and_said(zookeeper_url: str) -> None:
    stores = open_stores(zookeeper_url)
    worker, limits = Worker(stores), stores.queues.limits
    half = bytes(limits.body_bytes * 2 // 3)
    with pytest.raises(MessageTooLarge, match=str(limits.body_bytes)):
        worker.put(bytes(limits.body_bytes + 1), queue="mail")
    with pytest.raises(InvalidRequest, match="limit of this store is 1000000"):
        worker.apply(put=[NewItem(queue="mail", body=half)] * 2)
    with pytest.raises(InvalidRequest, match=f"limit of this store is {limits.items}"):
        worker.apply(put=[NewItem(queue="mail", body=b"")] * (limits.items + 1))
    keyed = [
        NewItem(queue="mail", body=b"", key=f"k{number}", dedupe=f"d{number}", dedupe_window=9)
        for number in range(limits.items)
    ]
    with pytest.raises(InvalidRequest, match="of fewer keys and queues"):
        worker.apply(put=keyed)
    assert stores.queues.find("mail") is None
    worker.put(bytes(limits.body_bytes), queue="mail")
    assert [len(item.body) for item in look(stores, "mail")] == [limits.body_bytes]
    stores.close()
