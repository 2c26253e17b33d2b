"""Batches that could not be delivered, until somebody is told: by their handles, or by a flush.

Nothing here takes a lock: batches are noted by whoever commits, told by whoever asks, and Ctrl-C
may come anywhere. A batch may be here twice; `told` is what counts.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable

from pxrs.errors import DeliveryFailed, OutcomeUnknown, PxrsError
from pxrs.producing.handles import Parcel

LOG = logging.getLogger("pxrs.producer")
# Who never flushes is told by the log alone, and need not pay for all of it with memory.
_MOST = 1000


class Undelivered:
    """The failures of one producer."""

    def __init__(self) -> None:
        self._failed: deque[Parcel] = deque()
        self._forgot = False

    def note(self, parcel: Parcel, error: PxrsError) -> None:
        """The batch is about to be settled with this error."""
        if self._failed:
            # The frames hold what was to be written; to keep those of the first is enough.
            _drop_frames(error)
        if len(self._failed) >= _MOST:
            self._make_room()
        self._failed.append(parcel)

    def log(self, parcels: Iterable[Parcel]) -> None:
        """One line for those of a round that failed, unless somebody waits for them."""
        lost = [each for each in parcels if _is_untold(each) and not each.waiters]
        if lost:
            LOG.error("%s: %s", _what_happened(lost), _why(lost))

    def error(self) -> PxrsError | None:
        """What happened that nobody was told of, to be raised: from here on it is told."""
        lost: list[Parcel] = []
        for _ in range(len(self._failed)):
            try:
                parcel = self._failed.popleft()
            except IndexError:
                break
            if not parcel.settled or (parcel.waiters and not parcel.told):
                # Whoever settles it is not done, or whoever waits for it is about to hear of it.
                self._failed.append(parcel)
            elif _is_untold(parcel):
                lost.append(parcel)
        if not lost:
            return None
        at_least, self._forgot = self._forgot, False
        for parcel in lost:
            parcel.told = True
        return _to_raise(lost, at_least=at_least)

    def _make_room(self) -> None:
        kept = [parcel for parcel in self._failed.copy() if not parcel.told]
        if len(kept) >= _MOST:
            self._forgot = True
            kept = kept[len(kept) - _MOST // 2 :]
        self._failed = deque(kept)


def described(parcels: Iterable[Parcel]) -> str:
    """How many messages to which topics these are."""
    counts: Counter[str] = Counter()
    for parcel in parcels:
        counts[parcel.topic.name] += parcel.count
    first, *others = (f"{number:,} to {topic!r}" for topic, number in counts.items())
    noun = "message" if first.startswith("1 ") else "messages"
    return ", ".join([first.replace(" ", f" {noun} ", 1), *others])


def _is_untold(parcel: Parcel) -> bool:
    return parcel.error is not None and not parcel.told


def _what_happened(lost: list[Parcel]) -> str:
    """Which messages are not there, and which may be."""
    unknown = [each for each in lost if isinstance(each.error, OutcomeUnknown)]
    missing = [each for each in lost if not isinstance(each.error, OutcomeUnknown)]
    parts = [f"not delivered: {described(missing)}"] if missing else []
    if unknown:
        parts.append(f"delivered or not, nobody can tell: {described(unknown)}")
    return "; ".join(parts)


def _to_raise(lost: list[Parcel], *, at_least: bool) -> PxrsError:
    """`DeliveryFailed` promises that the messages are not there; else it is `OutcomeUnknown`."""
    sure = not any(isinstance(each.error, OutcomeUnknown) for each in lost)
    advice = "" if sure else "look for them in the topic, then "
    more = ", and others before" if at_least else ""
    error = (DeliveryFailed if sure else OutcomeUnknown)(
        f"{_what_happened(lost)}{more}; {advice}send again (which ones is told by the result() of "
        f"what send() returned). What went wrong: {_why(lost)}"
    )
    error.__cause__ = _cause(lost[0])
    return error


def _cause(parcel: Parcel) -> BaseException | None:
    error = parcel.error
    return error if error is None or error.__cause__ is None else error.__cause__


def _why(lost: list[Parcel]) -> str:
    """As far as the first one says."""
    cause = _cause(lost[0])
    return str(cause) or type(cause).__name__


def _drop_frames(error: BaseException | None) -> None:
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
