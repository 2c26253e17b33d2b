"""What clients of keys and values did and were told, and whether it can be true.

Clients write down every operation with the moments between which it happened. `judge` says what of
it breaks a promise; every verdict is one promise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from pxrs.types import ABSENT, Version
from support.child import PATIENCE
from support.linearizable import GONE, Op, is_linearizable

# How old an answer to `stale_ok` may be.
STALE = 1.0


class Seen(NamedTuple):
    """What a key was: a value and its version. `NOTHING`: there was no such key."""

    value: str | None
    version: Version


NOTHING = Seen(GONE, ABSENT)


class Did(NamedTuple):
    """One operation of a client.

    `kind`: get, put or delete. `outcome`: done, refused (the condition did not hold; nothing was
    done) or unknown (no answer came; `returned` is infinite). `value` is what was written or read.
    `version` is what the write made, the read saw, or the refusal told, if it did; ABSENT for a key
    that is not there. `expected` is what a conditional write had read. `existed`: whether a delete
    found something. `may_be_old`: it was read with `stale_ok`. `took` is how long the client had to
    wait for an answer; of a write that it repeated, the longest.
    """

    client: str
    kind: str
    key: str
    outcome: str
    value: str | None
    called: float
    returned: float
    took: float
    version: Version | None = None
    expected: Seen | None = None
    once: str = ""
    existed: bool | None = None
    may_be_old: bool = False

    def __str__(self) -> str:
        condition = "" if self.expected is None else f" if it is {_shown(self.expected)}"
        return (
            f"{self.called:.4f}–{self.returned:.4f} {self.client}: {self.kind} {self.key} "
            f"{self.value}{condition} → {self.outcome} {_dotted(self.version)}"
        )


class History:
    """Operations of all clients. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._done: list[Did] = []
        self._acknowledged = 0
        self.failures: list[str] = []

    def note(self, did: Did) -> None:
        with self._changed:
            self._done.append(did)
            self._acknowledged += did.outcome == "done" and did.kind != "get"
            self._changed.notify_all()

    def fail(self, what: str) -> None:
        """A client was told what no client may be told."""
        with self._changed:
            self.failures.append(what)
            self._changed.notify_all()

    def await_writes(self, number: int) -> None:
        """Until so many more writes were acknowledged."""
        with self._changed:
            wanted = self._acknowledged + number
            self.await_that(lambda: self._acknowledged >= wanted, f"{number} writes")

    def await_that(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: bool(self.failures) or condition(), PATIENCE)
        assert done, f"not in {PATIENCE} s: {what}"

    def so_far(self) -> list[Did]:
        with self._changed:
            return list(self._done)


def judge(
    history: Sequence[Did],
    final: Mapping[str, Seen] | None = None,
    deadlines: Mapping[str, float] | None = None,
) -> list[str]:
    """Which promises are broken, and how. `final`: what each key is in the end.

    `deadlines`: how long an operation may take, by the kind of client, which is what its name
    begins with.
    """
    broken: list[str] = []
    for key, dids in _by_key(history):
        for verdict in (
            _one_version_each,
            _compared_once,
            _versions_rise,
            _linearizable,
        ):
            broken += (f"{key}: {said}" for said in verdict(dids))
        if final is not None:
            broken += (f"{key}: {said}" for said in _kept(dids, final.get(key, NOTHING)))
    for did in history:
        limit = (deadlines or {}).get(did.client.partition("-")[0], math.inf)
        if did.took > limit:
            broken.append(f"it took {did.took:.1f} s, and may take {limit:g}: {did}")
    return broken


def _by_key(history: Iterable[Did]) -> Iterator[tuple[str, list[Did]]]:
    for key, dids in groupby(sorted(history, key=attrgetter("key")), attrgetter("key")):
        yield key, sorted(dids, key=attrgetter("called"))


def _one_version_each(dids: Sequence[Did]) -> Iterator[str]:
    """A put happens once: its value, which is unique, never has another version. Nor has a version
    another value."""
    versions: dict[str, Version] = {}
    values: dict[Version, str] = {}
    for did in dids:
        if did.value is None or did.version is None or did.outcome != "done":
            continue
        if (before := versions.setdefault(did.value, did.version)) != did.version:
            yield f"happened twice, as {_dotted(before)} and as {_dotted(did.version)}: {did}"
        if (other := values.setdefault(did.version, did.value)) != did.value:
            yield f"{_dotted(did.version)} is the version of {other} too: {did}"


def _compared_once(dids: Sequence[Did]) -> Iterator[str]:
    """Of those that compared with one version, one succeeds."""
    done: dict[Version, Did] = {}
    for did in dids:
        if did.outcome != "done" or did.expected is None or did.expected.version == ABSENT:
            continue
        if did.existed is False:
            continue
        if (other := done.setdefault(did.expected.version, did)) is not did:
            yield f"compared with one version, and both succeeded: {other}; {did}"


