"""Three nodes under load, one killed, one frozen and woken, one restarted: nothing acknowledged is
lost, no stale commit lands, and members go on elsewhere under their names."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

import pxrs
from pxrs.core.records import Claim, Head, MemberRecord, decode, head_key
from support.child import PATIENCE
from support.node import Client, NodeProcess
from support.remote import (
    APP,
    GROUP,
    PARTITIONS,
    TOPIC,
    Actor,
    AnyNode,
    DmqMember,
    EmbeddedMember,
    FencedMember,
    History,
    Observer,
    OnceProducer,
    PlainProducer,
)

pytestmark = [pytest.mark.long, pytest.mark.thorough]

NAMES = ("node-0", "node-1", "node-2")
MAIL = "/v1/queues/mail"
# How long others wait for a node that does not say that it is gone, and for a silent member.
SETTINGS: dict[str, Any] = {"session_ttl": 2, "session_timeout": 20}


class World:
    """Three nodes, their clients, and the store behind them."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        self._stack = stack
        self.px = stack.enter_context(pxrs.connect(url))
        self.px.topics.create(TOPIC, partitions=PARTITIONS)
        self.nodes: dict[str, NodeProcess] = {}
        stack.callback(self._kill_all)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, NAMES))
        self._at = {name: node.endpoint for name, node in self.nodes.items()}
        self.history = History()
        client = self.client("node-0")
        client.post(
            "/api/v1/metadata/consumer-groups/find-or-create", {"topic": TOPIC, "appId": APP}
        )
        self.members = [
            FencedMember(self.history, "a", self.any_node(0)),
            FencedMember(self.history, "b", self.any_node(1)),
            DmqMember(self.history, "c", self.any_node(2)),
            EmbeddedMember(self.history, self.any_node(0), self.px),
        ]
        self.producers: list[Actor] = [
            OnceProducer(self.history, 1, self.any_node(0)),
            OnceProducer(self.history, 2, self.any_node(1)),
            PlainProducer(self.history, self.any_node(2)),
        ]
        self.observer = Observer(self.history, self.any_node(0), self.px)
        self.actors: list[Actor] = [*self.members, *self.producers, self.observer]
        stack.callback(self._stop_all)
        for actor in self.actors:
            actor.start()

    # Nodes

    def start(self, name: str) -> None:
        """Start a node, at its place if it had one."""
        before = self.nodes.get(name)
        listen = str(before.endpoint) if before is not None else "127.0.0.1:0"
        self.nodes[name] = NodeProcess(self.url, "--node-id", name, listen=listen, **SETTINGS)

    def client(self, name: str) -> Client:
        client = self.nodes[name].client()
        self._stack.callback(client.close)
        return client

    def any_node(self, first: int) -> AnyNode:
        return AnyNode(list(self._at.values()), first)

    def await_slots(self, *names: str) -> None:
        """Until exactly these nodes share all slots, and each of them says so."""
        for client in map(self.client, names):

            def shared(client: Client = client) -> bool:
                return set(client.get("/v1/cluster").json["slots"]) == {*names}

            self.wait(shared)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds, looking whenever the records of nodes or members change."""
        watch = self.px.stores.coord.watch(
            "claims/", "members/", f"group/{GROUP}", "group/_pxrs.nodes"
        )
        while not condition():
            assert watch.wait(PATIENCE), "nothing happens"
        watch.close()

    # The group

    @property
    def head(self) -> Head:
        found = self.px.stores.coord.get(head_key(GROUP))
        return decode(found, Head) if found is not None else Head()

    def records(self) -> dict[str, MemberRecord]:
        prefix = f"members/{GROUP}/"
        return {
            record.key.removeprefix(prefix): decode(record, MemberRecord)
            for record in self.px.stores.coord.list(prefix)
        }

    def claims(self) -> dict[int, Claim]:
        return {
            int(record.key.rpartition("/")[2]): decode(record, Claim)
            for record in self.px.stores.coord.list(f"claims/{GROUP}/")
        }

    def settled(self) -> bool:
        """All members are there, and all partitions are owned by those who shall."""
        records, meant = self.records(), self.head.owner_of()
        if len(records) != 4 or {*meant.values()} != records.keys():
            return False
        owners = {part.partition: records[name].id for part, name in meant.items()}
        return {number: claim.owner for number, claim in self.claims().items()} == owners

    def host(self) -> str:
        """The node that holds member `a`."""
        address = self.records()["a"].node
        (name,) = [name for name, at in self._at.items() if str(at) == address]
        return name

    def go_on(self) -> None:
        """Until everybody has got further."""
        self.history.await_progress([member.name for member in self.members], 100)

    # Ending

    def finish(self) -> None:
        """End the load, and wait until everything is handled and committed."""
        for producer in self.producers:
            producer.stop()
        ends = {part.partition: part.end for part in self.px.topics.describe(TOPIC).partitions}
        self.wait(lambda: {n: c.checkpoint for n, c in self.claims().items()} == ends)

    def _stop_all(self) -> None:
        for actor in self.actors:
            actor.stop()

    def _kill_all(self) -> None:
        for name, node in self.nodes.items():
            print(f"--- {name}\n{node.kill()}")


@pytest.fixture
def world(nodes_url: str) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(nodes_url, stack)


def test_nodes_are_killed_frozen_and_restarted(world: World) -> None:
    world.await_slots(*NAMES)
    world.wait(world.settled)
    generation = world.head.generation
    world.go_on()

    killed = world.host()
    others = [name for name in NAMES if name != killed]
    lease = take_mail(world, killed)
    world.nodes[killed].kill()
    world.await_slots(*others)
    world.go_on()
    world.wait(world.settled)
    assert world.host() in others
    assert world.head.generation == generation

    world.start(killed)
    world.await_slots(*NAMES)
    # Not before: where nobody notices the death, items come back when a session has run out.
    check_mail(world, lease, *others)
    frozen = world.host()
    stale = StaleCommit(world, frozen)
    others = [name for name in NAMES if name != frozen]
    world.await_slots(*others)
    world.go_on()
    world.wait(world.settled)
    assert world.host() in others
    stale.wake_and_check()
    world.await_slots(*NAMES)
    world.go_on()
    assert world.head.generation == generation

    restarted = world.host()
    logged = world.nodes[restarted].terminate()
    assert world.nodes[restarted].process.returncode == 0, logged
    world.go_on()
    world.start(restarted)
    world.await_slots(*NAMES)
    world.go_on()

    world.finish()
    world.wait(world.settled)
    assert world.head.generation == generation
    world._stop_all()
    assert not world.history.failures
    world.history.check(world.px)


def take_mail(world: World, name: str) -> str:
    """A lease of an item, taken on a node."""
    client = world.client(name)
    put = client.post(f"{MAIL}/items", {"items": [{"value": "to ada"}]})
    assert put.status == 200, put.body
    taken = client.post(f"{MAIL}/take", {"lease": 300}).json
    assert [item["value"] for item in taken["items"]] == ["to ada"]
    lease: str = taken["lease"]
    return lease


def check_mail(world: World, lease: str, here: str, there: str) -> None:
    """The item of a dead node's lease comes back, and a late commit is refused."""
    again = world.client(here).post(f"{MAIL}/take", {"wait": 20}).json
    assert [item["deliveries"] for item in again["items"]] == [2]
    late = world.client(there).post(f"/v1/leases/{lease}/commit", {})
    assert (late.status, late.json["code"]) == (409, "lease_lost")
    done = world.client(there).post(f"/v1/leases/{again['lease']}/commit", {})
    assert done.status == 200, done.body


