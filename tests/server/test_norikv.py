"""`norikv.v1` as existing clients see it: messages built from field numbers, on real nodes."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

import pxrs
from pxrs.clock import SYSTEM_CLOCK
from pxrs.core.kv import shard_of
from pxrs.core.routing import SLOTS
from pxrs.errors import ConfigError, MissingExtra
from pxrs.server.cluster import ClusterView, NodeInfo
from pxrs.server.rpc.calls import LARGEST_MESSAGE
from pxrs.server.rpc.norikv import encode_view
from pxrs.server.settings import ServeSettings
from pxrs.server.tokens import Tokens, all_rights, parse_right
from support import rpc
from support.child import PATIENCE
from support.fuzzing import limits
from support.node import LocalNode, NodeProcess, looks
from support.rpc import RpcClient, field, fields, version
from support.shared_commits import SharedCommits, count_arrivals

PYTHON = "grpc-python-asyncio/1.85.1"
NODE = "grpc-node-js/1.12.0"
JAVA = "grpc-java-netty/1.60.0"
GO = "grpc-go/1.60.0"


@pytest.fixture
def node(url: str) -> Iterator[LocalNode]:
    with LocalNode(url, grpc_listen="127.0.0.1:0") as node:
        yield node


@pytest.fixture
def client(node: LocalNode) -> Iterator[RpcClient]:
    with RpcClient(node.rpc) as client:
        yield client


def put(client: RpcClient, key: bytes, value: bytes, **more: Any) -> tuple[int, int]:
    """The version that a put makes."""
    answer = client("Kv/Put", rpc.put(key, value, **more))
    assert set(answer) == {1}
    return pair(answer[1][0])


def pair(data: bytes) -> tuple[int, int]:
    found = fields(data)
    return found[1][0], found[2][0]


def found(client: RpcClient, key: bytes, consistency: str = "") -> bytes | None:
    answer = client("Kv/Get", rpc.get(key, consistency))
    return answer.get(1, [b""])[0] if 2 in answer else None


# Kv on one node


def test_put_get_delete(engine_url: str) -> None:
    with (
        LocalNode(engine_url, grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc) as client,
    ):
        first = put(client, b"user:1", b"Ada")
        assert min(first) > 0
        answer = client("Kv/Get", rpc.get(b"user:1"))
        assert answer[1] == [b"Ada"]
        assert pair(answer[2][0]) == first
        assert set(answer) == {1, 2}
        second = put(client, b"user:1", b"Eve")
        assert second[1] > first[1]
        gone = client("Kv/Delete", rpc.delete(b"user:1"))
        assert gone[1] == [1]
        assert pair(gone[2][0])[1] > second[1]
        assert client("Kv/Delete", rpc.delete(b"user:1")) == {}
        assert found(client, b"user:1") is None
        assert put(client, b"user:1", b"Ada")[1] > second[1] + 1
        entry = node.px.kv.get("user:1")
        assert entry is not None
        assert entry.value == b"Ada"


def test_the_bytes_on_the_wire(client: RpcClient) -> None:
    """Nothing of ours builds these: they are what clients were seen to send and to read."""
    a = client("Kv/Put", bytes.fromhex("0a0161 120162"))[1][0][1]
    assert a == 1, "the term: clients' own tests want it of a new cluster"
    told = client.raw("/norikv.v1.Kv/Get", bytes.fromhex("0a0161"))
    assert told == bytes.fromhex(f"0a0162 1204 08{a:02x}1001")
    told = client.raw("/norikv.v1.Kv/Put", bytes.fromhex("0a0163 1200 2a00"))
    assert isinstance(told, bytes)
    c = told[3]
    assert told == bytes.fromhex(f"0a04 08{c:02x}1001")
    told = client.raw("/norikv.v1.Kv/Get", bytes.fromhex("0a0163"))
    assert told == bytes.fromhex(f"1204 08{c:02x}1001")
    told = client.raw("/norikv.v1.Kv/Delete", bytes.fromhex(f"0a0161 1a04 08{a:02x}1001"))
    assert isinstance(told, bytes)
    assert told == bytes.fromhex(f"0801 1204 08{told[5]:02x}1002")
    assert client.raw("/norikv.v1.Kv/Delete", bytes.fromhex("0a0161")) == b""


def test_conditions(client: RpcClient) -> None:
    first = put(client, b"k", b"1", if_match=version(0, 0))
    exists = client.refused("Kv/Put", rpc.put(b"k", b"2", if_match=version(0, 0)))
    assert exists.code == "ALREADY_EXISTS"
    second = put(client, b"k", b"2", if_match=version(*first))
    for wrong in (first, (second[0], 0), (0, second[1]), (2**64 - 1, 2**64 - 1)):
        late = client.refused("Kv/Put", rpc.put(b"k", b"3", if_match=version(*wrong)))
        assert late.code == "FAILED_PRECONDITION"
        assert "ersion" in late.details
        late = client.refused("Kv/Delete", rpc.delete(b"k", if_match=version(*wrong)))
        assert late.code == "FAILED_PRECONDITION"
    missing = client.refused("Kv/Put", rpc.put(b"none", b"1", if_match=version(1, 1)))
    assert missing.code == "FAILED_PRECONDITION"
    assert "ersion" in missing.details
    assert client("Kv/Delete", rpc.delete(b"k", if_match=version(*second)))[1] == [1]


def test_a_repeated_write_is_answered_as_the_first(client: RpcClient) -> None:
    first = put(client, b"k", b"1", once="a", if_match=version(0, 0))
    put(client, b"k", b"2")
    assert put(client, b"k", b"1", once="a", if_match=version(0, 0)) == first
    assert found(client, b"k") == b"2"
    assert put(client, b"other", b"1", once="a")[1] > 0
    assert found(client, b"other") == b"1"
    gone = client("Kv/Delete", rpc.delete(b"k", once="b"))
    put(client, b"k", b"3")
    assert client("Kv/Delete", rpc.delete(b"k", once="b")) == gone
    assert found(client, b"k") == b"3"
    reused = client.refused("Kv/Put", rpc.put(b"k", b"4", once="a"))
    assert reused.code == "INVALID_ARGUMENT"


def test_values_expire(node: LocalNode, client: RpcClient) -> None:
    put(client, b"k", b"1", ttl_ms=1)
    node.wait_until(lambda: node.px.kv.get("k") is None)
    assert client("Kv/Delete", rpc.delete(b"k")) == {}
    put(client, b"k", b"1", ttl_ms=60_000)
    assert found(client, b"k") == b"1"
    put(client, b"k", b"2")
    assert found(client, b"k") == b"2"


@pytest.mark.parametrize(
    "name",
    ["", "lease", "linearizable", "stale_ok", "strong", "eventual", "bounded_staleness"],
)
def test_consistencies_of_both_families(client: RpcClient, name: str) -> None:
    put(client, b"k", b"1")
    assert found(client, b"k", name) == b"1"


@pytest.mark.parametrize(
    ("path", "request_bytes"),
    [
        ("Kv/Get", rpc.get(b"k", "none")),
        ("Kv/Get", rpc.get(b"")),
        ("Kv/Put", rpc.put(b"", b"x")),
        ("Kv/Put", rpc.put(b"k" * 1025, b"x")),
        ("Kv/Put", rpc.put(b"k", b"x" * 1_048_577)),
        ("Kv/Put", rpc.put(b"k", b"x", ttl_ms=2**64 - 1)),
        ("Kv/Put", rpc.put(b"k", b"x", once="x" * 257)),
        ("Kv/Put", rpc.put(b"k", b"x", once="a\nb")),
        ("Kv/Delete", rpc.delete(b"")),
        ("Kv/Put", b"\xff"),
        ("Kv/Put", field(1, b"k") + field(4, b"\xff")),
    ],
)
def test_bad_input(node: LocalNode, client: RpcClient, path: str, request_bytes: bytes) -> None:
    assert client.refused(path, request_bytes).code == "INVALID_ARGUMENT"
    assert list(node.px.kv.scan()) == []


@pytest.mark.engine("sqlite")
def test_the_largest_and_what_is_larger_than_a_message(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    with LocalNode(url, grpc_listen="127.0.0.1:0") as node, RpcClient(node.rpc) as client:
        large = b"x" * 1_048_576
        put(client, b"k" * 1024, large)
        assert found(client, b"k" * 1024) == large
        assert client.refused("Kv/Put", rpc.put(b"k", bytes(LARGEST_MESSAGE))).code == (
            "RESOURCE_EXHAUSTED"
        )
        assert found(client, b"k" * 1024) == large


@pytest.mark.engine("memory")
@pytest.mark.parametrize(
    ("agent", "get_code", "delete_code"),
    [
        (PYTHON, None, None),
        (NODE, None, "FAILED_PRECONDITION"),
        (JAVA, "NOT_FOUND", "FAILED_PRECONDITION"),
        (f"shop/2.1 {JAVA}", "NOT_FOUND", "FAILED_PRECONDITION"),
        (GO, "NOT_FOUND", None),
    ],
)
def test_a_missing_key_as_each_client_wants_it(
    agent: str, get_code: str | None, delete_code: str | None
) -> None:
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc, agent=agent) as client,
    ):
        conditional = rpc.delete(b"none", if_match=version(1, 1))
        for path, request, code in (
            ("/norikv.v1.Kv/Get", rpc.get(b"none"), get_code),
            ("/norikv.v1.Kv/Delete", conditional, delete_code),
        ):
            answer = client.raw(path, request)
            assert answer == b"" if code is None else answer[0] == code
        assert client("Kv/Delete", rpc.delete(b"none")) == {}
        put(client, b"none", b"")
        assert found(client, b"none") == b""


@pytest.mark.engine("memory")
def test_admin_health_and_what_there_is_not() -> None:
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc) as client,
    ):
        assert client.refused("Admin/TransferShard", field(1, 1)).code == "UNIMPLEMENTED"
        assert client.refused("Admin/SnapshotShard", field(1, 1024)).code == "NOT_FOUND"
        node.wait_until(lambda: None not in node._node.cluster.view.slots)
        shard = client("Admin/SnapshotShard", field(1, 7))
        assert shard[1] == [7]
        assert client.refused("Vector/Search", b"").code == "UNIMPLEMENTED"
        assert client.refused("Kv/Scan", b"").code == "UNIMPLEMENTED"
        node.wait_until(lambda: not node._node._trouble)
        for name in ("", "norikv.v1.Kv"):
            told = client.raw(f"{rpc.HEALTH}Check", field(1, name) if name else b"")
            assert told == rpc.SERVING
        unknown = client.raw(f"{rpc.HEALTH}Check", field(1, "other"))
        assert unknown[0] == "NOT_FOUND"


@pytest.mark.engine("memory")
def test_who_watches_a_nodes_health_is_told_that_it_stops() -> None:
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc) as client,
    ):
        node.wait_until(lambda: not node._node._trouble)
        watches = [
            client.watch(field(1, name) if name else b"", f"{rpc.HEALTH}Watch")
            for name in ("", "norikv.v1.Kv")
        ]
        unknown = client.watch(field(1, "other"), f"{rpc.HEALTH}Watch")
        assert [next(watch) for watch in watches] == [rpc.SERVING] * 2
        assert next(unknown) == rpc.UNKNOWN
        node.stop()
        assert [list(watch) for watch in watches] == [[rpc.NOT_SERVING]] * 2
        assert list(unknown) == []


@pytest.mark.engine("memory")
def test_metrics_count_calls() -> None:
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc) as client,
    ):
        put(client, b"k", b"1")
        client.refused("Kv/Get", b"\xff")
        http = node.client()
        route = 'route="/norikv.v1.Kv/'
        counted = [
            f'pxrs_requests_total{{method="gRPC",{route}Put",status="OK"}} 1.0',
            f'pxrs_requests_total{{method="gRPC",{route}Get",status="INVALID_ARGUMENT"}} 1.0',
        ]
        # A call is counted when it has ended, which its client may hear before.
        for _ in looks():
            text = http.get("/metrics").body.decode()
            if all(line in text for line in counted):
                break
        http.close()


# The cluster


def view_of(data: bytes) -> tuple[int, dict[str, str], dict[int, str]]:
    """Epoch, addresses by node, leaders by shard."""
    answer = fields(data)
    nodes, shards = {}, {}
    for each in answer[2]:
        told = fields(each)
        nodes[told[1][0].decode()] = told[2][0].decode()
        assert told[3][0] in (b"leader", b"follower")
    for each in answer[3]:
        told = fields(each)
        (replica,) = told[2]
        assert fields(replica)[2] == [1]
        shards[told.get(1, [0])[0]] = fields(replica)[1][0].decode()
    return answer[1][0], nodes, shards


def test_the_view_of_one_node(node: LocalNode, client: RpcClient) -> None:
    views = client.watch(field(2, field(1, "seed-0") + field(2, "127.0.0.1:1")))
    epoch, nodes, shards = view_of(next(views))
    assert epoch >= 1
    assert list(nodes.values()) == [node.rpc]
    assert shards == dict.fromkeys(range(1024), *nodes)
    assert client.refused("Meta/WatchCluster", b"\xff").code == "INVALID_ARGUMENT"


def test_a_view_always_names_a_leader_and_an_epoch() -> None:
    here = NodeInfo("a", 1, "h:1", "h:2")
    silent = NodeInfo("b", 2, "h:3")
    slots = ("a", "b", None, "gone") * (SLOTS // 4)
    told = view_of(encode_view(ClusterView(0, (here, silent), slots), here))
    assert told == (1, {"a": "h:2"}, dict.fromkeys(range(1024), "a"))
    other = NodeInfo("b", 2, "h:3", "h:4")
    epoch, nodes, shards = view_of(encode_view(ClusterView(7, (other,), slots), here))
    assert (epoch, nodes) == (7, {"a": "h:2", "b": "h:4"})
    assert {shards[n] for n in range(1, 1024, 4)} == {"b"}
    assert {shards[n] for n in range(1024) if n % 4 != 1} == {"a"}


@contextmanager
def cluster(url: str, count: int, **settings: Any) -> Iterator[list[LocalNode]]:
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                LocalNode(url, node_id=f"n{number}", grpc_listen="127.0.0.1:0", **settings)
            )
            for number in range(count)
        ]
        for node in nodes:
            wait_for_leaders(node, count)
        yield nodes


def wait_for_leaders(node: LocalNode, count: int) -> None:
    names = {f"n{number}" for number in range(count)}
    node.wait_until(lambda: set(node._node.cluster.view.slots) == names)


def leader_of(node: LocalNode, key: bytes) -> str:
    name = node._node.cluster.view.slots[shard_of(key) % SLOTS]
    assert name is not None
    return name


@pytest.mark.engine("sqlite")
@pytest.mark.long
def test_three_nodes_answer_every_key_and_tell_who_leads(tmp_path: Path) -> None:
    with cluster(f"sqlite:///{tmp_path}/node.db", 3) as nodes, ExitStack() as stack:
        clients = [stack.enter_context(RpcClient(node.rpc)) for node in nodes]
        keys = [b"k\xff/%d" % number for number in range(24)]
        assert {leader_of(nodes[0], key) for key in keys} == {"n0", "n1", "n2"}
        for number, key in enumerate(keys):
            one, two, three = (clients[(number + step) % 3] for step in range(3))
            first = put(one, key, b"\xfe1", if_match=version(0, 0), ttl_ms=60_000)
            exists = two.refused("Kv/Put", rpc.put(key, b"2", if_match=version(0, 0)))
            assert exists.code == "ALREADY_EXISTS"
            assert found(three, key) == b"\xfe1"
            second = put(two, key, b"", if_match=version(*first), once="ü&=" + str(number))
            assert second[1] > first[1]
            assert found(one, key) == b""
            again = put(three, key, b"", if_match=version(*first), once="ü&=" + str(number))
            assert again == second
            late = three.refused("Kv/Put", rpc.put(key, b"3", if_match=version(*first)))
            assert late.code == "FAILED_PRECONDITION"
            assert "ersion" in late.details
            late = one.refused("Kv/Delete", rpc.delete(key, if_match=version(*first)))
            assert late.code == "FAILED_PRECONDITION"
            gone = two("Kv/Delete", rpc.delete(key, "ü&=d", version(*second)))
            assert gone[1] == [1]
            assert three("Kv/Delete", rpc.delete(key, "ü&=d", version(*second))) == gone
            assert one("Kv/Delete", rpc.delete(key)) == {}
        for client in clients:
            _, addresses, shards = view_of(next(client.watch()))
            assert addresses == {f"n{number}": node.rpc for number, node in enumerate(nodes)}
            for key in keys:
                assert shards[shard_of(key)] == leader_of(nodes[0], key)
        off = next(shard for shard in range(1024) if shards[shard] != "n0")
        assert clients[0].refused("Admin/SnapshotShard", field(1, off)).code == (
            "FAILED_PRECONDITION"
        )


@pytest.mark.engine("sqlite")
def test_each_language_gets_its_answer_through_any_node(tmp_path: Path) -> None:
    """The leader says that a conditional delete does not match; why is found out here."""
    with cluster(f"sqlite:///{tmp_path}/node.db", 2) as nodes:
        key = next(b"%d" % n for n in range(99) if leader_of(nodes[0], b"%d" % n) == "n1")
        conditional = rpc.delete(key, if_match=version(1, 1))
        with (
            RpcClient(nodes[0].rpc, agent=PYTHON) as python,
            RpcClient(nodes[0].rpc, agent=JAVA) as java,
        ):
            assert python("Kv/Delete", conditional) == {}
            assert java.refused("Kv/Delete", conditional).code == "FAILED_PRECONDITION"
            put(python, key, b"1")
            put(python, key, b"2")
            assert python.refused("Kv/Delete", conditional).code == "FAILED_PRECONDITION"


@pytest.mark.engine("sqlite")
def test_who_follows_is_told_the_leader(tmp_path: Path) -> None:
    with cluster(f"sqlite:///{tmp_path}/node.db", 2) as nodes:
        key = next(b"%d" % n for n in range(99) if leader_of(nodes[0], b"%d" % n) == "n1")
        requests = [
            ("Kv/Put", rpc.put(key, b"1")),
            ("Kv/Get", rpc.get(key)),
            ("Kv/Delete", rpc.delete(key)),
        ]
        with (
            RpcClient(nodes[0].rpc, pxrs_follows="1") as here,
            RpcClient(nodes[1].rpc, pxrs_follows="1") as there,
        ):
            for path, request in requests:
                told = here.refused(path, request)
                assert told.code == "UNAVAILABLE"
                assert told.details.startswith("NOT_LEADER")
                assert told.trailing["leader-hint"] == nodes[1].rpc
                there(path, request)


@pytest.mark.engine("sqlite")
def test_a_watch_tells_of_nodes_that_come_and_go(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/node.db"
    with (
        LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0") as first,
        RpcClient(first.rpc) as client,
    ):
        views = client.watch()
        epoch, nodes, _ = view_of(next(views))
        assert nodes == {"n0": first.rpc}
        with LocalNode(url, node_id="n1", grpc_listen="127.0.0.1:0") as second:
            epoch = follow(views, epoch, {"n0": first.rpc, "n1": second.rpc})
        epoch = follow(views, epoch, {"n0": first.rpc})
        with LocalNode(url, node_id="n2"):
            wait_until_led_by(first, {"n0", "n2"})
            # It leads, but serves no gRPC: nobody is sent there.
            assert view_of(next(client.watch()))[1] == {"n0": first.rpc}
    with (
        LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0") as again,
        RpcClient(again.rpc) as client,
    ):
        assert view_of(next(client.watch()))[0] > epoch


def wait_until_led_by(node: LocalNode, names: set[str]) -> None:
    node.wait_until(lambda: set(node._node.cluster.view.slots) == names)


def follow(views: Iterator[bytes], epoch: int, wanted: dict[str, str]) -> int:
    """Reads until these nodes lead all shards; the epoch then.

    As clients do, which drop a view whose epoch is not above that of the one they have.
    """
    for view in views:
        now, nodes, shards = view_of(view)
        assert now >= epoch
        if now == epoch:
            continue
        epoch = now
        if nodes == wanted and set(shards.values()) == set(wanted):
            return epoch
    raise AssertionError("the stream ended")


@pytest.mark.engine("sqlite")
def test_a_stream_ends_without_an_error_when_the_node_stops(tmp_path: Path) -> None:
    node = LocalNode(f"sqlite:///{tmp_path}/node.db", grpc_listen="127.0.0.1:0").__enter__()
    with RpcClient(node.rpc) as client:
        views = client.watch()
        next(views)
        node.stop()
        for _ in views:
            pass
    node.join()


@pytest.mark.long
@pytest.mark.engine("sqlite")
def test_writes_go_on_when_the_leader_is_killed(tmp_path: Path) -> None:
    """Not once does a client of the other node see an error, or wait for the slots to move."""
    url = f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0") as node:
        other = NodeProcess(url, "--node-id", "n1", "--grpc-listen", "127.0.0.1:0")
        wait_until_led_by(node, {"n0", "n1"})
        keys = [b"%d" % number for number in range(40)]
        led = [key for key in keys if leader_of(node, key) == "n1"]
        assert led
        with RpcClient(node.rpc) as client:
            before = {key: put(client, key, b"1") for key in led}
            other.kill()
            for key in led:
                assert put(client, key, b"2")[1] > before[key][1]
            assert [found(client, key) for key in led] == [b"2"] * len(led)


class OddLeader:
    """Listens where a node says that it is, takes each request, and answers it as it was told."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listening.getsockname())
        self.answer = b""
        self.taken: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell(self, status: int, code: str) -> None:
        body = json.dumps({"title": "", "status": status, "code": code, "detail": "odd"})
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.answer = (head + body).encode()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                length = 0
                head: list[bytes] = []
                while (line := stream.readline()) not in (b"\r\n", b""):
                    head.append(line)
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                self.taken.append(b"".join(head) + b"\r\n" + stream.read(length))
                connection.sendall(self.answer)


