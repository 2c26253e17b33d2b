"""What a consumer's health is judged by, gathered from its parts."""

from __future__ import annotations

from pxrs.consuming.background import Steward
from pxrs.consuming.health import Facts
from pxrs.consuming.member_steps import Worker
from pxrs.consuming.outage import Outage
from pxrs.errors import Fenced


def facts_of(worker: Worker, steward: Steward, log: Outage, *, closed: bool) -> Facts:
    """As of now. From any thread."""
    membership, fatal = worker.membership, steward.fatal
    session = membership.session
    with worker.desk.lock:
        seats = [seat for seat in worker.desk.seats.values() if seat.state == "owned"]
        return Facts(
            generation=membership.generation,
            owned=len(seats),
            meant=membership.meant,
            waiting=sum(seat.lag for seat in seats),
            in_hand_since=worker.in_hand_since(),
            asked_at=worker.asked_at,
            store_lost_since=min(filter(None, (steward.outage.since, log.since)), default=None),
            fatal=None if fatal is None else f"{type(fatal).__name__}: {fatal}",
            fenced=isinstance(fatal, Fenced),
            closed=closed,
            lease=None if session is None else session.remaining(),
            missing=membership.missing,
            unreadable=None if worker.trouble is None else str(worker.trouble),
        )
