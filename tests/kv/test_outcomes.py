"""Lost answers, late commits and races: what is told is true, and histories are linear."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pxrs import Pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.kv import (
    Change,
    Draft,
    KeyBatch,
    Writer,
    Written,
    head_key,
    shard_of,
)
from pxrs.errors import (
    AlreadyExists,
    OutcomeUnknown,
    PxrsError,
    StoreError,
    StoreUnavailable,
    VersionMismatch,
)
from pxrs.kv.group_commit import GroupCommit, Waiting
from pxrs.kv.store import KeyValues
from pxrs.kv.transaction import TransactionKeys
from pxrs.stores.api import CoordStore
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from pxrs.testing.faults import Faults, FaultyStores, Rates
from pxrs.types import (
    ABSENT,
    Check,
    Committed,
    Conflict,
    Limits,
    Outcome,
    Version,
    Versioned,
    Write,
)
from support.child import PATIENCE
from support.linearizable import GONE, Op, find_violation, is_linearizable
from support.seeds import few_are_fast

RATES = Rates(
    unknown_applied=0.15, unknown_lost=0.1, unknown_late=0.15, unavailable=0.05, longest_delay=0.02
)


def play(seed: int, clients: int = 3, each: int = 60) -> list[Op]:
    """Threads write, compare and read a few keys through stores that lose answers.

    Two keys of two shards, in one commit now and then: of several writes, or of a transaction.
    """
    stores = MemoryStores()
    history: list[Op] = []
    faults = Faults(Random(seed), SYSTEM_CLOCK, RATES)

    def client(number: int, px: Pxrs) -> None:
        rng = Random(seed * 100 + number)
        for turn in range(each):
            history.extend(act(px, rng, f"{number}.{turn}"))

    all_px = [Pxrs(FaultyStores(stores, faults, who=str(number))) for number in range(clients)]
    threads = [threading.Thread(target=client, args=numbered) for numbered in enumerate(all_px)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    faults.heal()
    # They are one store, so they end together.
    for px in all_px:
        px.close()
    return history


def act(px: Pxrs, rng: Random, unique: str) -> list[Op]:
    """One operation, or some at once, and what came of them."""
    both = rng.choice(["", "", "", "", "batch", "transaction"])
    if not both:
        return [act_on_one(px.kv, rng, unique)]
    writes: dict[str, str | None] = {key: rng.choice([unique, unique, GONE]) for key in "ab"}
    called = time.monotonic()
    try:
        if both == "batch":
            ops = [
                Op(key, "write" if value else "delete", value, called, 0, done=existed)
                for (key, value), existed in zip(
                    writes.items(), write_together(px.kv, writes), strict=True
                )
            ]
        else:
            write_in_transaction(px, writes)
            ops = [Op(key, "write", value, called, 0) for key, value in writes.items()]
    except OutcomeUnknown:
        return [Op(k, "write", v, called, math.inf, done=None) for k, v in writes.items()]
    except PxrsError:
        return []
    return [op._replace(returned=time.monotonic()) for op in ops]


def write_together(keys: KeyValues, writes: Mapping[str, str | None]) -> list[bool]:
    """As requests do that share a commit; which of the keys existed."""
    changes = [Change(k.encode(), None if v is None else v.encode()) for k, v in writes.items()]
    (answers,) = keys._do_all([KeyBatch(changes)])
    if isinstance(answers, BaseException):
        raise answers
    return [answer.existed for answer in answers if isinstance(answer, Written)]


def write_in_transaction(px: Pxrs, writes: Mapping[str, str | None]) -> None:
    with px.transaction() as tx:
        for key, value in writes.items():
            if value is None:
                tx.kv.delete(key)
            else:
                tx.kv.put(key, value)


def act_on_one(keys: KeyValues, rng: Random, unique: str) -> Op:
    """One operation on one key, and what came of it."""
    key = rng.choice(["a", "b"])
    kind = rng.choice(["read", "read", "write", "cas", "delete"])
    expected: Any = GONE
    version = ABSENT
    if kind == "cas":
        try:
            found = keys.get(key)
        except PxrsError:
            found = None
        if found is not None:
            expected, version = found.value.decode(), found.version
    called = time.monotonic()
    value: Any = unique
    try:
        if kind == "read":
            seen = keys.get(key)
            value = GONE if seen is None else seen.value.decode()
        elif kind == "cas":
            keys.put(key, unique, if_match=version)
        elif kind == "write":
            keys.put(key, unique)
        else:
            kind, value = "write", GONE
            keys.delete(key)
    except (VersionMismatch, AlreadyExists):
        return Op(key, kind, value, called, time.monotonic(), expected, done=False)
    except OutcomeUnknown:
        return Op(key, kind, value, called, math.inf, expected, done=None)
    except StoreError:
        # It was not done: as if it had never been called.
        return Op("nothing", "read", GONE, called, called)
    return Op(key, kind, value, called, time.monotonic(), expected)


@pytest.mark.parametrize("seed", few_are_fast(range(25)))
def test_histories_are_linearizable(seed: int) -> None:
    assert find_violation(play(seed)) is None


def without_head_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that do not check their shard's head: what was read may have changed."""
    checks: Any = Draft.checks
    unchecked = property(lambda self: [it for it in checks.fget(self) if it.version == 0])
    monkeypatch.setattr(Draft, "checks", unchecked)


