"""Objects that were made before a fork."""

from __future__ import annotations

import os

import pytest

from pxrs.errors import Closed
from pxrs.forks import Origin

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Part:
    def __init__(self, origin: Origin, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        origin.on_fork(self.abandon)

    def abandon(self) -> None:
        self.log.append(self.name)


def in_child(log: list[str], origin: Origin) -> str:
    """What a forked child has abandoned, and whether it refuses the object."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            origin.refuse_child()
        except Closed as error:
            log.append(f"{origin.is_parent} {error}")
        os.write(write_end, "\n".join(log).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as said:
        words = said.read().decode()
    os.waitpid(pid, 0)
    return words


def test_a_forked_child_abandons_in_order_and_refuses_the_rest() -> None:
    log: list[str] = []
    origin = Origin("thing")
    parts = [Part(origin, log, "first"), Part(origin, log, "dropped"), Part(origin, log, "second")]
    del parts[1]
    refused = "True this thing was opened before a fork; open it again in the child"
    assert in_child(log, origin) == f"first\nsecond\n{refused}"
    origin.refuse_child()
    assert not log
    origin.close()
    assert in_child(log, origin) == refused
