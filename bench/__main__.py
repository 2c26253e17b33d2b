"""`./run bench NAME`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from rich.console import Console

from bench import (
    client,
    engines,
    groups,
    jetstream,
    kv,
    log,
    queues,
    report,
    serve,
    sources,
    walks,
)
from bench.harness import Options, Say, Section


@click.group()
def main() -> None:
    """Ratios to the bare limit and to peers, all in one run."""


Parts = Mapping[str, Callable[[Options, Say], Section]]


def _command(name: str, about: str, parts: Parts) -> None:
    """Adds `bench NAME`: all parts, or some of them."""

    @main.command(name, help=about)
    @click.option("--messages", default=500_000, show_default=True, help="Per run of a contestant.")
    @click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
    @click.option("--quick", is_flag=True, help="Small everywhere: does it run, not how fast.")
    @click.option("--only", multiple=True, type=click.Choice(list(parts)), help="Repeatable.")
    @click.option(
        "--json", "target", type=click.Path(path_type=Path), help="Write all figures here."
    )
    @click.option(
        "--folder",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Where the databases go; the default temporary folder may not be on a disk.",
    )
    def command(
        messages: int,
        rounds: int,
        quick: bool,
        only: tuple[str, ...],
        target: Path | None,
        folder: Path | None,
    ) -> None:
        if quick:
            messages, rounds = min(messages, 100_000), min(rounds, 3)
        options = Options(messages, rounds, quick, folder)
        sys.exit(_measure({name: parts[name] for name in only or parts}, options, target))


_command("log", "The log on SQLite: 100-byte messages, 8 partitions, synchronous=FULL.", log.PARTS)
_command("groups", "Consumer groups on SQLite, in one process and in several.", groups.PARTS)
_command("engines", "Engines that are servers, with fsync.", engines.PARTS)
_command("queue", "Work queues on SQLite: 100-byte items, synchronous=FULL.", queues.PARTS)
_command("serve", "A node over SQLite: 100-byte messages, synchronous=FULL.", serve.PARTS)
_command("client", "pxrs:// through one node over SQLite, synchronous=FULL.", client.PARTS)
_command("kv", "Keys and values, embedded, with fsync: puts and gets.", kv.PARTS)
_command("sources", "A table of 100-byte rows, consumed and copied.", sources.PARTS)
_command("jetstream", "JetStream against nats-py: 100-byte messages, one server.", jetstream.PARTS)


@main.command("walks", help="The calls that a message takes on its way, counted.")
@click.option("--tree", is_flag=True, help="Print each call.")
def _walks(tree: bool) -> None:
    walks.show(click.echo, tree=tree)


def _measure(parts: Parts, options: Options, target: Path | None) -> bool:
    """Run the parts and show what they found; true if one could not be measured."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    host = report.machine(options)
    console.print(" · ".join(f"{name} {value}" for name, value in host.items()), style="dim")
    sections = {}
    for name, part in parts.items():
        with Console(stderr=True).status(name) as status:
            sections[name] = _run(name, part, options, status.update)
        report.show_section(console, sections[name])
    report.show_checks(console, [each for part in sections.values() for each in part.checks])
    if target:
        found = report.as_json(options, host, sections)
        target.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return any(section.broken for section in sections.values())


def _run(name: str, part: Callable[[Options, Say], Section], options: Options, say: Say) -> Section:
    """A part that can't be measured is reported, and the others go on."""
    try:
        return part(options, say)
    except Exception as error:
        return Section(failure=f"{name} failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
