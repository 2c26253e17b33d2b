"""The error tree is what its docstring says, and errors survive the way to another process."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import NamedTuple

import pytest

from pxrs import errors
from pxrs.errors import PxrsError
from pxrs.types import TopicPartition, Version, Versioned

CLASSES: dict[str, type[PxrsError]] = {
    name: found
    for name, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, PxrsError)
}

SAMPLES: list[PxrsError] = [
    errors.MissingExtra("etcd", "etcd"),
    errors.TopicNotFound("orders"),
    errors.PartitionNotFound("orders", 7, 4),
    errors.QueueNotFound("inbox"),
    errors.GroupNotFound("billing"),
    errors.GroupNotEmpty("billing", ("a", "b")),
    errors.OffsetOutOfRange("orders", 3, 5, 10, 20),
    errors.MessagesLost("orders", 3, 25, 10, 20),
    errors.DamagedBatch("orders", 3, 5, 9, "the checksum is wrong"),
    errors.Fenced("not yours any more", [TopicPartition("orders", 3)]),
    errors.Displaced("another process has this name"),
    errors.VersionMismatch(b"k", Version(1, 2), None),
    errors.AlreadyExists(b"k", Version(1, 2)),
    errors.NotLeader(b"k", "a", "host:6000"),
    errors.RetryExhausted(3, errors.StoreUnavailable("gone")),
    errors.CommitConflict({"a": Versioned("a", b"x", 3), "b": None}),
]
WITH_OWN_INIT = {type(sample) for sample in SAMPLES}
SAMPLES += [found("it failed", 5) for found in CLASSES.values() if found not in WITH_OWN_INIT]


class Entry(NamedTuple):
    name: str
    parent: str | None
    retryable: bool


def documented() -> list[Entry]:
    """The tree of the module's docstring, one entry per line."""
    tree = (errors.__doc__ or "").split("```")[1].strip()
    path: list[str] = []
    entries = []
    for line in tree.splitlines():
        matched = re.match(r"([│├└─ ]*)(\w+) *(↻?)", line)
        assert matched is not None, line
        indent, name, mark = matched.groups()
        del path[len(indent) // 4 :]
        entries.append(Entry(name, path[-1] if path else None, mark == "↻"))
        path.append(name)
    return entries


def test_the_docstring_lists_every_class_once() -> None:
    assert sorted(entry.name for entry in documented()) == sorted(CLASSES)


@pytest.mark.parametrize("entry", documented(), ids=lambda entry: entry.name)
def test_a_class_is_as_documented(entry: Entry) -> None:
    found = CLASSES[entry.name]
    parent = found.__base__ if entry.parent is None else found.__bases__[0]
    assert parent is (CLASSES[entry.parent] if entry.parent else Exception)
    assert found.retryable is entry.retryable


@pytest.mark.parametrize("found", CLASSES.values(), ids=CLASSES)
def test_bad_input_and_nothing_else_is_a_value_error(found: type[PxrsError]) -> None:
    assert issubclass(found, ValueError) is issubclass(found, errors.InvalidRequest)


def test_there_is_a_sample_of_every_class() -> None:
    assert {type(sample) for sample in SAMPLES} == set(CLASSES.values())


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: PxrsError) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))


def test_an_error_keeps_its_notes() -> None:
    error = errors.TopicNotFound("orders")
    error.add_note("while joining a group")
    assert copy.copy(error).__notes__ == ["while joining a group"]
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while joining a group"]


class Custom(errors.StoreError):
    """An error of a backend that somebody else wrote."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port} is gone")
        self.host = host


def test_a_strangers_error_survives_too() -> None:
    again = pickle.loads(pickle.dumps(Custom("db", 5432)))
    assert (str(again), again.host) == ("db:5432 is gone", "db")


def test_errors_carry_what_a_program_needs() -> None:
    outside = errors.OffsetOutOfRange("orders", 3, 25, 10, 20)
    assert (outside.topic, outside.partition, outside.offset) == ("orders", 3, 25)
    assert (outside.start, outside.end) == (10, 20)
    assert "past the end" in str(outside)
    assert "before the start" in str(errors.OffsetOutOfRange("orders", 3, 5, 10, 20))
    assert errors.MissingExtra("etcd", "etcd").extra == "etcd"
    assert errors.CommitConflict({"b": None, "a": None}).args == ("another writer changed: a, b",)


def test_errors_quote_one_length_of_any_value() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError

    assert errors.quoted("short") == "'short'"
    assert errors.quoted("x" * 100) == repr("x" * 100)
    assert errors.quoted("x" * 101) == repr("x" * 100) + "…"
    assert errors.quoted(b"\0" * 10_000_000) == repr(b"\0" * 100) + "…"
    assert len(errors.quoted(list(range(1000)))) == 101
    assert errors.quoted(Broken()) == "<Broken>"
