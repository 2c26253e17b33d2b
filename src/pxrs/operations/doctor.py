"""Examines a store: opens it, asks the engine about itself, and tries everything once.

Engines report about themselves (`Opened.findings`). This module tries what every engine must do: a
record, a session, a wake-up, a log, a queue, each under a name of its own, and removed again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from pxrs.codec.batches import encode
from pxrs.config import parse_url, split_url
from pxrs.errors import ConfigError, MissingExtra, PxrsError, StoreBusy, StoreUnavailable
from pxrs.operations.tidy import Leftovers, find_leftovers
from pxrs.stores.api import CoordStore, LogStore, QueueStore
from pxrs.stores.findings import Finding, Level, note, ok, problem, warning
from pxrs.stores.open import Opened, open_place, open_stores, require_stores
from pxrs.types import (
    Append,
    Appended,
    Check,
    Committed,
    Delete,
    Holder,
    LogPartition,
    NewItem,
    Put,
    QueueChange,
)
from pxrs.urls import public

_FOLDER = "doctor/"
_TTL = 10.0
_PATIENCE = 5.0
# If one commit, or the waking of a watch, takes longer than this, something is wrong.
_SLOW = 0.25


class Examined(msgspec.Struct, frozen=True):
    """One part of a store, and the findings there."""

    place: str
    findings: tuple[Finding, ...]


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings of all parts of a store."""

    places: tuple[Examined, ...]

    @property
    def worst(self) -> Level:
        found = [finding.level for place in self.places for finding in place.findings]
        return max(found, key=list(Level).index, default=Level.OK)


def examine(url: str, *, create: bool = True) -> Diagnosis:
    """Examine every store that the URL names. One that can't be reached is a finding, not an error.

    Without `create` a file that does not exist is a finding, too.
    """
    places = [_examine_place(place, url, create) for place in split_url(url).urls()]
    if all(_was_opened(each) for each in places):
        places[0] = Examined(places[0].place, places[0].findings + tuple(_leftovers(url)))
    return Diagnosis(tuple(places))


def _was_opened(examined: Examined) -> bool:
    return not any(each.check in ("url", "connect") and each.mend for each in examined.findings)


def _examine_place(url: str, whole: str, create: bool) -> Examined:
    try:
        parse_url(url)
    except ConfigError as error:
        return Examined("?", (problem("url", str(error), "correct the URL"),))
    shown = public(url).partition("?")[0]
    started = time.monotonic()
    try:
        if not create:
            require_stores(url)
        opened = open_place(url)
    except PxrsError as error:
        return Examined(shown, (problem("connect", str(error), _remedy(error)),))
    found = [ok("connect", f"opened in {_ms(started)}")]
    try:
        found += _tried("engine", opened.findings)
        found += _trials(opened)
        found += _sources(opened, whole)
    finally:
        opened.close()
    return Examined(shown, tuple(found))


def _trials(opened: Opened) -> list[Finding]:
    found: list[Finding] = []
    if opened.coord is not None:
        coord = opened.coord
        found += _tried("permissions", lambda: _try_records(coord))
        found += _tried("sessions", lambda: _try_session(coord))
        found += _tried("watch", lambda: _try_watch(coord))
        found += _tried("members", lambda: _count_members(coord))
    if opened.log is not None:
        log = opened.log
        found += _tried("log", lambda: _try_log(log))
    if opened.queues is not None and opened.coord is not None:
        queues, coord = opened.queues, opened.coord
        found += _tried("queues", lambda: _try_queue(queues, coord))
    return found


def _sources(opened: Opened, url: str) -> list[Finding]:
    """Tables and other sources of the topics that are recorded here."""
    from pxrs.sources import examining

    coord = opened.coord
    return [] if coord is None else _tried("sources", lambda: examining.findings(coord, url))


def _leftovers(url: str) -> list[Finding]:
    """Looks for leftovers of killed processes in the whole store."""

    def look() -> list[Finding]:
        try:
            with closing(open_stores(url)) as stores:
                return _told(find_leftovers(stores))
        except ConfigError:
            # Only a part of a store is named: it keeps no messages, or nothing else.
            return []

    return _tried("leftovers", look)


def _told(found: Leftovers) -> list[Finding]:
    mend = "`pxrs store tidy` lists them, and removes them with --apply"
    said = []
    if found.logs:
        holds = sum(log.messages for log in found.logs)
        says = f"{len(found.logs)} logs, with {holds} messages, which no topic names"
        said.append(warning("leftovers", says, mend))
    if found.unmade:
        says = f"{len(found.unmade)} topics that are not made yet, or were given up"
        said.append(note("leftovers", says, mend))
    return said


def _tried(check: str, trial: Callable[[], list[Finding]]) -> list[Finding]:
    """Runs a trial. If it fails, that is a finding, too."""
    try:
        return trial()
    except PxrsError as error:
        return [problem(check, str(error), _remedy(error))]


