"""`./run bench NAME`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from bench import log, report
from bench.harness import Options, Say, Section


@click.group()
def main() -> None:
    """Ratios to the bare limit and to peers, all in one run."""


@main.command("log")
@click.option("--messages", default=500_000, show_default=True, help="Per run of a contestant.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--quick", is_flag=True, help="Small everywhere: does it run, not how fast.")
@click.option("--only", multiple=True, type=click.Choice(list(log.PARTS)), help="Repeatable.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write all figures here.")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the databases go; the default temporary folder may not be on a disk.",
)
def bench_log(
    messages: int,
    rounds: int,
    quick: bool,
    only: tuple[str, ...],
    target: Path | None,
    folder: Path | None,
) -> None:
    """The log on SQLite: 100-byte messages, 8 partitions, synchronous=FULL."""
    if quick:
        messages, rounds = min(messages, 100_000), min(rounds, 3)
    options = Options(messages, rounds, quick, folder)
    console = Console(width=None if sys.stdout.isatty() else 120)
    host = report.machine(options)
    console.print(" · ".join(f"{name} {value}" for name, value in host.items()), style="dim")
    sections = {}
    for name in only or log.PARTS:
        with Console(stderr=True).status(name) as status:
            sections[name] = _run(name, options, status.update)
        report.show_section(console, sections[name])
    report.show_checks(console, [each for part in sections.values() for each in part.checks])
    if target:
        found = report.as_json(options, host, sections)
        target.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    sys.exit(any(section.broken for section in sections.values()))


def _run(name: str, options: Options, say: Say) -> Section:
    """A part that can't be measured is reported, and the others go on."""
    try:
        return log.PARTS[name](options, say)
    except Exception as error:
        return Section(failure=f"{name} failed: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
