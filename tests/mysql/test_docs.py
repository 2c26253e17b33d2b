"""What docs/sql.md shows of transactions runs, on a real MariaDB."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pxrs
from support.child import PATIENCE
from support.sql import SqlPlace

pytestmark = pytest.mark.engine("mariadb")

DOCS = Path(__file__).parents[2] / "docs" / "sql.md"


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "docs_orders"
    number: Mapped[int] = mapped_column(primary_key=True)


class Invoice(Base):
    __tablename__ = "docs_invoices"
    order: Mapped[int] = mapped_column(primary_key=True)


def test_the_example_of_transactions_runs(place: SqlPlace) -> None:
    (example,) = re.findall(r"```python\n(with Session.*?)```", DOCS.read_text(), re.DOTALL)
    Base.metadata.create_all(place.engine)
    with pxrs.connect("memory://", coord=place.url) as px:
        px.topics.create("orders", partitions=1)
        with px.producer() as producer:
            producer.send("orders", "7").result(PATIENCE)
        with px.consumer("orders", "billing", auto_commit=False) as consumer:
            names = {"Session": Session, "engine": place.engine, "px": px, "consumer": consumer}
            exec(example, {**names, "Order": Order, "Invoice": Invoice})
        assert px.groups.describe("billing").lag == 0
        assert [item.body for item in px.stores.queues.peek("outbox")] == [b"t7"]
    with Session(place.engine) as session:
        assert session.scalars(sqlalchemy.select(Order.number)).all() == [7]
        assert sorted(session.scalars(sqlalchemy.select(Invoice.order))) == [7, 8]
    Base.metadata.drop_all(place.engine)
