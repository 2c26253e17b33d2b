"""Records of a `CoordStore`: reading, versions, checks and atomic commits."""

from __future__ import annotations

from functools import partial
from typing import cast

from pxrs.errors import InvalidRequest
from pxrs.stores.api import CoordStore
from pxrs.testing.conformance.lab import Lab
from pxrs.testing.conformance.tools import (
    ATTEMPTS,
    committed,
    keys_of,
    put,
    raises,
    refused,
    require,
    same,
    together,
    value_of,
)
from pxrs.types import Check, Committed, Delete, Put, Versioned, Write


def check_get_returns_the_record(lab: Lab) -> None:
    """A record is read as it was put, on every handle; None if there is none."""
    here, there = lab.open().coord, lab.open().coord
    same(here.get("k"), None, "a record that was never put")
    version = put(here, "k", b"one")
    for coord in (here, there):
        same(coord.get("k"), Versioned("k", b"one", version, None), "the record")


def check_values_are_opaque(lab: Lab) -> None:
    """A value is any bytes: empty, with zeros, not text."""
    coord = lab.open().coord
    for number, value in enumerate([b"", b"\0", b"\xff\xfe\0\x80", bytes(range(256)) * 8]):
        put(coord, f"k{number}", value)
        same(value_of(coord, f"k{number}"), value, "the value")


def check_list_is_sorted(lab: Lab) -> None:
    """Records are listed in the order of their keys' code points, not in the order of the puts."""
    coord = lab.open().coord
    keys = ["b", "a/2", "a/10", "a", "Z", "é", "zz", "a-", "a0", "𝄞", "\uffee", "日本"]
    for key in keys:
        put(coord, key)
    same(keys_of(coord, ""), sorted(keys), "all keys")


def check_prefix_boundaries(lab: Lab) -> None:
    """A prefix takes exactly the keys that start with it."""
    coord = lab.open().coord
    keys = ["a", "a-", "a/", "a/1", "a/1/x", "a/𝄞", "a0", "aa", "b", "é", "é/1", "日/1"]
    for key in keys:
        put(coord, key)
    for prefix in ["", "a", "a/", "a/1", "b", "b/", "é", "é/", "日", "c", "a/\uffee"]:
        expected = sorted(key for key in keys if key.startswith(prefix))
        same(keys_of(coord, prefix), expected, f"the keys under {prefix!r}")


def check_no_character_is_a_pattern(lab: Lab) -> None:
    """Characters that mean something in SQL, globs or paths stand for themselves."""
    coord = lab.open().coord
    keys = ["a%b/1", "axb/1", "a_b/1", "a*b/1", "a?b/1", "a[x]b/1", "a\\b/1", "a'b/1", 'a"b/1']
    keys += ["../1", "a/../b", "a//b", "a;b/1", "{0}/1"]
    for key in keys:
        put(coord, key, key.encode())
    for key in keys:
        same(value_of(coord, key), key.encode(), f"the value of {key!r}")
        same(keys_of(coord, key[:-1]), [key], f"the keys under {key[:-1]!r}")


def check_keys_are_exact(lab: Lab) -> None:
    """Keys that differ in case, accents, composition or spaces are different keys."""
    coord = lab.open().coord
    keys = ["key", "KEY", "kéy", "ke\u0301y", "key ", " key", "kеy"]
    for key in keys:
        put(coord, key, key.encode())
    same([value_of(coord, key) for key in keys], [key.encode() for key in keys], "the values")
    same(keys_of(coord, "key"), ["key", "key "], "the keys under 'key'")


def check_list_pages(lab: Lab) -> None:
    """`after` leaves out that key, existing or not, and all before it; `limit` is at least 1."""
    coord = lab.open().coord
    keys = [f"p/{number:02}" for number in range(7)]
    for key in [*keys, "o/9", "q/0"]:
        put(coord, key)
    pages: list[str] = []
    for size in (3, 3, 1, 0):
        page = coord.list("p/", after=pages[-1] if pages else None, limit=3)
        same(len(page), size, "the size of a page")
        pages += [record.key for record in page]
    same(pages, keys, "all pages put together")
    for after, expected in [("p/03x", keys[4:]), ("a", keys), ("p/06", []), ("z", [])]:
        found = [record.key for record in coord.list("p/", after=after)]
        same(found, expected, f"the keys after {after!r}")
    with raises(InvalidRequest):
        coord.list("p/", limit=0)


def check_versions_rise(lab: Lab) -> None:
    """Every put gives the record a higher version, from 1, and `Committed` has it."""
    here, there = lab.open().coord, lab.open().coord
    last = 0
    for number in range(6):
        coord = (here, there)[number % 2]
        version = put(coord, "k", b"%d" % number)
        require(version > last, f"version {version} follows {last}")
        record = here.get("k")
        require(record is not None and record.version == version, "the version told is another")
        last = version


def check_versions_of_every_put_are_told(lab: Lab) -> None:
    """`Committed.versions` holds every key put and no other."""
    coord = lab.open().coord
    put(coord, "gone")
    outcome = committed(coord.commit((), (Put("a", b"1"), Delete("gone"), Put("b", b"2"))))
    listed = {record.key: record.version for record in coord.list("")}
    same(dict(outcome.versions), listed, "the versions")
    same(sorted(listed), ["a", "b"], "what is there")


