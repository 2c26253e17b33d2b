"""A program that ends without closing its producer: what it sent is there, or it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pxrs
from support.child import PATIENCE
from support.reading import read_all

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

BLOCKING = """
import pxrs
px = pxrs.connect("sqlite:///store.db?busy_timeout=0.1")
producer = px.producer(linger=600, delivery_timeout={delivery_timeout})
for number in range(1000):
    producer.send("orders", str(number), key="k")
"""

AIO = """
import asyncio
from pxrs import aio

async def main():
    px = await aio.connect("sqlite:///store.db")
    producer = px.producer(linger=600)
    for number in range(1000):
        await producer.send("orders", str(number), key="k")

asyncio.run(main())
"""

FORKED = """
import os
pid = os.fork()
if pid:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.fixture(autouse=True)
def topic(tmp_path: Path) -> None:
    with pxrs.connect(f"sqlite:///{tmp_path}/store.db") as px:
        px.topics.create("orders", partitions=2)


def stderr_of(program: str, folder: Path, *flags: str, code: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, *flags, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == code, ended.stderr
    return ended.stderr


def found(folder: Path) -> list[int]:
    with pxrs.connect(f"sqlite:///{folder}/store.db") as px:
        return [int(message.value) for message in read_all(px, "orders")]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (BLOCKING.format(delivery_timeout=60), 0),
        (AIO, 0),
        (BLOCKING.format(delivery_timeout=60) + "raise SystemExit(3)", 3),
        (BLOCKING.format(delivery_timeout=60) + FORKED, 0),
    ],
    ids=["blocking", "aio", "exit code", "forked"],
)
def test_what_was_sent_is_there(program: str, code: int, tmp_path: Path) -> None:
    stderr = stderr_of(program, tmp_path, "-W", "default::ResourceWarning", code=code)
    assert found(tmp_path) == list(range(1000))
    assert stderr.count("ResourceWarning: a producer was not closed") == 1
    assert "1,000 messages to 'orders'" in stderr


def test_a_warning_that_is_an_error_loses_nothing(tmp_path: Path) -> None:
    program = BLOCKING.format(delivery_timeout=60) + "px.producer().send('orders', '1000', 'k')"
    assert "ResourceWarning" in stderr_of(program, tmp_path, "-W", "error")
    assert sorted(found(tmp_path)) == list(range(1001))


@pytest.mark.parametrize("end", ["producer.close()", "px.close()", "producer.flush()"])
def test_nobody_is_warned_who_has_nothing_left(end: str, tmp_path: Path) -> None:
    program = BLOCKING.format(delivery_timeout=60) + end
    assert stderr_of(program, tmp_path, "-W", "error") == ""
    assert found(tmp_path) == list(range(1000))


@pytest.mark.parametrize(
    ("delivery_timeout", "patience"), [(0.3, 60), (60, 0.3)], ids=["given up", "no more time"]
)
def test_a_locked_store_is_an_error_in_the_log(
    delivery_timeout: float, patience: float, tmp_path: Path
) -> None:
    program = f"import pxrs.producing.producer as endings; endings.PATIENCE = {patience}\n"
    program += BLOCKING.format(delivery_timeout=delivery_timeout)
    # The topic is looked up before another program takes the file.
    program += "import sqlite3; other = sqlite3.connect('store.db', isolation_level=None)\n"
    program += "other.execute('BEGIN IMMEDIATE')"
    assert "not delivered: 1,000 messages to 'orders'" in stderr_of(program, tmp_path)
    assert found(tmp_path) == []


def test_a_store_that_was_closed_is_an_error_in_the_log(tmp_path: Path) -> None:
    program = BLOCKING.format(delivery_timeout=60) + "px.stores.close()"
    stderr = stderr_of(program, tmp_path)
    assert "not delivered: 1,000 messages to 'orders'" in stderr
    assert "closed" in stderr
