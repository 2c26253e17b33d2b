"""Every source that is shipped passes the suite, on the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pxrs.testing.conformance import SourceRule, source_checks
from support.engine_fixtures import mariadb_database
from support.source_lab import (
    MockKafka,
    json_lines_lab,
    kafka_lab,
    mariadb_lab,
    postgres_lab,
    redis_lab,
    sqlite_lab,
    subscription_lab,
)

CHECKS = pytest.mark.parametrize("check", source_checks(), ids=lambda check: check.__name__)


@CHECKS
@pytest.mark.engine("sqlite")
def test_a_table_in_sqlite(check: SourceRule) -> None:
    with closing(sqlite_lab()) as lab:
        check(lab)


@CHECKS
@pytest.mark.engine("postgres")
def test_a_table_in_postgres(check: SourceRule, postgres_of_many: str) -> None:
    with closing(postgres_lab(postgres_of_many)) as lab:
        check(lab)


@CHECKS
@pytest.mark.engine("mariadb")
def test_a_table_in_mariadb(check: SourceRule) -> None:
    with mariadb_database("mariadb/sources") as url, closing(mariadb_lab(url)) as lab:
        check(lab)


@CHECKS
@pytest.mark.parametrize("tells_its_end", [True, False], ids=["its-end", "no-end"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "ends"])
@pytest.mark.engine("memory")
def test_a_subscription(check: SourceRule, blocks: bool, tells_its_end: bool) -> None:
    with closing(subscription_lab(blocks=blocks, tells_its_end=tells_its_end)) as lab:
        check(lab)


@CHECKS
@pytest.mark.engine("sqlite")
def test_a_file_of_json_lines(check: SourceRule) -> None:
    with closing(json_lines_lab()) as lab:
        check(lab)


@CHECKS
@pytest.mark.engine("valkey")
def test_a_stream_of_valkey(check: SourceRule, valkey_url: str) -> None:
    with closing(redis_lab(valkey_url)) as lab:
        check(lab)


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with closing(MockKafka()) as kafka:
        yield kafka


# It keeps five megabytes of a partition, and finds no times.
_NOT_IN_THE_MOCK = {"check_large_rows_come_in_small_reads", "check_offset_of_a_time"}


@pytest.mark.parametrize(
    "check",
    [check for check in source_checks() if check.__name__ not in _NOT_IN_THE_MOCK],
    ids=lambda check: check.__name__,
)
def test_a_topic_of_a_protocol_mock_that_is_not_kafka(check: SourceRule, kafka: MockKafka) -> None:
    with closing(kafka_lab(kafka)) as lab:
        check(lab)