def check_right_version_passes(lab: Lab) -> None:
    """A commit whose checks hold is done, with and without writes, deletes included."""
    coord = lab.open().coord
    first = put(coord, "k", b"1")
    second = committed(coord.commit((Check("k", first),), (Put("k", b"2"),))).versions["k"]
    same(dict(committed(coord.commit((Check("k", second),), ())).versions), {}, "the versions")
    committed(coord.commit((Check("k", second),), (Delete("k"),)))
    same(coord.get("k"), None, "the deleted record")


def check_absence_creates_once(lab: Lab) -> None:
    """Version 0 holds while there is no record and never while there is one."""
    here, there = lab.open().coord, lab.open().coord
    version = committed(here.commit((Check("k", 0),), (Put("k", b"1"),))).versions["k"]
    outcome = refused(there.commit((Check("k", 0),), (Put("k", b"2"),)))
    same(dict(outcome.current), {"k": Versioned("k", b"1", version)}, "the conflict")
    committed(here.commit((), (Delete("k"),)))
    committed(there.commit((Check("k", 0),), (Put("k", b"3"),)))
    same(value_of(here, "k"), b"3", "the value")


def check_wrong_version_conflicts(lab: Lab) -> None:
    """A version that is old, too high, or of a record that is gone is a conflict."""
    coord = lab.open().coord
    old = put(coord, "k", b"1")
    new = put(coord, "k", b"2")
    for version in (old, new + 1, new + 1000):
        outcome = refused(coord.commit((Check("k", version),), (Put("k", b"3"),)))
        same(dict(outcome.current), {"k": Versioned("k", b"2", new)}, "the conflict")
        refused(coord.commit((Check("k", version),), (Delete("k"),)))
    same(value_of(coord, "k"), b"2", "the value")
    outcome = refused(coord.commit((Check("none", 1),), (Put("none", b"3"),)))
    same(dict(outcome.current), {"none": None}, "the conflict")
    same(coord.get("none"), None, "the record that was never there")


def check_conflict_writes_nothing(lab: Lab) -> None:
    """One check that fails stops all writes, those before it and those without a check too."""
    coord = lab.open().coord
    good = put(coord, "good", b"1")
    stale = put(coord, "stale", b"1")
    put(coord, "stale", b"2")
    put(coord, "deleted", b"1")
    before = coord.list("")
    checks = (Check("good", good), Check("stale", stale), Check("new", 0))
    writes = (
        Put("good", b"3"),
        Put("new", b"3"),
        Delete("deleted"),
        Put("unchecked", b"3"),
        Put("stale", b"3"),
    )
    for ordered in (writes, writes[::-1]):
        refused(coord.commit(checks, ordered))
        same(coord.list(""), before, "the records after a conflict")


def check_conflict_tells_what_is_there(lab: Lab) -> None:
    """`Conflict.current` holds every checked record that was not as expected, and only those."""
    coord = lab.open().coord
    good = put(coord, "good", b"1")
    put(coord, "stale", b"1")
    put(coord, "there", b"1")
    checks = (
        Check("good", good),
        Check("stale", good),
        Check("there", 0),
        Check("new", 0),
        Check("none", 9),
    )
    outcome = refused(coord.commit(checks, (Put("there", b"2"), Put("new", b"2"))))
    expected = {key: coord.get(key) for key in ("stale", "there", "none")}
    same(dict(outcome.current), expected, "what the conflict tells")


def check_unwritten_keys_are_checked(lab: Lab) -> None:
    """A check on a record that the commit does not write counts like any other."""
    coord = lab.open().coord
    fence = put(coord, "fence")
    committed(coord.commit((Check("fence", fence),), (Put("k", b"1"),)))
    put(coord, "fence")
    refused(coord.commit((Check("fence", fence),), (Put("k", b"2"),)))
    committed(coord.commit((), (Delete("fence"),)))
    refused(coord.commit((Check("fence", fence),), (Put("k", b"3"),)))
    same(value_of(coord, "k"), b"1", "the value")


def check_write_skew_is_impossible(lab: Lab) -> None:
    """Of two commits that each check what the other writes, one meets a conflict."""
    here, there = lab.open().coord, lab.open().coord
    for _ in range(15):
        checks = (Check("a", put(here, "a", b"on")), Check("b", put(here, "b", b"on")))
        outcomes: list[object] = []

        def turn_off(
            coord: CoordStore,
            key: str,
            checks: tuple[Check, ...] = checks,
            outcomes: list[object] = outcomes,
        ) -> None:
            outcomes.append(coord.commit(checks, (Put(key, b"off"),)))

        together(lab, partial(turn_off, here, "a"), partial(turn_off, there, "b"))
        done = sum(isinstance(outcome, Committed) for outcome in outcomes)
        same(done, 1, "how many of the two were carried out")


