"""Rights on `pxrs.v1`, message by message: what a token may not do it can't do by any call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pxrs
from pxrs import PermissionDenied, Pxrs, PxrsError, SessionLost, TopicNotFound
from pxrs.clock import SYSTEM_CLOCK
from pxrs.codec.batches import COMPRESSIONS, encode
from pxrs.config import parse_url, remote_settings
from pxrs.core import records
from pxrs.core.kv import Change
from pxrs.errors import InvalidRequest
from pxrs.server.remote import rights
from pxrs.server.tokens import Identity, Tokens, all_rights, parse_right
from pxrs.stores.api import Stores
from pxrs.stores.queues_on_coord.layout import COMMITS, HOLDERS, LIST, Layout
from pxrs.stores.remote.stores import RemoteStores
from pxrs.stores.remote.wire import METHODS, Records, WireWrite
from pxrs.types import (
    Append,
    Batch,
    Check,
    Committed,
    Conflict,
    Delete,
    Held,
    Holder,
    ItemState,
    LogPartition,
    NewItem,
    Put,
    QueueChange,
    Release,
    StoredItem,
    Version,
)
from support.child import PATIENCE
from support.node import LocalNode

pytestmark = pytest.mark.engine("sqlite")

ALL = tuple(ItemState)


class Site:
    """A node that asks for tokens, and a store with something of everything."""

    def __init__(self, url: str) -> None:
        self._closing = ExitStack()
        self.node = self._closing.enter_context(LocalNode(url, auth="tokens"))
        self.px: Pxrs = self.node.px
        self.stores: Stores = self.px.stores
        self.tokens = Tokens(self.stores.coord, SYSTEM_CLOCK)
        for topic in ("orders", "open"):
            self.px.topics.create(topic, partitions=2)
            with self.px.producer() as producer:
                producer.send_many(topic, [(f"k{n}", f"{topic}{n}") for n in range(10)])
        with self.px.consumer("orders", group="billing", start="earliest") as consumer:
            consumer.poll(timeout=PATIENCE)
            consumer.commit()
        self.px.put("mail", "a letter")
        self.px.kv.put("user", "secret")
        self.admin = self.tokens.create("admin", all_rights())

    def token(self, *rights: str, name: str = "") -> str:
        name = name or f"t{len(self.tokens.list())}"
        return self.tokens.create(name, [parse_right(right) for right in rights])

    def url(self, token: str) -> str:
        return f"pxrs://{token}@{self.node.address}?timeout={PATIENCE}"

    def connect(self, *rights: str) -> Pxrs:
        """A client whose token has these rights."""
        return self._closing.enter_context(pxrs.connect(self.url(self.token(*rights))))

    def remote(self, *rights: str, name: str = "") -> RemoteStores:
        """The seams, for a token with these rights."""
        return self.open(self.token(*rights, name=name))

    def open(self, token: str) -> RemoteStores:
        stores = RemoteStores(remote_settings(parse_url(self.url(token))))
        self._closing.callback(stores.close)
        return stores

    def part(self, topic: str) -> LogPartition:
        return LogPartition(self.px.topics.find(topic).id, 0)

    def content(self) -> list[object]:
        """Everything that the store holds."""
        found: list[object] = [*self.stores.coord.list("")]
        for topic in self.px.topics.list():
            parts = [LogPartition(topic.id, number) for number in range(topic.partitions)]
            found += [self.stores.log.fetch(where, 0, 2**20) for where in parts]
        for queue in self.stores.queues.all():
            found += [queue, *self.stores.queues.peek(queue.name, ALL)]
        return found

    def close(self) -> None:
        self._closing.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(f"sqlite:///{tmp_path}/rights.db")
    yield site
    site.close()


def batch(value: bytes = b"v") -> Batch:
    return encode([(b"k", value, [], 1)])


# Message by message


class Aim(NamedTuple):
    """Arguments of a call that mean what belongs to others, and what the answer shows if any."""

    arguments: tuple[Any, ...]
    harmless: Callable[[Any], bool] | None = None
    refusal: type[PxrsError] | tuple[type[PxrsError], ...] = PermissionDenied


def is_empty(answer: Any) -> bool:
    found = answer.found if isinstance(answer, Records) else answer
    return isinstance(found, list) and not found


def shows_nothing_of_others(answer: Any) -> bool:
    return not any("orders" in repr(each) or "billing" in repr(each) for each in answer)


def aims(site: Site, session: str) -> dict[str, list[Aim]]:
    """For each method calls that aim at topic `orders`, group `billing`, queue `mail`, all keys,
    tokens, and what nodes keep. `session` is one of another client.
    """
    where, topic_id = site.part("orders"), site.part("orders").topic_id
    holder = Holder(session, "t")
    held = Held("mail", 1, 1)
    writer = f"{'0' * 16}.1"
    claim = records.claim_key("billing", topic_id, 0)
    member = records.MemberRecord(id="m.1", topics=("orders",))
    kept = [it.key for it in site.stores.coord.list("") if rights.owner_of(it.key) is None]
    secrets = [
        "topics/orders", "group/billing", claim, records.history_key("billing", 1),
        *kept, "tokens/admin", "tokens/new", "node-secret", "node-numbers", "kv/75736572",
        "group/_pxrs.nodes", "claims/_pxrs.nodes/_pxrs.slots/0", "members/_pxrs.nodes/x",
        "apps/billing", "client-sessions/x", "unheard", "un/heard", "", "/", "topics/", "group/",
    ]  # fmt: skip
    puts = [Put(key, b"{}") for key in secrets if key]
    puts.append(Put("members/billing/m", records.encode(member), session))
    stored = StoredItem(
        id=9, state=ItemState.READY, body=b"", key=None, priority=0, deliveries=0, put_ms=0,
        taken_ms=None, visible_ms=None, dead_ms=None, error="", holder=None,
    )  # fmt: skip
    change = QueueChange(holder, remove=(held,))
    put = QueueChange(holder, put=(NewItem(queue="mail", body=b"b"),))
    return {
        "coord.get": [Aim((key,)) for key in secrets],
        "coord.list": [
            Aim(("topics/",), shows_nothing_of_others),
            Aim(("topics/ord",), is_empty),
            Aim(("topics/orders", None, 1), is_empty),
            Aim(("group/",), is_empty),
            *(Aim((prefix,)) for prefix in (
                "", "t", "topics", "tokens/", "tokens/a", "node", "kv/", "kv-heads/", "kv-once/",
                "members/", "members/bill", "members/billing/", "claims/", "claims/billing/",
                "history/billing/", "resets/billing/", "relays/billing/", "queues/", "queues/mail/",
                "/", "apps/", "client-sessions/", "members/_pxrs.nodes/",
            )),
        ],
        "coord.commit": [
            *(Aim(([], [write])) for write in puts),
            *(Aim(([], [Delete(key)])) for key in secrets),
            # A check that fails answers with the record.
            *(Aim(([Check(key, 10**6)], [])) for key in secrets),
        ],
        "coord.now_ms": [Aim((), lambda answer: isinstance(answer, int))],
        "log.create": [Aim((topic_id, 2)), *(
            # No log can have such an id, not even a neighbour's.
            Aim((odd, 1), refusal=(PermissionDenied, InvalidRequest)) for odd in ("*", "a/b", "")
        )],
        "log.drop": [Aim((topic_id,))],
        "log.append": [Aim(([Append(where, batch())],))],
        "log.fetch": [Aim((where, 0, 2**20))],
        "log.bounds": [Aim((topic_id,)), Aim(("unheard",), refusal=TopicNotFound)],
        "log.size": [Aim((where,))],
        "log.batch_at": [Aim((where, 0))],
        "log.trim": [Aim((where, 10))],
        "log.expire": [Aim((where, 2**40, 1))],
        "queues.create": [Aim(("mail",)), Aim(("new",)), Aim(("_pxrs.q",))],
        "queues.find": [Aim(("mail",))],
        "queues.all": [Aim((), is_empty)],
        "queues.delete": [Aim(("mail",))],
        "queues.take": [Aim(("mail", holder, 1))],
        "queues.held": [Aim(("mail", holder, "u"))],
        "queues.extend": [Aim((holder, [held], 9.0))],
        "queues.apply": [Aim((change,)), Aim((put,)), Aim((QueueChange(holder, forget=("u",)),))],
        "queues.outcome": [Aim((session, "u"))],
        "queues.release": [Aim((holder, [Release(held)])), Aim((holder, []))],
        "queues.reap": [Aim(())],
        "queues.stats": [Aim(("mail",))],
        "queues.peek": [Aim(("mail", ALL))],
        "queues.drop": [Aim(("mail", [1]))],
        "queues.redrive": [Aim(("mail", [1]))],
        "queues.purge": [Aim(("mail", ALL))],
        "queues.restore": [Aim(("mail", [stored]))],
        "node.open_session": [Aim((9.0,))],
        "node.renew_session": [Aim((session,))],
        "node.close_session": [Aim((session,))],
        "node.watch_records": [Aim((1, [key])) for key in [*secrets, "kv/", "members/billing/"]
                               if key != "topics/"],
        "node.watch_log": [
            Aim((1, [where])), Aim((1, [LogPartition("x", 0)]), refusal=TopicNotFound),
        ],
        "node.watch_queues": [Aim((1, ["mail"]))],
        "node.view": [Aim((), lambda answer: len(answer.nodes) == 1)],
        "node.watch_view": [Aim((1,), lambda answer: answer is None)],
        "kv.read": [Aim(([key],)) for key in (b"user", b"", b"\xff")]
        + [Aim(([b"mine", b"user"],))],
        "kv.write": [
            Aim((writer, 1, changes, again))
            for again in (False, True)
            for changes in (
                [Change(b"user", b"x")], [Change(b"user", None)], [Change(b"\xff", b"x")],
                [Change(b"user", b"x", if_match=Version(9, 9))],
                [Change(b"order", b"x"), Change(b"user", b"x")],
            )
        ],
        "node.unwatch": [Aim((1,), lambda answer: answer is None)],
        "node.atomic": [
            *(Aim(([Check(key, 10**6)], [], [], None)) for key in secrets),
            *(Aim(([], [WireWrite(*it)], [], None)) for it in puts),
            *(Aim(([], [WireWrite(key, None)], [], None)) for key in secrets),
            Aim(([], [], [Append(where, batch())], None)),
            Aim(([], [], [], change)), Aim(([], [], [], put)),
            Aim(([], [], [], QueueChange(holder))),
        ],
    }  # fmt: skip


# Neither a longer name nor a shorter one is the one that they are for; none is the cluster's.
NEIGHBOURS = tuple(
    f"{kind}:{name}:read,write,admin"
    for kind in ("topic", "group", "queue", "key", "cluster")
    for name in ("order", "orders2*", "o", "bill", "billing/", "billing2*", "mai", "mail/*", "stor",
                 "store2*", "use", "user2*", "\\xff", "_pxrs.*", "tokens*", "topics/orders")
)  # fmt: skip
# What is of no harm to anybody: who has a right to some queue or group may do it.
FOR_NEIGHBOURS = {"queues.reap", "node.open_session"}


@pytest.mark.parametrize("given", [("topic:open:read",), NEIGHBOURS], ids=["reader", "neighbour"])
def test_a_token_for_something_else_can_do_nothing(site: Site, given: tuple[str, ...]) -> None:
    """Method by method from the wire itself: one that is added must have its aims here."""
    session = site.remote("queue:mail:read").coord.session(PATIENCE)
    client = site.remote(*given)
    before = site.content()
    tried = aims(site, session.id)
    assert tried.keys() == METHODS.keys()
    for method, all_aims in tried.items():
        for arguments, harmless, refusal in all_aims:
            told = (method, arguments)
            if harmless is not None:
                assert harmless(client._link.call(method, *arguments)), told
            elif given is not NEIGHBOURS or method not in FOR_NEIGHBOURS:
                with pytest.raises(refusal) as refused:
                    refuse_each(client._link.call(method, *arguments))
                    pytest.fail(f"{told} was not refused")
                # Whose log it is, the caller is not told.
                assert "orders" not in str(refused.value) or "orders" in repr(arguments)
            assert site.content() == before, told
    # Nothing has ended the stream, nor the session of another.
    seen = [] if given is NEIGHBOURS else ["topics/open"]
    assert [it.key for it in client.coord.list("topics/")] == seen
    session.renew()
    session.close()


def refuse_each(answer: Any) -> None:
    """Raises the error of a batch: of an append each has its own answer."""
    if isinstance(answer, list) and answer and isinstance(answer[0], PxrsError):
        raise answer[0]


def test_what_a_reader_of_one_topic_may_do(site: Site) -> None:
    client = site.remote("topic:open:read")
    where = site.part("open")
    assert [it.key for it in client.coord.list("topics/")] == ["topics/open"]
    assert client.coord.get("topics/open") == site.stores.coord.get("topics/open")
    assert client.log.fetch(where, 0, 2**20) == site.stores.log.fetch(where, 0, 2**20)
    assert client.log.bounds(where.topic_id) == site.stores.log.bounds(where.topic_id)
    assert client.log.size(where) == site.stores.log.size(where)
    assert client.log.batch_at(where, 0) == 0
    for watch in (client.log.watch(where), client.coord.watch("topics/", "topics/open")):
        watch.close()
    before = site.content()
    key = "topics/open"
    for refused in (
        lambda: client.log.trim(where, 10),
        lambda: client.log.expire(where, 2**40, 1),
        lambda: client.log.create(where.topic_id, 2),
        lambda: client.log.drop(where.topic_id),
        lambda: client.coord.commit([], [Delete(key)]),
        lambda: client.coord.commit([], [Put(key, b"{}")]),
        lambda: client.coord.session(PATIENCE),
    ):
        with pytest.raises(PermissionDenied):
            refused()
    (result,) = client.log.append([Append(where, batch())])
    assert isinstance(result, PermissionDenied)
    assert result.right == "topic:open:write"
    assert "it lacks the right topic:open:write" in str(result)
    assert site.content() == before


def test_a_method_without_a_rule_needs_everything() -> None:
    assert METHODS.keys() == rights._RULES.keys()
    assert list(rights.needs("kv.put", {"key": b"a"}, lambda _: None)) == [(rights.CLUSTER,)]


# Roles


def test_a_consumer_of_one_topic_and_group(site: Site) -> None:
    with site.connect("topic:orders:read", "group:billing2:write") as px:
        got: list[bytes] = []
        with px.consumer("orders", group="billing2", start="earliest") as consumer:
            while len(got) < 10:
                got += [message.value for message in consumer.poll(timeout=PATIENCE)]
            consumer.commit()
            consumer.seek("orders", 0, 0)
        assert sorted(got) == sorted(b"orders%d" % n for n in range(10))
        assert px.groups.describe("billing2").partitions
        assert [group.name for group in px.groups.list()] == ["billing2"]
        assert [topic.name for topic in px.topics.list()] == ["orders"]
        with pytest.raises(PermissionDenied, match="group:billing:"):
            px.groups.describe("billing")
        with pytest.raises(PermissionDenied, match="group:billing2:admin"):
            px.groups.delete("billing2")


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        (["topic:orders:read"], "group:NAME:write"),
        (["topic:orders:read", "group:team:read"], "group:NAME:write"),
        (["topic:orders:read", "group:team2:write"], "group:team:"),
        (["group:team:write"], "topic:orders:read"),
        (["topic:orders:write", "group:team:write"], "topic:orders:read"),
        (["topic:open:read", "group:team:write"], "topic:orders:read"),
    ],
)
def test_a_consumer_without_its_rights(site: Site, given: list[str], lacks: str) -> None:
    before = site.content()
    with site.connect(*given) as px:
        before = site.content()
        with pytest.raises(PermissionDenied, match=lacks):  # noqa: SIM117
            with px.consumer("orders", group="team", start="earliest") as consumer:
                consumer.poll(timeout=PATIENCE)
        assert site.content() == before


def test_a_member_has_to_see_all_topics_of_its_group(site: Site) -> None:
    with (
        site.connect("topic:orders:read", "group:team:write") as px,
        site.px.consumer("open", group="team", start="latest"),
        pytest.raises(PermissionDenied, match="topic:open:read"),
        px.consumer("orders", group="team", start="earliest") as consumer,
    ):
        consumer.poll(timeout=PATIENCE)


def test_a_producer_of_one_topic(site: Site) -> None:
    site.px.topics.create("kept", 1, retention=3600.0, retention_bytes=10**9)
    with site.connect("topic:orders:write", "topic:kept:write", "topic:open:read") as px:
        with px.producer() as producer:
            assert producer.send("orders", "more").result(PATIENCE).topic == "orders"
            producer.send("kept", "more").result(PATIENCE)
            with pytest.raises(PermissionDenied, match="topic:open:write"):
                producer.send("open", "more").result(PATIENCE)
            # One that is refused takes no other down with it.
            sent = [producer.send(topic, "x") for topic in ("orders", "open", "orders")]
            assert sent[0].result(PATIENCE).topic == sent[2].result(PATIENCE).topic == "orders"
            with pytest.raises(PermissionDenied):
                sent[1].result(PATIENCE)
        for compression in COMPRESSIONS:
            with px.producer(compression=compression) as producer:
                producer.send_many("kept", [("k", f"{n}" * 1000) for n in range(100)])
        px.topics.apply_retention("kept")
        with pytest.raises(PermissionDenied):
            next(iter(px.reader("orders").read(0, 0)))
        with pytest.raises(PermissionDenied, match="topic:orders:admin"):
            px.topics.delete("orders")
    assert site.px.topics.describe("orders").messages == 13
    assert site.px.topics.describe("open").messages == 10
    assert site.px.topics.describe("kept").messages == 1 + 100 * len(COMPRESSIONS)


def test_a_worker_of_one_queue(site: Site) -> None:
    with site.connect("queue:mail:read,write", "topic:orders:write") as px:
        px.put("mail", "another")
        with px.transaction() as tx:
            item = tx.take("mail")
            assert item is not None
            tx.put("mail", "from it")
            tx.send("orders", "from it")
        with pytest.raises(PermissionDenied, match="queue:vault:write"):
            px.put("vault", "x")
        with pytest.raises(PermissionDenied, match="queue:vault:read"), px.transaction() as tx:
            tx.take("vault")
        with pytest.raises(PermissionDenied, match="queue:mail:admin"):
            px.queues.delete("mail")
        assert [queue.name for queue in px.queues.list()] == ["mail"]
    assert site.px.queues.describe("mail").ready == 2
    assert [queue.name for queue in site.px.queues.list()] == ["mail"]
    assert site.px.topics.describe("orders").messages == 11


def test_items_of_another_queue_by_their_numbers(site: Site) -> None:
    client = site.remote("queue:mine:read,write,admin")
    with pxrs.connect(site.url(site.admin)) as px:
        px.put("mine", "x")
    session = client.coord.session(PATIENCE)
    holder = Holder(session.id, "t")
    (theirs,) = site.stores.queues.peek("mail", ALL)
    before = site.stores.queues.peek("mail", ALL)
    number = theirs.id
    assert client.queues.drop("mine", [number + 10**6]) == 0
    client.queues.redrive("mine", [number])
    client.queues.release(holder, [Release(Held("mine", number, 1), dead=True)])
    with pytest.raises(PxrsError):
        client.queues.apply(QueueChange(holder, remove=(Held("mine", number, 0),)))
    with pytest.raises(PxrsError):
        client.queues.extend(holder, [Held("mine", number, 0)], 9.0)
    assert site.stores.queues.peek("mail", ALL) == before


def test_a_transaction_is_refused_as_a_whole(site: Site) -> None:
    with site.connect("queue:mail:read", "topic:orders:read") as px:
        before = site.content()
        with pytest.raises(PermissionDenied, match="topic:orders:write"), px.transaction() as tx:
            assert tx.take("mail") is not None
            tx.send("orders", "x")
    (item,) = site.stores.queues.peek("mail", ALL)
    assert item.deliveries == 1
    assert site.px.topics.describe("orders").messages == 10
    assert len(before) == len(site.content())


def test_who_makes_and_deletes_topics(site: Site) -> None:
    with site.connect("topic:team.*:admin,read,write", "group:team.*:write,admin") as px:
        px.topics.create("team.a", 3)
        with px.producer() as producer:
            producer.send("team.a", "x").result(PATIENCE)
        with px.consumer("team.a", group="team.g", start="earliest") as consumer:
            assert [message.value for message in consumer.poll(timeout=PATIENCE)] == [b"x"]
        px.groups.reset("team.g", "team.a", to="earliest")
        px.groups.delete("team.g")
        px.topics.delete("team.a")
        px.topics.create("team.a", 1)
        assert [topic.name for topic in px.topics.list()] == ["team.a"]
        with pytest.raises(PermissionDenied, match="topic:orders"):
            px.topics.delete("orders")
        with pytest.raises(PermissionDenied, match="topic:team:"):
            px.topics.create("team", 1)


def test_a_relay_needs_its_group_and_both_topics(site: Site) -> None:
    site.px.topics.create("copy", 1)
    given = ["topic:orders:read", "topic:copy:read,write", "group:relay:write"]
    for lacks in ("topic:copy:read,write", "group:relay:write"):
        with site.connect(*(right for right in given if right != lacks)) as px:
            with pytest.raises((PermissionDenied, TopicNotFound)):
                px.relay("orders", topic="copy").join(PATIENCE)
            assert site.px.topics.describe("copy").messages == 0
    with (
        site.connect(*given) as px,
        px.relay("orders", topic="copy"),
        site.px.consumer("copy", group="reads", start="earliest") as consumer,
    ):
        copied: list[bytes] = []
        while len(copied) < 10:
            copied += [message.value for message in consumer.poll(timeout=PATIENCE)]
        assert sorted(copied) == sorted(b"orders%d" % n for n in range(10))


def test_who_may_lay_a_topic_over_a_source(site: Site, tmp_path: Path) -> None:
    """A node would open any file for it."""
    path = tmp_path / "secret.jsonl"
    path.write_text('{"password": "x"}\n')
    source = pxrs.sources.JsonLines(str(path))
    with site.connect("topic:mine:admin,read,write", "group:mine:admin,read,write") as px:
        with pytest.raises(PermissionDenied, match="cluster:store:admin"):
            px.attach("mine", source, partitions=1)
        assert px.topics.list() == []
    with site.connect("topic:mine:admin", "cluster:store:admin") as px:
        px.attach("mine", source, partitions=1)


def test_keys_by_their_names(site: Site) -> None:
    with site.connect("key:user*:read,write", "key:seen:read", "key:written:write") as px:
        version = px.kv.put("user1", "a")
        entry = px.kv.get("user1")
        assert entry is not None
        assert (entry.value, entry.version) == (b"a", version)
        px.kv.put("user1", "b", if_match=version, idempotency_key="once")
        assert px.kv.delete("user1")
        assert px.kv.get("seen") is None
        px.kv.put("written", "x")
        for refused, right in (
            (lambda: px.kv.get("written"), "key:written:read"),
            (lambda: px.kv.put("seen", "x"), "key:seen:write"),
            (lambda: px.kv.delete("use"), "key:use:write"),
            (lambda: px.kv.get(b"\xffuser"), "key:\\udcffuser:read"),
            (lambda: list(px.kv.scan("user")), "cluster:store:admin"),
            (lambda: px.kv.watch("user"), "cluster:store:admin"),
        ):
            with pytest.raises(PermissionDenied) as told:
                refused()
            assert told.value.right == right
    assert site.px.kv.get("seen") is None


def test_a_write_that_is_refused_takes_no_other_down_with_it(site: Site) -> None:
    with site.connect("key:mine*:write") as px, ThreadPoolExecutor(8) as pool:
        writes = [
            (owner, pool.submit(px.kv.put, f"{owner}{number}", "x"))
            for number in range(40)
            for owner in ("mine", "theirs")
        ]
        for owner, write in writes:
            if owner == "mine":
                assert write.result(PATIENCE).index > 0
            else:
                with pytest.raises(PermissionDenied, match="key:theirs"):
                    write.result(PATIENCE)
    assert len(list(site.px.kv.scan("mine"))) == 40
    assert not list(site.px.kv.scan("theirs"))


def test_a_read_that_is_refused_takes_no_other_down_with_it(site: Site) -> None:
    site.px.kv.put("mine", "x")
    with site.connect("key:mine:read") as px, ThreadPoolExecutor(8) as pool:
        reads = [
            (key, pool.submit(px.kv.get, key)) for _ in range(40) for key in ("mine", "theirs")
        ]
        for key, read in reads:
            if key == "mine":
                assert read.result(PATIENCE) is not None
            else:
                with pytest.raises(PermissionDenied, match="key:theirs"):
                    read.result(PATIENCE)


def test_keys_are_not_reached_through_records(site: Site) -> None:
    """Their shards' heads are shared: who writes one can stop or falsify the keys of others."""
    client = site.remote("key:*:read,write,admin")
    for record in site.stores.coord.list("kv"):
        with pytest.raises(PermissionDenied):
            client.coord.get(record.key)
        with pytest.raises(PermissionDenied):
            client.coord.commit([], [Put(record.key, record.value)])
    with pytest.raises(PermissionDenied):
        client.coord.list("kv/")


