"""`px.run(processes=N)` with real processes, one of which is killed at work."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pxrs
from pxrs.running.processes import Restarts, Workers
from support.child import PATIENCE, Child
from support.running import Running, wait_for_checkpoints

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long]

COUNT = 60
_px: pxrs.Pxrs | None = None


def handle(message: pxrs.Message) -> None:
    """In a worker process: tell who has handled what, durably, through a topic."""
    global _px
    if _px is None:
        _px = pxrs.connect(os.environ["PXRS_TEST_URL"])
    with _px.producer() as producer:
        producer.send("done", f"{os.getpid()} {message.value}").result()


def give_up(message: pxrs.Message) -> None:
    raise ValueError("no")


def leave(message: pxrs.Message) -> None:
    sys.exit(3)


def stay(number: int) -> None:
    """In a worker process: until it is told to end."""
    signal.pause()


class Fickle:
    """Can be sent to the first worker, and not to the second."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, number: int) -> None:
        raise AssertionError

    def __reduce__(self) -> tuple[Any, ...]:
        self.sent += 1
        if self.sent > 2:
            raise OSError("no more memory")
        return operator.itemgetter(0), ((stay,),)


def run_processes(url: str, handler: str) -> None:
    """In a child: the parent of the worker processes."""
    os.environ["PXRS_TEST_URL"] = url
    with pxrs.connect(url) as px:
        px.run(
            globals()[handler],
            topic="orders",
            group="g",
            processes=2,
            retry=pxrs.Backoff(attempts=1),
            on_failure=pxrs.Stop(),
            serde=pxrs.JSON(),
        ).join()


@pytest.fixture
def px(tmp_path: Path) -> Iterator[pxrs.Pxrs]:
    with pxrs.connect(f"sqlite:///{tmp_path}/run.db") as px:
        px.topics.create("orders", partitions=8)
        px.topics.create("done", partitions=1)
        yield px


def send(px: pxrs.Pxrs, start: int) -> None:
    with px.producer() as producer:
        for number in range(start, start + COUNT):
            producer.send("orders", str(number), partition=number % 8)


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(px: pxrs.Pxrs) -> None:
    handled: set[int] = set()
    pids: set[int] = set()
    with Child(run_processes, px.url, "handle") as parent:
        number = 0
        done = px.reader("done").follow(start="earliest", timeout=PATIENCE)
        while len(pids) < 2:
            # Until both have partitions.
            send(px, number)
            number += COUNT
            while len(handled) < number:
                pid, value = map(int, next(done).value.split())
                pids.add(pid)
                handled.add(value)
        before = set(pids)
        os.kill(min(before), signal.SIGKILL)
        while pids == before:
            # Another one takes its place, and gets a share.
            send(px, number)
            number += COUNT
            while len(handled) < number:
                pid, value = map(int, next(done).value.split())
                pids.add(pid)
                handled.add(value)
        parent.signal(signal.SIGTERM)
        assert parent.join() == 0
    assert handled == set(range(number))
    info = px.groups.describe("g")
    assert (info.lag, info.members) == (0, ())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_handler_that_gives_up_ends_them_all(px: pxrs.Pxrs) -> None:
    send(px, 0)
    with pytest.raises(pxrs.HandlerFailed, match=r"failed once on 'orders' partition . offset 0"):
        run_processes(px.url, "give_up")
    assert px.groups.describe("g").members == ()
    assert px.groups.describe("g").lag == COUNT


def test_a_handler_that_ends_the_program_ends_them_all(px: pxrs.Pxrs) -> None:
    send(px, 0)
    with pytest.raises(pxrs.HandlerFailed, match="the handler raised SystemExit"):
        run_processes(px.url, "leave")
    assert px.groups.describe("g").members == ()


def test_what_would_fail_again_is_not_tried_again(px: pxrs.Pxrs) -> None:
    with pytest.raises(pxrs.TopicNotFound, match="'nowhere'"):
        px.run(handle, topic="nowhere", group="g", processes=2).join()


def test_a_handler_that_can_not_be_imported_is_refused(px: pxrs.Pxrs) -> None:
    with pytest.raises(pxrs.InvalidRequest, match=r"handler=<function .*not a lambda"):
        px.run(lambda message: None, topic="orders", group="g", processes=2).join()
    assert px.groups.list() == []


class Unsendable(pxrs.JSON):
    def __reduce__(self) -> str:
        raise TypeError("a socket")


