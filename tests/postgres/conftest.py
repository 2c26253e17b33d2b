"""Stores in an empty database, opened as other processes would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pxrs.stores.postgres.stores import PostgresStores
from support.postgres import PostgresLab


@pytest.fixture
def lab(postgres_url: str) -> Iterator[PostgresLab]:
    lab = PostgresLab(postgres_url)
    yield lab
    lab.close()


@pytest.fixture
def deaf(postgres_url: str) -> Iterator[PostgresLab]:
    """Where no notification reaches anybody."""
    lab = PostgresLab(postgres_url, channel="nobody_hears_this")
    yield lab
    lab.close()


@pytest.fixture
def open_stores(lab: PostgresLab) -> Callable[[], PostgresStores]:
    return lab.open


@pytest.fixture
def stores(lab: PostgresLab) -> PostgresStores:
    return lab.open()
