"""How items move from one standing to another, as parts of a draft."""

from __future__ import annotations

from msgspec.structs import replace

from pxrs.stores.queue_rules import tidy
from pxrs.stores.queues_on_coord.draft import Draft
from pxrs.stores.queues_on_coord.layout import (
    Entry,
    Item,
    Layout,
    Standing,
    decode_item,
    encode,
    encode_item,
)
from pxrs.types import Holder

# Errors of all items of a transaction have to fit into one commit.
_LONGEST_ERROR = 2_000


def short(error: str) -> str:
    """An error's text as it is kept."""
    return tidy(error[:_LONGEST_ERROR])


def attach(draft: Draft, at: Layout, standing: Standing) -> None:
    """Let it be handed out when its time and its turn have come."""
    if standing.lane is None:
        draft.put(at.shown(standing, draft.now_ms), encode(standing))
    else:
        draft.lane(at, standing.lane).add(standing)


def detach(draft: Draft, at: Layout, entry: Entry) -> None:
    """It stands nowhere any more, if it still stands there now."""
    standing = entry.standing
    draft.require(entry.key, entry.version)
    draft.delete(entry.key)
    lane = None if standing.lane is None else draft.lane(at, standing.lane)
    if standing.holder is None:
        if lane is not None:
            lane.leave(entry)
        return
    draft.delete(at.lock(standing.number))
    if standing.until is not None:
        draft.delete(at.until(standing.number))
    if lane is not None:
        lane.held.discard(standing.number)


def hold(draft: Draft, at: Layout, entry: Entry, held: Standing, holder: Holder) -> bool:
    """Hand it out: counted and locked in the same commit. False if it is not its turn."""
    if held.lane is not None and not draft.lane(at, held.lane).yields(entry, holder):
        return False
    detach(draft, at, entry)
    draft.put(at.meta(held.number), encode(held))
    draft.put(at.lock(held.number), b"", holder.session)
    if held.until is not None:
        draft.put(at.until(held.number), b"", held.until)
    if held.lane is not None:
        draft.lane(at, held.lane).hold(held.number, holder)
    return True


def loose(standing: Standing, visible_ms: int, *, suspect: bool, error: str) -> Standing:
    """As it stands when nobody holds it any more."""
    return replace(
        standing,
        visible_ms=visible_ms,
        suspect=suspect,
        error=short(error),
        holder=None,
        most=None,
        until=None,
        until_ms=None,
    )


def remove(draft: Draft, at: Layout, entry: Entry) -> None:
    detach(draft, at, entry)
    draft.delete(at.item(entry.standing.number))


def bury(draft: Draft, at: Layout, entry: Entry, error: str) -> bool:
    """It is dead; false if it is not there any more."""
    number = entry.standing.number
    found = draft.coord.get(at.item(number))
    if found is None:
        return False
    item, body = decode_item(found.value)
    remove(draft, at, entry)
    standing = loose(entry.standing, 0, suspect=False, error=error)
    dead = replace(item, standing=standing, dead_ms=draft.now_ms)
    draft.put(at.dead(number), encode_item(dead, body))
    return True


def add(draft: Draft, at: Layout, standing: Standing, item: Item, body: bytes) -> None:
    """A new item, or a dead one that begins again."""
    draft.put(at.item(standing.number), encode_item(item, body))
    attach(draft, at, standing)
