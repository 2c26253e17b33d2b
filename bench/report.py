"""What a run found: tables for people, JSON for programs."""

from __future__ import annotations

import os
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.harness import Check, Comparison, Options, Section


def machine(options: Options) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "platform": f"{sys.platform} {platform.machine()}",
        "fdatasync_us": round(_fdatasync(options.folder)),
    }


def _fdatasync(folder: Path | None) -> float:
    """Median microseconds to make 4 KB durable: near nothing when the folder is not on a disk."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return 1e6 * median(_write_through(file.fileno()) for _ in range(100))


def _write_through(descriptor: int) -> float:
    started = perf_counter()
    os.pwrite(descriptor, bytes(4096), 0)
    os.fdatasync(descriptor)
    return perf_counter() - started


def show_section(console: Console, section: Section) -> None:
    for comparison in section.comparisons:
        console.print(_comparison(comparison))
    for note in section.notes:
        console.print(Text(note, style="dim"))
    if section.failure:
        console.print(Text(section.failure, style="red"))


def _comparison(comparison: Comparison) -> Table:
    table = Table(title=comparison.title, title_justify="left")
    table.add_column("")
    table.add_column("msg/s", justify="right")
    table.add_column("µs each", justify="right")
    table.add_column("fastest ÷ slowest", justify="right")
    table.add_column("", style="dim")
    for contestant in comparison.contestants:
        name = contestant.name
        if reason := comparison.failures.get(name):
            table.add_row(name, "failed", "", "", Text(reason, style="red"))
            continue
        rate = median(comparison.rates[name])
        spread = f"{comparison.spread(name):.2f}"
        table.add_row(name, f"{rate:,.0f}", f"{1e6 / rate:,.2f}", spread, contestant.note)
    return table


def show_checks(console: Console, checks: Iterable[Check]) -> None:
    table = Table(title="against the targets", title_justify="left")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    for check in checks:
        measured = "—" if check.value is None else f"{check.value:,.2f} {check.unit}".strip()
        sign = "≥" if check.sense == "at least" else "≤"
        mark = Text("✓", style="green") if check.ok else Text("✗", style="bold red")
        target = f"{sign} {check.target:g} {check.unit}".strip()
        table.add_row(check.name, measured, target, mark)
    console.print(table)


def as_json(
    options: Options, host: Mapping[str, Any], sections: Mapping[str, Section]
) -> dict[str, Any]:
    """Everything measured, every round of it."""
    return {
        "machine": dict(host),
        "messages": options.messages,
        "rounds": options.rounds,
        "quick": options.quick,
        "sections": {name: _section(section) for name, section in sections.items()},
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "comparisons": [
            {"title": each.title, "msg/s": each.rates, "failures": each.failures}
            for each in section.comparisons
        ],
        "checks": [asdict(check) | {"ok": check.ok} for check in section.checks],
        "notes": section.notes,
        "figures": section.figures,
        "failure": section.failure,
    }
