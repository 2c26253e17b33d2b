"""`pxrs groups`: list, describe, explain, reset and delete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from pxrs.cli import options
from pxrs.cli.options import Settings, ask, limit_option, shared, yes_option
from pxrs.cli.show import console, count, human_age, human_time, print_json, ranges, table

if TYPE_CHECKING:
    from rich.console import Console

    from pxrs.consuming.reader import Start
    from pxrs.groups.info import (
        CheckpointChange,
        GroupInfo,
        GroupReset,
        PartitionMove,
        Rebalance,
    )


@click.group()
@shared
def groups(_: Settings) -> None:
    """Inspect, reset and delete consumer groups."""


@groups.command("list")
@shared
def list_groups(settings: Settings) -> None:
    """Show all groups."""
    with settings.connect() as px:
        found = px.groups.list()
    rows = [(each.name, each.state, f"{each.members:,}", f"{each.generation:,}") for each in found]
    columns = ("group", "state", "members", "generation")
    settings.print_list("groups", found, columns, rows, left=("group", "state"))


@groups.command()
@click.argument("group")
@shared
def describe(settings: Settings, group: str) -> None:
    """Show the members of GROUP, its partitions and its lag.

    A checkpoint is the offset of the next message to handle. The age of a lag is the age of
    that message.
    """
    with settings.connect() as px:
        info = px.groups.describe(group)
    if settings.json:
        import msgspec

        summed = {name: getattr(info, name) for name in ("lag", "lag_is_exact", "lag_seconds")}
        print_json(msgspec.to_builtins(info) | summed)
        return
    out = console()
    out.print(info.name, style="bold", end="")
    behind = f", {human_age(info.lag_seconds)}" if info.lag else ""
    about = "" if info.lag_is_exact else "about "
    out.print(f": {info.state}, {about}{count(info.lag, 'message')} behind{behind}")
    out.print(f"generation {info.generation}, {human_time(info.at_ms)}: {info.reason}", style="dim")
    _print_members(out, info)
    _print_partitions(out, info)
    if info.awaited:
        out.print(
            f"waits for {', '.join(info.awaited)}: the partitions of a static member are kept for "
            "it until its rejoin timeout is over",
            style="yellow",
        )


def _print_members(out: Console, info: GroupInfo) -> None:
    if not info.members:
        return
    left = ("member", "client", "joined", "static", "owns")
    rows = table(*left, left=left)
    for member in info.members:
        rows.add_row(
            member.name,
            member.client,
            human_time(member.joined_ms),
            "yes" if member.static else "no",
            _by_topic((part.topic, part.partition) for part in member.owned) or "-",
        )
    out.print(rows)
    out.print()


def _print_partitions(out: Console, info: GroupInfo) -> None:
    if not info.partitions:
        return
    noted = any(part.metadata for part in info.partitions)
    rows = table(
        "topic", "partition", "owner", "epoch", "checkpoint", "end", "lag", "age",
        *(["metadata"] if noted else []),
        left=("topic", "owner", "metadata"),
    )  # fmt: skip
    for part in info.partitions:
        rows.add_row(
            part.topic,
            f"{part.partition:,}",
            part.owner or "-",
            f"{part.epoch:,}",
            _offset(part.checkpoint),
            f"{part.end:,}",
            f"{'' if part.lag_is_exact else '~'}{part.lag:,}",
            human_age(part.lag_seconds),
            *([part.metadata] if noted else []),
        )
    out.print(rows)


@groups.command(short_help="Show what happened in GROUP, and why.")
@click.argument("group")
@limit_option(20)
@shared
def explain(settings: Settings, group: str, limit: int) -> None:
    """Show the rebalances, resets and seeks of GROUP with their reasons, oldest first."""
    with settings.connect() as px:
        told = px.groups.explain(group, limit)
    if settings.json:
        print_json(told)
        return
    out = console()
    events = [(each.at_ms, partial(_print_rebalance, out, each)) for each in told.rebalances]
    events += [(each.at_ms, partial(_print_reset, out, each)) for each in told.resets]
    for at_ms, show in sorted(events, key=lambda event: event[0]):
        out.print(human_time(at_ms), style="dim", end="  ")
        show()


def _print_rebalance(out: Console, event: Rebalance) -> None:
    out.print(f"generation {event.generation}", style="bold", end="")
    out.print(f": {event.reason} (computed by {event.coordinator})")
    _print_changes(out, event.moves, lambda member: member or "no member")


def _print_reset(out: Console, event: GroupReset) -> None:
    out.print("checkpoints set", style="bold", end="")
    out.print(f" by {event.by}{f': {event.why}' if event.why else ''}")
    _print_changes(out, event.changes, _offset)


def _print_changes(
    out: Console,
    changes: Iterable[PartitionMove | CheckpointChange],
    name: Callable[[Any], str],
) -> None:
    """Prints a line for all partitions that went from the same state to the same other one."""
    moved: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for change in changes:
        states = (name(change.before), name(change.after))
        moved.setdefault(states, []).append((change.topic, change.partition))
    for (before, after), parts in moved.items():
        out.print(f"    {_by_topic(parts)}: {before} → {after}")


@groups.command()
@click.argument("group")
@click.argument("topic")
@click.option("--to", type=options.offset, help="earliest, latest or an offset.")
@click.option("--timestamp", "-t", type=options.moment, help="To this time: ISO 8601, or epoch ms.")
@click.option(
    "--partition", "-p", "partitions", type=int, multiple=True, help="Only this one; may repeat."
)
@click.option("--force", is_flag=True, help="Even if it has members; they are fenced.")
@yes_option
@shared
def reset(
    settings: Settings,
    group: str,
    topic: str,
    to: Start | None,
    timestamp: int | None,
    partitions: tuple[int, ...],
    force: bool,
    yes: bool,
) -> None:
    """Set the checkpoints of GROUP in TOPIC. `groups explain` shows who did it."""
    if (to is None) == (timestamp is None):
        raise click.UsageError("use one of --to and --timestamp to say where to")
    with settings.connect() as px:
        if not yes:
            state = px.groups.describe(group, lag_seconds=False).state
            which = f"partitions {ranges(partitions)}" if partitions else "all partitions"
            ask(f"Set the checkpoints of {group} ({state}) in {which} of {topic}?")
        changes = px.groups.reset(
            group,
            topic,
            to=to,
            timestamp_ms=timestamp,
            partitions=partitions or None,
            force=force,
        )
    _show_changes(settings, changes)


def _show_changes(settings: Settings, changes: Sequence[CheckpointChange]) -> None:
    if settings.json:
        print_json(changes)
        return
    rows = table("topic", "partition", "before", "after", left=("topic",))
    for change in changes:
        rows.add_row(
            change.topic, f"{change.partition:,}", _offset(change.before), _offset(change.after)
        )
    console().print(rows)


@groups.command("import-checkpoint")
@click.argument("group")
@click.argument("topic")
@click.argument("last", type=int)
@shared
def import_checkpoint(settings: Settings, group: str, topic: str, last: int) -> None:
    """Begin where another consumer has stopped.

    LAST is the last id of TOPIC that it has handled. GROUP goes on behind it, in every partition;
    it must not have checkpoints in TOPIC yet.
    """
    with settings.connect() as px:
        changes = px.groups.import_checkpoint(group, topic, last)
    _show_changes(settings, changes)


@groups.command()
@click.argument("group")
@click.option("--force", is_flag=True, help="Even if it has members; they start anew.")
@yes_option
@shared
def delete(settings: Settings, group: str, force: bool, yes: bool) -> None:
    """Delete GROUP, its checkpoints and its history."""
    with settings.connect() as px:
        if not yes:
            info = px.groups.describe(group, lag_seconds=False)
            ask(
                f"Delete {group} ({info.state}) and its checkpoints in "
                f"{count(len(info.partitions), 'partition')}?"
            )
        px.groups.delete(group, force=force)
    settings.print({"deleted": group}, f"{group} deleted")


def _by_topic(parts: Iterable[tuple[str, Any]]) -> str:
    """`orders 0-3, 7; invoices 1`."""
    topics: dict[str, list[int]] = {}
    for topic, number in parts:
        topics.setdefault(topic, []).append(number)
    return "; ".join(f"{topic} {ranges(numbers)}" for topic, numbers in sorted(topics.items()))


def _offset(offset: int | None) -> str:
    return "none" if offset is None else f"{offset:,}"