# What a client writes where it may


def test_a_topic_has_a_log_of_its_own(site: Site) -> None:
    """Who may make a topic must not get another's log with it, not even a deleted one's."""
    client = site.remote("topic:mine:admin,read,write")
    orders, left = site.px.topics.find("orders"), site.px.topics.find("open")
    site.stores.coord.commit([], [Delete("topics/open")])
    mine = site.stores.coord.get("topics/orders")
    assert mine is not None
    for topic in (orders, left):
        record = mine.value.replace(orders.id.encode(), topic.id.encode())
        for write in (
            lambda record=record: client.coord.commit([], [Put("topics/mine", record)]),
            lambda record=record: client._link.call(
                "node.atomic", [], [WireWrite("topics/mine", record)], [], None
            ),
        ):
            with pytest.raises(InvalidRequest, match="a log of its own"):
                write()
    assert site.stores.coord.get("topics/mine") is None
    with pytest.raises(PxrsError):
        client.log.fetch(LogPartition(left.id, 0), 0, 100)


UNREADABLE = (b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"schema":2}', b'{"schema":"1"}')
NO_TOPICS = (
    b"{}",
    b'{"schema":2,"id":"a","partitions":1}',
    b'{"schema":1,"id":"a/b","partitions":1}',
    b'{"schema":1,"id":"","partitions":1}',
    b'{"schema":1,"id":"a","partitions":0}',
    b'{"schema":1,"id":"a","partitions":1,"partitioner":"x"}',
    b'{"schema":1,"id":"a","partitions":1,"retention_ms":-1}',
    b'{"schema":1,"id":"a","partitions":1,"retention_bytes":0}',
)


