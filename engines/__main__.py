"""`python -m engines`: start each engine once and say what it is.

`python -m engines keep etcd nats`: start these, print a URL each, and keep them until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress

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


def keep(names: list[str]) -> int:
    """Until Ctrl-C, or until somebody ends this process: the engines die with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as running:
        for name in names:
            engine = running.enter_context(build(name))
            engine.start()
            print(engine.url, flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(keep(words[1:]) if words[:1] == ["keep"] else main(words))
