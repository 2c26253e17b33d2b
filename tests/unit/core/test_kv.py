"""Key-value as pure rules: where a key lies, what a write does, what a lost answer has left."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pxrs.core import kv
from pxrs.core.kv import Change, Draft, Head, KeyBatch, KnownHead, Once, Record, Written
from pxrs.core.records import decode
from pxrs.errors import AlreadyExists, InvalidRequest, PxrsError, SchemaMismatch, VersionMismatch
from pxrs.types import ABSENT, Check, Delete, Limits, Outcome, Put, Version, Versioned, Write

UNIT = "00112233aabbccdd"
LIMITS = Limits(operations=128, value_bytes=1_100_000)


def test_records_never_change_their_form() -> None:
    record = Record(Version(3, 500), b"value", 1_700_000_000_000, UNIT)
    stored = kv.encode_record(record)
    assert stored.hex() == (
        "01000000000000000300000000000001f40000018bcfe5680000112233aabbccdd76616c7565"
    )
    assert kv.decode_record(Versioned("kv/61", stored, 7)) == record
    assert kv.head_key(1023) == "kv-heads/03ff"
    assert kv.record_key(b"\x00a") == "kv/0061"


@pytest.mark.parametrize("stored", [b"", b"\x01short", b"\x02" + bytes(60)])
def test_a_record_of_another_version_is_refused(stored: bytes) -> None:
    with pytest.raises(SchemaMismatch, match="another version"):
        kv.decode_record(Versioned("kv/61", stored, 7))


class Twin:
    """The dumbest key-value store: one write at a time, in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[bytes, Version]] = {}
        self.index: dict[int, int] = {}
        self.onces: dict[tuple[bytes, str], tuple[Written | type[PxrsError], str]] = {}

    def do(self, change: Change) -> Written | type[PxrsError]:
        if change.once and (change.key, change.once) in self.onces:
            answer, body = self.onces[change.key, change.once]
            is_other = answer is AlreadyExists and change.if_match != ABSENT
            return answer if body == change.body and not is_other else InvalidRequest
        answer = self.do_first(change)
        if change.once and answer is not VersionMismatch:
            self.onces[change.key, change.once] = (answer, change.body)
        return answer

    def do_first(self, change: Change) -> Written | type[PxrsError]:
        current = self.values.get(change.key)
        if change.if_match == ABSENT:
            if current is not None:
                return AlreadyExists
        elif change.if_match is not None and (current is None or current[1] != change.if_match):
            return VersionMismatch
        if change.value is None and current is None:
            return Written(ABSENT, existed=False)
        shard = kv.shard_of(change.key)
        self.index[shard] = self.index.get(shard, 0) + 1
        version = Version(1, self.index[shard])
        if change.value is None:
            del self.values[change.key]
        else:
            self.values[change.key] = (change.value, version)
        return Written(version)


class Store:
    """Records and their versions, as a coordination store keeps them."""

    def __init__(self) -> None:
        self.records: dict[str, Versioned] = {}
        self.revision = 0

    def commit(self, checks: list[Check], writes: list[Write]) -> dict[str, int]:
        for check in checks:
            found = self.records.get(check.key)
            assert check.version == (0 if found is None else found.version), check
        self.revision += 1
        for write in writes:
            if isinstance(write, Delete):
                self.records.pop(write.key, None)
            else:
                self.records[write.key] = Versioned(write.key, write.value, self.revision)
        return {write.key: self.revision for write in writes if isinstance(write, Put)}

    def draft(self, changes: list[Change], unit: str = UNIT) -> Draft:
        heads = {
            shard: kv.known_head(self.records.get(kv.head_key(shard)))
            for shard in (kv.shard_of(change.key) for change in changes)
        }
        records = {}
        for change in changes:
            stored = self.records.get(kv.record_key(change.key))
            records[change.key] = None if stored is None else kv.decode_record(stored)
        onces = {
            key: decode(stored, Once)
            for key, stored in self.records.items()
            if key.startswith(kv.ONCES)
        }
        return Draft(unit, heads, records, onces)


_versions = st.none() | st.just(ABSENT) | st.builds(Version, st.just(1), st.integers(1, 6))
_changes = st.builds(
    Change,
    key=st.sampled_from([b"a", b"b", b"c"]),
    value=st.none() | st.sampled_from([b"x", b"y"]),
    if_match=_versions,
    once=st.sampled_from(["", "", "once", "again"]),
    ttl_ms=st.just(0),
    expired=st.just(False),
)


@given(st.lists(st.lists(_changes, min_size=1, max_size=6), max_size=8))
def test_batches_do_what_single_writes_do(batches: list[list[Change]]) -> None:
    store, twin = Store(), Twin()
    for batch in batches:
        draft = store.draft(batch)
        answers = [draft.add(change) for change in batch]
        expected = [twin.do(change) for change in batch]
        for answer, wanted in zip(answers, expected, strict=True):
            assert answer == wanted or type(answer) is wanted
        if draft.operations:
            heads = draft.new_heads(store.commit(draft.checks, draft.writes))
            for shard, known in heads.items():
                assert known == kv.known_head(store.records[kv.head_key(shard)])
    found = {
        bytes.fromhex(key.removeprefix(kv.RECORDS)): kv.decode_record(stored)
        for key, stored in store.records.items()
        if key.startswith(kv.RECORDS)
    }
    assert {key: (it.value, it.version) for key, it in found.items()} == twin.values


