"""The asynchronous classes have the methods of the blocking ones, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

import pxrs
from pxrs import aio

# What only the library itself calls, and what awaiting stands for.
ONLY_BLOCKING = {
    "Consumer": {
        "alive", "all_at_once", "attempts", "by_partition", "desk", "finish", "one_by_one",
        "settled", "take", "take_away", "wait", "wake", "wake_steward",
    },
    "Pxrs": {"new_run", "begin", "create_queue", "listen", "put", "queues", "transaction"},
    "Producer": {"deliver", "hurry", "sending"},
    "Sent": {"when_done"},
}  # fmt: skip
ONLY_ASYNC = {"Follow", "Connecting", "Joining", "Arriving"}
# These return the classes of their own side, or take coroutines.
OF_ITS_OWN = {
    "producer", "reader", "follow", "consumer", "batches", "transaction", "run_transaction",
}  # fmt: skip
PAIRS = [
    (pxrs.Pxrs, aio.Pxrs),
    (pxrs.Producer, aio.Producer),
    (pxrs.Reader, aio.Reader),
    (pxrs.Sent, aio.Sent),
    (pxrs.SentMany, aio.SentMany),
    (pxrs.Consumer, aio.Consumer),
    (pxrs.Groups, aio.Groups),
    (pxrs.Transaction, aio.Transaction),
]


def verbs(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    """Public methods and their parameters: name, kind and default; properties have none."""
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = []
        elif inspect.isfunction(member):
            parameters = inspect.signature(member).parameters.values()
            found[name] = [(each.name, each.kind, each.default) for each in parameters]
    return found


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_verbs(blocking: type, awaited: type) -> None:
    expected = verbs(blocking)
    for name in ONLY_BLOCKING.get(blocking.__name__, ()):
        del expected[name]
    found = verbs(awaited)
    if awaited is aio.Reader:
        assert found.pop("topic") == []  # an attribute of the other
    assert found == expected


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_types(blocking: type, awaited: type) -> None:
    for name in verbs(awaited).keys() & verbs(blocking).keys():
        mine, theirs = getattr(awaited, name), getattr(blocking, name)
        if inspect.isfunction(mine) and name not in OF_ITS_OWN:
            expected = dict(theirs.__annotations__)
            assert mine.__annotations__ == expected, name


def test_connect_takes_the_same_parameters() -> None:
    blocking = inspect.signature(pxrs.connect).parameters
    assert inspect.signature(aio.connect).parameters == blocking


def test_exported_names() -> None:
    assert {kind.__name__ for _, kind in PAIRS} | ONLY_ASYNC | {"connect"} == set(aio.__all__)
    assert all(hasattr(aio, name) for name in aio.__all__)
