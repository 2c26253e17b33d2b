"""Examines the sources of virtual topics, for `pxrs doctor`."""

from __future__ import annotations

from pxrs.errors import ConfigError, PxrsError
from pxrs.sources.api import Source
from pxrs.sources.descriptions import open_source
from pxrs.sources.table import OpenTable
from pxrs.sources.tables.api import KnowsItself
from pxrs.stores.api import CoordStore
from pxrs.stores.findings import Finding, note, ok, problem, warning
from pxrs.topics import PREPARED, topics_in
from pxrs.types import Topic


def findings(coord: CoordStore, store_url: str) -> list[Finding]:
    """Findings about each virtual topic that is recorded here."""
    virtual = [topic for topic in topics_in(coord) if topic.source is not None]
    return [finding for topic in virtual for finding in _of_topic(topic, store_url)]


def _of_topic(topic: Topic, store_url: str) -> list[Finding]:
    check = f"source {topic.name}"
    if (topic.source or {}).get("kind") == "given":
        return [note(check, "only programs can open it: it is an object of theirs")]
    try:
        source = open_source(topic, store_url)
    except PxrsError as error:
        mend = "a password is not kept with the topic: see docs/sources.md; or detach the topic"
        return [problem(check, str(error), mend)]
    try:
        return _of_source(check, topic, source)
    except ConfigError as error:
        return [problem(check, str(error), "mend the table as the text says")]
    except PxrsError as error:
        return [problem(check, str(error), "look at the database that has the table")]
    finally:
        source.close()


def _of_source(check: str, topic: Topic, source: Source) -> list[Finding]:
    found: list[Finding] = []
    if isinstance(source, OpenTable):
        source.check()
        source.check_partitions(topic.partitions)
        found = _of_table(check, topic, source)
    ends = [source.bounds(stream).end for stream in range(source.streams)]
    return [ok(check, f"can be read up to {max(ends):,}"), *found]


def _of_table(check: str, topic: Topic, source: OpenTable) -> list[Finding]:
    found: list[Finding] = []
    look = source.database.look()
    if look.writers is None:
        right = f"GRANT {look.right} to this user" if look.right else "keep transactions short"
        found.append(
            note(
                check,
                "the database does not show who is writing: a missing id is waited for "
                f"{source.table.settle:g} s, and a transaction that lasts longer loses its rows",
                right,
            )
        )
    if isinstance(source.database, KnowsItself):
        found += source.database.findings(check)
    return found + _of_preparation(check, topic, source)


def _of_preparation(check: str, topic: Topic, source: OpenTable) -> list[Finding]:
    try:
        missing = source.preparation(topic.partitions).statements
    except ConfigError:
        # It can't be prepared; nothing depends on that.
        return []
    command = f"pxrs sources prepare {topic.name} --apply"
    if not missing:
        return []
    if PREPARED in (topic.source or {}):
        return [warning(check, "it was prepared, and something of that is missing now", command)]
    return [note(check, "it is not prepared: every member reads the whole table", command)]
