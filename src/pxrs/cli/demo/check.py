"""Reads the whole log again and judges it by what the producers were told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pxrs.cli.demo.script import END, KEYS, PING, Digest, key_of, number_in
from pxrs.errors import DamagedBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pxrs.runtime.reader import Reader

_AT_ONCE = 5000


@dataclass
class Findings:
    """What is in the log, and what is wrong with it."""

    messages: int = 0
    lost: int = 0
    repeated: int = 0
    out_of_order: int = 0
    torn: int = 0
    seconds: float = 0.0
    digests: list[str] = field(default_factory=list)


def check(reader: Reader, acknowledged: list[int]) -> Findings:
    """Every number below `acknowledged[producer]` must be there once, in order for its key.

    A key's numbers are `KEYS` apart, so the next one is known: a smaller one is a repetition,
    a larger one has overtaken or lost its predecessor.
    """
    started = time.monotonic()
    findings = Findings()
    expected = {key_of(p, k): k for p in range(len(acknowledged)) for k in range(KEYS)}
    for partition in range(reader.topic.partitions):
        digest = Digest()
        for key, value in _messages(reader, partition, findings):
            digest.add(key, value)
            findings.messages += 1
            number = number_in(value)
            due = expected.get(key)
            if number is None or due is None:
                findings.torn += 1
                continue
            if number < due:
                findings.repeated += 1
                continue
            if number > due:
                findings.out_of_order += 1
            expected[key] = number + KEYS
        findings.digests.append(digest.text)
    for producer, count in enumerate(acknowledged):
        dues = (expected[key_of(producer, k)] for k in range(KEYS))
        findings.lost += sum(len(range(due, count, KEYS)) for due in dues)
    findings.seconds = time.monotonic() - started
    return findings


def _messages(reader: Reader, partition: int, findings: Findings) -> Iterator[tuple[bytes, bytes]]:
    offset, end = reader.bounds(partition)
    while offset < end:
        try:
            found = reader.read(partition, offset, _AT_ONCE)
        except DamagedBatch as error:
            findings.torn += error.next_offset - offset
            offset = error.next_offset
            continue
        for message in found:
            if message.key not in (PING, END):
                yield message.key, message.value
        offset = found[-1].offset + 1
