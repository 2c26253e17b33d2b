"""The codec is loaded at first use, and first uses come in several threads at once."""

from __future__ import annotations

import builtins
import threading
from typing import Any

from pxrs.log.batches import encode
from support.child import Child
from support.inside import say


def encode_in_threads() -> None:
    """Say how many threads were importing the codec's package at once, at most."""
    original = builtins.__import__
    inside: set[int] = set()
    most = [0]

    def watched(name: str, *args: Any) -> Any:
        me = threading.get_ident()
        if not name.startswith("aiokafka") or me in inside:
            return original(name, *args)
        inside.add(me)
        most[0] = max(most[0], len(inside))
        try:
            return original(name, *args)
        finally:
            inside.discard(me)

    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        encode([(None, b"v", [], 0)])

    setattr(builtins, "__import__", watched)  # noqa: B010
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(most[0])


def test_threads_that_are_the_first_to_use_the_codec_at_once() -> None:
    """Its modules import each other: two threads in the middle of that meet half a module."""
    with Child(encode_in_threads) as child:
        assert child.read() == 1