def _remedy(error: PxrsError) -> str:
    if isinstance(error, MissingExtra):
        return f"pip install 'pxrs[{error.extra}]'"
    if isinstance(error, ConfigError):
        return "correct the URL"
    if isinstance(error, StoreUnavailable):
        return "check that the server runs, and that host, port and password are right"
    if isinstance(error, StoreBusy):
        return "end the process that the error names, or wait until it is done"
    return "give this user the right to read and write here, and read the engine's own log"


def _try_records(coord: CoordStore) -> list[Finding]:
    with _record(coord) as (key, version):
        if coord.get(key) is None:
            raise StoreUnavailable("a record was written and can't be read")
        started = time.monotonic()
        outcome = coord.commit([Check(key, version)], [Put(key, b"again")])
        took = time.monotonic() - started
    if not isinstance(outcome, Committed):
        return [problem("permissions", "another process wrote to the doctor's record", "try again")]
    return [ok("permissions", "records can be written, read and deleted"), _speed("commit", took)]


@contextmanager
def _record(coord: CoordStore) -> Iterator[tuple[str, int]]:
    """Creates a record for a trial, and deletes it afterwards."""
    key = _FOLDER + secrets.token_hex(8)
    outcome = coord.commit([Check(key, 0)], [Put(key, b"pxrs doctor")])
    try:
        if not isinstance(outcome, Committed):
            raise StoreUnavailable(f"{key} exists already")
        yield key, outcome.versions[key]
    finally:
        with suppress(PxrsError):
            coord.commit([], [Delete(key)])


def _try_session(coord: CoordStore) -> list[Finding]:
    session = coord.session(_TTL)
    key = _FOLDER + secrets.token_hex(8)
    try:
        coord.commit([], [Put(key, b"pxrs doctor", session.id)])
        session.renew()
        left = session.remaining()
    finally:
        session.close()
    if coord.get(key) is not None:
        return [problem("sessions", "a record outlived its session", "report this to pxrs")]
    if left < _TTL / 2:
        return [
            warning(
                "sessions",
                f"the engine granted a session of {left:.1f} s instead of {_TTL:g} s",
                "raise the engine's longest session time",
            )
        ]
    return [ok("sessions", f"opened, renewed and ended; {left:.1f} of {_TTL:g} s were left")]


def _try_watch(coord: CoordStore) -> list[Finding]:
    with _record(coord) as (key, _), closing(coord.watch(key)) as watch:
        started = time.monotonic()
        coord.commit([], [Put(key, b"ring")])
        woken = watch.wait(_PATIENCE)
        took = time.monotonic() - started
    if not woken:
        return [
            warning(
                "watch",
                f"a change woke no watch within {_PATIENCE:g} s",
                "look for a proxy that drops notifications; pxrs polls instead",
            )
        ]
    return [_speed("watch", took)]


def _count_members(coord: CoordStore) -> list[Finding]:
    number = len(coord.list("members/"))
    return [ok("members", f"{number} connected to groups")]


def _try_log(log: LogStore) -> list[Finding]:
    topic_id = f"doctor-{secrets.token_hex(8)}"
    where = LogPartition(topic_id, 0)
    batch = encode([(None, b"pxrs doctor", [], 1)])
    try:
        log.create(topic_id, 1)
        with closing(log.watch(where)) as watch:
            started = time.monotonic()
            (result,) = log.append([Append(where, batch)])
            took = time.monotonic() - started
            if not isinstance(result, Appended):
                raise result
            woken = watch.wait(_PATIENCE)
        held = log.fetch(where, 0, 2**20).batches
    finally:
        with suppress(PxrsError):
            log.drop(topic_id)
    if len(held) != 1:
        return [problem("log", "a batch was appended and can't be read", "report this to pxrs")]
    found = [_speed("append", took)]
    if not woken:
        found.append(note("log", f"an append woke no follower within {_PATIENCE:g} s"))
    return found


def _try_queue(queues: QueueStore, coord: CoordStore) -> list[Finding]:
    name = f"pxrs-doctor-{secrets.token_hex(8)}"
    session = coord.session(_TTL)
    holder = Holder(session.id, "doctor")
    try:
        queues.create(name)
        queues.apply(QueueChange(holder, (), (NewItem(queue=name, body=b"pxrs doctor"),)))
        taken = queues.take(name, holder, 1).items
        queues.apply(QueueChange(holder, tuple(item.held for item in taken), ()))
    finally:
        with suppress(PxrsError):
            queues.delete(name)
        session.close()
    if len(taken) != 1:
        return [problem("queues", "an item was put and can't be taken", "report this to pxrs")]
    return [ok("queues", "an item was put, taken and removed")]


def _speed(check: str, took: float) -> Finding:
    says = f"{took * 1000:.1f} ms"
    if took > _SLOW:
        return warning(
            check, f"{says}, which is slow", "check the latency of the disk and the network"
        )
    return ok(check, says)


def _ms(started: float) -> str:
    return f"{(time.monotonic() - started) * 1000:.0f} ms"
