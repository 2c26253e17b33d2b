"""`pxrs dlq`."""

from __future__ import annotations

import os
import pty
from typing import Any

import pytest

import pxrs
from support.child import PATIENCE
from support.command import Run, Shell, parsed

pytestmark = pytest.mark.engine("sqlite")


@pytest.fixture(autouse=True)
def dead(px: pxrs.Pxrs) -> None:
    """Three dead items in `mail`, and one that lives."""
    for number, error in enumerate(("KeyError: 'total'", "TimeoutError: 30 s", "KeyError: 'tax'")):
        px.put("mail", f"letter {number}", key=f"k{number % 2}", headers=[("trace", b"7")])
        with px.begin() as tx:
            assert tx.take("mail", retry=pxrs.Backoff(attempts=1))
            tx.rollback(error)
    px.put("mail", "alive")


def left(px: pxrs.Pxrs) -> list[int]:
    return [item.id for item in px.queues.dead("mail")]


def test_list(run: Run, px: pxrs.Pxrs) -> None:
    px.queues.create("quiet")
    assert [line.split() for line in run("dlq", "list").stdout.splitlines()] == [
        ["of", "name", "dead"],
        ["queue", "mail", "3"],
    ]
    assert parsed(run("dlq", "list", "--json")) == [{"queue": "mail", "dead": 3}]
    shown = run("dlq", "list", "mail").stdout.splitlines()
    assert shown[0].split() == ["id", "dead", "for", "tried", "key", "error", "value"]
    assert shown[1].split()[-7:] == ["1", "k0", "KeyError:", "'total'", "letter", "0", "trace=7"]
    assert len(shown) == 4
    short = run("dlq", "list", "mail", "--limit", "2")
    assert (len(short.stdout.splitlines()), short.stderr) == (
        3,
        "showed 2; see more with --limit\n",
    )
    empty = run("dlq", "list", "quiet")
    assert (empty.stdout, empty.stderr) == ("", "no matching dead letters of quiet\n")
    px.queues.drop("mail")
    assert "no dead letters" in run("dlq", "list").stderr


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ((), [1, 2, 3]),
        (("--id", "2"), [2]),
        (("--id", "3", "--id", "1"), [1, 3]),
        (("--id", "4"), []),
        (("--key", "k0"), [1, 3]),
        (("--error", "KeyError"), [1, 3]),
        (("--error", "KeyError", "--key", "k1"), []),
        (("--older", "0"), [1, 2, 3]),
        (("--older", "1h"), []),
    ],
)
def test_filters(run: Run, px: pxrs.Pxrs, filters: tuple[str, ...], numbers: list[int]) -> None:
    listed = parsed(run("dlq", "list", "mail", *filters, "--json"))
    assert [item["id"] for item in listed] == numbers
    assert parsed(run("dlq", "drop", "mail", *filters, "--yes", "--json")) == {
        "queue": "mail", "dropped": len(numbers),
    }  # fmt: skip
    assert left(px) == [number for number in (1, 2, 3) if number not in numbers]
    assert px.queues.describe("mail").ready == 1


def test_show(run: Run) -> None:
    shown = run("dlq", "show", "mail", "1").stdout.splitlines()
    assert shown[0] == "mail 1"
    facts: dict[str, Any] = dict(line.split("  ", 1) for line in shown[1 : shown.index("")])
    assert facts["error"].strip() == "KeyError: 'total'"
    assert facts["header trace"].strip() == "7"
    assert facts["deliveries"].strip() == "1"
    assert shown[-1] == "letter 0"
    told = parsed(run("dlq", "show", "mail", "1", "--json"))
    assert (told["value"], told["state"], told["error"], told["key"]) == (
        "letter 0", "dead", "KeyError: 'total'", "k0",
    )  # fmt: skip


