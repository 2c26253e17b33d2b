"""Makes calls of `pxrs.v1` for clients that may do some of it: `rights.py` has the rules.

Lists of all topics, groups and queues are answered with what the caller may see; a batch that it
may not append fails alone. A client uses the sessions that were opened with its own token: which
those are stands in records that are bound to them, so every node knows, for as long as they live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pxrs.client.frames import MOST_CALL_BYTES
from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.codec.batches import read_batch
from pxrs.errors import (
    InvalidRequest,
    PermissionDenied,
    PxrsError,
    SessionLost,
    TopicNotFound,
    quoted,
)
from pxrs.server.remote import rights
from pxrs.server.tokens import Identity
from pxrs.stores.api import CoordStore, Stores
from pxrs.topics import recorded_in
from pxrs.types import Append, Appended, LogPartition, Put, Queue, Topic, Versioned

Call = Callable[..., Any]

_SESSIONS = "client-sessions/"
# Sessions are asked after when they are over, too.
_MOST_SESSIONS = 10_000
_SOME = 1000
# What a batch may decompress to.
_MOST_UNPACKED = 4 * MOST_CALL_BYTES
_PAGE = 500


class Gate:
    """Checks calls, and makes those that are allowed. Thread-safe."""

    def __init__(self, stores: Stores, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stores = stores
        self._clock = clock
        self._topics = TopicsById(stores.coord)
        self._owners: dict[str, str] = {}
        self._special: Mapping[str, Callable[[Identity, dict[str, Any], Call], Any]] = {
            "coord.list": self._list,
            "log.append": self._append,
            "log.expire": self._expire,
            "queues.all": self._queues,
            "queues.reap": self._reap,
            "node.open_session": self._open_session,
            "node.watch_records": self._watch_records,
            "node.watch_log": self._watch,
            "node.watch_queues": self._watch,
        }

    def call(self, identity: Identity, name: str, arguments: dict[str, Any], call: Call) -> Any:
        """The answer to a call. Raises `PermissionDenied` if the identity may not make it."""
        for wanted in rights.needs(name, arguments, partial(self._topic_of, identity)):
            rights.require(identity, wanted, name)
        for session in rights.sessions(name, arguments):
            self._require_own(identity, session)
        for write in rights.written(name, arguments):
            topic = rights.check_write(write)
            if topic is not None:
                self._require_new_log(topic)
        if name == "node.atomic":
            arguments["appends"] = [_whole(each) for each in arguments["appends"]]
        special = self._special.get(name)
        return call(**arguments) if special is None else special(identity, arguments, call)

    # Topics and logs

    def _topic_of(self, identity: Identity, topic_id: str) -> Topic | None:
        """The topic of a log. Raises `PermissionDenied` if the caller does not know of it."""
        topic = self._topics.find(topic_id)
        if topic is not None and not _sees(identity, rights.TOPICS + topic.name):
            # Its name is not for the caller either.
            raise PermissionDenied(
                f"token {identity.name!r} may not use the log {quoted(topic_id)}: it has no right "
                "to the topic"
            )
        return topic

    def _require_new_log(self, topic: Topic) -> None:
        """Raises unless the log that a topic's record names is this topic's, or empty.

        Else who may make a topic could give it the log of another one, and read that. A log that
        was left behind by a topic that was deleted has messages of others.
        """
        known = self._topics.find(topic.id)
        if known is not None and known.name == topic.name:
            return
        held = {}
        if known is None:
            try:
                held = self._stores.log.bounds(topic.id)
            except TopicNotFound:
                return
        if known is not None or any(bounds.end for bounds in held.values()):
            raise InvalidRequest(f"topic {topic.name!r} must have a log of its own")

    def _append(
        self, identity: Identity, arguments: dict[str, Any], call: Call
    ) -> list[Appended | PxrsError]:
        """Appends what is allowed and can be read; each of the others has its own error."""
        checked = [self._checked(identity, append) for append in arguments["appends"]]
        allowed = [each for each in checked if isinstance(each, Append)]
        done = iter(call(allowed) if allowed else ())
        return [next(done) if isinstance(each, Append) else each for each in checked]

    def _checked(self, identity: Identity, append: Append) -> Append | PxrsError:
        try:
            topic_of = partial(self._topic_of, identity)
            rights.require(identity, rights.to_append(append, topic_of), "log.append")
            return _whole(append)
        except (PermissionDenied, InvalidRequest) as error:
            return error

    def _expire(self, identity: Identity, arguments: dict[str, Any], call: Call) -> int:
        where: LogPartition = arguments["where"]
        asked = rights.Kept(arguments["before_timestamp"], arguments["max_bytes"])
        topic = self._topics.find(where.topic_id)
        if topic is not None and not identity.may("topic", topic.name, "admin"):
            asked = rights.kept(topic, asked, self._clock.wall_ms())
        dropped: int = call(where, *asked)
        return dropped

    # Records and queues

    def _list(self, identity: Identity, arguments: dict[str, Any], call: Call) -> Any:
        return call(**arguments, read=partial(self.list_records, identity))

    def list_records(
        self, identity: Identity, prefix: str, after: str | None, limit: int | None
    ) -> list[Versioned]:
        """As `CoordStore.list`, of a prefix that may be listed: what the identity may see of it."""
        if not rights.is_shared(prefix) or (limit is not None and limit < 1):
            return self._stores.coord.list(prefix, after, limit)
        found: list[Versioned] = []
        while page := self._stores.coord.list(prefix, after, _PAGE):
            found += [record for record in page if _sees(identity, record.key)]
            after = page[-1].key
            if len(page) < _PAGE or (limit is not None and len(found) >= limit):
                break
        return found[:limit]

    def _watch(self, identity: Identity, arguments: dict[str, Any], call: Call) -> None:
        """Arms a watch. One of nothing hears nothing, whatever an engine would make of it."""
        if arguments["where"]:
            call(**arguments)

    def _watch_records(self, identity: Identity, arguments: dict[str, Any], call: Call) -> None:
        where = rights.watched(arguments["where"], identity)
        self._watch(identity, {**arguments, "where": where}, call)

    def _queues(self, identity: Identity, arguments: dict[str, Any], call: Call) -> list[Queue]:
        return [it for it in call() if rights.may(identity, rights.of_queue(it.name, "read"))]

    def _reap(self, identity: Identity, arguments: dict[str, Any], call: Call) -> None:
        """When something is due next in the queues of others is not told."""
        call()

    # Sessions

    def _open_session(self, identity: Identity, arguments: dict[str, Any], call: Call) -> str:
        session: str = call(**arguments)
        # With it: the record is gone when the session is.
        put = Put(_SESSIONS + session, identity.name.encode(), session)
        self._stores.coord.commit([], [put])
        self._remember(session, identity.name)
        return session

    def _require_own(self, identity: Identity, session: str) -> None:
        """Raises unless the session was opened with this token."""
        owner = self._owners.get(session)
        if owner is None:
            found = self._find_session(session)
            if found is None:
                raise SessionLost(f"session {quoted(session)} is over; open a new one")
            owner = found.value.decode()
            self._remember(session, owner)
        if owner != identity.name:
            raise PermissionDenied(
                f"token {identity.name!r} may not use session {quoted(session)}: another client "
                "has opened it"
            )

    def _find_session(self, session: str) -> Versioned | None:
        coord = self._stores.coord
        key = _SESSIONS + session
        return coord.get(key) if len(key) <= coord.limits.key_chars else None

    def _remember(self, session: str, token: str) -> None:
        while len(self._owners) >= _MOST_SESSIONS:
            # Two threads may choose the same one.
            self._owners.pop(next(iter(self._owners)), None)
        self._owners[session] = token


class TopicsById:
    """Finds topics by the id of their log. Thread-safe.

    A topic's id never changes and never becomes another topic's, so what is known stays known,
    of topics that were deleted too: their logs may still be asked for.
    """

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self._lock = threading.Lock()
        self._known: dict[str, Topic] = {}

    def find(self, topic_id: str) -> Topic | None:
        """The topic whose log it is; None if no record names it."""
        if (known := self._known.get(topic_id)) is not None:
            return known
        there = {found.topic.id: found.topic for found in recorded_in(self._coord)}
        with self._lock:
            if len(self._known) > 2 * len(there) + _SOME:
                self._known = {}
            self._known = self._known | there
        return there.get(topic_id)


def _sees(identity: Identity, key: str) -> bool:
    return rights.may(identity, rights.to_see(key))


def _whole(append: Append) -> Append:
    """The append with a batch that its readers can decode; raises `InvalidRequest` if not."""
    return Append(append.where, read_batch(bytes(append.batch.data), _MOST_UNPACKED))
