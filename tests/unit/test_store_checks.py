"""Every engine refuses the same things, in the same words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

import pxrs
from pxrs.codec.batches import check_timestamp
from pxrs.stores.api import validate_commit, validate_partitions, validate_ttl
from pxrs.stores.memory.coord import MemoryCoord
from pxrs.stores.timed_sessions import require_ttl
from pxrs.types import Check, Limits, Put

LIMITS = Limits(operations=3, value_bytes=4)
LONG = "k" * 300
NAN = float("nan")


def commit(checks: Sequence[Check], writes: Sequence[Put] = ()) -> None:
    validate_commit(checks, writes, LIMITS)


def session(ttl: float) -> object:
    return MemoryCoord(threading.RLock()).session(ttl)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("ttl must be from 0.05 to 86,400 seconds, got 0", lambda: require_ttl(0)),
        ("ttl must be from 0.001 to 1,000,000,000 seconds, got nan", lambda: validate_ttl(NAN)),
        ("ttl must be from 0.001 to 1,000,000,000 seconds, got -1", lambda: session(-1)),
        ("partitions must be at least 1, got 0", lambda: validate_partitions(0)),
        ("timestamp must be milliseconds since 1970, got -1", lambda: check_timestamp(-1)),
        ("timestamp must be milliseconds since 1970, got '5'", lambda: check_timestamp("5")),
        (
            "the commit has 4 checks and writes; the limit of this store is 3",
            lambda: commit([Check(key, 1) for key in "abcd"]),
        ),
        (
            "check a key at most once and write it at most once, got 'b' 2 times",
            lambda: commit([], [Put(key, b"") for key in "abb"]),
        ),
        ("check a key at most once", lambda: commit([Check("a", 1), Check("a", 2)])),
        ("the version of 'a' must be at least 0, got -1", lambda: commit([Check("a", -1)])),
        ("checks that 'a' is absent must also put it", lambda: commit([Check("a", 0)])),
        (
            f"the value of '{LONG[:100]}'… is 5 bytes long; the limit of this store is 4",
            lambda: commit([], [Put(LONG, b"12345")]),
        ),
        ("a record's key must be printable text, got ''", lambda: commit([], [Put("", b"")])),
    ],
)
def test_texts(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(pxrs.InvalidRequest) as caught:
        call()
    assert words in str(caught.value)
