"""Names of a folder are kept: what others do has to show, and a take must not list everything."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from typing import Any

import pytest
from kazoo.client import KazooClient

from pxrs.config import parse_url, zookeeper_settings
from pxrs.stores.open import open_stores
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from pxrs.types import Check, Delete, Holder, NewItem, Put, QueueChange

pytestmark = pytest.mark.engine("zookeeper")

_KEYS = [f"{folder}{leaf}" for folder in ("a/", "a/b/", "") for leaf in ("x", "y.1", "é%", "z z")]
_STEPS = 150


@pytest.mark.parametrize("seed", range(3))
def test_a_list_is_as_of_now_whoever_changed_what(zookeeper_url: str, seed: int) -> None:
    rng = random.Random(seed)
    records: dict[str, bytes] = {}
    with ExitStack() as stack:
        settings = zookeeper_settings(parse_url(zookeeper_url))
        handles = [stack.enter_context(closing(ZooKeeperCoord(settings))) for _ in range(3)]
        for step in range(_STEPS):
            writer, reader = rng.choice(handles), rng.choice(handles)
            picked = rng.sample(_KEYS, rng.randint(1, 3))
            writes = [
                Put(key, b"%d" % step) if rng.random() < 0.6 else Delete(key) for key in picked
            ]
            absent = [each for each in writes if isinstance(each, Put) and each.key not in records]
            writer.commit([Check(each.key, 0) for each in absent], writes)
            for write in writes:
                if isinstance(write, Put):
                    records[write.key] = write.value
                else:
                    records.pop(write.key, None)
            prefix, after = rng.choice(["", "a/", "a/b", "z"]), rng.choice([None, *_KEYS])
            limit = rng.choice([None, 1, 3])
            expected = sorted(
                key for key in records if key.startswith(prefix) and (after is None or key > after)
            )
            found = reader.list(prefix, after=after, limit=limit)
            assert [each.key for each in found] == expected[:limit]
            assert all(each.value == records[each.key] for each in found)


def test_a_take_does_not_ask_for_the_names_of_all_items(
    zookeeper_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    children = KazooClient.get_children_async

    def counting(client: Any, path: str, *args: Any, **options: Any) -> Any:
        answer = children(client, path, *args, **options)
        if options.get("include_data"):
            answer.rawlink(lambda done: listed.append(len(done.value[0])) if done.value else None)
        return answer

    monkeypatch.setattr(KazooClient, "get_children_async", counting)
    with closing(open_stores(zookeeper_url)) as stores:
        queues, session = stores.queues, stores.coord.session(30.0)
        items = tuple(NewItem(queue="q", body=b"x") for _ in range(queues.limits.items))
        for _ in range(3):
            queues.apply(QueueChange(Holder(session.id, "put"), (), items))
        for number in range(10):
            holder = Holder(session.id, f"take-{number}")
            (delivery,) = queues.take("q", holder, 1).items
            queues.apply(QueueChange(holder, (delivery.held,), ()))
    # Once for what is ready; not ten times.
    assert sum(count > len(items) for count in listed) == 1
