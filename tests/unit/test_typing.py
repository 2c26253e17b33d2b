"""What type checkers know of values, with a serde and without.

The functions that are no tests are never called: mypy checks them. An `ignore` that hides no error
is an error itself, so what is wrong in them has to stay wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Annotated, Any, assert_type

import pxrs
from pxrs import (
    JSON,
    Consumer,
    Fence,
    Item,
    ItemInfo,
    Message,
    Producer,
    Pxrs,
    Reader,
    UnitOfWork,
    aio,
)


def test_that_messages_are_generic_costs_nothing() -> None:
    message: Message[bytes] = Message(Fence("t", 0, 1), 0, 0, b"k", b"v", ())
    assert not gc.is_tracked(message)
    assert not hasattr(message, "__dict__")


class Order:
    """Somebody's own type."""


class Orders:
    """A serde that is no class of pxrs."""

    def encode(self, value: Order) -> bytes:
        return b""

    def decode(self, data: bytes) -> Order:
        return Order()


def serdes() -> None:
    assert_type(JSON(Order), JSON[Order])
    assert_type(JSON(list[Order]).decode(b""), list[Order])
    assert_type(JSON().decode(b""), Any)
    accept_orders(Orders())
    accept_orders(JSON(int))  # type: ignore[arg-type]


def accept_orders(serde: pxrs.Serde[Order]) -> None:
    assert_type(serde.decode(b""), Order)


def topics(px: Pxrs) -> None:
    plain = px.consumer("orders", group="g", start="earliest")
    assert_type(plain, Consumer[bytes])
    typed = px.consumer("orders", "g", serde=JSON(Order), auto_commit=False)
    assert_type(typed, Consumer[Order])
    assert_type(px.consumer("orders", "g", serde=Orders()), Consumer[Order])
    assert_type(px.consumer("orders", "g", serde=JSON(Order | None)), Consumer[Any])
    assert_type(px.consumer("orders", "g", serde=JSON(Annotated[int, 5])), Consumer[Any])
    for message in typed:
        assert_type(message, Message[Order])
        message.value.nothing  # type: ignore[attr-defined]  # noqa: B018
    assert_type(plain.poll()[0].value, bytes)
    assert_type(next(typed.batches()), list[Message[Order]])
    assert_type(typed.run_transaction(lambda tx: len(tx.take_many("mail", 5))), int)
    assert_type(typed.run_transaction(work_in_transaction, attempts=3), int)
    never = typed.run_transaction(await_in_transaction)  # type: ignore[arg-type]
    never.close()
    typed.run_transaction(work_in_transaction, attempts="3")  # type: ignore[arg-type]
    with typed as entered:
        assert_type(entered, Consumer[Order])
    px.consumer("orders", "g", serde=Order)  # type: ignore[arg-type]
    px.consumer("orders", "g", auto_comit=False)  # type: ignore[call-arg]

    assert_type(px.topics.dead("orders")[0].value, bytes)
    assert_type(px.topics.dead("orders", serde=JSON(Order))[0].value, Order | bytes)

    assert_type(px.reader("orders"), Reader[bytes])
    reader = px.reader("orders", serde=JSON(Order))
    assert_type(reader.read(0, 0), list[Message[Order]])
    assert_type(next(iter(reader.follow())).value, Order)

    producer = px.producer(linger=0.0)
    assert_type(producer, Producer[str | bytes])
    producer.send("orders", "text", key="k")
    producer.send("orders", None, key="k")
    producer.send("orders", Order())  # type: ignore[arg-type]
    with px.producer(serde=JSON(Order)) as orders:
        assert_type(orders, Producer[Order])
        orders.send("orders", Order())
        orders.send("orders", "text")  # type: ignore[arg-type]
        orders.send_many("orders", [("k", Order())])
        orders.send_many("orders", [("k", 5)])  # type: ignore[list-item]


def queues(px: Pxrs) -> None:
    assert_type(px.put("mail", "text"), int | None)
    assert_type(px.put_many("mail", ["text", b"bytes"], delay=5.0), list[int | None])
    px.put("mail", 42)  # type: ignore[call-overload]
    px.put_many("mail", [42])  # type: ignore[list-item]
    px.put("mail", Order(), serde=JSON(Order), key="k")
    px.put("mail", 42, serde=Orders())  # type: ignore[misc]
    px.put("mail", 42, serde=JSON())
    px.put("mail", "text", priority="high")  # type: ignore[call-overload]

    with px.transaction() as tx:
        assert_type(tx, UnitOfWork[str | bytes])
        assert_type(tx.take("mail"), Item[str | bytes] | None)
        tx.put("mail", 42)  # type: ignore[arg-type]
    with px.begin(serde=JSON(Order)) as orders:
        assert_type(orders, UnitOfWork[Order])
        assert_type(orders.take_many("orders", 5), list[Item[Order]])
        assert_type(orders.put("orders", Order()), pxrs.PutItem)
        orders.put_many("orders", ["text"])  # type: ignore[list-item]
        orders.send("orders", "text")  # type: ignore[arg-type]

    assert_type(px.queues.peek("mail"), Sequence[ItemInfo[str | bytes]])
    assert_type(px.queues.dead("orders", serde=JSON(Order))[0].value, Order | bytes)


