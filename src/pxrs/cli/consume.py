"""`pxrs consume`: prints messages as a member of a group, and commits what it printed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import click

from pxrs.cli.options import (
    SIGNALLED,
    Settings,
    check_output,
    max_option,
    shared,
    values_only_option,
)
from pxrs.cli.show import message_formatter
from pxrs.errors import DamagedBatch, Fenced
from pxrs.types import TopicPartition

if TYPE_CHECKING:
    from pxrs.consuming.consumer import Consumer
    from pxrs.types import Message

_AT_ONCE = 500


@click.command(short_help="Show messages as a member of a group, and commit them.")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--group", "-g", required=True, help="The group to join.")
@click.option("--instance", help="A static member name: its partitions wait for a restart.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where to start without a checkpoint.",
)
@max_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop when no message has come for so long.  [default: never]",
)
@values_only_option
@shared
def consume(
    settings: Settings,
    topics: tuple[str, ...],
    group: str,
    instance: str | None,
    start: Literal["earliest", "latest"],
    most: int | None,
    timeout: float | None,
    values_only: bool,
) -> None:
    """Show messages of the TOPICs as a member of a group, and commit what was shown.

    The members of a group share its partitions. On Ctrl-C or SIGTERM the command commits, leaves
    the group and ends; a second signal ends it at once.
    """
    check_output(settings, values_only=values_only)
    show = message_formatter(
        as_json=settings.json, values_only=values_only, with_topic=len(set(topics)) > 1
    )
    with (
        Signals() as signals,
        settings.connect() as px,
        px.consumer(topics, group, instance=instance, start=start) as consumer,
    ):
        signals.wake(consumer.wake)
        printer = Printer(consumer, show, signals)
        try:
            printer.run(most, timeout)
        except DamagedBatch as error:
            error.add_note(
                f"or set the group past it: pxrs groups reset {group} {error.topic} "
                f"--partition {error.partition} --to {error.next_offset}"
            )
            raise
        finally:
            printer.commit()
    if signals.number is not None:
        sys.exit(SIGNALLED + signals.number)


@dataclass
class Printer:
    """Prints message by message, and knows which of them have left this process."""

    consumer: Consumer
    show: Callable[[Message], bytes]
    signals: Signals
    _printed: dict[TopicPartition, Message] = field(default_factory=dict)

    def run(self, most: int | None, timeout: float | None) -> None:
        """Prints until `most` messages, `timeout` seconds without one, or a signal."""
        out = sys.stdout.buffer
        left = _AT_ONCE if most is None else most
        while left and self.signals.number is None:
            batch = self.consumer.poll(min(_AT_ONCE, left), timeout)
            self._printed.clear()  # poll takes them as handled
            if not batch:
                return
            for message in batch:
                out.write(self.show(message))
                out.flush()
                self._printed[TopicPartition(message.topic, message.partition)] = message
                if self.signals.number is not None:
                    return
            left -= 0 if most is None else len(batch)

    def commit(self) -> None:
        """Commits what was printed of the last batch, but for partitions that were lost."""
        for message in self._printed.values():
            with suppress(Fenced):
                self.consumer.commit(message)


class Signals:
    """Notes the first SIGINT or SIGTERM in `number`; a second one has its usual effect."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = threading.Event()
        self._before: dict[int, Any] = {}

    def wake(self, wake: Callable[[], None]) -> None:
        """Calls `wake` in a thread when a signal comes. The handler can't: it interrupts a thread
        that may hold the very locks that `wake` needs."""

        def wait() -> None:
            self._came.wait()
            if self.number is not None:
                wake()

        threading.Thread(target=wait, name="pxrs-signals", daemon=True).start()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._came.set()

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()
        self._came.set()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
