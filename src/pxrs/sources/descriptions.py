"""Descriptions of sources, their settings that are kept, and how these open a source again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from pxrs.errors import ConfigError, InvalidRequest, PxrsError
from pxrs.sources.api import Source
from pxrs.sources.json_lines import JsonLines
from pxrs.sources.kafka_topic import KafkaTopic
from pxrs.sources.redis_stream import RedisStream
from pxrs.sources.table import OpenTable, Table
from pxrs.topics import PREPARED
from pxrs.types import Topic


@runtime_checkable
class Description(Protocol):
    """Describes a source, such as `Table` does, and opens it."""

    @property
    def partitioner(self) -> str:
        """The rule that turns keys into partitions."""
        ...

    def settings(self) -> dict[str, Any]:
        """The settings that are kept with the virtual topic, for other processes; no passwords."""
        ...

    def open(self, store_url: str) -> Source:
        """Open it; `store_url` is where checkpoints are kept."""
        ...


class Given:
    """A `Source` object of the user's own: every process that reads it has to attach it."""

    partitioner = "xxhash"

    def __init__(self, source: Source) -> None:
        self._source = source

    def settings(self) -> dict[str, Any]:
        return {"kind": "given", "type": type(self._source).__name__}

    def open(self, store_url: str) -> Source:
        return self._source


_KINDS: dict[str, Callable[..., Description]] = {
    "table": Table,
    "json_lines": JsonLines,
    "redis_stream": RedisStream,
    "kafka_topic": KafkaTopic,
}


def described(source: object) -> Description:
    """The description of the source that was passed to `attach`."""
    if isinstance(source, Description):
        return source
    if all(hasattr(source, name) for name in ("read", "bounds", "final", "watch", "streams")):
        return Given(source)  # type: ignore[arg-type]  # checked by what it has
    raise InvalidRequest(
        "a source must be one of pxrs.sources, such as Table(…), or an object with the methods of "
        f"pxrs.sources.Source, got a {type(source).__name__}"
    )


def from_settings(topic: str, settings: dict[str, Any]) -> Description:
    """The description whose settings were kept with a topic."""
    rest = dict(settings)
    kind = rest.pop("kind", None)
    if kind == "given":
        raise ConfigError(
            f"the source of topic {topic!r} is an object of a program ({rest.get('type')}): "
            f"call px.attach({topic!r}, source, partitions=…) in this process, too"
        )
    if kind not in _KINDS:
        raise ConfigError(
            f"topic {topic!r} lies over a source of kind {kind!r}, which this version of pxrs does "
            "not know; upgrade it"
        )
    try:
        return _KINDS[kind](**rest)
    except TypeError as error:
        raise ConfigError(
            f"the settings of topic {topic!r} are not understood by this version of pxrs: {error}"
        ) from None


def open_source(topic: Topic, store_url: str) -> Source:
    """The source of a virtual topic, opened by the settings in its record."""
    settings = {name: each for name, each in (topic.source or {}).items() if name != PREPARED}
    source = from_settings(topic.name, settings).open(store_url)
    try:
        use_prepared(topic, source)
    except BaseException:
        with suppress(PxrsError):
            source.close()
        raise
    return source


def use_prepared(topic: Topic, source: Source) -> None:
    """Let the source use what `prepare` has added for this topic."""
    if isinstance(source, OpenTable):
        source.use(topic.partitions, **((topic.source or {}).get(PREPARED) or {}))