@pytest.mark.engine("sqlite")
def test_what_a_write_is_answered_when_its_leader_is_odd(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/node.db"
    leader = OddLeader()
    with (
        LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0") as node,
        LocalNode(url, node_id="n1", advertise=leader.address),
        RpcClient(node.rpc, pxrs_follows="1") as client,
    ):
        wait_until_led_by(node, {"n0", "n1"})
        key = next(b"%d" % n for n in range(99) if leader_of(node, b"%d" % n) == "n1")
        # It took the request and hung up: nobody knows what it did, or will do when it wakes.
        assert client.refused("Kv/Delete", rpc.delete(key)).code == "UNKNOWN"
        created = rpc.put(key, b"0", if_match=b"")
        assert client.refused("Kv/Put", created).code == "UNKNOWN"
        assert found(client, key) is None
        # A put that can't be refused has a key of its own between nodes: it happens once.
        put(client, key, b"1")
        assert found(client, key) == b"1"
        # With an idempotency key it happens once, whoever does it.
        put(client, key, b"2", once="a")
        assert found(client, key) == b"2"
        # It says that it did nothing.
        for code in ("leader_moving", "starting", "stopping"):
            leader.tell(503, code)
            put(client, key, code.encode())
            assert found(client, key) == code.encode()
        assert len(leader.taken) == 7
        for status, code, told in (
            (504, "outcome_unknown", "UNKNOWN"),
            (503, "store_unavailable", "UNAVAILABLE"),
            (507, "store_full", "RESOURCE_EXHAUSTED"),
            (403, "forbidden", "PERMISSION_DENIED"),
            (409, "transaction_conflict", "ABORTED"),
            (500, "internal_error", "INTERNAL"),
        ):
            leader.tell(status, code)
            assert client.refused("Kv/Put", rpc.put(key, b"3")).code == told
        leader.tell(504, "outcome_unknown")
        assert client.refused("Kv/Put", rpc.put(key, b"3", once="b")).code == "UNAVAILABLE"
        leader.answer = b"HTTP/1.1 500 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        assert client.refused("Kv/Put", rpc.put(key, b"3")).code == "INTERNAL"
        leader.close()
        # Nobody listens there: it surely has not got this.
        put(client, key, b"4")
        assert found(client, key) == b"4"


@pytest.mark.engine("sqlite")
def test_a_write_that_was_answered_elsewhere_does_not_land_later(tmp_path: Path) -> None:
    """The leader is frozen with requests in its socket, which others answer; then it wakes."""
    url = f"sqlite:///{tmp_path}/node.db"
    leader = OddLeader()
    with (
        LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0") as node,
        LocalNode(url, node_id="n1", advertise=leader.address) as frozen,
        RpcClient(node.rpc) as client,
    ):
        wait_until_led_by(node, {"n0", "n1"})
        deleted, created = [
            key for key in (b"%d" % n for n in range(99)) if leader_of(node, key) == "n1"
        ][:2]
        delete = rpc.delete(deleted, once="a")
        assert client("Kv/Delete", delete) == {}
        node.px.kv.put(deleted, "theirs")
        node.px.kv.put(created, "theirs")
        create = rpc.put(created, b"mine", once="b", if_match=b"")
        assert client.refused("Kv/Put", create).code == "ALREADY_EXISTS"
        node.px.kv.delete(created)
        assert len(leader.taken) == 2
        for request, status in zip(leader.taken, (b"200", b"409"), strict=True):
            with socket.create_connection(frozen.endpoint, PATIENCE) as woken:
                woken.sendall(request)
                assert status in woken.recv(100)
        assert found(client, deleted) == b"theirs"
        assert found(client, created) is None
        assert client("Kv/Delete", delete) == {}
        assert client.refused("Kv/Put", create).code == "ALREADY_EXISTS"
        leader.close()


# Limits, rights and certificates


@pytest.mark.engine("sqlite")
def test_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared.db"
    with pxrs.connect(url) as px:
        tokens = Tokens(px.stores.coord, SYSTEM_CLOCK)
        admin = tokens.create("admin", all_rights())
        rights = [parse_right("key:user:*:read"), parse_right("key:user:1:write")]
        weak = tokens.create("weak", rights)
    with cluster(url, 2) as nodes, ExitStack() as stack:
        keys = [b"user:1", b"user:2", b"other"]
        for node in nodes:
            nobody, wrong, some, all_ = (
                stack.enter_context(RpcClient(node.rpc, token=token))
                for token in ("", weak[:-1] + "-", weak, admin)
            )
            for client in (nobody, wrong):
                for path, request in every_call(keys[0]):
                    assert client.refused(path, request).code == "UNAUTHENTICATED"
            for key in keys:
                put(all_, key, b"1")
            assert found(some, b"user:2") == b"1"
            put(some, b"user:1", b"2")
            for path, request in (
                ("Kv/Put", rpc.put(b"user:2", b"2")),
                ("Kv/Put", rpc.put(b"user:1\xff", b"2")),
                ("Kv/Delete", rpc.delete(b"user:2")),
                ("Kv/Get", rpc.get(b"other")),
                ("Kv/Get", rpc.get(b"user")),
                ("Admin/SnapshotShard", field(1, 1)),
                ("Admin/TransferShard", field(1, 1)),
            ):
                assert some.refused(path, request).code == "PERMISSION_DENIED", path
            assert view_of(next(some.watch()))[0] >= 1
            with pytest.raises(grpc.RpcError) as refused:
                next(nobody.watch())
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            # Health is for load balancers, which have none.
            assert isinstance(nobody.raw("/grpc.health.v1.Health/Check", b""), bytes)


def every_call(key: bytes) -> list[tuple[str, bytes]]:
    return [
        ("Kv/Put", rpc.put(key, b"1")),
        ("Kv/Get", rpc.get(key)),
        ("Kv/Delete", rpc.delete(key)),
        ("Admin/SnapshotShard", field(1, 1)),
        ("Admin/TransferShard", field(1, 1)),
        ("Kv/Put", b"\xff"),
    ]


@pytest.mark.engine("sqlite")
def test_tls_and_certificates_of_clients(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(tmp_path / "node.pem")
    own.private_key_pem.write_to_path(tmp_path / "node.key")

    def credentials(signer: trustme.CA | None) -> Any:
        pair = signer.issue_cert("client") if signer is not None else None
        return grpc.ssl_channel_credentials(
            authority.cert_pem.bytes(),
            pair.private_key_pem.bytes() if pair is not None else None,
            pair.cert_chain_pems[0].bytes() if pair is not None else None,
        )

    with cluster(
        f"sqlite:///{tmp_path}/node.db", 2, tls_cert=f"{tmp_path}/node.pem",
        tls_key=f"{tmp_path}/node.key", tls_client_ca=f"{tmp_path}/ca.pem",
    ) as nodes:  # fmt: skip
        with RpcClient(nodes[0].rpc, credentials=credentials(authority)) as client:
            for number in range(8):
                put(client, b"%d" % number, b"1")
                assert found(client, b"%d" % number) == b"1"
        host, _, port = nodes[0].rpc.rpartition(":")

        def first_byte(signer: trustme.CA | None) -> bytes:
            """What the node says first: its settings, or nothing to who is refused."""
            context = ssl.create_default_context(cafile=f"{tmp_path}/ca.pem")
            context.set_alpn_protocols(["h2"])
            if signer is not None:
                signer.issue_cert("client").configure_cert(context)
            try:
                with (
                    socket.create_connection((host, int(port)), PATIENCE) as plain,
                    context.wrap_socket(plain, server_hostname=host) as secure,
                ):
                    return secure.recv(1)
            except (ssl.SSLError, ConnectionError):
                return b""

        assert first_byte(authority) != b""
        assert first_byte(None) == b""
        assert first_byte(stranger) == b""


def test_an_address_of_other_hosts_needs_protection() -> None:
    with pytest.raises(ConfigError, match=r"grpc_listen='0.0.0.0:1' can be reached"):
        LocalNode("memory://", grpc_listen="0.0.0.0:1")
    with pytest.raises(ConfigError, match="grpc_listen must be host:port"):
        LocalNode("memory://", grpc_listen="nowhere")


def test_what_clients_are_told_of_its_address() -> None:
    settings = ServeSettings(grpc_listen="127.0.0.1:0")
    assert str(settings.grpc_advertised(7)) == "127.0.0.1:7"
    settings = ServeSettings(grpc_listen="127.0.0.1:0", advertise="shop:80")
    assert str(settings.grpc_advertised(7)) == "shop:7"
    settings = ServeSettings(grpc_listen="127.0.0.1:0", advertise="a:1", grpc_advertise="b:2")
    assert str(settings.grpc_advertised(7)) == "b:2"


@pytest.mark.engine("memory")
def test_without_grpc_a_node_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pxrs.server.rpc.server", None)
    with pytest.raises(MissingExtra, match=r"pip install 'pxrs\[broker\]'"):
        LocalNode("memory://", grpc_listen="127.0.0.1:0").__enter__()


@pytest.mark.engine("memory")
def test_calls_are_bounded() -> None:
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0", max_connections=1) as node,
        RpcClient(node.rpc) as client,
    ):
        views = client.watch()
        next(views)
        assert client.refused("Kv/Get", rpc.get(b"k")).code == "RESOURCE_EXHAUSTED"
        views.cancel()
        # The node hears of it a moment later.
        for _ in looks():
            if isinstance(client.raw("/norikv.v1.Kv/Get", rpc.get(b"k")), bytes):
                break


@pytest.mark.engine("memory")
def test_a_port_that_is_taken() -> None:
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        second = LocalNode("memory://", grpc_listen=node.rpc)
        with pytest.raises(ConfigError, match="choose another --grpc-listen"):
            second.__enter__()


@pytest.mark.engine("sqlite")
def test_a_name_that_is_taken_gives_the_port_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/node.db"
    with LocalNode(url, node_id="n0", grpc_listen="127.0.0.1:0"):
        second = LocalNode(url, node_id="n0", session_ttl=0.1, grpc_listen="127.0.0.1:0")
        with pytest.raises(ConfigError, match="choose another --node-id"):
            second.__enter__()


@pytest.mark.engine("memory")
def test_pings_are_answered_and_not_punished() -> None:
    """Many more than gRPC allows by itself, on a connection without calls."""
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        host, _, port = node.rpc.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            stream = connection.makefile("rwb")
            stream.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b""))
            for number in range(20):
                stream.write(frame(6, number.to_bytes(8)))
                stream.flush()
                while (kind := next_frame(stream))[0] != 6:
                    assert kind[0] != 7, f"the connection is given up: {kind[1]!r}"
                assert kind[1] == number.to_bytes(8)
            stream.close()


def frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def next_frame(stream: Any) -> tuple[int, bytes]:
    head = stream.read(9)
    assert len(head) == 9, "the connection was closed"
    return head[3], stream.read(int.from_bytes(head[:3]))


@pytest.mark.long
@pytest.mark.engine("memory")
def test_calls_that_wait_are_not_cancelled() -> None:
    """As gRPC would do with some of so many. To clients that is no reason to try again."""
    count = 2500
    # POST, http, and five-bit indexes of names or none, with literals that are kept nowhere.
    headers = b"\x83\x86" + b"".join(
        name + bytes([len(value)]) + value
        for name, value in (
            (b"\x04", b"/norikv.v1.Kv/Put"),
            (b"\x01", b"localhost"),
            (b"\x0f\x10", b"application/grpc"),
            (b"\x00\x02te", b"trailers"),
        )
    )
    with LocalNode("memory://", grpc_listen="127.0.0.1:0") as node:
        host, _, port = node.rpc.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            stream = connection.makefile("rwb")
            stream.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b""))
            with node.held_up():
                for number in range(count):
                    put = b"\x0a\x04%04d\x12\x01v" % number
                    data = b"\0" + len(put).to_bytes(4) + put
                    stream.write(frame(1, headers, 0x4, 2 * number + 1))
                    stream.write(frame(0, data, 0x1, 2 * number + 1))
                # It is answered when all that was sent before it has been taken in.
                stream.write(frame(6, b"all sent"))
                stream.flush()
                while (kind := next_frame(stream)) != (6, b"all sent"):
                    assert kind[0] != 3, "a call was cancelled"
                    if kind[0] == 6:
                        stream.write(frame(6, kind[1], 0x1))
                        stream.flush()
            answers = 0
            while answers < count:
                kind = next_frame(stream)
                assert kind[0] != 3, "a call was cancelled"
                answers += kind[0] == 0 and len(kind[1]) > 5
                if kind[0] == 6:
                    stream.write(frame(6, kind[1], 0x1))
                    stream.flush()
            stream.close()
        assert len(list(node.px.kv.scan())) == count


