"""Examines an etcd cluster for `pxrs doctor`."""

from __future__ import annotations

from pxrs.errors import PxrsError
from pxrs.stores.etcd.nodes import Nodes
from pxrs.stores.etcd.wire import rpc
from pxrs.stores.findings import Finding, note, ok, problem, warning

_FORGETFUL = ("3.5.0", "3.5.1", "3.5.2")
_LARGE = 1_500_000_000


def findings(nodes: Nodes) -> list[Finding]:
    """Size of the cluster, version, alarms and how full it is."""
    try:
        members = nodes.ask(
            lambda node: rpc.ClusterStub(node.channel).MemberList, rpc.MemberListRequest()
        )
        status = nodes.ask(
            lambda node: rpc.MaintenanceStub(node.channel).Status, rpc.StatusRequest()
        )
        alarms = nodes.ask(lambda node: rpc.MaintenanceStub(node.channel).Alarm, rpc.AlarmRequest())
    except PxrsError as error:
        return [
            note(
                "cluster",
                f"the cluster does not tell about itself to this user: {error}",
                "that is fine where the user may use its own prefix only",
            )
        ]
    return [
        _version(status.version),
        _cluster(len(members.members)),
        ok("durability", "a write is synced on a majority, unless --unsafe-no-fsync is set"),
        _alarms(len(alarms.alarms)),
        _size(status.dbSize),
    ]


def _version(version: str) -> Finding:
    if version in _FORGETFUL:
        return problem(
            "version",
            f"etcd {version}: a node that is killed under load may miss writes which the others "
            "have (etcd's issue 13766)",
            "upgrade to 3.5.6 or later",
        )
    return ok("version", f"etcd {version}")


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
            f"{members} nodes bear no more losses than {members - 1}",
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
