"""PgBouncer in transaction mode, in front of a PostgreSQL that runs already."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psycopg

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import version_of
from engines.process import Command
from engines.sources import debian, in_path

_PACKAGES = ("pgbouncer", "libevent-2.1-7", "libc-ares2")
# It refuses to run as root.
_UNPRIVILEGED = "nobody"


def build(server: str, pool_size: int = 4) -> Engine:
    """Few connections to `server` (a URL), shared by all clients, transaction by transaction."""
    program, libraries, origin = _find()
    user = server.split("://")[1].split("@")[0]
    return Engine(
        Plan(
            name="pgbouncer",
            version=version_of(program, "--version", env=_environment(libraries)),
            origin=origin,
            ports=1,
            prepare=partial(_prepare, program, libraries, server, pool_size),
            url=lambda ports: f"postgresql://{user}@{HOST}:{ports[0]}",
        )
    )


def _find() -> tuple[Path, Path | None, str]:
    folder = in_path("pgbouncer")
    if folder is not None:
        return folder / "pgbouncer", None, "system"
    root = debian("pgbouncer", _PACKAGES)
    libraries = next((root / "usr/lib").glob("*-linux-gnu"))
    return root / "usr/sbin/pgbouncer", libraries, "Debian pgbouncer"


def _prepare(
    program: Path,
    libraries: Path | None,
    server: str,
    pool_size: int,
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    user = _UNPRIVILEGED if os.getuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)
        folder.chmod(0o755)
    known = psycopg.conninfo.conninfo_to_dict(server)
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"""[databases]
* = host={known["host"]} port={known["port"]} user={known["user"]}
[pgbouncer]
listen_addr = {HOST}
listen_port = {ports[0]}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 200
"""
    )
    place = {**known, "host": HOST, "port": ports[0], "connect_timeout": 2}
    return [
        Command(
            argv=[str(program), str(config)],
            ready=partial(_answers, psycopg.conninfo.make_conninfo("", **place)),
            env=_environment(libraries),
            user=user,
        )
    ]


def _environment(libraries: Path | None) -> dict[str, str]:
    return {} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)}


def _answers(conninfo: str) -> bool:
    try:
        psycopg.connect(conninfo).close()
    except psycopg.OperationalError:
        return False
    return True