def gives_up_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees no trace of its write takes it for never done, and does it again."""
    told = Draft.outcome

    def outcome(self: Draft, *seen: Any) -> Outcome | None:
        found = told(self, *seen)
        return Outcome.NEVER if found is Outcome.UNKNOWN else found

    monkeypatch.setattr(Draft, "outcome", outcome)


def believes_in_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets no answer takes the write for done."""
    monkeypatch.setattr(Draft, "outcome", lambda self, *seen: Outcome.DONE)


def reads_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are answered from memory."""
    monkeypatch.setattr(KeyValues, "_read", KeyValues._read, raising=True)
    read = KeyValues._read
    memory: dict[tuple[int, bytes], Any] = {}

    def stale(self: KeyValues, key: bytes) -> Any:
        place = (id(self), key)
        if place not in memory or len(memory) % 3 == 0:
            memory[place] = read(self, key)
        return memory[place]

    monkeypatch.setattr(KeyValues, "_read", stale)


@pytest.mark.parametrize(
    "broken",
    [without_head_checks, gives_up_too_soon, believes_in_success, reads_what_it_remembers],
)
def test_broken_versions_are_caught(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    assert any(find_violation(play(seed)) is not None for seed in range(60))


def test_a_write_that_is_told_as_failed_never_comes() -> None:
    """With one writer there is always evidence: nothing is unknown but what can't be reached."""
    for seed in range(10):
        clock = VirtualClock()
        stores = MemoryStores(clock=clock)
        faults = Faults(
            Random(seed),
            clock,
            Rates(unknown_applied=0.2, unknown_lost=0.2, unknown_late=0.2, longest_delay=3),
        )
        keys = KeyValues(FaultyStores(stores, faults, who="a").coord, clock)
        truth = KeyValues(stores.coord, clock)
        for turn in range(30):
            version = keys.put("k", str(turn))
            found = truth.get("k")
            assert found is not None
            assert (found.value, found.version) == (str(turn).encode(), version)
            clock.advance(1)


def test_the_checker_knows_what_is_linear() -> None:
    def op(kind: str, value: Any, called: float, returned: float, **more: Any) -> Op:
        return Op("k", kind, value, called, returned, **more)

    assert is_linearizable([op("write", 1, 0, 1), op("read", 1, 2, 3)])
    assert not is_linearizable([op("write", 1, 0, 1), op("read", GONE, 2, 3)])
    assert is_linearizable([op("write", 1, 0, 5), op("read", GONE, 2, 3), op("read", 1, 3.5, 4)])
    assert not is_linearizable([op("write", 1, 0, 5), op("read", 1, 2, 3), op("read", GONE, 4, 5)])
    lost = op("write", 2, 1.5, math.inf, done=None)
    assert is_linearizable([op("write", 1, 0, 1), lost, op("read", 1, 2, 3), op("read", 2, 4, 5)])
    twice = [op("cas", 2, 2, 3, expected=1), op("cas", 3, 2, 3, expected=1)]
    assert not is_linearizable([op("write", 1, 0, 1), *twice])
    refused = op("cas", 2, 2, 3, expected=1, done=False)
    assert not is_linearizable([op("write", 1, 0, 1), refused])


# Threads that commit for each other