def check_concurrent_increments_lose_nothing(lab: Lab) -> None:
    """Read, add one, write if unchanged, again on conflict: no increment is lost."""
    handles = [lab.open().coord, lab.open().coord]
    threads, times = 4, 15
    put(handles[0], "n", b"0")

    def increment(coord: CoordStore) -> None:
        done = 0
        for _ in range(ATTEMPTS):
            record = cast(Versioned, coord.get("n"))
            value = b"%d" % (int(record.value) + 1)
            outcome = coord.commit((Check("n", record.version),), (Put("n", value),))
            done += isinstance(outcome, Committed)
            if done == times:
                return

    together(lab, *(partial(increment, handles[number % 2]) for number in range(threads)))
    same(value_of(handles[0], "n"), b"%d" % (threads * times), "the sum")


def check_one_creator_wins(lab: Lab) -> None:
    """Of many commits that create a record which must be absent, exactly one succeeds."""
    handles = [lab.open().coord, lab.open().coord]
    for number in range(10):
        key = f"k{number}"
        winners: list[bytes] = []

        def create(name: bytes, key: str = key, winners: list[bytes] = winners) -> None:
            coord = handles[name[0] % 2]
            if isinstance(coord.commit((Check(key, 0),), (Put(key, name),)), Committed):
                winners.append(name)

        together(lab, *(partial(create, name) for name in (b"1", b"2", b"3", b"4")))
        same(len(winners), 1, "the number of creators that won")
        same(value_of(handles[0], key), winners[0], "the record")


def check_delete_is_idempotent(lab: Lab) -> None:
    """Deleting a record that does not exist does not stop the rest of the commit."""
    coord = lab.open().coord
    put(coord, "k")
    for other in ("first", "second"):
        committed(coord.commit((), (Delete("k"), Put(other, b"1"))))
        same(coord.get("k"), None, "the deleted record")
    same(keys_of(coord, ""), ["first", "second"], "what is left")


def check_recreated_record_is_another(lab: Lab) -> None:
    """A version from before a record was deleted does not fit the record made again."""
    coord = lab.open().coord
    old = [put(coord, "k", b"1"), put(coord, "k", b"2")]
    committed(coord.commit((), (Delete("k"),)))
    new = put(coord, "k", b"3")
    require(new > old[-1], f"version {new} was given after {old[-1]}")
    for version in old:
        refused(coord.commit((Check("k", version),), (Put("k", b"4"),)))
    same(value_of(coord, "k"), b"3", "the value")


def check_impossible_commits_are_refused(lab: Lab) -> None:
    """A request that some engine can't do is `InvalidRequest` on all, and changes nothing."""
    coord = lab.open().coord
    version = put(coord, "k", b"1")
    before = coord.list("")
    impossible: list[tuple[tuple[Check, ...], tuple[Write, ...]]] = [
        ((), (Put("a", b"1"), Put("a", b"2"))),
        ((), (Put("a", b"1"), Delete("a"))),
        ((Check("k", version), Check("k", version)), (Put("a", b"1"),)),
        ((Check("none", 0),), (Put("a", b"1"),)),
        ((Check("none", 0),), (Put("a", b"1"), Delete("none"))),
        ((Check("k", -1),), (Put("a", b"1"),)),
        ((), (Put("a", b"1"), Put("", b"1"))),
        ((), (Put("a", b"1"), Put("b\n", b"1"))),
        ((), (Put("a", b"1"), Put("b\0", b"1"))),
    ]
    for checks, writes in impossible:
        with raises(InvalidRequest):
            coord.commit(checks, writes)
        same(coord.list(""), before, f"the records after {checks} {writes}")


def check_limits_hold(lab: Lab) -> None:
    """A commit at the store's stated limits works; one beyond is refused and changes nothing."""
    coord = lab.open().coord
    operations = min(coord.limits.operations, 10_000)
    committed(coord.commit((), [Put(f"k{number}", b"") for number in range(operations)]))
    same(len(coord.list("k")), operations, "the number of records")
    if operations == coord.limits.operations:
        with raises(InvalidRequest):
            coord.commit((), [Put(f"l{number}", b"") for number in range(operations + 1)])
    size = min(coord.limits.value_bytes, 1 << 24)
    put(coord, "big", b"x" * size)
    same(value_of(coord, "big"), b"x" * size, "the biggest value")
    if size == coord.limits.value_bytes:
        with raises(InvalidRequest):
            coord.commit((), (Put("l", b""), Put("l-big", b"x" * (size + 1))))
    same(keys_of(coord, "l"), [], "what a refused commit wrote")


def check_results_are_the_callers_own(lab: Lab) -> None:
    """Changing what a call returned does not change the store."""
    coord = lab.open().coord
    outcome = committed(coord.commit((), (Put("k", b"1"),)))
    version = outcome.versions["k"]
    coord.list("").clear()
    if isinstance(outcome.versions, dict):
        outcome.versions["k"] = 0
    conflict = refused(coord.commit((Check("k", 0),), (Put("k", b"2"),)))
    if isinstance(conflict.current, dict):
        conflict.current["k"] = None
    same(coord.list(""), [Versioned("k", b"1", version)], "the records")
    same(type(value_of(coord, "k")), bytes, "the type of a value")
