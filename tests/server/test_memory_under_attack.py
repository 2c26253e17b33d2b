"""What a real node needs for clients that mean harm: it stays below a bound, and serves others."""

from __future__ import annotations

import gzip
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import pxrs
from pxrs.client import frames as protocol
from pxrs.config import parse_url, remote_settings
from pxrs.stores.open import open_stores
from pxrs.stores.remote import wire
from pxrs.stores.remote.stores import RemoteStores
from pxrs.types import LogPartition, Put
from support import rpc, websocket
from support.child import PATIENCE
from support.http2 import Http2, message
from support.node import NodeProcess
from support.websocket import RawStream

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.long, pytest.mark.thorough]

MB = 2**20
_INFLIGHT = 64 * MB
# What is needed beside the bytes that are counted: buffers, copies, fragments.
_BESIDE = 120 * MB


class Attacked:
    """A node in a process of its own, with a few large things in its store, and a good client."""

    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder}/node.db"
        with pxrs.connect(url) as px:
            self.topic = px.topics.create("large", 1)
            with px.producer() as producer:
                for _ in range(40):
                    producer.send("large", bytes(MB - 1000))
        stores = open_stores(url)
        for number in range(100):
            stores.coord.commit((), (Put(f"large/{number:03}", bytes(MB)),))
        stores.close()
        with pxrs.connect(url) as px:
            px.kv.put("large", bytes(MB))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rpc = f"127.0.0.1:{free.getsockname()[1]}"
        self.node = NodeProcess(url, "--grpc-listen", self.rpc, max_inflight=_INFLIGHT)
        self.address = str(self.node.endpoint)
        self.good = RemoteStores(remote_settings(parse_url(f"pxrs://{self.address}?timeout=20")))
        self.serve_a_good_client()
        self.before = self._status("VmRSS") * 1024
        self._stop = threading.Event()
        self._served = threading.Condition()
        self._rounds = 0
        self.slowest = 0.0
        self.failure: BaseException | None = None
        self._client = threading.Thread(target=self._serve, daemon=True)
        self._client.start()

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.node.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+)", text)
        assert found is not None
        return int(found[1])

    @property
    def peak(self) -> int:
        """The most that the process has ever had, in bytes."""
        return self._status("VmHWM") * 1024

    @property
    def threads(self) -> int:
        return self._status("Threads")

    def serve_a_good_client(self) -> None:
        coord = self.good.coord
        coord.commit((), (Put("good", b"x"),))
        assert coord.get("good") is not None
        assert self.good.log.fetch(LogPartition(self.topic.id, 0), 3, 1000).batches

    def _serve(self) -> None:
        try:
            while not self._stop.wait(0.05):
                began = time.monotonic()
                self.serve_a_good_client()
                with self._served:
                    self.slowest = max(self.slowest, time.monotonic() - began)
                    self._rounds += 1
                    self._served.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised below
            with self._served:
                self.failure = error
                self._served.notify_all()

    def await_rounds(self, count: int) -> None:
        """Return when the good client has been served so often from now on."""
        with self._served:
            wanted = self._rounds + count
            done = self._served.wait_for(
                lambda: self._rounds >= wanted or self.failure is not None, 2 * PATIENCE
            )
        if self.failure is not None:
            raise self.failure
        assert done, "others are not served"

    def check(self, most: int, threads: int = 120) -> None:
        """Nobody was kept out, and the node has needed so many bytes more, and such threads."""
        self.await_rounds(10)
        needed, now = self.peak - self.before, self.threads
        print(
            f"\nfrom {self.before / MB:.0f} MB {needed / MB:.0f} MB more at most, {now} threads, "
            f"the good client waited {self.slowest:.2f} s at most in {self._rounds} rounds"
        )
        assert needed < most
        assert now < threads

    def close(self) -> str:
        self._stop.set()
        self._client.join(30)
        self.good.close()
        log = self.node.terminate()
        if self.failure is not None:
            raise self.failure
        return log


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path)
    yield attacked
    log = attacked.close()
    assert "Traceback" not in log, log


