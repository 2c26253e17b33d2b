"""Administration of topics, groups, queues and sources, for asyncio."""

from __future__ import annotations

from pxrs.aio.threads import Threads, awaiting
from pxrs.groups import admin as groups
from pxrs.queues import admin as queues
from pxrs.running import topics
from pxrs.sources import admin as sources


class Topics:
    """Topics and their dead letters. See `pxrs.Topics`."""

    def __init__(self, blocking: topics.Topics, threads: Threads) -> None:
        self._blocking = blocking
        self._threads = threads
        self._call = threads.call

    create = awaiting(topics.Topics.create)
    find = awaiting(topics.Topics.find)
    list = awaiting(topics.Topics.list)
    describe = awaiting(topics.Topics.describe)
    bounds = awaiting(topics.Topics.bounds)
    delete = awaiting(topics.Topics.delete)
    apply_retention = awaiting(topics.Topics.apply_retention)
    dead = awaiting(topics.Topics.dead)
    redrive = awaiting(topics.Topics.redrive, waits=True)


class Groups:
    """Lists, describes, explains, resets and deletes groups. See `pxrs.Groups`."""

    def __init__(self, blocking: groups.Groups, threads: Threads) -> None:
        self._blocking = blocking
        self._call = threads.call

    list = awaiting(groups.Groups.list)
    describe = awaiting(groups.Groups.describe)
    explain = awaiting(groups.Groups.explain)
    reset = awaiting(groups.Groups.reset)
    import_checkpoint = awaiting(groups.Groups.import_checkpoint)
    delete = awaiting(groups.Groups.delete)


class Sources:
    """Lists, describes, prepares and detaches virtual topics. See `pxrs.Sources`."""

    def __init__(self, blocking: sources.Sources, threads: Threads) -> None:
        self._blocking = blocking
        self._call = threads.call

    list = awaiting(sources.Sources.list)
    describe = awaiting(sources.Sources.describe)
    prepare = awaiting(sources.Sources.prepare)
    detach = awaiting(sources.Sources.detach)


class Queues:
    """Makes, lists, describes, looks into and clears out queues. See `pxrs.Queues`."""

    def __init__(self, blocking: queues.Queues, threads: Threads) -> None:
        self._blocking = blocking
        self._threads = threads
        self._call = threads.call

    create = awaiting(queues.Queues.create)
    list = awaiting(queues.Queues.list)
    describe = awaiting(queues.Queues.describe)
    rates = awaiting(queues.Queues.rates, waits=True)
    peek = awaiting(queues.Queues.peek)
    purge = awaiting(queues.Queues.purge)
    delete = awaiting(queues.Queues.delete)
    dead = awaiting(queues.Queues.dead)
    redrive = awaiting(queues.Queues.redrive)
    drop = awaiting(queues.Queues.drop)