def test_one_thread_commits_for_all_that_wait() -> None:
    sizes: list[int] = []
    entered, go_on = threading.Event(), threading.Event()

    def commit(waiting: Any) -> None:
        sizes.append(len(waiting))
        entered.set()
        go_on.wait()
        for each in waiting:
            each.settle(each.work + 1)

    group: GroupCommit[int, int] = GroupCommit(commit)
    answers: list[int] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(group.do(n))) for n in range(6)]
    threads[0].start()
    entered.wait()
    for thread in threads[1:]:
        thread.start()
    while len(group._waiting) < 6:
        threading.Event().wait(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [1, 2, 3, 4, 5, 6]
    assert sizes == [1, 5]


def test_several_works_of_one_thread_are_done_in_several_commits() -> None:
    """What does not fit into the first commit is led by the same thread, one after the other."""
    sizes: list[int] = []

    def commit(waiting: Sequence[Waiting[int, int]]) -> None:
        sizes.append(len(waiting))
        for each in waiting[:2]:
            each.settle(each.work + 1)

    group: GroupCommit[int, int] = GroupCommit(commit)
    assert group.do_all(range(5)) == [1, 2, 3, 4, 5]
    assert sizes == [5, 3, 1]
    assert group.do_all([]) == []
    assert group.do(7) == 8
    assert not group._is_led


def test_works_of_many_threads_are_each_answered() -> None:
    """Commits take as much as they like; leaders change between threads all the time."""
    rng = Random(1)

    def commit(waiting: Sequence[Waiting[int, int]]) -> None:
        for each in waiting[: rng.randint(1, 4)]:
            each.settle(-each.work)

    group: GroupCommit[int, int] = GroupCommit(commit)
    answers: list[bool] = []

    def call(thread: int) -> None:
        for turn in range(50):
            works = [thread * 1000 + turn * 10 + n for n in range(turn % 6)]
            answers.append(group.do_all(works) == [-work for work in works])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [True] * 300
    assert not group._is_led


def test_a_thread_that_is_interrupted_leaves_nobody_waiting() -> None:
    """Whoever committed for others tells them that it is unknown, and another one goes on."""
    entered, go_on = threading.Event(), threading.Event()

    def commit(waiting: Sequence[Waiting[str, str]]) -> None:
        if waiting[0].work == "first":
            entered.set()
            go_on.wait()
            raise KeyboardInterrupt
        for each in waiting:
            each.settle(each.work)

    group: GroupCommit[str, str] = GroupCommit(commit)
    told: dict[str, Any] = {}

    def call(work: str) -> None:
        try:
            told[work] = group.do(work)
        except BaseException as error:  # noqa: BLE001 - looked at below
            told[work] = type(error)

    threads = [threading.Thread(target=call, args=(name,)) for name in ("first", "second")]
    threads[0].start()
    entered.wait()
    threads[1].start()
    while len(group._waiting) < 2:
        threading.Event().wait(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    assert told == {"first": KeyboardInterrupt, "second": "second"}
    assert not group._is_led


def test_a_write_is_done_even_if_sweeping_after_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    coord = MemoryStores(clock=clock).coord
    keys = KeyValues(coord, clock)
    keys.put("k", "1", ttl=1)
    clock.advance(100)
    asked: list[object] = []

    def fail(*where: object, **more: object) -> None:
        asked.append(where)
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(coord, "list", fail)
    version = keys.put("k", "2")
    found = keys.get("k")
    assert found is not None
    assert (found.version, len(asked)) == (version, 1)


class Held:
    """A store that holds one commit back, without an answer, until it is let through."""

    def __init__(self, coord: CoordStore) -> None:
        self._coord = coord
        self.limits = coord.limits
        self.holds = False
        # Whether it is done all the same, at once.
        self.lands = False
        self.held: list[tuple[Sequence[Check], Sequence[Write]]] = []
        # What happens before the next commit after that one, and before the next read of a record.
        self.before_commit: Callable[[], object] = lambda: None
        self.before_read: dict[str, Callable[[], object]] = {}

    def commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Committed | Conflict:
        if self.holds:
            self.holds = False
            self.held.append((checks, writes))
            if self.lands:
                self.let_through()
            raise OutcomeUnknown("no answer came")
        if self.held:
            before, self.before_commit = self.before_commit, lambda: None
            before()
        return self._coord.commit(checks, writes)

    def get(self, key: str) -> Versioned | None:
        self.before_read.pop(key, lambda: None)()
        return self._coord.get(key)

    def let_through(self) -> None:
        (held,) = self.held
        assert isinstance(self._coord.commit(*held), Committed)


def test_a_commit_that_lands_between_two_looks_was_done() -> None:
    """One head is read before it lands; another is read after others have written to that shard."""
    stores = MemoryStores()
    coord = Held(stores.coord)
    keys, others = KeyValues(cast(Any, coord), SYSTEM_CLOCK), KeyValues(stores.coord, SYSTEM_CLOCK)
    keys.put("a", "0")
    keys.put("b", "0")

    def lands() -> None:
        coord.let_through()
        others.put("b", "theirs")

    coord.before_read[head_key(shard_of(b"b"))] = lands
    coord.holds = True
    (answers,) = keys._do_all([KeyBatch([Change(b"a", None), Change(b"b", b"mine")])])
    assert answers == [Written(Version(1, 2)), Written(Version(1, 2))]
    found = others.get("b")
    assert found is not None
    assert (found.value, found.version) == (b"theirs", Version(1, 3))
    assert others.get("a") is None


def test_heads_that_others_have_read_do_not_let_a_write_happen_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was looked for and had not come; then it comes, and a transaction reads its shard."""
    stores = MemoryStores()
    coord = Held(stores.coord)
    keys = KeyValues(cast(Any, coord), SYSTEM_CLOCK)
    in_transaction = TransactionKeys(keys, nullcontext)
    first = keys.put("k", "0")
    attempt = keys._attempt

    def overtaken(*given: Any, **more: Any) -> Any:
        if coord.held:
            monkeypatch.setattr(keys, "_attempt", attempt)
            coord.let_through()
            in_transaction.put("k", "x")
            in_transaction._stage(cast(Any, SimpleNamespace(check=print, write=print)))
        return attempt(*given, **more)

    monkeypatch.setattr(keys, "_attempt", overtaken)
    coord.holds = True
    assert keys.put("k", "1") == Version(1, first.index + 1)
    found = keys.get("k")
    assert found is not None
    assert found.version == Version(1, first.index + 1)


def test_an_attempt_with_fewer_writes_than_one_that_was_done_after_all() -> None:
    """The later one was cut shorter, and was refused: the first one landed just before."""
    coord = Held(MemoryStores().coord)
    keys = KeyValues(cast(Any, coord), SYSTEM_CLOCK)
    keys.put("a", "0")
    keys.put("b", "0")

    def lands_late() -> None:
        coord.limits = Limits(operations=10, value_bytes=10_000)
        coord.before_commit = coord.let_through

    coord.before_read[head_key(shard_of(b"a"))] = lands_late
    coord.holds = True
    batches = [KeyBatch([Change(b"a", b"1")]), KeyBatch([Change(b"b", b"1")])]
    assert keys._do_all(batches) == [[Written(Version(1, 2))], [Written(Version(1, 2))]]
    found = [keys.get("a"), keys.get("b")]
    assert [entry and entry.version for entry in found] == [Version(1, 2), Version(1, 2)]


def test_a_commit_that_only_notes_answers_is_found_out() -> None:
    """It writes no key, so no head tells of it; its own evidence does."""
    stores = MemoryStores()
    coord = Held(stores.coord)
    keys = KeyValues(cast(Any, coord), SYSTEM_CLOCK)
    batch = KeyBatch([Change(b"missing", None)], Writer("client.0", 1, again=True))
    coord.holds = coord.lands = True
    assert keys._do_all([batch]) == [[Written(ABSENT, existed=False)]]


def test_a_write_that_may_still_come_is_not_told_as_a_conflict() -> None:
    """The commit is on its way for longer than anybody waits."""
    clock = VirtualClock()
    stores = MemoryStores(clock=clock)
    rates = Rates(unknown_late=1.0, longest_delay=1e9)
    coord = FaultyStores(stores, Faults(Random(1), clock, rates), who="a").coord
    keys = KeyValues(coord, clock)
    read = keys._coord.get

    def slow_read(key: str) -> Any:
        clock.advance(10)
        return read(key)

    keys._coord = cast(
        Any, SimpleNamespace(get=slow_read, commit=coord.commit, limits=coord.limits)
    )
    with pytest.raises(OutcomeUnknown):
        keys.put("k", "1")