def test_records_that_others_could_not_read(site: Site) -> None:
    client = site.remote("topic:mine:admin", "group:mine:write")
    session = client.coord.session(PATIENCE)
    before = site.content()
    keys = ["group/mine", "claims/mine/t/0", "history/mine/000000000001", "topics/mine"]
    keys += [f"resets/mine/{0:015}-w-{0:06}", "relays/mine/s", "relays/mine/s/t/0"]
    puts = [
        *(Put("topics/mine", value) for value in NO_TOPICS),
        *(Put(key, value) for key in keys for value in UNREADABLE),
        *(Put("members/mine/m", value, session.id) for value in UNREADABLE),
    ]
    for put in puts:
        with pytest.raises(InvalidRequest):
            client.coord.commit([], [put])
            pytest.fail(f"{put} was not refused")
    assert site.content() == before
    good = b'{"schema":1,"id":"a","partitions":1}'
    assert isinstance(client.coord.commit([], [Put("topics/mine", good)]), Committed)


def test_records_of_a_group_are_where_they_belong(site: Site) -> None:
    client = site.remote("topic:orders:read", "group:mine:write", "group:_pxrs.*:write,admin")
    session = client.coord.session(PATIENCE)
    member = records.MemberRecord(id="m.1", topics=("orders",))
    held = records.MemberRecord(id="m.1", topics=(), node="10.0.0.1:80")
    other = records.MemberRecord(id="m.1", topics=("open",))
    claim = records.encode(records.Claim())
    for put, kind in (
        (Put("claims/mine/t/x", claim), InvalidRequest),
        (Put("claims/mine/t", claim), InvalidRequest),
        (Put("claims/mine/t/0/0", claim), InvalidRequest),
        (Put("claims/mine/", claim), InvalidRequest),
        (Put("claims/mine/t/0", claim, session.id), InvalidRequest),
        (Put("claims/mine", claim), PermissionDenied),
        (Put("claims/mine/../billing/0", claim), InvalidRequest),
        (Put("claims/../billing/t/0", claim), PermissionDenied),
        (Put("claims/%62illing/t/0", claim), PermissionDenied),
        (Put("claims/_pxrs.nodes/_pxrs.slots/0", claim), PermissionDenied),
        (Put("history/mine/1", b"{}"), InvalidRequest),
        (Put("members/mine/a/b", records.encode(member), session.id), InvalidRequest),
        (Put("members/mine/a", records.encode(member)), InvalidRequest),
        (Put("members/mine/a", records.encode(held), session.id), InvalidRequest),
        (Put("members/mine/a", records.encode(other), session.id), PermissionDenied),
        (Put("members/mine/a", records.encode(member), "x"), SessionLost),
        (Put("members/mine/a", records.encode(member), ""), SessionLost),
    ):  # fmt: skip
        with pytest.raises(kind):
            client.coord.commit([], [put])
    with pytest.raises(PermissionDenied, match="group:mine:admin"):
        client.coord.commit([], [Delete("group/mine")])
    with pytest.raises(PermissionDenied, match="group:mine:admin"):
        client.coord.commit([], [Delete("claims/mine/t/0")])
    good = Put("members/mine/a", records.encode(member), session.id)
    assert isinstance(client.coord.commit([], [good, Put("claims/mine/t/0", claim)]), Committed)
    conflict = client.coord.commit([Check("claims/mine/t/0", 99)], [])
    assert isinstance(conflict, Conflict)