def _versions_rise(dids: Sequence[Did]) -> Iterator[str]:
    """What begins when another has returned has no earlier version; a write has a later one."""
    ends = sorted(
        (did for did in dids if did.version not in (None, ABSENT) and did.outcome == "done"),
        key=attrgetter("returned"),
    )
    latest: Did | None = None
    at = 0
    for did in dids:
        # Those that had returned before this one began.
        while at < len(ends) and ends[at].returned < did.called:
            if latest is None or _version(ends[at]) > _version(latest):
                latest = ends[at]
            at += 1
        if latest is None or did.may_be_old or did.version in (None, ABSENT):
            continue
        is_write = did.kind != "get" and did.outcome == "done"
        behind = _version(did) < _version(latest)
        if behind or (is_write and _version(did) == _version(latest)):
            yield f"versions do not rise: {latest}; {did}"


def _version(did: Did) -> Version:
    assert did.version is not None
    return did.version


def _linearizable(dids: Sequence[Did]) -> Iterator[str]:
    """Some order of all operations explains every answer."""
    ops = _ops(dids)
    if not is_linearizable(ops):
        story = "\n  ".join(str(did) for did in _shortest_wrong(dids))
        yield f"not linearizable:\n  {story}"


def _shortest_wrong(dids: Sequence[Did]) -> Sequence[Did]:
    """The beginning of the history up to the answer that can't be, without much before it."""
    ends = sorted(did.returned for did in dids if did.returned < math.inf)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if is_linearizable(_ops(_until(dids, ends[middle]))):
            low = middle + 1
        else:
            high = middle
    return _until(dids, ends[high])[-40:]


def _until(dids: Sequence[Did], end: float) -> list[Did]:
    """The operations that had begun by then; those that had not returned have no answer yet."""
    return [
        did
        if did.returned <= end
        else did._replace(outcome="unknown", returned=math.inf, version=None, existed=None)
        for did in dids
        if did.called <= end and (did.kind != "get" or did.returned <= end)
    ]


def _ops(dids: Sequence[Did]) -> list[Op]:
    """The history as the checker takes it."""
    values: dict[Version, str | None] = {ABSENT: GONE}
    for did in dids:
        if did.outcome == "done" and did.version is not None and did.kind != "delete":
            values[did.version] = did.value
    return [op for did in dids for op in _op(did, values)]


def _op(did: Did, values: Mapping[Version, str | None]) -> list[Op]:
    span = (did.called, did.returned)
    rank = math.inf if did.version is None else did.version.term * 2.0**32 + did.version.index
    if did.kind == "get":
        # What is old by so much was so then.
        called = did.called - (STALE if did.may_be_old else 0.0)
        return [Op(did.key, "read", did.value, called, did.returned)]
    if did.outcome == "refused":
        if did.version is not None and did.version in values:
            # It says what it has found, and so it is a read.
            return [Op(did.key, "read", values[did.version], *span)]
        expected = GONE if did.expected is None else did.expected.value
        return [Op(did.key, "cas", did.value, *span, expected, False)]
    done = did.outcome == "done"
    if did.kind == "delete" and did.existed is False:
        return [Op(did.key, "delete", GONE, *span, done=False)]
    if did.expected is not None:
        expected = did.expected.value
        return [Op(did.key, "cas", did.value, *span, expected, done or None, rank)]
    kind = "delete" if did.kind == "delete" else "write"
    return [Op(did.key, kind, did.value, *span, done=done or None, rank=rank)]


def _kept(dids: Sequence[Did], final: Seen) -> Iterator[str]:
    """Every acknowledged put is there in the end, or a later write was."""
    for did in dids:
        if did.kind != "put" or did.outcome != "done":
            continue
        version = _version(did)
        if final.version == version and final.value != did.value:
            yield f"acknowledged, and another value has its version: {did}; {_shown(final)}"
        elif final == NOTHING:
            if not any(_may_have_deleted(each, did) for each in dids):
                yield f"acknowledged, and not there, and nobody deleted it: {did}"
        elif final.version < version:
            yield f"acknowledged, and not there: {did}; what is there is older: {_shown(final)}"


def _may_have_deleted(each: Did, put: Did) -> bool:
    return (
        each.kind == "delete"
        and each.outcome != "refused"
        and each.existed is not False
        and each.returned >= put.called
    )


def _shown(seen: Seen) -> str:
    return "not there" if seen == NOTHING else f"{seen.value} {_dotted(seen.version)}"


def _dotted(version: Version | None) -> str:
    return "?" if version is None else f"{version.term}.{version.index}"
