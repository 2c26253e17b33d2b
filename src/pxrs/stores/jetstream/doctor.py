"""Examines NATS JetStream for `pxrs doctor`."""

from __future__ import annotations

from typing import Any

import msgspec

from pxrs.config import NatsSettings
from pxrs.stores.findings import Finding, note, ok, problem, warning
from pxrs.stores.jetstream.wire import NoAnswer, NotSent, Wire

_SYNC = (
    "write `sync_interval: always` into the jetstream block of every server's configuration, or "
    "accept that a power cut of a majority loses the last seconds"
)


async def examine(wire: Wire, settings: NatsSettings) -> list[Finding]:
    """Ask the server for its settings, and for the limits of the account."""
    api = f"$JS.{settings.domain}.API" if settings.domain else "$JS.API"
    account: dict[str, Any] = {}
    try:
        (answer,) = await wire.request(f"{api}.INFO", b"", settings.timeout)
        account = msgspec.json.decode(answer.data)
    except (NotSent, NoAnswer, msgspec.DecodeError) as error:
        return [
            problem(
                "permissions",
                f"JetStream does not answer this account: {error}",
                "start the servers with -js and enable JetStream for the account",
            )
        ]
    return _findings(wire.server_info(), account, settings)


def _findings(
    info: dict[str, Any], account: dict[str, Any], settings: NatsSettings
) -> list[Finding]:
    """Findings from the server's description of itself and the limits of the account."""
    return [
        ok("version", f"NATS {info.get('version', '?')}"),
        note(
            "durability",
            "acknowledged means in memory on a quorum: NATS syncs to disk every two minutes by "
            "default, and does not report its setting to clients",
            _SYNC,
        ),
        _replicas(settings.replicas, bool(info.get("cluster"))),
        _space(account),
    ]


def _replicas(replicas: int, clustered: bool) -> Finding:
    if replicas == 1 and clustered:
        return warning(
            "replicas",
            "streams of new topics are kept on one server of the cluster only",
            "put ?replicas=3 into the URL before topics are made",
        )
    if replicas == 1:
        return warning(
            "replicas",
            "one server: when it is down nothing can be sent or read, when its disk is lost so is "
            "the log",
            "run three servers and put ?replicas=3 into the URL",
        )
    return ok("replicas", f"streams of new topics are kept on {replicas} servers")


def _space(account: dict[str, Any]) -> Finding:
    used, most = int(account.get("storage", 0)), _limit(account)
    says = f"{used / 2**20:.1f} MiB are stored"
    if most > 0 and used > 0.8 * most:
        return warning("space", f"{says} of {most / 2**20:.0f}", "raise the account's max_storage")
    return ok("space", says)


def _limit(account: dict[str, Any]) -> int:
    limits = account.get("limits")
    return int(limits.get("max_storage", -1)) if isinstance(limits, dict) else -1
