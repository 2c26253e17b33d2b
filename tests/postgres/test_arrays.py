"""Lists of one type, which pxrs encodes itself: as the driver does, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from pxrs.errors import InvalidRequest
from pxrs.stores.postgres.arrays import Byteas, Int8s, Texts, teach
from pxrs.stores.postgres.stores import PostgresStores
from pxrs.testing.conformance.tools import batch
from pxrs.types import Append, Check, LogPartition, Put

pytestmark = pytest.mark.engine("postgres")


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (Int8s([0, -1, 2**63 - 1, -(2**63)]), "int8[]"),
        (Int8s(), "int8[]"),
        (Texts(["", "a", "caf\xe9", '{,"}']), "text[]"),
        (Texts(), "text[]"),
        (Byteas([b"", b"\0\xff", b"x" * 100_000]), "bytea[]"),
        (Byteas([memoryview(b"12345")[2:]]), "bytea[]"),  # type: ignore[list-item]
        (Byteas(), "bytea[]"),
    ],
)
def test_the_server_gets_what_the_driver_would_send(
    postgres_url: str, encoding: str, values: list[Any], kind: str
) -> None:
    with psycopg.connect(postgres_url, client_encoding=encoding, row_factory=tuple_row) as theirs:
        ask = f"SELECT %b::{kind} = %b::{kind}, cardinality(%b::{kind})"
        # On a connection of the caller's they are plain lists.
        assert theirs.execute(ask, [values, list(values), values]).fetchone() == (True, len(values))
        with psycopg.connect(postgres_url, client_encoding=encoding, row_factory=tuple_row) as ours:
            teach(ours)
            found = ours.execute(ask, [values, list(values), values]).fetchone()
            assert found == (True, len(values))


@pytest.mark.parametrize(
    "use",
    [
        lambda stores: stores.coord.commit([Check("a", 2**63)], [Put("k", b"")]),
        lambda stores: stores.coord.commit([Check("a\0", 1)], [Put("k", b"")]),
        lambda stores: stores.coord.commit([Check("\ud800", 1)], [Put("k", b"")]),
        lambda stores: stores.log.append([Append(LogPartition("t", 2**63), batch(b"a"))]),
        lambda stores: stores.log.append([Append(LogPartition("\0", 0), batch(b"a"))]),
    ],
)
def test_what_no_column_can_hold_is_refused(
    stores: PostgresStores, use: Callable[[PostgresStores], object]
) -> None:
    with pytest.raises(InvalidRequest, match="can't hold such a value"):
        use(stores)
    assert stores.coord.get("k") is None
