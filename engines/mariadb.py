"""MariaDB."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import version_of
from engines.process import Command, run_as
from engines.sources import debian, in_path, new_data

_PACKAGES = (
    "mariadb-server-core",
    "mariadb-client-core",
    "libmariadb3",
    "libaio1",
    "libnuma1",
    "liburing2",
    "libpcre2-8-0",
    "libedit2",
    "libncurses6",
)
USER = "root"


def galera(port: int) -> dict[str, str]:
    """The settings of the first node of a Galera cluster, which listens at this port."""
    provider = debian("galera", ["galera-4"]) / "usr/lib/galera/libgalera_smm.so"
    return {
        "wsrep-on": "ON",
        "wsrep-provider": str(provider),
        "wsrep-provider-options": f"gmcast.listen_addr=tcp://{HOST}:{port}",
        "wsrep-cluster-address": "gcomm://",
        "wsrep-node-address": HOST,
        "binlog-format": "ROW",
    }


def build(settings: Mapping[str, str] | None = None) -> Engine:
    """`settings`: more options of mariadbd."""
    base, origin = _find()
    version = version_of(_server(base), "--version", env=_libraries(base))
    return Engine(
        Plan(
            name="mariadb",
            version=version,
            origin=origin,
            ports=1,
            prepare=partial(_prepare, base, version, settings or {}),
            url=lambda ports: f"mysql+pymysql://{USER}@{HOST}:{ports[0]}/mysql",
        )
    )


def _find() -> tuple[Path, str]:
    folder = in_path("mariadbd", "mariadb-install-db")
    if folder is not None:
        return Path("/usr"), "system"
    return debian("mariadb", _PACKAGES) / "usr", "Debian mariadb-server-core"


def _server(base: Path) -> Path:
    return base / "sbin" / "mariadbd"


def _libraries(base: Path) -> dict[str, str]:
    """Libraries that came with the packages, for a system that lacks them."""
    if base == Path("/usr"):
        return {}
    folders = {str(path.parent) for path in base.parent.glob("**/lib/*/*.so*")}
    return {"LD_LIBRARY_PATH": ":".join(sorted(folders))}


def _prepare(
    base: Path, version: str, settings: Mapping[str, str], folder: Path, ports: Sequence[int]
) -> list[Command]:
    data = folder / "data"
    common = [
        "--no-defaults",
        f"--basedir={base}",
        f"--datadir={data}",
        f"--lc-messages-dir={base / 'share/mysql'}",
        # Two that start at once would remove each other's files in a shared one.
        f"--tmpdir={folder}",
    ]
    as_root = ["--user=root"] if os.getuid() == 0 else []
    install = [str(base / "bin" / "mariadb-install-db"), *common, "--skip-test-db", *as_root]
    install += ["--auth-root-authentication-method=normal"]
    new_data(f"mariadb-{version}", data, lambda: run_as(None, install, _libraries(base)))
    options = {
        "bind-address": HOST,
        "port": str(ports[0]),
        "socket": str(folder / "socket"),
        "pid-file": str(folder / "pid"),
        "plugin-dir": str(base / "lib/mysql/plugin"),
        "innodb-flush-log-at-trx-commit": "2",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "32M",
        "skip-name-resolve": "ON",
        "max-connections": "300",
        "character-set-server": "utf8mb4",
        **({"user": "root"} if os.getuid() == 0 else {}),
        **settings,
    }
    return [
        Command(
            argv=[str(_server(base)), *common]
            + [f"--{name}={value}" for name, value in options.items()],
            ready=partial(_answers, ports[0]),
            env=_libraries(base),
        )
    ]


def _answers(port: int) -> bool:
    import pymysql

    try:
        pymysql.connect(host=HOST, port=port, user=USER, connect_timeout=2).close()
    except pymysql.OperationalError:
        return False
    return True