def test_batches_that_others_could_not_read(site: Site) -> None:
    client = site.remote("topic:orders:write", "topic:open:write")
    good = batch()
    torn = Batch(good.data[:-1] + b"x", good.count, good.max_timestamp)
    lies = Batch(good.data, 1000, good.max_timestamp)
    where = site.part("orders")
    results = client.log.append([Append(where, torn), Append(site.part("open"), lies)])
    assert isinstance(results[0], InvalidRequest)
    assert not isinstance(results[1], PxrsError)
    # The log has as many messages as the batch has.
    assert site.px.topics.describe("open").messages == 11
    with pytest.raises(InvalidRequest):
        client._link.call("node.atomic", [], [], [Append(where, torn)], None)
    assert site.px.topics.describe("orders").messages == 10


def test_a_writer_expires_no_more_than_retention_says(site: Site) -> None:
    site.px.topics.create("kept", 1, retention=3600.0)
    for topic in ("kept", "open"):
        for _ in range(3):
            site.stores.log.append(
                [Append(site.part(topic), encode([(None, b"v", [], SYSTEM_CLOCK.wall_ms())]))]
            )
    writer = site.remote("topic:kept:write", "topic:open:write")
    for topic in ("kept", "open"):
        start = site.stores.log.bounds(site.part(topic).topic_id)[0].start
        assert writer.log.expire(site.part(topic), 2**45, 1) == start
    with pytest.raises(PermissionDenied, match="topic:kept:admin"):
        writer.log.trim(site.part("kept"), 3)
    owner = site.remote("topic:kept:admin")
    assert owner.log.expire(site.part("kept"), 2**45, None) == 2


