"""Fixtures of the tests of sources."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_fixtures import mariadb_database


@pytest.fixture
def mariadb_url() -> Iterator[str]:
    """A database in a MariaDB of the sources: readers there wait for all who write to the server,
    and tests of queues hold transactions open for long."""
    with mariadb_database("mariadb/sources") as url:
        yield url
