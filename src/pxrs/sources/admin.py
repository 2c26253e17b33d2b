"""`px.attach` and `px.sources`: attaching and managing virtual topics."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from pxrs.config import check_partitions
from pxrs.errors import InvalidRequest, PxrsError, TopicNotFound
from pxrs.sources.descriptions import described, use_prepared
from pxrs.sources.log import LogWithSources
from pxrs.sources.table import OpenTable
from pxrs.sources.virtual import VirtualLog, check_streams
from pxrs.topics import Topics
from pxrs.types import Topic

Statements = list[str]


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A virtual topic, the settings of its source, and where the source ends.

    `end` is above the offset of the last row. All rows below `final` are there; rows from there to
    `end` may wait for a transaction with a lower id. None: not known yet.
    """

    topic: Topic
    settings: dict[str, Any]
    end: int
    final: int | None


class Sources:
    """Lists, describes, prepares and detaches virtual topics. Thread-safe."""

    def __init__(self, topics: Topics, log: LogWithSources, store_url: str) -> None:
        self._topics = topics
        self._log = log
        self._store_url = store_url

    def _attach(self, name: str, source: object, partitions: int) -> Topic:
        """See `Pxrs.attach`."""
        description = described(source)
        opened = description.open(self._store_url)
        try:
            check = getattr(opened, "check", None)
            if check is not None:
                check()
            check_partitions(partitions)
            check_streams(partitions, opened)
            if isinstance(opened, OpenTable):
                opened.check_partitions(partitions)
            # Some settings are known only now, such as the number of a topic's streams.
            settings = {**description.settings(), **getattr(opened, "found", {})}
            topic = self._topics._attach(
                name, partitions, settings, partitioner=description.partitioner
            )
            use_prepared(topic, opened)
            self._log.use(topic.id, VirtualLog(topic, opened))
        except BaseException:
            # An object of the caller's own stays open: another topic may lie over it.
            if opened is not source:
                with suppress(PxrsError):
                    opened.close()
            raise
        return topic

    def list(self) -> list[Topic]:
        """All virtual topics, by name."""
        return [topic for topic in self._topics.list() if topic.source is not None]

    def describe(self, name: str) -> SourceInfo:
        """Return a virtual topic with its source."""
        topic = self._find(name)
        with self._log.reading(topic.id) as log:
            source = log.source
            streams = range(source.streams)
            finals = [source.final(stream) for stream in streams]
            end = max(source.bounds(stream).end for stream in streams)
        return SourceInfo(
            topic=topic,
            settings=topic.source or {},
            end=end,
            final=None if None in finals else min(each for each in finals if each is not None),
        )

    def prepare(self, name: str, apply: bool = False) -> Statements:
        """Return the statements that make the table of a virtual topic cheaper to read.

        They add a column with the row's partition and an index on it: each member then reads only
        its own rows. On PostgreSQL they also add a trigger that notifies of new rows. What is
        there already is left out. With `apply` they are executed and recorded with the topic:
        members use the result, running ones after ten seconds at most. No key moves to another
        partition.
        """
        topic = self._find(name)
        with self._log.reading(topic.id) as log:
            return self._prepare(topic, log.source, apply)

    def _prepare(self, topic: Topic, source: object, apply: bool) -> Statements:
        if not isinstance(source, OpenTable):
            raise InvalidRequest(
                f"only tables can be prepared; the source of {topic.name!r} is no table"
            )
        statements, partition, channel = source.preparation(topic.partitions)
        if apply:
            for statement in statements:
                source.execute(statement)
            prepared = {"partition": partition, "channel": channel}
            topic = self._topics._set_prepared(
                topic, {name: value for name, value in prepared.items() if value is not None}
            )
            use_prepared(topic, source)
        return statements

    def detach(self, name: str) -> None:
        """Forget a virtual topic. Its source stays; the checkpoints of its groups go with it."""
        self._topics.delete(self._find(name).name)

    def _find(self, name: str) -> Topic:
        topic = self._topics.find(name)
        if topic.source is None:
            raise TopicNotFound(name)
        return topic
