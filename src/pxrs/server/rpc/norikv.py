"""`norikv.v1`: keys and values for existing NoriKV clients, as these expect them.

Every node answers every key. A read needs no leader: it asks the store. A write goes to the node
that leads the key, over HTTP as between any nodes; where that node can't be reached and surely has
not got the write, this one makes it. The fence is in the store, so that is safe.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

import grpc
import msgspec

from pxrs.core.kv import SHARDS, Change, Written, slot_of_shard
from pxrs.errors import InvalidRequest, OutcomeUnknown, VersionMismatch, quoted
from pxrs.server.cluster import Cluster, ClusterView, NodeInfo
from pxrs.server.keys import KeyService
from pxrs.server.rest.forwarding import NOT_SENT, Forwarding
from pxrs.server.rest.problems import HttpError, Problem
from pxrs.server.rest.routes import Answer, Need, of_key
from pxrs.server.rest.v1_keys import DeleteAnswer, KeyVersion, PutAnswer, PutValue
from pxrs.server.rpc.calls import Caller, Calls, ProblemElsewhere, Refused
from pxrs.server.rpc.protos import decoded, message_classes
from pxrs.types import ABSENT, Version

SERVICES = ("norikv.v1.Kv", "norikv.v1.Meta", "norikv.v1.Admin")
LEADER_HINT = "leader-hint"

# The names that its clients use, and those that its server knows.
_CONSISTENCIES = {
    "": "lease", "lease": "lease", "linearizable": "linearizable", "stale_ok": "stale_ok",
    "strong": "linearizable", "eventual": "stale_ok", "bounded_staleness": "stale_ok",
}  # fmt: skip
# Clients in JavaScript read numbers as doubles. No version is as large, so none matches.
_LARGEST = 2**53 - 1
# Clients contradict each other; only the language of their gRPC tells them apart. In the first
# languages a missing key is an error, in all others an empty answer. In the second ones a
# conditional delete of a missing key has deleted nothing, in all others it is a mismatch.
_LANGUAGE = re.compile(r"(?:^|\s)grpc-([a-z]+)")
_MISSING_IS_AN_ERROR = ("java", "go")
_MISSING_IS_NO_MISMATCH = ("python", "go")
# Codes with which the other node answers before it does anything.
_NOT_DONE = ("leader_moving", "starting", "stopping")

_KINDS = message_classes("norikv")


class NoriKv:
    """The services `Kv`, `Meta` and `Admin`. Used by one event loop."""

    def __init__(
        self, calls: Calls, keys: KeyService, cluster: Cluster, forwarding: Forwarding
    ) -> None:
        self._calls = calls
        self._keys = keys
        self._cluster = cluster
        self._forwarding = forwarding
        self._here = cluster.here
        self._view = b""
        self._news = asyncio.Event()
        self._ended = False

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        kv, meta, admin = SERVICES
        service = self._calls.service
        return [
            service(kv, {"Put": self.put, "Get": self.get, "Delete": self.delete}, large="Get"),
            service(meta, {}, {"WatchCluster": self.watch_cluster}),
            service(admin, {"TransferShard": self.transfer, "SnapshotShard": self.snapshot}),
        ]

    # Kv

    async def put(self, request: bytes, caller: Caller) -> bytes:
        asked = decoded(_KINDS["PutRequest"], request)
        caller.check(of_key(asked.key, "write"))
        ttl = asked.ttl_ms / 1000 if asked.ttl_ms else None
        change = self._keys.put_change(
            asked.key, asked.value, _if_match(asked), ttl, asked.idempotency_key or None
        )
        written = await self._write(change, caller)
        answer = _KINDS["PutResponse"]()
        _set_version(answer, written.version)
        return _encoded(answer)

    async def get(self, request: bytes, caller: Caller) -> bytes:
        asked = decoded(_KINDS["GetRequest"], request)
        caller.check(of_key(asked.key, "read"))
        consistency = _CONSISTENCIES.get(asked.consistency)
        if consistency is None:
            raise InvalidRequest(
                "consistency must be lease, linearizable or stale_ok, "
                f"got {quoted(asked.consistency)}"
            )
        self._led_elsewhere(asked.key, caller)
        entry = await self._keys.get(asked.key, consistency)
        answer = _KINDS["GetResponse"]()
        if entry is not None:
            answer.value = entry.value
            _set_version(answer, entry.version)
        elif _language(caller) in _MISSING_IS_AN_ERROR:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"key {quoted(asked.key)} does not exist")
        return _encoded(answer)

    async def delete(self, request: bytes, caller: Caller) -> bytes:
        asked = decoded(_KINDS["DeleteRequest"], request)
        caller.check(of_key(asked.key, "write"))
        change = self._keys.delete_change(
            asked.key, _if_match(asked), asked.idempotency_key or None
        )
        answer = _KINDS["DeleteResponse"]()
        try:
            written = await self._write(change, caller)
        except (VersionMismatch, ProblemElsewhere) as error:
            if _language(caller) not in _MISSING_IS_NO_MISMATCH:
                raise
            if isinstance(error, ProblemElsewhere) and error.problem.code != "version_mismatch":
                raise
            if await self._keys.get(asked.key) is not None:
                raise
            return _encoded(answer)
        answer.tombstoned = written.existed
        if written.existed:
            _set_version(answer, written.version)
        return _encoded(answer)

    def _led_elsewhere(self, key: bytes, caller: Caller) -> NodeInfo | None:
        """The other node that leads the key; NOT_LEADER for a caller that goes there itself."""
        leader = self._cluster.other_leader_of(key)
        if leader is None:
            return None
        if caller.follows and leader.grpc_address:
            raise Refused(
                grpc.StatusCode.UNAVAILABLE,
                f"NOT_LEADER: the node at {leader.grpc_address} leads this key",
                {LEADER_HINT: leader.grpc_address},
            )
        return leader

    async def _write(self, change: Change, caller: Caller) -> Written:
        leader = self._led_elsewhere(change.key, caller)
        try:
            made = change
            if leader is not None and self._forwarding.knows(leader.address):
                made = _repeatable(change)
                written = await self._pass_on(leader.address, made, caller)
                if written is not None:
                    return written
            return await self._keys.write(made)
        except OutcomeUnknown as error:
            if not change.once:
                raise
            # The client may repeat it: it happens once.
            raise Refused(
                grpc.StatusCode.UNAVAILABLE, "it is not known whether this was done; repeat it"
            ) from error

    async def _pass_on(self, address: str, change: Change, caller: Caller) -> Written | None:
        """The leader's answer; None if it did not get the write, or if that is safe to repeat."""
        token = "" if caller.identity is None else caller.identity.name
        method, path, body = _as_http(change)
        try:
            answer = await self._forwarding.send(
                address, method, path, {"Content-Type": "application/json"}, body, token
            )
        except HttpError as error:
            if error.code == NOT_SENT or change.once:
                return None
            raise OutcomeUnknown(f"{error}; whether the write was done is not known") from None
        if answer.status == 200:
            return _written(change, answer)
        problem = _problem(answer)
        if problem.code in _NOT_DONE:
            return None
        if problem.status == 504:
            raise OutcomeUnknown(problem.detail)
        raise ProblemElsewhere(problem)

    # Meta

    def changed(self, view: ClusterView) -> None:
        """Wake every watch with a new view."""
        self._view = encode_view(view, self._here)
        self._wake()

    def end_watches(self) -> None:
        """Let every stream end: the node is stopping.

        Without an error: after one, clients in JavaScript open two streams for each.
        """
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def watch_cluster(self, request: bytes, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Yields the view, and each new one; a client that is slow gets the latest."""
        decoded(_KINDS["ClusterView"], request)
        told = b""
        while not self._ended:
            # Taken first: what changes while it is sent is not missed.
            news = self._news
            if self._view != told:
                told = self._view
                yield told
            await news.wait()

    # Admin

    async def transfer(self, request: bytes, caller: Caller) -> bytes:
        self._check_admin(request, caller)
        raise Refused(
            grpc.StatusCode.UNIMPLEMENTED, "nodes share their slots themselves; start or stop one"
        )

    async def snapshot(self, request: bytes, caller: Caller) -> bytes:
        """Only checks the call: the store holds everything already, so nothing is left to do."""
        shard = self._check_admin(request, caller)
        if shard >= SHARDS:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"there is no shard {shard}")
        leader = self._cluster.view.leader_of(slot_of_shard(shard))
        if leader is None or leader.name != self._here.name:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"this node does not lead shard {shard}"
            )
        answer = _KINDS["ShardInfo"](id=shard)
        answer.replicas.add(node_id=self._here.name, leader=True)
        return _encoded(answer)

    def _check_admin(self, request: bytes, caller: Caller) -> int:
        shard: int = decoded(_KINDS["ShardInfo"], request).id
        caller.check(Need("cluster", "shards", "admin"))
        return shard


def encode_view(view: ClusterView, here: NodeInfo) -> bytes:
    """The view as clients get it: nodes that serve gRPC, and one of them leads each shard.

    They take a view only if its epoch is above the one they have, which is 0 at first. They route
    by shard, to its leader; `here` stands for one that is not there or does not serve gRPC.
    """
    nodes = {node.name: node for node in view.nodes if node.grpc_address} | {here.name: here}
    answer = _KINDS["ClusterView"](epoch=max(1, view.epoch))
    for node in nodes.values():
        role = "leader" if node.name in view.slots else "follower"
        answer.nodes.add(id=node.name, addr=node.grpc_address, role=role)
    for shard in range(SHARDS):
        leader = view.slots[slot_of_shard(shard)]
        name = leader if leader in nodes else here.name
        answer.shards.add(id=shard).replicas.add(node_id=name, leader=True)
    return _encoded(answer)


def _language(caller: Caller) -> str:
    found = _LANGUAGE.search(caller.user_agent)
    return found[1] if found else ""


def _if_match(asked: Any) -> Version | None:
    if not asked.HasField("if_match"):
        return None
    given = asked.if_match
    return Version(min(given.term, _LARGEST), min(given.index, _LARGEST))


def _set_version(answer: Any, version: Version) -> None:
    shown = answer.version
    shown.term, shown.index = version.term, version.index


def _encoded(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _repeatable(change: Change) -> Change:
    """The change with an idempotency key, if that makes it safe to write it here after all.

    Not a change that may be refused here and succeed later, at a leader that was only frozen: with
    a key of its own each of its refusals, also those that the leader answers, would be a commit.
    """
    if change.once or change.value is None or change.if_match == ABSENT:
        return change
    return change._replace(once=f"passed-on-{secrets.token_hex(16)}")


def _as_http(change: Change) -> tuple[str, str, bytes]:
    """The write as nodes send it to each other: method, path and body."""
    path = f"/v1/kv/{base64.urlsafe_b64encode(change.key).decode()}?encoding=base64url"
    if change.value is None:
        if change.if_match is not None:
            path += f"&if_match={change.if_match.term}.{change.if_match.index}"
        if change.once:
            path += f"&idempotency_key={quote(change.once, safe='')}"
        return "DELETE", path, b""
    version = change.if_match
    body = PutValue(
        value_base64=base64.b64encode(change.value).decode(),
        if_match=None if version is None else KeyVersion(version.term, version.index),
        ttl=change.ttl_ms / 1000 if change.ttl_ms else None,
        idempotency_key=change.once or None,
    )
    return "PUT", path, msgspec.json.encode(body)


def _written(change: Change, answer: Answer) -> Written:
    if change.value is None:
        deleted = msgspec.json.decode(answer.body, type=DeleteAnswer)
        return Written(Version(deleted.version.term, deleted.version.index), deleted.deleted)
    put = msgspec.json.decode(answer.body, type=PutAnswer)
    return Written(Version(put.version.term, put.version.index))


def _problem(answer: Answer) -> Problem:
    try:
        return msgspec.json.decode(answer.body, type=Problem)
    except msgspec.DecodeError:
        return Problem(title="no answer", status=answer.status, code="")
