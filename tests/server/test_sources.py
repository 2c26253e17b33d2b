"""Virtual topics over HTTP: fetched, and consumed by groups."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pxrs
from pxrs.sources import Table
from support.node import Client, LocalNode, looks

pytestmark = pytest.mark.engine("sqlite")

EVENTS = "/v1/topics/events"
GROUP = "/v1/groups/billing"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT)")
        db.execute("PRAGMA journal_mode = WAL")
    insert(path, 100)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM events WHERE id % 10 = 0")
    return path


def insert(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        rows = [(f"account-{number % 9}",) for number in range(count)]
        db.executemany("INSERT INTO events (account) VALUES (?)", rows)


@pytest.fixture
def client(path: Path) -> Iterator[Client]:
    url = f"sqlite:///{path}"
    with pxrs.connect(url) as px:
        px.attach("events", Table("events", key="account", value="account"), partitions=2)
    with LocalNode(url) as node, closing(node.client()) as client:
        yield client


def test_rows_are_fetched_page_by_page(client: Client) -> None:
    found = []
    for partition in (0, 1):
        at = 0
        while True:
            page = client.get(f"{EVENTS}/partitions/{partition}/messages?offset={at}&max=7")
            assert page.status == 200, page.body
            if page.json["next"] == at:
                break
            assert len(page.json["messages"]) <= 7
            found += [message["offset"] for message in page.json["messages"]]
            at = page.json["next"]
        assert at == 101
    assert sorted(found) == [number for number in range(1, 101) if number % 10]


def test_a_fetch_waits_for_rows(client: Client, path: Path) -> None:
    answers = []

    def wait(partition: int) -> None:
        answers.append(
            client.get(f"{EVENTS}/partitions/{partition}/messages?offset=101&wait=20").json
        )

    waiter = threading.Thread(target=wait, args=[0])
    waiter.start()
    insert(path, 9)
    waiter.join()
    assert answers[0]["next"] > 101


def test_a_group_commits_rows(client: Client) -> None:
    joined = client.post(f"{GROUP}/members", {"member": "a", "topics": ["events"]})
    assert joined.status == 201, joined.body
    for _ in looks():
        answer = client.get(f"{GROUP}/members/a").json
        if answer["settled"] and len(answer["partitions"]) == 2:
            break
    for part in answer["partitions"]:
        page = client.get(f"{EVENTS}/partitions/{part['partition']}/messages?offset=0&max=1000")
        done = client.post(
            f"{GROUP}/commits", {"commits": [{"fence": part["fence"], "offset": page.json["next"]}]}
        )
        assert done.json["commits"][0]["checkpoint"] == 101
    described = client.get(GROUP).json
    assert [part["lag"] for part in described["partitions"]] == [0, 0]


def test_what_can_not_be_done_with_rows(client: Client) -> None:
    sent = client.post(f"{EVENTS}/messages", {"messages": [{"value": "x"}]})
    assert (sent.status, sent.json["code"]) == (400, "invalid_request")
    assert "can only be read" in sent.json["detail"]
    raw = client.get(f"{EVENTS}/partitions/0/batches?offset=0")
    assert (raw.status, raw.json["code"]) == (400, "invalid_request")
    assert "no record batches" in raw.json["detail"]
