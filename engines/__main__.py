"""`python -m engines`: start each engine once and say what it is."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console
from rich.table import Table

from engines import NAMES, Missing, build


def main(names: list[str]) -> int:
    """Start, look, stop; how many could not be had."""
    table = Table("engine", "version", "where from", "start-up", "stop")
    missing = 0
    for name in names or NAMES:
        try:
            engine = build(name)
        except Missing as why:
            missing += 1
            table.add_row(name, "–", f"missing: {why}", "–", "–")
            continue
        with engine:
            began = time.monotonic()
            engine.start()
            up = time.monotonic()
            engine.stop()
            down = time.monotonic()
        table.add_row(
            name, engine.version, engine.origin, f"{up - began:.2f} s", f"{down - up:.2f} s"
        )
    Console(width=100).print(table)
    return missing if os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