def test_an_older_idempotency_key_is_unknown_until_the_commit_finds_it() -> None:
    draft = Draft(UNIT, {kv.shard_of(b"a"): KnownHead(4, Head(term=2, index=9))}, {}, {})
    assert draft.add(Change(b"a", b"x", once="one")) == Written(Version(2, 10))
    assert Check(kv.once_key(b"a", "one"), 0) in draft.checks
    assert kv.once_key(b"a", "one") != kv.once_key(b"b", "one")


def test_a_new_leader_raises_the_term_and_the_index_goes_on() -> None:
    shard = kv.shard_of(b"a")
    draft = Draft(UNIT, {shard: KnownHead(4, Head(term=2, index=9))}, {}, {}, leads=[shard])
    assert draft.add(Change(b"a", b"x")) == Written(Version(3, 10))
    assert draft.add(Change(b"a", b"y")) == Written(Version(3, 11))


def test_who_writes_to_a_shard_first_leads_it_in_its_first_term() -> None:
    shard = kv.shard_of(b"a")
    draft = Draft(UNIT, {shard: KnownHead(0, Head())}, {}, {}, leads=[shard])
    assert draft.add(Change(b"a", b"x")) == Written(Version(1, 1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (Change(b"", b"x"), "key must be 1 to 1024 bytes"),
        (Change(b"k" * 1025, b"x"), "key must be 1 to 1024 bytes"),
        (Change(b"k", b"x" * 1_048_577), "value is 1048577 bytes"),
        (Change(b"k", b"x", once="o" * 257), "idempotency key"),
        (Change(b"k", b"x", once="a\nb"), "idempotency key"),
        (Change(b"k", b"x", ttl_ms=2**53), "ttl"),
    ],
)
def test_what_no_store_keeps_is_refused(change: Change, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        kv.check_change(change, LIMITS)


def test_a_store_with_short_keys_says_how_long_they_may_be() -> None:
    kv.check_key(b"k" * 498, Limits(10, 1000, key_chars=1000))
    with pytest.raises(InvalidRequest, match="1 to 498 bytes"):
        kv.check_key(b"k" * 499, Limits(10, 1000, key_chars=1000))


def test_batches_end_where_the_store_takes_no_more() -> None:
    limits = Limits(operations=20, value_bytes=10_000)
    store = Store()
    changes = [Change(b"%d" % number, b"x") for number in range(20)]
    draft = store.draft(changes)
    fitting = 0
    for change in changes:
        if not draft.has_room(KeyBatch([change]), limits):
            break
        draft.add(change)
        fitting += 1
    assert 1 < fitting < 20
    assert len(draft.checks) + len(draft.writes) <= limits.operations
    assert not draft.has_room(KeyBatch([Change(b"k", b"x" * 9_500)]), limits)
    assert kv.count_together(changes, limits) == 2
    assert kv.count_together([Change(b"k", b"x" * 20_000)], limits) == 1


# A lost answer

A, B = b"a", b"b"


def sent() -> tuple[Store, Draft]:
    """A commit of two keys in two shards, over older values, that was sent and not answered."""
    store = Store()
    before = store.draft([Change(A, b"0"), Change(B, b"0")], "ffffffffffffffff")
    for key in (A, B):
        before.add(Change(key, b"0"))
    store.commit(before.checks, before.writes)
    draft = store.draft([Change(A, b"1"), Change(B, b"1")])
    for key in (A, B):
        draft.add(Change(key, b"1"))
    return store, draft


def looked_at(store: Store, draft: Draft) -> Outcome | None:
    records = store.draft([Change(key, None) for key in draft.keys])._records
    return draft.outcome({key: store.records.get(key) for key in draft.fences}, records)


def heads_of_others(draft: Draft) -> dict[str, Versioned]:
    head = msgspec.json.encode(Head(index=99))
    return {key: Versioned(key, head, 99) for key in draft.fences}


def another(store: Store, *changes: Change) -> None:
    draft = store.draft(list(changes), "eeeeeeeeeeeeeeee")
    for change in changes:
        draft.add(change)
    store.commit(draft.checks, draft.writes)


def test_its_own_id_proves_that_it_was_done() -> None:
    store, draft = sent()
    store.commit(draft.checks, draft.writes)
    assert looked_at(store, draft) is Outcome.DONE
    # One of its heads, or one of its records, is enough.
    another(store, Change(A, b"2"))
    assert looked_at(store, draft) is Outcome.DONE


def test_a_record_proves_it_when_the_heads_have_moved_on() -> None:
    store, draft = sent()
    store.commit(draft.checks, draft.writes)
    records = store.draft([Change(A, None), Change(B, None)])._records
    assert draft.outcome(heads_of_others(draft), records) is Outcome.DONE


def test_while_nothing_has_moved_it_may_still_come() -> None:
    store, draft = sent()
    assert looked_at(store, draft) is None


def test_a_head_that_moved_beside_one_that_did_not_proves_that_it_never_will_be() -> None:
    store, draft = sent()
    another(store, Change(A, b"2"))
    assert looked_at(store, draft) is Outcome.NEVER


def test_an_older_record_under_a_head_that_moved_proves_it_too() -> None:
    store, draft = sent()
    records = store.draft([Change(A, None), Change(B, None)])._records
    assert draft.outcome(heads_of_others(draft), records) is Outcome.NEVER


def test_once_others_have_written_all_its_keys_it_is_unknown() -> None:
    store, draft = sent()
    another(store, Change(A, b"2"), Change(B, None))
    assert looked_at(store, draft) is Outcome.UNKNOWN