# Sessions


def test_sessions_of_others(site: Site) -> None:
    one, other = (site.remote("group:g:write", "queue:mail:read") for _ in range(2))
    session = one.coord.session(PATIENCE)
    holder = Holder(session.id, "t")
    member = records.encode(records.MemberRecord(id="a", topics=()))
    before = site.content()
    for method, *arguments in (
        ("node.renew_session", session.id),
        ("node.close_session", session.id),
        ("coord.commit", [], [Put("members/g/a", member, session.id)]),
        ("node.atomic", [], [WireWrite("members/g/a", member, session.id)], [], None),
        ("node.atomic", [], [], [], QueueChange(holder)),
        ("queues.take", "mail", holder, 1),
        ("queues.held", "mail", holder, "u"),
        ("queues.apply", QueueChange(holder, put=())),
        ("queues.release", holder, []),
        ("queues.extend", holder, [], 1.0),
        ("queues.outcome", session.id, "u"),
    ):
        with pytest.raises(PermissionDenied, match="another client"):
            other._link.call(method, *arguments)
    assert site.content() == before
    session.renew()
    assert len(one.queues.take("mail", holder, 1).items) == 1
    session.close()
    # Its own client is told that it is over.
    with pytest.raises(SessionLost):
        one.queues.take("mail", holder, 1)


