"""Takes turns: processes that append to the same partition stand in line, the oldest request first.

A publish is refused when another came first. The process that was refused has to ask for the new
end and is slower than the one that was not: without turns, the fastest goes on and the others try
in vain. So a process that was overtaken announces on a subject of the partition that it waits, and
since when; processes that receive this wait too, unless they have waited longer. When its turn
comes it announces that, appends for a moment, and announces that it is done.

These messages are hints. They decide which process tries first, never what is stored: a publish
still names the end for which it was built. A process that dies in line is passed over when it no
longer repeats its message, and no process waits in line for more than half of the time that an
append may take.

Ages are sent, not times: no clocks are compared. A message gets older on its way, so others seem
younger than they are; two processes never each take the other for the older one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pxrs.chance import CHANCE
from pxrs.clock import Clock
from pxrs.stores.crowding import Crowding
from pxrs.stores.jetstream.wire import Wire
from pxrs.types import LogPartition

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_LOG = logging.getLogger("pxrs.nats")

# How long a process may go on when it has appended once and others wait: asking for the end when a
# turn begins takes as long as some appends.
_TURN = 0.025
# A turn ends when nothing more was appended for this long.
_IDLE = 0.005
# How long the message of a waiting process counts; it is repeated in half that time.
_COUNTS = 0.4
# The longest that it may count: for one whose batches take their time on a slow link.
_COUNTS_AT_MOST = 10.0
# How long, at most, a process pauses that was overtaken although it is its turn.
_SOON = 0.004
# Messages of more processes than this are ignored: they probably do not come from pxrs.
_MOST_OTHERS = 1000
# So many others in line are too many: each of them waits for its turn for a quarter of a second or
# more. To be warned of if they were there at most of so many turns.
_CROWD = 8
_SAMPLE = 40
_MOST_TURNS = 0.5
_WARN_EVERY = 3600.0


@dataclass
class _Other:
    """Another process in line: since when, and until when its message counts."""

    since: float
    until: float


class Line:
    """The processes that wait to append to one partition, as far as this process knows.

    Used under the partition's lock.
    """

    def __init__(
        self, tell: Callable[[bytes], None], me: bytes, patience: float, crowding: Crowding
    ) -> None:
        self._tell = tell
        self._me = me
        self._patience = patience
        self._crowding = crowding
        self._others: dict[bytes, _Other] = {}
        self._changed = asyncio.Event()
        # Since when this process is in line, None if it is not; and when its turn ends, None
        # as long as it has not appended.
        self._since: float | None = None
        self._ends: float | None = None
        self._leaving: asyncio.TimerHandle | None = None
        # How long this process's message should count.
        self._counts = _COUNTS

    async def turn(self, since: float) -> bool:
        """Wait, if others wait, until it is this process's turn.

        Returns whether others may have appended. `since`: when the caller's append began.
        """
        self._stay()
        if self._since is not None:
            if self._turn_left() > 0:
                return False
            self._leave()
            since = _now()
        if not self._in_line():
            return False
        await self._stand_in_line(since)
        return True

    async def overtaken(self, since: float, took: float) -> None:
        """Wait for a turn, because another process was faster than a try that `took` so long.

        If it was this process's turn, it still is.
        """
        self._counts = min(max(_COUNTS, 3 * took), _COUNTS_AT_MOST)
        if self._since is None:
            await self._stand_in_line(since)
        else:
            self._say(b"turn")
            await asyncio.sleep(CHANCE.uniform(0, _SOON))

    def rest(self) -> None:
        """Nothing more to append for now: the turn ends soon, unless another append comes."""
        if self._since is None:
            return
        left = min(_IDLE, self._turn_left())
        if left <= 0:
            self._leave()
        else:
            self._stay()
            self._leaving = asyncio.get_running_loop().call_later(left, self._leave)

    def quit(self) -> bool:
        """Leave the line for good; returns whether this process was in it."""
        was_in_line = self._since is not None
        if was_in_line:
            self._leave()
        return was_in_line

    def hear(self, word: bytes) -> None:
        """Note the message of another process."""
        now = _now()
        match word.split():
            case [b"done", name]:
                self._others.pop(name, None)
                self._changed.set()
            case [b"wait" | b"turn" as what, name, age, counts] if name != self._me:
                if not (age.isdigit() and counts.isdigit()):
                    return
                known = self._others.get(name)
                if known is None and len(self._others) >= _MOST_OTHERS:
                    return
                since = now - int(age[:9]) / 1000
                if what == b"turn":
                    # Even processes that have waited longer wait until it is done.
                    since = -1.0
                elif known is not None:
                    since = min(since, known.since)
                until = now + min(int(counts[:9]) / 1000, _COUNTS_AT_MOST)
                self._others[name] = _Other(since, until)

    async def _stand_in_line(self, since: float) -> None:
        self._since = since
        longest = _now() + self._patience
        said = 0.0
        try:
            while (now := _now()) < longest and (ahead := self._ahead_of(since)):
                if now >= said + self._counts / 2:
                    self._say(b"wait")
                    said = now
                self._changed.clear()
                limit = min(longest, said + self._counts / 2, *(each.until for each in ahead))
                try:
                    async with asyncio.timeout_at(limit):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        except BaseException:
            self._leave()
            raise
        self._ends = None
        self._say(b"turn")
        self._crowding.note(crowded=len(self._in_line()) >= _CROWD)

    def _turn_left(self) -> float:
        if self._ends is None:
            self._ends = _now() + _TURN
        return self._ends - _now()

    def _in_line(self) -> list[_Other]:
        now = _now()
        for name in [name for name, other in self._others.items() if other.until <= now]:
            del self._others[name]
        return list(self._others.values())

    def _ahead_of(self, since: float) -> list[_Other]:
        return [other for other in self._in_line() if other.since < since]

    def _stay(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None

    def _leave(self) -> None:
        self._stay()
        self._since = None
        self._tell(b"done %s" % self._me)

    def _say(self, what: bytes) -> None:
        assert self._since is not None
        age = max(0, int((_now() - self._since) * 1000))
        self._tell(b"%s %s %d %d" % (what, self._me, age, int(self._counts * 1000)))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _warn_of_crowd(where: LogPartition, share: float) -> None:
    _LOG.warning(
        "at %.0f %% of the last %d turns of this process, %d or more others were waiting to append "
        "to partition %d of topic %r: put more messages into a batch, send from fewer processes, "
        "or use more partitions",
        100 * share,
        _SAMPLE,
        _CROWD,
        where.partition,
        where.topic_id,
    )


class Turns:
    """The lines of all partitions that this process appends to."""

    def __init__(
        self, wire: Wire, hints: Callable[[str], str], timeout: float, clock: Clock
    ) -> None:
        # `hints`: the prefix of a topic's subjects under which nothing is stored.
        self._wire = wire
        self._hints = hints
        self._patience = timeout / 2
        self._clock = clock
        self._me = secrets.token_hex(6).encode()
        self._lines: dict[str, dict[str, Line]] = {}

    async def line(self, where: LogPartition) -> Line:
        """The partition's line. After the first call the process listens to the whole topic."""
        lines = self._lines.get(where.topic_id)
        if lines is None:
            lines = self._lines[where.topic_id] = {}
            await self._wire.listen(self._subject(where.topic_id), partial(self._on_word, lines))
        line = lines.get(str(where.partition))
        if line is None:
            subject = self._subject(where.topic_id, str(where.partition))
            crowding = Crowding(
                self._clock,
                partial(_warn_of_crowd, where),
                sample=_SAMPLE,
                most=_MOST_TURNS,
                again=_WARN_EVERY,
            )
            line = Line(partial(self._wire.tell, subject), self._me, self._patience, crowding)
            lines[str(where.partition)] = line
        return line

    async def forget(self, topic_id: str) -> None:
        """Forget a topic that was dropped."""
        if self._lines.pop(topic_id, None) is not None:
            await self._wire.ignore(self._subject(topic_id))

    async def close(self) -> None:
        """Leave all lines, so that other processes go on."""
        lines = [line for those in self._lines.values() for line in those.values()]
        in_line = [line for line in lines if line.quit()]
        if in_line:
            # Wait for the server's answer to a later request: then the messages have reached it.
            await asyncio.sleep(0)
            await self._wire.settle()

    def _subject(self, topic_id: str, partition: str = "*") -> str:
        return f"{self._hints(topic_id)}.{partition}.turn"

    @staticmethod
    def _on_word(lines: dict[str, Line], message: Msg) -> None:
        line = lines.get(message.subject.split(".")[-2])
        if line is not None:
            line.hear(message.data)
