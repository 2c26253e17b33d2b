"""Rules that every queue store keeps, whatever it keeps its items in."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Generic, NamedTuple, Protocol, TypeVar

from pxrs.errors import Fenced, InvalidRequest, MessageTooLarge, QueueExists
from pxrs.types import (
    Delivery,
    Held,
    Holder,
    ItemState,
    NewItem,
    Queue,
    QueueChange,
    QueueLimits,
    Release,
    StoredItem,
)

# The lane of a fifo queue's items: there is only one.
FIFO_LANE = ""
LIVE = (ItemState.READY, ItemState.DELAYED, ItemState.HELD, ItemState.WAITING)
LOOSE = (ItemState.READY, ItemState.DELAYED, ItemState.WAITING)
# For how long at least after a session's end a store can be asked what its units became.
REMEMBERED_FOR = 600.0
DIED_HOLDING = "its holder died, or held it for too long"
USED_UP = "all its deliveries were used up"
_MOST_PRIORITY = 2**31
_LONGEST_DELAY = 10 * 365 * 24 * 3600.0
_LONGEST_NAME = 249
_LONGEST_KEY = 1024
_LONGEST_ERROR = 10_000
_PAGE = 500


class Counted(Protocol):
    """What `pick` has to know of an item. Suspect: its last holder died with it in hand."""

    @property
    def deliveries(self) -> int: ...

    @property
    def suspect(self) -> bool: ...


C = TypeVar("C", bound=Counted)


class Picked(NamedTuple, Generic[C]):
    """Items to hand out, and those that have had all their deliveries.

    `suspect`: there is none to hand out because a suspect is next.
    """

    chosen: list[C]
    used_up: list[C]
    suspect: bool = False


def pick(
    candidates: Iterable[C], count: int, most: int | None, *, suspects: bool = True
) -> Picked[C]:
    """From items in order: what to do with them.

    A suspect goes out alone: if it kills again, the others' counts are not burnt with it. And
    only to who wants it: a process may have others in hand, taken before.
    """
    chosen: list[C] = []
    used_up: list[C] = []
    for item in candidates:
        if most is not None and item.deliveries >= most:
            used_up.append(item)
        elif item.suspect:
            if not chosen and not suspects:
                return Picked(chosen, used_up, suspect=True)
            if not chosen:
                chosen.append(item)
            break
        else:
            chosen.append(item)
            if len(chosen) == count:
                break
    return Picked(chosen, used_up)


def given_up(unit: str) -> Fenced:
    """The error for a unit that arrives after somebody was told that it never will."""
    return Fenced(f"unit {unit!r} was given up before it came; begin another")


class _Peeks(Protocol):
    def peek(
        self,
        queue: str,
        states: Sequence[ItemState] = (),
        *,
        after: int | None = None,
        limit: int = 100,
    ) -> list[StoredItem]: ...


def held_in(store: _Peeks, queue: str, holder: Holder) -> list[Delivery]:
    """What the holder holds in the queue now."""
    found: list[Delivery] = []
    after = 0
    while page := store.peek(queue, [ItemState.HELD], after=after, limit=_PAGE):
        after = page[-1].id
        found += [
            Delivery(
                held=Held(queue, item.id, item.deliveries),
                body=item.body,
                key=item.key,
                priority=item.priority,
                put_ms=item.put_ms,
                error=item.error,
            )
            for item in page
            if item.holder == holder
        ]
    return found


def lane_of(queue: Queue, key: str | None) -> str | None:
    """What an item has to stay in order with: its key, or the whole of a fifo queue."""
    return FIFO_LANE if queue.fifo else key


def indexed(key: str, most_bytes: int) -> str:
    """What stands in an index for a key: itself, or a digest where an index holds no long ones."""
    data = key.encode()
    return f"k{key}" if len(data) < most_bytes else f"h{sha256(data).hexdigest()}"


def require_same(queue: Queue, fifo: bool) -> Queue:
    """The queue that is there already, if it is the one that is wanted."""
    if queue.fifo != fifo:
        kind = "strict fifo" if queue.fifo else "not fifo"
        raise QueueExists(f"queue {queue.name!r} exists and is {kind}; delete it first")
    return queue


def validate_name(name: str) -> str:
    """Refuse what can't be a queue's name."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _LONGEST_NAME
        or not name.isprintable()
        or "/" in name
    ):
        raise InvalidRequest(
            f"queue name {name!r}: 1 to {_LONGEST_NAME} printable characters without a slash"
        )
    return name


def validate_take(count: int, most: int | None, lock_for: float | None) -> None:
    """Refuse what can't be asked for."""
    if count < 1:
        raise InvalidRequest(f"{count} items can't be taken")
    if most is not None and most < 1:
        raise InvalidRequest(f"an item that may be delivered {most} times can't be taken")
    if lock_for is not None:
        validate_lock(lock_for)


