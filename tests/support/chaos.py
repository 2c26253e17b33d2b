"""`./run chaos`: a group of three members while three etcd nodes are split, frozen and killed."""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from support.split_group import FAULTS, SplitGroup


def main(argv: Sequence[str] | None = None) -> None:
    """Prints what happens; ends with an AssertionError that says what was broken."""
    parser = argparse.ArgumentParser(prog="./run chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="faults, one after the other")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    given = parser.parse_args(argv)
    random = Random(given.seed)
    print(f"seed {given.seed}, {given.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        group = SplitGroup(Path(folder), to_be_killed=True)
        try:
            for number in range(given.rounds):
                group.settle()
                fault = random.choice(FAULTS)
                began = time.monotonic()
                fault(group, random)
                group.network.heal(reset=random.random() < 0.5)
                took = time.monotonic() - began
                print(
                    f"{number + 1:4} {fault.__name__:15} {took:5.1f} s  {group.sent} sent",
                    flush=True,
                )
            group.settle()
            group.finish()
            group.judge()
        except BaseException:
            print(f"failed; again: ./run chaos --seed {given.seed} --rounds {given.rounds}")
            raise
        finally:
            group.close()
    print(f"{group.sent} messages: none lost, one owner per epoch, no checkpoint went back")


if __name__ == "__main__":
    main()
