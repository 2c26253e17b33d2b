"""The demo's stage: the processes, the group as it is now, and how to wait for what must come."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from pxrs.cli.demo.cast import Cast, Report
from pxrs.cli.demo.observer import Observer, Picture
from pxrs.errors import PxrsError

PRODUCER = "producer"
# Long enough for a loaded machine to start a few interpreters.
PATIENCE = 60.0
_LOOK = 0.05

State = Literal["starting", "up", "holding", "frozen", "killed", "left"]


class Proof(msgspec.Struct, frozen=True):
    """Something that was to be shown, and whether it held."""

    name: str
    holds: bool
    text: str


class Moment(NamedTuple):
    """What there is to see now. Consumers go by a letter."""

    seconds: float
    title: str
    picture: Picture
    owners: list[str | None]
    states: dict[str, State]
    rate: float


class View(Protocol):
    """Shows what goes on."""

    @property
    def every(self) -> float:
        """Seconds between two moments."""
        ...

    def open(self, where: str, *, once: bool) -> None: ...

    def show(self, moment: Moment) -> None: ...

    def scene(self, title: str) -> None: ...

    def proof(self, proof: Proof) -> None: ...

    def close(self) -> None: ...


class NotShown(PxrsError):  # noqa: N818 - named like the errors it stands among
    """What had to happen did not, in time."""


class Stage:
    """Starts, stops and observes. Waiting shows what goes on meanwhile, and has an end."""

    def __init__(
        self, cast: Cast, observer: Observer, view: View, arguments: dict[str, tuple[str, ...]]
    ) -> None:
        self._cast = cast
        self._observer = observer
        self._view = view
        self._arguments = arguments
        self._watch = observer.watch()
        self._letters: dict[str, str] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self._states: dict[str, State] = {}
        self._past: deque[tuple[float, int]] = deque()
        self._started = time.monotonic()
        self._show_at = 0.0
        self._title = ""
        self.picture = observer.look()

    # Who is there

    def start_producer(self) -> None:
        self._start(PRODUCER, "produce")

    def start_consumer(self, letter: str) -> None:
        self._states[letter] = "starting"
        self._start(letter, "consume")

    def _start(self, who: str, role: str) -> None:
        self._said[who] = {}
        self._cast.start(who, role, *self._arguments[role])

    def member(self, letter: str) -> str:
        """The name of a consumer in its group; nobody's before it has joined."""
        return str(self._said[letter].get("member", ""))

    def partitions_of(self, letter: str) -> list[int]:
        return self.picture.owned_by(self.member(letter))

    @property
    def sent(self) -> int:
        """Messages that were acknowledged to the producer."""
        return int(self._said.get(PRODUCER, {}).get("acked", 0))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def said(self, who: str, word: str) -> Any:
        """What a process has reported last under this word; None if nothing."""
        return self._said[who].get(word)

    def order(self, who: str, order: str) -> None:
        self._cast.order(who, order)

    def kill(self, letter: str) -> None:
        self._states[letter] = "killed"
        self._cast.send_signal(letter, signal.SIGKILL)

    def freeze(self, letter: str) -> None:
        self._states[letter] = "frozen"
        self._cast.send_signal(letter, signal.SIGSTOP)

    def wake(self, letter: str) -> None:
        self._states[letter] = "up"
        self._cast.send_signal(letter, signal.SIGCONT)

    # What happens

    def begin(self, title: str) -> None:
        """The next scene."""
        self._title = title
        self._view.scene(title)

    def settled(self, *letters: str) -> bool:
        """Whether these are the members, and everything is owned as it shall be."""
        names = {self.member(letter) for letter in letters}
        return self.picture.state == "STABLE" and self.picture.members == names

    def taken_over(self, partitions: list[int], former: str) -> bool:
        """Whether other members own all of these partitions."""
        owners = {self.picture.rows[number].owner for number in partitions}
        return owners <= self.picture.members - {self.member(former)}

    def wait(self, what: str, condition: Callable[[], bool], patience: float = PATIENCE) -> float:
        """Until the condition holds; how many seconds that took. It is asked at every change."""
        began = time.monotonic()
        while True:
            self._look()
            if condition():
                return time.monotonic() - began
            if time.monotonic() - began > patience:
                raise NotShown(f"{what}: not within {patience:g} s")
            self._watch.wait(_LOOK)

    def play(self, seconds: float) -> None:
        """Let it go on for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for report in self._cast.reports(min(left, _LOOK)):
                self._hear(report)
            if time.monotonic() >= self._show_at:
                self._look()

    def ends(self) -> list[int]:
        """Where each partition ends now."""
        self._look()
        return [row.end for row in self.picture.rows]

    def _look(self) -> None:
        self.picture = self._observer.look()
        for report in self._cast.reports():
            self._hear(report)
        now = time.monotonic()
        if now >= self._show_at:
            self._show_at = now + self._view.every
            self.show()

    def show(self) -> None:
        """Show how things are now."""
        owners = [
            self._letters.get(row.owner, "?") if row.owner else None for row in self.picture.rows
        ]
        states, rate = dict(self._states), self._rate()
        self._view.show(Moment(self.seconds, self._title, self.picture, owners, states, rate))

    def _rate(self) -> float:
        """Messages handled per second, over the last second."""
        now, handled = time.monotonic(), self.picture.handled
        self._past.append((now, handled))
        while self._past[0][0] < now - 1.0 and len(self._past) > 2:
            self._past.popleft()
        then, before = self._past[0]
        return (handled - before) / max(now - then, 1e-9)

    def _hear(self, report: Report) -> None:
        who, words = report.who, report.words
        if words is None:
            done = "done" in self._said[who] or self._states.get(who) == "killed"
            if not done:
                raise self._cast.failure(who)
            return
        self._said[who].update(words)
        if "member" in words:
            self._letters[words["member"]] = who
            self._states[who] = "up"
        elif "holding" in words:
            self._states[who] = "holding"
        elif "leaving" in words:
            self._states[who] = "left"

    def close(self) -> None:
        self._watch.close()
