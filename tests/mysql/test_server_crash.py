"""A crash of a MariaDB that writes its log to disk now and then."""

from __future__ import annotations

from contextlib import closing

import pytest

from pxrs.testing.conformance.tools import put
from pxrs.types import Check, Conflict, Put
from support.engine_fixtures import NewEngine
from support.sql import open_sql

pytestmark = [pytest.mark.engine("mariadb"), pytest.mark.thorough]

_FORGETFUL = {"innodb-flush-log-at-trx-commit": "0", "innodb-flush-log-at-timeout": "2700"}
_MANY = 100


def test_a_version_is_not_given_twice_though_commits_are_lost(new_engine: NewEngine) -> None:
    """An owner that was frozen remembers a version; that of its successor must be another."""
    server = new_engine("mariadb", settings=_FORGETFUL)
    url = f"{server.url}?ssl_disabled=true"
    with closing(open_sql(url)) as frozen:
        put(frozen.coord, "k", b"old")
        remembered = [put(frozen.coord, "k", b"mine") for _ in range(_MANY)]
        server.kill()
        server.restart()
    with closing(open_sql(url)) as successor:
        given = [put(successor.coord, "k", b"yours") for _ in range(2 * _MANY)]
        assert set(given).isdisjoint(remembered)
        for version in remembered[:: _MANY // 10]:
            outcome = successor.coord.commit((Check("k", version),), (Put("k", b"stale"),))
            assert isinstance(outcome, Conflict)
