"""What only shows between processes or over a process's life."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, monotonic_ns, perf_counter
from typing import Any

import psutil

import pxrs
from bench import bare
from bench.children import Child
from bench.harness import Check, Options, Say, Section, scratch
from bench.ours import READ_AT_ONCE, Px, opened, url
from bench.workload import PAIRS, PARTITIONS, TOPIC, passes, rounded

APPENDERS = 4
BULK = 1_000
BUFFER_BYTES = 16 * 1024 * 1024
MEGABYTE = 1024 * 1024

_STOP = b"stop"
_REST = 0.005


def sharing(options: Options, say: Say) -> Section:
    """Four processes append in tight loops: the longest wait, and how even their shares are."""
    section = Section()
    seconds = 1.0 if options.quick else 5.0
    for size, name in ((1, "single appends"), (BULK, f"appends of {BULK:,}")):
        say(f"{APPENDERS} processes, {name}")
        with scratch(options) as folder, opened(Path(folder)) as px:
            results = _append_together(px, Path(folder), seconds, size)
        counts = [count for count, _ in results]
        waits = [1000 * wait for _, wait in results]
        share = max(counts) / min(counts)
        section.checks += [
            Check(f"{APPENDERS} processes, {name}: longest wait", max(waits), 500, "ms"),
            Check(f"{APPENDERS} processes, {name}: largest share ÷ smallest", share, 1.5, ""),
        ]
        section.figures[name] = {"appends": counts, "longest waits, ms": waits}
        rate = sum(counts) * size / seconds
        shares = " · ".join(f"{count:,}" for count in counts)
        section.notes.append(f"{name}: {shares} appends in {seconds:g} s ({rate:,.0f} msg/s)")
    return section


def _append_together(px: Px, folder: Path, seconds: float, size: int) -> list[tuple[int, float]]:
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child(_appender, url(folder), seconds, size))
            for _ in range(APPENDERS)
        ]
        for child in children:
            child.hear()
        for child in children:
            child.tell("go")
        results = [child.hear() for child in children]
    expected = sum(1 + count * size for count, _ in results)
    if (stored := _stored(px)) != expected:
        raise RuntimeError(f"{expected} messages were appended, {stored} are in the log")
    return results


def _appender(line: Connection, where: str, seconds: float, size: int) -> None:
    with pxrs.connect(where) as px, px.producer() as producer:
        producer.send(TOPIC, b"ready", key=b"ready").result()
        line.send("ready")
        line.recv()
        waits: list[float] = []
        ending = monotonic() + seconds
        while (began := monotonic()) < ending:
            if size == 1:
                key, value = PAIRS[len(waits) % len(PAIRS)]
                producer.send(TOPIC, value, key=key).result()
            else:
                producer.send_many(TOPIC, PAIRS[:size])
                producer.flush()
            waits.append(monotonic() - began)
        line.send((len(waits), max(waits)))


def _stored(px: Px) -> int:
    """How many messages the topic holds, counted."""
    reader = px.reader(TOPIC)
    total = 0
    for partition in range(PARTITIONS):
        offset = 0
        while batch := reader.read(partition=partition, offset=offset, max_records=READ_AT_ONCE):
            offset = batch[-1].offset + 1
        total += offset
    return total


def following(options: Options, say: Say) -> Section:
    """A follower in another process: how soon it sees a message, and what waiting costs it."""
    count = 100 if options.quick else 500
    idle = 2.0 if options.quick else 5.0
    with scratch(options) as name, pxrs.connect(url(Path(name))) as px:
        px.topics.create(TOPIC, partitions=1)
        with px.producer() as producer, Child(_follower, url(Path(name))) as child:
            child.hear()
            say(f"a follower, {count} messages")
            sent, durable = _send_spaced(producer, count)
            floor = _bare_spaced(Path(name), count)
            say("a follower, idle")
            share = cpu_share(child.pid, idle)
            producer.send(TOPIC, _STOP).result()
            seen: list[tuple[int, int]] = child.hear()
    if [stamp for stamp, _ in seen] != sent:
        raise RuntimeError(f"{len(sent)} messages were sent, the follower saw {len(seen)}")
    arrivals = [at for _, at in seen]
    since_send = _milliseconds(sent, arrivals)
    since_durable = _milliseconds(durable, arrivals)
    note = (
        f"seen {median(since_send):.3f} ms after send() was called, p99 "
        f"{quantiles(since_send, n=100)[98]:.3f}; {median(since_durable):.3f} ms after result() "
        "returned (below 0: the follower was first). A bare transaction in the same rhythm takes "
        f"{median(floor):.3f} ms, and nobody has seen it by then"
    )
    return Section(
        checks=[
            Check(
                "another process sees a message, from send(), median", median(since_send), 1, "ms"
            ),
            Check("idle follower, share of a core", 100 * share, 1, "%"),
        ],
        notes=[note],
        figures={"since send, ms": since_send, "since durable, ms": since_durable},
    )


def _send_spaced(producer: Any, count: int) -> tuple[list[int], list[int]]:
    """Durable sends with rest between them; when each was sent and when it was durable."""
    sent, durable = [], []
    for _ in range(count):
        time.sleep(_REST)
        stamp = monotonic_ns()
        producer.send(TOPIC, stamp.to_bytes(8, "big")).result()
        sent.append(stamp)
        durable.append(monotonic_ns())
    return sent, durable


def _bare_spaced(folder: Path, count: int) -> list[float]:
    """What one row costs with rest between, in ms: the disk, and caches gone cold."""
    took = []
    with closing(bare.connect(folder)) as db:
        for base in range(count):
            time.sleep(_REST)
            began = perf_counter()
            bare.commit_one(db, base)
            took.append(1000 * (perf_counter() - began))
    return took


def _follower(line: Connection, where: str) -> None:
    with pxrs.connect(where) as px:
        seen = []
        line.send("ready")
        reader = px.reader(TOPIC)
        for message in reader.follow(partitions=[0], start="earliest", timeout=60.0):
            if message.value == _STOP:
                break
            seen.append((int.from_bytes(message.value, "big"), monotonic_ns()))
        line.send(seen)


def cpu_share(pid: int, seconds: float) -> float:
    """The share of one core that a process used while this one slept."""
    process = psutil.Process(pid)
    before, began = process.cpu_times(), perf_counter()
    time.sleep(seconds)
    after, ended = process.cpu_times(), perf_counter()
    used = after.user + after.system - before.user - before.system
    return used / (ended - began)


def _milliseconds(begins: list[int], ends: list[int]) -> list[float]:
    return [(end - begin) / 1e6 for begin, end in zip(begins, ends, strict=True)]


def importing(options: Options, say: Say) -> Section:
    """What `import pxrs` adds to the start of an interpreter."""
    rounds = 5 if options.quick else 15
    say(f"import pxrs, {rounds} rounds")
    added = [_start("import pxrs") - _start("pass") for _ in range(rounds)]
    return Section(
        checks=[Check("import pxrs", 1000 * median(added), 150, "ms")],
        figures={"added, ms": [1000 * seconds for seconds in added]},
    )


def _start(program: str) -> float:
    started = perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    return perf_counter() - started


def memory(options: Options, say: Say) -> Section:
    """How far a producer's memory grows while it sends much more than it may buffer."""
    messages = rounded(200_000 if options.quick else 2_000_000)
    say(f"memory while producing {messages:,} messages")
    with (
        scratch(options) as folder,
        opened(Path(folder)),
        Child(_produce, url(Path(folder)), messages) as child,
    ):
        before, peak = child.hear()
    limit = (BUFFER_BYTES + 50 * MEGABYTE) / MEGABYTE
    growth = (peak - before) / MEGABYTE
    return Section(
        checks=[Check(f"memory growth over {messages:,} sends", growth, limit, "MB")],
        notes=[f"from {before / MEGABYTE:.0f} to at most {peak / MEGABYTE:.0f} MB resident"],
    )


def _produce(line: Connection, where: str, messages: int) -> None:
    with pxrs.connect(where) as px, px.producer(buffer_bytes=BUFFER_BYTES) as producer:
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
        for _ in range(passes(messages)):
            for key, value in PAIRS:
                producer.send(TOPIC, value, key=key)
        producer.flush()
        line.send((before, _high_water()))


def _high_water() -> int:
    """This process's largest resident size in bytes.

    `getrusage` will not do: its figure outlives exec and starts with the parent's size.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


PARTS: dict[str, Callable[[Options, Say], Section]] = {
    "sharing": sharing,
    "following": following,
    "importing": importing,
    "memory": memory,
}
