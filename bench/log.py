"""`bench log`: the log on SQLite against its bare limit and its peers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import perf_counter

from bench import bare, ours, peers, processes
from bench.harness import Check, Contestant, Options, Sample, Say, Section, compare, scratch
from bench.workload import PARTITIONS, ends, rounded

BARE = "bare codec + sqlite3"
SINGLE = 500


def producing(options: Options, say: Say) -> Section:
    """Messages per second into the log, everything durable at the end."""
    messages = rounded(options.messages)
    few = 500 if options.quick else 2_000
    contestants = [
        Contestant(BARE, lambda folder: bare.append(folder, messages), "the limit"),
        Contestant("pxrs send", lambda folder: ours.send(folder, messages), "FULL"),
        Contestant("pxrs send_many", lambda folder: ours.send_many(folder, messages), "FULL"),
        *peers.contestants(messages, few),
    ]
    result = compare("producing", contestants, options.rounds, options, say)
    kafka = result.ratio("pxrs send", "confluent-kafka produce")
    return Section(
        [result],
        [
            Check("send ÷ bare", result.ratio("pxrs send", BARE), 0.45, "", "at least"),
            Check("send_many ÷ bare", result.ratio("pxrs send_many", BARE), 0.55, "", "at least"),
            Check("send ÷ confluent-kafka on a mock", kafka, 1.0, "", "at least"),
        ],
    )


def single(options: Options, say: Say) -> Section:
    """Durable messages one at a time. Short runs and more of them: the disk is the noise."""
    contestants = [
        Contestant(BARE, lambda folder: bare.single(folder, SINGLE), "one transaction each"),
        Contestant("pxrs send().result()", lambda folder: ours.single(folder, SINGLE)),
    ]
    result = compare("single durable", contestants, 2 * options.rounds, options, say)
    cost = result.cost("pxrs send().result()", BARE)
    return Section([result], [Check("send().result() ÷ bare transaction, cost", cost, 1.4, "")])


def reading(options: Options, say: Say) -> Section:
    """Messages per second out of a log, checksums checked."""
    messages = rounded(options.messages)
    with (
        scratch(options) as name,
        closing(bare.connect(Path(name))) as db,
        ours.opened(Path(name)) as px,
    ):
        say("reading: filling the logs")
        bare.fill(db, messages)
        ours.fill(px, messages)
        contestants = [
            Contestant(BARE, lambda _: bare.read(db, messages), "the limit"),
            Contestant("pxrs reader.read", lambda _: ours.read(px, messages)),
        ]
        result = compare("reading", contestants, options.rounds, options, say)
    ratio = result.ratio("pxrs reader.read", BARE)
    return Section([result], [Check("read ÷ bare", ratio, 0.4, "", "at least")])


def growth(options: Options, say: Say) -> Section:
    """The same work at the end of a short log and of one ten times as long."""
    short = rounded(100_000 if options.quick else 1_000_000)
    step = rounded(short // 5)
    section = Section()
    with ExitStack() as stack:
        logs = []
        for length in (short, 10 * short):
            say(f"growth: filling a log with {length:,} messages")
            folder = Path(stack.enter_context(scratch(options)))
            logs.append(_Grown(stack.enter_context(ours.opened(folder)), length))
        for verb, work in (("appending", _Grown.append), ("reading", _Grown.read)):
            contestants = [
                Contestant(f"after {log.length:,} messages", partial(_at_the_end, work, log, step))
                for log in logs
            ]
            result = compare(f"{verb} in a log", contestants, options.rounds, options, say)
            cost = result.cost(contestants[1].name, contestants[0].name)
            section.comparisons.append(result)
            section.checks.append(
                Check(f"{verb} after {10 * short:,} messages ÷ {short:,}, cost", cost, 1.15, "")
            )
    return section


class _Grown:
    """A log with a past."""

    def __init__(self, px: ours.Px, length: int) -> None:
        self.length = length
        self._px = px
        self._messages = 0
        self.append(length)

    def append(self, messages: int) -> float:
        seconds = ours.fill(self._px, messages)
        self._messages += messages
        return seconds

    def read(self, messages: int) -> float:
        """Read the newest messages of each partition."""
        started = perf_counter()
        for partition, end in enumerate(ends(self._messages)):
            ours.read_range(self._px, partition, end - messages // PARTITIONS, end)
        return perf_counter() - started


def _at_the_end(
    work: Callable[[_Grown, int], float], log: _Grown, messages: int, folder: Path
) -> Sample:
    return Sample(messages, work(log, messages))


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "producing": producing,
    "single": single,
    "reading": reading,
    **processes.PARTS,
    "growth": growth,
}
