"""Polls what a process watches, since a notification may be lost: one small query for all.

For a key prefix the query reads the versions under it, for a partition its end. For a queue it
reads everything that a worker whose take found nothing may wait for:

- its first ready item, and by `xmin` which version of it: an item that was taken and given back
  between two looks has another version;
- when the next delayed item shows and the next hold ends: the waiting worker knows an older time;
- its latest item, which shows that items were put;
- the first item behind each that this process holds: the holder of one can take the next;
- sessions that are over and hold items, and lanes that have to be settled: the next take does both.

Each of these is the end of an index. The last point wakes the queue's watches at every look, not
only when it changes: a take may have found a lane locked, and there is no notification when the
lock is released.

A record that was made and removed between two looks leaves no trace in them. That matters only if
this process has read the record meanwhile and waits for its end. So the query also checks, by name,
whether the records that were read since the last look are still at the same version.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from pxrs.stores.observer import TICK
from pxrs.stores.postgres.database import Row
from pxrs.stores.postgres.queues.functions import DELAYED, HELD, READY, WAITING
from pxrs.stores.postgres.sessions import Statement
from pxrs.stores.timed_sessions import OF_PROCESS, this_process
from pxrs.stores.wakeups import KEY, KINDS, PARTITION, QUEUE
from pxrs.types import Versioned

QUICK = 0.01
_SLOW = 1.0
# How many records that were read since the last look are checked by name. After more reads, every
# watched prefix counts as new.
_MOST_READ = 5_000
_LAST = chr(0x10FFFF)
# If looks take long, because an old transaction keeps dead rows, they are made rarely: they take at
# most a tenth of the time.
_REST = 10
_LONGEST_REST = 5.0
_LOOK = f"""
    ARRAY(SELECT (SELECT concat_ws(' ', count(*), sum(version), max(version))
        FROM @.pxrs_coord c WHERE c.key >= u.first AND c.key <= u.last)
        FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY u(first, last, n) ORDER BY n),
    ARRAY(SELECT (SELECT coalesce((SELECT b.next FROM @.pxrs_log_batches b WHERE b.part = p.id
            ORDER BY b.base DESC LIMIT 1), p.floor)
        FROM @.pxrs_log_partitions p WHERE p.topic_id = u.topic AND p.partition = u.partition)
        FROM unnest(%s::text[], %s::int4[]) WITH ORDINALITY u(topic, partition, n) ORDER BY n),
    ARRAY(SELECT (SELECT jsonb_build_array(
            (SELECT i.id FROM @.pxrs_queue_items i
                WHERE i.queue = k.id ORDER BY i.id DESC LIMIT 1),
            (SELECT i.id || '.' || i.xmin FROM @.pxrs_queue_items i
                WHERE i.queue = k.id AND i.state = {READY} ORDER BY i.rank, i.id LIMIT 1),
            (SELECT i.visible || '.' || i.xmin FROM @.pxrs_queue_items i
                WHERE i.queue = k.id AND i.state = {DELAYED} ORDER BY i.visible LIMIT 1),
            (SELECT i.deadline FROM @.pxrs_queue_items i WHERE i.queue = k.id
                AND i.state = {HELD} AND i.deadline IS NOT NULL ORDER BY i.deadline LIMIT 1),
            (SELECT string_agg(h.session, ' ' ORDER BY h.session) FROM @.pxrs_queue_holders h
                WHERE h.queue = k.id
                AND NOT EXISTS (SELECT 1 FROM @.pxrs_sessions s WHERE s.id = h.session)),
            (SELECT count(*) FROM @.pxrs_queue_unsettled t WHERE t.queue = k.id),
            (SELECT string_agg(b.first, ' ' ORDER BY b.first) FROM (
                SELECT (SELECT w.id || '.' || w.xmin FROM @.pxrs_queue_items w
                    WHERE w.queue = k.id AND w.lane = f.lane AND w.state = {WAITING}
                    AND w.id >= f.base ORDER BY w.id LIMIT 1) AS first
                FROM (SELECT i.lane, min(i.base) AS base
                    FROM @.pxrs_queue_holders h JOIN @.pxrs_sessions s
                        ON s.id = h.session AND split_part(s.owner, '{OF_PROCESS}', 1) = %s,
                    LATERAL (
                        SELECT t.lane, t.base FROM @.pxrs_queue_items t
                        WHERE t.session = h.session AND t.queue = k.id AND t.state = {HELD}
                        AND t.lane IS NOT NULL OFFSET 0) i
                    WHERE h.queue = k.id GROUP BY i.lane) f) b))::text
        FROM @.pxrs_queues k WHERE k.name = u.name AND k.dropped IS NULL)
        FROM unnest(%s::text[]) WITH ORDINALITY u(name, n) ORDER BY n),
    ARRAY(SELECT u.key FROM unnest(%s::text[], %s::int8[]) u(key, version)
        WHERE NOT EXISTS (SELECT 1 FROM @.pxrs_coord c
            WHERE c.key = u.key AND c.version = u.version))"""


class Pace:
    """Decides how long to wait before looking again.

    It waits long while nothing is watched, or while notifications announce every change. Otherwise
    it looks a few milliseconds after a change, and more and more rarely while nothing changes.
    """

    def __init__(self) -> None:
        self.listening = False
        self.wanted = False
        self._unheard = 0
        self._heard = False
        self._pause = QUICK
        self._took = 0.0

    def heard(self) -> None:
        """Note a notification of a change."""
        self._heard = True
        self._unheard = 0

    def looked(self, changed: bool, told: bool) -> None:
        """Note whether a look found a change; `told`: its writer should have sent a NOTIFY."""
        self._unheard += told and not self._heard
        self._heard = False
        self._pause = QUICK if changed else min(2 * self._pause, TICK)

    def rest(self, took: float) -> float:
        """Returns how long to wait after a look that took so many seconds.

        One slow look may have waited for a busy machine or a pooler; two are no accident.
        """
        usual, self._took = min(took, self._took), took
        return min(_REST * usual, _LONGEST_REST)

    @property
    def pause(self) -> float:
        """How long to wait before the next look.

        One change without a notification may have been seen before that arrived; two are no
        accident: then notifications are not relied on.
        """
        if not self.wanted or (self.listening and self._unheard < 2):
            return _SLOW
        return self._pause


class Seen(NamedTuple):
    """The watched things that changed since the last look, are new in it, or wait for a take."""

    words: set[str]
    # Whether anything changed that an earlier look had seen, and whether its writer sends
    # notifications of such changes.
    changed: bool
    told: bool


class Looks:
    """Compares what each look finds with what the look before found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Versions of records that were read since the last look.
        self._read: dict[str, int] = {}
        self.forget()

    def abandon(self) -> None:
        """In a forked child: drop the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    def read(self, records: Iterable[Versioned]) -> None:
        """Note records that a caller has read and may watch."""
        with self._lock:
            self._read.update((record.key, record.version) for record in records)

    def forget(self) -> None:
        """Make everything count as new at the next look."""
        self._last: dict[str, Any] = {}

    def _read_since(self) -> dict[str, int]:
        with self._lock:
            read, self._read = self._read, {}
        if len(read) > _MOST_READ:
            self._last = {
                word: found for word, found in self._last.items() if not word.startswith(KEY)
            }
            return {}
        return read

    def look(self, read: Statement, words: set[str], also: str | None = None) -> tuple[Seen, Row]:
        """Look at these. `also`: two more columns for the same query, returned as a row."""
        keys, places, queues = (_named(words, kind) for kind in KINDS)
        since = self._read_since()
        ((versions, ends, fronts, otherwise, *rest),) = read(
            f"SELECT {_LOOK}, {also or 'NULL, NULL'}",
            (
                keys,
                [prefix + _LAST for prefix in keys],
                [place.partition("/")[2] for place in places],
                [int(place.partition("/")[0]) for place in places],
                this_process(),
                queues,
                list(since),
                list(since.values()),
            ),
        )
        now = {
            **_found(KEY, keys, versions),
            **_found(PARTITION, places, ends),
            **_found(QUEUE, queues, fronts),
        }
        before, self._last = self._last, now
        changed = {word for word in now.keys() & before.keys() if before[word] != now[word]}
        undone = {
            QUEUE + name for name, front in zip(queues, fronts, strict=True) if _has_chores(front)
        }
        unlike = {KEY + prefix for prefix in keys for key in otherwise if key.startswith(prefix)}
        told = unlike or any(
            not word.startswith(QUEUE) or _has_more(before[word], now[word]) for word in changed
        )
        words = (now.keys() - before.keys()) | changed | unlike | undone
        return Seen(words, bool(changed or unlike), bool(told)), tuple(rest)


def _named(words: Iterable[str], kind: str) -> list[str]:
    """The names of one kind."""
    return sorted(word[1:] for word in words if word.startswith(kind))


def _found(kind: str, names: list[str], values: Iterable[Any]) -> dict[str, Any]:
    return {kind + name: value for name, value in zip(names, values, strict=True)}


def _has_chores(front: str | None) -> bool:
    """Whether a take would free or settle something."""
    return front is not None and any(json.loads(front)[4:6])


def _has_more(*fronts: str | None) -> bool:
    """Whether something was put; a take wakes no watch."""
    before, now = (0 if front is None else json.loads(front)[0] or 0 for front in fronts)
    return bool(now > before)