class StaleCommit:
    """Commits that a node gets and does not look at before others own the partitions.

    One of member `a`, with fences, and one of the DMQ member `c`, which has none: it names only
    the member, whose progress through another node it must not undo.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._node = world.nodes[name]
        told = world.client(name).get(f"/v1/groups/{GROUP}/members/a").json["partitions"]
        self._epochs = {part["partition"]: part["epoch"] for part in told}
        commits = [{"fence": part["fence"], "offset": part["checkpoint"] + 1} for part in told]
        dmq = "/api/v1/consumer-group"
        member = f"c~{GROUP}"
        assigned = world.client(name).get(f"{dmq}/assignment/{member}").json
        self._unfenced = {int(part): at + 1 for part, at in assigned["offsets"].items()}
        assert self._unfenced
        self._node.freeze()
        self._socket = self._send(f"/v1/groups/{GROUP}/commits", {"commits": commits})
        offsets = {str(part): at for part, at in self._unfenced.items()}
        body = {"groupId": GROUP, "memberId": member, "offsets": offsets}
        self._dmq_socket = self._send(f"{dmq}/commit-offsets", body)

    def _send(self, path: str, commits: object) -> socket.socket:
        body = json.dumps(commits).encode()
        connection = socket.create_connection(self._node.endpoint, timeout=PATIENCE)
        head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def wake_and_check(self) -> None:
        claims = self._world.claims()
        assert all(claims[part].epoch > epoch for part, epoch in self._epochs.items())
        # Others have gone further, or the answer below would prove nothing.
        assert any((claims[part].checkpoint or 0) > at for part, at in self._unfenced.items())
        self._node.wake()
        _, answer = _received(self._socket)
        found: Any = json.loads(answer)
        assert [each["fenced"] for each in found["commits"]] == [True] * len(self._epochs), found
        # It is refused, or passed on to the node that holds the member now: that one moves
        # checkpoints forward only.
        status, answer = _received(self._dmq_socket)
        assert status in (200, 404, 409, 503), answer
        after = self._world.claims()
        for part in self._unfenced:
            assert after[part].epoch >= claims[part].epoch
            assert (after[part].checkpoint or 0) >= (claims[part].checkpoint or 0)


def _received(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of an answer."""
    answer = b""
    while more := connection.recv(2**16):
        answer += more
    connection.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body