def test_redrive(run: Run, px: pxrs.Pxrs) -> None:
    shown = run("dlq", "redrive", "mail", "--error", "Timeout").stdout
    assert shown == "1 item put back into mail\n"
    assert left(px) == [1, 3]
    assert parsed(run("dlq", "redrive", "mail", "--json")) == {"queue": "mail", "redriven": 2}
    assert px.queues.describe("mail").depth == 4
    with px.begin() as tx:
        assert sorted(item.deliveries for item in tx.take_many("mail", 10)) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("list", "nope")),
        (1, ("show", "mail", "4")),
        (1, ("show", "mail", "99")),
        (1, ("redrive", "nope")),
        (1, ("drop", "nope", "--yes")),
        (2, ("list", "--key", "k0")),
        (2, ("list", "mail", "--limit", "0")),
        (2, ("drop", "mail")),
        (2, ("drop", "mail", "--older", "ages", "--yes")),
        (2, ("drop", "mail", "--id", "first", "--yes")),
        (2, ("show", "mail")),
        (2, ("drop",)),
    ],
)
def test_mistakes_change_nothing(
    run: Run, px: pxrs.Pxrs, code: int, arguments: tuple[str, ...]
) -> None:
    result = run("dlq", *arguments, stdin=b"y\n")
    assert (result.exit_code, result.stdout) == (code, "")
    assert left(px) == [1, 2, 3]


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_people_are_asked(shell: Shell, px: pxrs.Pxrs, answer: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    asking = shell.start("dlq", "drop", "mail", "--error", "KeyError", stdin=theirs)
    os.close(theirs)
    os.write(ours, answer)
    _, question = asking.communicate(timeout=PATIENCE)
    os.close(ours)
    assert asking.returncode == code
    assert b"Drop 2 dead items of mail?" in question
    assert left(px) == ([2] if code == 0 else [1, 2, 3])


@pytest.fixture
def letters(px: pxrs.Pxrs) -> None:
    """Two dead messages of topic `orders`."""
    px.topics.create("orders", partitions=2)
    px.topics.create("orders.dlq", partitions=1)
    with px.producer() as producer:
        for number, error in enumerate((b"KeyError: 'total'", b"TimeoutError: 30 s")):
            headers = [
                ("trace", b"7"), ("pxrs-dlq-topic", b"orders"), ("pxrs-dlq-partition", b"1"),
                ("pxrs-dlq-offset", str(number).encode()), ("pxrs-dlq-attempts", b"5"),
                ("pxrs-dlq-group", b"billing"), ("pxrs-dlq-error", error),
                ("pxrs-dlq-traceback", b"Traceback (most recent call last):\n  line"),
            ]  # fmt: skip
            producer.send("orders.dlq", f"order {number}", f"k{number}", headers=headers).result()


@pytest.mark.usefixtures("letters")
def test_messages_of_topics_are_shown_like_items(run: Run) -> None:
    assert parsed(run("dlq", "list", "--json")) == [
        {"queue": "mail", "dead": 3}, {"topic": "orders", "dead": 2},
    ]  # fmt: skip
    shown = run("dlq", "list", "orders").stdout.splitlines()
    assert shown[0].split() == ["id", "dead", "for", "tried", "key", "error", "value"]
    assert shown[1].split()[0] == "0:0"
    assert shown[1].split()[-7:] == ["5", "k0", "KeyError:", "'total'", "order", "0", "trace=7"]
    (one,) = parsed(run("dlq", "list", "orders", "--error", "Timeout", "--json"))
    assert (one["id"], one["topic"], one["partition"], one["deliveries"], one["group"]) == (
        "0:1", "orders", 1, 5, "billing",
    )  # fmt: skip
    assert parsed(run("dlq", "show", "orders", "0:1", "--json")) == one
    assert parsed(run("dlq", "list", "orders.dlq", "--letters", "--id", "0:1", "--json")) == [one]
    shown = run("dlq", "show", "orders", "0:0").stdout.splitlines()
    assert shown[0] == "orders 0:0"
    assert "Traceback (most recent call last):" in "\n".join(shown)
    assert shown[-1] == "order 0"


@pytest.mark.usefixtures("letters")
def test_messages_of_topics_go_back(run: Run, px: pxrs.Pxrs) -> None:
    assert run("dlq", "redrive", "orders").stdout == "2 messages put back into orders\n"
    back = px.reader("orders").read(1, 0)
    assert [(each.key, each.value, each.headers) for each in back] == [
        (b"k0", b"order 0", (("trace", b"7"),)), (b"k1", b"order 1", (("trace", b"7"),)),
    ]  # fmt: skip
    assert parsed(run("dlq", "redrive", "orders", "--json")) == {"topic": "orders", "redriven": 0}
    assert run("dlq", "list", "orders").stderr == "no matching dead letters of orders\n"


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (1, ("show", "orders", "0:7")),
        (1, ("list", "orders.dlq")),
        (2, ("redrive", "orders", "--key", "k0")),
        (2, ("drop", "orders", "--yes")),
        (2, ("redrive", "mail", "--to", "orders")),
        (2, ("show", "mail", "0:1")),
    ],
)
def test_mistakes_with_topics(run: Run, code: int, arguments: tuple[str, ...]) -> None:
    result = run("dlq", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")


@pytest.mark.usefixtures("letters")
def test_a_name_of_both_has_to_be_told_apart(run: Run, px: pxrs.Pxrs) -> None:
    px.queues.create("orders")
    result = run("dlq", "list", "orders")
    assert (result.exit_code, "--queue or --topic" in result.stderr) == (2, True)
    assert parsed(run("dlq", "list", "orders", "--queue", "--json")) == []
    assert len(parsed(run("dlq", "list", "orders", "--topic", "--json"))) == 2
