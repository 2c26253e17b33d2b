"""Members of a group that note what they do, and the judgement of it.

A member writes a line for every message into a journal of its own. Every version of every claim is
remembered by etcd, which keeps the group's records here.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pxrs
from pxrs.core.records import Claim, decode
from pxrs.stores.api import CoordStore
from pxrs.stores.etcd.wire import after_prefix, grpc, rpc
from pxrs.types import Versioned
from support.inside import say
from support.loaded import GROUP, TOPIC

TTL = 2.0
_TRIES = 5


def consume(log: str, coord: str, journal: str) -> None:
    """Write a line for every message that was handled, at once and whole."""
    lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with _connected(log, coord) as px:
        consumer = px.consumer(TOPIC, GROUP, session_ttl=TTL, auto_commit_interval=0.05)
        say(consumer.member)
        while True:
            for each in _poll(consumer):
                place = f"{each.partition} {each.fence.epoch} {each.offset}"
                os.write(lines, f"{place} {each.value.decode()}\n".encode())


def _connected(log: str, coord: str) -> pxrs.Pxrs:
    """The store, however long its nodes take to be reached by all who begin together."""
    for _ in range(_TRIES - 1):
        with suppress(pxrs.StoreUnavailable):
            return pxrs.connect(log, coord=coord)
    return pxrs.connect(log, coord=coord)


def _poll(consumer: pxrs.Consumer) -> list[pxrs.Message]:
    try:
        return consumer.poll(max_records=50, timeout=0.5)
    except (pxrs.StoreUnavailable, pxrs.StoreBusy, pxrs.OutcomeUnknown):
        return []


class Handled(NamedTuple):
    """One line of a journal."""

    partition: int
    epoch: int
    offset: int
    number: int


def read_journal(path: Path) -> list[Handled]:
    return [Handled(*map(int, line.split())) for line in path.read_text().splitlines()]


def judge_handled(by_member: Mapping[int, Sequence[Handled]]) -> None:
    """An epoch has one owner, who handles its messages once and in order."""
    owners: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for member, handled in by_member.items():
        last: dict[tuple[int, int], int] = {}
        for each in handled:
            where = each.partition, each.epoch
            owners[where].add(member)
            assert each.offset > last.get(where, -1), f"{each} came again, or too late"
            last[where] = each.offset
    assert all(len(members) == 1 for members in owners.values()), "an epoch had two owners"


def judge_claims(coord: CoordStore, port: int) -> None:
    """By every version of every claim: epochs and checkpoints only rise, an epoch has one owner.

    `port`: of the etcd node that is asked for them.
    """
    now: dict[str, Claim] = {}
    last = max(each.version for each in coord.list(f"claims/{GROUP}/"))
    for key, claim in _history(port, last):
        assert claim is not None, f"{key} was deleted"
        before = now.get(key, Claim())
        assert claim.epoch >= before.epoch, f"{key}: a stale owner wrote {claim} over {before}"
        if claim.epoch == before.epoch:
            assert claim.owner == before.owner, f"{key}: {claim} and {before} are of one epoch"
        assert (claim.checkpoint or 0) >= (before.checkpoint or 0), f"{key} went back: {claim}"
        now[key] = claim


def _history(port: int, last: int) -> Iterator[tuple[str, Claim | None]]:
    """Everything that was ever written to a claim, as etcd remembers it; None: deleted."""
    prefix = b"pxrs/records/"
    folder = prefix + f"claims/{GROUP}/".encode()
    create = rpc.WatchCreateRequest(key=folder, range_end=after_prefix(folder), start_revision=1)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        requests = iter([rpc.WatchRequest(create_request=create)])
        for answer in rpc.WatchStub(channel).Watch(requests, timeout=30.0):
            for event in answer.events:
                key = event.kv.key[len(prefix) :].decode()
                yield key, _claim(key, event)
            if answer.events and answer.events[-1].kv.mod_revision >= last:
                return


def _claim(key: str, event: Any) -> Claim | None:
    if event.type == event.DELETE:
        return None
    return decode(Versioned(key, bytes(event.kv.value), event.kv.mod_revision, None), Claim)
