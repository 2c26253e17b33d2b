"""`pxrs dlq`: items and messages that were given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import click

from pxrs.cli import show
from pxrs.cli.options import Settings, ask, limit_option, seconds, shared, yes_option
from pxrs.cli.show import count
from pxrs.config import SUFFIX, DeadLetter
from pxrs.errors import InvalidRequest, TopicNotFound, quoted

if TYPE_CHECKING:
    from pxrs.app import Pxrs
    from pxrs.queues.admin import ItemInfo
    from pxrs.running.topics import DeadMessage

Kind = Literal["queue", "topic", "letters"]


class Filter(TypedDict):
    """The dead letters that a command is about, as `px.queues` and `px.topics` take them."""

    ids: tuple[str, ...] | None
    key: str | None
    error: str | None
    dead_for: float | None


class Source:
    """The queue or topic that a command is about, and its dead letters."""

    def __init__(self, px: Pxrs, name: str, kind: Kind | None) -> None:
        self._px = px
        self.name = name
        self.kind = _kind_of(px, name) if kind is None else kind
        self._letters = DeadLetter(name) if self.kind == "letters" else name
        self.of = "queue" if self.kind == "queue" else "topic"

    def dead(self, limit: int | None, chosen: Filter) -> Sequence[ItemInfo | DeadMessage]:
        if self.kind == "queue":
            return self._px.queues.dead(self.name, limit, **_of_queue(chosen))
        return self._px.topics.dead(self._letters, limit, **chosen)

    def redrive(self, chosen: Filter, to: str | None) -> int:
        if self.kind == "queue":
            if to is not None:
                raise click.UsageError("--to is for topics: items go back to their queue")
            return self._px.queues.redrive(self.name, **_of_queue(chosen))
        _refuse_filters(chosen, "the messages of a topic are sent back in order, all of them")
        return self._px.topics.redrive(self._letters, to=to)

    def drop(self, chosen: Filter) -> int:
        return self._px.queues.drop(self.name, **_of_queue(chosen))


def _kind_of(px: Pxrs, name: str) -> Kind:
    is_queue = px.stores.queues.find(name) is not None
    try:
        px.topics.find(name)
    except TopicNotFound:
        if is_queue:
            return "queue"
        raise InvalidRequest(f"there is neither a queue nor a topic {name!r}") from None
    if is_queue:
        raise click.UsageError(f"{name} is a queue and a topic; say --queue or --topic")
    return "topic"


def _of_queue(chosen: Filter) -> Any:
    """The filter with ids as queues have them: numbers."""
    ids = chosen["ids"]
    return {**chosen, "ids": None if ids is None else [_number(each) for each in ids]}


def _number(text: str) -> int:
    if not text.isdigit():
        raise click.UsageError(f"the id of an item must be an integer, got {quoted(text)}")
    return int(text)


def _refuse_filters(chosen: Filter, why: str) -> None:
    if any(given is not None for given in chosen.values()):
        raise click.UsageError(f"no filter can be given: {why}")


def of_source(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options for the kind of its NAME; it gets them as `kind`."""

    for kind, what in (
        ("queue", "NAME is a queue."),
        ("topic", "NAME is a topic."),
        ("letters", 'NAME is the topic of a DeadLetter("NAME").'),
    ):
        command = click.option(f"--{kind}", "kind", flag_value=kind, default=None, help=what)(
            command
        )
    return command


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose dead letters; it gets them as `chosen`."""

    @click.option("--id", "ids", multiple=True, help="Only this one; may repeat.")
    @click.option("--key", "-k", help="Only those of this key.")
    @click.option("--error", "-e", metavar="TEXT", help="Only with TEXT in their error.")
    @click.option("--older", type=seconds, help="Only those dead for longer: 90, 90s, 2h, 7d.")
    @wraps(command)
    def choose(
        *arguments: Any,
        ids: tuple[str, ...],
        key: str | None,
        error: str | None,
        older: float | None,
        **options: Any,
    ) -> None:
        chosen = Filter(ids=ids or None, key=key, error=error, dead_for=older)
        command(*arguments, chosen=chosen, **options)

    return choose


@click.group()
@shared
def dlq(_: Settings) -> None:
    """Dead letters: items and messages that were given up.

    A queue keeps its items that used up their deliveries until they are put back or dropped.
    Messages of a topic that px.run gave up on are in the topic NAME.dlq, or in the one that
    DeadLetter("…") names (--letters).
    """


@dlq.command("list", short_help="Show dead letters of NAME, or how many there are.")
@click.argument("name", required=False)
@of_source
@filtered
@limit_option(100)
@shared
def list_dead(
    settings: Settings, name: str | None, kind: Kind | None, chosen: Filter, limit: int
) -> None:
    """Show dead letters of queue or topic NAME, oldest first; without NAME, how many each has."""
    if name is None:
        _refuse_filters(chosen, "a filter needs a NAME")
        _print_totals(settings)
        return
    with settings.connect() as px:
        source = Source(px, name, kind)
        found = source.dead(limit, chosen)
        more = len(found) == limit and len(source.dead(limit + 1, chosen)) > limit
    if settings.json:
        show.print_json([show.item_json(each) for each in found])
        return
    if found:
        show.print_dead(found)
    else:
        click.echo(f"no matching dead letters of {name}", err=True)
    if more:
        click.echo(f"showed {limit:,}; see more with --limit", err=True)


def _print_totals(settings: Settings) -> None:
    with settings.connect() as px:
        found = [("queue", queue.name, queue.dead) for queue in px.queues.list()]
        letters = [each.name for each in px.topics.list() if each.name.endswith(SUFFIX)]
        found += [
            ("topic", name.removesuffix(SUFFIX), len(px.topics.dead(DeadLetter(name), None)))
            for name in letters
        ]
    found = [each for each in found if each[2]]
    settings.print_list(
        "dead letters",
        [{kind: name, "dead": dead} for kind, name, dead in found],
        ("of", "name", "dead"),
        [(kind, name, f"{dead:,}") for kind, name, dead in found],
        left=("of", "name"),
    )


@dlq.command("show", short_help="Show everything about one dead letter of NAME.")
@click.argument("name")
@click.argument("number", metavar="ID")
@of_source
@shared
def show_dead(settings: Settings, name: str, number: str, kind: Kind | None) -> None:
    """Show one dead letter of NAME: payload, headers, attempts, times and last error."""
    with settings.connect() as px:
        source = Source(px, name, kind)
        found = source.dead(1, Filter(ids=(number,), key=None, error=None, dead_for=None))
    if not found:
        raise InvalidRequest(
            f"{source.of} {name!r} has no dead letter {number}; see: pxrs dlq list {name}"
        )
    if settings.json:
        show.print_json(show.item_json(found[0]))
    else:
        show.print_one_dead(found[0])


@dlq.command(short_help="Put dead letters back to where they came from.")
@click.argument("name")
@of_source
@filtered
@click.option("--to", metavar="TOPIC", help="Send the messages of a topic to TOPIC instead.")
@shared
def redrive(
    settings: Settings, name: str, kind: Kind | None, chosen: Filter, to: str | None
) -> None:
    """Put dead letters of NAME back to where they came from.

    Items go to the end of their queue, and their delivery count is reset. Messages go to the
    partition they came from, or to topic --to. Their letters stay in the dead-letter topic, but
    each is sent back only once: the group NAME.dlq.redrive keeps a checkpoint.
    """
    with settings.connect() as px:
        source = Source(px, name, kind)
        moved = source.redrive(chosen, to)
    what = "item" if source.of == "queue" else "message"
    where = to or ("where they came from" if source.kind == "letters" else name)
    settings.print(
        {source.of: name, "redriven": moved}, f"{count(moved, what)} put back into {where}"
    )


@dlq.command()
@click.argument("name")
@of_source
@filtered
@yes_option
@shared
def drop(settings: Settings, name: str, kind: Kind | None, chosen: Filter, yes: bool) -> None:
    """Remove dead items of queue NAME for good."""
    with settings.connect() as px:
        source = Source(px, name, kind)
        if source.kind != "queue":
            raise click.UsageError(
                "dead messages of a topic are not dropped one by one: they go with the retention "
                f"of their own topic, or with it: pxrs topics delete {name}{SUFFIX}"
            )
        if not yes:
            meant = len(source.dead(None, chosen))
            ask(f"Drop {count(meant, 'dead item')} of {name}?")
        gone = source.drop(chosen)
    settings.print(
        {"queue": name, "dropped": gone}, f"{count(gone, 'dead item')} of {name} dropped"
    )
