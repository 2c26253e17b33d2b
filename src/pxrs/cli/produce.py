"""`pxrs produce`: writes messages from arguments, lines of stdin, or lines of a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from pxrs.cli.input import Input, short_enough
from pxrs.cli.options import Settings, header, shared, size
from pxrs.cli.show import console, count, per_second, print_json, readable, speed, table
from pxrs.codec.batches import COMPRESSIONS
from pxrs.config import ProducerSettings
from pxrs.errors import DeliveryFailed, InvalidRequest, MessageTooLarge, OutcomeUnknown

if TYPE_CHECKING:
    from pxrs.errors import PxrsError
    from pxrs.producing.handles import PendingBatch
    from pxrs.producing.producer import Producer

_DEFAULTS = ProducerSettings()

Pair = tuple[bytes | None, bytes]


@click.command()
@click.argument("topic")
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option(
    "--file", "-f", type=click.Path(exists=True, dir_okay=False), help="One message per line."
)
@click.option("--key", "-k", help="The key of all messages.")
@click.option("--key-separator", "-s", metavar="TEXT", help="Split each line into key and value.")
@click.option("--partition", "-p", type=int, help="Send all messages to this partition.")
@click.option("--header", "-H", "headers", type=header, multiple=True, help="name=value.")
@click.option(
    "--compression", type=click.Choice(list(COMPRESSIONS)), default="none", show_default=True
)
@click.option("--max-message-bytes", type=size, help="Refuse longer messages.  [default: 1MiB]")
@shared
def produce(
    settings: Settings,
    topic: str,
    messages: tuple[str, ...],
    file: str | None,
    key: str | None,
    key_separator: str | None,
    partition: int | None,
    headers: tuple[tuple[str, bytes], ...],
    compression: str,
    max_message_bytes: int | None,
) -> None:
    """Write messages to TOPIC and wait until they are durable.

    Each MESSAGE is one message. Without any, or with -, every line of stdin is one.
    """
    given = Input(messages, file, "message")
    if key is not None and key_separator is not None:
        raise click.UsageError("use --key or --key-separator, not both")
    if key_separator == "":
        raise click.UsageError("--key-separator must have at least one character")
    most = max_message_bytes or _DEFAULTS.max_message_bytes
    with settings.create() as px:
        producer = px.producer(
            compression=compression,
            max_message_bytes=most,
            buffer_bytes=max(most, _DEFAULTS.buffer_bytes),
        )
        sender = Sender(
            producer=producer,
            topic=topic,
            key=None if key is None else os.fsencode(key),
            separator=None if key_separator is None else os.fsencode(key_separator),
            partition=partition,
            headers=list(headers),
            most=most,
            unit=given.unit,
        )
        started = time.monotonic()
        finished = False
        try:
            with given.blocks(sender.longest, quiet=settings.json) as blocks:
                sender.send(blocks)
            finished = True
        finally:
            written = sender.finish()
            if finished or written.messages:
                _show(topic, written, time.monotonic() - started, as_json=settings.json)
            sender.raise_lost()


@dataclass
class Written:
    """Messages of one partition. Other producers' messages may lie between first and last."""

    partition: int
    first: int
    last: int
    messages: int


class Tally:
    """Counts what was written where, without keeping a handle per message."""

    def __init__(self) -> None:
        self.partitions: dict[int, Written] = {}
        self.lost = 0
        self.error: PxrsError | None = None
        self._open: dict[PendingBatch, None] = {}

    @property
    def messages(self) -> int:
        return sum(written.messages for written in self.partitions.values())

    def add(self, batches: Iterable[PendingBatch]) -> None:
        """Adds batches, and counts those that are settled by now."""
        for batch in batches:
            if batch not in self._open:
                # The tally waits for it as long as it lives: this command reports its error.
                batch.waiters.append(None)
                self._open[batch] = None
        self.settle()

    def settle(self) -> None:
        """Counts the batches that are settled; those never grow again."""
        for batch in [batch for batch in self._open if batch.settled]:
            del self._open[batch]
            if batch.error is not None:
                batch.told = True
                self.lost += batch.count
                self.error = self.error or batch.error
                continue
            last = batch.base + batch.count - 1
            it = self.partitions.setdefault(
                batch.partition, Written(batch.partition, batch.base, last, 0)
            )
            it.first, it.last = min(it.first, batch.base), max(it.last, last)
            it.messages += batch.count


