"""Stores on a MariaDB that is emptied after each test: to make the tables takes a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_fixtures import mariadb_database
from support.sql import SqlPlace


@pytest.fixture(scope="package")
def sql_database() -> Iterator[str]:
    with mariadb_database() as url:
        yield url


@pytest.fixture
def place(sql_database: str) -> Iterator[SqlPlace]:
    place = SqlPlace(sql_database)
    yield place
    place.close()
