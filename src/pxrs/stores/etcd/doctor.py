"""Examines an etcd cluster for `pxrs doctor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pxrs.errors import PxrsError
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.wire import rpc
from pxrs.stores.findings import Finding, note, ok, problem, warning

_FORGETFUL = ("3.5.0", "3.5.1", "3.5.2")
_LARGE = 1_500_000_000


def findings(nodes: Nodes) -> list[Finding]:
    """Size of the cluster, versions, alarms and how full it is; each of them alone may fail."""
    members = _asked(
        lambda: nodes.ask(
            lambda node: rpc.ClusterStub(node.channel).MemberList, rpc.MemberListRequest()
        )
    )
    answers = nodes.each(lambda node: rpc.MaintenanceStub(node.channel).Status, rpc.StatusRequest())
    alarms = _asked(
        lambda: nodes.ask(lambda node: rpc.MaintenanceStub(node.channel).Alarm, rpc.AlarmRequest())
    )
    statuses = {
        host: answer for host, answer in answers.items() if not isinstance(answer, PxrsError)
    }
    found = [_version(host, status.version) for host, status in statuses.items()]
    found += [
        _unknown("version", f"{host} did not tell its version", answer)
        for host, answer in answers.items()
        if isinstance(answer, PxrsError)
    ]
    if isinstance(members, PxrsError):
        found.append(_unknown("cluster", "this user may not ask for the members", members))
    else:
        asked = {status.header.member_id for status in statuses.values()}
        if others := [each.name for each in members.members if each.ID not in asked]:
            found.append(
                note(
                    "version",
                    f"not asked: {', '.join(others)}",
                    "name all nodes of the cluster in the URL",
                )
            )
        found.append(_cluster(len(members.members)))
    found.append(
        ok("durability", "a write is synced on a majority, unless --unsafe-no-fsync is set")
    )
    if isinstance(alarms, PxrsError):
        found.append(_unknown("alarms", "this user may not ask for alarms", alarms))
    else:
        found.append(_alarms(len(alarms.alarms)))
    if statuses:
        found.append(_size(max(status.dbSize for status in statuses.values())))
    return found


def _asked(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except PxrsError as error:
        return error


def _unknown(check: str, says: str, error: PxrsError) -> Finding:
    return note(check, f"{says}: {error}", "that is fine if the user may use its own prefix only")


def _version(host: str, version: str) -> Finding:
    if version in _FORGETFUL:
        return problem(
            "version",
            f"etcd {version} at {host}: a node that is killed under load may miss writes which the "
            "others have (etcd's issue 13766)",
            "upgrade to 3.5.6 or later",
        )
    return ok("version", f"etcd {version} at {host}")


def _cluster(members: int) -> Finding:
    if members == 1:
        return warning(
            "cluster",
            "one node: when it is down, no process can join, commit or take over",
            "run three nodes, and name all of them in the URL",
        )
    if members % 2 == 0:
        return note(
            "cluster",
            f"{members} nodes tolerate no more losses than {members - 1}",
            "use an odd number of nodes",
        )
    return ok("cluster", f"{members} nodes, {members // 2} of which may be lost")


def _alarms(number: int) -> Finding:
    if number:
        return problem(
            "alarms",
            "etcd has raised an alarm and refuses writes: it is out of its quota, or damaged",
            "etcdctl alarm list; compact and defragment, then etcdctl alarm disarm",
        )
    return ok("alarms", "none")


def _size(size: int) -> Finding:
    says = f"the database has {size / 2**20:.1f} MiB"
    if size > _LARGE:
        return warning(
            "space", f"{says}, the quota is 2 GiB by default", "compact and defragment it"
        )
    return ok("space", says)
