"""`pxrs produce`: messages from arguments, lines of stdin, or lines of a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from pxrs.cli.lines import Pair, short_enough, split
from pxrs.cli.options import Settings, header, shared, size
from pxrs.cli.output import WORTH_A_RATE, console, count, print_json, readable, table
from pxrs.cli.sources import are_lines, one_source, source
from pxrs.cli.tally import Tally
from pxrs.codec.batches import COMPRESSIONS
from pxrs.config import ProducerSettings
from pxrs.errors import DeliveryFailed, InvalidRequest, MessageTooLarge, OutcomeUnknown

if TYPE_CHECKING:
    from pxrs.producing.producer import Producer

_DEFAULTS = ProducerSettings()


@click.command()
@click.argument("topic")
@click.argument("messages", nargs=-1, metavar="[MESSAGE]...")
@click.option(
    "--file", "-f", type=click.Path(exists=True, dir_okay=False), help="One message per line."
)
@click.option("--key", "-k", help="The key of all messages.")
@click.option("--key-separator", "-s", metavar="TEXT", help="Split each line into key and value.")
@click.option("--partition", "-p", type=int, help="Send there, whatever the key.")
@click.option("--header", "-H", "headers", type=header, multiple=True, help="name=value.")
@click.option(
    "--compression", type=click.Choice(list(COMPRESSIONS)), default="none", show_default=True
)
@click.option("--max-message-bytes", type=size, help="Refuse longer ones.  [default: 1MiB]")
@shared
@click.pass_obj
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
    one_source(messages, file, "message")
    if key is not None and key_separator is not None:
        raise click.UsageError("keys come from --key or from --key-separator, not both")
    if key_separator == "":
        raise click.UsageError("--key-separator needs at least one character")
    most = max_message_bytes or _DEFAULTS.max_message_bytes
    with settings.create() as px:
        producer = px.producer(
            compression=compression,
            max_message_bytes=most,
            buffer_bytes=max(most, _DEFAULTS.buffer_bytes),
        )
        sender = Sender(
            producer,
            topic,
            key=None if key is None else os.fsencode(key),
            separator=None if key_separator is None else os.fsencode(key_separator),
            partition=partition,
            headers=list(headers),
            most=most,
            what="line" if are_lines(messages, file) else "message",
        )
        started = time.monotonic()
        finished = False
        try:
            with source(messages, file, sender.longest, "message", settings) as blocks:
                sender.send(blocks)
            finished = True
        finally:
            written = sender.finish()
            if finished or written.messages:
                _show(topic, written, time.monotonic() - started, as_json=settings.json)
            sender.raise_lost()


class Sender:
    """Sends blocks of lines to one topic and knows which line it is at."""

    def __init__(
        self,
        producer: Producer,
        topic: str,
        *,
        key: bytes | None,
        separator: bytes | None,
        partition: int | None,
        headers: list[tuple[str, bytes | None]],
        most: int,
        what: str,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._key = key
        self._separator = separator
        self._partition = partition
        self._headers = headers
        self._most = most
        self._what = what
        self._tally = Tally()
        self._sent = 0
        beside = len(key or b"") + sum(len(name) + len(text or b"") for name, text in headers)
        self.longest = most - beside + len(separator or b"")

    def send(self, blocks: Iterable[list[bytes]]) -> None:
        """Hand over all blocks, or all up to a line that can't be sent: the error names it."""
        self._producer.send_many(self._topic, [])  # so that a wrong topic shows before any input
        for lines in blocks:
            fitting = short_enough(lines, self.longest)
            pairs = self._pairs(fitting)
            self._send_pairs(pairs)
            if len(pairs) < len(fitting):
                raise InvalidRequest(
                    f"{self._here()} has no {readable(self._separator or b'')!r} between key and "
                    f"value; {self._before()}"
                )
            if len(fitting) < len(lines):
                raise MessageTooLarge(
                    f"{self._here()} is too long: key, value and headers may have {self._most:,} "
                    f"bytes together; {self._before()}. Split it, or raise --max-message-bytes"
                )
            if self._tally.error is not None:
                return

    def finish(self) -> Tally:
        """Wait until everything handed over is settled."""
        # What the tally does not know of, cut off by another error, is in the log.
        with suppress(DeliveryFailed, OutcomeUnknown):
            self._producer.close()
        self._tally.settle()
        return self._tally

    def raise_lost(self) -> None:
        """After `finish`: an error if the store did not take everything."""
        if self._tally.error is not None:
            raise DeliveryFailed(
                f"{self._tally.lost:,} of {count(self._sent, 'message')} not written: "
                f"{self._tally.error}"
            ) from self._tally.error

    def _here(self) -> str:
        return f"{self._what} {self._sent + 1:,}"

    def _before(self) -> str:
        return f"the {self._sent:,} before it are written" if self._sent else "nothing was written"

    def _pairs(self, lines: list[bytes]) -> list[Pair]:
        if self._separator is None:
            return [(self._key, line) for line in lines]
        return split(lines, self._separator)

    def _send_pairs(self, pairs: list[Pair]) -> None:
        if self._partition is None and not self._headers:
            self._tally.add(self._producer.send_many(self._topic, pairs).parcels)
            self._sent += len(pairs)
            return
        for key, value in pairs:
            sent = self._producer.send(
                self._topic, value, key, partition=self._partition, headers=self._headers
            )
            self._tally.add((sent._parcel,))
            self._sent += 1


def _show(topic: str, written: Tally, seconds: float, *, as_json: bool) -> None:
    rate = written.messages / seconds if seconds > 0 else 0.0
    if as_json:
        print_json(
            {
                "topic": topic,
                "messages": written.messages,
                "seconds": round(seconds, 6),
                "messages_per_second": round(rate, 1),
                "partitions": written.rows(),
            }
        )
        return
    out = console()
    if written.messages == 1:
        ((number, it),) = written.partitions.items()
        out.print(f"1 message to {topic}: partition {number}, offset {it.first:,}")
        return
    speed = f" in {seconds:.2f} s, {rate:,.0f} msg/s" if written.messages >= WORTH_A_RATE else ""
    out.print(f"{count(written.messages, 'message')} to {topic}{speed}")
    if written.messages:
        rows = table("partition", "offsets", "messages")
        for number, it in sorted(written.partitions.items()):
            rows.add_row(str(number), f"{it.first:,} .. {it.last:,}", f"{it.messages:,}")
        out.print(rows)
