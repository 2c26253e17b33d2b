"""The schema: who may make it, which version it has, and what an operator sees of it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from click.testing import CliRunner

import pxrs
from pxrs.cli.main import cli
from pxrs.stores.postgres import schema
from support.postgres import query

pytestmark = pytest.mark.engine("postgres")


@pytest.fixture
def postgres_url(bare_postgres_url: str) -> str:
    return bare_postgres_url


@pytest.fixture
def humble_url(postgres_url: str) -> str:
    """A role that may do nothing in the database but own the schema `app`."""
    name = f"humble_{postgres_url.rpartition('_')[2]}"
    database = postgres_url.rpartition("/")[2]
    query(postgres_url, f"CREATE ROLE {name} LOGIN")
    query(postgres_url, f"REVOKE ALL ON DATABASE {database} FROM PUBLIC")
    query(postgres_url, f"GRANT CONNECT ON DATABASE {database} TO {name}")
    query(postgres_url, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
    return postgres_url.replace("postgres@", f"{name}@")


def test_a_role_that_owns_only_the_schema_can_do_everything(
    postgres_url: str, humble_url: str
) -> None:
    role = psycopg.conninfo.conninfo_to_dict(humble_url)["user"]
    query(postgres_url, f"CREATE SCHEMA app AUTHORIZATION {role}")
    with pxrs.connect(f"{humble_url}?schema=app") as px:
        px.topics.create("orders", partitions=2)
        with px.producer() as producer:
            producer.send("orders", b"1", key=b"k").result()
        with px.consumer("orders", group="billing") as consumer:
            assert [message.value for message in consumer.poll(timeout=10.0)] == [b"1"]
            with consumer.transaction() as tx:
                tx.send("orders", b"2", key=b"k")
            assert [message.value for message in consumer.poll(timeout=10.0)] == [b"2"]
        px.topics.delete("orders")


def test_such_a_role_has_queues_too(postgres_url: str, humble_url: str) -> None:
    role = psycopg.conninfo.conninfo_to_dict(humble_url)["user"]
    query(postgres_url, f"CREATE SCHEMA app AUTHORIZATION {role}")
    with pxrs.connect(f"{humble_url}?schema=app") as px:
        px.queues.create("strict", fifo=True)
        for number in range(3):
            px.put("inbox", str(number), key="k", dedupe=str(number))
        with px.transaction() as tx:
            items = tx.take_many("inbox", 2, timeout=10.0, lock_for=60.0)
            assert [item.value for item in items] == ["0", "1"]
            tx.extend(120.0)
            tx.execute("CREATE TABLE app.mine ()")
            tx.put("strict", "from inside")
        with px.begin() as tx:
            assert tx.take("inbox", 10.0, retry=pxrs.Backoff(attempts=1)) is not None
        assert [item.value for item in px.queues.dead("inbox")] == ["2"]
        assert px.queues.redrive("inbox") == 1
        assert px.queues.describe("inbox").ready == 1
        assert px.stores.queues.reap() is None
        assert px.queues.purge("inbox") == 1
        px.queues.delete("inbox")
        assert [queue.name for queue in px.stores.queues.all()] == ["strict"]


def test_a_role_that_may_not_make_the_schema_is_told_what_to_do(humble_url: str) -> None:
    with pytest.raises(pxrs.StoreReadOnly, match='CREATE SCHEMA "pxrs" AUTHORIZATION'):
        pxrs.connect(humble_url)


def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    pxrs.connect(postgres_url).close()
    query(postgres_url, "UPDATE pxrs.pxrs_meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(pxrs.SchemaMismatch, match="version 99, this one knows"):
        pxrs.connect(postgres_url)


def test_many_who_open_an_empty_database_at_once_make_it_once(postgres_url: str) -> None:
    def use(number: int) -> None:
        with pxrs.connect(postgres_url) as px:
            px.topics.create(f"t{number}", partitions=1)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(6)))
    with pxrs.connect(postgres_url) as px:
        assert len(px.topics.list()) == 6


def test_schemas_of_one_database_are_apart(postgres_url: str) -> None:
    with (
        pxrs.connect(f"{postgres_url}?schema=one") as one,
        pxrs.connect(f"{postgres_url}?schema=Two%20words") as two,
    ):
        one.topics.create("orders", partitions=1)
        assert two.topics.list() == []
        # What worker processes are started with.
        with pxrs.connect(one.url) as again:
            assert [topic.name for topic in again.topics.list()] == ["orders"]


def test_migrate_by_command(postgres_url: str) -> None:
    first = CliRunner().invoke(cli, ["store", "migrate", postgres_url])
    again = CliRunner().invoke(cli, ["store", "migrate", postgres_url, "--json"])
    assert first.output == f"migrated from version 0 to {schema.VERSION}\n"
    assert again.output == f'[{{"before":{schema.VERSION},"after":{schema.VERSION}}}]\n'


def test_the_view_shows_who_owns_what(postgres_url: str) -> None:
    with pxrs.connect(postgres_url) as px:
        px.topics.create("orders", partitions=2)
        with px.producer() as producer:
            producer.send("orders", b"1", partition=1).result()
        with px.consumer("orders", group="billing", instance="a") as consumer:
            assert consumer.poll(timeout=10.0)
            consumer.commit()
            rows = query(
                postgres_url,
                'SELECT "group", topic, partition, owner, checkpoint, epoch, heartbeat IS NOT NULL '
                "FROM pxrs.pxrs_partitions ORDER BY partition",
            )
    assert rows[1] == ("billing", "orders", 1, "a", 1, 1, True)
    assert [row[:4] for row in rows] == [("billing", "orders", n, "a") for n in (0, 1)]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("schem=x", "schem"),
        ("schema=", "schema"),
        ("schema=pg_x", "pg_"),
        ("connections=0", "connections"),
        ("connections=many", "connections"),
        ("busy_timeout=-1", "busy_timeout"),
        ("sslmode=perhaps", "sslmode"),
    ],
)
def test_wrong_options_are_refused(postgres_url: str, option: str, said: str) -> None:
    with pytest.raises(pxrs.PxrsError, match=said):
        pxrs.connect(f"{postgres_url}?{option}")


def test_a_server_that_is_not_there(postgres_url: str) -> None:
    with pytest.raises(pxrs.StoreUnavailable) as failed:
        pxrs.connect("postgresql://me:secret@127.0.0.1:1/app")
    assert failed.value.retryable
    assert "secret" not in str(failed.value)


def test_without_the_driver_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "import pxrs\n"
        "try: pxrs.connect('postgresql://localhost/app')\n"
        "except pxrs.MissingExtra as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'pxrs[postgres]'" in done.stdout, done.stderr
