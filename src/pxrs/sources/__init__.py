"""Sources: ordered streams that exist already, consumed in parallel by groups.

A virtual topic lays partitions over a source by hashing its keys; groups, checkpoints and fences
are those of every topic. In comes a description of the source (`Table`, …), out comes a `LogStore`
that reads its rows as messages. The facade imports this room; readers of logs do not know it.
"""

from pxrs.sources.api import FiltersPartitions, Source, SourceRead
from pxrs.sources.json_lines import JsonLines
from pxrs.sources.kafka_topic import KafkaTopic
from pxrs.sources.redis_stream import RedisStream
from pxrs.sources.subscription import Subscription
from pxrs.sources.table import Table
from pxrs.types import Row

__all__ = [
    "FiltersPartitions",
    "JsonLines",
    "KafkaTopic",
    "RedisStream",
    "Row",
    "Source",
    "SourceRead",
    "Subscription",
    "Table",
]