def handlers(px: Pxrs) -> None:
    px.run(handle_bytes, topic="orders", group="g", workers=2)
    px.run(handle_order, topic="orders", group="g", serde=JSON(Order))
    px.run(handle_any, topic="orders", group="g")
    px.run(handle_any, topic="orders", group="g", serde=JSON(Order))
    px.run(handle_order, topic="orders", group="g")  # type: ignore[arg-type]
    px.run(handle_bytes, topic="orders", group="g", serde=JSON(Order))  # type: ignore[arg-type]
    px.run(handle_bytes, topic="orders", group="g", worker=2)  # type: ignore[call-overload]

    px.listen("orders", handle_item, serde=JSON(Order), deadline=5.0)
    px.listen("orders", handle_item_and_put, serde=JSON(Order))
    px.listen("mail", handle_mail)
    px.listen("mail", handle_item)  # type: ignore[arg-type]
    px.listen("orders", handle_mail, serde=JSON(Order))  # type: ignore[arg-type]
    px.listen("orders", await_item, serde=JSON(Order))  # type: ignore[arg-type]


def handle_bytes(message: Message[bytes]) -> None: ...
def handle_order(message: Message[Order]) -> None: ...
def handle_any(message: Message) -> None: ...
def handle_item(item: Item[Order], tx: UnitOfWork[Order]) -> None: ...
def handle_item_and_put(item: Item[Order], tx: UnitOfWork[Any]) -> None: ...
def handle_mail(item: Item[str | bytes], tx: UnitOfWork[str | bytes]) -> None: ...
async def await_item(item: Item[Order], tx: aio.UnitOfWork[Order]) -> None: ...
def work_in_transaction(tx: pxrs.Transaction) -> int:
    return 0


async def await_in_transaction(tx: aio.Transaction) -> None: ...
async def await_order(message: Message[Order]) -> None: ...


async def awaited(px: aio.Pxrs) -> None:
    async with px.consumer("orders", "g", serde=JSON(Order)) as typed:
        assert_type(typed, aio.Consumer[Order])
        assert_type(await typed.poll(), list[Message[Order]])
        assert_type(typed.batches(5), aio.Arriving[list[Message[Order]]])
        assert_type(typed.transaction(commits=None), aio.Transaction)
        assert_type(await typed.commit(), None)
        await typed.run_transaction(await_in_transaction, attempts=3)
        await typed.run_transaction(work_in_transaction)  # type: ignore[arg-type]
        await typed.poll(max_records="5")  # type: ignore[arg-type]
        typed.batches("5")  # type: ignore[arg-type]
        await typed.commit("message")  # type: ignore[arg-type]
        async for message in typed:
            assert_type(message, Message[Order])
    async with px.consumer("orders", "g") as plain:
        assert_type((await plain.poll())[0].value, bytes)

    reader = await px.reader("orders", serde=JSON(Order))
    assert_type(reader, aio.Reader[Order])
    assert_type(await reader.read(0, 0), list[Message[Order]])
    async for message in reader.follow():
        assert_type(message, Message[Order])

    assert_type(px.producer(linger=0.0), aio.Producer[str | bytes])
    assert_type(px.begin(strict=True), aio.UnitOfWork[str | bytes])
    assert_type(px.begin(serde=Orders()), aio.UnitOfWork[Order])
    assert_type(await px.reader("orders"), aio.Reader[bytes])
    assert_type(px.consumer("orders", "g"), aio.Opening[aio.Consumer[bytes]])
    assert_type(aio.connect("memory://", coord=None), aio.Opening[aio.Pxrs])
    await px.reader("orders", serde=Order)  # type: ignore[arg-type]
    px.begin(strikt=True)  # type: ignore[call-arg]
    aio.connect("memory://", cord=None)  # type: ignore[call-arg]
    aio.connect()  # type: ignore[call-arg]
    async with px.producer(serde=JSON(Order)) as orders:
        assert_type(orders, aio.Producer[Order])
        await orders.send_many("orders", [("k", Order())])
        await orders.send_many("orders", [("k", 5)])  # type: ignore[list-item]
        await orders.send("orders", Order())
        await orders.send("orders", "text")  # type: ignore[arg-type]
    async with px.producer() as producer:
        await producer.send("orders", Order())  # type: ignore[arg-type]

    assert_type(await px.put("mail", "text"), int | None)
    await px.put("mail", 42)  # type: ignore[call-overload]
    await px.put_many("orders", [Order()], serde=JSON(Order))
    async with px.transaction(serde=JSON(Order)) as tx:
        assert_type(tx, aio.UnitOfWork[Order])
        assert_type(await tx.take("orders"), Item[Order] | None)
        assert_type(await tx.put("orders", Order()), pxrs.PutItem)
        assert_type(await tx.put_many("orders", [Order()], delay=1.0), list[pxrs.PutItem])
        await tx.put("orders", 42)  # type: ignore[arg-type]
        await tx.put("orders", Order(), delay="soon")  # type: ignore[arg-type]
        await tx.take_many("orders")  # type: ignore[call-arg]
        await tx.rollback(5)  # type: ignore[arg-type]
    px.run(await_order, topic="orders", group="g", serde=JSON(Order))
    px.run(await_order, topic="orders", group="g")  # type: ignore[arg-type]
    px.listen("orders", await_item, serde=JSON(Order))
    px.listen("orders", await_item)  # type: ignore[arg-type]
    assert_type(await px.queues.peek("mail"), Sequence[ItemInfo[str | bytes]])
    assert_type(await px.queues.dead("mail", serde=JSON(Order)), Sequence[ItemInfo[Order]])