@pytest.mark.parametrize("name", ["serde", "key_serde"])
def test_what_can_not_be_sent_is_named(px: pxrs.Pxrs, name: str) -> None:
    options: dict[str, Any] = {name: Unsendable()}
    with pytest.raises(pxrs.InvalidRequest, match=rf"^{name}=<.*: a socket"):
        px.run(handle, topic="orders", group="g", processes=2, **options).join()
    if name == "serde":
        with pytest.raises(pxrs.InvalidRequest, match=r"^serde=<.*: a socket"):
            px.listen("inbox", print, processes=2, serde=Unsendable())


def test_json_can_be_sent() -> None:
    for serde in (pxrs.JSON(list[int]), copy.deepcopy(pxrs.JSON(list[int]))):
        sent = pickle.loads(pickle.dumps(serde))
        assert sent.decode(sent.encode([1])) == [1]
        with pytest.raises(msgspec.ValidationError):
            sent.decode(b'"no list"')


def test_a_program_that_starts_itself_is_told_what_is_missing(px: pxrs.Pxrs) -> None:
    folder = Path(px.url.removeprefix("sqlite:///")).parent
    (folder / "program.py").write_text(
        "import pxrs\n"
        f"px = pxrs.connect({px.url!r})\n"
        "px.run(print, topic='orders', group='g', processes=1).join()\n"
    )
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 1
    assert "under `if __name__ == '__main__':`" in ended.stderr.splitlines()[-1]


def test_one_that_can_not_be_started_leaves_none_behind() -> None:
    workers = Workers(Fickle(), 2)
    with pytest.raises(OSError, match="memory"):
        workers.run()
    [first] = workers._workers.values()
    first.process.join(PATIENCE)
    assert first.has_ended
    first.reports.close()


def die_of_7(message: pxrs.Message) -> None:
    """In a worker process: one message kills it, whatever else is in hand."""
    if message.value == b"7":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_message_that_kills_its_process_is_put_aside(
    px: pxrs.Pxrs, caplog: pytest.LogCaptureFixture
) -> None:
    send(px, 0)
    twice = pxrs.Backoff(attempts=2, first=0.0)
    running = Running(px, die_of_7, topic="orders", processes=1, workers=4, retry=twice)
    wait_for_checkpoints(px, COUNT)
    px.stop()
    running.join()
    assert running.error is None
    (letter,) = px.reader("orders.dlq").follow(start="earliest", timeout=0)
    assert letter.value == b"7"
    error = dict(letter.headers)["pxrs-dlq-error"] or b""
    assert b"2 worker processes have died" in error
    deaths = [each.message for each in caplog.records if each.name == "pxrs.processes"]
    assert all("'orders' partition 7 offset 0" in each for each in deaths)
    # Two times it was alone; the first time others may have been in hand, too.
    alone = [each.count("offset") == 1 for each in deaths]
    assert alone in ([True, True], [False, True, True])


class Mortal:
    """Dies of this and that, and gives up in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int) -> None:
        lives = len(list(self.folder.iterdir()))
        (self.folder / str(lives)).touch()
        if lives == 0:
            os._exit(7)
        if lives == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise pxrs.InvalidRequest("enough")


def test_each_death_is_told_and_the_pauses_grow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(pxrs.InvalidRequest, match="enough"):
        Workers(Mortal(tmp_path), 1).run()
    told = [re.sub(r".*pid \d+\) ", "", each.message) for each in caplog.records]
    assert told == [
        "ended with exit code 7; another one is started in 0.5 s",
        "was killed by SIGKILL; another one is started in 1 s",
    ]


def test_whoever_lived_long_is_replaced_soon() -> None:
    restarts = Restarts()
    pauses = [restarts.pause(0, lived=1.0) for _ in range(9)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.5, 30.0)
    assert restarts.pause(1, lived=1.0) == 0.5
    assert restarts.pause(0, lived=3600.0) == 0.5


def test_an_interrupt_finds_no_worker_at_its_imports(px: pxrs.Pxrs) -> None:
    with px.producer() as producer:
        producer.send("orders", "1")
    folder = Path(px.url.removeprefix("sqlite:///")).parent
    (folder / "program.py").write_text(
        "import os, signal\n"
        "if __name__ == '__mp_main__':\n"
        "    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does\n"
        "import pxrs\n"
        "def handle(message):\n"
        "    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    print('handled', flush=True)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
        "if __name__ == '__main__':\n"
        f"    with pxrs.connect({px.url!r}) as px:\n"
        "        px.run(handle, topic='orders', group='g', processes=1).join()\n"
        "    print('ended')\n"
    )
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(ended.stdout.split()) == {"handled", "ended"}
