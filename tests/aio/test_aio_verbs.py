"""The asynchronous classes have the methods of the blocking ones, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

import pxrs
from pxrs import aio

# What only the library itself calls, and what awaiting stands for.
ONLY_BLOCKING = {
    "Consumer": {
        "alive", "attempts", "came_back", "committing", "has_left", "settled", "take", "take_away",
        "wait", "wake", "wake_steward", "member_steps",
    },
    "Pxrs": {"is_around_here", "new_run"},
    "Producer": {"deliver", "hurry", "refuse_closed", "sending"},
    "Sent": {"when_done"},
    "UnitOfWork": {"has_connection", "holder", "keep_hold", "is_lost", "unread"},
    "Transaction": {
        "has_connection", "holder", "keep_hold", "is_lost", "keeps_on_conflict", "unread",
    },
}  # fmt: skip
ONLY_ASYNC = {"Follow", "Connecting", "Joining", "Arriving", "ConsumerOptions"}
# These return the classes of their own side, or take coroutines.
OF_ITS_OWN = {
    "producer", "reader", "follow", "consumer", "batches", "transaction", "run_transaction",
    "begin", "listen", "commit", "commit_async",
}  # fmt: skip
# What a listener's worker tells `take_many`: who awaits is woken and cancelled otherwise.
OF_WORKERS = {"watch", "stopping"}
# Attributes of the blocking class, properties of the other.
ATTRIBUTES = {"Reader": {"topic"}, "Listener": {"handled", "failed"}}
# What a class is for its own collaborators.
ONLY_OURS = {"Transaction": {"submit"}}
PAIRS = [
    (pxrs.Pxrs, aio.Pxrs),
    (pxrs.Producer, aio.Producer),
    (pxrs.Reader, aio.Reader),
    (pxrs.Sent, aio.Sent),
    (pxrs.SentMany, aio.SentMany),
    (pxrs.Consumer, aio.Consumer),
    (pxrs.Groups, aio.Groups),
    (pxrs.Transaction, aio.Transaction),
    (pxrs.UnitOfWork, aio.UnitOfWork),
    (pxrs.Listener, aio.Listener),
    (pxrs.Queues, aio.Queues),
]


def verbs(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    """Public methods and their parameters: name, kind and default; properties have none."""
    found: dict[str, list[tuple[str, object, object]]] = {}
    for name, member in members(kind).items():
        if isinstance(member, property):
            found[name] = []
        elif inspect.isfunction(member):
            parameters = inspect.signature(member).parameters.values()
            found[name] = [
                (each.name, each.kind, each.default)
                for each in parameters
                if each.name not in OF_WORKERS
            ]
    return found


def members(kind: type) -> dict[str, object]:
    """What the class and those of ours that it is made of define for users."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("pxrs."):
            found |= {name: it for name, it in vars(base).items() if not name.startswith("_")}
    return found


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_verbs(blocking: type, awaited: type) -> None:
    expected = verbs(blocking)
    for name in ONLY_BLOCKING.get(blocking.__name__, ()):
        del expected[name]
    found = verbs(awaited)
    for name in ATTRIBUTES.get(awaited.__name__, ()):
        assert found.pop(name) == []
    for name in ONLY_OURS.get(awaited.__name__, ()):
        del found[name]
    assert found == expected


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_same_types(blocking: type, awaited: type) -> None:
    for name in verbs(awaited).keys() & verbs(blocking).keys():
        mine, theirs = getattr(awaited, name), getattr(blocking, name)
        if inspect.isfunction(mine) and name not in OF_ITS_OWN:
            expected = {
                name: kind
                for name, kind in theirs.__annotations__.items()
                if name not in OF_WORKERS
            }
            assert mine.__annotations__ == expected, name


def test_connect_takes_the_same_parameters() -> None:
    blocking = inspect.signature(pxrs.connect).parameters
    assert inspect.signature(aio.connect).parameters == blocking


def test_exported_names() -> None:
    assert {kind.__name__ for _, kind in PAIRS} | ONLY_ASYNC | {"connect"} == set(aio.__all__)
    assert all(hasattr(aio, name) for name in aio.__all__)