@pytest.mark.engine("memory")
def test_calls_at_once_share_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = count_arrivals(monkeypatch)
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc) as client,
    ):
        coord = node.px.kv._coord
        commits = SharedCommits(monkeypatch, coord, lambda: len(arrived) == 8)
        threads = [
            threading.Thread(
                target=lambda name=name: [put(client, b"%d-%d" % (name, n), b"x") for n in range(9)]
            )
            for name in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(node.px.kv.scan())) == 72
        assert sum(commits.sizes) == 72
        assert sum(commits.sizes[:2]) >= 8


# Anything at all

_REQUESTS = (
    ("Kv/Put", rpc.put(b"k", b"v", 5, "once", version(1, 1))),
    ("Kv/Get", rpc.get(b"k", "lease")),
    ("Kv/Delete", rpc.delete(b"k", "once", version(1, 1))),
    ("Admin/SnapshotShard", field(1, 7) + field(2, field(1, "a") + field(2, 1))),
    ("Admin/TransferShard", field(1, 7)),
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    path, whole = draw(st.sampled_from(_REQUESTS))
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, min(len(data), at + 8)))
        data[at:end] = draw(st.binary(max_size=8))
    return path, bytes(data)


@pytest.mark.engine("memory")
def test_any_bytes_are_answered(request: pytest.FixtureRequest) -> None:
    allowed = {
        "INVALID_ARGUMENT", "FAILED_PRECONDITION", "ALREADY_EXISTS", "NOT_FOUND", "UNIMPLEMENTED",
    }  # fmt: skip
    with (
        LocalNode("memory://", grpc_listen="127.0.0.1:0") as node,
        RpcClient(node.rpc, agent=JAVA) as client,
    ):

        @limits(request.config, 300)
        @given(damaged())
        def send(sent: tuple[str, bytes]) -> None:
            answer = client.raw(f"/norikv.v1.{sent[0]}", sent[1])
            if isinstance(answer, bytes):
                fields(answer)
            else:
                assert answer.code in allowed, answer

        send()
        put(client, b"still", b"alive")
        assert found(client, b"still") == b"alive"
