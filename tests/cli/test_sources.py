"""`pxrs sources`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import pxrs
from support.command import Run, parsed

ATTACH = ("sources", "attach", "events", "-p", "4", "--key", "account")
VALUES = ("--value", "payload", "--value", "part")


@pytest.fixture
def table(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "cli.db")) as db:
        db.execute(
            """CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT,
                payload TEXT, part INTEGER)"""
        )
        db.executemany(
            "INSERT INTO events (account, payload, part) VALUES (?, 'x', ?)",
            [(f"account-{number}", number % 4) for number in range(10)],
        )
        db.commit()


@pytest.mark.engine("sqlite")
@pytest.mark.usefixtures("table")
def test_attach_list_describe_detach(run: Run) -> None:
    assert run(*ATTACH, *VALUES).stdout == "events: 4 partitions over table events\n"
    assert [line.split() for line in run("sources", "list").stdout.splitlines()] == [
        ["topic", "partitions", "source", "prepared"],
        ["events", "4", "table", "events", "no"],
    ]
    shown = run("sources", "describe", "events").stdout.splitlines()
    assert shown[0] == "events: 4 partitions over table events"
    assert shown[2] == "end 11, final 11"
    assert ["value", "payload,", "part"] in [line.split() for line in shown]
    found = run("consume", "events", "--group", "billing", "--max", "10", "--json").stdout
    assert len(found.splitlines()) == 10
    assert run("sources", "detach", "events", "--yes").stdout == "events detached\n"
    empty = run("sources", "list")
    assert (empty.stdout, "no sources" in empty.stderr) == ("", True)


@pytest.mark.engine("sqlite")
@pytest.mark.usefixtures("table")
def test_json(run: Run) -> None:
    attached = parsed(run(*ATTACH, "--value", "payload", "--partition", "part", "--json"))
    assert attached["source"] == {
        "kind": "table", "name": "events", "offset": "id", "key": "account", "value": ["payload"],
        "partition": "part",
    }  # fmt: skip
    assert parsed(run("sources", "list", "--json")) == [attached]
    described = parsed(run("sources", "describe", "events", "--json"))
    assert (described["topic"], described["end"], described["final"]) == (attached, 11, 11)
    printed = parsed(run("sources", "prepare", "events", "--json"))
    assert printed["applied"] is False
    assert printed["statements"][0].startswith("CREATE INDEX")
    assert parsed(run("sources", "prepare", "events", "--apply", "--json"))["applied"] is True
    assert parsed(run("sources", "prepare", "events", "--json"))["statements"] == []
    assert parsed(run("sources", "detach", "events", "--yes", "--json")) == {"detached": "events"}


@pytest.mark.engine("sqlite")
@pytest.mark.usefixtures("table")
def test_what_can_not_be_done(run: Run, px: pxrs.Pxrs) -> None:
    px.topics.create("real", partitions=1)
    for arguments, why in [
        ([*ATTACH, "--value", "nothing"], "has no column 'nothing'"),
        ([*ATTACH, "--value", "payload", "--settle", "soon"], "must be a duration"),
        (["sources", "describe", "nothing"], "'nothing' does not exist"),
        (["sources", "detach", "real", "--yes"], "'real' does not exist"),
        (["sources", "prepare", "real"], "'real' does not exist"),
        (["sources", "attach", "events", "-p", "4"], "Missing option '--value'"),
    ]:
        result = run(*arguments)
        assert result.exit_code != 0
        assert why in result.stderr
    assert run(*ATTACH, "--value", "payload").exit_code == 0
    refused = run("sources", "prepare", "events")
    assert "SQLite has no md5" in refused.stderr
    assert px.topics.find("real").partitions == 1


@pytest.mark.engine("postgres")
def test_prepare_prints_and_applies(run: Run, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as db:
        db.execute("CREATE TABLE events (id bigserial PRIMARY KEY, account text, payload text)")
    at = ("--url", postgres_url)
    run(*ATTACH, "--value", "payload", *at)
    printed = run("sources", "prepare", "events", *at)
    assert "nothing was changed" in printed.stderr
    applied = run("sources", "prepare", "events", "--apply", *at)
    assert applied.stdout == printed.stdout
    assert "yes" in run("sources", "list", *at).stdout
    again = run("sources", "prepare", "events", *at)
    assert (again.stdout, "nothing is missing" in again.stderr) == ("", True)
    with psycopg.connect(postgres_url) as db:
        assert db.execute("SELECT pxrs_partition FROM events").fetchall() == []


@pytest.mark.engine("sqlite")
@pytest.mark.usefixtures("table")
def test_relay(run: Run) -> None:
    run(*ATTACH, "--value", "payload")
    run("topics", "create", "orders", "-p", "2")
    relay = ("sources", "relay", "events", "orders", "--timeout", "2")
    assert run(*relay).stdout == "10 messages copied to orders\n"
    assert parsed(run(*relay, "--json")) == {"copied": 0}
    assert len(run("read", "orders", "--json").stdout.splitlines()) == 10
