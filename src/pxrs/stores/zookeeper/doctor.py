"""Examines a ZooKeeper ensemble for `pxrs doctor`."""

from __future__ import annotations

from pxrs.errors import PxrsError
from pxrs.stores.findings import Finding, note, ok, warning
from pxrs.stores.zookeeper.link import Link


def findings(link: Link) -> list[Finding]:
    """Ask the server that this handle is connected to."""
    found = [ok("durability", "a write is synced on a majority, unless forceSync=no is set")]
    try:
        answer: str = link.client.command(b"srvr")
    except (PxrsError, OSError, EOFError) as error:
        answer = ""
        found.append(note("version", f"the server can't be asked: {error}"))
    found += _server(answer)
    return found


def _server(answer: str) -> list[Finding]:
    fields = dict(line.split(": ", 1) for line in answer.splitlines() if ": " in line)
    if "Mode" not in fields:
        return [
            note(
                "cluster",
                "the server does not answer 'srvr', so it is not known whether it is the only one",
                "allow it: 4lw.commands.whitelist=srvr",
            )
        ]
    version = fields.get("Zookeeper version", "?").partition(",")[0]
    return [ok("version", f"ZooKeeper {version}"), _mode(fields["Mode"])]


def _mode(mode: str) -> Finding:
    if mode == "standalone":
        return warning(
            "cluster",
            "one server: when it is down, no process can join, commit or take over",
            "run three servers, and name all of them in the URL",
        )
    return ok("cluster", f"an ensemble; connected to a {mode}")
