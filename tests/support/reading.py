"""What tests look at: everything a topic holds."""

from __future__ import annotations

from collections import defaultdict

from pxrs import Message, Pxrs


def read_partition(px: Pxrs, topic: str, partition: int) -> list[Message]:
    """What a partition holds now, and perhaps what comes meanwhile; offsets are checked."""
    reader = px.reader(topic)
    start, end = reader.bounds(partition)
    messages: list[Message] = []
    while start + len(messages) < end:
        messages += reader.read(partition, start + len(messages))
    assert [message.offset for message in messages] == list(range(start, start + len(messages)))
    return messages


def read_all(px: Pxrs, topic: str) -> list[Message]:
    """All messages, partition by partition."""
    count = px.topics.describe(topic).topic.partitions
    return [message for number in range(count) for message in read_partition(px, topic, number)]


def values_by_key(px: Pxrs, topic: str) -> dict[bytes, list[int]]:
    """For topics whose values are numbers: each key's, in the order of the log."""
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for message in read_all(px, topic):
        found[message.key].append(int(message.value))
    return dict(found)