def test_a_session_is_its_clients_on_every_node(site: Site, tmp_path: Path) -> None:
    """Another node of the store knows by its record whose it is."""
    token = site.token("queue:mail:read")
    session = site.open(token).coord.session(PATIENCE)
    url = f"sqlite:///{tmp_path}/rights.db"
    with LocalNode(url, auth="tokens", node_id="b") as second:
        holder = Holder(session.id, "t")
        for login, allowed in ((token, True), (site.token("queue:mail:read"), False)):
            stores = RemoteStores(remote_settings(parse_url(f"pxrs://{login}@{second.address}")))
            try:
                if allowed:
                    assert len(stores.queues.take("mail", holder, 1).items) == 1
                else:
                    with pytest.raises(PermissionDenied, match="another client"):
                        stores.queues.take("mail", holder, 1)
            finally:
                stores.close()


# Tokens that change


def narrow(site: Site, name: str, *given: str) -> None:
    """Give the token other rights, as a revocation and a new token of that secret would."""
    key = f"tokens/{name}"
    found = site.stores.coord.get(key)
    assert found is not None
    record = msgspec.json.decode(found.value)
    record["rights"] = msgspec.to_builtins([parse_right(each) for each in given])
    site.stores.coord.commit([], [Put(key, msgspec.json.encode(record))])
    site.node.guard._known.clear()