def validate_lock(lock_for: float) -> None:
    """Refuse a time that can't be held for."""
    if not 0 < lock_for <= _LONGEST_DELAY:
        raise InvalidRequest(f"items can't be held for {lock_for} s")


def validate_releases(releases: Iterable[Release]) -> None:
    """Refuse a delay that can't be waited for."""
    for release in releases:
        if not 0 <= release.delay <= _LONGEST_DELAY:
            raise InvalidRequest(f"an item can't be given back after {release.delay} s")


def page_size(limit: int) -> int:
    """How many items to show, within what engines can count."""
    if limit < 1:
        raise InvalidRequest(f"a limit of {limit} items; at least 1 is needed")
    return min(limit, sys.maxsize)


def tidy(error: str) -> str:
    """An error's text as every engine can keep it. A release must not fail for its sake."""
    text = error[:_LONGEST_ERROR].encode("utf-8", "replace").decode()
    return text.replace("\0", "\ufffd")


def validate_change(change: QueueChange, limits: QueueLimits) -> None:
    """Refuse what some engine could not do, on every engine alike."""
    total = len(change.remove) + len(change.put)
    if total > limits.items:
        raise InvalidRequest(f"{total} items in one transaction; this store takes {limits.items}")
    if len(set(change.remove)) < len(change.remove):
        raise InvalidRequest("an item can be removed once")
    for name in {item.queue for item in change.put}:
        validate_name(name)
    for item in change.put:
        _validate_content(item, limits)


def validate_restored(items: Sequence[StoredItem], limits: QueueLimits) -> None:
    """Refuse items that this store could not hold."""
    if len(items) > limits.items:
        raise InvalidRequest(f"{len(items)} items at once; this store takes {limits.items}")
    for item in items:
        if item.id < 1:
            raise InvalidRequest(f"item {item.id}: numbers start at 1")
        if len(item.body) > limits.body_bytes:
            raise MessageTooLarge(
                f"item {item.id} has {len(item.body)} bytes; this store takes {limits.body_bytes}"
            )


def is_suspect(item: StoredItem) -> bool:
    """Whether an item that comes from elsewhere may have killed its last holder."""
    return item.state is ItemState.HELD or item.error == DIED_HOLDING


def require_first(change: QueueChange | None) -> None:
    """Refuse a second change in one transaction: it has one holder."""
    if change is not None:
        raise InvalidRequest("a transaction changes queues once, when it commits")


def validate_item(item: NewItem, limits: QueueLimits) -> None:
    """Refuse an item that no queue could hold."""
    validate_name(item.queue)
    _validate_content(item, limits)


def _validate_content(item: NewItem, limits: QueueLimits) -> None:
    if len(item.body) > limits.body_bytes:
        raise MessageTooLarge(
            f"an item of {len(item.body)} bytes for {item.queue!r}; "
            f"this store takes {limits.body_bytes}"
        )
    if type(item.priority) is not int or not abs(item.priority) < _MOST_PRIORITY:
        raise InvalidRequest(f"priority {item.priority!r}; a whole number of 32 bits can be had")
    # Most items have none of these, and every item comes through here twice.
    if item.delay != 0.0:
        _validate_seconds("delay", item.delay)
    if item.dedupe_window != 0.0:
        _validate_seconds("window", item.dedupe_window)
    if item.key is not None:
        _validate_text("key", item.key)
    if item.dedupe is not None:
        _validate_text("dedupe key", item.dedupe)
        if item.dedupe_window <= 0:
            raise InvalidRequest(f"dedupe key {item.dedupe!r} needs a window of time")


def _validate_seconds(name: str, seconds: float) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_DELAY:
        raise InvalidRequest(f"a {name} of {seconds!r} s; 0 s to ten years can be had")


def _validate_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"a {name} is text, not {type(text).__name__}")
    if not 0 < len(text) <= _LONGEST_KEY:
        raise InvalidRequest(f"a {name} of {len(text)} characters; 1 to {_LONGEST_KEY} can be")
    if not _is_text(text):
        raise InvalidRequest(f"{name} {text!r}: some engine could not keep it as text")


def _is_text(text: str) -> bool:
    """Whether it is Unicode without zeros: PostgreSQL keeps no others."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def validate_for(queue: Queue, item: NewItem) -> None:
    """Refuse what goes against the queue's order."""
    if queue.fifo and (item.priority != 0 or item.delay > 0):
        raise InvalidRequest(
            f"queue {queue.name!r} is strictly fifo: its items have neither priority nor delay"
        )


def states_or(states: Sequence[ItemState], default: Sequence[ItemState]) -> tuple[ItemState, ...]:
    """The states that were asked for, or those that are meant when none was."""
    return tuple(states) or tuple(default)


def delay_ms(seconds: float) -> int:
    """Whole milliseconds, never less than asked for."""
    return math.ceil(seconds * 1000)
