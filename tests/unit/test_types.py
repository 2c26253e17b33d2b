"""Values are frozen, so that a store may hand out what it keeps."""

from __future__ import annotations

import enum
import inspect
import pickle

import msgspec
import pytest

from pxrs import types
from pxrs.types import Batch, Fence, Message, Position, Topic, TopicPartition, Versioned

MESSAGE = Message(Fence("orders", 3, 9), 42, 1_700_000_000_000, b"key", b"value", (("a", None),))

CLASSES = [
    found
    for _, found in inspect.getmembers(types, inspect.isclass)
    if found.__module__ == types.__name__
]

SAMPLES = [
    MESSAGE,
    MESSAGE.fence,
    TopicPartition("orders", 3),
    Position("orders", 3, 42),
    Topic(name="orders", id="t1", partitions=4),
    Versioned("groups/g", b"{}", 7),
    Batch(bytearray(b"x"), 1, 0),
]


def frozen(found: type) -> bool:
    if issubclass(found, msgspec.Struct):
        return found.__struct_config__.frozen
    if issubclass(found, enum.Enum):
        return True
    return issubclass(found, tuple) and hasattr(found, "_fields")


def test_there_are_values() -> None:
    assert len(CLASSES) > 15


@pytest.mark.parametrize("found", CLASSES, ids=lambda found: found.__name__)
def test_every_value_type_is_frozen(found: type) -> None:
    assert frozen(found)


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_no_field_can_be_set_or_deleted(value: object) -> None:
    fields: tuple[str, ...] = getattr(value, "_fields", ()) or getattr(
        value, "__struct_fields__", ()
    )
    assert fields
    for field in fields:
        with pytest.raises(AttributeError):
            setattr(value, field, None)
        with pytest.raises(AttributeError):
            delattr(value, field)


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_survives_pickling(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_message_knows_its_topic_and_partition() -> None:
    assert MESSAGE.topic == "orders"
    assert MESSAGE.partition == 3
    assert MESSAGE.fence.epoch == 9


@pytest.mark.parametrize("name", ["topic", "partition"])
def test_topic_and_partition_of_a_message_come_from_its_fence(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(MESSAGE, name, "other")
    assert name not in MESSAGE.__struct_fields__


def test_equal_values_are_equal() -> None:
    assert msgspec.structs.replace(MESSAGE, offset=42) == MESSAGE
    assert msgspec.structs.replace(MESSAGE, offset=43) != MESSAGE
    assert len({TopicPartition("a", 0), TopicPartition("a", 0), TopicPartition("a", 1)}) == 2
