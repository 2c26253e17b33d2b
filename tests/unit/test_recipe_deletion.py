"""A deletion of a queue by the recipe that was begun and not finished."""

from __future__ import annotations

from typing import Any

import pytest

from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.queues_on_coord.drafts import Directory
from pxrs.stores.queues_on_coord.layout import LIST
from pxrs.stores.queues_on_coord.queues import RecipeQueues
from pxrs.types import Holder, NewItem, QueueChange


def test_a_queue_made_since_is_not_deleted_by_who_finishes_the_deletion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stores = MemoryStores()
    queues, other = RecipeQueues(stores.coord), RecipeQueues(stores.coord)
    holder = Holder(stores.coord.session(60.0).id, "tx")
    queues.create("q")
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "finish_deletion", lambda *_: None)
        queues.delete("q")
    assert queues.find("q") is None
    listed = stores.coord.list
    looks: list[str] = []

    def make_it_again_meanwhile(prefix: str, *args: Any, **options: Any) -> Any:
        found = listed(prefix, *args, **options)
        looks.extend([prefix] if prefix == LIST else [])
        if looks == [LIST, LIST]:
            # The second look is for deletions that were not finished.
            looks.append("made")
            other.apply(QueueChange(holder, (), (NewItem(queue="q", body=b"new"),)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stores.coord, "list", make_it_again_meanwhile)
        queues.reap()
    assert looks == [LIST, LIST, "made"]
    assert [item.body for item in queues.peek("q")] == [b"new"]
    stores.close()
