"""Memory and SQLite as twins: the same calls at the same time get the same answers.

Random calls by a few transactions on a few queues, on one virtual clock; whatever a call
returns or raises has to be the same, and so has all that can be looked at after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pxrs.errors import PxrsError
from pxrs.stores.api import Session, Stores
from pxrs.stores.memory.stores import MemoryStores
from pxrs.stores.sqlite.stores import SqliteStores
from pxrs.testing.clock import VirtualClock
from pxrs.types import (
    Held,
    Holder,
    ItemState,
    NewItem,
    QueueChange,
    Release,
    StoredItem,
    Taken,
)
from support.seeds import few_are_fast

pytestmark = pytest.mark.engine("sqlite")

QUEUES = ("a", "b", "f")
WORKERS = 3
SESSIONS = 2
TTL = 40.0


class Twins:
    """Two stores that are called alike. Sessions differ by their ids, so they have numbers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        path = str(folder / "twin.db")
        self.stores: list[Stores] = [
            MemoryStores(clock=self.clock),
            SqliteStores(path, durability="relaxed", clock=self.clock),
        ]
        self.sessions: list[list[Session]] = [self.open() for _ in range(SESSIONS)]
        self.held: list[list[Held]] = [[] for _ in range(SESSIONS * WORKERS)]
        self.past: list[Held] = []
        self.bodies = 0
        self.log: list[str] = []
        for stores in self.stores:
            stores.queues.create("f", fifo=True)

    def open(self) -> list[Session]:
        return [stores.coord.session(TTL) for stores in self.stores]

    def close(self) -> None:
        for stores in self.stores:
            stores.close()

    def holder(self, who: int, twin: int) -> Holder:
        return Holder(self.sessions[who % SESSIONS][twin].id, f"tx-{who}")

    def both(self, call: Callable[[Stores, int], Any], what: str) -> Any:
        """Call both; the answer, which has to be the same one."""
        answers = []
        for twin, stores in enumerate(self.stores):
            try:
                answers.append(self.plain(call(stores, twin), twin))
            except PxrsError as error:
                answers.append(type(error))
        self.log.append(f"{what} -> {answers[0]}")
        assert answers[0] == answers[1], "\n".join(self.log[-40:])
        return answers[0]

    def plain(self, answer: Any, twin: int) -> Any:
        """The answer with sessions as numbers, and times rounded to what both can say."""
        if isinstance(answer, Taken):
            due = None if answer.items or answer.due is None else round(answer.due, 2)
            return Taken(answer.items, due, answer.suspect)
        if isinstance(answer, float):
            return round(answer, 2)
        if isinstance(answer, list) and answer and isinstance(answer[0], StoredItem):
            return [self.shown(item, twin) for item in answer]
        return answer

    def shown(self, item: StoredItem, twin: int) -> tuple[Any, ...]:
        fields = {name: getattr(item, name) for name in item.__struct_fields__}
        holder = fields.pop("holder")
        if holder is not None:
            ids = [session[twin].id for session in self.sessions]
            known = ids.index(holder.session) if holder.session in ids else None
            fields["holder"] = (known, holder.transaction)
        fields["body"] = (item.body[:5], len(item.body))
        return tuple(fields.items())

    def look(self) -> None:
        self.both(lambda stores, _: stores.queues.reap(), "reap")
        for name in QUEUES:
            self.both(lambda stores, _: stores.queues.stats(name), f"stats {name}")  # noqa: B023
            self.both(
                lambda stores, _: stores.queues.peek(name, tuple(ItemState), limit=1000),  # noqa: B023
                f"peek {name}",
            )

    # What may happen

    def step(self) -> None:
        acts = [
            (self.put, 5),
            (self.take, 7),
            (self.finish, 4),
            (self.give_back, 3),
            (self.extend, 1),
            (self.stale, 1),
            (self.pass_time, 3),
            (self.end_session, 0.5),
            (self.upkeep, 1),
        ]
        (act,) = self.rng.choices([act for act, _ in acts], [weight for _, weight in acts])
        act()

    def item(self) -> NewItem:
        rng, name = self.rng, self.rng.choice(QUEUES)
        self.bodies += 1
        strict = name == "f" and rng.random() < 0.95
        dedupe = rng.choice((None, None, "d1", "d2"))
        return NewItem(
            queue=name,
            body=b"%d" % self.bodies * rng.choice((1, 1, 1, 1500)),
            key=rng.choice((None, None, "k", "l")),
            priority=0 if strict else rng.choice((0, 0, 0, 1, -1)),
            delay=0.0 if strict else rng.choice((0.0, 0.0, 0.0, 0.05, 3.0)),
            dedupe=dedupe,
            dedupe_window=0.0 if dedupe is None else rng.choice((0.03, 5.0)),
        )

    def who(self) -> int:
        return self.rng.randrange(len(self.held))

    def put(self) -> None:
        who, items = self.who(), tuple(self.item() for _ in range(self.rng.randint(1, 4)))
        self.both(
            lambda stores, twin: stores.queues.apply(
                QueueChange(self.holder(who, twin), (), items)
            ),
            f"{who} puts {items}",
        )

    def take(self) -> None:
        who, name, number = self.who(), self.rng.choice(QUEUES), self.rng.choice((1, 1, 2, 5))
        most = self.rng.choice((None, None, 1, 2, 4))
        lock_for = self.rng.choice((None, 0.05, 1.0, 10.0))
        suspects = self.rng.random() < 0.5
        # When a take frees what the dead hold is each store's own affair.
        self.both(lambda stores, _: stores.queues.reap(), "reap")
        taken = self.both(
            lambda stores, twin: stores.queues.take(
                name,
                self.holder(who, twin),
                number,
                most=most,
                lock_for=lock_for,
                suspects=suspects,
            ),
            f"{who} takes {number} of {name} {most=} {lock_for=} {suspects=}",
        )
        if isinstance(taken, Taken):
            self.held[who] += [item.held for item in taken.items]
            self.past += [item.held for item in taken.items]

    def some(self, who: int) -> tuple[Held, ...]:
        held = self.held[who]
        chosen = self.rng.sample(held, self.rng.randint(0, len(held)))
        if self.rng.random() < 0.05 and self.past:
            chosen.append(self.rng.choice(self.past))
        return tuple(chosen)

    def finish(self) -> None:
        who = self.who()
        remove = self.some(who) if self.rng.random() < 0.5 else tuple(self.held[who])
        put = tuple(self.item() for _ in range(self.rng.randint(0, 2)))
        self.both(
            lambda stores, twin: stores.queues.apply(
                QueueChange(self.holder(who, twin), remove, put)
            ),
            f"{who} finishes {remove} and puts {put}",
        )
        self.held[who] = [held for held in self.held[who] if held not in remove]

    def give_back(self) -> None:
        who = self.who()
        releases = [
            Release(
                held,
                delay=self.rng.choice((0.0, 0.0, 0.05, 2.0)),
                error=self.rng.choice(("", "why")),
                dead=self.rng.random() < 0.15,
            )
            for held in self.some(who)
        ]
        self.both(
            lambda stores, twin: stores.queues.release(self.holder(who, twin), releases),
            f"{who} releases {releases}",
        )
        self.held[who] = [h for h in self.held[who] if h not in [r.held for r in releases]]

    def extend(self) -> None:
        who, lock_for = self.who(), self.rng.choice((0.05, 5.0))
        held = self.some(who)
        self.both(
            lambda stores, twin: stores.queues.extend(self.holder(who, twin), held, lock_for),
            f"{who} extends {held} by {lock_for}",
        )

    def stale(self) -> None:
        """A zombie tries what it can with any delivery that ever was."""
        if not self.past:
            return
        who, held = self.who(), self.rng.choice(self.past)
        change = [Release(held, error="stale")]
        self.both(
            lambda stores, twin: stores.queues.release(self.holder(who, twin), change),
            f"{who} releases {held} again",
        )
        self.both(
            lambda stores, twin: stores.queues.apply(QueueChange(self.holder(who, twin), (held,))),
            f"{who} removes {held} again",
        )

    def pass_time(self) -> None:
        seconds = self.rng.choice((0.01, 0.06, 0.06, 0.5, 3.0))
        self.log.append(f"{seconds} s pass")
        self.clock.advance(seconds)
        for session in self.sessions:
            if self.rng.random() < 0.9:
                self.renew(session)

    def renew(self, session: list[Session]) -> None:
        def renewed(stores: Stores, twin: int) -> None:
            session[twin].renew()

        if self.both(renewed, "renew") is not None:
            self.replace(session)

    def end_session(self) -> None:
        session = self.rng.choice(self.sessions)
        self.log.append(f"session {self.sessions.index(session)} ends")
        for each in session:
            each.close()
        if self.rng.random() < 0.5:
            self.take()
        self.replace(session)

    def replace(self, session: list[Session]) -> None:
        at = self.sessions.index(session)
        self.sessions[at] = self.open()
        for who in range(at, len(self.held), SESSIONS):
            self.held[who] = []

    def upkeep(self) -> None:
        name = self.rng.choice(QUEUES)
        ids = [self.rng.randint(1, 40) for _ in range(3)]
        self.both(lambda stores, _: stores.queues.reap(), "reap")
        dead = self.both(
            lambda stores, _: [i.id for i in stores.queues.peek(name, (ItemState.DEAD,))],
            f"the dead of {name}",
        )
        states = self.rng.sample(list(ItemState), 2)
        kind = self.rng.choice(("drop", "redrive", "redrive", "purge", "delete"))
        calls: dict[str, Callable[[Stores, int], object]] = {
            "drop": lambda stores, _: stores.queues.drop(name, ids),
            "redrive": lambda stores, _: stores.queues.redrive(name, [*dead[:4], *ids]),
            "purge": lambda stores, _: stores.queues.purge(name, states),
            "delete": lambda stores, _: stores.queues.delete(name) if name == "b" else None,
        }
        if kind != "purge" or self.rng.random() < 0.3:
            self.both(calls[kind], f"{kind} {name} {ids} {states}")


@pytest.mark.parametrize("seed", few_are_fast(range(8)))
@pytest.mark.long
def test_twins_give_the_same_answers(tmp_path: Path, seed: int) -> None:
    twins = Twins(tmp_path, seed)
    try:
        for number in range(700):
            twins.step()
            if number % 5 == 0:
                twins.look()
        twins.look()
    finally:
        twins.close()
