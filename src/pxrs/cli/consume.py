"""`pxrs consume`: messages as a member of a group; what was printed is committed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

import click

from pxrs.cli.failures import SIGNALLED
from pxrs.cli.messages import check_output, formatter
from pxrs.cli.options import Settings, shared
from pxrs.errors import DamagedBatch, Fenced
from pxrs.types import TopicPartition

if TYPE_CHECKING:
    from pxrs.consuming.consumer import Consumer
    from pxrs.types import Message

_AT_ONCE = 500


@click.command(short_help="Show messages as a member of a group, and commit them.")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--group", "-g", required=True, help="The group to be a member of.")
@click.option("--instance", help="A name of its own: partitions wait for it across a restart.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["earliest", "latest"]),
    default="earliest",
    show_default=True,
    help="Where the group has no checkpoint.",
)
@click.option("--max", "-n", "most", type=click.IntRange(min=1), help="Stop after so many.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Stop when nothing has come for so long.  [default: never]",
)
@click.option("--values-only", is_flag=True, help="Values as they are, a line each.")
@shared
@click.pass_context
def consume(
    ctx: click.Context,
    topics: tuple[str, ...],
    group: str,
    instance: str | None,
    start: Literal["earliest", "latest"],
    most: int | None,
    timeout: float | None,
    values_only: bool,
) -> None:
    """Show messages of TOPICs as a member of a group, and commit what was shown.

    Members of one group share the partitions. Ctrl-C or SIGTERM: it commits, leaves the group
    and ends; the second one ends it at once.
    """
    settings = ctx.ensure_object(Settings)
    check_output(settings, values_only=values_only)
    show = formatter(settings, values_only=values_only, with_topic=len(set(topics)) > 1)
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
        ctx.exit(SIGNALLED + signals.number)


class Printer:
    """Prints message by message, and knows which of them are out of this process."""

    def __init__(
        self, consumer: Consumer, show: Callable[[Message], bytes], signals: Signals
    ) -> None:
        self._consumer = consumer
        self._show = show
        self._signals = signals
        self._printed: dict[TopicPartition, Message] = {}

    def run(self, most: int | None, timeout: float | None) -> None:
        """Until there were so many, nothing came for so long, or a signal did."""
        out = sys.stdout.buffer
        left = _AT_ONCE if most is None else most
        while left and self._signals.number is None:
            batch = self._consumer.poll(min(_AT_ONCE, left), timeout)
            self._printed.clear()  # that call took them for handled
            if not batch:
                return
            for message in batch:
                out.write(self._show(message))
                out.flush()
                self._printed[TopicPartition(message.topic, message.partition)] = message
                if self._signals.number is not None:
                    return
            left -= 0 if most is None else len(batch)

    def commit(self) -> None:
        """Commit what was printed of the last batch; of a lost partition nothing can be."""
        for message in self._printed.values():
            with suppress(Fenced):
                self._consumer.commit(message)


class Signals:
    """Turns the first SIGINT or SIGTERM into a wish; the second one does what it always does."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._came = threading.Event()
        self._before: dict[int, Any] = {}

    def wake(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when one comes, not by the handler: that interrupts a thread which
        may hold the very locks that `wake` needs."""

        def wait() -> None:
            self._came.wait()
            if self.number is not None:
                wake()

        threading.Thread(target=wait, name="pxrs-signals", daemon=True).start()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        self._came.set()

    def _ask(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()
        self._came.set()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