def until(is_so: Callable[[], bool]) -> None:
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE
    while not is_so():
        assert SYSTEM_CLOCK.monotonic() < deadline


def test_rights_are_those_of_now(site: Site) -> None:
    client = site.remote("topic:orders:read", "topic:open:read", name="changing")
    where = site.part("orders")
    armed = client.log.watch(where)
    assert client.log.fetch(where, 0, 100).end == site.stores.log.fetch(where, 0, 1).end
    narrow(site, "changing", "topic:open:read")
    with pytest.raises(PermissionDenied):
        client.log.fetch(where, 0, 100)
    assert client.log.fetch(site.part("open"), 0, 100)
    # The stream that the watch was armed on is over, and the new one has refused to arm it. It
    # wakes for both: its owner may have missed something.
    until(lambda: not client._link._hands_over)
    armed.wait(0)
    site.stores.log.append([Append(where, batch())])
    assert client.log.bounds(site.part("open").topic_id)
    assert not armed.wait(0)
    narrow(site, "changing", "cluster:store:admin")
    assert client.log.fetch(where, 0, 100)
    site.tokens.revoke("changing")
    site.node.guard._known.clear()
    with pytest.raises(PxrsError, match="wrong"):
        client.log.fetch(where, 0, 100)


def test_a_revoked_token_hears_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # A look at the token that began before it was revoked would be remembered after it.
    monkeypatch.setattr("pxrs.server.rest.guard._REMEMBERED", 0.0)
    client = site.remote("topic:orders:read", name="listener")
    client.log.watch(site.part("orders"))
    site.tokens.revoke("listener")
    stream = client._link._stream
    assert stream is not None
    heard: list[int | None] = []
    stream._woken = heard.append
    site.stores.log.append([Append(site.part("orders"), batch())])
    stream._reader.join(PATIENCE)
    assert stream.is_broken
    assert "this token is wrong" in stream.refusal
    # That the stream broke, and of no watch.
    assert heard == [None]