@dataclass(kw_only=True)
class Sender:
    """Sends blocks of lines to one topic, and counts them for errors and the summary."""

    producer: Producer
    topic: str
    key: bytes | None
    separator: bytes | None
    partition: int | None
    headers: list[tuple[str, bytes | None]]
    most: int
    unit: str
    _sent: int = 0
    _tally: Tally = field(default_factory=Tally)

    @property
    def longest(self) -> int:
        """The longest line that fits into a message with this key and these headers."""
        headers = sum(len(name) + len(value or b"") for name, value in self.headers)
        return self.most - headers - len(self.key or b"") + len(self.separator or b"")

    def send(self, blocks: Iterable[list[bytes]]) -> None:
        """Sends all lines, or those before one that can't be sent: the error names it."""
        self.producer.send_many(self.topic, [])  # a wrong topic fails before any input is read
        for lines in blocks:
            fitting = short_enough(lines, self.longest)
            pairs = self._pairs(fitting)
            self._send_pairs(pairs)
            if len(pairs) < len(fitting):
                raise InvalidRequest(
                    f"{self._here()} has no {readable(self.separator or b'')!r} between key and "
                    f"value; {self._before()}"
                )
            if len(fitting) < len(lines):
                raise MessageTooLarge(
                    f"{self._here()} is too long: the limit for key, value and headers together "
                    f"is {self.most:,} bytes; {self._before()}; split it, or raise "
                    "--max-message-bytes"
                )
            if self._tally.error is not None:
                return

    def finish(self) -> Tally:
        """Waits until every message sent is durable or failed."""
        # An error that the tally missed, because another cut it off, is in the log.
        with suppress(DeliveryFailed, OutcomeUnknown):
            self.producer.close()
        self._tally.settle()
        return self._tally

    def raise_lost(self) -> None:
        """After `finish`: raises if some messages were not written."""
        if self._tally.error is not None:
            raise DeliveryFailed(
                f"{self._tally.lost:,} of {count(self._sent, 'message')} were not written because "
                f"{self._tally.error}"
            ) from self._tally.error

    def _here(self) -> str:
        return f"{self.unit} {self._sent + 1:,}"

    def _before(self) -> str:
        return f"the {self._sent:,} before it were written" if self._sent else "nothing was written"

    def _pairs(self, lines: list[bytes]) -> list[Pair]:
        """Key and value of each line before the first that has no separator."""
        if self.separator is None:
            return [(self.key, line) for line in lines]
        pairs: list[Pair] = []
        for line in lines:
            key, found, value = line.partition(self.separator)
            if not found:
                break
            pairs.append((key, value))
        return pairs

    def _send_pairs(self, pairs: list[Pair]) -> None:
        if self.partition is None and not self.headers:
            self._tally.add(self.producer.send_many(self.topic, pairs)._batches)
            self._sent += len(pairs)
            return
        for key, value in pairs:
            sent = self.producer.send(
                self.topic, value, key, partition=self.partition, headers=self.headers
            )
            self._tally.add((sent._pending,))
            self._sent += 1


def _show(topic: str, tally: Tally, seconds: float, *, as_json: bool) -> None:
    messages = tally.messages
    written = [tally.partitions[number] for number in sorted(tally.partitions)]
    if as_json:
        print_json(
            {
                "topic": topic,
                "messages": messages,
                "seconds": round(seconds, 6),
                "messages_per_second": per_second(messages, seconds),
                "partitions": written,
            }
        )
        return
    out = console()
    if messages == 1:
        it = written[0]
        out.print(f"1 message to {topic}: partition {it.partition}, offset {it.first:,}")
        return
    out.print(f"{count(messages, 'message')} to {topic}{speed(messages, seconds, 'msg')}")
    if written:
        rows = table("partition", "offsets", "messages")
        for it in written:
            rows.add_row(str(it.partition), f"{it.first:,} .. {it.last:,}", f"{it.messages:,}")
        out.print(rows)
