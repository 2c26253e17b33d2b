"""A server that takes no statement above `max_allowed_packet`, and hangs up on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy

import pxrs
from pxrs.errors import InvalidRequest, PxrsError
from pxrs.stores.findings import Level
from pxrs.stores.mysql.stores import SqlStores
from pxrs.testing.conformance.tools import value_of
from pxrs.types import Committed, Put
from support.engine_fixtures import started
from support.sql import open_sql

pytestmark = pytest.mark.engine("mariadb")

LIMIT = 2**20
# The server reads a statement that is a little too large, and answers. On a larger one it hangs up.
A_LITTLE, FAR = 530_000, 1_000_000
NAMED = rf"up to {LIMIT} bytes \(max_allowed_packet\), got \d+;"


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    with started("mariadb", settings={"max-allowed-packet": str(LIMIT)}) as engine:
        yield engine.url


@pytest.fixture
def stores(small: str) -> Iterator[SqlStores]:
    stores = open_sql(small)
    yield stores
    stores.close()


@pytest.mark.parametrize("size", [A_LITTLE, FAR])
def test_a_record_that_is_too_large_is_refused_for_good(stores: SqlStores, size: int) -> None:
    with pytest.raises(InvalidRequest, match=NAMED):
        stores.coord.commit((), [Put("k", bytes(size))])
    assert stores.coord.get("k") is None
    assert isinstance(stores.coord.commit((), [Put("small", b"1")]), Committed)


def test_records_that_are_too_large_together_go_one_by_one(stores: SqlStores) -> None:
    both = [Put(f"both/{number}", bytes(400_000)) for number in range(2)]
    assert isinstance(stores.coord.commit((), both), Committed)
    assert value_of(stores.coord, "both/1") == bytes(400_000)


def put(px: pxrs.Pxrs, url: str, value: bytes) -> None:
    px.put("q", value)


def put_in_a_unit(px: pxrs.Pxrs, url: str, value: bytes) -> None:
    with px.transaction() as tx:
        tx.put("q", value)


def put_in_a_unit_of_the_caller(px: pxrs.Pxrs, url: str, value: bytes) -> None:
    with sqlalchemy.create_engine(url).begin() as connection:
        px.put("q", value, connection=connection)


@pytest.mark.parametrize("size", [A_LITTLE, FAR, 4 * FAR])
@pytest.mark.parametrize("way", [put, put_in_a_unit, put_in_a_unit_of_the_caller])
def test_an_item_that_is_too_large_is_refused_for_good(
    small: str, way: Callable[[pxrs.Pxrs, str, bytes], None], size: int
) -> None:
    with pxrs.connect(small) as px:
        px.queues.create("q")
        with pytest.raises(InvalidRequest, match=NAMED) as raised:
            way(px, small, bytes(size))
        assert not raised.value.retryable
        way(px, small, b"small")
        assert [item.value for item in px.queues.peek("q")] == [b"small"]
        px.queues.delete("q")


def test_a_limit_that_was_raised_meanwhile(small: str) -> None:
    """Connections keep the limit with which they were opened; one that was refused is replaced."""
    with pxrs.connect(small) as px, sqlalchemy.create_engine(small).begin() as admin:
        px.queues.create("raised")
        admin.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {8 * LIMIT}")
        try:
            with pytest.raises(PxrsError, match=r"max_allowed_packet|gone away") as raised:
                px.put("raised", bytes(FAR))
            assert "takes statements of up to" not in str(raised.value)
            px.put("raised", bytes(FAR))
        finally:
            admin.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {LIMIT}")


def test_the_doctor_notes_it(stores: SqlStores) -> None:
    found = {finding.check: finding for finding in stores.findings()}["queues"]
    assert found.level is Level.NOTE
    assert f"items and records of over {LIMIT // 2} bytes" in found.says