# Keys of records

# What belongs to the cluster, by its first part. A folder that is added is closed, and stands here
# or is opened by a rule.
CLOSED = {
    "tokens", "node-secret", "node-numbers", "nodes", "apps", "client-sessions", "doctor", "copy",
    "kv", "kv-heads", "kv-once", "kv-due", "kv-writers", Layout("q").folder.partition("/")[0],
    "store", *(folder.rstrip("/") for folder in (LIST, HOLDERS, COMMITS)),
}  # fmt: skip
NOBODY = Identity("nobody", ())


def test_every_record_that_the_library_writes_is_known(site: Site) -> None:
    with site.connect("topic:*:read,write,admin", "group:*:read,write", "queue:*:read,write") as px:
        px.topics.create("more", 1)
        px.put("mail", "x", delay=60)
        with px.consumer("more", group="many", instance="static", start="earliest") as consumer:
            with px.producer() as producer:
                producer.send("more", "x").result(PATIENCE)
            assert consumer.poll(timeout=PATIENCE)
            consumer.commit()
            consumer.seek("more", 0, 0)
            with px.relay("orders", topic="more", group="many"):
                pass
            site.px.kv.put("ttl", "x", ttl=60, idempotency_key="once")
            with site.px.transaction() as tx:
                tx.take("mail")
            client = site.node.client()
            client.close()
            keys = [record.key for record in site.stores.coord.list("")]
    owned = {key: owner for key in keys if (owner := rights.owner_of(key)) is not None}
    folders = {owner.folder for owner in owned.values()}
    assert folders == {"topics", "group", "members", "claims", "history", "resets", "relays"}
    for key in keys:
        if key not in owned:
            first, _, rest = key.partition("/")
            assert first in CLOSED or rest.startswith("_pxrs."), key
            assert rights.to_see(key) == (rights.CLUSTER,)
    seen = {key.partition("/")[0] for key in keys if key not in owned}
    assert seen >= {"tokens", "node-secret", "node-numbers", "nodes", "kv", "kv-heads", "kv-once",
                    "kv-due", "client-sessions", "group", "claims"}  # fmt: skip


NAMES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", ".", "..", "a/b", "%2F", "orders%00", "_pxrs.nodes", "orders", "a" * 250, "*", "o*"]
    ),
)
OPEN = ["topics", "group", "members", "claims", "history", "resets", "relays"]
FOLDERS = st.one_of(
    st.sampled_from([*OPEN, *sorted(CLOSED)]),
    st.text(max_size=12),
)


@given(folder=FOLDERS, parts=st.lists(NAMES, max_size=4))
def test_a_key_is_open_only_with_a_right_on_a_name_in_it(folder: str, parts: list[str]) -> None:
    key = "/".join([folder, *parts])
    wanted = rights.to_see(key)
    assert not rights.may(NOBODY, wanted)
    owner = rights.owner_of(key)
    if owner is None:
        assert wanted == (rights.CLUSTER,)
        everything_else = [right for right in all_rights() if right.kind != "cluster"]
        assert not rights.may(Identity("all", tuple(everything_else)), wanted)
        return
    assert folder not in CLOSED
    assert owner.name == key.split("/")[1]
    assert "/" not in owner.name
    assert not owner.name.startswith("_pxrs.")
    for right in (f"{owner.kind}:{owner.name}x:read", f"{owner.kind}:x{owner.name}*:read"):
        assert not rights.may(Identity("other", (parse_right(right),)), wanted)


@given(
    prefix=st.one_of(
        st.text(max_size=20),
        FOLDERS.flatmap(
            lambda folder: st.integers(0, 30).map(lambda cut: f"{folder}/billing/t/0"[:cut])
        ),
    )
)
def test_a_prefix_is_open_only_within_one_name(prefix: str) -> None:
    """Whatever begins with a prefix that may be listed is the same owner's."""
    if rights.is_shared(prefix):
        assert prefix.startswith(("topics/", "group/"))
        return
    owner = rights.owner_of(prefix)
    if owner is not None:
        assert prefix.startswith(f"{owner.folder}/{owner.name}/")


def test_long_lists_are_answered_in_pages(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.server.remote.gate._PAGE", 3)
    for number in range(20):
        site.px.topics.create(f"{'ab'[number % 2]}{number:02}", 1)
    client = site.remote("topic:a*:read")
    wanted = [f"topics/a{number:02}" for number in range(0, 20, 2)]
    assert [it.key for it in client.coord.list("topics/")] == wanted
    assert [it.key for it in client.coord.list("topics/", limit=4)] == wanted[:4]
    found: list[str] = []
    while page := client.coord.list("topics/", after=found[-1] if found else None, limit=3):
        found += [it.key for it in page]
    assert found == wanted
    with pytest.raises(InvalidRequest):
        client.coord.list("topics/", limit=0)


def test_without_tokens_nothing_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("pxrs.server.remote.gate.Gate.call", refuse)
    with LocalNode(f"sqlite:///{tmp_path}/open.db") as node:
        stores = RemoteStores(remote_settings(parse_url(f"pxrs://{node.address}")))
        assert isinstance(stores.coord.commit([], [Put("any", b"1")]), Committed)
        assert [it.key for it in stores.coord.list("any")] == ["any"]
        stores.close()
