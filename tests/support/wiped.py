"""A store in a database that is made anew while a program has it open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import pytest

from pxrs.errors import StoreDamaged
from pxrs.stores.api import LendsSessions, Stores
from pxrs.types import Check, Committed, Put

AGAIN = "start this process again"
Made = TypeVar("Made", bound=Stores)


def check_told_once(
    old: Made, make_anew: Callable[[], Made], caplog: pytest.LogCaptureFixture
) -> Made:
    """The handle that knew the old store is told, logs it once, and writes nothing; the new one."""
    lending = old.coord
    assert isinstance(lending, LendsSessions)
    made = old.coord.commit([], [Put("k", b"old")])
    assert isinstance(made, Committed)
    new = make_anew()
    new.coord.commit([], [Put("k", b"new")])
    with caplog.at_level(logging.ERROR, "pxrs.store"):
        with pytest.raises(StoreDamaged, match=AGAIN):
            old.coord.session(60.0)
        stale = [Check("k", made.versions["k"])], [Put("k", b"stale")]
        for call in (
            lambda: old.coord.commit(*stale),
            lambda: old.coord.get("k"),
            lambda: old.coord.watch("k"),
            lambda: lending.lend(60.0),
            old.queues.all,
        ):
            with pytest.raises(StoreDamaged, match=AGAIN):
                call()
        old.close()
    assert len([line for line in caplog.messages if "is another store now" in line]) == 1
    record = new.coord.get("k")
    assert record is not None
    assert record.value == b"new"
    return new