def calls(name: str, count: int, *given: object, first: int = 1) -> bytes:
    method = wire.METHODS[name]
    arguments = method.encode(list(given))
    entries = [(first + number, name, arguments) for number in range(count)]
    return b"".join(websocket.message(each) for each in protocol.encode_calls(entries))


@pytest.mark.parametrize("name", ["log.fetch", "coord.list", "coord.get", "norikv"])
def test_answers_that_are_not_read(attacked: Attacked, name: str) -> None:
    """Each of ten clients asks for 40 MB a thousand times, or the like, and reads nothing."""
    asked = {
        "log.fetch": lambda: calls(name, 1000, LogPartition(attacked.topic.id, 0), 0, 40 * MB),
        "coord.list": lambda: calls(name, 1000, "large/", None, None),
        "coord.get": lambda: calls(name, 1000, "large/001"),
    }
    with ExitStack() as stack:
        for _ in range(10):
            if name != "norikv":
                stream = stack.enter_context(RawStream(attacked.address))
                stream.socket.sendall(asked[name]())
                continue
            client = stack.enter_context(Http2(attacked.rpc, window=0))
            for _ in range(100):
                call = client.open("/norikv.v1.Kv/Get")
                client.send(call, message(rpc.get(b"large")), end=True)
        attacked.check(_INFLIGHT + _BESIDE)


def test_frames_of_which_a_half_comes(attacked: Attacked) -> None:
    half = websocket.message(bytes(protocol.MOST_FRAME_BYTES))[
        : protocol.MOST_FRAME_BYTES * 9 // 10
    ]
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(RawStream(attacked.address)).socket.sendall(half)
        attacked.check(200 * protocol.MOST_FRAME_BYTES + _BESIDE)


def test_calls_of_which_some_pieces_come(attacked: Attacked) -> None:
    with ExitStack() as stack:
        for number in range(200):
            stream = stack.enter_context(RawStream(attacked.address))
            piece = protocol.encode_frame(
                [(number, protocol.PIECE, wire.METHODS["coord.get"].encode(["a"]))]
            )
            stream.send(piece)
        attacked.check(_INFLIGHT + _BESIDE)


def test_many_watches_and_sessions(attacked: Attacked) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stream = stack.enter_context(RawStream(attacked.address))
            for number in range(1100):
                where = [f"{number}/{name}/" for name in range(20)]
                stream.socket.sendall(
                    calls("node.watch_records", 1, number, where, first=number + 1)
                )
            stream.socket.sendall(calls("node.open_session", 100, 5.0))
        attacked.check(_INFLIGHT + _BESIDE)


def test_many_calls_and_many_entries(attacked: Attacked) -> None:
    """Bytes that become very many objects."""
    many = b"\xdd" + (2**18).to_bytes(4)
    frame = many + b"\x93\x00\xa0\xc0" * 2**18
    checks = b"\x92" + many + b"\x92\xa0\x00" * 2**18 + b"\x90"
    commit = b"\x91\x93\x01\xaccoord.commit" + checks
    with ExitStack() as stack:
        for sent in (frame, commit):
            for _ in range(20):
                stack.enter_context(RawStream(attacked.address)).send(sent)
        attacked.check(_INFLIGHT + _BESIDE)


def test_bombs_of_compressed_bytes(attacked: Attacked) -> None:
    """A stream offers no compression, so a message that says it is compressed ends it."""
    bomb = gzip.compress(bytes(100 * MB))
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(Http2(attacked.rpc))
            call = client.open("/norikv.v1.Kv/Put", (b"grpc-encoding", b"gzip"))
            client.send(call, message(bomb, compressed=True), end=True)
            offer = "Sec-WebSocket-Extensions: permessage-deflate"
            stream = stack.enter_context(RawStream(attacked.address, offer))
            stream.socket.sendall(websocket.message(zlib.compress(bytes(100 * MB)), first=0xC0))
        attacked.check(_BESIDE)
