"""The fence: what each change of a claim checks and writes, and what a conflict means."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pxrs.core import claims
from pxrs.core.claims import Behind, Happened, Lost, OwnedClaim, Stamp, Step, free_or_dead, judge
from pxrs.core.records import Claim, Head, MemberRecord, Move, Ranges, claim_key, decode, encode
from pxrs.errors import SchemaMismatch
from pxrs.types import Check, TopicPartition, Versioned

PART = TopicPartition("orders", 3)
KEY = claim_key("billing", "t1", 3)
OLD = Claim(
    owner="a.1", name="a", epoch=7, checkpoint=40, done=((42, 45),), metadata="m", write="w0"
)


def stamp(write: str = "w1", owner: str = "b.1", name: str = "b") -> Stamp:
    return Stamp(owner, name, write, 1234)


def stored(claim: Claim, version: int = 5) -> Versioned:
    return Versioned(KEY, encode(claim), version)


def held(claim: Claim = OLD, version: int = 5) -> OwnedClaim:
    return OwnedClaim(PART, KEY, version, claim)


def written(step: Step) -> dict[str, Any]:
    """The bytes of the write as anybody reads them, without pxrs."""
    assert step.put.key == step.check.key == KEY
    assert step.put.session is None, "claims outlive sessions: epochs only rise"
    record: dict[str, Any] = json.loads(step.put.value)
    return record


def by_me(write: str = "w1") -> Stamp:
    return stamp(write, "a.1", "a")


# What each change writes


def test_epochs_go_on_above_those_of_former_topics_of_the_name() -> None:
    old = {7: "id-1", 9: "id-2", 4: "id-3"}
    found = [
        Versioned(f"claims/g/{topic_id}/0", encode(Claim(epoch=epoch, topic=PART.topic)), 1)
        for epoch, topic_id in old.items()
    ]
    found.append(Versioned("claims/g/id-4/0", encode(Claim(epoch=50, topic="another")), 1))
    found.append(Versioned("claims/g/id-1/1", encode(Claim(epoch=60, topic=PART.topic)), 1))
    part = TopicPartition(PART.topic, 0)
    last = claims.last_epochs(found)[part]
    assert last == 9
    assert claims.take(part, "claims/g/id-5/0", None, stamp(), last).claim.epoch == 10
    assert claims.rewind(part, "claims/g/id-5/0", None, 0, stamp(), last).claim.epoch == 10


def test_the_first_claim_creates_the_record() -> None:
    step = claims.take(PART, KEY, None, stamp())
    assert step.check == Check(KEY, 0)
    assert written(step) == {
        "owner": "b.1",
        "name": "b",
        "topic": "orders",
        "epoch": 1,
        "checkpoint": None,
        "done": [],
        "metadata": "",
        "write": "w1",
        "at_ms": 1234,
        "schema": 1,
    }


def test_taking_a_free_partition_keeps_how_far_it_was_handled() -> None:
    free = msgspec.structs.replace(OLD, owner=None, name=None)
    record = written(step := claims.take(PART, KEY, stored(free), stamp()))
    assert step.check == Check(KEY, 5)
    assert (record["owner"], record["epoch"]) == ("b.1", 8)
    assert (record["checkpoint"], record["done"], record["metadata"]) == (40, [[42, 45]], "m")


def test_taking_over_from_a_dead_owner_is_the_same_write() -> None:
    record = written(step := claims.take(PART, KEY, stored(OLD), stamp()))
    assert step.check == Check(KEY, 5)
    assert (record["owner"], record["name"], record["epoch"]) == ("b.1", "b", 8)
    assert (record["checkpoint"], record["done"]) == (40, [[42, 45]])


def test_a_holding_is_what_was_written_at_the_version_it_got() -> None:
    step = claims.take(PART, KEY, stored(OLD), stamp())
    assert step.done(6) == OwnedClaim(PART, KEY, 6, step.claim)
    assert step.done(6).epoch == 8


def test_advancing_moves_the_checkpoint_and_not_the_epoch() -> None:
    record = written(step := claims.advance(held(), 50, ((52, 60),), "n", by_me()))
    assert step.check == Check(KEY, 5)
    assert (record["checkpoint"], record["done"], record["metadata"]) == (50, [[52, 60]], "n")
    assert (record["owner"], record["epoch"], record["write"]) == ("a.1", 7, "w1")


def test_advancing_without_metadata_leaves_what_is_there() -> None:
    assert written(claims.advance(held(), 50, (), None, by_me()))["metadata"] == "m"
    assert written(claims.advance(held(), 50, (), "", by_me()))["metadata"] == ""


def test_the_first_checkpoint_may_be_zero() -> None:
    none = held(Claim(owner="a.1", name="a", epoch=1))
    assert written(claims.advance(none, 0, (), None, by_me()))["checkpoint"] == 0


def test_at_the_same_checkpoint_the_runs_above_it_are_the_new_ones() -> None:
    record = written(claims.advance(held(), 40, ((42, 48),), None, by_me()))
    assert (record["checkpoint"], record["done"]) == (40, [[42, 48]])


def test_advancing_never_lowers_the_checkpoint_nor_mixes_two() -> None:
    record = written(claims.advance(held(), 10, ((12, 13),), "late", by_me()))
    assert (record["checkpoint"], record["done"], record["metadata"]) == (40, [[42, 45]], "m")
    assert record["write"] == "w1"


@pytest.mark.parametrize(
    ("checkpoint", "done", "expected"),
    [
        (50, ((55, 56),), (50, [[55, 56]])),
        (None, (), (40, [[42, 45]])),
        (10, (), (40, [[42, 45]])),
    ],
    ids=["with the final checkpoint", "without one", "never back"],
)
def test_a_release_carries_the_final_checkpoint_in_the_same_write(
    checkpoint: int | None, done: Ranges, expected: tuple[int, list[list[int]]]
) -> None:
    record = written(step := claims.release(held(), checkpoint, done, by_me()))
    assert step.check == Check(KEY, 5)
    assert (record["owner"], record["name"], record["epoch"]) == (None, None, 8)
    assert (record["checkpoint"], record["done"]) == expected
    assert (record["metadata"], record["write"]) == ("m", "w1")


@pytest.mark.parametrize("checkpoint", [0, 7, 99, None])
def test_a_rewind_sets_the_checkpoint_and_frees_the_partition(checkpoint: int | None) -> None:
    record = written(step := claims.rewind(PART, KEY, stored(OLD), checkpoint, stamp()))
    assert step.check == Check(KEY, 5)
    assert (record["owner"], record["name"], record["epoch"]) == (None, None, 8)
    assert (record["checkpoint"], record["done"], record["metadata"]) == (checkpoint, [], "")


def test_a_rewind_may_come_before_the_first_claim() -> None:
    step = claims.rewind(PART, KEY, None, 17, stamp())
    assert step.check == Check(KEY, 0)
    assert (written(step)["epoch"], written(step)["checkpoint"]) == (1, 17)


def test_epochs_only_rise() -> None:
    """Through a whole life: claim, commit, release, claim by another, reset."""
    epochs = []
    step = claims.take(PART, KEY, None, by_me())
    epochs.append(step.claim.epoch)
    step = claims.advance(step.done(1), 5, (), None, by_me())
    epochs.append(step.claim.epoch)
    step = claims.release(step.done(2), 6, (), by_me())
    epochs.append(step.claim.epoch)
    step = claims.take(PART, KEY, stored(step.claim, 3), stamp())
    epochs.append(step.claim.epoch)
    step = claims.rewind(PART, KEY, stored(step.claim, 4), 0, stamp())
    epochs.append(step.claim.epoch)
    assert epochs == [1, 1, 2, 3, 4]


# What a conflict means


def steps() -> dict[str, Step]:
    free = msgspec.structs.replace(OLD, owner=None, name=None)
    return {
        "take": claims.take(PART, KEY, stored(free), by_me()),
        "advance": claims.advance(held(), 50, (), None, by_me()),
        "release": claims.release(held(), 50, (), by_me()),
    }


each_step = pytest.mark.parametrize("kind", ["take", "advance", "release"])


@each_step
def test_reading_back_the_own_write_proves_that_it_happened(kind: str) -> None:
    step = steps()[kind]
    assert judge(step, "a.1", stored(step.claim, 9)) == Happened(9)


@pytest.mark.parametrize(("kind", "epoch"), [("take", 8), ("advance", 7), ("release", 7)])
def test_at_the_same_epoch_and_owner_it_is_behind(kind: str, epoch: int) -> None:
    now = msgspec.structs.replace(OLD, epoch=epoch, checkpoint=45, write="other")
    verdict = judge(steps()[kind], "a.1", stored(now, 9))
    assert verdict == Behind(OwnedClaim(PART, KEY, 9, now))


def test_what_is_behind_goes_on_from_the_higher_checkpoint() -> None:
    now = msgspec.structs.replace(OLD, checkpoint=80, write="other")
    verdict = judge(steps()["advance"], "a.1", stored(now, 9))
    assert isinstance(verdict, Behind)
    again = claims.advance(verdict.owned_claim, 50, (), None, by_me("w2"))
    assert (again.check.version, again.claim.checkpoint) == (9, 80)


@each_step
@pytest.mark.parametrize(
    "change",
    [
        {"owner": "b.1", "name": "b", "epoch": 8},
        {"owner": "a.2", "name": "a", "epoch": 8},
        {"owner": "b.1", "name": "b", "epoch": 7},
        {"owner": None, "name": None, "epoch": 8},
        {"owner": None, "name": None, "epoch": 7},
        {"owner": "a.1", "epoch": 9},
        {"owner": "a.1", "epoch": 6},
    ],
    ids=str,
)
def test_anything_else_is_lost(kind: str, change: dict[str, Any]) -> None:
    now = msgspec.structs.replace(OLD, write="other", **change)
    assert judge(steps()[kind], "a.1", stored(now, 9)) == Lost(now)


@each_step
def test_a_claim_that_is_not_there_is_lost(kind: str) -> None:
    assert judge(steps()[kind], "a.1", None) == Lost(None)


def test_a_reset_that_came_second_is_lost_and_has_to_be_asked_for_again() -> None:
    reset = claims.rewind(PART, KEY, stored(OLD), 0, Stamp("operator", "", "w1", 0))
    now = msgspec.structs.replace(OLD, checkpoint=41, write="other")
    assert judge(reset, "operator", stored(now, 9)) == Lost(now)
    assert judge(reset, "operator", stored(reset.claim, 9)) == Happened(9)


# Who may be working on it


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        pytest.param(None, True, id="never claimed"),
        pytest.param(Claim(epoch=4, checkpoint=9), True, id="released"),
        pytest.param(Claim(owner="a.1", name="a", epoch=4), False, id="its owner lives"),
        pytest.param(Claim(owner="c.1", name="c", epoch=4), True, id="its owner is gone"),
        pytest.param(Claim(owner="a.0", name="a", epoch=4), True, id="its owner started anew"),
        pytest.param(Claim(owner="b.0", name="b", epoch=4), True, id="the own former self's"),
    ],
)
def test_free_or_dead(claim: Claim | None, expected: bool) -> None:
    assert free_or_dead(claim, "b", ["a.1", "b.1"]) is expected
    assert free_or_dead(claim, "b", iter(["a.1", "b.1"])) is expected


# Records


@pytest.mark.parametrize(
    "record",
    [
        OLD,
        Claim(),
        MemberRecord(id="a.1", topics=("orders",), rejoin_timeout=2.5),
        Head(generation=3, target={"a": {"orders": (0, 1)}}, static={"a": 2.0}),
        Move(
            generation=3,
            reason="a joined",
            coordinator="a",
            at_ms=5,
            members=("a",),
            moves=(("orders", 0, None, "a"),),
        ),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_comes_back_as_it_was_and_is_plain_json(record: Any) -> None:
    value = encode(record)
    assert decode(Versioned("k", value, 1), type(record)) == record
    assert json.loads(value)["schema"] == 1


@pytest.mark.parametrize("schema", [2, 0, -1])
def test_a_record_of_another_schema_is_refused(schema: int) -> None:
    record = stored(msgspec.structs.replace(OLD, schema=schema))
    for read in (
        lambda: decode(record, Claim),
        lambda: claims.take(PART, KEY, record, stamp()),
        lambda: claims.rewind(PART, KEY, record, 0, stamp()),
        lambda: judge(steps()["advance"], "a.1", record),
    ):
        with pytest.raises(SchemaMismatch, match=rf"{KEY}.* schema {schema}.* knows only 1"):
            read()


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b"null", b'{"epoch": "x"}', b'{"owner": "\xff"}', b"\xff\x00"]
)
def test_what_is_not_a_record_is_a_typed_error_that_names_the_key(value: bytes) -> None:
    with pytest.raises(SchemaMismatch, match=KEY):
        decode(Versioned(KEY, value, 1), Claim)


def test_a_field_that_was_added_within_a_schema_does_no_harm() -> None:
    value = json.dumps(json.loads(encode(OLD)) | {"colour": "green"}).encode()
    assert decode(Versioned(KEY, value, 1), Claim) == OLD
