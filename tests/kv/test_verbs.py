"""`px.kv` on every engine: versions, conditions, repeats, time, scans and watches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs import ABSENT, AlreadyExists, Entry, InvalidRequest, Pxrs, Version, VersionMismatch
from pxrs.core import kv as rules
from pxrs.kv.store import KeyValues
from pxrs.stores.memory.stores import MemoryStores
from pxrs.testing.clock import VirtualClock
from support.node import LocalNode
from support.shared_commits import SharedCommits

NAMES = ("memory", "sqlite", "postgres", "mariadb", "etcd", "zookeeper")
EMBEDDED = [pytest.param(name, marks=pytest.mark.engine(name)) for name in NAMES]
ENGINES = [
    *EMBEDDED,
    pytest.param("behind a node", marks=pytest.mark.engine("sqlite")),
]
WITH_CLOCK = [it for it in ENGINES if it.values[0] not in ("etcd", "zookeeper")]


@pytest.fixture(params=ENGINES)
def px(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pxrs]:
    if request.param == "behind a node":
        store = f"sqlite:///{tmp_path}/kv.db"
        with LocalNode(store) as node, pxrs.connect(f"pxrs://{node.address}") as px:
            yield px
        return
    if request.param in ("memory", "sqlite"):
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/kv.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    with pxrs.connect(url) as px:
        yield px


def test_what_was_put_is_there_until_it_is_deleted(px: Pxrs) -> None:
    assert px.kv.get("user:1") is None
    first = px.kv.put("user:1", "Ada")
    assert px.kv.get("user:1") == Entry(b"user:1", b"Ada", first)
    second = px.kv.put(b"user:1", b"")
    assert second > first > ABSENT
    assert px.kv.get("user:1") == Entry(b"user:1", b"", second)
    assert px.kv.delete("user:1")
    assert not px.kv.delete("user:1")
    assert px.kv.get("user:1") is None
    assert px.kv.put("user:1", "Eve") > second


def test_a_condition_that_does_not_hold_changes_nothing(px: Pxrs) -> None:
    first = px.kv.put("k", "1", if_match=ABSENT)
    with pytest.raises(AlreadyExists) as exists:
        px.kv.put("k", "2", if_match=ABSENT)
    assert exists.value.current == first
    second = px.kv.put("k", "2", if_match=first)
    with pytest.raises(VersionMismatch) as mismatch:
        px.kv.put("k", "3", if_match=first)
    assert (mismatch.value.expected, mismatch.value.current) == (first, second)
    with pytest.raises(VersionMismatch):
        px.kv.delete("k", if_match=first)
    assert px.kv.get("k") == Entry(b"k", b"2", second)
    assert px.kv.delete("k", if_match=second)
    with pytest.raises(VersionMismatch, match="does not exist"):
        px.kv.put("k", "3", if_match=second)
    assert px.kv.get("k") is None


def test_a_repeated_write_is_answered_as_the_first(px: Pxrs) -> None:
    first = px.kv.put("k", "1", idempotency_key="a")
    other = px.kv.put("k", "2")
    assert px.kv.put("k", "1", idempotency_key="a") == first
    assert px.kv.get("k") == Entry(b"k", b"2", other)
    with pytest.raises(InvalidRequest, match="another write"):
        px.kv.put("k", "9", idempotency_key="a")
    # The same one for another key is another one.
    assert px.kv.put("l", "1", idempotency_key="a") > ABSENT
    assert px.kv.get("l")
    # A repeated compare-and-set is no conflict.
    changed = px.kv.put("k", "3", if_match=other, idempotency_key="b")
    assert px.kv.put("k", "3", if_match=other, idempotency_key="b") == changed
    assert px.kv.delete("k", idempotency_key="c")
    assert px.kv.delete("k", idempotency_key="c")


def test_a_repeated_write_that_did_nothing_does_nothing(px: Pxrs) -> None:
    """Whatever others have written since, or deleted."""
    assert not px.kv.delete("k", idempotency_key="a")
    theirs = px.kv.put("k", "theirs")
    assert not px.kv.delete("k", idempotency_key="a")
    assert px.kv.get("k") == Entry(b"k", b"theirs", theirs)
    for _ in range(2):
        with pytest.raises(AlreadyExists) as exists:
            px.kv.put("k", "mine", if_match=ABSENT, idempotency_key="b")
        assert exists.value.current == theirs
        px.kv.delete("k")
    assert px.kv.get("k") is None
    with pytest.raises(InvalidRequest, match="another write"):
        px.kv.put("k", "mine", idempotency_key="b")
    # A version does not come back, so such a refusal need not be kept.
    with pytest.raises(VersionMismatch):
        px.kv.put("k", "mine", if_match=theirs, idempotency_key="c")
    assert px.kv.put("k", "mine", if_match=ABSENT, idempotency_key="c") > theirs


def test_scans_go_by_the_order_of_bytes(px: Pxrs) -> None:
    keys = [b"a", b"a\x00", b"a\xff", b"aa", b"b", b"\xff\xfe"]
    for key in keys:
        px.kv.put(key, key)
    assert [entry.key for entry in px.kv.scan()] == sorted(keys)
    assert [entry.key for entry in px.kv.scan("a")] == [b"a", b"a\x00", b"aa", b"a\xff"]
    assert [entry.value for entry in px.kv.scan("a", after=b"a\x00", limit=1)] == [b"aa"]
    assert list(px.kv.scan("c")) == []
    assert px.kv.get_many(["a", "b", "none"]).keys() == {b"a", b"b"}


def test_watches_tell_what_keys_become(px: Pxrs) -> None:
    px.kv.put("a:1", "x")
    px.kv.put("b:1", "x")
    with px.kv.watch("a:") as watch:
        assert [entry.value for entry in watch.wait()] == [b"x"]
        assert watch.wait(0) == []
        version = px.kv.put("a:1", "y")
        assert watch.wait(30) == [Entry(b"a:1", b"y", version)]
        px.kv.delete("a:1")
        assert watch.wait(30) == [Entry(b"a:1", b"", ABSENT)]
        told: list[Entry] = []
        thread = threading.Thread(target=lambda: told.extend(watch))
        thread.start()
        watch.close()
        thread.join()
        assert told == []


@pytest.mark.parametrize("px", EMBEDDED, indirect=True)
def test_concurrent_writers_share_commits(px: Pxrs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each gets a version of its own."""
    group = px.kv._group
    commits = SharedCommits(monkeypatch, px.kv._coord, lambda: len(group._waiting) == 8)
    versions: list[tuple[bytes, Version]] = []

    def write(name: str) -> None:
        for number in range(10):
            version = px.kv.put(f"{name}-{number % 3}", f"{number}")
            versions.append((f"{name}-{number % 3}".encode(), version))

    threads = [threading.Thread(target=write, args=(f"w{it}",)) for it in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(commits.sizes) == 80
    assert sum(commits.sizes[:2]) >= 8
    assert len(set(versions)) == 80
    places = [(rules.shard_of(key), version) for key, version in versions]
    assert len(set(places)) == 80
    for entry in px.kv.scan():
        assert entry.version == max(version for key, version in versions if key == entry.key)


def test_several_processes_share_a_counter(px: Pxrs) -> None:
    """Two that do not know of each other's heads: every increment counts."""
    others = [KeyValues(px.stores.coord, px._clock) for _ in range(2)]

    def count(keys: KeyValues) -> None:
        done = 0
        while done < 5:
            now = keys.get("n")
            try:
                value = 1 if now is None else int(now.value) + 1
                keys.put("n", str(value), if_match=ABSENT if now is None else now.version)
                done += 1
            except (VersionMismatch, AlreadyExists):
                pass

    threads = [threading.Thread(target=count, args=(keys,)) for keys in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = px.kv.get("n", consistency="linearizable")
    assert found is not None
    assert found.value == b"10"


@pytest.mark.parametrize("px", WITH_CLOCK, indirect=True)
def test_a_value_expires_by_the_stores_clock(px: Pxrs) -> None:
    px.kv.put("short", "x", ttl=0.05)
    px.kv.put("long", "x", ttl=3600)
    kept = px.kv.put("kept", "x", ttl=0.05)
    px.kv.put("kept", "y")
    with px.kv.watch("short") as watch:
        while px.kv.get("short") is not None:
            watch.wait(0.02)
    assert not px.kv.delete("short")
    assert px.kv.put("short", "y", if_match=ABSENT) > ABSENT
    assert px.kv.get("long") is not None
    found = px.kv.get("kept")
    assert found is not None
    assert found.version > kept


@pytest.mark.parametrize("px", [it for it in ENGINES if it not in WITH_CLOCK], indirect=True)
def test_a_store_without_a_clock_takes_no_ttl(px: Pxrs) -> None:
    with pytest.raises(InvalidRequest, match="ttl needs a store with a clock"):
        px.kv.put("k", "x", ttl=1)
    assert px.kv.get("k") is None


def test_limits_are_told_and_change_nothing(px: Pxrs) -> None:
    limits = px.stores.coord.limits
    most = min(rules.LONGEST_KEY, (limits.key_chars - 3) // 2)
    px.kv.put(b"k" * most, b"x")
    with pytest.raises(InvalidRequest, match=f"key must be 1 to {most} bytes"):
        px.kv.put(b"k" * (most + 1), b"x")
    largest = min(rules.LONGEST_VALUE, limits.value_bytes - 33)
    px.kv.put("v", b"x" * largest)
    with pytest.raises(InvalidRequest, match=f"the limit is {largest}"):
        px.kv.put("v", b"x" * (largest + 1))
    found = px.kv.get("v")
    assert found is not None
    assert len(found.value) == largest


# Rules that need no engine


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def keys(clock: VirtualClock) -> KeyValues:
    return KeyValues(MemoryStores(clock=clock).coord, clock)


def test_what_has_expired_is_removed_before_anybody_is_told(
    keys: KeyValues, clock: VirtualClock
) -> None:
    """A compare-and-set that read it in time must not succeed after that."""
    late = KeyValues(keys._coord, clock)
    version = keys.put("k", "x", ttl=1)
    attempt = late._attempt([rules.KeyBatch([rules.Change(b"k", b"y", version)])], {})
    clock.advance(1)
    assert keys.get("k") is None
    assert not late._apply(attempt, {}, [])
    assert keys.get("k") is None


def test_stale_reads_are_a_second_old_at_most(keys: KeyValues, clock: VirtualClock) -> None:
    keys.put("k", "1")
    other = KeyValues(keys._coord, clock)
    first = other.get("k", consistency="stale_ok")
    keys.put("k", "2")
    assert other.get("k", consistency="stale_ok") == first
    assert other.get("k") != first
    clock.advance(1)
    assert other.get("k", consistency="stale_ok") != first
    # A process sees its own writes.
    other.put("k", "3")
    own = other.get("k", consistency="stale_ok")
    assert own is not None
    assert own.value == b"3"


def test_what_has_expired_is_swept(keys: KeyValues, clock: VirtualClock) -> None:
    for number in range(5):
        keys.put(f"{number}", "x", ttl=10, idempotency_key="k")
    keys.put("0", "y")
    clock.advance(3700)
    keys.put("other", "x")
    left = [
        record.key for record in keys._coord.list("kv") if not record.key.startswith("kv-heads/")
    ]
    assert left == [rules.record_key(b"0"), rules.record_key(b"other")]


def test_a_leader_raises_the_term_of_its_shards(keys: KeyValues) -> None:
    before = keys.put("k", "x")
    keys._lead([rules.shard_of(b"k")])
    after = keys.put("k", "y")
    assert (after.term, after.index) == (before.term + 1, before.index + 1)
    assert keys.put("k", "z") == Version(after.term, after.index + 1)


@pytest.mark.parametrize("again", [False, True])
def test_a_shard_that_is_gained_during_a_commit_has_its_term_raised(
    keys: KeyValues, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Also one that was led, and was lost meanwhile, as its term may not be the last any more."""
    first = keys.put("k", "x")
    shards = [rules.shard_of(b"k")]
    if again:
        keys._lead(shards)
    commit = keys._coord.commit

    def gain(*given: Any) -> Any:
        answer = commit(*given)
        keys._lead((), shards)
        keys._lead(shards)
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(keys._coord, "commit", gain)
        assert keys.put("k", "y").term == first.term + again
    assert keys.put("k", "z") == Version(first.term + again + 1, first.index + 2)
    assert keys.put("k", "z").term == first.term + again + 1


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda keys: keys.put(5, "x"), "key must be bytes or str"),
        (lambda keys: keys.put("k", None), "value must be bytes or str"),
        (lambda keys: keys.put("", "x"), "key must be 1 to"),
        (lambda keys: keys.put("k", "x", ttl=0), "ttl must be a number"),
        (lambda keys: keys.put("k", "x", ttl="5"), "ttl must be a number"),
        (lambda keys: keys.put("k", "x", ttl=float("nan")), "ttl must be a number"),
        (lambda keys: keys.put("k", "x", if_match=5), "if_match must be a Version"),
        (lambda keys: keys.put("k", "x", if_match=Version(1, -1)), "if_match must be a Version"),
        (lambda keys: keys.put("k", "x", idempotency_key=b"k"), "idempotency_key must be text"),
        (lambda keys: keys.put("k", "x", idempotency_key=""), "idempotency_key must be text"),
        (lambda keys: keys.get("k", consistency="strong"), "consistency must be"),
        (lambda keys: keys.scan("", limit=0), "limit must be at least 1"),
    ],
)
def test_bad_input_is_told(keys: KeyValues, call: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        call(keys)  # type: ignore[operator]
    assert list(keys.scan()) == []
